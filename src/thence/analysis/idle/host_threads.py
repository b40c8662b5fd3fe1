"""What the threads of the host did over time: the innermost recorded row of each, else of another thread of its rank.

Causes of idle time and the critical path both use this module, so that they agree about the same time.

**Ends of calls.** The end of an API call comes from another clock. So a call ends at the latest when the row around it
ends, or when the next row of its thread begins.

**Time without a row.** The main thread of a Python program is inside a Python frame from beginning to end: everything
that it runs is called from there. So if the trace shows that the thread was running (it has rows before and after), and
would show its operators and calls, the program itself took the time between them: by Python, by C code that it called,
or by waiting. This holds for traces of torch.profiler, if they contain operators of that thread, and for recordings of
thence, which are of Python programs and contain lines but no operators. Traces in other formats may lack rows of any
kind, so nothing is concluded from them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import name_codes, row_numbers
from thence.model.formats import KINETO_TRACE, THENCE_RECORDING
from thence.model.intervals import NEVER, NO_ROW, Intervals, reached_before
from thence.model.phases import HOST_STATES, HostState
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

    Rows = npt.NDArray[np.int32] | Int64


def _categories(*names: str) -> Mask:
    """For each category code of host rows, whether it is one of these."""
    return np.isin(HOST_CATEGORIES, names)


_UNINFORMATIVE = _categories("step", "range", "framework")
_INFORMATIVE = _categories("op", "compile", "runtime", "driver")
_ACTIVITY = _categories("op", "compile", "python", "module")
"""Categories whose rows show that the producer recorded what the host runs, not only its API calls."""
_CALLS = _categories(*API_CALLS)
_WAITS_FOR_THREADS = np.isin(HOST_STATES, (HostState.GIL, HostState.LOCK))
_MAIN_THREAD = re.compile(r"(?i)python|^MainThread$|pt_main_thread")
"""Names of main threads of Python programs: set by Python, by the program, and by PyTorch."""
_LATEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class RowIntervals(Intervals):
    """Intervals (ns), in each of which a thread is in one host row.

    Attributes:
        row: that host row, `NO_ROW` if the thread is in none.
    """

    row: Rows


@dataclass(frozen=True)
class Pieces(RowIntervals):
    """Intervals, cut into pieces where the host row of a thread changes; the pieces of an interval tile it.

    Attributes:
        interval: number of the interval that each piece is part of.
    """

    interval: Int64

    def chosen(self, which: Int64 | Mask) -> Pieces:
        """The pieces with these numbers, or where the mask is true."""
        return Pieces(self.start[which], self.end[which], self.row[which], self.interval[which])


def together(parts: Sequence[Pieces]) -> Pieces:
    """Concatenates pieces; there must be at least one part."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*((part.start, part.end, part.row, part.interval) for part in parts), strict=True)
    return Pieces(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class InnermostRows:
    """The innermost host row of one thread over time: ``row[i]`` from ``time[i]`` to ``time[i + 1]``."""

    time: Int64
    row: Rows

    def within(self, intervals: Intervals) -> Pieces:
        """Cuts intervals that are not empty where the innermost row changes."""
        first, count = self._segments(intervals)
        last = np.cumsum(count) - 1
        interval = np.repeat(np.arange(len(count)), count)
        segment = np.arange(len(interval)) + np.repeat(first - last + count - 1, count)
        begins, row = self.time[segment], self.row[segment]
        begins[last - count + 1] = intervals.start
        ends = np.empty(len(interval), np.int64)
        ends[:-1] = begins[1:]
        ends[last] = intervals.end
        return Pieces(begins, ends, row, interval)

    def near(self, intervals: Intervals, wanted: Mask) -> RowIntervals:
        """The times in which the thread is in a wanted row, as far as they are near the given intervals.

        Args:
            intervals: in order, not overlapping; times that overlap none of them may be left out.
            wanted: for each host row, whether it is wanted.
        """
        # There may be fewer intervals than rows, or far more of them: look at whichever is less.
        if len(intervals.start) < len(self.time):
            first, count = self._segments(intervals)
            last = np.cumsum(count)
            segment = np.arange(last[-1] if len(last) else 0) + np.repeat(first - last + count, count)
            # The last piece of one interval may be the first of the next.
            segment = segment[np.diff(segment, prepend=-1) > 0]
        else:
            segment = np.arange(len(self.time))
        segment = segment[self.row[segment] != NO_ROW]
        segment = segment[wanted[self.row[segment]]]
        ends = self.time[np.minimum(segment + 1, len(self.time) - 1)]
        return RowIntervals(self.time[segment], ends, self.row[segment])

    def chosen(self, wanted: Mask, program: tuple[int, int] | None = None) -> RowIntervals:
        """All times in which the thread is in a wanted row.

        Args:
            wanted: for each host row, whether it is wanted.
            program: times in which the thread is in no row are also included if they are between these (ns).
        """
        until = np.append(self.time[1:], _LATEST)
        taken = (self.row != NO_ROW) & wanted[self.row]
        if program is not None:
            taken |= (self.row == NO_ROW) & (self.time >= program[0]) & (until <= program[1])
        return RowIntervals(self.time[taken], until[taken], self.row[taken])

    def _segments(self, intervals: Intervals) -> tuple[Int64, Int64]:
        """The first piece of time that each interval overlaps, and the number of pieces that it overlaps."""
        first = np.searchsorted(self.time, intervals.start, side="right") - 1
        return first, np.maximum(np.searchsorted(self.time, intervals.end, side="left") - first, 1)


NEVER_IN_A_ROW = InnermostRows(np.array([NEVER]), np.array([NO_ROW]))
"""`InnermostRows` of a thread without rows."""


def merged(threads: Sequence[RowIntervals]) -> InnermostRows:
    """Merges several threads: at any time, the row of the interval that ends last among those that cover that time.

    Args:
        threads: intervals of each thread; at least one thread.
    """
    start, end, row = (
        np.concatenate([getattr(intervals, name) for intervals in threads]) for name in ("start", "end", "row")
    )
    if not len(start):
        return NEVER_IN_A_ROW
    order = np.argsort(start, kind="stable")
    start, end, row = start[order], end[order], row[order]
    longer = end > reached_before(end)
    start, end, row = start[longer], end[longer], row[longer]
    time = np.empty(2 * len(start) + 1, np.int64)
    rows = np.full(len(time), NO_ROW, row.dtype)
    time[0], time[1::2], time[2::2] = NEVER, start, end
    rows[1::2] = row
    # An interval during which the next one begins ends there, without a NO_ROW piece after it.
    kept = np.ones(len(time), np.bool_)
    kept[2:-1:2] = end[:-1] < start[1:]
    return InnermostRows(time[kept], rows[kept])


def thread_numbers(host: pl.DataFrame) -> Int64:
    """The number of each host row's thread, from 0, in the order of the table."""
    keys = host[["rank", "process", "thread"]]
    changed = np.zeros(host.height, np.bool_)
    for name in keys.columns:
        values = keys[name].to_numpy()
        changed[1:] |= values[1:] != values[:-1]
    return np.cumsum(changed)


def innermost_rows(host: pl.DataFrame, is_call: Mask, thread: Int64) -> list[InnermostRows]:
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
    parent = row_numbers(host["parent"])
    call = np.flatnonzero(is_call)
    around, following = parent[call], np.minimum(call + 1, len(start) - 1)
    limit = np.where(around != NO_ROW, end[around], _LATEST)
    same = (following > call) & (thread[following] == thread[call])
    end[call] = np.minimum(np.minimum(end[call], limit), np.where(same, start[following], _LATEST))
    cuts = [0, *(np.flatnonzero(thread[1:] != thread[:-1]) + 1).tolist(), len(start)]
    return [_innermost_rows(low, start[low:high], end[low:high], parent[low:high]) for low, high in pairwise(cuts)]


def _innermost_rows(low: int, start: Int64, end: Int64, parent: Rows) -> InnermostRows:
    """The innermost row of one thread over time; its rows in host begin at ``low``.

    At any time, rows end before others begin. If rows begin, the thread is then in the innermost of them; if rows only
    end, it is in the parent of the outermost of them.
    """
    rows = np.flatnonzero(end > start)
    if not len(rows):
        return NEVER_IN_A_ROW
    if len(rows) < len(start):
        start, end, parent = start[rows], end[rows], parent[rows]
    # One stable sort, fast because both parts are nearly in order. At equal times, ends come before begins.
    earliest = min(int(end.min()), int(start.min()))
    key = np.concatenate([end, start])
    key -= earliest
    key *= 2
    key[len(rows) :] += 1
    order = np.argsort(key, kind="stable")
    time = key[order]
    time >>= 1
    first = np.flatnonzero(np.append(True, time[1:] != time[:-1]))
    last = order[np.append(first[1:], len(time)) - 1]
    event = np.where(last < len(rows), order[first], last)
    row = np.concatenate([parent, (rows + low).astype(np.int32)])[event]
    times = np.concatenate([[NEVER], time[first] + earliest])
    return InnermostRows(times, np.concatenate([np.array([NO_ROW], np.int32), row]))


@dataclass(frozen=True)
class HostThreads:
    """The host rows that threads are in over time.

    Attributes:
        uninformative: whether a host row does not show what its thread did: a step, a range, or a sample of a thread
            that waited for another one.
        informative: whether a host row shows what its thread did: an operator, a call, or a sample of a thread that
            ran. Other rows, such as Python frames, are neither.
        is_call: whether a host row is an API call.
        first: the first row of each thread.
        rank: rank of each thread.
        innermost: innermost rows of each thread.
        program: by rank, the time (first and last ns) in which its main thread is known to run the program whenever it
            is in no recorded row.
    """

    uninformative: Mask
    informative: Mask
    is_call: Mask
    first: Int64
    rank: npt.NDArray[np.int32]
    innermost: list[InnermostRows]
    program: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, trace: Attributed, thread: Int64) -> HostThreads:
        """Builds it from all host rows; ``thread`` as `thread_numbers` returns it."""
        host = trace.host
        category = host["category"].to_physical().to_numpy()
        is_call = _CALLS[category]
        first = np.flatnonzero(np.diff(thread, prepend=-1)) if len(thread) else thread
        rank = host["rank"].to_numpy()[first]
        end = (host["start"] + host["duration"]).to_numpy()
        # The first element is for rows that are no samples, or of which the state is not known.
        state = name_codes(host["state"])
        waits = np.append(False, _WAITS_FOR_THREADS)[state]
        ran = np.append(False, ~_WAITS_FOR_THREADS)[state]
        spans = {int(rank[number]): span for number, span in program_spans(trace, first, end).items()}
        return cls(
            _UNINFORMATIVE[category] | waits, _INFORMATIVE[category] | ran, is_call, first, rank,
            innermost_rows(host, is_call, thread), spans,
        )  # fmt: skip

    def informed(self, rank: int, pieces: Pieces) -> Pieces:
        """Replaces missing and uninformative rows by more informative rows of other threads, as far as there are any.

        While the innermost row of a thread is uninformative, the thread is in no better row, so the rows that are found
        are those of other threads.

        Args:
            rank: the rank of the threads.
            pieces: pieces of threads of the rank, in any order.

        Returns:
            finer pieces, in no particular order.
        """
        if not self.innermost:
            return pieces
        replaceable = (pieces.row == NO_ROW) | self.uninformative[pieces.row]
        if not replaceable.any():
            return pieces
        asked = pieces.chosen(np.flatnonzero(replaceable))
        asked = asked.chosen(np.argsort(asked.start, kind="stable"))
        filled = self._filled(rank, asked, self.informative)
        # If the thread is in no row, any row of another thread is more informative.
        nothing = filled.row == NO_ROW
        rest = self._filled(rank, filled.chosen(nothing), np.ones_like(self.informative))
        return together([pieces.chosen(~replaceable), filled.chosen(~nothing), rest])

    def runs_program(self, rank: int, pieces: Pieces) -> Mask:
        """Mask of the pieces in which no thread is in a recorded row, but the main thread runs the program."""
        nowhere = pieces.row == NO_ROW
        if rank not in self.program:
            return np.zeros_like(nowhere)
        low, high = self.program[rank]
        runs: Mask = nowhere & (pieces.start >= low) & (pieces.end <= high)
        return runs

    def _filled(self, rank: int, pieces: Pieces, wanted: Mask) -> Pieces:
        """The pieces, cut where threads of the rank enter or leave wanted rows, with these rows."""
        threads = np.flatnonzero(self.rank == rank)
        if not len(threads) or not len(pieces.row):
            return pieces
        others = merged([self.innermost[number].near(pieces, wanted) for number in threads])
        finer = others.within(pieces)
        row = np.where(finer.row == NO_ROW, pieces.row[finer.interval], finer.row)
        return Pieces(finer.start, finer.end, row, pieces.interval[finer.interval])


