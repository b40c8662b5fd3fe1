"""``thence programs``: the executions of XLA programs."""

from __future__ import annotations

import click

from thence.cli.common import (
    emit,
    format_option,
    hlo_option,
    inputs_argument,
    open_with_progress,
    warm_up_option,
)

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
@inputs_argument
@warm_up_option
@hlo_option
@format_option
def command(inputs: tuple[str, ...], warm_up: str, hlo: tuple[str, ...], form: str) -> None:
    """XLA programs: executions, GPU time, idle time inside and between, launch latency."""
    trace = open_with_progress(inputs, hlo)
    result = trace.program_times(warm_up)
    emit(
        result.to_json(),
        result.programs,
        _HEADINGS,
        form,
        (result.phases.statement, *trace.meta.warnings),
    )
