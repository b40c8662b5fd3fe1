"""Predicts the time of a program's steps with a change: by how much it is wrong at most, and when nothing is predicted.

The interval of a prediction combines three independent errors, as the root of the sum of their squares:

- `MIN_NOISE_SHARE` of the step, or the standard deviation of the steps if that is larger.
- The time by which the step is longer if the host is slower by `HOST_NOISE_SHARE`, in the program as recorded or as
  changed, whichever is more. Another run of the same program repeats the work of its device, but its host is faster or
  slower by some percent, and one trace does not tell by how much.
- The difference of the gain if the host is faster, or slower, in both runs than in the trace: by `PACE_NOISE_SHARE`, or
  by the variation of its pace within the trace if that is larger. The time of a step that the device bounds does not
  depend on the speed of its host, until the work of the device is removed.

The first two constants are from 40 runs of changed programs on H200s, none of which is among the programs of
tests/gpu/whatif.py: of 13 whose step was bounded by the host, the predictions of 12 were within 9 % of it. The
third is from 92 traces of three programs, 19 to 30 of each in one process: the pace of the host for the same calls had
a standard deviation of 18 to 22 % from trace to trace, and of 4 to 15 % within a trace.

**The pace of the host.** A piece is the work of a thread from one launching call to its next one, without another node
of the graph in between, such as a wait or the start of a step. Pieces are of one kind if their first calls launch the
same kernel, and their last calls as well. A program that repeats its steps repeats its pieces, so the duration of a
piece, divided by the median of its kind, is a measure of the host's speed at that time:

    pace of a step of a rank = median over its pieces of (duration / median duration of their kind)

Pauses and other work that only few pieces contain do not change the medians.

**The program without its recorder.** Recording makes the host slower. If the recording tells how long a step is without
it, one factor is searched: the host's work between two nodes, of which at most `MAX_SCALED_NS` counts, is multiplied by
it, so that the simulation of the unchanged program takes that time. A longer piece contains a pause, a computation or a
read, which recording does not make longer in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.selection.windows import unrecorded_times
from thence.analysis.steps.plain_step import plain_step
from thence.analysis.steps.windows import steps
from thence.analysis.whatif.changes import ChangeFacts, activities_of, changed
from thence.analysis.whatif.graph import launched_at, longer_host_work
from thence.analysis.whatif.simulation import MAX_TOGETHER, simulated, simulated_together
from thence.errors import MissingData
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, covered_lengths
from thence.model.thresholds import (
    HOST_NOISE_SHARE,
    LATE_START_NS,
    MAX_SCALED_NS,
    MAX_WITHOUT_EDGES_SHARE,
    MIN_HOST_FACTOR,
    MIN_NOISE_SHARE,
    MIN_SAMPLES,
    PACE_NOISE_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from thence.analysis.whatif.changes import Change
    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.simulation import Graph
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

    Row = tuple[Any, ...]


_NEEDED_CALLS = {"waits": "the calls that wait for the device", "launches": "the ends of launches"}
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
        opaque: share of the time of all activities that is inside CUDA graphs whose edges are unknown. Changes of
            these activities are not predicted.
        counted: mask of the nodes up to the end of the steps; all nodes if there are no steps.
    """

    unexplained: float
    inferred: float
    noise: float
    spread: float
    pace: float
    opaque: float
    counted: Mask = field(repr=False, compare=False)


def missing_calls(trace: Attributed) -> list[str]:
    """The calls that a recording by thence does not hold, so that nothing can be predicted; none for other traces."""
    held = [facts["calls"] or () for facts in trace.meta.facts if "calls" in facts]
    return [text for kind, text in _NEEDED_CALLS.items() if any(kind not in calls for calls in held)]


def health(trace: Attributed, program: Program, time: Int64 | None = None) -> Health:
    """Checks whether the graph explains the trace, and estimates the error of predictions.

    Args:
        time: times of all nodes, if they are not the recorded ones.
    """
    delay = program.graph.delay[program.is_activity]
    span = int(program.graph.time.max(initial=0)) * max(trace.gpu.select("rank", "device").n_unique(), 1)
    late = int(delay[delay > LATE_START_NS].sum())
    counted = _counted_nodes(trace, program)
    duration = program.gpu.duration
    time = program.graph.time if time is None else time
    took = steps_took(program, time, duration, counted)
    slower = simulated(at_pace(program, program.graph, HOST_NOISE_SHARE))
    longer = steps_took(program, slower, duration, counted) - took
    spread = _spread_of_steps(trace)
    pace = max(PACE_NOISE_SHARE, pace_spread(host_pieces(trace, program)))
    noise = math.hypot(spread, longer / max(took, 1))
    opaque = int(duration[program.inside.inside & ~program.inside.known].sum()) / max(int(duration.sum()), 1)
    return Health(late / max(span, 1), program.inferred, noise, spread, pace, opaque, counted)


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
    launched = launched_at(trace, program)
    ranks = ranks_of_nodes(trace, program)
    for rank, until in program.until.items():
        result[(ranks == rank) & (launched >= until)] = False
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


