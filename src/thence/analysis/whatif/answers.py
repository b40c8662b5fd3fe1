"""Results for `prediction`: the time of a program's steps with a change, and the interval of the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.analysis.whatif.changes import ChangeFacts, activities_of, changed
from thence.analysis.whatif.health import at_pace, ranks_of_nodes, steps_took
from thence.analysis.whatif.host_pace import at_plain_step
from thence.analysis.whatif.replay import TOGETHER, replayed, replayed_together
from thence.model.intervals import NO_ROW
from thence.model.thresholds import HOST_NOISE_SHARE, MAX_WITHOUT_EDGES_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thence.analysis.whatif.changes import Change
    from thence.analysis.whatif.graph import Program
    from thence.analysis.whatif.health import Health
    from thence.analysis.whatif.host_pace import PlainPace
    from thence.analysis.whatif.replay import Graph
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

    Row = tuple[Any, ...]

_SHOWN = 10
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
        cls, trace: Attributed, program: Program, found: Health, time: Int64, plain: PlainPace | None = None
    ) -> Base:
        """The base of a program whose health is known.

        Args:
            trace: the trace.
            program: its graph.
            found: its health.
            time: times of all nodes.
            plain: its step without being recorded, to which the host's work is scaled; None to take it as recorded.
        """
        uncertain = 0.0
        if plain is not None:
            duration = program.gpu.duration
            program, missed = at_plain_step(
                program, plain, lambda at: steps_took(program, at, duration, found.counted), time
            )
            time, uncertain = replayed(program.graph), math.hypot(plain.within, missed)
        paces = (found.pace, -found.pace)
        paced = replayed_together([at_pace(program, program.graph, share) for share in paces])
        facts = ChangeFacts(trace, program)
        return cls(trace, program, found.counted, found, facts, paced, time, uncertain)

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
        program, of = base.program, activities_of(base.trace, change)
        if of.any():
            graphed = of & program.inside.inside & ~program.inside.known
            if base.duration[graphed].sum() > MAX_WITHOUT_EDGES_SHARE * max(int(base.duration[of].sum()), 1):
                return "refused"
        graph = changed(base.facts, change, of)
        if graph is None:
            return "absent"
        if change.action == "on-time":  # the work of this rank is assumed to be done in time
            others = ranks_of_nodes(base.trace, program) != int(change.pattern)
            base = replace(base, counted=base.counted & others)
        left = np.where(of, change.factor, 1.0)
        duration = np.rint(base.duration * left).astype(np.int64)
        return cls(change, base, graph, duration)

    def took(self, time: Int64) -> int:
        """Time of all steps, ns, if the nodes have these times."""
        return steps_took(self.base.program, time, self.duration, self.base.counted)

    def at_paces(self) -> list[Graph]:
        """The graph with a host slower by `HOST_NOISE_SHARE`, slower by the health's pace, and faster by it."""
        pace = self.base.health.pace
        return [at_pace(self.base.program, self.graph, by) for by in (HOST_NOISE_SHARE, pace, -pace)]

    @property
    def most_ns(self) -> int:
        """Upper bound of the gain of all steps, ns: the sum of all times that the change takes away."""
        program, graph = self.base.program, self.base.program.graph
        if self.change.action in ("no-wait", "on-time") or self.change.part == "with waiting":
            return self.base.before  # the change removes waits, whose effect has no such bound
        on_host = program.thread != NO_ROW
        work = np.maximum(graph.weight - self.graph.weight, 0)[on_host].sum()
        left = self.duration / np.maximum(self.base.duration, 1)
        longest = np.maximum(self.base.duration, program.moves)
        return int(work) + math.ceil(float((longest * (1 - np.minimum(left, 1))).sum()))


def _replayed(changes: Iterable[_Changed]) -> Iterator[_Answer]:
    """The results of changes; up to `TOGETHER` of them are replayed together."""
    every = iter(changes)
    while some := list(islice(every, TOGETHER)):
        times = replayed_together([one.graph for one in some])
        for one, time in zip(some, times, strict=True):
            yield _Answer(one, one.took(time))


@dataclass(frozen=True)
class _Answer:
    """The time that the steps of a changed program take.

    Attributes:
        of: the changed program.
        after: time of all of its steps, ns.
    """

    of: _Changed
    after: int

    @property
    def share(self) -> float:
        """The gain as a share of the step."""
        return _share(self.of.base.before, self.after)

    @property
    def gain_ns(self) -> int:
        """The gain of a step, in ns."""
        base = self.of.base
        return base.before // base.count - self.after // base.count

    def row(self) -> Row:
        """A row of `WhatIf.rows`."""
        change, base, share = self.of.change, self.of.base, self.share
        before, after = base.before // base.count, self.after // base.count
        noise = self._noise()
        verdict = "noise" if abs(share) <= noise else "gain" if share > 0 else "loss"
        return (
            change.title, change.part, before, after, self.gain_ns, share, share - noise, share + noise,
            verdict,
        )  # fmt: skip

    def _noise(self) -> float:
        """Half of the width of the interval, as a share of the step; at least `Health.noise`."""
        of, base = self.of, self.of.base
        slower, *at_paces = (of.took(time) for time in replayed_together(of.at_paces()))
        longer = (slower - self.after) / max(base.before, 1)
        of_run = max(base.health.noise, math.hypot(base.health.spread, longer))
        paced = (steps_took(base.program, time, base.duration, base.counted) for time in base.paced)
        of_pace = max(abs(_share(*both) - self.share) for both in zip(paced, at_paces, strict=True))
        return math.hypot(of_run, of_pace, base.uncertain)


def _share(before: int, after: int) -> float:
    return (before - after) / max(before, 1)


def predicted(base: Base, changes: Sequence[Change]) -> list[Row]:
    """Rows of `WhatIf.rows`, one for each change, in their order."""
    found = [_Changed.of(base, change) for change in changes]
    answers = _replayed(one for one in found if isinstance(one, _Changed))
    before = base.before // base.count
    return [
        next(answers).row() if isinstance(one, _Changed) else (change.title, change.part, before, *(None,) * 5, one)
        for change, one in zip(changes, found, strict=True)
    ]


def largest_gains(base: Base, changes: Sequence[Change]) -> list[Row]:
    """Rows of `WhatIf.rows` for the changes with the largest gains that exceed half of their interval's width.

    Half of that width is at least the noise of the steps, so changes that gain less are not replayed further, and
    changes that cannot gain more are not replayed at all.
    """
    least = base.health.noise
    found = (_Changed.of(base, change) for change in changes)
    worth = (one for one in found if isinstance(one, _Changed) and one.most_ns > least * one.base.before)
    gaining = [answer for answer in _replayed(worth) if answer.share > least]
    gaining.sort(key=lambda answer: (-answer.gain_ns, answer.of.change.title))
    rows = (answer.row() for answer in gaining)
    return list(islice((row for row in rows if row[-1] == "gain"), _SHOWN))
