"""What a change would gain: the recorded program replayed with it.

A prediction is of the profiled program: profiling makes the host slower, and so what waits for it. It is refused
where what the graph does not explain is more than `MOST_UNEXPLAINED` of the time, and for work inside CUDA graphs
whose edges are not known.

An interval joins three errors that do not depend on each other, as the root of the sum of their squares:

- `LEAST_NOISE` of the step, or the standard deviation of the steps where that is more.
- What the step takes longer where the host works slower by `HOST_NOISE`, of the program as recorded or as changed,
  whichever is more: a run of the same program repeats the work of its device, but its host is faster or slower by some
  percent, and nothing in one trace tells by how much.
- By how much the gain differs where the host is faster, or slower, in both runs than in the trace: by `PACE_NOISE`, or
  by what its pace differed by within the trace where that is more (`thence.analysis.host_pace`). A step that the device
  decides hides how fast its host is, and shows it as soon as the work of the device is gone.

The first two constants are of 40 runs of changed programs on H200s, none of them of those that benchmarks/gpu_whatif.py
makes: of 13 whose step the host decided, predictions of 12 were within 9 % of it. The third is of 92 traces of three
programs, 19 to 30 of each in one process: from trace to trace the pace of the host had a standard deviation of 18 to
22 %, for the same calls, and of 4 to 15 % within one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collective_kinds import kind_of
from thence.analysis.host_pace import host_pieces, pace_spread
from thence.analysis.idle_rules import CAUSES, host_causes
from thence.analysis.steps import steps
from thence.analysis.whatif_changes import Change, activities_of, changed
from thence.analysis.whatif_graph import longer_host_work, program_graph
from thence.analysis.whatif_replay import replayed
from thence.errors import MissingData
from thence.model.intervals import NO_ROW
from thence.notebook import Form, Shown
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.analysis.clock_sync import Alignment
    from thence.analysis.collective_instances import Instances
    from thence.analysis.whatif_graph import Program
    from thence.analysis.whatif_replay import Graph
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = [
    "HOST_NOISE",
    "LEAST_NOISE",
    "MOST_UNEXPLAINED",
    "PACE_NOISE",
    "Health",
    "WhatIf",
    "health",
    "suggestions",
    "what_if",
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
_MOST_GRAPHED = 0.05
_PLACES = 6
_SHOWN = 10
_FREEABLE = ("loader", "gc", "compile", "first_use", "allocation", "sync", "python")
_ROWS = {
    "change": pl.String(), "part": pl.String(), "before_ns": pl.Int64(), "after_ns": pl.Int64(), "gain_ns": pl.Int64(),
    "gain_share": pl.Float64(), "low_share": pl.Float64(), "high_share": pl.Float64(), "verdict": pl.String(),
}  # fmt: skip


@dataclass(frozen=True)
class Health:
    """Whether the graph explains the trace.

    Attributes:
        unexplained: share of the time by which activities began over 20 us later than it explains.
        inferred: share of the waits for events whose record is inferred or unknown.
        noise: half of the width of intervals at least, as a share of the step.
        spread: the part of that which is not the host's.
        pace: by how much the host may be faster or slower than in the trace, as a share of it.
    """

    unexplained: float
    inferred: float
    noise: float
    spread: float
    pace: float


@dataclass(frozen=True)
class WhatIf(Shown):
    """Predicted gains of changes.

    Attributes:
        steps: how many; 1 where the trace holds none, and the whole of it counts as one.
        step_ns: mean time of a step, of the profiled program.
        health: whether the graph explains the trace.
        rows: change, part (which meaning of it), before_ns and after_ns (mean step), gain_ns, gain_share (of the
            step; negative: it becomes slower), low_share and high_share (the interval), verdict: gain, loss,
            noise (no more than the interval), refused (inside CUDA graphs without edges) or absent (the trace
            holds nothing that it is about). Null where nothing is predicted.
    """

    steps: int
    step_ns: int
    health: Health
    rows: pl.DataFrame

    def form(self) -> Form:
        """What a notebook shows of it."""
        return Form(
            f"a step takes {format_ns(self.step_ns)}; what it would gain",
            f"of the profiled program, {self.steps:,} steps",
            self.rows,
            {
                "change": "change", "part": "meaning", "gain_ns": "gain", "gain_share": "share of a step",
                "low_share": "at least", "high_share": "at most", "verdict": "verdict",
            },
            "gain_share",
            {"explained": 1 - self.health.unexplained},
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "of": "the profiled program",
            "steps": self.steps,
            "step_ns": self.step_ns,
            "health": {
                "unexplained_share": self.health.unexplained,
                "inferred_share": self.health.inferred,
                "noise_share": self.health.noise,
            },
            "rows": self.rows.to_dicts(),
        }


def health(trace: Attributed, program: Program) -> Health:
    """Whether the graph explains the trace, and how much predictions may err."""
    delay = program.graph.delay[program.is_activity]
    span = int(program.graph.time.max(initial=0)) * max(
        trace.gpu.select("rank", "device").n_unique(), 1
    )
    late = int(delay[delay > _LATE_NS].sum())
    counted = _counted(trace, program)
    duration = program.gpu[1] - program.gpu[0]
    took = _took(program, program.graph.time, duration, counted)
    slower = _at_pace(program, program.graph, HOST_NOISE, duration, counted) - took
    spread = _spread_of_steps(trace)
    pace = max(PACE_NOISE, pace_spread(host_pieces(trace, program)))
    noise = math.hypot(spread, slower / max(took, 1))
    return Health(late / max(span, 1), program.inferred, noise, spread, pace)


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


def _at_pace(program: Program, graph: Graph, share: float, duration: Int64, counted: Mask) -> int:
    """What all steps take, in ns, where the work of the host takes longer by that share of it.

    Args:
        program: as recorded.
        graph: of it, or of it with a change.
        share: of the work of the host; below 0 it takes less.
        duration: ns of each row of gpu.
        counted: as `_counted`.
    """
    weight = longer_host_work(program, graph.weight, share)
    return _took(
        program, replayed(replace(graph, weight=weight, shared=graph.order)), duration, counted
    )


def what_if(
    trace: Attributed,
    changes: Sequence[Change],
    alignment: Alignment | None = None,
    instances: Instances | None = None,
    labels: Sequence[GraphLabels] = (),
) -> WhatIf:
    """Predicts the gain of changes, each by itself.

    Args:
        trace: attributed, whole.
        changes: none means those of `suggestions`, of which the ten with the largest gain above the noise are kept.
        alignment: of the ranks' clocks; None for one rank.
        instances: which kernels of several ranks are one collective; None for one rank.
        labels: of captured CUDA graphs, which may hold their edges.

    Raises:
        MissingData: the trace holds no device activity, or the graph explains too little of it.
    """
    inputs = trace.meta.named
    if trace.gpu.is_empty():
        raise MissingData(f"{inputs}: holds no device activity")
    program = program_graph(trace, alignment, instances, labels)
    found = health(trace, program)
    if found.unexplained > MOST_UNEXPLAINED:
        raise MissingData(
            f"{inputs}: activities began later than the trace explains by {100 * found.unexplained:.1f} % of the time, "
            f"more than {100 * MOST_UNEXPLAINED:.0f} %, so a replay says nothing; record which stream waits for which: "
            "nsys profile --trace=cuda,nvtx, or torch.profiler with enable_cuda_sync_events and "
            "thence.torch.event_ids(), all ranks of the job"
        )
    asked = [part for change in (changes or suggestions(trace)) for part in change.parts]
    base = _Base(trace, program, _counted(trace, program), found)
    rows = [_predicted(base, change) for change in asked]
    frame = pl.DataFrame(rows, schema=_ROWS, orient="row")
    if not changes:
        frame = (
            frame.filter(pl.col("verdict") == "gain")
            .sort("gain_ns", "change", descending=[True, False])
            .head(_SHOWN)
        )
    return WhatIf(base.count, base.before // base.count, found, frame)


@dataclass(frozen=True)
class _Base:
    """The program as it was recorded.

    Attributes:
        trace, program: the trace, and its graph.
        counted: nodes whose ends count as of the steps.
        health: whether the graph explains it.
    """

    trace: Attributed
    program: Program
    counted: Mask
    health: Health

    @property
    def count(self) -> int:
        """How many steps, 1 where the trace holds none."""
        return max(len(self.program.steps), 1)

    @property
    def duration(self) -> Int64:
        """Nanoseconds of each row of gpu."""
        return self.program.gpu[1] - self.program.gpu[0]

    @cached_property
    def before(self) -> int:
        """Nanoseconds of all steps."""
        return _took(self.program, self.program.graph.time, self.duration, self.counted)

    @cached_property
    def paced(self) -> tuple[int, ...]:
        """The same with a slower and with a faster host."""
        return self.at_paces(self.program.graph, self.duration)

    def at_paces(self, graph: Graph, duration: Int64) -> tuple[int, ...]:
        """Nanoseconds of all steps with a slower and with a faster host."""
        pace = self.health.pace
        return tuple(
            _at_pace(self.program, graph, share, duration, self.counted) for share in (pace, -pace)
        )


def _counted(trace: Attributed, program: Program) -> Mask:
    """Nodes of the steps and before them; all where there are none.

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
    of_node = _ranks(trace, program)
    for rank in np.unique(ranks[rows]):
        result[(of_node == rank) & (at > end[rows[ranks[rows] == rank]].max())] = False
    return result


