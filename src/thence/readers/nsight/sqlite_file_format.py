"""Decodes SQLite's pages to columns, many pages at a time and without SQLite.

`PageFile` finds the leaf pages of a table. A cell of a leaf page holds the size of its record, the row id, and the
record. A record is a header with the type of each value, then the values. The rows of one table have few different
headers, so each distinct header is parsed once (`_Shapes`) and gives the offset and size of each value for all rows
with this header. Anything unusual raises `Unusual`, and the caller reads the table with SQLite, which then decides
whether the file is damaged. Only a page that is used twice is reported here (`Damaged`), because SQLite would follow
cycles in the page tree for hours.

Why no library reads the rows: of an export of 150 MB, three tables take 0.7 s of CPU here, 1.1 s with ADBC's driver
(one thread, no limit on the steps of a query, so a cycle of pages never ends) and 2.6 s with Python's sqlite3, with
which the whole export takes 2.2 to 2.7 times as long to read. DuckDB downloads its SQLite extension when it is used.

Source: https://www.sqlite.org/fileformat2.html, sections 1.3 (file header), 1.6 (b-tree pages and cells) and 2.1
(records).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thence.readers.nsight.store import distinct

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Array, Int64, Mask, UInt8, UInt32, UInt64


MAGIC = b"SQLite format 3\0"
"""The first 16 bytes of every SQLite database."""
_HEADER_BYTES = 100  # of the file, at the beginning of its first page
_UTF8 = 1  # the file header's text encoding; 2 and 3 are UTF-16
_INTERIOR, _LEAF = 5, 13  # table b-tree pages; index pages hold tables WITHOUT ROWID
_INTERIOR_HEADER, _LEAF_HEADER = 12, 8  # bytes; four for the rightmost child of an interior page
_MAX_DEPTH = 20  # BTCURSOR_MAX_DEPTH of SQLite
_PADDING = 8  # bytes after the pages, so that eight bytes can be read at any offset
_NULL, _ZERO, _ONE, _TEXT = 0, 8, 9, 13  # serial types; from 13 on odd ones are texts
_INTEGER_BYTES = np.array([0, 1, 2, 3, 4, 6, 8, -1, 0, 0, -1, -1], np.int64)
"""Size in bytes of a value by its serial type; -1 for types that are neither null nor an integer."""
_CONTINUED = np.uint64(0x8080808080808080)  # the continuation bit of each byte of a varint
_GATHER = np.uint64(0x0102040810204080)  # multiplying moves bits 0, 8, ... 56 to bits 56 to 63
_MAX_HEADER = 127  # bytes; the size of a longer header is a varint of two bytes
_MAX_TYPE_BYTES = 3  # of a varint: enough for the type of a value of up to a megabyte
_KEPT = np.array([(1 << 64) - (1 << (64 - 8 * kept)) for kept in range(9)], np.uint64)
"""Masks that keep the first 0 to 8 bytes of a big-endian 64-bit word."""


class Unusual(Exception):
    """The table has to be read with SQLite. Never leaves the package."""


class Damaged(ValueError):
    """The file cannot be a valid database."""


@dataclass(frozen=True)
class PageFile:
    """The pages of a database file.

    Attributes:
        path: of the file.
        size: bytes of a page.
        usable: bytes of a page that SQLite uses.
        count: whole pages in the file.
        utf8: whether texts are UTF-8.
    """

    path: Path
    size: int
    usable: int
    count: int
    utf8: bool

    @classmethod
    def of(cls, path: str | Path) -> PageFile:
        """The pages of a file, by its header.

        Raises:
            Unusual: the header is not one that SQLite writes.
            OSError: the file cannot be read.
        """
        with Path(path).open("rb") as stream:
            header = stream.read(_HEADER_BYTES)
            length = stream.seek(0, 2)
        if len(header) < _HEADER_BYTES or not header.startswith(MAGIC):
            raise Unusual("no header")
        size = int.from_bytes(header[16:18], "big")
        size = 1 << 16 if size == 1 else size  # 65,536 does not fit into the field's two bytes
        usable = size - header[20]  # some extensions reserve bytes at the end of every page
        if size < 512 or size & (size - 1) or usable < 480:
            raise Unusual("page size")
        utf8 = int.from_bytes(header[56:60], "big") == _UTF8
        return cls(Path(path), size, usable, length // size, utf8)

    def leaves(self, root: int) -> Int64:
        """Numbers of the leaf pages below a table's root page, in the order of their rows.

        Raises:
            Damaged: a page is used twice.
            Unusual: the b-tree is not that of a table, or its pages are not in the file.
            OSError: the file cannot be read.
        """
        level = np.array([root], np.int64)
        seen = np.zeros(self.count + 1, np.bool_)
        for _ in range(_MAX_DEPTH):
            if level.min() < 2 or level.max() > self.count:
                raise Unusual("page numbers")
            if seen[level].any() or len(np.unique(level)) < len(level):
                raise Damaged("some of its pages are used twice")
            seen[level] = True
            # All leaves of a b-tree have the same depth: the first page of a level gives the type of all its pages.
            kind = self.read(level[:1], 0)[0]
            if kind == _LEAF:
                return level
            if kind != _INTERIOR:
                raise Unusual("no table")
            level = self._children(level)
        raise Unusual("too deep")

    def read(self, numbers: Int64, padding: int = _PADDING) -> UInt8:
        """The bytes of pages, concatenated and followed by zero bytes of padding.

        Args:
            numbers: of the pages, from 1 to `count`.
            padding: number of zero bytes appended.

        Raises:
            Unusual: the file has become shorter.
            OSError: it cannot be read.
        """
        data = np.zeros(len(numbers) * self.size + padding, np.uint8)
        view = data.data
        starts = np.flatnonzero(np.diff(numbers, prepend=-1) != 1)
        ends = np.append(starts[1:], len(numbers))
        with self.path.open("rb", buffering=0) as stream:
            for number, start, end in zip(numbers[starts].tolist(), starts.tolist(), ends.tolist(), strict=True):
                stream.seek((number - 1) * self.size)
                part = view[start * self.size : end * self.size]
                while part:
                    got = stream.readinto(part)
                    if not got:
                        raise Unusual("end of file")
                    part = part[got:]
        return data

    def leaf_pages(self, numbers: Int64) -> Pages:
        """Leaf pages with the offsets of their cells.

        Raises:
            Unusual: a page is not a leaf, or its cells are outside of the page.
            OSError: the file cannot be read.
        """
        data = self.read(numbers)
        return Pages(data, self.size, self.usable, self._cells(data, len(numbers), _LEAF))

    def _children(self, numbers: Int64) -> Int64:
        """Numbers of the child pages of interior pages: one in each cell, and the last in the page's header."""
        data = self.read(numbers)
        cells = self._cells(data, len(numbers), _INTERIOR)
        pages = data[: len(numbers) * self.size].reshape(len(numbers), self.size)
        counts = _uint16(pages, 3)
        ends = np.cumsum(counts + 1) - 1
        children = np.zeros(len(cells) + len(numbers), np.int64)
        is_last = np.zeros(len(children), np.bool_)
        is_last[ends] = True
        number = np.ndarray(len(data) - 3, ">u4", data, strides=(1,))
        children[~is_last] = number[cells]
        children[is_last] = number[np.arange(len(numbers)) * self.size + 8]
        return children

    def _cells(self, data: UInt8, pages: int, kind: int) -> Int64:
        header = _LEAF_HEADER if kind == _LEAF else _INTERIOR_HEADER
        table = data[: pages * self.size].reshape(pages, self.size)
        counts = _uint16(table, 3)
        most = int(counts.max(initial=0))
        if (table[:, 0] != kind).any() or header + 2 * most > self.usable:
            raise Unusual("page header")
        offsets = table[:, header : header + 2 * most].view(">u2").astype(np.int64)
        is_cell = np.arange(most) < counts[:, None]
        # Cells come after the array of their offsets; the smallest cell of either type has four bytes.
        low, high = header + 2 * counts[:, None], self.usable - 4
        if (((offsets < low) | (offsets > high)) & is_cell).any():
            raise Unusual("cell offsets")
        offsets += (np.arange(pages) * self.size)[:, None]
        cells: Int64 = offsets[is_cell]
        return cells