_SEARCH_ROUNDS = 3
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
    pauses = unrecorded_times(trace)
    graph = program.graph
    if pauses.is_empty():
        return program, graph.time
    shift = program.host.start - trace.host["start"].to_numpy()
    weight = graph.weight.copy()
    ranks = trace.host["rank"].to_numpy()
    nodes = np.flatnonzero((program.thread != NO_ROW) & (graph.previous != NO_ROW))
    rank_of_node = ranks[program.row[nodes]]
    typical = program.typical
    for rank, start, end in pauses.group_by("rank").agg("start", "end").rows():
        ours = nodes[rank_of_node == rank]
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
    return changed, simulated(changed.graph)


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
        The program, whose simulation takes that time, and whose recorded times stay; and the part of that time by which
        the simulation differs from it, because the host does not limit the steps that much.
    """
    graph = program.graph
    target = plain.share * took(time)
    scaled = np.where(program.thread == NO_ROW, 0, np.minimum(graph.weight, MAX_SCALED_NS))
    low, high = MIN_HOST_FACTOR, 1.0
    for _ in range(_SEARCH_ROUNDS):
        factors = np.linspace(low, high, MAX_TOGETHER)
        graphs = [
            replace(graph, weight=graph.weight - np.rint(scaled * (1 - factor)).astype(np.int64), shared=graph.order)
            for factor in factors
        ]
        times = np.array([took(time) for time in simulated_together(graphs)])
        # The largest factor with which the steps take no more than that time, or the one closest to it.
        above = int(np.searchsorted(times, max(target, times[0]), side="right"))
        low, high = float(factors[above - 1]), float(factors[min(above, len(factors) - 1)])
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
    launch = row_numbers(trace.places["launch"])
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


MAX_SUGGESTED = 10
"""How many of the changes with the largest gain are kept."""


@dataclass(frozen=True)
class Base:
    """The program as it was recorded, or as it is without being recorded.

    Attributes:
        trace, program: the trace, and its graph.
        counted: mask of the nodes that count for the time of the steps, see `Health.counted`.
        health: whether the graph explains the trace.
        facts: data shared by several changes.
        paced: times of all nodes with a slower host, and with a faster host.
        time: times of all nodes.
        uncertain: half of the width of the interval of the time of the steps, as a share of it, if that is not the
            recorded time.
    """

    trace: Attributed
    program: Program
    counted: Mask
    health: Health
    facts: ChangeFacts
    paced: list[Int64]
    time: Int64
    uncertain: float = 0.0

    @property
    def count(self) -> int:
        """The number of steps from the first typical one to the last; 1 if the trace holds none."""
        return max(len(self.program.typical), 1)

    @property
    def duration(self) -> Int64:
        """Duration of each row of gpu, ns."""
        return self.program.gpu.end - self.program.gpu.start

    @classmethod
    def of(
        cls, trace: Attributed, program: Program, checked: Health, time: Int64, plain: PlainPace | None = None
    ) -> Base:
        """The base of a program whose health is known.

        Args:
            time: times of all nodes.
            plain: its step without being recorded, to which the host's work is scaled; None to take it as recorded.
        """
        uncertain = 0.0
        if plain is not None:
            duration = program.gpu.duration
            program, missed = at_plain_step(
                program, plain, lambda times: steps_took(program, times, duration, checked.counted), time
            )
            time, uncertain = simulated(program.graph), math.hypot(plain.within, missed)
        paces = (checked.pace, -checked.pace)
        paced = simulated_together([at_pace(program, program.graph, share) for share in paces])
        facts = ChangeFacts(trace, program)
        return cls(trace, program, checked.counted, checked, facts, paced, time, uncertain)

    @cached_property
    def before(self) -> int:
        """Time of all steps, ns."""
        return steps_took(self.program, self.time, self.duration, self.counted)


@dataclass(frozen=True)
class _Changed:
    """The program with one change.

    Attributes:
        change: the change.
        base: the recorded program; for the action on-time, the nodes of the change's rank do not count.
        graph: the graph with the change.
        duration: duration of each row of gpu with the change, ns.
    """

    change: Change
    base: Base
    graph: Graph
    duration: Int64

    @classmethod
    def of(cls, base: Base, change: Change) -> _Changed | str:
        """The program with a change; or the verdict, "refused" or "absent", if nothing is predicted."""
        program, changing = base.program, activities_of(base.trace, change)
        if changing.any():
            graphed = changing & program.inside.inside & ~program.inside.known
            if base.duration[graphed].sum() > MAX_WITHOUT_EDGES_SHARE * max(int(base.duration[changing].sum()), 1):
                return "refused"
        graph = changed(base.facts, change, changing)
        if graph is None:
            return "absent"
        if change.action == "on-time":  # the work of this rank is assumed to be done in time
            others = ranks_of_nodes(base.trace, program) != int(change.pattern)
            base = replace(base, counted=base.counted & others)
        factor = np.where(changing, change.factor, 1.0)
        duration = np.rint(base.duration * factor).astype(np.int64)
        return cls(change, base, graph, duration)

    def took(self, time: Int64) -> int:
        """Time of all steps, ns, if the nodes have these times."""
        return steps_took(self.base.program, time, self.duration, self.base.counted)

    def at_paces(self) -> list[Graph]:
        """The graph with a host slower by `HOST_NOISE_SHARE`, slower by the health's pace, and faster by it."""
        pace = self.base.health.pace
        return [at_pace(self.base.program, self.graph, by) for by in (HOST_NOISE_SHARE, pace, -pace)]

    @property
    def max_gain_ns(self) -> int:
        """Upper bound of the gain of all steps, ns: the sum of all times that the change takes away."""
        program, graph = self.base.program, self.base.program.graph
        if self.change.action in ("no-wait", "on-time") or self.change.part == "with waiting":
            return self.base.before  # the change removes waits, whose effect has no such bound
        on_host = program.thread != NO_ROW
        work = np.maximum(graph.weight - self.graph.weight, 0)[on_host].sum()
        left = self.duration / np.maximum(self.base.duration, 1)
        longest = np.maximum(self.base.duration, program.moves)
        return int(work) + math.ceil(float((longest * (1 - np.minimum(left, 1))).sum()))


