"""The cause of every nanosecond in which a device is idle: each has exactly one.

A gap ends with the activity that starts then. Where its launch is not known, the gap is unknown. Else, with the
launch from ``b`` to ``e``, the first of these that holds for a part of the gap is its cause:

    before b                    what the host was in (`thence.analysis.idle_rules`): the innermost host row of the
                                thread that launched; where that thread was in none, or only in a step or a range,
                                a thread of the rank that was in an operator or a call, of several the one
                                whose row lasts longest; first_use where an operator takes over 1 ms
                                until it launches the first kernel of a name, and never again
    b to e                      launch; first_use where the call is long and the kernel's first
    launched before the gap     queued for the first 5 us, then event_wait where the stream waited for an event
                                of another one, else unknown
    from e to the start         launch for 100 us, then event_wait or unknown

Beside the cause stands the last call that waited before the gap ended, if it returned in the gap or right before
it: it emptied the queue. That is no cause: without it the gap might be there all the same.

A kernel that waits for a late rank is busy. `thence.analysis.waits` tells that time, which is never in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle_rules import CAUSES, NUMBER, host_causes
from thence.analysis.idle_timeline import (
    NOWHERE,
    Leaves,
    Pieces,
    leaves_of_threads,
    merged,
    thread_numbers,
)
from thence.attribution.waiting import event_edges
from thence.model.intervals import NO_ROW, gaps, last_begun
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]
    Codes = npt.NDArray[np.uint8]

__all__ = ["IDLE", "REASONS", "Gaps", "device_gaps", "idle_causes"]

REASONS = {
    "no_launch": "the trace holds no launch of the activity that ended the wait",
    "started_late": "it was launched long before, and nothing recorded held it back",
    "outside": "no thread of the process was in a recorded range or call",
    "profiler": "the profiler itself took the time",
}
"""Why a cause is unknown."""

IDLE = {
    "rank": pl.Int32(),
    "device": pl.Int32(),
    "start": pl.Int64(),
    "duration": pl.Int64(),
    "cause": pl.Enum(CAUSES),
    "reason": pl.Enum(tuple(REASONS)),
    "host": pl.Int32(),
    "gpu": pl.Int32(),
    "wait": pl.Int32(),
}
"""Columns of `idle_causes`."""

_QUEUED_NS = 5_000
_LATENCY_NS = 100_000  # of a launch whose call has returned, to an empty queue
_LONG_CALL_NS = 200_000  # of a launch that loads its kernel; others take 2 to 30 us
_LONG_OPERATOR_NS = 1_000_000  # without any call, until it launches a kernel of a new name
_EMPTIED_NS = 2_000  # how long before a gap a wait may return that emptied the queue: clocks differ
_YIELDING = [HOST_CATEGORIES.index(name) for name in ("step", "range", "framework")]
_WORKING = tuple(HOST_CATEGORIES.index(name) for name in ("op", "compile", "runtime", "driver"))
_ANYTHING = tuple(range(len(HOST_CATEGORIES)))
_CALLS = [HOST_CATEGORIES.index(name) for name in API_CALLS]


@dataclass(frozen=True)
class Gaps:
    """Times in which a device is idle.

    Attributes:
        rank, device: which.
        start, end: ns, in order of time.
        gpu: row of the activity that starts at the end, `NO_ROW` where none does.
    """

    rank: int
    device: int
    start: Int64
    end: Int64
    gpu: Int64


def device_gaps(trace: Attributed) -> list[Gaps]:
    """The gaps between the first start and the last end of every device, as `Summary.idle_ns` counts them."""
    result = []
    rows = trace.gpu.select("rank", "device", "start", "duration").with_row_index("gpu")
    for (rank, device), ours in sorted(rows.group_by("rank", "device"), key=lambda part: part[0]):
        start = ours["start"].to_numpy()
        begin, end = gaps(start, start + ours["duration"].to_numpy())
        order = np.argsort(start, kind="stable")
        ending = ours["gpu"].to_numpy()[order][np.searchsorted(start[order], end)]
        result.append(Gaps(int(str(rank)), int(str(device)), begin, end, ending.astype(np.int64)))
    return result


def idle_causes(trace: Attributed, found: Sequence[Gaps] | None = None) -> pl.DataFrame:
    """Pieces of idle time with their causes, in order of rank, device and time.

    Args:
        trace: attributed.
        found: the gaps; None for those of `device_gaps`.

    Returns:
        Columns of `IDLE`: rank, device, start and duration (ns) of the piece; cause; reason, where that is
        unknown; host, the row that the cause is told from (null where none is); gpu, the activity that ended
        the gap; wait, row in host of the last call that waited, where it emptied the queue. The pieces of
        a gap tile it.
    """
    facts = _Facts.of(trace)
    parts = [_of_device(facts, of) for of in (device_gaps(trace) if found is None else found)]
    whole = _Parts()
    for part in parts:
        whole.pieces += part.pieces
    return whole.frame(facts)


@dataclass(frozen=True)
class _Facts:
    """What the rules look at: host rows and, of each activity, its launch, as arrays."""

    trace: Attributed
    start: Int64
    end: Int64
    category: npt.NDArray[np.uint8]
    cause: Codes
    thread: Int64
    leaves: list[Leaves]
    ranks: npt.NDArray[np.int32]
    launch: Int64
    launch_start: Int64
    launch_end: Int64
    kernel: npt.NDArray[np.uint32]
    first_of_name: Mask
    behind_event: Mask
    _of_others: dict[tuple[int, int, tuple[int, ...]], Leaves] = field(default_factory=dict)

    @classmethod
    def of(cls, trace: Attributed) -> _Facts:
        host = trace.host
        start = host["start"].to_numpy()
        category = host["category"].to_physical().to_numpy()
        launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
        cause = host_causes(host)
        calls = launch[launch != NO_ROW]
        calls = calls[np.isin(category[calls], _CALLS) & (cause[calls] == NUMBER["operator"])]
        cause[calls] = NUMBER["launch"]
        thread = thread_numbers(host)
        first = np.flatnonzero(np.diff(thread, prepend=-1)) if len(thread) else thread
        ranks = host["rank"].to_numpy()[first]
        end = start + host["duration"].to_numpy()
        begins, ends = _launch_times(trace, launch, start, end, category)
        edges = event_edges(trace, launch)
        behind = np.zeros(trace.gpu.height, np.bool_)
        behind[edges["waiting"].to_numpy()] = True
        leaves = leaves_of_threads(host, np.isin(category, _CALLS))
        return cls(
            trace, start, end, category, cause, thread,
            leaves,
            ranks,
            launch, begins, ends, trace.gpu["name"].to_physical().to_numpy(),
            trace.gpu.select(pl.struct("rank", "name").is_first_distinct()).to_series().to_numpy(), behind,
        )  # fmt: skip

    def of_others(self, rank: int, thread: int, categories: tuple[int, ...]) -> Leaves:
        """What any of the other threads of a rank is in, of the rows of some categories."""
        key = (rank, thread, categories)
        if key not in self._of_others:
            wanted = np.zeros(len(HOST_CATEGORIES), np.bool_)
            wanted[list(categories)] = True
            others = [int(one) for one in np.flatnonzero(self.ranks == rank) if one != thread]
            parts = [self.leaves[number].only(wanted[self.category]) for number in others]
            self._of_others[key] = parts[0] if len(parts) == 1 else merged(parts)
        return self._of_others[key]


def _launch_times(
    trace: Attributed, launch: Int64, start: Int64, end: Int64, category: npt.NDArray[np.uint8]
) -> tuple[Int64, Int64]:
    """When the launch of each activity began and ended, -1 where it is not known.

    XLA's programs say when they were launched. A host row that is no call, but was linked to the
    activity, launched it at some time until its end: as late as possible.
    """
    known = launch != NO_ROW
    row = np.maximum(launch, 0)
    if not len(start):
        begins = np.full(len(launch), -1)
        ends = begins.copy()
    else:
        begins, ends = np.where(known, start[row], -1), np.where(known, end[row], -1)
        linked = known & ~np.isin(category[row], _CALLS)
        late = np.minimum(end[row], trace.gpu["start"].to_numpy())
        begins, ends = np.where(linked, late, begins), np.where(linked, late, ends)
    if trace.programs.height:
        of = trace.gpu["program"].fill_null(NO_ROW).to_numpy().astype(np.int64)
        at = trace.programs["launch"].fill_null(-1).to_numpy()
        took = trace.programs["launch_duration"].fill_null(0).to_numpy()
        by_program = ~known & (of != NO_ROW) & (at[of] >= 0)
        begins = np.where(by_program, at[of], begins)
        ends = np.where(by_program, at[of] + took[of], ends)
    return begins, ends


@dataclass
class _Parts:
    """Pieces that have a cause: columns rank, device, start, end, cause, reason, host, gpu."""

    pieces: list[tuple[Any, ...]] = field(default_factory=list)

    def add(
        self,
        of: Gaps,
        times: tuple[Int64, Int64],
        cause: Codes | int,
        rows: tuple[Int64, Int64],
        reason: str = "",
    ) -> None:
        """Adds those intervals (starts, ends) that are not empty, with rows of host and gpu."""
        (start, end), (row, gpu) = times, rows
        lasting = end > start
        if not lasting.any():
            return
        count = int(lasting.sum())
        codes = cause[lasting] if isinstance(cause, np.ndarray) else np.full(count, cause, np.uint8)
        number = list(REASONS).index(reason) if reason else -1
        self.pieces.append((
            np.full(count, of.rank), np.full(count, of.device), start[lasting], end[lasting], codes,
            np.full(count, number), row[lasting], gpu[lasting],
        ))  # fmt: skip

    def frame(self, facts: _Facts) -> pl.DataFrame:
        """The pieces in order, in the columns of `IDLE`."""
        if not self.pieces:
            return pl.DataFrame(schema=IDLE)
        columns = [np.concatenate(column) for column in zip(*self.pieces, strict=True)]
        order = np.argsort(columns[2], kind="stable")
        if (columns[0] != columns[0][0]).any() or (columns[1] != columns[1][0]).any():
            order = np.lexsort((columns[2], columns[1], columns[0]))
        rank, device, start, end, cause, reason, row, gpu = _joined([c[order] for c in columns])
        unsaid = (cause == NUMBER["unknown"]) & (reason < 0)
        outside, profiler = (list(REASONS).index(name) for name in ("outside", "profiler"))
        reason = np.where(unsaid, np.where(row == NO_ROW, outside, profiler), reason)
        frame = pl.DataFrame(
            {
                "rank": rank,
                "device": device,
                "start": start,
                "duration": end - start,
                "cause": pl.Series(CAUSES, dtype=IDLE["cause"]).gather(cause),
                "reason": pl.Series(tuple(REASONS), dtype=IDLE["reason"]).gather(
                    pl.Series(reason).replace(-1, None)
                ),
                "host": pl.Series(row).replace(NO_ROW, None),
                "gpu": pl.Series(gpu).replace(NO_ROW, None),
                "wait": pl.Series(_emptied(facts, rank, start, gpu)).replace(NO_ROW, None),
            }
        )
        return frame.cast(IDLE)  # type: ignore[arg-type]


def _joined(columns: list[Int64]) -> list[Int64]:
    """Pieces that follow each other with the same cause and rows become one."""
    start, end = columns[2], columns[3]
    same = np.zeros(len(start), np.bool_)
    same[1:] = start[1:] == end[:-1]
    for column in (*columns[:2], *columns[4:]):
        same[1:] &= column[1:] == column[:-1]
    first = np.flatnonzero(~same)
    joined = [column[first] for column in columns]
    joined[3] = end[np.append(first[1:], len(start)) - 1]
    return joined


def _emptied(facts: _Facts, rank: Int64, start: Int64, gpu: Int64) -> Int64:
    """Host row of the last call that waited before each gap's launch, if it returned after the queue was empty."""
    waits = facts.trace.waits
    result = np.full(len(rank), NO_ROW, np.int64)
    before = np.where(gpu >= 0, facts.launch_start[np.maximum(gpu, 0)], -1)
    begins = np.zeros(facts.trace.gpu.height, np.int64)  # of the gap before each activity
    ending = np.flatnonzero(gpu >= 0)[::-1]  # the first piece of each gap comes last
    begins[gpu[ending]] = start[ending]
    for number in _used(rank):
        rows = waits.filter(pl.col("rank") == number)["host"].to_numpy().astype(np.int64)
        ours = np.flatnonzero((rank == number) & (before >= 0))
        if not len(rows) or not len(ours):
            continue
        last = last_begun(facts.start[rows], before[ours])
        row = np.where(last == NO_ROW, NO_ROW, rows[last])
        emptied = (row != NO_ROW) & (facts.end[row] >= begins[gpu[ours]] - _EMPTIED_NS)
        result[ours] = np.where(emptied, row, NO_ROW)
    return result


