"""thence's own layout: a header of 16 words for each trace, then pairs of tag and clock.

0       0x7E4CE000 | version          1       scope (bits 0-7), clock of the events (bits 8-15)
2       SM      3       block (linear, x fastest)      4       index of the trace in its block
5       events stored     6       events dropped for lack of room     7       capacity in events
8, 9    %globaltimer at start (low, high word)         10, 11  the same at the end
12, 13  clock64 at start                               14, 15  the same at the end
16 ...  pairs: tag (name id in bits 0-27, kind in bits 30-31), low word of the clock
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thence.errors import DamagedInput
from thence.inside.columns import (
    COMPLETE,
    DAMAGED,
    IGNORED,
    OVERFLOW,
    UNFINISHED,
    UNKNOWN,
    Columns,
    counted_from_start,
    pairs_of,
    runs_backwards,
    starts_of,
)
from thence.inside.description import HEADER_WORDS
from thence.units import several

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.inside.description import Description
    from thence.model.arrays import Int64, Mask, UInt32

_MAGIC, _VERSION = 0x7E4CE000, 1
_VERSION_BITS = 0xFFF
# Words of a trace's header; times take two words each.
_SM, _BLOCK, _INDEX, _COUNT, _DROPPED, _CAPACITY = 2, 3, 4, 5, 6, 7
_TIMER, _TIMER_END, _CLOCK, _CLOCK_END = 8, 10, 12, 14
_NAME_BITS = (1 << 28) - 1
_KIND_SHIFT = 30
_CLOCK64, _GLOBALTIMER = 0, 1
_SCOPES = {1: "block", 2: "warpgroup", 3: "warp"}
_MAX_APART = 1 << 10
"""Largest difference of a trace's start from the median start, in the high word of %globaltimer: 73 minutes."""
_MAX_NS, _MAX_CYCLES = 1 << 42, 1 << 44
"""Longest plausible duration of a trace: 73 minutes (ns), and 2.4 hours at 2 GHz (cycles)."""


