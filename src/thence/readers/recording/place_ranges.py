"""Host ranges of the places in a recording: modules, lines, phases and steps.

A boundary states the place of one kind in which its thread is from then on. The places of a kind form trees. So
ranges are made for each level of the trees, and they nest in the ranges of the level above.

Ranges of several kinds may cross, for example if a line opens a ``with`` block and is left inside of it. The places
of a launch are found by nesting, so where two ranges cross, one of them is cut at that time: a phase is cut by steps
and by ranges that the user named, a module by these and by phases, a line by all of them, a sampled frame by all.

**Samples** show in which function a thread was between two of its calls: where there are samples, they replace what
the boundaries around them say of the line. No launch is inside such a time. The length of that time is known exactly,
because calls are recorded. It is divided among its samples: each stands for the time around it, to the middle between
it and the next one. So a change of function is known to half a period, and the times of all functions in a gap add up
to the gap. A sample stands for no time further away than `_REACH_NS`, or a 50th of the time since the last call if
that is more, except between two samples that show the same: the rest was not sampled, and stays what the boundaries
around it say.

**Autograd's threads.** While ``loss.backward()`` waits, threads of autograd run the nodes; a node has the places of
its forward operator. Work of such a thread before its first node and after its last node, such as the first
all-gather and the last reduce-scatter of FSDP, belongs to the call: it gets the line and phase of the call, if only
one thread was inside such a call at that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.capture.boundaries.places import FRAME, KINDS, LINE, LOOP_ROUND, MODEL_CALL, MODULE, PHASE, STEP
from thence.model.columns import mask_of, values_or
from thence.model.formats import SAMPLE_STATES
from thence.model.intervals import NO_ROW, Intervals, chain_to, enclosing, reached_before
from thence.model.phases import POSITIONS, Position
from thence.model.trees import depths
from thence.readers.host_ranges import host_order

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.readers.recording.counted_launches import Boundaries

_BACKWARD, _OF_NODES = "backward", ("backward", "recompute")
"""The phase of a thread that calls autograd's engine, and the phases of the engine's own threads."""
_REACH_NS = 10_000_000
"""The sampler may be late by its longest look while launches come (5 ms), and by work of the recorder's thread."""
_SHARE_OF_QUIET = 50
"""Samples are a 100th of the time since the last call apart in long gaps (``SHARE_OF_QUIET`` of _samples.c)."""
_LAST = np.iinfo(np.int64).max
_MIN_STEPS = 2
"""Steps that no call of a model began, from which on calls of models are parts of them: without an optimizer's step
there is at most one, with which the recording began."""
_CATEGORY = {MODULE: "module", LINE: "python", PHASE: "phase", STEP: "step"}
_MAX_LEVELS = 512
"""Most levels of a tree of places; a deeper place counts as one at this level."""
_RANGE = {"thread": pl.Int64(), "start": pl.Int64(), "end": pl.Int64()}
_WITH_STATE = pl.DataFrame(schema={"state": pl.Int64()})


@dataclass(frozen=True, slots=True)
class Noted:
    """The boundaries of one kind of place: which place each thread is in from which time on.

    Attributes:
        thread: id; the rows of a thread are adjacent and in order of time.
        time: Unix ns.
        place: row of the place from then on.
    """

    thread: Int64
    time: Int64
    place: Int64

    def until(self, last: int) -> Int64:
        """The time at which the thread came to its next place; `last` (Unix ns) if there is no next place."""
        result = np.append(self.time[1:], last)
        result[np.append(self.thread[1:] != self.thread[:-1], np.True_)[: len(result)]] = last
        return result[: len(self.time)]


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """Calls of autograd's engine during which no other thread was inside such a call.

    Attributes:
        engines: ids of autograd's threads.
        thread: id of the thread that called.
        begin: Unix ns, ascending.
        end: likewise.
    """

    engines: Int64
    thread: Int64
    begin: Int64
    end: Int64


