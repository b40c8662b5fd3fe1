"""The layout of JAX's profiler for Mosaic GPU kernels (jax/experimental/mosaic/gpu/profiler.py).

Each trace (of a warpgroup, or of a warp) has as many words as its specification has entries:

    0       low word of %globaltimer, once at the start     1       SM
    2       words that the events take; until jax 0.7 including the three words of this header
    3 ...   pairs: name id with bit 31 set for exits, low word of the SM clock

Blocks are numbered with x slowest, unlike CUDA's own order. The layout records neither the end of a
trace nor the clock rate: see `thence.inside.clocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thence.errors import DamagedInput
from thence.inside.columns import COMPLETE, DAMAGED, OVERFLOW, UNKNOWN, Columns, counted_from_start, pairs_of, starts_of
from thence.units import several

if TYPE_CHECKING:
    from thence.inside.description import Description
    from thence.model.arrays import Int64, UInt32

_HEADER = 3  # of either generation; CI runs jax 0.6, which writes the older one
_SCOPES = {32: "warp", 128: "warpgroup"}
_EXIT_SHIFT = 31
_NAME_BITS = (1 << 31) - 1
_CYCLES_OF_AN_EVENT = 12
"""Upper bound of the cycles for recording an event: JAX's estimate for an H100."""
_LONG_GAP = 1 << 31


def read(words: UInt32, description: Description, path: str) -> Columns:
    """The columns of a buffer of JAX's profiler, of either generation.

    Raises:
        DamagedInput: the buffer is of the other generation or of another launch.
    """
    size = description.trace_words
    if len(words) != description.words or size < _HEADER:
        raise DamagedInput(
            path,
            f"holds {len(words):,} words; {description.traces:,} traces of {size:,} words are"
            f" {description.words:,}: grid, block, scope or entries of the description belong to "
            "another launch",
        )
    table = words.reshape(-1, size)
    header = table[:, :_HEADER].astype(np.int64)
    used = _used(header, description, path)
    odd = used % 2 == 1
    room = (size - _HEADER) // 2
    over = used // 2 > room
    rows = np.flatnonzero(header.any(axis=1))
    count = np.minimum(used // 2, room)[rows]
    tag, low = pairs_of(table[rows, _HEADER:], count)
    first = np.zeros(len(rows), np.uint32)
    begins = starts_of(count)[:-1]
    first[count > 0] = low[begins[count > 0]]
    unknown = np.full(len(rows), UNKNOWN, np.int64)
    counter = counted_from_start(low, first, count, unknown)
    state = np.full(len(rows), COMPLETE, np.uint8)
    state[over[rows]] = OVERFLOW
    state[odd[rows]] = DAMAGED
    return Columns(
        trace=rows,
        block=_cuda_order(rows // description.traces_per_block, description.grid),
        index=rows % description.traces_per_block,
        sm=header[rows, 1],
        count=count,
        dropped=np.maximum(used // 2 - room, 0)[rows],
        timer=header[rows, 0],
        clock=np.where(count > 0, first.astype(np.int64), UNKNOWN),
        total_ns=unknown,
        total_cycles=unknown,
        in_cycles=np.ones(len(rows), np.bool_),
        state=state,
        name=tag & _NAME_BITS,
        kind=(tag >> _EXIT_SHIFT).astype(np.uint8),
        counter=counter,
        timer_bits=32,
        scope=_SCOPES.get(description.threads // description.traces_per_block, "trace"),
        overhead_cycles=_overhead(counter, count),
        absent=len(table) - len(rows),
        warnings=_warnings(path, int(odd[rows].sum()), int(over[rows].sum()), counter, count),
    )


def _used(header: Int64, description: Description, path: str) -> Int64:
    """Words that the events of each trace take. The parity of the count distinguishes the two generations.

    Raises:
        DamagedInput: the parity in every trace is that of the other generation.
    """
    written = header[:, 2] > 0
    odd, some = int((header[written, 2] % 2).sum()), int(written.sum())
    counts_header = description.flavour == "mosaic-2024"
    if some and (odd == some) != counts_header and odd in (0, some):
        other = "mosaic" if counts_header else "mosaic-2024"
        raise DamagedInput(
            path,
            f"counts an {'even' if odd == 0 else 'odd'} number of words in every trace: that is the"
            f" layout {other!r}, not {description.flavour!r}",
        )
    return np.where(written, np.maximum(header[:, 2] - _HEADER * counts_header, 0), 0)


def _cuda_order(block: Int64, grid: tuple[int, int, int]) -> Int64:
    """Converts block numbers with x slowest to CUDA's numbers, with x fastest."""
    _, y, z = grid
    at_z, at_y, at_x = block % z, block // z % y, block // (z * y)
    return at_x + grid[0] * (at_y + y * at_z)


def _overhead(counter: Int64, count: Int64) -> float | None:
    """Overhead by JAX's rule: the smallest distance of two neighbouring events, at most 12 cycles, minus one."""
    inner = np.ones(max(len(counter) - 1, 0), np.bool_)
    begins = starts_of(count)[1:-1]
    inner[begins[(begins > 0) & (begins < len(counter))] - 1] = False
    if not inner.any():
        return None
    least = int(np.diff(counter).min(where=inner, initial=_CYCLES_OF_AN_EVENT))
    return float(max(least - 1, 0))


def _warnings(path: str, odd: int, over: int, counter: Int64, count: Int64) -> list[str]:
    warnings = []
    if odd:
        warnings.append(
            f"{path}: {several(odd, 'trace')} with an odd number of words: memory was overwritten,"
            " most likely by events for which there was no room; their last word is left out"
        )
    if over:
        warnings.append(
            f"{path}: {several(over, 'trace')} with more events than fit; without bounds checks"
            " these events have overwritten other memory: profile with more space"
        )
    if int(counter.max(initial=0)) < _LONG_GAP:
        return warnings
    gap = np.diff(counter, prepend=counter[:1])
    begins = starts_of(count)[:-1]
    gap[begins[begins < len(counter)]] = 0
    long = int((gap >= _LONG_GAP).sum())
    if long:
        warnings.append(
            f"{path}: {several(long, 'gap')} of 2^31 cycles or more between neighbouring events: "
            "the gaps are real, or the clock ran backwards there"
        )
    return warnings
