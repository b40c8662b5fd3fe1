"""Interval arithmetic on int64 nanoseconds: unions, gaps, coverage, nesting.

An interval is half open, [start, end). All functions are vectorised; none loops over intervals. Most
other modules use these functions, so that they treat empty and touching intervals alike.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from thence.parallel import in_threads

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask

Weight = TypeVar("Weight", np.int64, np.float64)

NO_ROW = -1
"""Value of a row reference that refers to no row."""

NEVER = int(np.iinfo(np.int64).min)
"""A time before all others, for events that have not happened yet."""

_MIN_ROWS_OF_A_GROUP = 500  # mean number of rows of a group from which on a NumPy call per group is faster
_AT_ONCE = 1 << 18  # rows whose temporaries fit in the processor's cache
_MAX_CLIMBED = 4  # most single steps up, in multiples of all rows, before pointer doubling
_ROUND = 1000  # fixed cost of one round of array operations, expressed in rows


@dataclass(frozen=True)
class Intervals:
    """Intervals of time in the order of what they belong to, such as rows of gpu.

    Attributes:
        start: first nanosecond of each, shape (n,).
        end: first nanosecond after each, shape (n,).
    """

    start: Int64
    end: Int64

    @property
    def duration(self) -> Int64:
        """Length of each, ns."""
        return self.end - self.start

    def shifted(self, ns: int) -> Intervals:
        """The same intervals, later by this many nanoseconds."""
        return Intervals(self.start + ns, self.end + ns)


def reached_before(end: Int64, group: Int64 | None = None) -> Int64:
    """For each interval the latest end of all earlier intervals of its group (a running maximum).

    From this time on, an interval adds to the union of the earlier ones; if it starts later, there is a gap.

    Args:
        end: first nanosecond after, shape (n,). Within a group, rows must be in order of their start.
        group: of each interval, shape (n,), equal numbers in adjacent rows; None: all are of one group.

    Returns:
        int64 array of shape (n,), `NEVER` for the first of each group.
    """
    result = np.empty(len(end), np.int64)
    if len(end) == 0:
        return result
    changes = np.empty(0, np.int64) if group is None else _changes(group)
    result[0] = NEVER
    result[changes] = NEVER
    if len(changes) * _MIN_ROWS_OF_A_GROUP < len(end):
        for low, high in itertools.pairwise([0, *changes.tolist(), len(end)]):
            np.maximum.accumulate(end[low : high - 1], out=result[low + 1 : high])
        return result
    # Many groups: shift each group past the previous one, so that one running maximum serves all groups.
    number = np.zeros(len(end), np.int64)
    number[changes] = 1
    np.cumsum(number, out=number)
    low = int(end.min())
    span = int(end.max()) - low + 1
    if (int(number[-1]) + 1) * span < 1 << 62:  # shifted times fit into int64
        number *= span
        reached = np.maximum.accumulate(end - low + number) - number + low
    else:  # the shifted times would overflow: use the positions of the ends in sorted order instead
        order = np.argsort(end, kind="stable")
        rank = np.empty(len(end), np.int64)
        rank[order] = np.arange(len(end))
        number *= len(end)
        reached = end[order[np.maximum.accumulate(rank + number) - number]]
    result[1:] = reached[:-1]
    result[changes] = NEVER
    return result


def union_lengths(group: Int64, start: Int64, end: Int64, groups: int) -> Int64:
    """Time covered by at least one interval, per group, in nanoseconds.

    Args:
        group: group number of each interval, 0 to ``groups`` - 1, shape (n,).
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,); an interval that ends before it starts covers nothing.
        groups: how many groups there are.

    Returns:
        int64 array of shape (groups,).
    """
    totals = np.zeros(groups, np.int64)
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    first = np.concatenate([np.zeros(min(len(group), 1), np.int64), _changes(group)])
    added = _added(start, end, reached_before(end, group))
    totals[group[first]] = np.add.reduceat(added, first)
    return totals


def gaps(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The intervals between the first start and the last end that none of the intervals covers.

    Args:
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,).

    Returns:
        Starts and ends of the gaps, in order of time; their lengths are more than 0.
    """
    order = np.argsort(start, kind="stable")
    begins, covered_to = start[order][1:], np.maximum.accumulate(end[order])[:-1]
    empty = begins > covered_to
    return covered_to[empty], begins[empty]


