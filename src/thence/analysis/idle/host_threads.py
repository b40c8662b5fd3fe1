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
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import name_codes, row_numbers
from thence.model.formats import KINETO_TRACE, THENCE_RECORDING
from thence.model.grouped_intervals import GroupedTimes, distinct, in_order
from thence.model.intervals import NEVER, NO_ROW, Intervals, reached_before
from thence.model.phases import HOST_STATES, HostState
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    def of(self, intervals: Int64) -> Pieces:
        """The pieces with these numbers of the intervals."""
        return Pieces(self.start, self.end, self.row, intervals[self.interval])


def together(parts: Sequence[Pieces]) -> Pieces:
    """Concatenates pieces; there must be at least one part."""
    columns = zip(*((part.start, part.end, part.row, part.interval) for part in parts), strict=True)
    return Pieces(*(np.concatenate(column) for column in columns))


@dataclass(frozen=True)
class InnermostRows:
    """The innermost host row of threads over time: that of each piece until the next piece of the thread.

    The first piece of every thread begins at `NEVER`. The thread `NO_ROW` is in no row.

    Attributes:
        time: when each piece begins, in order of thread and time.
        row: its host row, `NO_ROW` for none.
        pieces: the threads and times, to be searched.
    """

    time: Int64
    row: Rows
    pieces: GroupedTimes

    @classmethod
    def of(cls, thread: Int64, time: Int64, row: Rows, threads: int) -> InnermostRows:
        """Adds the first piece of every thread, in which it is in no row.

        Args:
            thread: of each piece, from 0 to ``threads`` - 1, ascending, shape (n,).
            time: when it begins, ascending in each thread, shape (n,).
            row: its host row, shape (n,).
            threads: how many threads there are.
        """
        every = np.arange(NO_ROW, threads)
        first = np.searchsorted(thread, every)
        time, begun = np.insert(time, first, NEVER), np.insert(row.astype(np.int32, copy=False), first, NO_ROW)
        return cls(time, begun, GroupedTimes.of(np.insert(thread, first, every), time, threads))

    def within(self, thread: Int64, intervals: Intervals) -> Pieces:
        """Cuts intervals that are not empty where the innermost row of their thread changes.

        Args:
            thread: of each interval.
            intervals: in any order.
        """
        first, count = self._overlapped(thread, intervals)
        last = np.cumsum(count) - 1
        interval = np.repeat(np.arange(len(count)), count)
        piece = np.arange(len(interval)) + np.repeat(first - last + count - 1, count)
        begins, row = self.time[piece], self.row[piece]
        begins[last - count + 1] = intervals.start
        ends = np.empty(len(interval), np.int64)
        ends[:-1] = begins[1:]
        ends[last] = intervals.end
        return Pieces(begins, ends, row, interval)

    def near(self, thread: Int64, intervals: Intervals) -> Int64:
        """The numbers, ascending, of the pieces of threads that overlap one of their intervals.

        Args:
            thread: of each interval.
            intervals: in any order.
        """
        first, count = self._overlapped(thread, intervals)
        last = np.cumsum(count)
        return distinct(np.arange(last[-1] if len(last) else 0) + np.repeat(first - last + count, count))

    def times_of(self, pieces: Int64) -> RowIntervals:
        """The pieces with these numbers; a last piece, which has no end, is empty."""
        start = self.time[pieces]
        following = self.time[np.minimum(pieces + 1, len(self.time) - 1)]
        return RowIntervals(start, np.where(following == NEVER, start, following), self.row[pieces])

    def chosen(self, wanted: Mask, program: Mapping[int, tuple[int, int]]) -> tuple[Int64, RowIntervals]:
        """All times in which threads are in a wanted row, and the thread of each.

        Args:
            wanted: for each host row, whether it is wanted.
            program: for some threads, a first and a last ns: times between these in which the thread is in no row are
                included.
        """
        until = np.append(self.time[1:], NEVER)
        until[until == NEVER] = _LATEST
        thread = self.pieces.group(np.arange(len(until)))
        taken = (self.row != NO_ROW) & wanted[self.row]
        if program:
            runs = _intervals_of(int(thread[-1]) + 1, program)
            taken |= (self.row == NO_ROW) & (self.time >= runs.start[thread]) & (until <= runs.end[thread])
        return thread[taken], RowIntervals(self.time[taken], until[taken], self.row[taken])

    def _overlapped(self, thread: Int64, intervals: Intervals) -> tuple[Int64, Int64]:
        """The first piece of time that each interval overlaps, and the number of pieces that it overlaps."""
        first = self.pieces.search(thread, intervals.start, "right") - 1
        return first, np.maximum(self.pieces.search(thread, intervals.end, "left") - first, 1)


