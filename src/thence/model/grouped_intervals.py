"""Intervals of several groups on one timeline, so that one pass over it measures all groups.

With one pass per device, a hundred thousand devices take minutes. If each group were shifted by the spans of the
groups before it, times might not fit int64. Only overlaps matter for unions and coverage, so the time in which
nothing runs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.columns import values_or
from thence.model.intervals import NEVER, NO_ROW, reached_before, unions

if TYPE_CHECKING:
    from typing import Literal

    import numpy.typing as npt

    from thence.model.arrays import Array, Int64, Mask


@dataclass(frozen=True)
class GroupedIntervals:
    """Intervals with their lengths and overlaps, shifted so that intervals of different groups never touch.

    Attributes:
        start, end: of each interval in the order given; empty intervals are at 0.
        begin: where each stretch without a gap begins, ascending.
        group: of each stretch.
        groups: how many groups there are.
    """

    start: Int64
    end: Int64
    begin: Int64
    group: Int64
    groups: int

    @classmethod
    def of(cls, group: Int64, start: Int64, end: Int64, groups: int) -> GroupedIntervals:
        """Places the intervals of groups on one timeline.

        Args:
            group: of each interval, from 0 to ``groups`` - 1, shape (n,).
            start: first nanosecond, shape (n,), in any order.
            end: first nanosecond after. The lengths add up to less than 2^62.
            groups: how many groups there are.
        """
        rows = np.flatnonzero(end > start)
        rows = rows[in_order(group[rows], start[rows], groups)]
        number, begins, ends = group[rows], start[rows], end[rows]
        first = begins > reached_before(ends, number)
        stretch = np.cumsum(first) - 1
        opening = np.flatnonzero(first)
        # Leave one nanosecond between two stretches: touching stretches would be one.
        lengths = np.maximum.reduceat(ends, opening) - begins[opening] + 1 if len(opening) else np.empty(0, np.int64)
        begin = np.cumsum(lengths) - lengths
        moved = (begin - begins[opening])[stretch]
        result = np.zeros((2, len(start)), np.int64)
        result[0, rows], result[1, rows] = begins + moved, ends + moved
        return cls(result[0], result[1], begin, number[opening], groups)

    def group_at(self, time: Int64) -> Int64:
        """The group at each time; every time must lie in a stretch."""
        group: Int64 = self.group[np.searchsorted(self.begin, time, side="right") - 1]
        return group

    def sums(self, time: Int64, values: Int64) -> Int64:
        """The sum of the values for each group; each value counts for the group at its time."""
        result = np.zeros(self.groups, np.int64)
        np.add.at(result, self.group_at(time), values)
        return result


@dataclass(frozen=True)
class GroupedTimes:
    """Times of several groups in order of group and time, which are searched in all groups at once.

    Attributes:
        key: ``span`` times the group plus the place of each time, ascending.
        low: the earliest time but for `NEVER`, ns.
        span: larger than all places.
        distinct: the distinct times, if places are positions among these; None if they are times since ``low``, after
            those of `NEVER` and of all times before ``low``.
    """

    key: Int64
    low: int
    span: int
    distinct: Int64 | None

    @classmethod
    def of(cls, group: Int64, time: Int64, groups: int) -> GroupedTimes:
        """Prepares the search.

        Args:
            group: of each time, from `NO_ROW` to ``groups`` - 1, shape (n,).
            time: ns, shape (n,).
            groups: how many groups there are.
        """
        high = int(time.max(initial=0))
        low = int(np.min(time, where=time != NEVER, initial=high))
        span = high - low + 4
        if (groups + 1) * span < 1 << 62:  # the keys fit into int64
            key = np.maximum(time, low - 2)
            key -= low - 2
            key += group * span
            distinct = None
        else:
            distinct, place = np.unique(time, return_inverse=True)
            span = len(distinct) + 1
            key = group * span + place
        key.sort(kind="stable")  # fast, because they mostly are in order
        return cls(key, low, span, distinct)

    def group(self, rows: Int64) -> Int64:
        """The group of some of the times; that of `NO_ROW` is `NO_ROW`."""
        if not len(self.key):
            return np.full(len(rows), NO_ROW)
        return np.where(rows == NO_ROW, NO_ROW, self.key[rows] // self.span)

    def search(self, group: Int64, time: Int64, side: Literal["left", "right"]) -> Int64:
        """Where each time (later than `NEVER`) belongs: as `numpy.searchsorted` in its group, counted in all times."""
        if self.distinct is None:
            place = np.clip(time, self.low - 1, self.low + self.span - 3) - (self.low - 2)
            return np.searchsorted(self.key, group * self.span + place, side)
        return np.searchsorted(self.key, group * self.span + np.searchsorted(self.distinct, time, side))

    def last(self, group: Int64, time: Int64) -> Int64:
        """The last of equal or earlier times of its group for each time: int64 rows, `NO_ROW` where there is none."""
        row = self.search(group, time, "right") - 1
        return np.where((row != NO_ROW) & (self.group(row) == group), row, NO_ROW)


@dataclass(frozen=True)
class GroupedUnion:
    """The union of the intervals of each group: intervals that neither overlap nor touch.

    Attributes:
        group, start, end: of each interval (ns), in order of group and time.
        starts: the starts, to be searched.
        total: length of all earlier intervals, ns, shape (n + 1,).
        groups: how many groups there are.
    """

    group: Int64
    start: Int64
    end: Int64
    starts: GroupedTimes
    total: Int64
    groups: int

    @classmethod
    def of(cls, group: Int64, start: Int64, end: Int64, groups: int) -> GroupedUnion:
        """Makes the unions.

        Args:
            group: of each interval, from 0 to ``groups`` - 1, shape (n,).
            start: first nanosecond, shape (n,), in any order.
            end: first nanosecond after, shape (n,); an interval that ends before it starts covers nothing.
            groups: how many groups there are.
        """
        group, start, end = unions(group, start, end)
        total = np.append(0, np.cumsum(end - start))
        return cls(group, start, end, GroupedTimes.of(group, start, groups), total, groups)

    def covered(self, group: Int64, start: Int64, end: Int64) -> Int64:
        """How much of each interval the union of its group covers, ns; no interval ends before its start."""
        return self._covered_until(group, end) - self._covered_until(group, start)

    def _covered_until(self, group: Int64, time: Int64) -> Int64:
        """The length of the unions of all earlier groups, and of the group until the time."""
        begun = self.starts.search(group, time, "right")
        beyond = np.maximum(np.append(self.end, NEVER)[begun - 1] - time, 0)
        ours = np.append(self.group, NO_ROW)[begun - 1] == group
        result: Int64 = self.total[begun] - np.where(ours, beyond, 0)
        return result


def in_order(group: Int64, time: Int64, groups: int) -> Int64:
    """The rows in order of group and time; those that are equal keep their order.

    This is `numpy.lexsort`, which takes ten times as long if the times of each group are nearly in order.

    Args:
        group: of each row, from `NO_ROW` to ``groups`` - 1, shape (n,).
        time: ns, shape (n,).
        groups: how many groups there are.
    """
    low, high = (int(time.min()), int(time.max())) if len(time) else (0, 0)
    span = high - low + 1
    if (groups + 1) * span < 1 << 62:
        return np.argsort(group * span + (time - low), kind="stable")
    return np.lexsort((time, group))


def numbered(frame: pl.DataFrame, *columns: str) -> tuple[Int64, pl.DataFrame]:
    """Numbers the distinct values of columns in ascending order, null first.

    Returns:
        The number of each row, and a frame with one row of values per number.
    """
    # Rows come in runs, mostly; only the first of each run is looked up.
    first = np.flatnonzero(_begins([frame[name] for name in columns]))
    keys = [_ordered(frame[name], first) for name in columns]
    order = np.lexsort(keys[::-1])
    new = np.zeros(len(first), np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    number = np.empty(len(first), np.int64)
    number[order] = np.cumsum(new) - 1
    length = np.diff(np.append(first, frame.height))
    rows = first[order[new]]
    values = {name: frame[name].to_numpy()[rows] if _is_plain(frame[name]) else frame[name][rows] for name in columns}
    return np.repeat(number, length), pl.DataFrame(values)


def numbered_together(first: pl.DataFrame, second: pl.DataFrame, *columns: str) -> tuple[Int64, Int64, int]:
    """As `numbered`, with the same numbers for two frames: of the rows of each, and how many numbers there are."""
    both = pl.concat([frame.select(columns) for frame in (first, second)], how="vertical_relaxed")
    number, groups = numbered(both, *columns)
    return number[: first.height], number[first.height :], groups.height


def _is_plain(values: pl.Series) -> bool:
    """Whether an array of NumPy is the same: most keys are integers without null."""
    return values.dtype.is_integer() and not values.null_count()


def _begins(columns: list[pl.Series]) -> Mask:
    """Which rows differ from the row before them in a column; the first does."""
    result = np.zeros(len(columns[0]), np.bool_)
    result[:1] = True
    for values in columns:
        if _is_plain(values):
            array = values.to_numpy()
            result[1:] |= array[1:] != array[:-1]
        else:
            result[1:] |= values[1:].ne_missing(values[:-1]).to_numpy()
    return result


def _ordered(values: pl.Series, rows: Int64) -> Array:
    """Numbers in the order of the values of some rows, null first."""
    return values.to_numpy()[rows] if _is_plain(values) else values_or(values[rows].rank("dense"), 0)


def rows_of_groups(number: Int64, groups: int) -> list[Int64]:
    """The rows of each group, ascending: for loops over ranks or devices that would else filter once for each.

    Args:
        number: of the group of each row, from 0 to ``groups`` - 1, as `numbered` returns it.
        groups: how many groups there are.
    """
    order = np.argsort(number, kind="stable")
    return np.split(order, np.searchsorted(number[order], np.arange(1, groups)))[:groups]


def rows_by_number(numbers: npt.NDArray[np.integer[Any]]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """The rows of each number, with one sort for all of them; numbers and rows are ascending."""
    order = np.argsort(numbers, kind="stable")
    distinct, first = np.unique(numbers[order], return_index=True)
    return list(zip(distinct.tolist(), np.split(order, first[1:]), strict=True)) if len(distinct) else []


def distinct(values: Int64) -> Int64:
    """The distinct values, ascending, shape (m,).

    Without further results, `np.unique` numbers values in a hash table: where most values differ, that takes twenty
    times as long.
    """
    ordered = np.sort(values)
    first = np.ones(len(ordered), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]
