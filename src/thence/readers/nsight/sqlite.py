"""Reader of Nsight Systems SQLite exports, and a `Store` for such an export.

Plain files are read in place; gzipped files are decompressed to a temporary file first. The database is
opened read-only and never written to.

Tables are decoded from their pages (`thence.readers.nsight.sqlite_file_format`), a few megabytes at a time, in
threads, which run concurrently because NumPy releases the GIL. Tables with an unusual layout are read
with SQLite instead, which is several times slower.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sqlite3
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput, UnknownFormat
from thence.model.formats import NSIGHT_EXPORT
from thence.model.losses import Loss
from thence.readers.nsight.sqlite_file_format import MAGIC, PageFile, Records, Unusual
from thence.readers.nsight.store import PAYLOADS, READABLE, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from thence.model.tables import Tables
    from thence.readers.source import Source

NAME = f"{NSIGHT_EXPORT} (SQLite)"
PATTERNS = ("*.sqlite", "*.sqlite.gz", "*.nsys-db")
"""Globs of the files of a directory that may be exports."""
_MAX_UNPACKED = 64 << 30
"""Largest decompressed size of a gzipped export, in bytes."""
_CHUNK = 1 << 22  # bytes that are decompressed at a time
_CHUNK_ROWS = 1 << 18
_CHUNK_BYTES = 1 << 22
_THREADS = 4
_IDS_AT_ONCE = 500  # SQLite allows 999 parameters in versions before 3.32
_ABSENT = -(1 << 63) + 1  # stands for null: no time, id or size has this value
_STEPS_AT_ONCE = 1 << 20  # of SQLite's virtual machine: about 10 ms
_STEPS, _STEPS_PER_BYTE = 1 << 26, 64  # a row takes at least 6 bytes, and 3 steps for each column
_DAMAGE = (sqlite3.Error, ValueError, TypeError, OverflowError)
_NSIGHT_TABLES = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
    "TARGET_INFO_SESSION_START_TIME",
)
"""A database with at least one of these tables is taken for an export of Nsight Systems."""


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this is an SQLite database."""
    return head.startswith(MAGIC)


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The tables of one export.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: the export cannot be read, or the disk has no room for its decompressed content.
        UnknownFormat: the file is a database of another program.
    """
    if source.plain:
        try:
            tables = _read(source.path, source.name)
        except DamagedInput as error:  # SQLite opens files by their names
            if source.deleted:
                text = "was replaced or deleted before it was read; read it again"
                raise DamagedInput(source.name, text) from error
            raise
    else:
        with tempfile.TemporaryDirectory(prefix="thence-") as folder:
            path = Path(folder) / "unpacked.sqlite"
            _decompress(source, path, progress)
            tables = _read(str(path), source.name)
    progress(source.stored_bytes)
    return tables


def _read(path: str, name: str) -> Tables:
    from thence.readers.nsight.tables import tables_of

    with opened(path, name) as database:
        tables = tables_of(database)
    journal = Path(f"{name}-wal")
    if journal.is_file() and journal.stat().st_size:
        text = f"{name}: another program is still writing it; the content of {journal.name} is not shown"
        return tables.with_losses([Loss("cut", name, 1, text)]).with_warnings([text])
    return tables


def _decompress(source: Source, path: Path, progress: Callable[[int], None]) -> None:
    room = min(_MAX_UNPACKED, shutil.disk_usage(path.parent).free)
    size = 0
    with path.open("wb") as unpacked:
        while part := source.read(_CHUNK):
            size += len(part)
            if size > room:
                raise DamagedInput(
                    source.name,
                    f"decompresses to more than {room:,} bytes, the smaller of the limit and the free temporary space",
                )
            unpacked.write(part)
            progress(source.consumed)
    if source.damage:
        raise DamagedInput(source.name, f"cannot be read to the end: {source.damage}")


@contextmanager
def opened(path: str, name: str) -> Iterator[Database]:
    """A database, opened read-only and without locks, because another program may have it open.

    Args:
        path: of the plain file.
        name: the input as the user named it.

    Raises:
        DamagedInput: the database cannot be read.
        UnknownFormat: it is a database of another program.
    """
    # immutable: SQLite creates no lock, journal or -shm file, so that read-only folders work as well.
    address = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        size, pages = Path(path).stat().st_size, _pages(path)
    except OSError as error:
        raise DamagedInput(name, f"cannot be read ({error.strerror or error})") from error
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            connection.execute("pragma trusted_schema = off")
            _limit_steps(connection, size)
            yield Database(name, connection, pages, _layouts(connection, name))
    except (sqlite3.Error, UnicodeError) as error:
        raise DamagedInput(name, f"the database cannot be read ({error})") from error


def _pages(path: str) -> PageFile | None:
    try:
        return PageFile.of(path)
    except Unusual:
        return None


def _limit_steps(connection: sqlite3.Connection, size: int) -> None:
    """Aborts queries that take more steps than a table in a file of this size (bytes) can need."""
    left = itertools.count(_STEPS // _STEPS_AT_ONCE + size * _STEPS_PER_BYTE // _STEPS_AT_ONCE, -1)
    connection.set_progress_handler(lambda: next(left) < 0, _STEPS_AT_ONCE)


def _layouts(connection: sqlite3.Connection, name: str) -> dict[str, _Layout]:
    """The layouts of the tables that are read. Views and virtual tables, which compute their rows, are left out."""
    roots = dict(
        connection.execute("select name, rootpage from sqlite_master where type = 'table' and rootpage > 0").fetchall()
    )
    if not any(mark in roots for mark in _NSIGHT_TABLES):
        raise UnknownFormat(name, "is an SQLite database, but not an export of Nsight Systems")
    return {table: _layout(connection, table, roots[table]) for table in sorted(READABLE.intersection(roots))}


@dataclass(frozen=True)
class _Layout:
    """Columns and root page of one table.

    Attributes:
        columns: names, in the order of a record's values.
        root: number of the table's root page; 0 if the table has to be read with SQLite.
    """

    columns: tuple[str, ...]
    root: int


def _layout(connection: sqlite3.Connection, table: str, root: object) -> _Layout:
    """The layout of a table. Source: https://www.sqlite.org/pragma.html#pragma_table_xinfo."""
    rows = connection.execute(f"pragma table_xinfo({table})").fetchall()
    # Records lack the values of an integer primary key, of generated columns, and of columns that were added
    # later with a default: a table with such columns is left to SQLite. Generated columns are never read: Nsight
    # Systems writes none, and their expressions may take any time.
    plain = isinstance(root, int) and all(
        default is None and not key and not hidden for *_, default, key, hidden in rows
    )
    columns = tuple(row[1] for row in rows if not row[-1])
    return _Layout(columns, root if plain and isinstance(root, int) else 0)