def merged(group: Int64, intervals: RowIntervals, groups: int) -> InnermostRows:
    """Merges threads of a group: at any time, the row of the interval that ends last among those that cover that time.

    Args:
        group: of each interval, from 0 to ``groups`` - 1.
        intervals: of any threads.
        groups: how many groups there are.

    Returns:
        `InnermostRows` with the groups as threads.
    """
    order = in_order(group, intervals.start, groups)
    group, start, end, row = group[order], intervals.start[order], intervals.end[order], intervals.row[order]
    longer = end > reached_before(end, group)
    group, start, end, row = group[longer], start[longer], end[longer], row[longer]
    times = np.stack([start, end], axis=1)
    rows = np.full(times.shape, NO_ROW, np.int32)
    rows[:, 0] = row
    # An interval during which the next one begins ends there, without a NO_ROW piece after it.
    kept = np.ones(times.shape, np.bool_)
    kept[:-1, 1] = (end[:-1] < start[1:]) | (group[:-1] != group[1:])
    return InnermostRows.of(np.repeat(group, 2)[kept.ravel()], times[kept], rows[kept], groups)


def thread_numbers(host: pl.DataFrame) -> Int64:
    """The number of each host row's thread, from 0, in the order of the table."""
    keys = host[["rank", "process", "thread"]]
    changed = np.zeros(host.height, np.bool_)
    for name in keys.columns:
        values = keys[name].to_numpy()
        changed[1:] |= values[1:] != values[:-1]
    return np.cumsum(changed)