def _of_device(facts: _Facts, of: Gaps) -> _Parts:
    """The pieces of one device's gaps."""
    parts = _Parts()
    gpu, begin, end = of.gpu, of.start, of.end
    act = np.maximum(gpu, 0)
    nothing = np.full(len(begin), NO_ROW)
    launched, returned = facts.launch_start[act], np.maximum(facts.launch_end[act], 0)
    known = (gpu != NO_ROW) & (launched >= 0)
    parts.add(
        of, (np.where(known, end, begin), end), NUMBER["unknown"], (nothing, gpu), "no_launch"
    )
    launched = np.where(known, np.clip(launched, begin, end), begin)
    in_call = np.clip(returned, launched, end)
    row = np.where(known, facts.launch[act], NO_ROW)
    loads = facts.first_of_name[act] & (returned - facts.launch_start[act] > _LONG_CALL_NS)
    _before_launch(facts, of, launched, parts)
    codes = np.where(loads, NUMBER["first_use"], NUMBER["launch"]).astype(np.uint8)
    parts.add(of, (np.where(known, launched, end), in_call), codes, (row, gpu))
    queued = known & (facts.launch_start[act] <= begin)
    patience = np.where(queued, _QUEUED_NS, _LATENCY_NS)
    since = np.where(queued, in_call, np.maximum(in_call, launched))
    until = np.minimum(end, since + patience)
    codes = np.where(queued, NUMBER["queued"], NUMBER["launch"]).astype(np.uint8)
    parts.add(of, (np.where(known, since, end), until), codes, (row, gpu))
    behind = facts.behind_event[act]
    rest = np.where(known, until, end)
    parts.add(of, (np.where(behind, rest, end), end), NUMBER["event_wait"], (row, gpu))
    late = (np.where(behind, end, rest), end)
    parts.add(of, late, NUMBER["unknown"], (row, gpu), "started_late")
    return parts


