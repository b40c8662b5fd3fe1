"""The innermost host row of each thread at any time, as pieces of time.

The end of an API call comes from another clock. So a call ends at the latest when the row around it ends, or when the
next row of its thread begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import NEVER, NO_ROW, reached_before

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import polars as pl

    from thence.model.arrays import Int64, Mask

    Rows = npt.NDArray[np.int32] | Int64

_LATEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Pieces:
    """Intervals, cut into pieces by the host row of a thread.

    Attributes:
        of: number of the interval that each piece is part of.
        start, end: ns; the pieces of an interval tile it.
        row: host row that the thread is in, `NO_ROW` if it is in none.
    """

    of: Int64
    start: Int64
    end: Int64
    row: Rows

    def chosen(self, which: Int64 | Mask) -> Pieces:
        """The pieces with these numbers, or where the mask is true."""
        return Pieces(self.of[which], self.start[which], self.end[which], self.row[which])


def together(parts: Sequence[Pieces]) -> Pieces:
    """Concatenates pieces; there must be at least one part."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.of, part.start, part.end, part.row) for part in parts), strict=True)
    return Pieces(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class Leaves:
    """The innermost row of one thread over time: ``row[i]`` from ``time[i]`` to ``time[i + 1]``."""

    time: Int64
    row: Rows

    def within(self, start: Int64, end: Int64) -> Pieces:
        """Cuts intervals (ns, end after start) where the innermost row changes."""
        first, count = self._segments(start, end)
        last = np.cumsum(count) - 1
        of = np.repeat(np.arange(len(start)), count)
        segment = np.arange(len(of)) + np.repeat(first - last + count - 1, count)
        begins, row = self.time[segment], self.row[segment]
        begins[last - count + 1] = start
        ends = np.empty(len(of), np.int64)
        ends[:-1] = begins[1:]
        ends[last] = end
        return Pieces(of, begins, ends, row)

    def lasting(self, wanted: Mask, near: tuple[Int64, Int64]) -> tuple[Int64, Int64, Rows]:
        """Starts, ends and rows of the pieces of time in which the thread is in a wanted row.

        Args:
            wanted: for each host row, whether it is wanted.
            near: starts and ends of intervals, in order, that do not overlap; pieces that overlap none of them may be
                left out.
        """
        if len(near[0]) < len(self.time):
            first, count = self._segments(*near)
            last = np.cumsum(count)
            segment = np.arange(last[-1] if len(last) else 0) + np.repeat(first - last + count, count)
            # The last piece of one interval may be the first of the next.
            segment = segment[np.diff(segment, prepend=-1) > 0]
        else:
            segment = np.arange(len(self.time))
        segment = segment[self.row[segment] != NO_ROW]
        segment = segment[wanted[self.row[segment]]]
        ends = self.time[np.minimum(segment + 1, len(self.time) - 1)]
        return self.time[segment], ends, self.row[segment]

    def chosen(self, wanted: Mask, silent: tuple[int, int] | None = None) -> tuple[Int64, Int64, Rows]:
        """Starts, ends and rows of all pieces of time in which the thread is in a wanted row.

        Args:
            wanted: for each host row, whether it is wanted.
            silent: pieces in which the thread is in no row are also included if they are between these times (ns).
        """
        until = np.append(self.time[1:], _LATEST)
        taken = (self.row != NO_ROW) & wanted[self.row]
        if silent is not None:
            taken |= (self.row == NO_ROW) & (self.time >= silent[0]) & (until <= silent[1])
        return self.time[taken], until[taken], self.row[taken]

    def _segments(self, start: Int64, end: Int64) -> tuple[Int64, Int64]:
        """The first piece of time that each interval overlaps, and the number of pieces that it overlaps."""
        first = np.searchsorted(self.time, start, side="right") - 1
        return first, np.maximum(np.searchsorted(self.time, end, side="left") - first, 1)


def merged(parts: Sequence[tuple[Int64, Int64, Rows]]) -> Leaves:
    """Merges several threads: at any time, the row of the piece that ends last among those that cover that time.

    Args:
        parts: starts, ends and rows of pieces of time, of each thread; at least one thread.
    """
    start, end, row = map(np.concatenate, zip(*parts, strict=True))
    if not len(start):
        return NOWHERE
    order = np.argsort(start, kind="stable")
    start, end, row = start[order], end[order], row[order]
    longer = end > reached_before(end)
    start, end, row = start[longer], end[longer], row[longer]
    time = np.empty(2 * len(start) + 1, np.int64)
    rows = np.full(len(time), NO_ROW, row.dtype)
    time[0], time[1::2], time[2::2] = NEVER, start, end
    rows[1::2] = row
    # A piece during which the next piece begins ends there, without a NO_ROW piece after it.
    kept = np.ones(len(time), np.bool_)
    kept[2:-1:2] = end[:-1] < start[1:]
    return Leaves(time[kept], rows[kept])


def thread_numbers(host: pl.DataFrame) -> Int64:
    """The number of each host row's thread, from 0, in the order of the table."""
    keys = host.select("rank", "process", "thread")
    changed = np.zeros(host.height, np.bool_)
    for name in keys.columns:
        values = keys[name].to_numpy()
        changed[1:] |= values[1:] != values[:-1]
    return np.cumsum(changed)


def leaves_of_threads(host: pl.DataFrame, is_call: Mask, thread: Int64) -> list[Leaves]:
    """The innermost row of every thread over time, by the number of `thread_numbers`.

    Args:
        host: as `thence.model.tables.HOST`, in the order of that table.
        is_call: whether a row is an API call.
        thread: as `thread_numbers` returns it.
    """
    if host.is_empty():
        return []
    start = host["start"].to_numpy()
    end = start + host["duration"].to_numpy()
    parent = host["parent"].fill_null(NO_ROW).to_numpy()
    call = np.flatnonzero(is_call)
    around, following = parent[call], np.minimum(call + 1, len(start) - 1)
    limit = np.where(around != NO_ROW, end[around], _LATEST)
    same = (following > call) & (thread[following] == thread[call])
    end[call] = np.minimum(np.minimum(end[call], limit), np.where(same, start[following], _LATEST))
    cuts = [0, *(np.flatnonzero(thread[1:] != thread[:-1]) + 1).tolist(), len(start)]
    return [_leaves(low, start[low:high], end[low:high], parent[low:high]) for low, high in pairwise(cuts)]


def _leaves(low: int, start: Int64, end: Int64, parent: Rows) -> Leaves:
    """The innermost row of one thread over time; its rows in host begin at ``low``.

    At any time, rows end before others begin. If rows begin, the thread is then in the innermost of them; if rows only
    end, it is in the parent of the outermost of them.
    """
    rows = np.flatnonzero(end > start)
    if not len(rows):
        return NOWHERE
    if len(rows) < len(start):
        start, end, parent = start[rows], end[rows], parent[rows]
    # One stable sort, fast because both parts are nearly in order. At equal times, ends come before begins.
    least = min(int(end.min()), int(start.min()))
    key = np.concatenate([end, start])
    key -= least
    key *= 2
    key[len(rows) :] += 1
    order = np.argsort(key, kind="stable")
    time = key[order]
    time >>= 1
    first = np.flatnonzero(np.append(True, time[1:] != time[:-1]))
    last = order[np.append(first[1:], len(time)) - 1]
    event = np.where(last < len(rows), order[first], last)
    row = np.concatenate([parent, (rows + low).astype(np.int32)])[event]
    return Leaves(np.concatenate([[NEVER], time[first] + least]), np.concatenate([np.array([NO_ROW], np.int32), row]))


NOWHERE = Leaves(np.array([NEVER]), np.array([NO_ROW]))
"""`Leaves` of a thread that is never in a row."""