def innermost_rows(host: pl.DataFrame, is_call: Mask, thread: Int64) -> InnermostRows:
    """The innermost row of every thread over time.

    At any time, rows end before others begin. If rows begin, the thread is then in the innermost of them; if rows only
    end, it is in the parent of the outermost of them.

    Args:
        host: as `thence.model.tables.HOST`, in the order of that table.
        is_call: whether a row is an API call.
        thread: as `thread_numbers` returns it.
    """
    start = host["start"].to_numpy()
    end = start + host["duration"].to_numpy()
    parent = row_numbers(host["parent"])
    call = np.flatnonzero(is_call)
    around, following = parent[call], np.minimum(call + 1, len(start) - 1)
    limit = np.where(around != NO_ROW, end[around], _LATEST)
    same = (following > call) & (thread[following] == thread[call])
    end[call] = np.minimum(np.minimum(end[call], limit), np.where(same, start[following], _LATEST))
    rows = np.flatnonzero(end > start)
    # Ends come before begins, so also at equal times: the sort is stable.
    time, number = np.concatenate([end[rows], start[rows]]), np.tile(thread[rows], 2)
    threads = int(thread[-1]) + 1 if len(thread) else 0
    order = in_order(number, time, threads)
    time, number = time[order], number[order]
    changes = np.ones(len(time), np.bool_)
    changes[1:] = (time[1:] != time[:-1]) | (number[1:] != number[:-1])
    first = np.flatnonzero(changes)
    last = order[np.append(first[1:], len(time))[: len(first)] - 1]
    event = np.where(last < len(rows), order[first], last)
    row = np.concatenate([parent[rows], rows])[event].astype(np.int32)
    return InnermostRows.of(number[first], time[first], row, threads)


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
        ranks: the distinct ranks, ascending.
        innermost: innermost rows of every thread.
        program: of each of `ranks`, the time in which its main thread is known to run the program whenever it is in no
            recorded row; empty if there is none, and in the last element.
    """

    uninformative: Mask
    informative: Mask
    is_call: Mask
    first: Int64
    rank: npt.NDArray[np.int32]
    ranks: npt.NDArray[np.int32]
    innermost: InnermostRows
    program: Intervals

    @classmethod
    def of(cls, trace: Attributed, thread: Int64) -> HostThreads:
        """Builds it from all host rows; ``thread`` as `thread_numbers` returns it."""
        host = trace.host
        category = host["category"].to_physical().to_numpy()
        is_call = _CALLS[category]
        first = np.flatnonzero(np.diff(thread, prepend=-1)) if len(thread) else thread
        rank = host["rank"].to_numpy()[first]
        ranks, number = np.unique(rank, return_inverse=True)
        end = (host["start"] + host["duration"]).to_numpy()
        # The first element is for rows that are no samples, or of which the state is not known.
        state = name_codes(host["state"])
        waits = np.append(False, _WAITS_FOR_THREADS)[state]
        ran = np.append(False, ~_WAITS_FOR_THREADS)[state]
        spans = {int(number[thread]): span for thread, span in program_spans(trace, first, end).items()}
        return cls(
            _UNINFORMATIVE[category] | waits, _INFORMATIVE[category] | ran, is_call, first, rank, ranks,
            innermost_rows(host, is_call, thread), _intervals_of(len(ranks), spans),
        )  # fmt: skip

    def informed(self, rank: Rows, pieces: Pieces) -> Pieces:
        """Replaces missing and uninformative rows by more informative rows of other threads, as far as there are any.

        While the innermost row of a thread is uninformative, the thread is in no better row, so the rows that are found
        are those of other threads.

        Args:
            rank: of each interval of which pieces are part.
            pieces: in any order.

        Returns:
            finer pieces, in no particular order.
        """
        if not len(self.first):
            return pieces
        replaceable = (pieces.row == NO_ROW) | self.uninformative[pieces.row]
        if not replaceable.any():
            return pieces
        number = self._numbers(rank)
        filled = self._filled(number, pieces.chosen(replaceable), self.informative)
        # If the thread is in no row, any row of another thread is more informative.
        nothing = filled.row == NO_ROW
        rest = self._filled(number, filled.chosen(nothing), np.ones_like(self.informative))
        return together([pieces.chosen(~replaceable), filled.chosen(~nothing), rest])

    def runs_program(self, rank: Rows, pieces: Pieces) -> Mask:
        """Mask of the pieces in which no thread is in a recorded row, but the main thread runs the program.

        Args:
            rank: of each interval of which pieces are part.
            pieces: in any order.
        """
        number = self._numbers(rank)[pieces.interval]
        low, high = self.program.start[number], self.program.end[number]
        runs: Mask = (pieces.row == NO_ROW) & (pieces.start >= low) & (pieces.end <= high)
        return runs

    def _numbers(self, rank: Rows) -> Int64:
        """The position of ranks in `ranks`, `NO_ROW` for ranks without a thread."""
        number = np.searchsorted(self.ranks, rank)
        return np.where(np.append(self.ranks, NO_ROW)[number] == rank, number, NO_ROW)

    def _filled(self, number: Int64, pieces: Pieces, wanted: Mask) -> Pieces:
        """The pieces, cut where threads of the rank enter or leave wanted rows, with these rows.

        Args:
            number: position in `ranks` of the rank of each interval.
            pieces: parts of these intervals.
            wanted: for each host row, whether it is wanted.
        """
        pieces = pieces.chosen(in_order(number[pieces.interval], pieces.start, len(self.ranks)))
        rank, of_thread = number[pieces.interval], np.searchsorted(self.ranks, self.rank)
        first = np.searchsorted(rank, of_thread)
        count = np.searchsorted(rank, of_thread, side="right") - first
        # There may be fewer pieces than rows, or far more of them: look at whichever is less.
        if count.sum() < len(self.innermost.time):
            thread = np.repeat(np.arange(len(count)), count)
            piece = np.arange(len(thread)) - np.repeat(np.cumsum(count) - count - first, count)
            near = self.innermost.near(thread, Intervals(pieces.start[piece], pieces.end[piece]))
        else:
            near = np.arange(len(self.innermost.time))
        row = self.innermost.row[near]
        near = near[(row != NO_ROW) & wanted[row]]
        group = of_thread[self.innermost.pieces.group(near)]
        others = merged(group, self.innermost.times_of(near), len(self.ranks))
        finer = others.within(rank, pieces)
        row = np.where(finer.row == NO_ROW, pieces.row[finer.interval], finer.row)
        return Pieces(finer.start, finer.end, row, pieces.interval[finer.interval])


def _intervals_of(count: int, spans: Mapping[int, tuple[int, int]]) -> Intervals:
    """The interval of each number, empty where there is none, with one more empty interval for `NO_ROW`."""
    result = Intervals(np.full(count + 1, _LATEST), np.full(count + 1, NEVER))
    for number, (low, high) in spans.items():
        result.start[number], result.end[number] = low, high
    return result


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
