"""A list of integers for each row of a table, kept as two arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64 = NDArray[np.int64]

__all__ = ["IntegerLists"]

_MAX_INT64 = np.iinfo(np.int64).max
_MAX_VARINT = 10  # bytes
_EMPTY = pl.Series([[]], dtype=pl.List(pl.Int64))


@dataclass(frozen=True)
class IntegerLists:
    """A list of integers for each row.

    Attributes:
        items: of all rows, one row after the other.
        counts: how many of them each row has.
    """

    items: Int64
    counts: Int64

    @classmethod
    def packed(cls, fields: Sequence[bytes]) -> IntegerLists:
        """From packed repeated fields (https://protobuf.dev/programming-guides/encoding#packed).

        Args:
            fields: content of the field, one for each row; empty where it is missing.

        Raises:
            DecodeError: a number is cut, or longer than protobuf allows.
        """
        data = np.frombuffer(b"".join(fields), np.uint8)
        end_of_row = np.cumsum(np.fromiter(map(len, fields), np.int64, len(fields)))
        is_last = data < 128
        numbers = np.concatenate([[0], np.cumsum(is_last)])  # that are complete before each byte
        counts = np.diff(numbers[end_of_row], prepend=0)
        end = np.flatnonzero(is_last) + 1
        size = np.diff(end, prepend=0)
        whole = is_last[end_of_row[end_of_row > 0] - 1].all()
        if not whole or size.max(initial=0) > _MAX_VARINT:
            raise DecodeError("a packed field ends within a number")
        begin = end - size
        shift = 7 * (np.arange(len(data)) - np.repeat(begin, size)).astype(np.uint64)
        parts = (data & 127).astype(np.uint64) << shift
        items = np.bitwise_or.reduceat(parts, begin) if len(begin) else parts
        return cls(items.view(np.int64), counts)

    @cached_property
    def ends(self) -> Int64:
        """Where the items of each row end."""
        return np.cumsum(self.counts)

    @cached_property
    def rows(self) -> Int64:
        """The row of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def of(self, row: int) -> list[int]:
        """The list of one row."""
        end = self.ends[row]
        found: list[int] = self.items[end - self.counts[row] : end].tolist()
        return found

    def column(self, items: Int64) -> pl.Series:
        """A Polars column of lists with these items in place of its own; fast, unlike from lists."""
        flat = pl.DataFrame({"row": pl.Series(self.rows).set_sorted(), "items": items})
        filled = flat.group_by("row", maintain_order=True).agg("items")
        place = np.zeros(len(self.counts), np.int64)  # 0: the empty list
        place[filled["row"].to_numpy()] = np.arange(1, filled.height + 1)
        return pl.concat([_EMPTY, filled["items"]])[place]

    def sums(self, values: Int64) -> Int64:
        """Sums of values that are not negative, one for each item, by row; at most 2**63 - 1.

        Added as halves of 32 bits, which doubles hold exactly: the sum itself may not fit.
        """
        rows, mask = len(self.counts), 0xFFFF_FFFF
        low = np.bincount(self.rows, values & mask, rows).astype(np.int64)
        high = np.bincount(self.rows, values >> 32, rows).astype(np.int64) + (low >> 32)
        return np.where(high >> 31, _MAX_INT64, high << 32 | low & mask)
