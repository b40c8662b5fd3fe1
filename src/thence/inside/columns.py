"""The columns, per trace and per event, into which every layout of in-kernel events is decoded.

A trace is the sequence of events of one warp, warpgroup or block. Its counter is 0 at the trace's start
and counts cycles or nanoseconds; clocks.py converts it to a clock that all traces share.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.errors import DamagedInput

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask, UInt8, UInt32


ENTER, EXIT, INSTANT, IGNORED = 0, 1, 2, 3
"""Kinds of events. `IGNORED`: an invalid kind, which no layout writes."""

STATES = ("complete", "unfinished", "overflow", "damaged")
"""Completeness of a trace. unfinished: its end was not written. overflow: events were dropped.
damaged: its clock runs backwards, or its events contradict its header."""
COMPLETE, UNFINISHED, OVERFLOW, DAMAGED = range(4)

UNKNOWN = -1
"""Value in integer columns of quantities that the layout does not record."""

_WRAP = 1 << 32


@dataclass
class Columns:
    """Traces and their events.

    Attributes:
        trace: number of each trace in the buffer; arrays up to ``state`` have the shape (traces,).
        block: linear index of the trace's block, x fastest, as in CUDA.
        index: index of the trace within its block.
        sm: multiprocessor that the trace ran on; `UNKNOWN` where the layout does not record it.
        count: number of events that are kept.
        dropped: number of events that did not fit, or were overwritten.
        timer: the low ``timer_bits`` bits of %globaltimer at the trace's start, in ns.
        clock: low 32 bits of the SM clock at the start; `UNKNOWN` where not recorded.
        total_ns: ns from start to end by %globaltimer; `UNKNOWN` where there is no end.
        total_cycles: cycles from start to end by the SM clock; `UNKNOWN` likewise.
        in_cycles: whether the counter of the events counts cycles, else ns.
        state: index into `STATES`.
        name: id of each event's name; arrays from here on have the shape (events,), trace after trace.
        kind: `ENTER`, `EXIT`, `INSTANT` or `IGNORED`.
        counter: cycles or ns since the trace's start.
        timer_bits: 64, or 32 where only the low word was recorded, or 0 where times are comparable only
            within one SM.
        scope: what a trace is: block, warpgroup, warp, group, or trace where the layout does not say.
        overhead_cycles: cycles for recording one event, by the layout's own rule; None if it has none.
        absent: number of traces that were never written.
        warnings: data that could not be read, as sentences.
    """

    trace: Int64
    block: Int64
    index: Int64
    sm: Int64
    count: Int64
    dropped: Int64
    timer: Int64
    clock: Int64
    total_ns: Int64
    total_cycles: Int64
    in_cycles: Mask
    state: UInt8
    name: npt.NDArray[Any]
    kind: UInt8
    counter: Int64
    timer_bits: int
    scope: str = "trace"
    overhead_cycles: float | None = None
    absent: int = 0
    warnings: list[str] = field(default_factory=list)

    def part(self, low: int, high: int) -> Columns:
        """The traces from ``low`` up to, not including, ``high``, with their events."""
        first = self.first
        traces, events = slice(low, high), slice(int(first[low]), int(first[high]))
        of_traces = {name: getattr(self, name)[traces] for name in _OF_TRACES}
        of_events = {name: getattr(self, name)[events] for name in _OF_EVENTS}
        return dataclasses.replace(self, **of_traces, **of_events)

    @property
    def first(self) -> Int64:
        """Index of the first event of each trace, then the number of all events; shape (traces + 1,)."""
        return starts_of(self.count)


_OF_EVENTS = ("name", "kind", "counter")
_OF_TRACES = (
    "trace", "block", "index", "sm", "count", "dropped", "timer", "clock", "total_ns", "total_cycles",
    "in_cycles", "state",
)  # fmt: skip


def starts_of(count: Int64) -> Int64:
    """Exclusive prefix sum of the counts, with the total as last element; shape (n + 1,)."""
    first = np.zeros(len(count) + 1, np.int64)
    np.cumsum(count, out=first[1:])
    return first


def as_words(buffer: Any, path: str) -> UInt32:
    """A buffer as 32-bit words.

    Args:
        buffer: array of 32- or 64-bit integers or of bytes, any shape; or bytes.
        path: name of the buffer in errors.

    Raises:
        DamagedInput: the buffer is none of these.
    """
    if isinstance(buffer, bytes | bytearray | memoryview):
        buffer = np.frombuffer(buffer, np.uint8)
    values = np.ascontiguousarray(buffer).reshape(-1)
    if values.dtype.kind not in "iu" or values.dtype.itemsize not in (1, 4, 8):
        raise DamagedInput(path, f"holds {values.dtype} values; in-kernel events are 32-bit words (uint32)")
    if values.nbytes % 4:
        raise DamagedInput(path, f"holds {values.nbytes:,} bytes, which is not a whole number of 32-bit words")
    return values.astype(values.dtype.newbyteorder("<"), copy=False).view("<u4")


def pairs_of(table: UInt32, count: Int64) -> tuple[UInt32, UInt32]:
    """First words and second words of the first pairs of each row, row after row.

    Args:
        table: words of each trace, shape (n, 2 * k or 2 * k + 1).
        count: number of pairs to take from each row, at most k.
    """
    pairs = table[:, : table.shape[1] // 2 * 2].view("<u8")
    if len(count) and int(count.min()) == pairs.shape[1]:
        chosen = np.ascontiguousarray(pairs).reshape(-1)
    else:
        longest = int(count.max(initial=0))
        chosen = pairs[:, :longest][np.arange(longest) < count[:, None]]
    halves = chosen.view("<u4").reshape(-1, 2)
    return np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1])


def counted_from_start(low: UInt32, first: UInt32, count: Int64, total: Int64) -> Int64:
    """Counters of all events since the start of their traces, from low words that may have wrapped.

    A trace whose total is known and below 2^32 has no wraps. In any other trace, the counter wrapped
    wherever the low word is smaller than at the event before: this assumes that neighbouring events
    are less than 2^32 apart (2.2 s at 1.98 GHz).

    Args:
        low: low 32 bits of the counter at each event.
        first: low 32 bits of the counter at the start of each trace.
        count: number of events of each trace.
        total: advance of the counter over the whole trace; `UNKNOWN` where not known.
    """
    since = low - np.repeat(first, count)
    long = (total < 0) | (total >= _WRAP)
    counter = since.astype(np.int64)
    if long.any():
        wrapped = runs_backwards(since, count)
        if wrapped.any():
            wrapped &= np.repeat(long, count)
            wraps = np.concatenate([[0], np.cumsum(wrapped)])
            at_start = wraps[starts_of(count)[:-1]]
            counter += (wraps[1:] - np.repeat(at_start, count)) * _WRAP
    return counter


def runs_backwards(counter: npt.NDArray[Any], count: Int64) -> Mask:
    """A mask of the events with a smaller counter than the event before them in their trace."""
    result = np.zeros(len(counter), np.bool_)
    np.less(counter[1:], counter[:-1], out=result[1:])
    begins = starts_of(count)[:-1]
    result[begins[begins < len(counter)]] = False
    return result