def _before_launch(facts: _Facts, of: Gaps, until: Int64, parts: _Parts) -> None:
    """Adds what the host was in from the beginning of each gap until the launch that ended it."""
    waiting = np.flatnonzero(until > of.start)
    act = np.maximum(of.gpu[waiting], 0)
    row = facts.launch[act]
    thread = row if not len(facts.thread) else np.where(row == NO_ROW, NO_ROW, facts.thread[row])
    for number in _used(thread):
        ours = waiting[thread == number]
        leaves = NOWHERE if number == NO_ROW else facts.leaves[number]
        pieces = leaves.within(of.start[ours], until[ours])
        gpu = of.gpu[ours][pieces.of]
        pieces, which = _elsewhere(facts, of.rank, number, pieces)
        gpu = gpu[which]
        codes = _host_codes(facts, pieces, gpu)
        parts.add(of, (pieces.start, pieces.end), codes, (pieces.row, gpu))


def _host_codes(facts: _Facts, pieces: Pieces, gpu: Int64) -> Codes:
    """The cause of each piece by its host row, and by the activity that was launched at its end."""
    if not len(facts.cause):
        return np.full(len(gpu), NUMBER["unknown"], np.uint8)
    unknown = pieces.row == NO_ROW
    row = np.where(unknown, 0, pieces.row)
    codes = np.where(unknown, NUMBER["unknown"], facts.cause[row]).astype(np.uint8)
    long = np.flatnonzero(
        (codes == NUMBER["operator"])
        & (gpu != NO_ROW)
        & (pieces.end - pieces.start > _LONG_OPERATOR_NS)
        & (facts.end[row] > facts.launch_start[gpu])
    )
    kernel, first = facts.kernel[gpu[long]], facts.first_of_name[gpu[long]]
    # What takes as long again and again is no first use.
    codes[long[first & ~np.isin(kernel, kernel[~first])]] = NUMBER["first_use"]
    return codes


