"""Writes the tables of a trace as Parquet files, one file per table, for pandas, DuckDB, Spark and others."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from thence.parquet_files import write_table

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.timeline import Timeline

_TABLES = (
    *("gpu", "host", "places", "collectives", "threads", "programs"),
    *("events", "waits", "steps", "step_times", "counters", "stalls"),
    *("memory", "memory_totals", "memory_failures"),
)
_INSIDE = "inside.parquet"
_META = "meta.json"
FILES = (*(f"{table}.parquet" for table in _TABLES), _INSIDE, _META)
"""Names of the files; ``inside.parquet`` is written only if there are in-kernel ranges."""


def write_parquet(timeline: Timeline, folder: Path) -> None:
    """Writes every table of `_TABLES`, the counters among them, and meta.json.

    In-kernel ranges, if there are any, are in inside.parquet.
    """
    trace = timeline.trace
    for name in _TABLES:
        frame: pl.DataFrame = timeline.counters if name == "counters" else getattr(trace, name)
        write_table(frame, folder / f"{name}.parquet", "zstd")
    if timeline.inside:
        launches = [
            phases.ranges.select(
                pl.lit(number, pl.Int32).alias("launch"),
                pl.lit(phases.title).alias("kernel"),
                pl.lit(phases.rank, pl.Int32).alias("rank"),
                pl.lit(phases.device, pl.Int32).alias("device"),
                pl.all().exclude("name"),
                pl.col("name").cast(pl.String),
            )
            for number, phases in enumerate(timeline.inside)
        ]
        write_table(pl.concat(launches), folder / _INSIDE, "zstd")
    facts = dataclasses.asdict(trace.meta)
    facts |= {"clock_corrections_ns": {str(r): ns for r, ns in timeline.corrections.items()}}
    facts |= {"clocks": list(timeline.notes)}
    (folder / _META).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
