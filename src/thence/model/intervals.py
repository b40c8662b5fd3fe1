"""Interval arithmetic on int64 nanoseconds: the only such code in thence.

An interval is half open, [start, end). All functions are vectorised; none loops over intervals
(a loop over devices is fine).
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

__all__ = [
    "NO_ROW",
    "chain_to",
    "covered_lengths",
    "enclosing",
    "gaps",
    "levels",
    "shared_length",
    "union",
    "union_length",
    "union_lengths",
]

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_ROW = -1
"""What a row reference holds where there is no row."""

_AT_ONCE = 1 << 18  # rows whose temporaries stay in the processor's cache
_MOST_CLIMBED = 4  # steps up one by one, in multiples of all rows, before steps double in length
_ROUND = 1000  # what one round of array operations costs beside its rows, in rows


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
    start, end = start[order], end[order]
    bounds = np.searchsorted(group[order], np.arange(groups + 1))
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        totals[number] = _union_of_sorted(start[low:high], end[low:high])
    return totals


def union_length(start: Int64, end: Int64) -> int:
    """Time covered by at least one of the intervals, in nanoseconds."""
    return int(union_lengths(np.zeros(len(start), np.int64), start, end, 1)[0])


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


def union(start: Int64, end: Int64) -> tuple[Int64, Int64]:
    """The same time as intervals that neither overlap nor touch.

    Args:
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,); an interval that ends before it starts covers nothing.

    Returns:
        Starts and ends, in order of time, int64 arrays of shape (m,), m <= n.
    """
    lasting = end > start
    order = np.argsort(start[lasting], kind="stable")
    start, reached = start[lasting][order], np.maximum.accumulate(end[lasting][order])
    first = np.ones(len(start), np.bool_)
    first[1:] = start[1:] > reached[:-1]
    last = np.ones(len(start), np.bool_)
    last[:-1] = first[1:]
    return start[first], reached[last]


def levels(start: Int64, end: Int64, weight: Int64) -> tuple[Int64, Int64, Int64]:
    """The sum of the weights of the intervals that last, over time.

    With weight 1 that is how many last at once; with a power of two for each of several unions, which.

    Args:
        start: first nanosecond, shape (n,), in any order.
        end: first nanosecond after, shape (n,), not before the start.
        weight: of each interval, shape (n,).

    Returns:
        Starts, ends and sums of consecutive pieces of time, none of them empty, in order.
    """
    times, steps = np.concatenate([start, end]), np.concatenate([weight, -weight])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(steps[order])
    lasting = times[1:] > times[:-1]
    return times[:-1][lasting], times[1:][lasting], level[:-1][lasting]


def covered_lengths(start: Int64, end: Int64, other_start: Int64, other_end: Int64) -> Int64:
    """Time of each interval during which at least one of the others lasts, in nanoseconds.

    Args:
        start: of the intervals asked about, shape (n,), in any order.
        end: of the same, not before their start.
        other_start: of the intervals that cover, shape (m,), in any order; they may overlap.
        other_end: of the same.

    Returns:
        int64 array of shape (n,), between 0 and ``end - start``.
    """
    if len(other_start) == 0:
        return np.zeros(len(start), np.int64)
    order = np.argsort(other_start, kind="stable")
    begins = other_start[order]
    reached = np.maximum.accumulate(other_end[order])
    fresh = begins.copy()  # where each adds to what those before it cover
    np.maximum(fresh[1:], reached[:-1], out=fresh[1:])
    total = np.concatenate([[0], np.cumsum(np.maximum(reached - fresh, 0))])

    def covered_until(time: Int64) -> Int64:
        begun = np.searchsorted(begins, time, side="right")
        last = np.maximum(begun - 1, 0)
        beyond = np.where(begun > 0, np.maximum(reached[last] - time, 0), 0)
        result: Int64 = total[begun] - beyond
        return result

    return covered_until(end) - covered_until(start)


def shared_length(one: tuple[Int64, Int64], other: tuple[Int64, Int64]) -> int:
    """Time in which both of two unions last, in nanoseconds.

    Args:
        one: starts and ends of intervals that do not overlap each other, as `union` returns them.
        other: the same.
    """
    return int(covered_lengths(*one, *other).sum())


def _union_of_sorted(start: Int64, end: Int64) -> int:
    if len(start) == 0:
        return 0
    covered_to = np.maximum.accumulate(end)
    begins = start.copy()
    np.maximum(begins[1:], covered_to[:-1], out=begins[1:])
    return int(np.maximum(end - begins, 0).sum())


def enclosing(track: Int64, start: Int64, end: Int64) -> Int64:
    """The row of the innermost interval that contains each interval, on the same track.

    Interval j contains i when it starts no later and ends no earlier; of equal ones the earlier row
    contains the later. An interval of no length counts as one nanosecond long, so that it lies in
    what begins with it and not in what ends there.

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
    # Only what the next interval begins in can contain anything. Few do, so they are nested first.
    opens = np.zeros(len(start), np.bool_)
    opens[:-1] = (track[1:] == track[:-1]) & (start[1:] < end[:-1])
    rows = np.flatnonzero(opens)
    if len(rows) == 0:
        return result
    ends = end[rows]
    above = _above(track[rows], ends)
    result[rows] = np.where(above >= 0, rows[above], NO_ROW)
    steps = _steps(above)
    # What contains another row is the last of them before it that does not end before it does. If
    # that is not the very last, it is on the way up from there.
    before = 0
    for low in range(0, len(start), _AT_ONCE):
        part = slice(low, low + _AT_ONCE)
        last = before - 1 + np.cumsum(opens[part])
        before = int(last[-1]) + 1
        inside = np.flatnonzero(~opens[part] & (last >= 0))
        last = last[inside]
        inside += low
        same = track[rows[last]] == track[inside]
        inside, last = inside[same], last[same]
        found = _climbed(steps, ends, last, end[inside])
        result[inside] = np.where(found >= 0, rows[found], NO_ROW)
    return result