@dataclass
class Database:
    """One database. Tables outside `READABLE` are not even listed."""

    name: str
    _connection: sqlite3.Connection
    _pages: PageFile | None = None
    _layouts: dict[str, _Layout] = field(default_factory=dict)

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table; empty if there is no such table."""
        layout = self._layouts.get(table)
        return frozenset(layout.columns if layout else ())

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of a table: integers as Int64, texts as Categorical; absent columns are null.

        Raises:
            DamagedInput: the table cannot be read.
        """
        columns = self.columns(table)
        frame = pl.concat(self.parts(table, integers, lambda part: part))
        if not columns:
            return frame.with_columns(pl.Series(text, [], pl.Categorical()) for text in texts)
        with self._reading(table):
            return frame.with_columns(
                self._text(table, text) if text in columns else pl.lit(None, pl.Categorical()).alias(text)
                for text in texts
            )

    def parts(self, table: str, integers: Sequence[str], work: Callable[[pl.DataFrame], Part]) -> list[Part]:
        """Applies a function to each part of a table; see `Store.parts`."""
        present = [column for column in integers if column in self.columns(table)]
        schema = dict.fromkeys(integers, pl.Int64())

        def with_absent_columns(part: pl.DataFrame) -> Part:
            return work(part.select(pl.col(c) if c in present else pl.lit(None, pl.Int64).alias(c) for c in schema))

        if not self.columns(table):
            return [work(pl.DataFrame(schema=schema))]
        with self._reading(table):
            if not present:
                (rows,) = self._connection.execute(f"select count(*) from {table}").fetchone()  # noqa: S608 - one of READABLE
                return [with_absent_columns(pl.DataFrame({"": pl.repeat(0, rows, dtype=pl.Int8, eager=True)}))]
            results = self._decoded(
                table,
                present,
                lambda rows, places: with_absent_columns(_integer_frame(rows, dict(zip(present, places, strict=True)))),
            )
            if results is None:
                results = [with_absent_columns(part) for part in self._rows(table, present)]
        return results or [work(pl.DataFrame(schema=schema))]

    def payloads(self) -> pl.DataFrame:
        """Payloads of NVTX events; see `Store.payloads`."""
        columns = self.columns("NVTX_EVENTS")
        sources = {"binaryData": "cast({} as blob)", "jsonText": "cast({} as text)"}
        chosen = [sql.format(c) if c in columns else "null" for c, sql in sources.items()]
        rows: list[tuple[Any, ...]] = []
        with self._reading("NVTX_EVENTS"):
            if self._any_value("NVTX_EVENTS", [column for column in sources if column in columns]):
                rows = self._connection.execute(
                    f"select * from (select row_number() over (order by rowid) - 1, {chosen[0]} as b, {chosen[1]} as j"  # noqa: S608 - columns of our own
                    " from NVTX_EVENTS) where b is not null or j is not null"
                ).fetchall()
            return pl.DataFrame(rows, schema=PAYLOADS, orient="row")

    def strings(self, ids: pl.Series) -> pl.DataFrame:
        """Texts of StringIds for the given ids only: columns id (Int64) and value (Categorical).

        Raises:
            DamagedInput: the table cannot be read.
        """
        wanted = ids.drop_nulls().unique().sort().to_list() if self.columns("StringIds") else []
        rows: list[tuple[int, str]] = []
        with self._reading("StringIds"):
            for start in range(0, len(wanted), _IDS_AT_ONCE):
                part = wanted[start : start + _IDS_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows += self._connection.execute(
                    f"select id, cast(value as text) from StringIds where id in ({marks})",  # noqa: S608 - question marks
                    part,
                )
            frame = pl.DataFrame(rows, schema={"id": pl.Int64, "value": pl.String}, orient="row")
        return frame.unique("id", keep="first").with_columns(pl.col("value").cast(pl.Categorical()))

    def _rows(self, table: str, columns: Sequence[str]) -> list[pl.DataFrame]:
        """Integer columns of a table, read with SQLite, in parts of `_CHUNK_ROWS` rows."""
        chosen = ", ".join(f'ifnull("{column}", {_ABSENT})' for column in columns)
        cursor = self._connection.execute(f"select {chosen} from {table}")  # noqa: S608 - one of READABLE
        dtype = np.dtype([(column, np.int64) for column in columns])
        parts = []
        # np.fromiter reads the cursor without running Python code for each row.
        while len(part := np.fromiter(itertools.islice(cursor, _CHUNK_ROWS), dtype)):
            frame = pl.DataFrame({c: np.ascontiguousarray(part[c]) for c in columns})
            parts.append(frame.with_columns(pl.when(pl.col(c) != _ABSENT).then(pl.col(c)) for c in columns))
        return parts

    def _text(self, table: str, column: str) -> pl.Series:
        parts = None
        if self._pages is not None and self._pages.utf8:
            parts = self._decoded(table, [column], lambda rows, places: _text_series(rows, places[0]))
        series = self._text_rows(table, column) if parts is None else parts
        empty = pl.Series([], dtype=pl.Categorical())
        return pl.concat([empty, *series]).alias(column)

    def _text_rows(self, table: str, column: str) -> list[pl.Series]:
        """A text column, read with SQLite, in parts of `_CHUNK_ROWS` rows."""
        parts = []
        cursor = self._connection.execute(f'select cast("{column}" as text) from {table}')  # noqa: S608 - one of READABLE
        while chunk := list(itertools.islice(cursor, _CHUNK_ROWS)):
            values = list(itertools.chain.from_iterable(chunk))
            parts.append(pl.Series(values, dtype=pl.String).cast(pl.Categorical()))
        return parts

    def _any_value(self, table: str, columns: Sequence[str]) -> bool:
        """Whether any of the columns has a value that is not null; True if that is unknown."""
        if not columns:
            return False
        non_null_parts = self._decoded(
            table, columns, lambda rows, places: not all(rows.nulls(p).all() for p in places)
        )
        return non_null_parts is None or any(non_null_parts)

    def _decoded(
        self, table: str, columns: Sequence[str], work: Callable[[Records, list[int]], Part]
    ) -> list[Part] | None:
        """Applies a function to the decoded rows, part by part; None if the table has to be read with SQLite.

        Args:
            columns: columns to decode; the columns before them in a record are decoded as well.
            work: function of the rows and of the position of each column in a record.
        """
        layout, pages = self._layouts[table], self._pages
        if pages is None or not layout.root:
            return None
        places = [layout.columns.index(column) for column in columns]

        def part(numbers: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Part:
            return work(Records(pages.leaf_pages(numbers), max(places) + 1), places)

        try:
            leaves = pages.leaves(layout.root)
            at_once = max(_CHUNK_BYTES // pages.size, 1)
            parts = [leaves[start : start + at_once] for start in range(0, len(leaves), at_once)]
            with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
                return list(pool.map(part, parts))
        except (Unusual, OSError):
            return None

    @contextmanager
    def _reading(self, table: str) -> Iterator[Any]:
        try:
            yield
        except (*_DAMAGE, pl.exceptions.PolarsError) as error:
            raise DamagedInput(
                self.name, f"the table {table} cannot be read ({error}); export the report again"
            ) from error


def _integer_frame(rows: Records, places: dict[str, int]) -> pl.DataFrame:
    columns = []
    for name, place in places.items():
        values, nulls = rows.integers(place)
        column = pl.Series(name, values)
        columns.append(column if nulls is None else column.set(pl.Series(nulls), None))
    return pl.DataFrame(columns)


def _text_series(rows: Records, place: int) -> pl.Series:
    numbers, texts = rows.texts(place)
    distinct_texts = pl.Series([text.decode("utf-8", "replace") for text in texts], dtype=pl.String)
    index = pl.Series(numbers)
    return distinct_texts.cast(pl.Categorical()).gather(index.set(index < 0, None))
