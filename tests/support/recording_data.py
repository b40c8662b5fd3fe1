"""Recordings made by hand, row by row, and real ones that are kept packed."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING, Any

import polars as pl

import thence
from helpers import DATA
from thence.model.column_file import encode
from thence.readers.recording.folder import SCHEMAS

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_000_000
KERNEL = dict.fromkeys(SCHEMAS["kernels"], 1) | {"queued": 0}


def written(folder: Path, tables: dict[str, list[list[dict[str, Any]]]], version: int = 4, **about: Any) -> Path:
    """A recording made by hand: for each table its parts, as lists of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    counted = {
        "counts": {table: sum(map(len, parts)) for table, parts in tables.items()},
        "parts": {table: len(parts) for table, parts in tables.items()},
    }
    description = {
        "format": "thence.recording", "version": version, "rank": 3, "pid": 77, "began_ns": BEGAN,
        "stopped_ns": BEGAN + 10_000, "finished": True, **(counted if version > 2 else {}), **about,
    }  # fmt: skip
    (folder / "recording.json").write_text(json.dumps(description))
    for table, parts in tables.items():
        for number, rows in enumerate(parts, 1):
            frame = pl.DataFrame(rows, schema=SCHEMAS[table])
            if version > 2:
                write_part(folder, table, number, frame)
            else:
                frame.write_ipc(folder / f"{table}-{number:06}.arrow", compression="lz4")
    return folder


def write_part(folder: Path, table: str, number: int, frame: pl.DataFrame) -> Path:
    """One part with these rows; a null, which no recorder writes, becomes -1, or not a number."""
    columns = {name: _stored(frame[name]) for name in frame.columns}
    path = folder / f"{table}-{number:06}.npz"
    path.write_bytes(encode(columns))
    return path


def _stored(column: pl.Series) -> Any:
    if column.dtype == pl.String:
        return column.to_list()
    if column.dtype.is_float():
        return column.fill_null(float("nan")).to_numpy()
    return column.cast(pl.Int64, wrap_numerical=True).fill_null(-1).to_numpy()


def kernel(**fields: Any) -> dict[str, Any]:
    """One row of the table kernels."""
    return {**KERNEL, "start": BEGAN + 10, "end": BEGAN + 30, "graph": 0, "node": 0, **fields}


def recorded_job(name: str, folder: Path) -> thence.Trace:
    """A packed recording of tests/data/recording, unpacked in a folder and opened."""
    with tarfile.open(DATA / "recording" / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return thence.open(folder / name)
