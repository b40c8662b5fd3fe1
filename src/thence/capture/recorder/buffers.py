"""The buffers that CUPTI writes records to, and CUPTI's callbacks that request and return them.

The callbacks run inside the program's own CUDA calls, or on CUPTI's thread, and need the GIL: they only
hand out an empty buffer or take a full one. Memory is bounded: when too many full buffers wait, CUPTI gets no
buffer, drops records and counts them. Every thread of the program that makes records has a buffer of its own,
but most of these hold few records. They do not count for the bound, because the system provides no memory for
pages that were never written to.
"""

from __future__ import annotations

import ctypes
import queue
from typing import Any, NamedTuple

import numpy as np

BUFFER_BYTES = 4 << 20
"""Size of one buffer: about 19,000 kernels."""
_STOCK = 4  # buffers that are made in advance


class Filled(NamedTuple):
    """A buffer that CUPTI gave back; `numbers_before` as in `Buffers`, when it came."""

    address: int
    valid_bytes: int
    context: int | None
    stream: int
    numbers_before: int


class Buffers:
    """Buffers of one recording.

    Args:
        max_bytes: of full buffers that wait to be read.

    Attributes:
        filled: buffers that wait to be read; None wakes the reader up.
        refused: how often CUPTI requested a buffer and got none.
        numbers_before: to add to the numbers of launches in records that come from now on.
    """

    def __init__(self, max_bytes: int) -> None:
        self.filled: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self.refused = 0
        self.numbers_before = 0
        self._max_waiting = max(1, max_bytes // BUFFER_BYTES)
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._free: list[int] = []

    def requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        """CUpti_BuffersCallbackRequestFunc: hands out an empty buffer."""
        most_records[0] = 0  # as many as fit
        address = self._empty()
        buffer[0] = address
        size[0] = BUFFER_BYTES if address else 0

    def completed(self, context: int | None, stream: int, address: int | None, _size: int, valid_bytes: int) -> None:
        """CUpti_BuffersCallbackCompleteFunc: takes a full buffer."""
        if address:
            self.filled.put(Filled(address, valid_bytes, context, stream, self.numbers_before))

    def recycle(self, filled: Filled) -> None:
        """Makes a buffer that has been read available again, after zeroing the part that was written to."""
        ctypes.memset(filled.address, 0, filled.valid_bytes)
        self._free.append(filled.address)

    def stock(self) -> None:
        """Allocates some buffers and touches their pages, so that CUPTI does not wait for the memory."""
        made = [self._empty() for _ in range(_STOCK)]
        for address in filter(None, made):
            ctypes.memset(address, 0, BUFFER_BYTES)
            self._free.append(address)

    def release(self) -> None:
        """Gives the memory back, when CUPTI records nothing and has no buffer: its callbacks would keep it."""
        self._free.clear()
        self._memory.clear()

    @property
    def outstanding(self) -> int:
        """Number of buffers that CUPTI or the reader still has."""
        return len(self._memory) - len(self._free)

    def _empty(self) -> int | None:
        if self.filled.qsize() >= self._max_waiting:
            self.refused += 1
            return None
        try:
            return self._free.pop()
        except IndexError:
            pass
        memory = np.zeros(BUFFER_BYTES, dtype=np.uint8)
        address = int(memory.ctypes.data)
        self._memory[address] = memory
        return address
