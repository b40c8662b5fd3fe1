"""The values of many XStats (xplane.proto) as columns, decoded without a loop over messages.

The messages are small and of one kind. One field at a time is decoded for all messages: each message has
a cursor that steps over its fields. This relies on the order in which protobuf serializes: each known
field once, by ascending field number, unknown fields last
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.model.arrays import Int64


_PADDING = bytes(16)  # a cursor at the end may look ahead
_MAX_VARINT = 10
# Tags of the fields of XStat (xplane.proto): number << 3 | wire type.
_METADATA = 0x08
DOUBLE, UINT64, INT64, STRING, REFERENCE = 0x11, 0x18, 0x20, 0x2A, 0x38
"""Tags of the value fields that are decoded; values of other types, mainly bytes, count as absent."""


def decoded_stats(data: bytes, row: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> StatValues:
    """Decodes the values of serialized stats.

    Args:
        data: the buffer that the positions refer to.
        row: event of each stat.
        start: position of each stat's first byte.
        end: position after each stat's last byte.
    """
    cursors = Cursors(data, start, end)
    stat = cursors.integer(_METADATA)
    tag = cursors.tag()
    cursors.position += 1
    integer = np.zeros(len(row), np.int64)
    real = np.zeros(len(row), np.float64)
    numbers = np.flatnonzero(np.isin(tag, (UINT64, INT64, STRING, REFERENCE)))
    integer[numbers] = cursors.varint(numbers)
    doubles = np.flatnonzero(tag == DOUBLE)
    real[doubles] = cursors.double(doubles)
    return StatValues(data, row, stat, tag, integer, real, cursors.position)


@dataclass(frozen=True)
class StatValues:
    """The stats of many events, decoded.

    Attributes:
        data: the bytes that strings are in.
        row: event of each stat.
        stat: its metadata_id.
        tag: tag of the value (field number << 3 | wire type); 0 where the stat has no value.
        integer: the value as 64 bits; for a string, its length.
        real: the value where it is a double.
        string_start: offset in data of each string value.
    """

    data: bytes
    row: NDArray[np.int64]
    stat: NDArray[np.int64]
    tag: NDArray[np.uint8]
    integer: NDArray[np.int64]
    real: NDArray[np.float64]
    string_start: NDArray[np.int64]

    def of(self, stat: int) -> StatValues:
        """The values of one stat."""
        chosen = np.flatnonzero(self.stat == stat)
        columns = (self.row, self.stat, self.tag, self.integer, self.real, self.string_start)
        return StatValues(self.data, *(column[chosen] for column in columns))  # type: ignore[arg-type]

    def strings(self) -> list[bytes]:
        """The string value of each stat; empty for values of other types."""
        length = np.where(self.tag == STRING, self.integer, 0)
        ends = (self.string_start + length).tolist()
        return [self.data[start:end] for start, end in zip(self.string_start.tolist(), ends, strict=True)]


@dataclass(frozen=True)
class Messages:
    """Serialized messages in one buffer.

    Attributes:
        data: the bytes of all messages, then some padding.
        start: position of each message in ``data``.
        end: first position after each.
    """

    data: bytes
    start: Int64
    end: Int64

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> Messages:
        """Joins messages that were serialized separately."""
        end = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        start = np.concatenate([np.zeros(min(1, len(parts)), np.int64), end[:-1]])
        return cls(b"".join((*parts, _PADDING)), start, end)


class Cursors:
    """A read position in each of several messages; reading a field advances those that have it next.

    Attributes:
        position: offset in the data of each cursor.
    """

    def __init__(self, data: bytes, start: Int64, end: Int64) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self.position = start.copy()
        self._end = end

    def tag(self) -> NDArray[np.uint8]:
        """The tag byte of the next field (number << 3 | wire type); 0 at the end of a message."""
        return np.where(self.position < self._end, self._bytes[self.position], 0)

    def integer(self, tag: int) -> Int64:
        """The varint field with this tag, as 64 bits; 0 where it is not next."""
        result = np.zeros(len(self.position), np.int64)
        rows = np.flatnonzero(self.tag() == tag)
        self.position[rows] += 1
        result[rows] = self.varint(rows)
        return result

    def varint(self, rows: Int64) -> Int64:
        """Reads one varint in each of these messages, as 64 bits."""
        position = self.position[rows]
        byte = self._bytes[position]
        value = (byte & 127).astype(np.uint64)
        position += 1
        active = np.flatnonzero(byte > 127)
        for number in range(1, _MAX_VARINT):
            if not len(active):
                break
            byte = self._bytes[position[active]]
            value[active] |= (byte & 127).astype(np.uint64) << np.uint64(7 * number)
            position[active] += 1
            active = active[byte > 127]
        self.position[rows] = position
        return value.view(np.int64)

    def double(self, rows: Int64) -> NDArray[np.float64]:
        """The eight bytes at these cursors as a number."""
        eight = self._bytes[self.position[rows][:, None] + np.arange(8)]
        return np.ascontiguousarray(eight).view("<f8").reshape(len(rows)).astype(np.float64)
