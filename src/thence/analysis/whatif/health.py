"""Whether the graph of a program explains its trace, and by how much predictions from it may err.

An interval joins three errors that do not depend on each other, as the root of the sum of their squares:

- `LEAST_NOISE` of the step, or the standard deviation of the steps where that is more.
- What the step takes longer where the host works slower by `HOST_NOISE`, of the program as recorded or as changed,
  whichever is more: a run of the same program repeats the work of its device, but its host is faster or slower by some
  percent, and nothing in one trace tells by how much.
- By how much the gain differs where the host is faster, or slower, in both runs than in the trace: by `PACE_NOISE`, or
  by what its pace differed by within the trace where that is more (`thence.analysis.whatif.host_pace`). A step that
  the device decides hides how fast its host is, and shows it as soon as the work of the device is gone.

The first two constants are of 40 runs of changed programs on H200s, none of them of those that benchmarks/gpu_whatif.py
makes: of 13 whose step the host decided, predictions of 12 were within 9 % of it. The third is of 92 traces of three
programs, 19 to 30 of each in one process: from trace to trace the pace of the host had a standard deviation of 18 to
22 %, for the same calls, and of 4 to 15 % within one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.steps.windows import steps
from thence.analysis.whatif.graph import longer_host_work
from thence.analysis.whatif.host_pace import host_pieces, pace_spread
from thence.analysis.whatif.replay import replayed
from thence.errors import MissingData
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.replay import Graph
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = [
    "HOST_NOISE",
    "LEAST_NOISE",
    "MOST_UNEXPLAINED",
    "PACE_NOISE",
    "Health",
    "at_pace",
    "health",
    "ranks_of_nodes",
    "steps_took",
]

MOST_UNEXPLAINED = 0.05
"""Share of the time by which activities began later than the graph explains, above which nothing is predicted."""
LEAST_NOISE = 0.04
"""Half of the width of an interval at least, as a share of the step."""
HOST_NOISE = 0.08
"""By how much the work of the host differs from run to run at least, as a share of it."""
PACE_NOISE = 0.2
"""By how much the pace of the host differs from trace to trace at least, as a share of it."""
_LATE_NS = 20_000


@dataclass(frozen=True)
class Health:
    """Whether the graph explains the trace.

    Attributes:
        unexplained: share of the time by which activities began over 20 us later than it explains.
        inferred: share of the waits for events whose record is inferred or unknown.
        noise: half of the width of intervals at least, as a share of the step.
        spread: the part of that which is not the host's.
        pace: by how much the host may be faster or slower than in the trace, as a share of it.
        counted: nodes of the steps and before them; all where there are none.
    """

    unexplained: float
    inferred: float
    noise: float
    spread: float
    pace: float
    counted: Mask = field(repr=False, compare=False)


def health(trace: Attributed, program: Program) -> Health:
    """Whether the graph explains the trace, and how much predictions may err."""
    delay = program.graph.delay[program.is_activity]
    span = int(program.graph.time.max(initial=0)) * max(
        trace.gpu.select("rank", "device").n_unique(), 1
    )
    late = int(delay[delay > _LATE_NS].sum())
    counted = _counted_nodes(trace, program)
    duration = program.gpu[1] - program.gpu[0]
    took = steps_took(program, program.graph.time, duration, counted)
    slower = replayed(at_pace(program, program.graph, HOST_NOISE))
    longer = steps_took(program, slower, duration, counted) - took
    spread = _spread_of_steps(trace)
    pace = max(PACE_NOISE, pace_spread(host_pieces(trace, program)))
    noise = math.hypot(spread, longer / max(took, 1))
    return Health(late / max(span, 1), program.inferred, noise, spread, pace, counted)


def _spread_of_steps(trace: Attributed) -> float:
    """The standard deviation of the steps as a share of their mean, `LEAST_NOISE` at least."""
    try:
        frame = steps(trace).frame
    except MissingData:
        return LEAST_NOISE
    steady = frame.filter(~pl.col("first"))["duration"].to_numpy()
    if len(steady) < 2:
        return LEAST_NOISE
    return max(LEAST_NOISE, float(np.std(steady, ddof=1) / max(float(np.mean(steady)), 1)))


def at_pace(program: Program, graph: Graph, share: float) -> Graph:
    """The graph where the work of the host takes longer by that share of it.

    Args:
        program: as recorded.
        graph: of it, or of it with a change.
        share: of the work of the host; below 0 it takes less.
    """
    weight = longer_host_work(program, graph.weight, share)
    return replace(graph, weight=weight, shared=graph.order)


def _counted_nodes(trace: Attributed, program: Program) -> Mask:
    """As `Health.counted`.

    On the host those until the last step of their rank ended, on the device those that were launched until then:
    what the program does behind its last step is in none.
    """
    time = program.graph.time
    result = np.ones(len(time), np.bool_)
    rows = np.flatnonzero((trace.host["category"] == "step").to_numpy())
    if not len(program.steps):
        return result
    ranks, end = trace.host["rank"].to_numpy(), program.host[1]
    at = time.copy()
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    known = launch != NO_ROW
    launched = program.gpu[0].copy()
    launched[known] = program.host[0][launch[known]]
    on_device = program.thread == NO_ROW
    at[on_device] = launched[program.row[on_device]]
    of_node = ranks_of_nodes(trace, program)
    for rank in np.unique(ranks[rows]):
        result[(of_node == rank) & (at > end[rows[ranks[rows] == rank]].max())] = False
    return result


def ranks_of_nodes(trace: Attributed, program: Program) -> Int64:
    """The rank of each node."""
    on_host = program.thread != NO_ROW
    result = np.empty(len(on_host), np.int64)
    for where, frame in ((on_host, trace.host), (~on_host, trace.gpu)):
        result[where] = frame["rank"].to_numpy()[program.row[where]]
    return result


def steps_took(program: Program, time: Int64, duration: Int64, counted: Mask) -> int:
    """From the first step's begin, or the first node, to the end of all nodes that count, in ns."""
    begin = time[program.steps[0]] if len(program.steps) else time.min()
    ends = time.copy()
    ends[program.node_of_activity] += np.where(program.end_of_activity == NO_ROW, duration, 0)
    return int(ends[counted].max(initial=int(begin))) - int(begin)
