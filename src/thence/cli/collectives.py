"""``thence collectives``: sizes, bandwidths, exposed time and waits of collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options, warm_up_option
from thence.cli.output import Result, result_options
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.trace import Trace

__all__ = ["command"]

_EXAMPLES = """\b
Examples:
  thence collectives traces/                      every rank of a torch.profiler job
  thence collectives rank*.zip --format json
Bandwidths are decimal GB/s. Exposed is the time in which no other work ran on the
device; hidden is the rest. Wait is last start less first start among the ranks.
"""

_HEADINGS = {
    "collective": "collective",
    "bytes": "message",
    "group_size": "ranks",
    "count": "count",
    "exposed_ns": "exposed",
    "hidden_ns": "hidden",
    "algorithm_gbps_mean": "alg GB/s",
    "bus_gbps_mean": "bus GB/s",
    "wait_ns_mean": "mean wait",
}


@click.command("collectives", epilog=_EXAMPLES)
@trace_options("rank", "device", "steps", "window", "only", "hlo")
@warm_up_option
@result_options()
def command(inputs: Inputs, warm_up: str, result: Result) -> None:
    """Collectives: message size, bandwidth, exposed and hidden time, waits."""
    trace = inputs.open()
    times = trace.collective_times(warm_up)
    notes = (*trace.soundness.lines, times.phases.statement, _clocks(trace), *trace.meta.warnings)
    document = times.to_json() | {"soundness": trace.soundness.findings_json()}
    result.emit(document, times.by_size, _HEADINGS, notes)


def _clocks(trace: Trace) -> str:
    """A note on the alignment of the ranks' clocks."""
    if len(trace.attributed.ranks) == 1:
        return "waits are among the devices of one process, which share a clock"
    alignment = trace.alignment
    if alignment.residual_median_ns is None or alignment.residual_max_ns is None:
        return (
            "the ranks share no collectives: their clocks are not aligned, and waits mean nothing"
        )
    median, most = format_ns(alignment.residual_median_ns), format_ns(alignment.residual_max_ns)
    return f"clocks aligned by {alignment.matched:,} shared collectives; what is left: median {median}, at most {most}"