def engine_calls(phases: Noted, names: pl.Series, last: int) -> EngineCalls:
    """Calls of autograd's engine, by the phases that threads were in.

    Args:
        phases: which phase each thread is in.
        names: of the places; null means that a thread is in no place of the kind.
        last: last time in the recording, Unix ns.
    """
    name = names.gather(phases.place)
    of_nodes = name.is_in(_OF_NODES).fill_null(value=True).to_numpy()
    others = np.unique(phases.thread[~of_nodes])
    engines = np.setdiff1d(phases.thread[name.is_not_null().to_numpy()], others)
    inside = mask_of(name == _BACKWARD) & np.isin(phases.thread, others)
    begin, end, thread = phases.time[inside], phases.until(last)[inside], phases.thread[inside]
    order = np.argsort(begin, kind="stable")
    begin, end, thread = begin[order], end[order], thread[order]
    alone = (reached_before(end) <= begin) & (end <= np.append(begin[1:], last)[: len(end)])
    return EngineCalls(engines, thread[alone], begin[alone], end[alone])


def with_places_of_calls(noted: Noted, named: Mask, calls: EngineCalls) -> Noted:
    """Gives threads of autograd the caller's places of one kind, wherever they are in none during a call.

    Args:
        noted: places of the kind.
        named: for each place, whether it has a name; one without means that a thread is in no place of the kind.
        calls: of autograd's engine.
    """
    of_callers, place_of_caller = _of_callers(noted, calls)
    parts = [(noted.thread, noted.time, noted.place, np.ones(len(noted.time), np.int64))]
    for engine in calls.engines.tolist():
        own = noted.thread == engine
        time, known = noted.time[own], named[noted.place[own]]
        free = ~np.append(np.False_, known)
        begins = np.append(np.iinfo(np.int64).min, time)[free]
        ends = np.append(time, np.iinfo(np.int64).max)[free]
        _, row, shared = _shared(Intervals(begins, ends), of_callers)
        thread, zero = np.full(len(row), engine), np.zeros(len(row), np.int64)
        # At equal times, the end of a caller's place sorts first, then the thread's own, then the caller's begin.
        parts += [(thread, shared.end, zero, zero), (thread, shared.start, place_of_caller[row], zero + 2)]
    threads, times, places, turn = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((turn, times, threads))
    return Noted(threads[order], times[order], places[order])


def _of_callers(noted: Noted, calls: EngineCalls) -> tuple[Intervals, Int64]:
    """When callers are in which places during their calls, in order of time."""
    empty = np.empty(0, np.int64)
    parts = [(empty, empty, empty)]
    until = noted.until(np.iinfo(np.int64).max)
    for caller in np.unique(calls.thread).tolist():
        own, of_it = noted.thread == caller, calls.thread == caller
        in_places, during_calls = (
            Intervals(noted.time[own], until[own]),
            Intervals(calls.begin[of_it], calls.end[of_it]),
        )
        row, _, times = _shared(in_places, during_calls)
        parts.append((times.start, times.end, noted.place[own][row]))
    begin, end, place = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(begin, kind="stable")
    return Intervals(begin[order], end[order]), place[order]


def _shared(first: Intervals, second: Intervals) -> tuple[Int64, Int64, Intervals]:
    """Intersections of two sets of intervals, each without overlaps: row in the first, in the second, and the times."""
    low = np.searchsorted(first.end, second.start, side="right")
    count = np.maximum(np.searchsorted(first.start, second.end, side="left") - low, 0)
    of_second = np.repeat(np.arange(len(count)), count)
    of_first = np.arange(len(of_second)) + np.repeat(low - (np.cumsum(count) - count), count)
    start = np.maximum(first.start[of_first], second.start[of_second])
    end = np.minimum(first.end[of_first], second.end[of_second])
    return of_first, of_second, Intervals(start, end)


@dataclass(frozen=True, slots=True)
class Cells:
    """Pieces of time between calls, with what samples show of them; sorted by thread and time, without overlaps.

    Attributes:
        thread: id.
        start, end: Unix ns.
        line, frame: numbers of places, 0 for none.
        state: number in `SAMPLE_STATES`.
    """

    thread: Int64
    start: Int64
    end: Int64
    line: Int64
    frame: Int64
    state: Int64


NO_CELLS = Cells(*(np.empty(0, np.int64),) * 6)
"""Of a recording without samples."""


