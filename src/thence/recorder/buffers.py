"""The memory that CUPTI writes records to, and its callbacks.

The callbacks run inside the program's own CUDA calls, or on CUPTI's thread, and need the GIL: they only
hand an empty buffer out and take a full one in. Memory is bounded: when too many full ones wait CUPTI
drops records, and counts them. Every thread of the program that records has a buffer of its own, but most
of them hardly any records: memory that was never written to is none yet, so these do not count.
"""

from __future__ import annotations

import ctypes
import queue
from typing import Any, NamedTuple

import numpy as np

__all__ = ["BUFFER_BYTES", "Buffers", "Filled"]

BUFFER_BYTES = 4 << 20
"""Of one buffer: about 19,000 kernels."""
_STOCK = 4


class Filled(NamedTuple):
    """A buffer that CUPTI gave back."""

    address: int
    valid_bytes: int
    context: int | None
    stream: int


class Buffers:
    """Buffers of one recording.

    Args:
        most_bytes: of full buffers that wait to be read.

    Attributes:
        filled: those that wait to be read; None wakes the reader up.
        refused: how often CUPTI asked and there was none.
    """

    def __init__(self, most_bytes: int) -> None:
        self.filled: queue.SimpleQueue[Filled | None] = queue.SimpleQueue()
        self.refused = 0
        self._most = max(1, most_bytes // BUFFER_BYTES)
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._free: list[int] = []

    def requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        """CUpti_BuffersCallbackRequestFunc: hand out an empty buffer."""
        most_records[0] = 0  # as many as fit
        address = self._empty()
        buffer[0] = address
        size[0] = BUFFER_BYTES if address else 0

    def completed(
        self, context: int | None, stream: int, address: int | None, _size: int, valid_bytes: int
    ) -> None:
        """CUpti_BuffersCallbackCompleteFunc: take a full one."""
        if address:
            self.filled.put(Filled(address, valid_bytes, context, stream))

    def recycle(self, filled: Filled) -> None:
        """A buffer has been read: it can be handed out again, zeroed as far as it was written to."""
        ctypes.memset(filled.address, 0, filled.valid_bytes)
        self._free.append(filled.address)

    def stock(self) -> None:
        """Make some buffers, and have the system provide their memory before CUPTI writes to it."""
        made = [self._empty() for _ in range(_STOCK)]
        for address in filter(None, made):
            ctypes.memset(address, 0, BUFFER_BYTES)
            self._free.append(address)

    @property
    def outstanding(self) -> int:
        """Buffers that CUPTI, or the reader, still has."""
        return len(self._memory) - len(self._free)

    def _empty(self) -> int | None:
        if self.filled.qsize() >= self._most:
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