def _simulated(changes: Iterable[_Changed]) -> Iterator[_Answer]:
    """The results of changes; up to `MAX_TOGETHER` of them are simulated together."""
    every = iter(changes)
    while batch := list(islice(every, MAX_TOGETHER)):
        times = simulated_together([program.graph for program in batch])
        for program, time in zip(batch, times, strict=True):
            yield _Answer(program, program.took(time))


@dataclass(frozen=True)
class _Answer:
    """The time that the steps of a changed program take.

    Attributes:
        program: the changed program.
        after: time of all of its steps, ns.
    """

    program: _Changed
    after: int

    @property
    def share(self) -> float:
        """The gain as a share of the step."""
        return _share(self.program.base.before, self.after)

    @property
    def gain_ns(self) -> int:
        """The gain of a step, in ns."""
        base = self.program.base
        return base.before // base.count - self.after // base.count

    def row(self) -> Row:
        """A row of `WhatIf.rows`."""
        change, base, share = self.program.change, self.program.base, self.share
        before, after = base.before // base.count, self.after // base.count
        noise = self._noise()
        verdict = "noise" if abs(share) <= noise else "gain" if share > 0 else "loss"
        return (
            change.title, change.part, before, after, self.gain_ns, share, share - noise, share + noise,
            verdict,
        )  # fmt: skip

    def _noise(self) -> float:
        """Half of the width of the interval, as a share of the step; at least `Health.noise`."""
        base = self.program.base
        slower, *at_paces = (self.program.took(time) for time in simulated_together(self.program.at_paces()))
        longer = (slower - self.after) / max(base.before, 1)
        of_run = max(base.health.noise, math.hypot(base.health.spread, longer))
        paced = (steps_took(base.program, time, base.duration, base.counted) for time in base.paced)
        of_pace = max(abs(_share(*both) - self.share) for both in zip(paced, at_paces, strict=True))
        return math.hypot(of_run, of_pace, base.uncertain)


def _share(before: int, after: int) -> float:
    return (before - after) / max(before, 1)


def predicted(base: Base, changes: Sequence[Change]) -> list[Row]:
    """Rows of `WhatIf.rows`, one for each change, in their order."""
    programs = [_Changed.of(base, change) for change in changes]
    answers = _simulated(program for program in programs if isinstance(program, _Changed))
    before = base.before // base.count
    return [
        next(answers).row()
        if isinstance(program, _Changed)
        else (change.title, change.part, before, *(None,) * 5, program)  # its verdict
        for change, program in zip(changes, programs, strict=True)
    ]


def largest_gains(base: Base, changes: Sequence[Change]) -> list[Row]:
    """Rows of `WhatIf.rows` for the changes with the largest gains that exceed half of their interval's width.

    Half of that width is at least the noise of the steps, so changes that gain less are not simulated further, and
    changes that cannot gain more are not simulated at all.
    """
    noise = base.health.noise
    programs = (_Changed.of(base, change) for change in changes)
    worth = (
        program
        for program in programs
        if isinstance(program, _Changed) and program.max_gain_ns > noise * program.base.before
    )
    gaining = [answer for answer in _simulated(worth) if answer.share > noise]
    gaining.sort(key=lambda answer: (-answer.gain_ns, answer.program.change.title))
    rows = (answer.row() for answer in gaining)
    return list(islice((row for row in rows if row[-1] == "gain"), MAX_SUGGESTED))