def cells_of(samples: pl.DataFrame, calls: pl.DataFrame) -> Cells:
    """Divides the time between calls among the samples.

    Args:
        samples: rows of ``samples``.
        calls: columns thread, start and end (Unix ns) of the calls of all threads.
    """
    samples = samples.drop_nulls().sort("thread", "time")
    begin, end = _gaps(samples["thread"].to_numpy(), samples["time"].to_numpy(), calls)
    outside = begin <= samples["time"].to_numpy()  # of calls; the sampler drops others
    columns = {name: samples[name].to_numpy()[outside] for name in samples.columns}
    thread, first, until = columns["thread"], columns["time"], columns["until"]
    begin, end = begin[outside], end[outside]
    until = np.clip(until, first, np.maximum(end, first))
    # Of neighbours in one gap, each gets the time to the middle between them, as far as it reaches.
    reach = np.maximum(_REACH_NS, (first - begin) // _SHARE_OF_QUIET)
    same = (thread[1:] == thread[:-1]) & (begin[1:] == begin[:-1])
    alike = same.copy()
    for name in ("line", "frame", "state"):
        alike &= columns[name][1:] == columns[name][:-1]
    between = (until[:-1] + first[1:]) // 2
    left, right = np.maximum(begin, first - reach), np.minimum(end, until + reach)
    left[1:][same] = np.maximum(between, first[1:] - reach[1:])[same]
    right[:-1][same] = np.minimum(between, until[:-1] + reach[1:])[same]
    left[1:][alike] = right[:-1][alike] = between[alike]
    return _merged(columns, left, right, alike)


def _gaps(thread: Int64, time: Int64, calls: pl.DataFrame) -> tuple[Int64, Int64]:
    """For moments of threads: when the last call of the thread before it was over, and when its next one begins.

    1 ns is left between them and the calls, so that calls are outside. Before the first call, the time begins with the
    first of the moments.
    """
    begin, end = np.zeros(len(thread), np.int64), np.full(len(thread), _LAST)
    calls = calls.drop_nulls(["thread", "start", "end"]).sort("thread", "start")
    of_call, starts, ends = (calls[name].to_numpy() for name in ("thread", "start", "end"))
    for number in np.unique(thread).tolist():
        of_thread = thread == number
        low, high = np.searchsorted(of_call, (number, number + 1))
        before = np.searchsorted(starts[low:high], time[of_thread], "right")
        over = np.append(time[of_thread].min(), np.maximum.accumulate(ends[low:high]) + 1)
        begin[of_thread] = over[before]
        end[of_thread] = np.append(starts[low:high] - 1, _LAST)[before]
    return begin, end


def _merged(columns: dict[str, Int64], left: Int64, right: Int64, alike: Mask) -> Cells:
    """The cells, of which adjacent ones that show the same are one."""
    first = np.append(True, ~alike)[: len(left)]
    last = np.append(first[1:], True)[: len(left)]
    start, end = left[first], right[last]
    lasting = end > start
    kept = {name: columns[name][first][lasting] for name in ("thread", "line", "frame", "state")}
    return Cells(start=start[lasting], end=end[lasting], **kept)


def without_notes(noted: Noted, cells: Cells, place: Int64) -> Noted:
    """The boundaries of one kind, with a place for each cell in place of what boundaries say of that time.

    After a cell, the thread is where the boundaries before its next call say.

    Args:
        noted: boundaries of the kind.
        cells: as `cells_of` returns them.
        place: of each cell, 0 for none: then the boundaries are kept.
    """
    rows = np.flatnonzero(place > 0) if len(noted.time) else np.arange(len(place))
    if not len(rows):
        return noted
    thread, start, end, place = cells.thread[rows], cells.start[rows], cells.end[rows], place[rows]
    # The place after each cell: that of the last boundary up to a moment after it, at which the next call begins.
    after = np.zeros(len(rows), np.int64)
    dropped = np.zeros(len(noted.time), np.bool_)
    for number in np.unique(thread).tolist():
        of_thread = thread == number
        low, high = np.searchsorted(noted.thread, (number, number + 1))
        times = noted.time[low:high]
        latest = np.searchsorted(times, end[of_thread] + 1, "right") - 1
        places = np.append(noted.place[low:high], 0)
        after[of_thread] = places[latest]
        cell = np.searchsorted(start[of_thread], times, "right") - 1
        dropped[low:high] = (cell >= 0) & (times < end[of_thread][np.maximum(cell, 0)])
    follows = np.append((thread[1:] == thread[:-1]) & (start[1:] <= end[:-1]), False)[: len(end)]
    parts = (
        (noted.thread[~dropped], noted.time[~dropped], noted.place[~dropped]),
        (thread[~follows], end[~follows], after[~follows]),
        (thread, start, place),
    )
    threads, times, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((times, threads))
    return Noted(threads[order], times[order], numbers[order])


def place_ranges(
    boundaries: Boundaries, places: pl.DataFrame, fixed: pl.DataFrame, last: int, cells: Cells = NO_CELLS
) -> pl.DataFrame:
    """Ranges of all places of one process.

    Args:
        places: number, kind, parent and line of each place; name and detail as text, null for none.
        fixed: thread, category, start and end (Unix ns) of ranges that are not cut. If some have the category
            ``step``, steps among the places are left out.
        last: last time in the recording (Unix ns), at which places end that were not left.
        cells: what samples show.

    Returns:
        thread, category, name, position, state, start and end (Unix ns).
    """
    tree = _Tree(places)
    around = fixed.select(pl.col(name).cast(dtype) for name, dtype in _RANGE.items())
    kinds = [STEP, PHASE, MODULE, LINE]
    if (fixed["category"] == "step").any():
        kinds.remove(STEP)
    parts = []
    calls: EngineCalls | None = None
    for kind in kinds:
        noted = _noted(boundaries, tree, kind)
        if kind == PHASE:
            calls = engine_calls(noted, tree.names, last)
        if calls is not None and kind in {PHASE, LINE}:
            noted = with_places_of_calls(noted, tree.depth > 0, calls)
        if kind == LINE:
            noted = without_notes(noted, cells, tree.of_kind(cells.line, LINE))
        ranges = _cut(_ranges_of_kind(noted, tree, kind, last), around)
        parts.append(ranges.with_columns(category=pl.lit(_CATEGORY[kind])))
        around = pl.concat([around, ranges.select(*_RANGE)])
    parts += [part.with_columns(category=pl.lit("sample")) for part in _sampled(cells, tree, around, last)]
    all_ranges = pl.concat([_WITH_STATE, *parts], how="diagonal_relaxed")
    shown = tree.shown.gather(all_ranges["place"])
    function_only = (all_ranges["category"] == "python") & (tree.line.gather(all_ranges["place"]) == 0)
    position = pl.Series([Position.LINE.value, Position.FUNCTION.value], dtype=pl.Enum(POSITIONS))
    return all_ranges.select(
        "thread", "category", shown.alias("name"), "start", "end",
        position=position.gather(function_only.cast(pl.UInt32)),
        state=pl.col("state").replace_strict(
            dict(enumerate(SAMPLE_STATES)), default=None, return_dtype=pl.String
        ),
    )  # fmt: skip


def _sampled(cells: Cells, tree: _Tree, around: pl.DataFrame, last: int) -> list[pl.DataFrame]:
    """Ranges of sampled frames: those of the callers, then the innermost ones, which have a state."""
    if not len(cells.thread):
        return []
    frame = tree.of_kind(cells.frame, FRAME)
    callers = tree.parent[frame]
    noted = without_notes(Noted(*(np.empty(0, np.int64),) * 3), cells, callers)
    outer = _cut(_ranges_of_kind(noted, tree, FRAME, last), around)
    known = np.flatnonzero(frame)
    leaves = pl.DataFrame(
        {"place": known, "thread": cells.thread[known], "start": cells.start[known], "end": cells.end[known]}
    )
    leaves = _cut(leaves, around)
    row = leaves["place"].to_numpy()
    return [outer, leaves.with_columns(place=pl.Series(frame[row]), state=pl.Series(cells.state[row]))]


class _Tree:
    """The places of a process, as rows; row 0 is for numbers that are not in the table.

    A place without a name means that a thread is in no place of its kind.

    Attributes:
        kind: of each, 0 for row 0.
        depth: 1 for places without a parent, 0 for row 0 and places without a name.
        parent: row of the parent, 0 for none.
        names: of each, null for row 0 and places without a name.
        shown: name of its host range.
        line: number of the line.
    """

    def __init__(self, places: pl.DataFrame) -> None:
        known = places.filter(pl.col("number") > 0, pl.col("kind").is_in(list(KINDS)))
        known = known.unique("number", keep="first").sort("number")
        self._numbers = known["number"].to_numpy()
        parent = self.of(values_or(known["parent"], 0))
        self.kind = np.concatenate([[0], known["kind"].to_numpy()])
        named = np.concatenate([[False], known["name"].is_not_null().to_numpy()])
        # A place gets its number when it is first used, after its parent: so the parent has a smaller number.
        wrong = (parent >= np.arange(1, len(parent) + 1)) | (self.kind[parent] != self.kind[1:])
        self.parent = np.concatenate([[0], np.where(wrong | ~named[parent], 0, parent)])
        above = np.where(self.parent[1:] == 0, NO_ROW, self.parent[1:] - 1)
        depth = np.minimum(depths(above), _MAX_LEVELS)
        self.depth = np.where(named, np.concatenate([[0], depth]), 0)
        nothing = pl.Series([None], dtype=pl.String)
        self.names = pl.concat([nothing, known["name"]])
        self.shown = pl.concat([nothing, known.select(_shown()).to_series()]).cast(pl.Categorical())
        self.line = pl.concat([pl.Series([0]), known["line"].fill_null(0).cast(pl.Int64)])

    def of(self, numbers: Int64) -> Int64:
        """Rows of places with these numbers."""
        if not len(self._numbers):
            return np.zeros(len(numbers), np.int64)
        position = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return np.where(self._numbers[position] == numbers, position + 1, 0)

    def of_kind(self, numbers: Int64, kind: int) -> Int64:
        """Rows of places with these numbers, 0 for those of other kinds or without a name."""
        rows = self.of(numbers)
        return np.where((self.kind[rows] == kind) & (self.depth[rows] > 0), rows, 0)


def _shown() -> pl.Expr:
    """The name of the host range of a place, in the form that `HOST_CATEGORIES` defines."""
    line = pl.when(pl.col("line") > 0).then(pl.col("line").cast(pl.String)).otherwise(pl.lit(""))
    frame = pl.format("{}({}): {}", pl.col("detail").fill_null("(unknown)"), line, "name")
    unnamed = (pl.col("kind") == STEP) & pl.col("name").is_in((MODEL_CALL, LOOP_ROUND))
    name = pl.when(unnamed).then(pl.lit("step")).otherwise("name")
    return (
        pl.when(pl.col("kind").is_in([LINE, FRAME]))
        .then(frame)
        .when((pl.col("kind") == STEP) & pl.col("detail").is_not_null())
        .then(pl.format("{} ({})", name, "detail"))
        .otherwise(name)
        .alias("name")
    )


def _noted(boundaries: Boundaries, tree: _Tree, kind: int) -> Noted:
    """The boundaries of one kind of place, sorted by thread."""
    place = tree.of(boundaries.place)
    rows = np.flatnonzero(tree.kind[place] == kind)
    if kind == STEP:
        # A place without a name is a step that was not recorded; what began it is not known.
        for weaker in (LOOP_ROUND, MODEL_CALL):
            begun = mask_of(tree.names == weaker)[place[rows]]
            others = tree.names.is_not_null().to_numpy()[place[rows]] & ~begun
            if np.count_nonzero(others) >= _MIN_STEPS:
                rows = rows[~begun]
    rows = rows[np.argsort(boundaries.thread[rows], kind="stable")]
    return Noted(boundaries.thread[rows], boundaries.time[rows], place[rows])


def _ranges_of_kind(noted: Noted, tree: _Tree, kind: int, last: int) -> pl.DataFrame:
    """Ranges of the places of one kind: place (row), thread, start, end. The ranges of a thread nest."""
    thread, time, place = noted.thread, noted.time, noted.place
    new_thread = np.ones(len(place), np.bool_)
    new_thread[1:] = thread[1:] != thread[:-1]
    levels = []
    ancestor = np.arange(len(tree.depth))
    for level in range(int(tree.depth[place].max(initial=0)), 0, -1):
        deeper = tree.depth > level
        ancestor[deeper] = tree.parent[ancestor[deeper]]
        place_at_level = np.where(tree.depth >= level, ancestor, 0)[place]
        change = new_thread | np.concatenate([[True], place_at_level[1:] != place_at_level[:-1]])[: len(place_at_level)]
        if kind == STEP:
            change[:] = True  # the next step can have the same name
        begin = np.flatnonzero(change)
        following = np.append(begin[1:], len(place))
        ends = np.append(time, last)[following]
        ends[np.append(new_thread, True)[following]] = last
        wanted = place_at_level[begin] > 0
        levels.append((place_at_level[begin][wanted], thread[begin][wanted], time[begin][wanted], ends[wanted]))
    levels.reverse()  # of equal ranges the first one contains the others: outer places come first
    columns = [np.concatenate(parts) for parts in zip(*levels, strict=True)] if levels else [np.empty(0, np.int64)] * 4
    frame = pl.DataFrame(dict(zip(("place", *_RANGE), columns, strict=True)))
    return frame.with_columns(pl.max_horizontal("end", pl.col("start") + 1).alias("end"))


def _cut(ranges: pl.DataFrame, fixed: pl.DataFrame) -> pl.DataFrame:
    """Cuts ranges into pieces that cross none of the fixed ranges.

    Args:
        ranges: place, thread, start and end; the ranges of a thread nest.
        fixed: thread, start and end.
    """
    others = fixed.filter(pl.col("thread").is_in(ranges["thread"].unique().implode()))
    if others.is_empty():
        return ranges
    begins, ends = ranges["start"].to_numpy(), ranges["end"].to_numpy()
    # A fixed range that crosses another range has one end inside of that range and the other end beyond it.
    thread = np.tile(others["thread"].to_numpy(), 2)
    inside = np.concatenate([others["start"].to_numpy(), others["end"].to_numpy()])
    beyond = np.concatenate([others["end"].to_numpy(), others["start"].to_numpy()])
    row, parent = _innermost(ranges["thread"].to_numpy(), begins, ends, thread, inside)
    cuts: list[tuple[Int64, Int64]] = []
    while len(row):
        known = row != NO_ROW
        row, inside, beyond = row[known], inside[known], beyond[known]
        strictly = (begins[row] < inside) & (inside < ends[row])
        crosses = strictly & np.where(beyond > inside, ends[row] < beyond, beyond < begins[row])
        cuts.append((row[crosses], inside[crosses]))
        further = crosses | ~strictly
        row, inside, beyond = parent[row[further]], inside[further], beyond[further]
    cut_rows = pl.DataFrame(
        {"row": np.concatenate([rows for rows, _ in cuts]), "start": np.concatenate([times for _, times in cuts])}
    ).unique()
    if cut_rows.is_empty():
        return ranges
    numbered = ranges.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    pieces = pl.concat([numbered.select("row", "start"), cut_rows]).sort("row", "start")
    return (
        pieces.with_columns(until=pl.col("start").shift(-1).over("row"))
        .join(numbered.drop("start"), on="row", how="left", maintain_order="left")
        .select("place", "thread", "start", pl.coalesce("until", "end").alias("end"))
    )


def _innermost(thread: Int64, start: Int64, end: Int64, point_thread: Int64, points: Int64) -> tuple[Int64, Int64]:
    """The innermost range around each point, and around each range; `NO_ROW` for none."""
    count = len(start)
    threads = np.concatenate([thread, point_thread])
    starts = np.concatenate([start, points])
    lengths = np.concatenate([end - start, np.zeros(len(points), np.int64)])
    order = host_order(threads, np.zeros(len(threads), np.uint8), starts, lengths)
    above = enclosing(threads[order], starts[order], (starts + lengths)[order])
    above = chain_to(above, above, order < count)  # equal points contain one another
    result = np.empty(len(order), np.int64)
    result[order] = np.where(above == NO_ROW, NO_ROW, order[above])
    return result[count:], result[:count]
