"""Recordings made by hand, row by row."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.readers.recording.parts import SCHEMAS

if TYPE_CHECKING:
    from pathlib import Path

BEGAN = 1_000_000
KERNEL = dict.fromkeys(SCHEMAS["kernels"], 1)


def written(folder: Path, tables: dict[str, list[list[dict[str, Any]]]], **about: Any) -> Path:
    """A recording made by hand: for each table its parts, as lists of rows."""
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "format": "thence.recording", "version": 1, "rank": 3, "pid": 77, "began_ns": BEGAN,
        "stopped_ns": BEGAN + 10_000, "finished": True, **about,
    }  # fmt: skip
    (folder / "recording.json").write_text(json.dumps(description))
    for table, parts in tables.items():
        for number, rows in enumerate(parts, 1):
            frame = pl.DataFrame(rows, schema=SCHEMAS[table])
            frame.write_ipc(folder / f"{table}-{number:06}.arrow", compression="lz4")
    return folder


def kernel(**fields: Any) -> dict[str, Any]:
    """One row of the table kernels."""
    return {**KERNEL, "start": BEGAN + 10, "end": BEGAN + 30, "graph": 0, "node": 0, **fields}