def _uint16(pages: UInt8, offset: int) -> Array:
    return pages[:, offset].astype(np.int64) << 8 | pages[:, offset + 1]


@dataclass(frozen=True)
class Pages:
    """Concatenated pages of one type.

    Attributes:
        data: uint8 array: the pages and `_PADDING` bytes.
        size: bytes of one page.
        usable: bytes of a page that SQLite uses; the rest belongs to extensions.
        cells: offset in ``data`` of every cell, page by page, in the order of keys within a page.
    """

    data: UInt8
    size: int
    usable: int
    cells: Int64


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

    def integers(self, column: int) -> tuple[Int64, Mask | None]:
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

    def nulls(self, column: int) -> Mask:
        """A mask of the rows that are null in a column."""
        null: Mask = self._shapes.types[:, column] == _NULL
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
            first, text_of_row = self._distinct_texts(start[rows], length[rows], words)
            numbers[rows] = text_of_row + len(texts)
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

    def _distinct_texts(self, start: Int64, length: Int64, words: int) -> tuple[npt.NDArray[np.intp], UInt32]:
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
        first, shape_of_row = distinct(self._header_words(header))
        begin = self._begin[first]
        end = begin + header[first]
        start = begin + 1
        offset = header[first].copy()
        types = np.zeros((len(first), columns), np.int64)
        offsets = np.zeros((len(first), columns), np.int64)
        for column in range(columns):
            has_value = start < end
            kind, after = _short_varint(self._data, start)
            start = np.where(has_value, after, start)
            types[:, column] = np.where(has_value, kind, _NULL)
            offsets[:, column] = offset
            offset = offset + _bytes_of(types[:, column])
        if (start > end).any():
            raise Unusual("header")
        return _Shapes(shape_of_row.astype(np.intp), types, offsets)

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
    long = (types - 12) // 2  # blobs are even, texts are odd, and both have this size
    plain = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0], np.int64)
    return np.where(types >= 12, long, plain[np.minimum(types, 11)])


def _short_varint(data: UInt8, start: Int64) -> tuple[Int64, Int64]:
    """Values of varints of up to three bytes, and the offset after each varint.

    Raises:
        Unusual: a varint is longer.
    """
    last = len(data) - 1
    first, second, third = (data[np.minimum(start + n, last)].astype(np.int64) for n in range(3))
    # Seven bits a byte, the high ones first; bit 7 says that another byte follows.
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
