"""``thence programs``: the executions of XLA programs."""

from __future__ import annotations

import dataclasses

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, document_of, notes_of, result_options
from thence.units import several

_EXAMPLES = """\b
Examples:
  thence programs profile_dir/
  thence programs rank0.zip rank1.zip --warm-up keep
  thence programs profile_dir/ --top 40            also programs below 1 % of the time
  thence programs host.xplane.pb --format csv > programs.csv
"""

_HEADINGS = {
    "name": "program",
    "share": "share",
    "executions": "runs",
    "span_ns_total": "span",
    "span_ns_mean": "mean",
    "span_ns_std": "+-",
    "thunks_mean": "thunks",
    "thunks_std": "+-",
    "idle_inside_ns": "idle inside",
    "idle_between_ns": "between",
    "busy_ns_total": "busy",
    "launch_latency_ns_mean": "launch",
}


_RANKED = ("name", "executions", "span_ns_total", "busy_ns_total", "idle_inside_ns")
"""Columns that a narrow terminal shows before others."""


@click.command("programs", epilog=_EXAMPLES)
@trace_options("rank", "device", "program", "hlo")
@warm_up_option
@result_options(without="those of at least 1 % of the time")
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """XLA programs: executions, span and busy time, idle time inside and between, launch latency.

    Shares are of the summed spans of all programs; programs below 1 % are one row, unless --top is given.
    +- is the standard deviation over the executions. The span of an execution includes the idle time inside
    it. Between is the gap since the previous execution on the same device, less other work in it.
    """
    trace = inputs.open()
    times = trace.program_times(warm_up)
    gpus = times.devices.select("rank", "device").n_unique()
    summed = [f"span, idle and busy time are summed over {several(gpus, 'GPU')}"] * (gpus > 1)
    notes = notes_of(trace, (*summed, times.phases.counted_statement))
    if result.top is None:
        result = dataclasses.replace(result, top=times.large)
    result.emit(document_of(trace, times.to_json()), times.programs, _HEADINGS, notes, _RANKED)
