"""A trace's tables as Parquet files, one a table, for pandas, DuckDB, Spark and others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl

    from thence.analysis.timeline import Timeline

__all__ = ["FILES", "write_parquet"]

_TABLES = ("gpu", "host", "places", "collectives", "threads", "programs", "counters")
_META = "meta.json"
FILES = (*(f"{table}.parquet" for table in _TABLES), _META)
"""Names of what is written."""


def write_parquet(timeline: Timeline, folder: Path) -> None:
    """Writes gpu, host, places, collectives, threads, programs and counters, and meta.json beside them.

    Args:
        timeline: to be written.
        folder: exists already.
    """
    tables = timeline.tables
    of_timeline = ("places", "collectives", "counters")
    for name in _TABLES:
        frame: pl.DataFrame = getattr(timeline if name in of_timeline else tables, name)
        frame.write_parquet(folder / f"{name}.parquet")
    facts = dataclasses.asdict(tables.meta)
    facts |= {"clock_corrections_ns": {str(r): ns for r, ns in timeline.corrections.items()}}
    facts |= {"clocks": list(timeline.notes)}
    (folder / _META).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