def _used(numbers: Int64) -> list[int]:
    """The distinct ones of numbers from `NO_ROW` on: quicker than by sorting them."""
    return [int(number) for number in np.flatnonzero(np.bincount(numbers - NO_ROW)) + NO_ROW]


def _elsewhere(facts: _Facts, rank: int, thread: int, pieces: Pieces) -> tuple[Pieces, Int64]:
    """Replaces rows that say little by what another thread of the rank was in, if that says more.

    Args:
        facts: of the trace.
        rank: whose threads are asked.
        thread: number of the one that the pieces are of, `NO_ROW` for none.
        pieces: what it was in.

    Returns:
        finer pieces, in no order, and of which of the given ones each is part.
    """
    which = np.arange(len(pieces.row))
    if not np.count_nonzero(facts.ranks == rank) - (thread != NO_ROW):
        return pieces, which
    nothing = pieces.row == NO_ROW
    little = nothing | np.isin(facts.category[np.where(nothing, 0, pieces.row)], _YIELDING)
    pieces, which = _filled(pieces, which, little, facts.of_others(rank, thread, _WORKING))
    # In nothing at all, anything that another thread is in says more.
    nothing = pieces.row == NO_ROW
    if not nothing.any():
        return pieces, which
    return _filled(pieces, which, nothing, facts.of_others(rank, thread, _ANYTHING))


def _filled(pieces: Pieces, which: Int64, asked: Mask, others: Leaves) -> tuple[Pieces, Int64]:
    """The pieces that are asked about, cut where others are in a row: it takes the place of theirs."""
    kept = ~asked
    finer = others.within(pieces.start[asked], pieces.end[asked])
    row = np.where(finer.row == NO_ROW, pieces.row[asked][finer.of], finer.row)
    columns = [
        (pieces.of, pieces.of[asked][finer.of]),
        (pieces.start, finer.start),
        (pieces.end, finer.end),
        (pieces.row, row),
    ]
    joined = (np.concatenate([old[kept], new]) for old, new in columns)
    return Pieces(*joined), np.concatenate([which[kept], which[asked][finer.of]])
