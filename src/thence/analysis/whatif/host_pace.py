"""The speed of the host: its variation for the same work, and the host's work as it is without being recorded.

A piece is the work of a thread from one launching call to its next one, without another node of the graph in between,
such as a wait or the start of a step. Pieces are of one kind if their first calls launch the same kernel, and their
last calls as well. A program that repeats its steps repeats its pieces, so the duration of a piece, divided by the
median of its kind, is a measure of the host's speed at that time:

    pace of a step of a rank = median over its pieces of (duration / median duration of their kind)

Pauses and other work that only few pieces contain do not change the medians.

Recording makes the host slower. If the recording tells how long a step is without it, one factor is searched: the
host's work between two nodes, of which at most `MAX_SCALED_NS` counts, is multiplied by it, so that the replay of the
unchanged program takes that time. A longer piece contains a pause, a computation or a read, which recording does not
make longer in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.extent import paused
from thence.analysis.steps.plain import plain_step
from thence.analysis.whatif.replay import TOGETHER, replayed, replayed_together
from thence.model.intervals import NO_ROW, covered_lengths
from thence.model.thresholds import MAX_SCALED_NS, MIN_HOST_FACTOR, MIN_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.analysis.whatif.graph import Program
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


_ROUNDS = 3
"""Rounds of the search, each of which divides the range of the factor by 7."""


@dataclass(frozen=True)
class PlainPace:
    """How long a step is without being recorded.

    Attributes:
        share: as a multiple of the recorded step.
        within: half of the width of the interval of the plain step, as a share of it.
    """

    share: float
    within: float

    @classmethod
    def of(cls, trace: Attributed) -> PlainPace | None:
        """That of a recording; None if it holds no plain step, or no recorded ones beside those."""
        step = plain_step(trace.step_times)
        if step is None or step.recorded is None:
            return None
        medians = [max(kind.median_ns, 1.0) for kind in (step.plain, step.recorded)]
        widths = [
            max(kind.high_ns - median, median - kind.low_ns) / median
            for kind, median in zip((step.plain, step.recorded), medians, strict=True)
        ]
        return cls(medians[0] / medians[1], math.hypot(*widths))


def without_pauses(trace: Attributed, program: Program) -> tuple[Program, Int64]:
    """The program without the times in which the recorder left out steps, of which the trace holds nothing.

    Returns:
        The program, in whose graph these times are no work of the host and their steps do not count, while its recorded
        times stay; and the times of all nodes then.
    """
    pauses = paused(trace)
    graph = program.graph
    if pauses.is_empty():
        return program, graph.time
    shift = program.host.start - trace.host["start"].to_numpy()
    weight = graph.weight.copy()
    ranks = trace.host["rank"].to_numpy()
    nodes = np.flatnonzero((program.thread != NO_ROW) & (graph.previous != NO_ROW))
    of_node = ranks[program.row[nodes]]
    typical = program.typical
    for rank, start, end in pauses.group_by("rank").agg("start", "end").rows():
        ours = nodes[of_node == rank]
        if not len(ours):
            continue
        later = shift[program.row[ours[0]]]  # one clock for each rank
        begins, ends = np.array(start, np.int64) + later, np.array(end, np.int64) + later
        covered = covered_lengths(graph.time[graph.previous[ours]], graph.time[ours], begins, ends)
        weight[ours] = np.maximum(weight[ours] - covered, 0)
        if rank == min(trace.ranks):
            begun = graph.time[typical]
            last = np.searchsorted(begins, begun, side="right") - 1
            typical = typical[(last < 0) | (begun >= ends[last])]
    changed = replace(program, typical=typical, graph=replace(graph, weight=weight, shared=graph.order))
    return changed, replayed(changed.graph)


def at_plain_step(
    program: Program, plain: PlainPace, took: Callable[[Int64], int], time: Int64
) -> tuple[Program, float]:
    """The program with the host's work scaled so that its steps take the plain time.

    Work is only made shorter: a plain step that is longer than the recorded one differs by chance.

    Args:
        program: as recorded.
        plain: the plain step.
        took: the time of the steps, ns, if the nodes have these times.
        time: of all nodes, of the program as recorded.

    Returns:
        The program, whose replay takes that time, and whose recorded times stay; and the part of that time by which
        the replay differs from it, because the host does not limit the steps that much.
    """
    graph = program.graph
    target = plain.share * took(time)
    scaled = np.where(program.thread == NO_ROW, 0, np.minimum(graph.weight, MAX_SCALED_NS))
    low, high = MIN_HOST_FACTOR, 1.0
    for _ in range(_ROUNDS):
        factors = np.linspace(low, high, TOGETHER)
        graphs = [
            replace(graph, weight=graph.weight - np.rint(scaled * (1 - factor)).astype(np.int64), shared=graph.order)
            for factor in factors
        ]
        times = np.array([took(time) for time in replayed_together(graphs)])
        # The largest factor with which the steps take no more than that time, or the one closest to it.
        behind = int(np.searchsorted(times, max(target, times[0]), side="right"))
        low, high = (float(factors[at]) for at in (behind - 1, min(behind, len(factors) - 1)))
    best = int(np.argmin(np.abs(times - target)))
    return replace(program, graph=graphs[best]), abs(float(times[best]) / max(target, 1) - 1)


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
        pieces.filter(pl.col("step") > 0, pl.len().over(kind) >= MIN_SAMPLES)
        .with_columns(pace=pl.col("ns") / pl.col("ns").median().over(kind))
        .group_by("rank", "step")
        .agg(pl.col("pace").median(), pieces=pl.len())
        .filter(pl.col("pieces") >= MIN_SAMPLES)
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
