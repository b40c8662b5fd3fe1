"""Small protobuf messages of one kind, decoded side by side: a field of all of them at a time.

What protobuf itself has serialized holds each known field once, in the order of the numbers, unknown
ones last (https://protobuf.dev/programming-guides/encoding). So instead of walking through one
message after the other, a cursor for each message steps over all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64 = NDArray[np.int64]

__all__ = ["Cursors", "Messages"]

_PADDING = bytes(16)  # a cursor at the end may look ahead
_MAX_VARINT = 10


@dataclass(frozen=True)
class Messages:
    """Serialized messages in one buffer.

    Attributes:
        data: their bytes, and some padding.
        start: position of each message in ``data``.
        end: first position after each.
    """

    data: bytes
    start: Int64
    end: Int64

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> Messages:
        """Messages that were serialized one by one."""
        end = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        start = np.concatenate([np.zeros(min(1, len(parts)), np.int64), end[:-1]])
        return cls(b"".join((*parts, _PADDING)), start, end)


class Cursors:
    """A position in each of several messages; reading a field moves those that have it.

    Attributes:
        at: positions.
    """

    def __init__(self, data: bytes, start: Int64, end: Int64) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self.at = start.copy()
        self._end = end

    def tag(self) -> NDArray[np.uint8]:
        """The byte that says which field comes next (number << 3 | wire type); 0 at the end."""
        return np.where(self.at < self._end, self._bytes[self.at], 0)

    def integer(self, tag: int) -> Int64:
        """The varint field with this tag, as 64 bits; 0 where it is not next."""
        result = np.zeros(len(self.at), np.int64)
        rows = np.flatnonzero(self.tag() == tag)
        self.at[rows] += 1
        result[rows] = self.varint(rows)
        return result

    def varint(self, rows: Int64) -> Int64:
        """Reads one varint in each of these messages."""
        at = self.at[rows]
        byte = self._bytes[at]
        value = (byte & 127).astype(np.uint64)
        at += 1
        active = np.flatnonzero(byte > 127)
        for number in range(1, _MAX_VARINT):
            if not len(active):
                break
            byte = self._bytes[at[active]]
            value[active] |= (byte & 127).astype(np.uint64) << np.uint64(7 * number)
            at[active] += 1
            active = active[byte > 127]
        self.at[rows] = at
        return value.view(np.int64)

    def double(self, rows: Int64) -> NDArray[np.float64]:
        """The eight bytes at these cursors as a number."""
        eight = self._bytes[self.at[rows][:, None] + np.arange(8)]
        return np.ascontiguousarray(eight).view("<f8").reshape(len(rows)).astype(np.float64)
