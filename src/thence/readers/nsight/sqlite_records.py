"""Decodes the rows in SQLite's leaf pages to columns, many pages at a time.

A cell holds the size of its record, the row id, and the record. A record is a header with the type of each value,
then the values. The rows of one table have few different headers, so each distinct header is parsed
once (`_Shapes`) and gives the offset and size of each value for all rows with this header.
Source: https://www.sqlite.org/fileformat2.html, sections 1.6 (cells) and 2.1 (records).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.readers.nsight.sqlite_pages import Unusual
from thence.readers.nsight.store import distinct

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Int64, UInt64
    from thence.readers.nsight.sqlite_pages import Pages


_NULL, _ZERO, _ONE, _TEXT = 0, 8, 9, 13
_INTEGER_BYTES = np.array([0, 1, 2, 3, 4, 6, 8, -1, 0, 0, -1, -1], np.int64)
"""Size in bytes of a value by its serial type; -1 for types that are neither null nor an integer."""
_CONTINUED = np.uint64(0x8080808080808080)  # the continuation bit of each byte of a varint
_GATHER = np.uint64(0x0102040810204080)  # multiplying moves bits 0, 8, ... 56 to bits 56 to 63
_MAX_HEADER = 127  # bytes; the size of a longer header is a varint of two bytes
_MAX_TYPE_BYTES = 3  # of a varint: enough for the type of a value of up to a megabyte


def _varint_lengths() -> tuple[Int64, Int64]:
    """Lookup tables from the continuation bits of eight bytes (first byte highest) to lengths in bytes.

    The first table holds the length of the varint at the first byte, the second table the total length of
    the first two varints; 0 if they do not end within the eight bytes.
    """
    first, both = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for bits in range(256):
        ends = [position for position in range(8) if not bits >> (7 - position) & 1]
        first[bits] = ends[0] + 1 if ends else 0
        both[bits] = ends[1] + 1 if len(ends) > 1 else 0
    return first, both


_FIRST_LENGTH, _BOTH_LENGTHS = _varint_lengths()
_KEPT = np.array([(1 << 64) - (1 << (64 - 8 * kept)) for kept in range(9)], np.uint64)
"""Masks that keep the first 0 to 8 bytes of a big-endian 64-bit word."""


class Records:
    """The rows of some pages.

    Args:
        pages: leaf pages of a table.
        columns: number of columns to decode, from the first.

    Raises:
        Unusual: a record is damaged or very long, or its row id is very large.
    """

    def __init__(self, pages: Pages, columns: int) -> None:
        self._data = pages.data
        # An overlapping view: element i is the big-endian 64-bit number at byte i.
        self._words = np.ndarray(len(pages.data) - 7, ">u8", pages.data, strides=(1,))
        self._begin, self._local = self._records(pages)
        self._shapes = self._parsed(columns)
        # For each shape, the minimum over its records of the bytes that are in the leaf page.
        self._shortest = np.full(len(self._shapes.types), pages.size, np.int64)
        np.minimum.at(self._shortest, self._shapes.of, self._local)

    def __len__(self) -> int:
        return len(self._begin)

    def integers(self, column: int) -> tuple[Int64, npt.NDArray[np.bool_] | None]:
        """Values of a column, and a mask of the null values; None for the mask if no value is null.

        Raises:
            Unusual: a value is not an integer, or not in the leaf page.
        """
        shapes = self._shapes
        types, offsets = shapes.types[:, column], shapes.offsets[:, column]
        if (types >= len(_INTEGER_BYTES)).any():
            raise Unusual("type")
        size = _INTEGER_BYTES[types]
        if (size < 0).any():
            raise Unusual("type")
        null = types == _NULL
        nulls = null[shapes.of] if null.any() else None
        constant = (types == _ONE).astype(np.int64)
        if not size.any():
            return constant[shapes.of], nulls
        self._check(offsets + size)
        # Read the eight bytes that end with the value (the page header guarantees that eight exist),
        # then shift left and right to drop the bytes before the value and to extend its sign.
        start = np.take(offsets + size - 8, shapes.of)
        start += self._begin
        values = self._words[start].astype(np.int64)
        surplus = np.where(size > 0, 64 - 8 * size, 0)
        if (surplus == surplus[0]).all():
            shift = surplus[0]
            values <<= shift
            values >>= shift
        else:
            shifts = np.take(surplus, shapes.of)
            values <<= shifts
            values >>= shifts
        if not size.all():
            values &= np.take(np.where(size > 0, -1, 0), shapes.of)
            values += np.take(constant, shapes.of)
        return values, nulls

    def nulls(self, column: int) -> npt.NDArray[np.bool_]:
        """A mask of the rows that are null in a column."""
        null: npt.NDArray[np.bool_] = self._shapes.types[:, column] == _NULL
        return null[self._shapes.of]

    def texts(self, column: int) -> tuple[npt.NDArray[np.intp], list[bytes]]:
        """A text column: for each row the index of its text (-1 for null), and the texts.

        Equal texts may be listed several times, but far fewer times than there are rows.

        Raises:
            Unusual: a value is not text, or not in the leaf page.
        """
        shapes = self._shapes
        types, offsets = shapes.types[:, column], shapes.offsets[:, column]
        if ((types != _NULL) & ((types < _TEXT) | (types % 2 == 0))).any():
            raise Unusual("type")
        size = _bytes_of(types)
        self._check(offsets + size)
        length = np.take(np.where(types == _NULL, -1, size), shapes.of)
        start = np.take(offsets, shapes.of)
        start += self._begin
        numbers = np.full(len(self), -1, np.intp)
        texts: list[bytes] = []
        # Texts that take the same number of 8-byte words are compared together.
        count = (length + 7) // 8
        for words in np.unique(count[length >= 0]).tolist():
            rows = np.flatnonzero((count == words) & (length >= 0))
            first, of = self._distinct_texts(start[rows], length[rows], words)
            numbers[rows] = of + len(texts)
            texts += [
                self._data[begin : begin + size].tobytes()
                for begin, size in zip(start[rows[first]].tolist(), length[rows[first]].tolist(), strict=True)
            ]
        return numbers, texts

    def _check(self, ends: Int64) -> None:
        """Raises `Unusual` if a value continues on an overflow page.

        Args:
            ends: end of the value within the record, for each shape.
        """
        if (ends > self._shortest).any():
            raise Unusual("beyond the page")

    def _distinct_texts(
        self, start: Int64, length: Int64, words: int
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.uint32]]:
        parts = [length.view(np.uint64)]
        if words:
            size = 8 * words
            windows = np.ndarray(len(self._data) - size + 1, f"V{size}", self._data, strides=(1,))
            table = windows[start].view(">u8").reshape(-1, words)
            parts += [table[:, place].astype(np.uint64) for place in range(words)]
            parts[-1] &= np.take(_KEPT, length - 8 * (words - 1))
        return distinct(parts)

    def _records(self, pages: Pages) -> tuple[Int64, Int64]:
        """Offset of each record in the data, and the number of its bytes that are in the leaf page."""
        head = self._words[pages.cells].astype(np.uint64)
        bits = (((head & _CONTINUED) >> np.uint64(7)) * _GATHER) >> np.uint64(56)
        length = np.take(_FIRST_LENGTH, bits.view(np.int64))
        begin = np.take(_BOTH_LENGTHS, bits.view(np.int64))
        if len(begin) and (not begin.all() or length.max() > _MAX_TYPE_BYTES):
            raise Unusual("long numbers")
        begin += pages.cells
        size = (head >> np.uint64(56)).view(np.int64)
        longer = np.flatnonzero(length > 1)
        size[longer] = _short_varint(self._data, pages.cells[longer])[0]
        local = _local_bytes(size, pages.usable)
        end = (pages.cells | (pages.size - 1)) + (1 - pages.size + pages.usable)
        if (begin + local > end).any():
            raise Unusual("beyond the page")
        return begin, local

    def _parsed(self, columns: int) -> _Shapes:
        if not len(self):
            nothing = np.zeros((0, columns), np.int64)
            return _Shapes(np.zeros(0, np.intp), nothing, nothing)
        header = self._data[self._begin].astype(np.int64)
        if header.max() > _MAX_HEADER or header.min() < 1 or (header > self._local).any():
            raise Unusual("header size")
        first, of = distinct(self._header_words(header))
        begin = self._begin[first]
        end = begin + header[first]
        start = begin + 1
        offset = header[first].copy()
        types = np.zeros((len(first), columns), np.int64)
        offsets = np.zeros((len(first), columns), np.int64)
        for column in range(columns):
            there = start < end
            kind, after = _short_varint(self._data, start)
            start = np.where(there, after, start)
            types[:, column] = np.where(there, kind, _NULL)
            offsets[:, column] = offset
            offset = offset + _bytes_of(types[:, column])
        if (start > end).any():
            raise Unusual("header")
        return _Shapes(of.astype(np.intp), types, offsets)

    def _header_words(self, header: Int64) -> list[UInt64]:
        """The headers as 64-bit words; bytes beyond the end of a header are 0."""
        longest, shortest = int(header.max()), int(header.min())
        words = []
        for place in range(0, longest, 8):
            start = np.minimum(self._begin + place, len(self._words) - 1)
            word = self._words[start].astype(np.uint64)
            if shortest == longest:
                word &= _KEPT[min(longest - place, 8)]
            elif shortest < place + 8:
                word &= np.take(_KEPT, np.clip(header - place, 0, 8))
            words.append(word)
        return words


def _bytes_of(types: Int64) -> Int64:
    """Size in bytes of values of the given serial types (fileformat2.html, section 2.1)."""
    long = (types - 12) // 2
    plain = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0], np.int64)
    return np.where(types >= 12, long, plain[np.minimum(types, 11)])


def _short_varint(data: npt.NDArray[np.uint8], start: Int64) -> tuple[Int64, Int64]:
    """Values of varints of up to three bytes, and the offset after each varint.

    Raises:
        Unusual: a varint is longer.
    """
    last = len(data) - 1
    first, second, third = (data[np.minimum(start + n, last)].astype(np.int64) for n in range(3))
    more, most = first >= 128, (first >= 128) & (second >= 128)
    if (most & (third >= 128)).any():
        raise Unusual("long number")
    value = np.where(more, (first & 127) << 7 | (second & 127), first)
    value = np.where(most, value << 7 | third, value)
    return value, start + 1 + more + most


def _local_bytes(size: Int64, usable: int) -> Int64:
    """Bytes of each record that are in its leaf page; the rest is in overflow pages.

    Source: fileformat2.html, section 1.6: U is `usable`, X is `most`, M is `least`, K is `kept`.
    """
    most = usable - 35
    if size.max(initial=0) <= most:
        return size
    least = (usable - 12) * 32 // 255 - 23
    kept = least + (size - least) % (usable - 4)
    return np.where(size <= most, size, np.where(kept <= most, kept, least))


@dataclass(frozen=True)
class _Shapes:
    """The distinct headers of some records.

    Attributes:
        of: index of the header of each record.
        types: serial type by header and column; null (0) if the record is too short for the column.
        offsets: bytes from the beginning of the record to each value, by header and column.
    """

    of: npt.NDArray[np.intp]
    types: Int64
    offsets: Int64
