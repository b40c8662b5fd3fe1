"""The variation of the host's speed for the same work, from step to step and from rank to rank.

A piece is the work of a thread from one launching call to its next one, without another node of the graph in between,
such as a wait or the start of a step. Pieces are of one kind if their first calls launch the same kernel, and their
last calls as well. A program that repeats its steps repeats its pieces, so the duration of a piece, divided by the
median of its kind, is a measure of the host's speed at that time:

    pace of a step of a rank = median over its pieces of (duration / median duration of their kind)

Pauses and other work that only few pieces contain do not change the medians.
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
"""Minimum number of pieces of a kind for a median, and of a step for a pace."""


def host_pieces(trace: Attributed, program: Program) -> pl.DataFrame:
    """The pieces of the host's work.

    Returns:
        rank; step: number of the rank's step that began last before the piece, -1 before the first step; before,
        behind: names of the first activities that the calls at its start and at its end launched; ns: from one call
        to the next.
    """
    graph = program.graph
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    launched = np.flatnonzero(launch != NO_ROW)[::-1]
    first = np.full(trace.host.height, NO_ROW)
    first[launch[launched]] = launched  # descending, so the first activity of a call is kept
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
    """Standard deviation of the pace over all steps of all ranks but each rank's first; 0 if there are too few.

    Args:
        pieces: as `host_pieces` returns them.
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
    """For each of these host rows, the number of the last step of its rank that began before it; -1 if none did."""
    start, ranks = trace.host["start"].to_numpy(), trace.host["rank"].to_numpy()
    result = np.full(len(rows), -1)
    for rank, begins in trace.steps.group_by("rank").agg(pl.col("start").unique().sort()).rows():
        ours = ranks[rows] == rank
        result[ours] = np.searchsorted(np.asarray(begins), start[rows[ours]], side="right") - 1
    return result
