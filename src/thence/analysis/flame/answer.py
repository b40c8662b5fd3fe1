"""Flame graphs: GPU time as a prefix tree of the frames that launched it.

total of a frame = self + totals of its child frames
total of the root = sum of durations, plus the idle time that is included
                  = span if all idle time is included and no activities overlap; parallel streams add sum - busy
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from thence.analysis.activity_rooflines import known_peaks, rooflines_of_known_devices
from thence.analysis.flame.prefix_tree import FRAMES, PHASE_SUMS, Groups, build_tree, keep_largest
from thence.analysis.grouping.kernel_groups import communicates
from thence.analysis.grouping.layers import folded_frames
from thence.analysis.grouping.time_by_place import heading_of, split_by_weight
from thence.analysis.idle.answer import idle_time, in_words, why_no_causes
from thence.analysis.idle.gaps import program_gaps
from thence.analysis.programs.warmup import WarmUp, phases
from thence.analysis.report.summary import summarize
from thence.attribution.paths import KEPT_LEVELS, MAX_LEVELS, left_out
from thence.attribution.stacks import stacks_of
from thence.errors import UsageError
from thence.model.answer import Answer, TableView
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.phases import Phase
from thence.model.places import FLAMES, LAYERED
from thence.model.reasons import REASONS
from thence.model.selection import SEPARATE
from thence.model.totals import must
from thence.model.trees import ancestors
from thence.units import format_bytes, format_ns, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from thence.analysis.flame.prefix_tree import Entry
    from thence.analysis.idle.answer import IdleTime
    from thence.attribution.stacks import Stacks
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.model.tables import Meta
    from thence.units import Ns


class Split(enum.Enum):
    """Whether forward, backward and the other phases get an outermost frame each."""

    NONE = "none"
    PHASE = "phase"
    """The outermost frame is the phase, or the reason why the phase is unknown."""


class Weight(enum.Enum):
    """What the width of a frame is."""

    TIME = "time"
    """GPU time."""
    HEADROOM = "headroom"
    """GPU time beyond what the device allows for the work (`thence.analysis.activity_rooflines`); none where that is
    not known."""
    MEMORY = "memory"
    """Bytes that were live at the peak of memory (`thence.analysis.memory.flame`). Columns and attributes that are
    named as times then hold bytes."""

    @property
    def unit(self) -> Literal["ns", "bytes"]:
        """Of the frames."""
        return "bytes" if self is Weight.MEMORY else "ns"

    def text(self, value: float) -> str:
        """A value of a frame as text."""
        return format_bytes(value) if self is Weight.MEMORY else format_ns(value)


class Idle(enum.Enum):
    """Which idle time is shown as frames."""

    STEADY = "steady"
    """All idle time except that before the first executions of XLA programs, which are compiled then, and that inside
    executions that do not count (warm-up)."""
    INCLUDE = "include"
    """All idle time."""
    EXCLUDE = "exclude"
    """No idle time."""


@dataclass(frozen=True)
class Flame(Answer):
    """GPU time by path, as a prefix tree. All times are ns.

    Attributes:
        meta: facts of the trace.
        by: one of `thence.model.places.FLAMES`.
        heading: ``by`` in words; by source, whether the frames are functions or lines.
        split: whether phases have outermost frames.
        ranks: the ranks whose time is in the graph.
        devices: number of devices in the graph.
        span_ns, busy_ns: as in `thence.analysis.report.summary`, for these ranks.
        sum_ns: of the work in the graph: its durations, or its headroom.
        nodes: one row per frame, parents before children: node (number), parent (null for the root),
            depth, name, full_name (of kernels whose name is shortened, else null), kind (root, frame,
            unattributed, compute, communication, copy, idle, or smaller: frames merged by `largest`),
            self_ns, total_ns, count (activities; for idle frames, pieces of gaps with one cause each), the parts of
            total_ns in each phase (`PHASE_SUMS`: forward_ns, backward_ns ...; the rest is of unknown phase), idle.
        notes: notes to show with the graph, one sentence each.
        weight: what the times of the frames are.
        start_ns: when the first work began, on the trace's clock.
    """

    meta: Meta
    by: str
    heading: str
    split: Split
    ranks: tuple[int, ...]
    devices: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    nodes: pl.DataFrame
    notes: tuple[str, ...]
    weight: Weight = Weight.TIME
    start_ns: Ns = 0

    @property
    def total_ns(self) -> Ns:
        """Time of the root."""
        return int(self.nodes["total_ns"][0])

    @property
    def title(self) -> str:
        """The title of the graph, as text for the user."""
        what = {Weight.TIME: "GPU time", Weight.HEADROOM: "Headroom", Weight.MEMORY: "Memory at the peak"}[self.weight]
        return f"{what} by {self.heading}{' stack' if self.by == 'source' else ''}"

    @property
    def of_files(self) -> bool:
        """Whether names of frames begin with the path of a file, whose end is the most informative part."""
        return self.by in ("source", "stack")

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (
            self.title,
            f"{several(self.nodes.height, 'frame')}, {self.weight.text(self.total_ns)}; plot_flame draws them",
        )

    def views(self) -> tuple[TableView, ...]:
        """The frames with time of their own, the largest first."""
        frames = self.nodes.filter(pl.col("self_ns") > 0).sort("self_ns", "node", descending=[True, False])
        shares = frames.with_columns(share=pl.col("self_ns") / max(self.total_ns, 1))
        own, heading = ("self_bytes", "self") if self.weight is Weight.MEMORY else ("self_ns", "self time")
        headings = {"name": "frame", "kind": "kind", own: heading, "share": "share", "count": "count"}
        return (TableView(shares.rename({"self_ns": own}), headings, bar=own),)

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.notes

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        unknown = int(self.nodes.filter(pl.col("kind") == "unattributed")["self_ns"].sum())
        return {"stack": 1 - unknown / max(self.total_ns, 1)}

    def self_check(self) -> None:
        """See `Answer`."""
        work = self.nodes.filter(~pl.col("idle").fill_null(value=False))["self_ns"]
        must(self.meta.inputs, int(work.sum()) == self.sum_ns, "frames do not add up to the sum of all work")

    def largest(self, nodes: int) -> Flame:
        """This flame graph with about ``nodes`` frames; smaller siblings are merged into one frame."""
        kept, hidden = keep_largest(self.nodes, nodes)
        if not hidden:
            return self
        smaller = kept.filter(pl.col("kind") == "smaller")
        share = 100 * int(smaller["total_ns"].sum()) / max(self.total_ns, 1)
        note = (
            f"{hidden:,} of {self.nodes.height:,} frames were too small to be shown by themselves; "
            f"together they are {share:.2g} % of the whole."
        )
        return dataclasses.replace(self, nodes=kept, notes=(*self.notes, note))

    def stacks(self) -> Iterator[tuple[tuple[str, ...], Ns]]:
        """Yields the frames and self time of each stack with self time, outermost frame first, without the root.

        Among siblings, larger frames come first, idle frames last. A stack of more than `MAX_LEVELS`
        frames is shortened to its `KEPT_LEVELS` outermost and innermost frames, and one frame between them
        with the number of omitted frames.
        """
        ordered = self.nodes.sort("idle", "total_ns", "node", descending=[True, False, False])
        below: dict[int | None, list[tuple[int, int, str, Ns]]] = {}
        for parent, *child in ordered.select("parent", "node", "depth", "name", "self_ns").iter_rows():
            below.setdefault(parent, []).append(tuple(child))
        waiting = list(below.get(0, []))
        frames: list[str] = []  # from the outermost to the current frame
        while waiting:
            node, depth, name, self_ns = waiting.pop()
            frames[depth - 1 :] = [name]
            if self_ns:
                yield _shortened(frames), self_ns
            waiting += below.get(node, [])


def _shortened(frames: list[str]) -> tuple[str, ...]:
    """A stack with its middle frames omitted if it is very deep."""
    if len(frames) <= MAX_LEVELS:
        return tuple(frames)
    gap = left_out(len(frames) - 2 * KEPT_LEVELS)
    return (*frames[:KEPT_LEVELS], gap, *frames[-KEPT_LEVELS:])


def flame(
    trace: Attributed,
    by: str,
    split: Split = Split.NONE,
    idle: Idle = Idle.STEADY,
    explain: Callable[[Attributed], IdleTime] = idle_time,
    *,
    fold: bool = False,
    weight: Weight = Weight.TIME,
) -> Flame:
    """The flame graph of a trace.

    Args:
        by: one of `thence.model.places.FLAMES`.
        split: whether phases get outermost frames.
        idle: which idle time is shown as frames.
        explain: computes the idle time of the trace by place; called only if its causes can be computed.
        fold: whether equal layers of a model are one frame (`thence.model.layers`).
        weight: what the width of a frame is. Idle time has no headroom.

    Raises:
        UsageError: ``by`` is not in `thence.model.places.FLAMES`, or has no layers to fold.
        MissingData: the trace holds no device activity; or, for headroom, the peaks of its devices are not known.
    """
    if by not in FLAMES:
        raise UsageError(f"there is no flame graph by {by!r}; choose one of {', '.join(FLAMES)}")
    if fold and by not in LAYERED:
        raise UsageError(f"frames by {by} have no layers to fold; choose one of {', '.join(LAYERED)}")
    totals = summarize(trace, "kernel")
    ranks = sorted(trace.gpu["rank"].unique().to_list())
    stacks = stacks_of(trace, by, folded_frames(trace.places[by], by) if fold else None)
    times = trace.gpu["duration"] if weight is Weight.TIME else _headroom(trace)
    groups = _groups(trace, stacks, split, times)
    notes: tuple[str, ...] = (_ROOFLINE_NOTE,)
    if weight is Weight.TIME:
        notes = _notes(totals.sum_ns - totals.busy_ns, idle, stacks)
        groups, said = _with_idle(trace, groups, idle, explain)
        notes += said
    return Flame(
        meta=trace.meta,
        by=by,
        heading=heading_of(trace, by),
        split=split,
        ranks=tuple(ranks),
        devices=totals.devices,
        span_ns=totals.span_ns,
        busy_ns=totals.busy_ns,
        sum_ns=int(times.sum()),
        nodes=build_tree(groups, _root_name(trace, ranks, idle=bool((groups.frames["kind"] == "idle").any()))),
        notes=(*notes, *totals.notes[len(totals.meta.notes) :]),
        weight=weight,
        start_ns=int(trace.gpu["start"].min()),  # type: ignore[arg-type]
    )


def _with_idle(
    trace: Attributed, groups: Groups, idle: Idle, explain: Callable[[Attributed], IdleTime]
) -> tuple[Groups, tuple[str, ...]]:
    """The groups with those of idle time, and notes on it."""
    if trace.selection.idle_unknown:
        reason = trace.selection.idle_unknown
        return groups, (f"Idle time is not in the graph, because it is unknown: {reason}.",)
    if idle is Idle.EXCLUDE:
        return groups, ()
    notes: tuple[str, ...] = ()
    unknown = why_no_causes(trace)
    if unknown is not None:
        notes += (f"Idle time is shown without its causes: {unknown}.",)
    sums = idle_sums(trace, explain(trace) if unknown is None else None)
    if idle is Idle.STEADY:
        notes += _left_out(sums)
        sums = sums.filter(~pl.col("early"))
    return groups.with_more(idle_frames(sums)), notes


_ROOFLINE_NOTE = (
    "Headroom is the GPU time beyond what the device allows for the work; work whose FLOP and bytes are not known has "
    "none. thence roofline shows both."
)


def _headroom(trace: Attributed) -> pl.Series:
    """The headroom of each activity in whole ns; 0 where its roofline is not known."""
    known_peaks(trace, None)  # or it is refused
    rated = rooflines_of_known_devices(trace)
    headroom = (pl.col("duration") - pl.col("roofline_ns")).fill_null(0.0)
    return rated.select(headroom.round().cast(pl.Int64)).to_series()


def _root_name(trace: Attributed, ranks: Sequence[int], *, idle: bool) -> str:
    """What the whole of a graph is."""
    what = "GPU and idle time" if idle else "GPU time"
    if len(ranks) > 1:
        return f"{what}, sum of {len(ranks)} ranks"
    return f"{what} of rank {ranks[0]}" if trace.selection.ranks else what


def _left_out(sums: pl.DataFrame) -> tuple[str, ...]:
    early = int(sums["total_ns"].filter(sums["early"]).sum())
    if not early:
        return ()
    note = (
        f"{format_ns(early)} of idle time inside and before the first executions of programs, when they are "
        "compiled, is not in the graph; --idle include shows it."
    )
    return (note,)


def _notes(overlap: Ns, idle: Idle, stacks: Stacks) -> tuple[str, ...]:
    notes = []
    if overlap and idle is not Idle.EXCLUDE:
        notes.append(
            "The total is the idle time and the sum of durations: activities on parallel streams overlap, "
            "and each counts in full."
        )
    elif overlap:
        notes.append("Activities on parallel streams overlap; each counts in full.")
    if stacks.shared:
        notes.append(
            "A fusion's time is divided among the stacks of the instructions in it, in proportion to "
            "their estimated work; it counts as one activity at each."
        )
    return tuple(notes)


def _groups(trace: Attributed, stacks: Stacks, split: Split, times: pl.Series) -> Groups:
    """Activities grouped by frames and kernel; `times` of each activity is what the frames divide."""
    claims = stacks.claims
    gpu_rows = claims["gpu"].cast(pl.UInt32)
    time = split_by_weight(times, claims) if stacks.shared else times.gather(gpu_rows)
    gpu, places = trace.gpu, trace.places
    tuned = (places["separate"] == "autotuning").fill_null(value=False).gather(gpu_rows)
    rows = pl.DataFrame(
        {
            "gpu": gpu_rows,
            "node": claims["node"].set(tuned, NO_ROW),  # autotuning has only its outermost frame
            "name": gpu["name"].gather(gpu_rows),
            "kind": _kinds(trace).gather(gpu_rows),
            "phase": places["phase"].gather(gpu_rows).cast(pl.String),
            "outermost": _outermost(trace, split).gather(gpu_rows),
            "time": time,
        }
    )
    keys = ["node", "name", "kind", "outermost"]
    grouped = rows.group_by(keys, maintain_order=True).agg(
        "gpu",
        *(pl.col("time").filter(pl.col("phase") == phase.value).sum().alias(f"{phase.value}_ns") for phase in Phase),
        self_ns=pl.col("time").sum(),
        count=pl.len().cast(pl.Int64),
    )
    names = grouped["name"].cast(pl.String)
    kernels = names.filter(grouped["kind"].is_in(["compute", "communication"])).unique().to_list()
    short = short_names([name for name in kernels if name is not None])
    shown = names.replace(short).replace("", None).fill_null("(no name)")
    leaves = grouped.select(
        "node", "kind", "outermost", name=shown, full_name=pl.when(names.ne_missing(shown)).then(names)
    )
    frames, innermost = _frames(leaves, stacks)
    members = grouped["gpu"] if stacks.shared else None
    sums = grouped.select("self_ns", "count", *PHASE_SUMS)
    return Groups(frames, innermost, sums, members)


def _frames(leaves: pl.DataFrame, stacks: Stacks) -> tuple[pl.DataFrame, Int64]:
    """Rows of `FRAMES` for kernels and their enclosing frames, and the row of each kernel.

    Args:
        leaves: one row per group: node (in the stacks' tree), kind, outermost, name, full_name.
        stacks: the tree of enclosing frames.
    """
    parts, parents, height = [pl.DataFrame(schema=FRAMES)], np.empty(leaves.height, np.int64), 0
    role = np.where(stacks.attributed, "frame", "unattributed")
    for outer in leaves["outermost"].unique(maintain_order=True).to_list():
        selected = leaves.select(pl.col("outermost").eq_missing(pl.lit(outer))).to_series().to_numpy()
        top = NO_ROW
        if outer is not None:
            top, height = height, height + 1
            parts.append(_rows(np.array([NO_ROW]), pl.Series([outer]), np.array(["frame"])))
        node = leaves["node"].to_numpy()[selected]
        used = np.flatnonzero(ancestors(stacks.tree.parent, node))
        number = np.full(len(stacks.tree.parent) + 1, top, np.int64)  # the last element is for NO_ROW
        number[used] = height + np.arange(len(used))
        parts.append(_rows(number[stacks.tree.parent[used]], stacks.tree.name.gather(used), role[used]))
        parents[selected] = number[node]
        height += len(used)
    parts.append(leaves.select(pl.Series("parent", parents), "name", "kind", "full_name"))
    return pl.concat(parts), height + np.arange(leaves.height)


def _rows(parent: Int64, name: pl.Series, kind: npt.NDArray[np.str_]) -> pl.DataFrame:
    """Rows of `FRAMES`."""
    columns = {"parent": parent, "name": name.cast(pl.String), "kind": kind.tolist(), "full_name": None}
    return pl.DataFrame(columns, schema=FRAMES)


def _outermost(trace: Attributed, split: Split) -> pl.Series:
    """The name of the outermost frame of each activity; null if it has none.

    Work that tables keep separate (warm-up, the autotuner) has an outermost frame of its own, whatever the split.
    """
    separate = pl.format("[{}]", pl.col("separate").cast(pl.String).replace(REASONS))
    if split is Split.NONE:
        return trace.places.select(separate).to_series()
    reason = pl.format("[{}]", pl.col("phase_rule").cast(pl.String).replace(REASONS))
    phase = pl.col("phase").cast(pl.String)
    return trace.places.select(pl.coalesce(separate, phase, reason)).to_series()


def _kinds(trace: Attributed) -> pl.Series:
    """The kind of each activity's frame: compute, communication or copy."""
    copy = pl.col("kind").is_in(["memcpy", "memset"])
    return trace.gpu.select(
        pl.when(communicates(trace))
        .then(pl.lit("communication"))
        .when(copy)
        .then(pl.lit("copy"))
        .otherwise(pl.lit("compute"))
    ).to_series()


IDLE = "GPU idle"
"""Name of the frame of all idle time."""

_OF_GAPS = ["where", "program", "early"]
_KEYS = [*_OF_GAPS, "cause", "name"]


def idle_sums(trace: Attributed, explained: IdleTime | None) -> pl.DataFrame:
    """Idle time by the columns that name its frames.

    Args:
        explained: idle time of the trace by place; None to show it without causes.

    Returns:
        columns where and program, as in `thence.analysis.idle.gaps.program_gaps`; early: whether the time is before the
        first execution of a program, or inside an execution that does not count; cause and name, as ``thence idle``
        shows them, null if there is none; total_ns and count (pieces).
    """
    gaps = _gaps(trace)
    if explained is None:
        nothing = pl.lit(None, pl.String)
        return _summed(gaps.with_columns(cause=nothing, name=nothing), _KEYS)
    pieces = explained.unnamed.select("rank", "device", "start", "duration", "cause").with_columns(
        number=pl.Series(explained.names.number)
    )
    sums = _summed(_with_gaps(pieces, gaps), [*_OF_GAPS, "cause", "number"])
    named = sums.drop("number").hstack(explained.names.columns_of(sums["number"].to_numpy()))
    return _summed(in_words(named), _KEYS, "total_ns", pl.col("count").sum())


def idle_frames(sums: pl.DataFrame) -> Groups:
    """The frames of idle time.

    Args:
        sums: as `idle_sums` returns it.
    """
    frames = [_path(row) for row in sums.select(_KEYS).iter_rows(named=True)]
    zero = pl.lit(0, pl.Int64)
    times = sums.select(pl.col("total_ns").alias("self_ns"), "count")
    return Groups.of_paths(frames, times.with_columns(**dict.fromkeys(PHASE_SUMS, zero)))


def _path(row: dict[str, Any]) -> list[Entry]:
    """The frames of a row of `idle_sums`, outermost first."""
    around = ["inside and before first executions"] if row["early"] else []
    program = row["program"]
    if row["where"] == "inside":
        around += ["inside programs", f"inside {program}"]
    elif row["where"] is not None:
        after = "after the last program"
        around += ["between programs", after if program is None else f"before {program}"]
    why = [word for word in (row["cause"], row["name"]) if word is not None]
    return [(frame, "idle", None) for frame in (IDLE, *around, *why)]


def _gaps(trace: Attributed) -> pl.DataFrame:
    """Idle gaps, and whether each is ``early``: before a first execution, or inside one that does not count."""
    gaps = program_gaps(trace)
    chosen = trace.selection.warm_up
    if trace.programs.is_empty() or chosen == WarmUp.KEEP.value:
        return gaps.with_columns(early=pl.lit(value=False))
    rule = WarmUp.HEURISTIC if chosen == SEPARATE else WarmUp(chosen)
    phase = phases(trace, rule)
    marked = pl.DataFrame({"first": phase.first, "warm": phase.first & ~phase.counted})
    marked = marked.select(pl.all().gather(gaps["execution"])).fill_null(value=False)
    separate = trace.gpu["program"].filter(trace.places["separate"].is_not_null()).drop_nulls().unique()
    of_separate = pl.col("execution").is_in(separate.cast(pl.UInt32).implode()).fill_null(value=False)
    inside = pl.col("where") == "inside"
    early = of_separate | pl.when(inside).then("warm").otherwise("first")
    return gaps.hstack(marked).with_columns(early=early).drop("first", "warm")


def _with_gaps(pieces: pl.DataFrame, gaps: pl.DataFrame) -> pl.DataFrame:
    """The pieces with the columns `_OF_GAPS` of the gap that contains each."""
    if gaps["where"].null_count() == gaps.height:  # no XLA programs: equal columns for all gaps
        same = gaps.schema
        return pieces.with_columns(
            pl.lit(None, same["where"]).alias("where"),
            pl.lit(None, same["program"]).alias("program"),
            early=pl.lit(value=False),
        )
    return pieces.sort("start").join_asof(
        gaps.select("rank", "device", "start", *_OF_GAPS).sort("start"),
        on="start",
        by=["rank", "device"],
        check_sortedness=False,  # Polars cannot check it within groups
    )


def _summed(rows: pl.DataFrame, keys: list[str], time: str = "duration", count: pl.Expr | None = None) -> pl.DataFrame:
    """Merges rows with equal keys into one row, with total_ns and count."""
    counted = pl.len() if count is None else count
    return rows.group_by(keys, maintain_order=True).agg(total_ns=pl.col(time).sum(), count=counted.cast(pl.Int64))