def unions(group: Int64, start: Int64, end: Int64) -> tuple[Int64, Int64, Int64]:
    """The interval union of each group: intervals that neither overlap nor touch.

    Args:
        group: of each interval, shape (n,).
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,); an interval that ends before it starts covers nothing.

    Returns:
        Groups, starts and ends, in order of group and time, int64 arrays of shape (m,), m <= n.
    """
    lasting = end > start
    group, start, end = group[lasting], start[lasting], end[lasting]
    order = np.lexsort((start, group))
    group, start, end = group[order], start[order], end[order]
    first, begins, ends = _joined(start, end, reached_before(end, group))
    return group[first], begins, ends


def union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The interval union of one group: intervals that neither overlap nor touch; see `unions`."""
    lasting = end > start
    start, end = start[lasting], end[lasting]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    return _joined(start, end, reached_before(end))[1:]


def _joined(start: Int64, end: Int64, before: Int64) -> tuple[Mask, Int64, Int64]:
    """Merges sorted intervals: a mask of the intervals that start a merged one, and the merged starts and ends."""
    first = start > before
    last = np.ones(len(start), np.bool_)
    last[:-1] = first[1:]
    return first, start[first], np.maximum(before[last], end[last])


def _added(start: Int64, end: Int64, before: Int64) -> Int64:
    """The time that each of the sorted intervals adds to the union of the earlier ones."""
    added = np.maximum(start, before)
    np.subtract(end, added, out=added)
    return np.maximum(added, 0, out=added)


def _changes(group: Int64) -> Int64:
    """Rows whose group differs from that of the previous row."""
    return np.flatnonzero(group[1:] != group[:-1]) + 1


def levels(start: Int64, end: Int64, weight: npt.NDArray[Weight]) -> tuple[Int64, Int64, npt.NDArray[Weight]]:
    """The sum of the weights of all open intervals as a step function of time.

    With weight 1, the sum is the number of open intervals. With a different power of two as the weight of each of
    several unions, it is a bit mask of the open unions.

    Args:
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,), not before the start.
        weight: of each interval, shape (n,), int64 or float64.

    Returns:
        Starts, ends and sums of consecutive pieces of time, none of them empty, in order: from each
        start or end of an interval to the next.
    """
    times, steps = np.concatenate([start, end]), np.concatenate([weight, -weight])
    order = np.argsort(times, kind="stable")
    times = times[order]
    first = np.ones(len(times), np.bool_)
    first[1:] = times[1:] > times[:-1]
    level = np.cumsum(np.add.reduceat(steps[order], np.flatnonzero(first)))
    times = times[first]
    return times[:-1], times[1:], level[:-1]


def covered_lengths(start: Int64, end: Int64, other_start: Int64, other_end: Int64) -> Int64:
    """The overlap of each interval with the union of the other intervals, in nanoseconds.

    Args:
        start: of the queried intervals, shape (n,), in any order.
        end: of the queried intervals, not before their start.
        other_start: of the covering intervals, shape (m,), in any order; they may overlap.
        other_end: of the covering intervals.

    Returns:
        int64 array of shape (n,), between 0 and ``end - start``.
    """
    if len(other_start) == 0:
        return np.zeros(len(start), np.int64)
    order = np.argsort(other_start, kind="stable")
    begins, ends = other_start[order], other_end[order]
    before = reached_before(ends)
    total = np.zeros(len(ends) + 1, np.int64)
    np.cumsum(_added(begins, ends, before), out=total[1:])
    np.maximum(before, ends, out=ends)

    def covered_until(time: Int64) -> Int64:
        begun = np.searchsorted(begins, time, side="right")
        last = np.maximum(begun - 1, 0)
        beyond = np.where(begun > 0, np.maximum(ends[last] - time, 0), 0)
        result: Int64 = total[begun] - beyond
        return result

    return covered_until(end) - covered_until(start)


def last_begun(start: Int64, times: Int64) -> Int64:
    """For each time the row of the interval with the latest start at or before it.

    Args:
        start: first nanosecond, shape (n,), in any order; of equal starts the later row counts.
        times: shape (m,).

    Returns:
        int64 array of shape (m,): row numbers, `NO_ROW` where none had begun.
    """
    order = np.argsort(start, kind="stable")
    begun = np.searchsorted(start[order], times, side="right")
    rows: Int64 = np.concatenate([[NO_ROW], order])[begun]
    return rows


def longest_begun(start: Int64, end: Int64, times: Int64) -> Int64:
    """For each time the row of the interval with the latest end among those that start at or before it.

    If a time, or an interval that starts at it, lies in any of the intervals, it also lies in the returned one.

    Args:
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,); of equal ends the interval that starts first counts.
        times: shape (m,).

    Returns:
        int64 array of shape (m,): row numbers, `NO_ROW` where none had begun.
    """
    order = np.argsort(start, kind="stable")
    ends = end[order]
    raised = np.ones(len(end), np.bool_)  # the rows that end later than all earlier rows
    raised[1:] = ends[1:] > np.maximum.accumulate(ends)[:-1]
    longest = np.maximum.accumulate(np.where(raised, np.arange(len(end)), 0))
    begun = np.searchsorted(start[order], times, side="right")
    rows: Int64 = np.concatenate([[NO_ROW], order[longest]])[begun]
    return rows


def innermost(rows: Int64, start: Int64, end: Int64, parent: Int64, moments: tuple[Int64, Int64]) -> Int64:
    """For each queried interval the innermost interval of one track that encloses it.

    Unlike in the rest of this module, ends are inclusive: an interval that ends together with another is in it.

    Args:
        rows: rows of the track, shape (k,), in order of their start and, for equal starts, of nesting.
        start: of all intervals, shape (n,).
        end: of all intervals, shape (n,).
        parent: row of the innermost interval around each, `NO_ROW` for the outermost; see `enclosing`.
        moments: starts and ends of the queried intervals, shape (m,).

    Returns:
        int64 array of shape (m,): row numbers, `NO_ROW` where none is around.
    """
    begin, until = moments
    begun = np.searchsorted(start[rows], begin, side="right")
    enclosing_row: Int64 = np.concatenate([[NO_ROW], rows])[begun]
    climbing = np.flatnonzero(enclosing_row >= 0)
    climbing = climbing[end[enclosing_row[climbing]] < until[climbing]]
    while len(climbing):
        enclosing_row[climbing] = parent[enclosing_row[climbing]]
        climbing = climbing[enclosing_row[climbing] >= 0]
        climbing = climbing[end[enclosing_row[climbing]] < until[climbing]]
    return enclosing_row


def shared_length(first: tuple[Int64, Int64], second: tuple[Int64, Int64]) -> int:
    """The length of the intersection of two interval unions, in nanoseconds.

    Args:
        first: starts and ends of intervals that do not overlap each other, as `union` returns them.
        second: the second union, in the same form.
    """
    return int(covered_lengths(*first, *second).sum())


def enclosing(track: npt.NDArray[np.generic], start: Int64, end: Int64) -> Int64:
    """The row of the innermost interval that contains each interval, on the same track.

    Interval j contains i when it starts no later and ends no earlier; of equal intervals the earlier row
    contains the later. An empty interval counts as one nanosecond long, so that it lies in an interval that
    starts at the same time, and not in one that ends at that time.

    Args:
        track: thread number of each interval, shape (n,).
        start: shape (n,).
        end: shape (n,). Rows must be sorted by (track, start, -end).

    Returns:
        int64 array of shape (n,): row numbers, `NO_ROW` for the outermost.
    """
    result = np.full(len(start), NO_ROW, np.int64)
    if len(start) == 0:
        return result
    end = np.maximum(end, start + 1)
    # Only an interval in which the next one starts can contain any. They are few, so nest them first.
    opens = np.zeros(len(start), np.bool_)
    opens[:-1] = (track[1:] == track[:-1]) & (start[1:] < end[:-1])
    rows = np.flatnonzero(opens)
    if len(rows) == 0:
        return result
    ends = end[rows]
    above = _above(track[rows], ends)
    result[rows] = np.where(above >= 0, rows[above], NO_ROW)
    steps = _steps(above)

    # The container of a row is the last earlier candidate that does not end before the row does. It is
    # the very last candidate or one of its ancestors.
    def nest(low: int) -> None:
        part = slice(low, low + _AT_ONCE)
        last = int(np.searchsorted(rows, low)) - 1 + np.cumsum(opens[part])
        inside = np.flatnonzero(~opens[part] & (last >= 0))
        last = last[inside]
        inside += low
        same = track[rows[last]] == track[inside]
        inside, last = inside[same], last[same]
        container = _climbed(steps, ends, last, end[inside])
        result[inside] = np.where(container >= 0, rows[container], NO_ROW)

    in_threads(nest, range(0, len(start), _AT_ONCE))
    return result


def _above(track: npt.NDArray[np.generic], end: Int64) -> Int64:
    """For each interval the last earlier interval on its track that does not end before it."""
    above = np.arange(-1, len(end) - 1, dtype=np.int64)
    above[1:][track[1:] != track[:-1]] = NO_ROW

    def within(low: int) -> Int64:
        """Finds the results that lie in the same part; returns the rows whose result lies in an earlier part."""
        part = above[low : low + _AT_ONCE]
        _jump(above, end, low + np.flatnonzero(part >= low), low)
        return low + np.flatnonzero((part >= 0) & (part < low))

    left = in_threads(within, range(0, len(end), _AT_ONCE))
    _jump(above, end, np.concatenate(left), 0)
    return above


def _jump(above: Int64, end: Int64, active: Int64, low: int) -> None:
    """Finds for each active row the last earlier interval that does not end before it; changes ``above`` in place.

    "Previous greater element" by pointer jumping: all rows between a row and its candidate are known to end too
    early. If the candidate ends too early as well, its own candidate is the next to try, and the distance roughly
    doubles each round. A candidate before row ``low`` is left as it is.
    """
    while len(active):
        tried = above[active]
        active = active[end[tried] < end[active]]
        above[active] = above[above[active]]
        active = active[above[active] >= low]


def _steps(above: Int64) -> list[Int64]:
    """Binary lifting table: the ancestors 1, 2, 4, ... steps up from each row, `NO_ROW` above the root."""
    steps = [above]
    while (steps[-1] >= 0).any():
        step = steps[-1]
        steps.append(np.where(step >= 0, step[step], NO_ROW))
    return steps


def _climbed(steps: list[Int64], ends: Int64, rows: Int64, wanted: Int64) -> Int64:
    """The first of each row and its ancestors that ends at the wanted time or later.

    Ends never decrease towards the root, so binary lifting (2^n, ... 4, 2, 1 steps) finds it.
    """
    result = rows.copy()
    climbing = np.flatnonzero(ends[rows] < wanted)
    row, wanted = result[climbing], wanted[climbing]
    for step in reversed(steps[:-1]):
        up = step[row]
        goes = (up >= 0) & (ends[up] < wanted)
        row[goes] = up[goes]
    result[climbing] = steps[0][row]
    return result


def chain_to(parent: Int64, rows: Int64, wanted: Mask) -> Int64:
    """The first wanted row among each row and its ancestors.

    Args:
        parent: parent row of every row, `NO_ROW` at the top, shape (n,).
        rows: where to start, shape (m,); `NO_ROW` finds nothing.
        wanted: which rows count, shape (n,).

    Returns:
        int64 array of shape (m,): row numbers, `NO_ROW` where none is found.
    """
    if not wanted.any():
        return np.full(len(rows), NO_ROW, np.int64)
    result = rows.copy()
    climbing = np.flatnonzero((rows >= 0) & ~wanted[rows])
    at = rows[climbing]
    spent = 0
    while len(climbing) and spent <= _MAX_CLIMBED * len(parent):
        spent += len(climbing) + _ROUND
        at = parent[at]
        goes_on = (at >= 0) & ~wanted[at]
        result[climbing] = at
        climbing, at = climbing[goes_on], at[goes_on]
    if len(climbing):  # very deep: switch from single steps to pointer doubling over all rows
        result[climbing] = _nearest(parent, wanted)[result[climbing]]
    return result


def _nearest(parent: Int64, wanted: Mask) -> Int64:
    """The first wanted row among every row and its ancestors, `NO_ROW` if none; by pointer doubling."""
    top = len(parent)
    jump = np.append(np.where(wanted, np.arange(top), np.where(parent >= 0, parent, top)), top)
    while True:
        further = jump[jump]
        if (further == jump).all():
            return np.where(jump == top, NO_ROW, jump)[:top]
        jump = further