def program_spans(trace: Attributed, first: Int64, end: Int64) -> dict[int, tuple[int, int]]:
    """By thread, the first and the last ns between which it runs the program whenever it is in no row.

    Only main threads of Python programs have such a time, see the module's docstring.

    Args:
        first: the first row of each thread in host.
        end: end of each row of host, ns.
    """
    formats, host = set(trace.meta.formats), trace.host
    if not formats or not formats <= {KINETO_TRACE, THENCE_RECORDING} or host.is_empty():
        return {}
    category = host["category"].to_physical().to_numpy()
    keys = host.select("rank", "process", "thread")[first.tolist()]
    named = {key[:3]: key[3] for key in trace.threads.select(*keys.columns, "name").rows()}
    start = host["start"].to_numpy()
    result = {}
    following = np.append(first[1:], host.height)
    for number, ((rank, process, thread), low, high) in enumerate(zip(keys.rows(), first, following, strict=True)):
        name = named.get((rank, process, thread))
        if thread != process or not (name is None or _MAIN_THREAD.search(name)):
            continue
        if formats == {THENCE_RECORDING} or _ACTIVITY[category[low:high]].any():
            result[number] = (int(start[low]), int(end[low:high].max()))
    return result


def records_host_activity(trace: Attributed) -> set[int]:
    """The ranks of which the trace holds operators, compilations, modules or Python frames."""
    host = trace.host
    shows = _ACTIVITY[host["category"].to_physical().to_numpy()]
    return set(host["rank"].filter(pl.Series(shows, dtype=pl.Boolean)).unique())
