"""Reads the pages of an SQLite file without SQLite, many at a time.

SQLite returns rows one by one, which would take longer than all other work on an export. `PageFile`
finds the leaf pages of a table; `thence.readers.nsight.sqlite_records` decodes their cells. Anything
unusual raises `Unusual`, and the caller reads the table with SQLite, which then decides whether the file
is damaged. Only a page that is used twice is reported here (`Damaged`), because SQLite would follow cycles in
the page tree for hours.
Source: https://www.sqlite.org/fileformat2.html, sections 1.3 (file header) and 1.6 (b-tree pages and cells).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


MAGIC = b"SQLite format 3\0"
"""The first 16 bytes of every SQLite database."""
_HEADER_BYTES = 100
_UTF8 = 1
_INTERIOR, _LEAF = 5, 13  # table b-tree pages; index pages hold tables WITHOUT ROWID
_INTERIOR_HEADER, _LEAF_HEADER = 12, 8
_MAX_DEPTH = 20  # BTCURSOR_MAX_DEPTH of SQLite
_PADDING = 8  # bytes after the pages, so that eight bytes can be read at any offset


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
        size = 1 << 16 if size == 1 else size
        usable = size - header[20]
        if size < 512 or size & (size - 1) or usable < 480:
            raise Unusual("page size")
        utf8 = int.from_bytes(header[56:60], "big") == _UTF8
        return cls(Path(path), size, usable, length // size, utf8)

    def leaves(self, root: int) -> npt.NDArray[np.int64]:
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

    def read(self, numbers: npt.NDArray[np.int64], padding: int = _PADDING) -> npt.NDArray[np.uint8]:
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

    def leaf_pages(self, numbers: npt.NDArray[np.int64]) -> Pages:
        """Leaf pages with the offsets of their cells.

        Raises:
            Unusual: a page is not a leaf, or its cells are outside of the page.
            OSError: the file cannot be read.
        """
        data = self.read(numbers)
        return Pages(data, self.size, self.usable, self._cells(data, len(numbers), _LEAF))

    def _children(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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

    def _cells(self, data: npt.NDArray[np.uint8], pages: int, kind: int) -> npt.NDArray[np.int64]:
        header = _LEAF_HEADER if kind == _LEAF else _INTERIOR_HEADER
        table = data[: pages * self.size].reshape(pages, self.size)
        counts = _uint16(table, 3)
        most = int(counts.max(initial=0))
        if (table[:, 0] != kind).any() or header + 2 * most > self.usable:
            raise Unusual("page header")
        offsets = table[:, header : header + 2 * most].view(">u2").astype(np.int64)
        there = np.arange(most) < counts[:, None]
        # Cells come after the array of their offsets; the smallest cell of either type has four bytes.
        low, high = header + 2 * counts[:, None], self.usable - 4
        if (((offsets < low) | (offsets > high)) & there).any():
            raise Unusual("cell offsets")
        offsets += (np.arange(pages) * self.size)[:, None]
        cells: npt.NDArray[np.int64] = offsets[there]
        return cells


def _uint16(pages: npt.NDArray[np.uint8], offset: int) -> npt.NDArray[Any]:
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

    data: npt.NDArray[np.uint8]
    size: int
    usable: int
    cells: npt.NDArray[np.int64]