def read(words: UInt32, description: Description, path: str) -> Columns:
    """The columns of a buffer in thence's own layout.

    Raises:
        DamagedInput: none of the written traces can be read, they are of a newer version of the layout,
            or the buffer belongs to another description.
    """
    size = description.trace_words
    if len(words) > description.words or len(words) < size:
        raise DamagedInput(
            path,
            f"holds {len(words):,} words; {description.traces:,} traces of"
            f" {description.capacity:,} events take {description.words:,}: the description belongs"
            " to another buffer",
        )
    table = words[: len(words) // size * size].reshape(-1, size)
    header = table[:, :HEADER_WORDS].astype(np.int64)
    warnings = []
    if len(table) < description.traces:
        warnings.append(f"{path}: is cut: it holds {len(table):,} of {description.traces:,} traces")
    good, absent = _checked(header, description, path, warnings)
    rows = np.flatnonzero(good)
    columns = _columns(table if len(rows) == len(table) else table[rows], header[rows], rows)
    columns.absent = absent
    columns.warnings[:0] = warnings
    return columns


def _checked(header: Int64, description: Description, path: str, warnings: list[str]) -> tuple[Mask, int]:
    """A mask of the traces that can be read, and the number of traces that were never written."""
    written = header.any(axis=1)
    magic = (header[:, 0] & ~_VERSION_BITS) == _MAGIC
    versions = np.unique(header[magic, 0] & _VERSION_BITS)
    newer = [int(version) for version in versions if version > _VERSION]
    if newer:
        raise DamagedInput(path, f"has version {newer[-1]}, and this thence reads version {_VERSION}: update thence")
    number = np.arange(len(header))
    good = (
        (header[:, 0] == _MAGIC | _VERSION)
        & (header[:, _CAPACITY] == description.capacity)
        & (header[:, _BLOCK] == number // description.traces_per_block)
        & (header[:, _INDEX] == number % description.traces_per_block)
        & (header[:, 1] >> 8 <= _GLOBALTIMER)
    )
    if good.any():  # all blocks of a launch begin within about an hour: others are damaged
        high = header[:, _TIMER + 1]
        good &= (np.abs(high - np.median(high[good])) <= _MAX_APART) & (high < 1 << 31)
    bad = written & ~good
    if bad.any():
        first = int(np.flatnonzero(bad)[0])
        what = (
            f"no header where trace {first:,} begins"
            if not magic[first]
            else f"a header of {header[first, _CAPACITY]:,} events, block {header[first, _BLOCK]:,}"
            f" and index {header[first, _INDEX]:,} where trace {first:,} begins"
        )
        if not good.any():
            raise DamagedInput(path, f"has {what}: it is damaged, or the description belongs to another buffer")
        warnings.append(f"{path}: {several(int(bad.sum()), 'unreadable trace')} left out: {what}")
    return good, int((~written).sum())


def _columns(table: UInt32, header: Int64, rows: Int64) -> Columns:
    capacity = (table.shape[1] - HEADER_WORDS) // 2
    stored = header[:, _COUNT]
    count = np.minimum(stored, capacity)
    dropped = header[:, _DROPPED] + (stored - count)
    ends = header[:, [_TIMER_END, _TIMER_END + 1, _CLOCK_END, _CLOCK_END + 1]] != 0
    finished: Mask = (ends[:, 0] | ends[:, 1]) & (ends[:, 2] | ends[:, 3])
    total_ns = _difference(header, _TIMER, _TIMER_END, finished)
    total_cycles = _difference(header, _CLOCK, _CLOCK_END, finished)
    state = np.full(len(rows), COMPLETE, np.uint8)
    state[dropped > 0] = OVERFLOW
    state[~finished] = UNFINISHED
    backwards = finished & ~(
        (total_ns >= 0) & (total_ns < _MAX_NS) & (total_cycles >= 0) & (total_cycles < _MAX_CYCLES)
    )
    total_ns[backwards] = total_cycles[backwards] = UNKNOWN
    in_cycles = header[:, 1] >> 8 == _CLOCK64
    tag, low = pairs_of(table[:, HEADER_WORDS:], count)
    first = header[:, np.where(in_cycles.all(), _CLOCK, _TIMER)].astype(np.uint32)
    if in_cycles.any() and not in_cycles.all():
        first = np.where(in_cycles, header[:, _CLOCK], header[:, _TIMER]).astype(np.uint32)
    total = np.where(in_cycles, total_cycles, total_ns)
    counter = counted_from_start(low, first, count, total)
    damaged = backwards | _inconsistent_traces(counter, count, total)
    state[damaged] = DAMAGED
    kind = (tag >> _KIND_SHIFT).astype(np.uint8)
    tag &= _NAME_BITS
    columns = Columns(
        trace=rows,
        block=header[:, _BLOCK],
        index=header[:, _INDEX],
        sm=header[:, _SM],
        count=count,
        dropped=dropped,
        timer=header[:, _TIMER] | header[:, _TIMER + 1] << 32,
        clock=header[:, _CLOCK],
        total_ns=total_ns,
        total_cycles=total_cycles,
        in_cycles=in_cycles,
        state=state,
        name=tag,
        kind=kind,
        counter=counter,
        timer_bits=64,
        scope=_SCOPES.get(int(header[0, 1]) & 0xFF, "trace") if len(header) else "trace",
    )
    columns.warnings = _warnings(columns, stored > capacity, damaged)
    return columns


def _difference(header: Int64, start: int, end: int, finished: Mask) -> Int64:
    """Advance of a 64-bit counter, stored as two words, from start to end; `UNKNOWN` where not finished."""

    def whole(word: int) -> npt.NDArray[np.uint64]:
        low, high = header[:, word].astype(np.uint64), header[:, word + 1].astype(np.uint64)
        return low | high << np.uint64(32)

    advanced: Int64 = (whole(end) - whole(start)).view(np.int64)
    return np.where(finished, advanced, UNKNOWN)


def _inconsistent_traces(counter: Int64, count: Int64, total: Int64) -> Mask:
    """A mask of the traces with events that are out of order or after the trace's end."""
    events = np.flatnonzero(runs_backwards(counter, count))
    damaged = np.zeros(len(count), np.bool_)
    damaged[np.searchsorted(starts_of(count), events, side="right") - 1] = True
    filled = np.flatnonzero(count)
    last = counter[starts_of(count)[1:][filled] - 1]
    damaged[filled] |= (total[filled] >= 0) & (last > total[filled])
    return damaged


def _warnings(columns: Columns, over: Mask, damaged: Mask) -> list[str]:
    warnings = []
    unfinished = int((columns.state == UNFINISHED).sum())
    if unfinished:
        warnings.append(
            f"{several(unfinished, 'trace')} without an end: the kernel was stopped, or returned before it ended them;"
            " they end at their last event"
        )
    if over.any():
        warnings.append(f"{several(int(over.sum()), 'trace')} with more events than fit: the events that fit were kept")
    if damaged.any():
        warnings.append(
            f"{several(int(damaged.sum()), 'trace')} marked as damaged: clocks run backwards, or"
            " events lie outside the trace"
        )
    ignored = int((columns.kind == IGNORED).sum())
    if ignored:
        warnings.append(f"{several(ignored, 'event')} of unknown kind left out")
    return warnings
