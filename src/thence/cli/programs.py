"""``thence programs``: the executions of XLA programs."""

from __future__ import annotations

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, result_options

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  thence programs profile_dir/
  thence programs rank0.zip rank1.zip --warm-up keep
  thence programs host.xplane.pb --format csv > programs.csv
"""

_HEADINGS = {
    "name": "program",
    "executions": "runs",
    "span_ns_total": "span",
    "busy_ns_total": "busy",
    "span_ns_mean": "mean span",
    "idle_inside_ns": "idle inside",
    "idle_between_ns": "between",
    "launch_latency_ns_mean": "launch",
    "thunks_mean": "thunks",
    "thunks_std": "+-",
    "span_ns_std": "std",
}


@click.command("programs", epilog=_EXAMPLES)
@trace_options("rank", "device", "hlo")
@warm_up_option
@result_options()
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """XLA programs: executions, span and busy time, idle time inside and between, launch latency.

    The span of an execution holds the idle time inside it. Between are the gaps since the execution before
    on the same device, less what else the device did in them.
    """
    trace = inputs.open()
    times = trace.program_times(warm_up)
    notes = (
        *trace.soundness.lines,
        times.phases.counted_statement,
        *trace.meta.notes,
        *trace.meta.warnings,
    )
    document = times.to_json() | {"soundness": trace.soundness.findings_json()}
    result.emit(document, times.programs, _HEADINGS, notes)
