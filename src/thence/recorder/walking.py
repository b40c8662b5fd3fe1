"""From a buffer that CUPTI filled to records, without a step of Python for each.

A buffer holds records of several kinds one after the other, and all records of one kind have one size.
So a run of one kind is a view with that stride, which costs nothing. Where kinds alternate, each record
says where the next one begins: such chains are followed by pointer jumping, that is by squaring the
table of steps a few times, so that Python takes one step where the chain takes 16.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.recorder.layouts import LAYOUTS

if TYPE_CHECKING:
    from thence.recorder.cupti import Cupti

__all__ = ["Records", "Walker"]

Records = np.ndarray[Any, Any]
"""Records of one kind, a structured array with the fields of `layouts.LAYOUTS`."""

_FIRST_LOOK = 64
"""Records of a run that are looked at first; four times as many each time after that."""
_ALIGNMENT = 8
"""ACTIVITY_RECORD_ALIGNMENT: sizes of records are multiples of it."""
_LONG = 32
"""Runs shorter than this make the walk follow the chain for the rest of the buffer."""
_SQUARINGS = 4
_MOST_KIND = 1 << 10
_LONGEST_WORDS = 1 << 10


class Walker:
    """Reads buffers of one libcupti.

    Attributes:
        unknown: records that were passed over, by kind.
    """

    def __init__(self, cupti: Cupti) -> None:
        self._cupti = cupti
        self._sizes: dict[int, int] = {}
        self.unknown: dict[int, int] = {}

    def read(self, address: int, valid_bytes: int) -> list[tuple[int, Records]]:
        """(kind, records) of a buffer, in no order of kinds; views of it where that is possible.

        Args:
            address: of the buffer.
            valid_bytes: how much of it CUPTI filled.
        """
        valid_bytes -= valid_bytes % _ALIGNMENT
        if not valid_bytes:
            return []
        buffer = _words(address, valid_bytes // 8)
        found: list[tuple[int, Records]] = []
        position = short = 0
        while position < valid_bytes:
            kind = int(buffer[position // 8] & 0xFFFFFFFF)
            size = self._size(kind, address, position, valid_bytes)
            count = _run(buffer, position, kind, size)
            if count == 0:
                break  # a record that is cut off: the buffer ends here
            if count >= _LONG:
                self._keep(found, kind, count, _view(buffer, position, kind, size, count))
            else:
                short += 1
                if short > 1:
                    self._follow(found, buffer, address, position)
                    break
                places = position // 8 + size // 8 * np.arange(count)
                self._keep(found, kind, count, _gathered(buffer, places, kind, size))
            position += size * count
        return found

    def _follow(
        self,
        found: list[tuple[int, Records]],
        buffer: np.ndarray[Any, Any],
        address: int,
        begin: int,
    ) -> None:
        """The rest of a buffer whose kinds alternate."""
        kinds = (buffer & 0xFFFFFFFF).astype(np.uint32)
        first = begin // 8
        while True:
            places, stopped = _chain(kinds, self._steps(), first)
            for kind in np.unique(kinds[places]).tolist() if len(places) else ():
                size = self._sizes[kind]
                own = places[kinds[places] == kind]
                self._keep(found, kind, len(own), _gathered(buffer, own, kind, size))
            if stopped >= len(buffer):
                return
            # A kind that was not met before, or the last record, cut off or not.
            kind, known = int(kinds[stopped]), len(self._sizes)
            size = self._size(kind, address, 8 * stopped, 8 * len(buffer))
            if len(self._sizes) > known:
                first = stopped
                continue
            if _run(buffer, 8 * stopped, kind, size) == 1:
                self._keep(found, kind, 1, _gathered(buffer, np.array([stopped]), kind, size))
            return

    def _steps(self) -> np.ndarray[Any, Any]:
        """Words from a record to the next one by its kind; 0 where that is not known."""
        steps = np.zeros(_MOST_KIND + 1, dtype=np.int64)
        for kind, size in self._sizes.items():
            if kind < _MOST_KIND and size <= 8 * _LONGEST_WORDS:
                steps[kind] = size // 8
        return steps

    def _keep(
        self,
        found: list[tuple[int, Records]],
        kind: int,
        count: int,
        records: Records | None,
    ) -> None:
        if records is None:
            self.unknown[kind] = self.unknown.get(kind, 0) + count
        else:
            found.append((kind, records))

    def _size(self, kind: int, address: int, position: int, valid_bytes: int) -> int:
        """Bytes of a record of this kind, asked of libcupti once."""
        size = self._sizes.get(kind)
        if size is None:
            following = self._cupti.next_record(address, valid_bytes, address + position)
            size = (address + valid_bytes if following is None else following) - address - position
            if following is not None:
                self._sizes[kind] = (
                    size  # else the rest of the buffer, which may be more than a record
                )
        return size


def _words(address: int, count: int) -> np.ndarray[Any, Any]:
    return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address))


@functools.cache
def _dtype(kind: int, size: int) -> np.dtype[Any] | None:
    """The fields of a record of this size; None where they are not known."""
    layout = LAYOUTS.get(kind)
    if layout is None or size < layout.smallest:
        return None
    offsets, formats = zip(*layout.fields.values(), strict=True)
    return np.dtype(
        {"names": list(layout.fields), "formats": formats, "offsets": offsets, "itemsize": size}
    )


def _view(
    buffer: np.ndarray[Any, Any], position: int, kind: int, size: int, count: int
) -> Records | None:
    dtype = _dtype(kind, size)
    return None if dtype is None else np.ndarray((count,), dtype, buffer, position)


def _gathered(
    buffer: np.ndarray[Any, Any], places: np.ndarray[Any, Any], kind: int, size: int
) -> Records | None:
    """A copy of the records at these words."""
    dtype = _dtype(kind, size)
    if dtype is None:
        return None
    return buffer[places[:, None] + np.arange(size // 8)].view(dtype)[:, 0]


def _run(buffer: np.ndarray[Any, Any], position: int, kind: int, size: int) -> int:
    """How many records of this kind follow one another from here."""
    most = (8 * len(buffer) - position) // size
    count, look = 0, _FIRST_LOOK
    while count < most:
        n = min(look, most - count)
        kinds = np.ndarray((n,), "<u4", buffer, position + size * count, (size,))
        other = np.flatnonzero(kinds != kind)
        if len(other):
            return count + int(other[0])
        count += n
        look *= 4
    return count


def _chain(
    kinds: np.ndarray[Any, Any], steps: np.ndarray[Any, Any], first: int
) -> tuple[np.ndarray[Any, Any], int]:
    """Every place that the chain from `first` comes by, and the one at which it stops.

    It stops at a record of a kind without a step, at one that does not fit, or behind the last word.
    """
    end = len(kinds)
    jump = np.arange(end + 1)
    jump[:end] += steps[np.minimum(kinds, _MOST_KIND)]
    beyond = np.flatnonzero(jump[-_LONGEST_WORDS:] > end) + max(0, end + 1 - _LONGEST_WORDS)
    jump[beyond] = beyond  # records that are cut off
    jumps = [jump]
    for _ in range(_SQUARINGS):
        jumps.append(np.take(jumps[-1], jumps[-1], mode="clip"))
    anchors, at = [first], first
    while (following := int(jumps[-1][at])) != at:
        at = following
        anchors.append(at)
    places = np.array(anchors)
    for table in jumps[-2::-1]:
        places = np.stack([places, table[places]], axis=1).ravel()
    places = places[jump[places] != places]
    return np.unique(places), at
