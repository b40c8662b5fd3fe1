"""The values of many XStats as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.readers.xla.wire import Cursors

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "DOUBLE",
    "INT64",
    "REFERENCE",
    "STRING",
    "UINT64",
    "StatValues",
    "decoded_stats",
]

# Tags of the fields of XStat (xplane.proto): number << 3 | wire type.
_METADATA = 0x08
DOUBLE, UINT64, INT64, STRING, REFERENCE = 0x11, 0x18, 0x20, 0x2A, 0x38
"""What a value can be; others, bytes above all, count as no value."""


@dataclass(frozen=True)
class StatValues:
    """The stats of many events, decoded.

    Attributes:
        data: the bytes that strings are in.
        row: event of each stat.
        stat: its metadata_id.
        tag: of the value: number << 3 | wire type; 0 where there is none.
        integer: the value as 64 bits; of strings their length.
        real: the value where it is a double.
        at: where strings begin.
    """

    data: bytes
    row: NDArray[np.int64]
    stat: NDArray[np.int64]
    tag: NDArray[np.uint8]
    integer: NDArray[np.int64]
    real: NDArray[np.float64]
    at: NDArray[np.int64]

    def of(self, stat: int) -> StatValues:
        """Those of one stat."""
        chosen = np.flatnonzero(self.stat == stat)
        columns = (self.row, self.stat, self.tag, self.integer, self.real, self.at)
        return StatValues(self.data, *(column[chosen] for column in columns))  # type: ignore[arg-type]

    def strings(self) -> list[bytes]:
        """The value of each where it is a string; empty for others."""
        length = np.where(self.tag == STRING, self.integer, 0)
        ends = (self.at + length).tolist()
        return [self.data[at:end] for at, end in zip(self.at.tolist(), ends, strict=True)]


def decoded_stats(
    data: bytes, row: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]
) -> StatValues:
    """The values of serialized stats.

    Args:
        data: what the positions count in.
        row: event of each stat.
        start: first byte of each.
        end: first byte after each.
    """
    cursors = Cursors(data, start, end)
    stat = cursors.integer(_METADATA)
    tag = cursors.tag()
    cursors.at += 1
    integer = np.zeros(len(row), np.int64)
    real = np.zeros(len(row), np.float64)
    numbers = np.flatnonzero(np.isin(tag, (UINT64, INT64, STRING, REFERENCE)))
    integer[numbers] = cursors.varint(numbers)
    doubles = np.flatnonzero(tag == DOUBLE)
    real[doubles] = cursors.double(doubles)
    return StatValues(data, row, stat, tag, integer, real, cursors.at)
