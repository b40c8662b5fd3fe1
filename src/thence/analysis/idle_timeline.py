"""What host threads are in at any time: the innermost host row of each thread as pieces of time.

An API call ends for this purpose where the row around it does, and where the next row of its thread begins: its
end comes from another clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import NEVER, NO_ROW, reached_before

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import polars as pl

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["NOWHERE", "Leaves", "Pieces", "leaves_of_threads", "merged", "thread_numbers"]

_LATEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class Pieces:
    """Pieces of intervals that were asked about.

    Attributes:
        of: which interval each piece is part of, ascending.
        start, end: ns; the pieces of an interval tile it.
        row: host row that the thread is in, `NO_ROW` where it is in none.
    """

    of: Int64
    start: Int64
    end: Int64
    row: Int64


@dataclass(frozen=True)
class Leaves:
    """The innermost row of one thread over time: ``row[i]`` from ``time[i]`` to ``time[i + 1]``."""

    time: Int64
    row: Int64

    def within(self, start: Int64, end: Int64) -> Pieces:
        """Cuts intervals (ns, end not before start) where the innermost row changes."""
        first = np.searchsorted(self.time, start, side="right") - 1
        last = np.maximum(np.searchsorted(self.time, end, side="left") - 1, first)
        count = last - first + 1
        of = np.repeat(np.arange(len(start)), count)
        segment = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[of]
        following = np.append(self.time[1:], _LATEST)
        begins = np.maximum(self.time[segment], start[of])
        ends = np.minimum(following[segment], end[of])
        return Pieces(of, begins, ends, self.row[segment])

    def only(self, wanted: Mask) -> Leaves:
        """Those rows alone for which the mask, one value for each host row, is true."""
        if not wanted.size:
            return self
        return Leaves(
            self.time, np.where(wanted[self.row] & (self.row != NO_ROW), self.row, NO_ROW)
        )

    def lasting(self) -> tuple[Int64, Int64, Int64]:
        """Starts, ends and rows of the pieces of time in which it is in one."""
        chosen = np.flatnonzero(self.row != NO_ROW)
        following = np.append(self.time[1:], _LATEST)
        return self.time[chosen], following[chosen], self.row[chosen]


def merged(leaves: Sequence[Leaves]) -> Leaves:
    """One row of several threads at any time: of those that last then the one that ends last."""
    start, end, row = map(np.concatenate, zip(*(one.lasting() for one in leaves), strict=True))
    order = np.argsort(start, kind="stable")
    start, end, row = start[order], end[order], row[order]
    before = reached_before(end)
    longer = end > before
    start, end, row = start[longer], end[longer], row[longer]
    time = np.empty(2 * len(start) + 1, np.int64)
    rows = np.full(len(time), NO_ROW)
    time[0], time[1::2], time[2::2] = NEVER, start, end
    rows[1::2] = row
    # A piece that the next one begins in ends there: what would follow it is left out.
    kept = np.ones(len(time), np.bool_)
    kept[2:-1:2] = end[:-1] < start[1:]
    return Leaves(time[kept], rows[kept])


def thread_numbers(host: pl.DataFrame) -> Int64:
    """Number of each host row's thread, from 0, in the order of the table."""
    keys = host.select("rank", "process", "thread")
    changed = np.zeros(host.height, np.bool_)
    for name in keys.columns:
        values = keys[name].to_numpy()
        changed[1:] |= values[1:] != values[:-1]
    return np.cumsum(changed)


def leaves_of_threads(host: pl.DataFrame, is_call: Mask) -> list[Leaves]:
    """The innermost row of every thread over time, by the number of `thread_numbers`.

    Args:
        host: in its own order.
        is_call: which rows are API calls.
    """
    if host.is_empty():
        return []
    start = host["start"].to_numpy()
    end = start + host["duration"].to_numpy()
    parent = host["parent"].fill_null(NO_ROW).to_numpy().astype(np.int64)
    thread = thread_numbers(host)
    limit = np.where(parent != NO_ROW, end[parent], _LATEST)
    following = np.full(len(start), _LATEST)
    following[:-1] = np.where(thread[1:] == thread[:-1], start[1:], _LATEST)
    end = np.where(is_call, np.minimum(np.minimum(end, limit), following), end)
    cuts = np.flatnonzero(np.diff(thread)) + 1
    rows = np.split(np.arange(len(start)), cuts)
    return [_leaves(of, start[of], end[of], parent[of]) for of in rows]


def _least(time: Int64) -> int:
    return int(time.min()) if len(time) else 0


def _leaves(rows: Int64, start: Int64, end: Int64, parent: Int64) -> Leaves:
    """Of one thread. At one time rows end before others begin, inner ones first; outer ones begin first."""
    lasting = end > start
    rows, start, end, parent = rows[lasting], start[lasting], end[lasting], parent[lasting]
    # One sort: ends come before the begins of their time, and both are nearly in order already.
    time = np.concatenate([end[::-1], start])
    row = np.concatenate([parent[::-1], rows])
    order = np.argsort(2 * (time - _least(time)) + np.repeat([0, 1], len(rows)), kind="stable")
    time, row = time[order], row[order]
    last = np.ones(len(time), np.bool_)
    last[:-1] = time[1:] != time[:-1]
    return Leaves(np.concatenate([[NEVER], time[last]]), np.concatenate([[NO_ROW], row[last]]))


NOWHERE = Leaves(np.array([NEVER]), np.array([NO_ROW]))
"""Of a thread that is in no row at any time."""
