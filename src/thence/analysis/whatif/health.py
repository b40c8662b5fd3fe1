"""Checks whether the graph of a program explains its trace, and estimates the error of predictions from it.

The interval of a prediction combines three independent errors, as the root of the sum of their squares:

- `MIN_NOISE_SHARE` of the step, or the standard deviation of the steps if that is larger.
- The time by which the step is longer if the host is slower by `HOST_NOISE_SHARE`, in the program as recorded or as
  changed, whichever is more. Another run of the same program repeats the work of its device, but its host is faster or
  slower by some percent, and one trace does not tell by how much.
- The difference of the gain if the host is faster, or slower, in both runs than in the trace: by `PACE_NOISE_SHARE`, or
  by the variation of its pace within the trace if that is larger (`thence.analysis.whatif.host_pace`). The time of a
  step that the device bounds does not depend on the speed of its host, until the work of the device is removed.

The first two constants are from 40 runs of changed programs on H200s, none of which is among the programs of
benchmarks/gpu_whatif.py: of 13 whose step was bounded by the host, the predictions of 12 were within 9 % of it. The
third is from 92 traces of three programs, 19 to 30 of each in one process: the pace of the host for the same calls had
a standard deviation of 18 to 22 % from trace to trace, and of 4 to 15 % within a trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from thence.analysis.steps.windows import steps
from thence.analysis.whatif.graph import launched_at, longer_host_work
from thence.analysis.whatif.host_pace import host_pieces, pace_spread
from thence.analysis.whatif.replay import replayed
from thence.errors import MissingData
from thence.model.intervals import NO_ROW
from thence.model.thresholds import HOST_NOISE_SHARE, LATE_START_NS, MIN_NOISE_SHARE, PACE_NOISE_SHARE

if TYPE_CHECKING:
    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.replay import Graph
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


_CALLS = {"waits": "the calls that wait for the device", "launches": "the ends of launches"}
"""Calls without which waiting counts as work of the host: names in the description of a recording, and as texts."""


@dataclass(frozen=True)
class Health:
    """Whether the graph explains the trace.

    Attributes:
        unexplained: sum of the delays of over 20 us by which activities began later than the graph explains, as a
            share of the time.
        inferred: share of the waits for events whose record is inferred or unknown.
        noise: minimum half width of intervals, as a share of the step.
        spread: the part of noise that is not due to the host: the spread of the steps.
        pace: how much faster or slower the host may be than in the trace, as a share of its work.
        counted: mask of the nodes up to the end of the steps; all nodes if there are no steps.
    """

    unexplained: float
    inferred: float
    noise: float
    spread: float
    pace: float
    counted: Mask = field(repr=False, compare=False)


def missing_calls(trace: Attributed) -> list[str]:
    """The calls that a recording by thence does not hold, so that nothing can be predicted; none for other traces."""
    held = [facts["calls"] or () for facts in trace.meta.facts if "calls" in facts]
    return [text for kind, text in _CALLS.items() if any(kind not in calls for calls in held)]


def health(trace: Attributed, program: Program, time: Int64 | None = None) -> Health:
    """Checks whether the graph explains the trace, and estimates the error of predictions.

    Args:
        trace: attributed.
        program: its graph.
        time: times of all nodes, if they are not the recorded ones.
    """
    delay = program.graph.delay[program.is_activity]
    span = int(program.graph.time.max(initial=0)) * max(trace.gpu.select("rank", "device").n_unique(), 1)
    late = int(delay[delay > LATE_START_NS].sum())
    counted = _counted_nodes(trace, program)
    duration = program.gpu.duration
    time = program.graph.time if time is None else time
    took = steps_took(program, time, duration, counted)
    slower = replayed(at_pace(program, program.graph, HOST_NOISE_SHARE))
    longer = steps_took(program, slower, duration, counted) - took
    spread = _spread_of_steps(trace)
    pace = max(PACE_NOISE_SHARE, pace_spread(host_pieces(trace, program)))
    noise = math.hypot(spread, longer / max(took, 1))
    return Health(late / max(span, 1), program.inferred, noise, spread, pace, counted)


def _spread_of_steps(trace: Attributed) -> float:
    """The standard deviation of the steps as a share of their mean, but at least `MIN_NOISE_SHARE`."""
    try:
        steady = steps(trace).typical["duration"].to_numpy()
    except MissingData:
        return MIN_NOISE_SHARE
    if len(steady) < 2:
        return MIN_NOISE_SHARE
    return max(MIN_NOISE_SHARE, float(np.std(steady, ddof=1) / max(float(np.mean(steady)), 1)))


def at_pace(program: Program, graph: Graph, share: float) -> Graph:
    """The graph with the work of the host longer by a share of it.

    Args:
        program: the recorded program.
        graph: its graph, or its graph with a change.
        share: added share of the host's work; if negative, the work becomes shorter.
    """
    weight = longer_host_work(program, graph.weight, share)
    return replace(graph, weight=weight, shared=graph.order)


def _counted_nodes(trace: Attributed, program: Program) -> Mask:
    """`Health.counted`.

    Nodes of a host count until the last typical step of their rank ended, and nodes of a device if they were launched
    before that: work after the last step belongs to no step.
    """
    time = program.graph.time
    result = np.ones(len(time), np.bool_)
    if not len(program.typical):
        return result
    at = launched_at(trace, program)
    of_node = ranks_of_nodes(trace, program)
    for rank, until in program.until.items():
        result[(of_node == rank) & (at >= until)] = False
    return result


def ranks_of_nodes(trace: Attributed, program: Program) -> Int64:
    """The rank of each node."""
    on_host = program.thread != NO_ROW
    result = np.empty(len(on_host), np.int64)
    for where, frame in ((on_host, trace.host), (~on_host, trace.gpu)):
        result[where] = frame["rank"].to_numpy()[program.row[where]]
    return result


def steps_took(program: Program, time: Int64, duration: Int64, counted: Mask) -> int:
    """Time from the start of the first typical step to the end of the last node that counts, in ns.

    The step begins when the host begins it and the device has ended what was launched before, whichever is later.
    Without steps, the time is that from the first node.
    """
    ends = time.copy()
    ends[program.node_of_activity] += np.where(program.end_of_activity == NO_ROW, duration, 0)
    begin = time[program.typical[0]] if len(program.typical) else time.min()
    if len(program.typical):
        begin = max(begin, ends[program.before].max(initial=int(begin)))
    return int(ends[counted].max(initial=int(begin))) - int(begin)
