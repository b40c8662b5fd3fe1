"""The layout of Triton's Proton, backend "instrumentation", as in ``InstrumentationHook.host_buffer``.

The buffer begins with a header of 10 words (version 1, offset and size of header and payload, device
type, blocks, warps, bytes of one block, number of traced warps) and the indices of the traced warps.
Then each block has:

    0       0xDEADBEEF     1       block     2       SM     3       bytes of events
    4-9     %globaltimer at the start, before and after the last copy (since Triton 3.5)
    then    one word for each warp: the words that it wrote; then the events, in equal parts for the
            traced warps

An event is two words. The first has the exit flag in bit 31, the scope in bits 23-30, and bits 32-42 of
the clock in bits 0-10. The second is the low word of the clock. The part of a warp is a ring buffer:
the oldest events are overwritten first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thence.errors import DamagedInput
from thence.inside.columns import COMPLETE, DAMAGED, OVERFLOW, UNFINISHED, UNKNOWN, Columns, starts_of
from thence.units import several

if TYPE_CHECKING:
    from thence.inside.description import Description
    from thence.model.arrays import Int64, UInt32

_VERSION = 1
_HEADER = 10
_PREAMBLE = 0xDEADBEEF
_OLD_BLOCK_HEADER, _BLOCK_HEADER = 4, 10  # words before Triton 3.5, and since
_CUDA = 1  # device type in the header
_CLOCK_BITS, _SHORT_CLOCK_BITS = 43, 32  # 11 bits are in the first word of an event
_OVERHEAD_CYCLES = 7.0  # Proton's own constant for CUDA devices
_MAX_NS = 1 << 42  # 73 minutes; a longer trace is damaged


def read(words: UInt32, description: Description, path: str) -> Columns:
    """The columns of a host buffer of Proton.

    Raises:
        DamagedInput: the buffer has no header of version 1, inconsistent sizes, or no written block.
    """
    blocks, units, block_words, uids, payload = _header(words, path)
    table = payload.reshape(blocks, block_words)
    good = (table[:, 0] == _PREAMBLE) & (table[:, 1] < blocks)
    if not good.any():
        raise DamagedInput(path, "has no block with Proton's mark: no kernel has written to it")
    warnings = []
    bad = int((~good & table.any(axis=1)).sum())
    if bad:
        warnings.append(f"{path}: {several(bad, 'block')} without Proton's mark left out")
    table = table[good]
    sizes, often = np.unique(table[:, 3], return_counts=True)
    event_bytes = int(sizes[often.argmax()])
    finished = table[:, 3] == event_bytes
    event_words = event_bytes // 4
    header = _BLOCK_HEADER if block_words >= _BLOCK_HEADER + units + event_words else _OLD_BLOCK_HEADER
    ring = event_words // len(uids) // 2 * 2
    if not ring or header + units + event_words > block_words:
        raise DamagedInput(path, f"has blocks of {block_words:,} words for {event_words:,} words of events")
    columns = _columns(table, header, units, uids, ring)
    columns.state[np.repeat(~finished, len(uids))] = UNFINISHED
    columns.absent = (blocks - len(table)) * len(uids)
    columns.overhead_cycles = _OVERHEAD_CYCLES if int(words[5]) == _CUDA else None
    columns.warnings = warnings + _dropped(columns)
    wanted = description.blocks
    if wanted not in (1, blocks):
        columns.warnings.append(f"{path}: holds {blocks:,} blocks, its description says {wanted:,}")
    return columns


def _header(words: UInt32, path: str) -> tuple[int, int, int, list[int], UInt32]:
    """Number of blocks, warps of a block, words of a block, indices of the traced warps, and the payload's words."""
    if len(words) < _HEADER or int(words[0]) != _VERSION:
        raise DamagedInput(
            path,
            "does not begin with Proton's header of version 1: save"
            " InstrumentationHook.host_buffer, with enable_host_buffer = True",
        )
    offset, blocks, units, block_bytes, traced = (int(words[i]) for i in (3, 6, 7, 8, 9))
    uids = [int(uid) for uid in words[_HEADER : _HEADER + min(traced, len(words))]]
    fits = (
        0 < traced <= units <= 64  # CUDA allows 32 warps in a block
        and offset % 4 == 0
        and block_bytes % 4 == 0
        and offset // 4 >= _HEADER + traced
        and blocks > 0
        and block_bytes >= 4 * (_OLD_BLOCK_HEADER + units)
        and offset + blocks * block_bytes <= 4 * len(words)
        and sorted({*uids}) == uids
        and max(uids, default=units) < units
    )
    if not fits:
        raise DamagedInput(
            path,
            f"has a header of {blocks:,} blocks of {block_bytes:,} bytes and {units:,} warps, of which"
            f" {traced:,} are traced, and {4 * len(words):,} bytes: it is cut or damaged",
        )
    first_word = offset // 4
    return (blocks, units, block_bytes // 4, uids, words[first_word : first_word + blocks * block_bytes // 4])


def _columns(table: UInt32, header: int, units: int, uids: list[int], ring: int) -> Columns:
    blocks, warps = len(table), len(uids)
    written = table[:, header : header + units].astype(np.int64)[:, uids].reshape(-1)
    count = np.minimum(written, ring) // 2
    dropped = np.maximum(written - ring, 0) // 2
    events = table[:, header + units : header + units + ring * warps].reshape(-1, ring // 2, 2)
    place = np.arange(ring // 2)
    oldest = np.where(written > ring, written // 2 % (ring // 2), 0)
    order = (place + oldest[:, None]) % (ring // 2)
    chosen = np.take_along_axis(events, order[:, :, None], axis=1)[place < count[:, None]]
    tag, low = chosen[:, 0].astype(np.int64), chosen[:, 1].astype(np.int64)
    clock = (tag & 0x7FF) << 32 | low
    start, cycles = _counted(clock, count, np.repeat(np.arange(blocks), warps))
    state = np.where(dropped > 0, OVERFLOW, COMPLETE).astype(np.uint8)
    times = table[:, 4:8].astype(np.int64) if header == _BLOCK_HEADER else None
    timer = np.zeros(blocks, np.int64)
    total_ns = np.full(blocks, UNKNOWN, np.int64)
    if times is not None:
        # The sign bit is left out: a damaged word must not give a negative time.
        timer = times[:, 0] | (times[:, 1] & 0x7FFF_FFFF) << 32
        total_ns = (times[:, 2] | (times[:, 3] & 0x7FFF_FFFF) << 32) - timer
        wrong = (total_ns < 0) | (total_ns >= _MAX_NS)
        # An integer median: np.median computes with floats, which may round to 2^63 and lose hundreds of ns.
        middle = np.partition(timer, blocks // 2)[blocks // 2]
        wrong |= np.abs(timer - middle) >= _MAX_NS
        timer[wrong], total_ns[wrong] = middle, UNKNOWN
        state[np.repeat(wrong, warps)] = DAMAGED
    return Columns(
        trace=np.repeat(table[:, 1].astype(np.int64), warps) * warps + np.tile(np.arange(warps), blocks),
        block=np.repeat(table[:, 1].astype(np.int64), warps),
        index=np.tile(np.array(uids, np.int64), blocks),
        sm=np.repeat(table[:, 2].astype(np.int64), warps),
        count=count,
        dropped=dropped,
        timer=np.repeat(timer, warps),
        clock=np.repeat(start, warps),
        total_ns=np.repeat(total_ns, warps),
        total_cycles=np.full(blocks * warps, UNKNOWN, np.int64),
        in_cycles=np.ones(blocks * warps, np.bool_),
        state=state,
        name=(tag >> 23) & 0xFF,
        kind=(tag >> 31).astype(np.uint8),
        counter=cycles,
        timer_bits=64 if times is not None else 0,
        scope="warp",
    )


def _counted(clock: Int64, count: Int64, block: Int64) -> tuple[Int64, Int64]:
    """Clock at the first event of each block, and the cycles of each event since then.

    The warps of a block run on one SM, so their clocks are comparable.
    """
    bits = _CLOCK_BITS if int(clock.max(initial=0)) >> _SHORT_CLOCK_BITS else _SHORT_CLOCK_BITS
    wrap = 1 << bits
    blocks = int(block[-1]) + 1
    first = starts_of(count)[:-1]
    filled = np.flatnonzero(count)
    begins = clock[first[filled]]
    reference = np.full(blocks, UNKNOWN, np.int64)
    reference[block[filled][::-1]] = begins[::-1]  # of each block's first warp with events
    # Signed differences: another warp may have begun earlier.
    apart = (begins - reference[block[filled]] + wrap // 2) % wrap - wrap // 2
    earliest = np.zeros(blocks, np.int64)
    np.minimum.at(earliest, block[filled], apart)
    start = np.where(reference < 0, UNKNOWN, (reference + earliest) % wrap)
    return start, (clock - np.repeat(start[block], count)) % wrap


def _dropped(columns: Columns) -> list[str]:
    over = columns.dropped > 0
    if not over.any():
        return []
    lost = int(columns.dropped.sum())
    text = f"{several(lost, 'event')} lost at the start of {several(int(over.sum()), 'trace')}"
    return [f"{text}: the buffer is a ring that is too small"]
