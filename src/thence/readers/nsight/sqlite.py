"""An Nsight Systems SQLite export as a `Store`. Nothing is ever written to the database.

Rows become NumPy columns in chunks: SQLite's rows are handed to `numpy.fromiter`, so no Python code
runs for a row.
"""

from __future__ import annotations

import itertools
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput, UnknownFormat
from thence.readers.nsight.store import PAYLOADS, READABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["MAGIC", "Database", "opened"]

MAGIC = b"SQLite format 3\0"
_CHUNK_ROWS = 1 << 18
_IDS_AT_ONCE = 500  # SQLite allows 999 parameters in versions before 3.32
_ABSENT = -(1 << 63) + 1  # no time, id or size has this value
_DAMAGE = (sqlite3.Error, ValueError, TypeError, OverflowError)
_MARKS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "StringIds",
    "TARGET_INFO_SESSION_START_TIME",
)
"""Tables that tell an export of Nsight Systems from any other database."""


@contextmanager
def opened(path: str, name: str) -> Iterator[Database]:
    """A database, read only and without locks: another program may have it open.

    Args:
        path: of the plain file.
        name: the input as the user named it.

    Raises:
        DamagedInput: the database cannot be read.
        UnknownFormat: it is none of Nsight Systems.
    """
    # immutable: no lock, no journal and no -shm file, so that read-only folders work as well.
    address = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as connection:
            connection.text_factory = lambda data: data.decode("utf-8", "replace")
            yield Database(name, connection, _schema(connection, name))
    except sqlite3.Error as error:
        raise DamagedInput(name, f"the database cannot be read ({error})") from error


def _schema(connection: sqlite3.Connection, name: str) -> dict[str, frozenset[str]]:
    tables = [row[0] for row in connection.execute("select name from sqlite_master")]
    if not any(mark in tables for mark in _MARKS):
        raise UnknownFormat(name, "is a database, but no export of Nsight Systems")
    return {
        table: frozenset(row[1] for row in connection.execute(f"pragma table_info({table})"))
        for table in sorted(READABLE.intersection(tables))
    }


@dataclass
class Database:
    """One database. Tables outside `READABLE` are not even listed."""

    name: str
    _connection: sqlite3.Connection
    _columns: dict[str, frozenset[str]] = field(default_factory=dict)

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table; none where there is no such table."""
        return self._columns.get(table, frozenset())

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of a table: integers as Int64, texts as Categorical; absent ones are null.

        Raises:
            DamagedInput: the table cannot be read.
        """
        schema = {**dict.fromkeys(integers, pl.Int64()), **dict.fromkeys(texts, pl.Categorical())}
        there = self.columns(table)
        known = [column for column in integers if column in there]
        if not there:
            return pl.DataFrame(schema=schema)
        with self._reading(table):
            frame = self._integers(table, known)
            for text in (text for text in texts if text in there):
                frame = frame.with_columns(self._text(table, text))
        return frame.select(
            pl.col(c) if c in frame.columns else pl.lit(None, dtype).alias(c)
            for c, dtype in schema.items()
        )

    def payloads(self) -> pl.DataFrame:
        """Payloads of NVTX events; see `Store.payloads`."""
        there = self.columns("NVTX_EVENTS")
        sources = {"binaryData": "cast({} as blob)", "jsonText": "cast({} as text)"}
        chosen = [sql.format(c) if c in there else "null" for c, sql in sources.items()]
        rows: list[tuple[Any, ...]] = []
        with self._reading("NVTX_EVENTS"):
            if there & sources.keys():
                rows = self._connection.execute(
                    f"select * from (select row_number() over (order by rowid) - 1, {chosen[0]} as b, {chosen[1]} as j"  # noqa: S608 - columns of our own
                    " from NVTX_EVENTS) where b is not null or j is not null"
                ).fetchall()
            return pl.DataFrame(rows, schema=PAYLOADS, orient="row")

    def strings(self, ids: pl.Series) -> pl.DataFrame:
        """Texts of StringIds, those asked for only: columns id (Int64) and value (Categorical).

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

    def _integers(self, table: str, columns: Sequence[str]) -> pl.DataFrame:
        if not columns:
            (rows,) = self._connection.execute(f"select count(*) from {table}").fetchone()  # noqa: S608 - one of READABLE
            return pl.DataFrame({"": pl.repeat(0, rows, dtype=pl.Int8, eager=True)})
        chosen = ", ".join(f'ifnull("{column}", {_ABSENT})' for column in columns)
        cursor = self._connection.execute(f"select {chosen} from {table}")  # noqa: S608 - one of READABLE
        dtype = np.dtype([(column, np.int64) for column in columns])
        parts = []
        while len(part := np.fromiter(itertools.islice(cursor, _CHUNK_ROWS), dtype)):
            parts.append(pl.DataFrame({c: np.ascontiguousarray(part[c]) for c in columns}))
        if not parts:
            return pl.DataFrame(schema=dict.fromkeys(columns, pl.Int64))
        return pl.concat(parts).with_columns(
            pl.when(pl.col(c) != _ABSENT).then(pl.col(c)) for c in columns
        )

    def _text(self, table: str, column: str) -> pl.Series:
        cursor = self._connection.execute(f'select cast("{column}" as text) from {table}')  # noqa: S608 - one of READABLE
        parts = [pl.Series(column, [], pl.Categorical())]
        while chunk := list(itertools.islice(cursor, _CHUNK_ROWS)):
            values = list(itertools.chain.from_iterable(chunk))
            parts.append(pl.Series(column, values, pl.String).cast(pl.Categorical()))
        return pl.concat(parts)

    @contextmanager
    def _reading(self, table: str) -> Iterator[Any]:
        try:
            yield
        except (*_DAMAGE, pl.exceptions.PolarsError) as error:
            raise DamagedInput(
                self.name, f"the table {table} cannot be read ({error}); export the report again"
            ) from error
