"""Host ranges of the places in a recording: modules, lines, phases and steps.

A boundary states the place of one kind in which its thread is from then on. The places of a kind form trees. So
ranges are made for each level of the trees, and they nest in the ranges of the level above.

Ranges of several kinds may cross, for example if a line opens a ``with`` block and is left inside of it. The places
of a launch are found by nesting, so where two ranges cross, one of them is cut at that time: a phase is cut by steps
and by ranges that the user named, a module by these and by phases, a line by all of them, a sampled frame by all.

Samples show in which function a thread was between two of its calls: where there are samples, they replace what the
boundaries around them say of the line. No launch is inside such a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.capture.boundaries.places import FRAME, KINDS, LINE, MODEL_CALL, MODULE, PHASE, STEP
from thence.model.forest import depths
from thence.model.formats import SAMPLE_STATES
from thence.model.intervals import NO_ROW, chain_to, enclosing
from thence.model.phases import POSITIONS, Position
from thence.readers.nesting import host_order
from thence.readers.recording.engine_places import Noted, engine_calls, with_places_of_calls
from thence.readers.recording.samples import NO_CELLS, without_notes

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.readers.recording.counted import Boundaries
    from thence.readers.recording.engine_places import EngineCalls
    from thence.readers.recording.samples import Cells


_MIN_STEPS = 2
"""Steps that no call of a model began, from which on calls of models are parts of them: without an optimizer's step
there is at most one, with which the recording began."""
_CATEGORY = {MODULE: "module", LINE: "python", PHASE: "phase", STEP: "step"}
_MOST_LEVELS = 512
"""Most levels of a tree of places; a deeper place counts as one at this level."""
_RANGE = {"thread": pl.Int64(), "start": pl.Int64(), "end": pl.Int64()}
_WITH_STATE = pl.DataFrame(schema={"state": pl.Int64()})


def place_ranges(
    boundaries: Boundaries, places: pl.DataFrame, fixed: pl.DataFrame, last: int, cells: Cells = NO_CELLS
) -> pl.DataFrame:
    """Ranges of all places of one process.

    Args:
        boundaries: of the process.
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
    whole = pl.concat([_WITH_STATE, *parts], how="diagonal_relaxed")
    shown = tree.shown.gather(whole["place"])
    function_only = (whole["category"] == "python") & (tree.line.gather(whole["place"]) == 0)
    position = pl.Series([Position.LINE.value, Position.FUNCTION.value], dtype=pl.Enum(POSITIONS))
    return whole.select(
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
        parent = self.of(known["parent"].fill_null(0).to_numpy())
        self.kind = np.concatenate([[0], known["kind"].to_numpy()])
        named = np.concatenate([[False], known["name"].is_not_null().to_numpy()])
        # A place gets its number when it is first used, after its parent: so the parent has a smaller number.
        wrong = (parent >= np.arange(1, len(parent) + 1)) | (self.kind[parent] != self.kind[1:])
        self.parent = np.concatenate([[0], np.where(wrong | ~named[parent], 0, parent)])
        above = np.where(self.parent[1:] == 0, NO_ROW, self.parent[1:] - 1)
        depth = np.minimum(depths(above), _MOST_LEVELS)
        self.depth = np.where(named, np.concatenate([[0], depth]), 0)
        nothing = pl.Series([None], dtype=pl.String)
        self.names = pl.concat([nothing, known["name"]])
        self.shown = pl.concat([nothing, known.select(_shown()).to_series()]).cast(pl.Categorical())
        self.line = pl.concat([pl.Series([0]), known["line"].fill_null(0).cast(pl.Int64)])

    def of(self, numbers: Int64) -> Int64:
        """Rows of places with these numbers."""
        if not len(self._numbers):
            return np.zeros(len(numbers), np.int64)
        at = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return np.where(self._numbers[at] == numbers, at + 1, 0)

    def of_kind(self, numbers: Int64, kind: int) -> Int64:
        """Rows of places with these numbers, 0 for those of other kinds."""
        rows = self.of(numbers)
        return np.where(self.kind[rows] == kind, rows, 0)


def _shown() -> pl.Expr:
    """The name of the host range of a place, in the form that `HOST_CATEGORIES` defines."""
    line = pl.when(pl.col("line") > 0).then(pl.col("line").cast(pl.String)).otherwise(pl.lit(""))
    frame = pl.format("{}({}): {}", pl.col("detail").fill_null("(unknown)"), line, "name")
    of_call = (pl.col("kind") == STEP) & (pl.col("name") == MODEL_CALL)
    name = pl.when(of_call).then(pl.lit("step")).otherwise("name")
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
        calls = (tree.names == MODEL_CALL).fill_null(value=False).to_numpy()[place[rows]]
        # A place without a name is a step that was not recorded; whether a call began it is not known.
        others = tree.names.is_not_null().to_numpy()[place[rows]] & ~calls
        if np.count_nonzero(others) >= _MIN_STEPS:
            rows = rows[~calls]
    rows = rows[np.argsort(boundaries.thread[rows], kind="stable")]
    return Noted(boundaries.thread[rows], boundaries.time[rows], place[rows])


def _ranges_of_kind(noted: Noted, tree: _Tree, kind: int, last: int) -> pl.DataFrame:
    """Ranges of the places of one kind: place (row), thread, start, end. The ranges of a thread nest."""
    thread, time, place = noted.thread, noted.time, noted.place
    new_thread = np.ones(len(place), np.bool_)
    new_thread[1:] = thread[1:] != thread[:-1]
    found = []
    ancestor = np.arange(len(tree.depth))
    for level in range(int(tree.depth[place].max(initial=0)), 0, -1):
        deeper = tree.depth > level
        ancestor[deeper] = tree.parent[ancestor[deeper]]
        here = np.where(tree.depth >= level, ancestor, 0)[place]
        change = new_thread | np.concatenate([[True], here[1:] != here[:-1]])[: len(here)]
        if kind == STEP:
            change[:] = True  # the next step can have the same name
        begin = np.flatnonzero(change)
        following = np.append(begin[1:], len(place))
        ends = np.append(time, last)[following]
        ends[np.append(new_thread, True)[following]] = last
        wanted = here[begin] > 0
        found.append((here[begin][wanted], thread[begin][wanted], time[begin][wanted], ends[wanted]))
    found.reverse()  # of equal ranges the first one contains the others: outer places come first
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)] if found else [np.empty(0, np.int64)] * 4
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
    at = pl.DataFrame(
        {"row": np.concatenate([rows for rows, _ in cuts]), "start": np.concatenate([times for _, times in cuts])}
    ).unique()
    if at.is_empty():
        return ranges
    whole = ranges.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    pieces = pl.concat([whole.select("row", "start"), at]).sort("row", "start")
    return (
        pieces.with_columns(until=pl.col("start").shift(-1).over("row"))
        .join(whole.drop("start"), on="row", how="left", maintain_order="left")
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