def _above(track: Int64, end: Int64) -> Int64:
    """Of each interval the last before it, on its track, that does not end before it does."""
    number = np.arange(len(end), dtype=np.int64)
    above = number - 1
    above[1:][track[1:] != track[:-1]] = NO_ROW
    # What lies between a row and its candidate is known to end too early. So where the candidate
    # ends too early as well, its own candidate is the next one to try, and the distance roughly
    # doubles each round: "previous greater element" by pointer jumping.
    active = np.flatnonzero(above >= 0)
    while len(active):
        tried = above[active]
        active = active[end[tried] < end[active]]
        above[active] = above[above[active]]
        active = active[above[active] >= 0]
    return above


def _steps(above: Int64) -> list[Int64]:
    """Where 1, 2, 4, ... steps up lead from each row, `NO_ROW` beyond the top."""
    steps = [above]
    while (steps[-1] >= 0).any():
        step = steps[-1]
        steps.append(np.where(step >= 0, step[step], NO_ROW))
    return steps


def _climbed(steps: list[Int64], ends: Int64, rows: Int64, wanted: Int64) -> Int64:
    """The first on the way up from each of the rows, itself included, that ends when wanted or later.

    Ends never fall on the way up, so that steps of 2^n, ... 4, 2 and 1 find it.
    """
    found = rows.copy()
    climbing = np.flatnonzero(ends[rows] < wanted)
    at, wanted = found[climbing], wanted[climbing]
    for step in reversed(steps[:-1]):
        up = step[at]
        goes = (up >= 0) & (ends[up] < wanted)
        at[goes] = up[goes]
    found[climbing] = steps[0][at]
    return found


def chain_to(parent: Int64, rows: Int64, wanted: Mask) -> Int64:
    """The nearest wanted row on the way up from each of the rows, itself included.

    Args:
        parent: parent row of every row, `NO_ROW` at the top, shape (n,).
        rows: where to start, shape (m,); `NO_ROW` finds nothing.
        wanted: which rows count, shape (n,).

    Returns:
        int64 array of shape (m,): row numbers, `NO_ROW` where none is found.
    """
    if not wanted.any():
        return np.full(len(rows), NO_ROW, np.int64)
    found = rows.copy()
    climbing = np.flatnonzero(found >= 0)
    climbing = climbing[~wanted[found[climbing]]]
    spent = 0
    while len(climbing) and spent <= _MOST_CLIMBED * len(parent):
        spent += len(climbing) + _ROUND
        up = parent[found[climbing]]
        found[climbing] = up
        climbing = climbing[up >= 0]
        climbing = climbing[~wanted[found[climbing]]]
    if len(climbing):  # very deep: from here on every row jumps twice as far each time
        found[climbing] = _nearest(parent, wanted)[found[climbing]]
    return found


def _nearest(parent: Int64, wanted: Mask) -> Int64:
    """The nearest wanted row on the way up from every row, itself included, `NO_ROW` where there is none."""
    top = len(parent)
    jump = np.append(np.where(wanted, np.arange(top), np.where(parent >= 0, parent, top)), top)
    while True:
        further = jump[jump]
        if (further == jump).all():
            return np.where(jump == top, NO_ROW, jump)[:top]
        jump = further