def _ranks(trace: Attributed, program: Program) -> Int64:
    """The rank of each node."""
    on_host = program.thread != NO_ROW
    result = np.empty(len(on_host), np.int64)
    for where, frame in ((on_host, trace.host), (~on_host, trace.gpu)):
        result[where] = frame["rank"].to_numpy()[program.row[where]]
    return result


def _took(program: Program, time: Int64, duration: Int64, counted: Mask) -> int:
    """From the first step's begin, or the first node, to the end of all nodes that count, in ns."""
    begin = time[program.steps[0]] if len(program.steps) else time.min()
    ends = time.copy()
    ends[program.node_of_activity] += np.where(program.end_of_activity == NO_ROW, duration, 0)
    return int(ends[counted].max(initial=int(begin))) - int(begin)


def _predicted(base: _Base, change: Change) -> tuple[Any, ...]:
    """A row of `WhatIf.rows`."""
    trace, program, before, count = base.trace, base.program, base.before, base.count
    nothing = (None,) * 6
    of = activities_of(trace, change)
    if change.action in ("free", "scale") and of.any():
        graphed = of & program.inside.inside & ~program.inside.known
        if base.duration[graphed].sum() > _MOST_GRAPHED * max(int(base.duration[of].sum()), 1):
            return (change.title, change.part, before // count, *nothing[1:], "refused")
    graph = changed(trace, program, change)
    if graph is None:
        return (change.title, change.part, before // count, *nothing[1:], "absent")
    left = np.where(of, change.factor, 1.0) if change.action in ("free", "scale") else 1.0
    if change.action == "on-time":  # what this rank does is then done in time, whatever it is
        others = _ranks(trace, program) != int(change.pattern)
        base = replace(base, counted=base.counted & others)
        before = base.before
    duration = np.rint(base.duration * left).astype(np.int64)
    after = _took(program, replayed(graph), duration, base.counted)
    share = _share(before, after)
    noise = _noise(base, graph, duration, after)
    verdict = "noise" if abs(share) <= noise else "gain" if share > 0 else "loss"
    return (
        change.title, change.part, before // count, after // count, before // count - after // count, share,
        share - noise, share + noise, verdict,
    )  # fmt: skip


def _share(before: int, after: int) -> float:
    return (before - after) / max(before, 1)


def _noise(base: _Base, graph: Graph, duration: Int64, after: int) -> float:
    """Half of the width of the interval of a change, as a share of the step.

    Args:
        base: as recorded.
        graph: with the change.
        duration: ns of each row of gpu, with the change.
        after: ns of all steps, with the change.
    """
    slower = _at_pace(base.program, graph, HOST_NOISE, duration, base.counted) - after
    of_run = max(base.health.noise, math.hypot(base.health.spread, slower / max(base.before, 1)))
    paced = zip(base.paced, base.at_paces(graph, duration), strict=True)
    gain = _share(base.before, after)
    of_pace = max(abs(_share(*both) - gain) for both in paced)
    return math.hypot(of_run, of_pace)


def suggestions(trace: Attributed) -> list[Change]:
    """Changes that are worth asking about: the largest places, kernels and collectives, causes, waits, ranks."""
    result = []
    causes = host_causes(trace.host)
    present = {CAUSES[number] for number in np.unique(causes)}
    result += [
        Change(f"cause:{cause}", "free", "cause", cause) for cause in _FREEABLE if cause in present
    ]
    kind = next(
        (k for k in ("label", "module", "op") if trace.places[k].null_count() < trace.gpu.height),
        None,
    )
    if kind is not None:
        result += _largest(trace, kind, trace.places[kind])
    result += _largest(trace, "kernel", trace.gpu["name"])
    collectives = (
        trace.collectives.select(name=kind_of(pl.col("collective")))["name"]
        .drop_nulls()
        .unique()
        .sort()
    )
    result += [
        Change(f"collective:{name}", "free", "collective", f"^{re.escape(name)}$")
        for name in collectives.cast(pl.String)
    ]
    waits = sorted(set(trace.waits["kind"].cast(pl.String)))
    result += [Change(name, "no-wait", "", f"^{name}$") for name in waits]
    if len(trace.ranks) > 1:
        result += [Change(f"rank:{rank}", "on-time", "", str(rank)) for rank in trace.ranks]
    return result


def _largest(trace: Attributed, by: str, names: pl.Series) -> list[Change]:
    rows = pl.DataFrame({"name": names.cast(pl.String), "ns": trace.gpu["duration"]}).drop_nulls()
    largest = (
        rows.group_by("name").agg(pl.col("ns").sum()).sort("ns", "name", descending=[True, False])
    )
    return [
        Change(f"{by}:{name}", "free", by, f"^{re.escape(name)}$")
        for name in largest["name"].head(_PLACES)
    ]
