"""What the tests of the Nsight Systems reader share: recordings, nsys's own reports, small databases."""

from __future__ import annotations

import gzip
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import polars as pl

from helpers import DATA

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

NSIGHT = DATA / "nsight"
HLO = NSIGHT / "hlo_dump"


def export(name: str) -> Path:
    return NSIGHT / f"{name}.sqlite.gz"


def report(name: str) -> Path:
    return NSIGHT / f"{name}.csv.gz"


def report_frame(name: str) -> pl.DataFrame:
    return pl.read_csv(gzip.decompress(report(name).read_bytes()), infer_schema_length=None)


def unpacked(name: str, folder: Path) -> Path:
    path = folder / f"{name}.sqlite"
    path.write_bytes(gzip.decompress(export(name).read_bytes()))
    return path


def changed(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def written(path: Path, tables: Mapping[str, Sequence[Mapping[str, object]]]) -> Path:
    """A database with these rows; columns are those of the first row of each table."""
    with closing(sqlite3.connect(path)) as connection:
        for table, rows in tables.items():
            columns = list(rows[0])
            connection.execute(f"create table {table} ({', '.join(columns)})")
            marks = ", ".join("?" * len(columns))
            connection.executemany(f"insert into {table} values ({marks})", [[row[c] for c in columns] for row in rows])
        connection.commit()
    return path


def thread(process: int, number: int) -> int:
    """A serialised GlobalId, as the user guide lays it out."""
    return (1 << 48) | process << 24 | number
