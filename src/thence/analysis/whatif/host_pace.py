"""How fast the host does the same work again: from step to step, and from rank to rank.

A piece is the work of a thread from one call that launches to its next, where no other of the graph's nodes is between,
such as a wait or the begin of a step. Pieces of one kind launch the same before and behind them. A program that repeats
itself repeats its pieces, so what one of them takes, as a multiple of the median of its kind, tells how fast the host
was then:

    pace of a step of a rank = median over its pieces of (duration / median duration of their kind)

Pauses, and other work that few pieces hold, change no median.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.whatif.graph import Program
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]

__all__ = ["host_pieces", "pace_spread"]

_FEW = 8
"""Pieces below which a kind has no median, and a step no pace."""


def host_pieces(trace: Attributed, program: Program) -> pl.DataFrame:
    """The pieces of the host's work.

    Returns:
        rank; step: number of the step of the rank that was the last to begin, -1 before all; before, behind: names of
        what is launched at their ends; ns: from one call to the next.
    """
    graph = program.graph
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    launched = np.flatnonzero(launch != NO_ROW)[::-1]
    first = np.full(trace.host.height, NO_ROW)
    first[launch[launched]] = launched  # of several that one call launched the first one stays
    nodes = np.flatnonzero((program.thread != NO_ROW) & (graph.weight > 0))
    row = program.row[nodes]
    before, behind = first[program.row[graph.previous[nodes]]], first[row]
    chosen = (before != NO_ROW) & (behind != NO_ROW)
    row = row[chosen]
    return pl.DataFrame(
        {
            "rank": trace.host["rank"].gather(row),
            "step": _steps_of(trace, row),
            "before": trace.gpu["name"].gather(before[chosen]),
            "behind": trace.gpu["name"].gather(behind[chosen]),
            "ns": graph.weight[nodes[chosen]],
        }
    )


def pace_spread(pieces: pl.DataFrame) -> float:
    """Standard deviation of the pace over all steps of all ranks, the first ones left out; 0 where there are too few.

    Args:
        pieces: as of `host_pieces`.
    """
    kind = ["before", "behind"]
    paces = (
        pieces.filter(pl.col("step") > 0, pl.len().over(kind) >= _FEW)
        .with_columns(pace=pl.col("ns") / pl.col("ns").median().over(kind))
        .group_by("rank", "step")
        .agg(pl.col("pace").median(), pieces=pl.len())
        .filter(pl.col("pieces") >= _FEW)
    )
    return float(np.std(paces["pace"].to_numpy(), ddof=1)) if paces.height > 1 else 0.0


def _steps_of(trace: Attributed, rows: Int64) -> Int64:
    """For each of these host rows how many steps of its rank began before it, less one."""
    start, ranks = trace.host["start"].to_numpy(), trace.host["rank"].to_numpy()
    steps = np.flatnonzero((trace.host["category"] == "step").to_numpy())
    result = np.full(len(rows), -1)
    for rank in np.unique(ranks[steps]):
        ours = ranks[rows] == rank
        begins = np.sort(start[steps[ranks[steps] == rank]])
        result[ours] = np.searchsorted(begins, start[rows[ours]], side="right") - 1
    return result
