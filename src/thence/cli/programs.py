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
    "gpu_ns_total": "GPU total",
    "gpu_ns_mean": "mean",
    "idle_inside_ns": "idle inside",
    "idle_before_ns": "between",
    "launch_latency_ns_mean": "launch",
    "thunks_mean": "thunks",
    "gpu_ns_std": "std",
}


@click.command("programs", epilog=_EXAMPLES)
@trace_options("rank", "device", "hlo")
@warm_up_option
@result_options()
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """XLA programs: executions, GPU time, idle time inside and between, launch latency."""
    trace = inputs.open()
    times = trace.program_times(warm_up)
    notes = (*trace.soundness.lines, times.phases.statement, *trace.meta.warnings)
    document = times.to_json() | {"soundness": trace.soundness.findings_json()}
    result.emit(document, times.programs, _HEADINGS, notes)
