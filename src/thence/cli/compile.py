"""``thence compile``: where XLA's compile time went."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from thence.cli.inputs import Inputs, trace_options
from thence.cli.output import Result, choice_option, document_of, notes_of, result_options
from thence.units import format_ns, several

if TYPE_CHECKING:
    from thence.analysis.programs.compilation import Compilation

_EXAMPLES = """\b
Examples:
  thence compile rank0.zip
  thence compile rank0.zip --autotuning detail --format json
  thence compile rank*.zip                   time of all ranks, of the fastest and the slowest

Compile threads that work at the same time share the wall time, so that the parts add up to the
whole. The table ends at 99 % of it; --top shows more.
"""

_HEADINGS = {"name": "phase", "count": "count", "self_ns": "time", "share": "share"}
_OF_RANKS = {"self_ns_min": "least rank", "self_ns_max": "most rank"}
_SHOWN_SHARE = 0.99


@click.command("compile", epilog=_EXAMPLES)
@trace_options("rank")
@choice_option("--autotuning", choices=("block", "detail"), meaning="Autotuning as one block, or phase by phase.")
@result_options(without=f"as many as hold {100 * _SHOWN_SHARE:.0f} % of the time")
def command(inputs: Inputs, autotuning: str, result: Result) -> None:
    """Compilation: wall time by phase, parallel threads accounted for."""
    trace = inputs.open()
    times = trace.compile_times(autotuning)
    headings = _HEADINGS if times.ranks.height < 2 else _HEADINGS | _OF_RANKS
    if result.top is None:
        result = dataclasses.replace(result, top=times.covering(_SHOWN_SHARE))
    document = document_of(trace, times.to_json())
    result.emit(document, times.phases, headings, notes_of(trace, (_total(times),)))


def _total(times: Compilation) -> str:
    """A sentence on the time of all phases, and of each rank where there are several."""
    total = f"compilation took {format_ns(times.wall_ns)} of wall time in {several(times.programs.height, 'program')}"
    if times.ranks.height < 2:
        return total
    by_rank = times.ranks.sort("total_ns", descending=True)
    (slowest, most), (fastest, least) = by_rank.row(0), by_rank.row(-1)
    return (
        f"{total}, added over {times.ranks.height} ranks: rank {slowest} took the longest "
        f"({format_ns(most)}), rank {fastest} the shortest ({format_ns(least)})"
    )
