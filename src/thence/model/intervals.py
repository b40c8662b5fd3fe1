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
    rows = len(start)
    if rows == 0:
        return np.empty(0, np.int64)
    end = np.maximum(end, start + 1)
    number = np.arange(rows, dtype=np.int64)
    same_track = track[1:] == track[:-1]
    # Only what the next interval begins in can contain anything, so the first candidate of each row
    # is the last such interval before it on its track.
    open_at_next = np.append(same_track & (start[1:] < end[:-1]), [False])
    last = np.maximum.accumulate(np.where(open_at_next, number, NO_ROW))
    first = np.maximum.accumulate(np.where(np.append([True], ~same_track), number, 0))
    candidate = np.append([NO_ROW], last[:-1])
    candidate[candidate < first] = NO_ROW
    # What lies between a row and its candidate is known to end too early. So where the candidate
    # ends too early as well, its own candidate is the next one to try, and the distance roughly
    # doubles each round: "previous greater element" by pointer jumping.
    active = np.flatnonzero(candidate >= 0)
    while len(active):
        tried = candidate[active]
        active = active[end[tried] < end[active]]
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    return candidate


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
    while len(climbing):
        up = parent[found[climbing]]
        found[climbing] = up
        climbing = climbing[up >= 0]
        climbing = climbing[~wanted[found[climbing]]]
    return found
