"""Checks that every reader's tables, and those of a store, hold possible values, whatever the input held."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.losses import Loss
from thence.model.shortened_names import affordable
from thence.model.tables import (
    COUNTERS,
    EVENTS,
    GPU,
    GRAPH_PLACES,
    HOST,
    MEMORY,
    MEMORY_FAILURES,
    MEMORY_TOTALS,
    PROGRAMS,
    STEP_TIMES,
    STEPS,
    THREADS,
    WAITS,
)
from thence.units import LATEST_NS, LONGEST_NS, several

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.tables import Tables

_Tables = TypeVar("_Tables", bound="Tables")
_TABLES = (
    *(GPU, HOST, PROGRAMS, THREADS, EVENTS, WAITS, STEPS, STEP_TIMES, GRAPH_PLACES),
    *(MEMORY, MEMORY_TOTALS, MEMORY_FAILURES, COUNTERS),
)
_MAX_TOTAL_NS = 1 << 62
_MAX_COUNT = 1e18
"""Of one sample; a second of all tensor cores of a GPU has 10^12 cycles."""
_MIN_COUNT = 1e-9
"""Less is nothing: sums, ratios and squares of counts stay finite."""
MAX_TEXT, MAX_TEXT_PER_ROW = 16_000_000, 1000
"""Characters of a column of names, written out for all rows: of any table, and more for each row. The longest real
names of kernels, those of CUTLASS, have some thousands."""


def plausible(tables: _Tables, name: str) -> _Tables:
    """The tables, with impossible durations set to 0, a warning, and a loss for device activities among them.

    A zero of the clock at an impossible time is unknown, with a warning.

    Args:
        name: the input as the user named it.

    Raises:
        DamagedInput: a row has a null in a column that is never null, or a time that no clock shows, or the
            durations of device activities add up to more than a century.
    """
    gpu = tables.gpu
    for table in _TABLES:
        if lacking := table.lacking(getattr(tables, table.name)):
            raise DamagedInput(name, f"has rows of the table {table.name} without {', '.join(lacking)}")
    for frame, column, what in (
        (gpu, "start", "device activity"),
        (tables.host, "start", "host range"),
        (tables.programs, "start", "program execution"),
        (tables.programs, "launch", "program launch"),
        (tables.memory_totals, "start", "change of memory"),
        (tables.counters, "start", "sample of counters"),
        (tables.counters, "end", "sample of counters"),
    ):
        if frame.height and not _between(frame[column], -LATEST_NS, LATEST_NS):
            late = frame.filter(~pl.col(column).is_between(-LATEST_NS, LATEST_NS)).height
            raise DamagedInput(name, f"has {several(late, what)} with an impossible time")
    if tables.counters.height:
        tables = dataclasses.replace(tables, counters=_with_possible_counts(tables.counters))
    epoch = tables.meta.epoch_ns
    if epoch is not None and abs(epoch) > LATEST_NS:
        text = f"{name}: states an impossible time at which its clock reads 0, so that time is unknown"
        meta = dataclasses.replace(tables.meta, epoch_ns=None, warnings=(*tables.meta.warnings, text))
        tables = dataclasses.replace(tables, meta=meta)
    gpu, repaired = _with_possible_durations(gpu)
    host, on_host = _with_possible_durations(tables.host)
    if float(gpu["duration"].cast(pl.Float64).sum()) > _MAX_TOTAL_NS:
        raise DamagedInput(name, "has durations that add up to more than a century")
    if not repaired + on_host:
        return tables
    text = (
        f"{name}: {several(repaired, 'device activity')} and {several(on_host, 'host range')} with a negative "
        f"duration, or one longer than {LONGEST_NS // (86_400 * 10**9)} days; counted as 0"
    )
    losses = (*tables.meta.losses, *([Loss("repaired", name, repaired, text)] if repaired else []))
    meta = dataclasses.replace(tables.meta, warnings=(*tables.meta.warnings, text), losses=losses)
    return dataclasses.replace(tables, gpu=gpu, host=host, meta=meta)


def _with_possible_counts(counters: pl.DataFrame) -> pl.DataFrame:
    """The samples that last and do not take too long, without counts that no counter shows."""
    lasting = pl.col("end") - pl.col("start")
    counts = pl.selectors.float()
    possible = counts.is_finite() & counts.is_between(0, _MAX_COUNT)
    lasts = counters.filter(lasting.is_between(1, LONGEST_NS))
    return lasts.with_columns(pl.when(possible & (counts >= _MIN_COUNT)).then(counts).when(possible).then(0.0))


def with_affordable_names(parts: Mapping[str, _Tables]) -> dict[str, _Tables]:
    """The tables of inputs, with shorter names and a warning where these would take far too much memory.

    Analyses write out names of many rows. The limit is one for each input, but all inputs are asked for the lengths of
    their names at once: a query for each of thousands of small files takes longer than to decode them.

    Args:
        parts: by the name of the input as the user named it.
    """
    shorter: dict[str, dict[str, Any]] = {}
    for table in (GPU, HOST):
        frames = {name: frame for name, part in parts.items() if (frame := getattr(part, table.name)).height}
        for column in (name for name, dtype in table.schema.items() if dtype == pl.Categorical):
            for name in _with_too_long(column, frames):
                frame = shorter.get(name, {}).get(table.name, frames[name])
                if (short := _shortened(frame, column)) is not frame:
                    shorter.setdefault(name, {})[table.name] = short
    return {name: _with_shorter(part, name, shorter[name]) if name in shorter else part for name, part in parts.items()}


def _with_shorter(tables: _Tables, name: str, shorter: Mapping[str, Any]) -> _Tables:
    """The tables of an input with other ones for those whose names are shorter, and a warning."""
    text = f"{name}: its longest names are shortened, because rows refer to them too often"
    meta = dataclasses.replace(tables.meta, warnings=(*tables.meta.warnings, text))
    return dataclasses.replace(tables, meta=meta, **shorter)


def _with_too_long(column: str, frames: Mapping[str, pl.DataFrame]) -> list[str]:
    """Which inputs have more characters in a column of names, written out for all rows, than they may have."""
    columns = {name: names for name, frame in frames.items() if (names := frame[column]).null_count() < len(names)}
    if not columns:
        return []
    heights = np.array([len(names) for names in columns.values()])
    together = pl.concat(columns.values()).to_frame()
    characters = together.select(pl.all().cat.len_chars().fill_null(0)).to_series().to_numpy()
    written = np.add.reduceat(characters, np.cumsum(heights) - heights, dtype=np.int64)
    too_many = written > MAX_TEXT + MAX_TEXT_PER_ROW * heights
    return list(itertools.compress(columns, too_many.tolist()))


def _shortened(table: pl.DataFrame, name: str) -> pl.DataFrame:
    """The table with shorter names in a column; the table itself if they cannot be shortened."""
    column = table[name]
    uses = column.value_counts()
    names = uses[name].cast(pl.String)
    count = uses["count"].to_numpy().astype(np.int64)
    short = affordable(names, count, MAX_TEXT, MAX_TEXT_PER_ROW)
    if short is names:
        return table
    numbers = uses.select(name).with_row_index("number")
    of_row = column.to_frame().join(numbers, on=name, how="left", maintain_order="left", nulls_equal=True)["number"]
    return table.with_columns(short.cast(pl.Categorical()).gather(of_row).alias(name))


def _between(column: pl.Series, low: int, high: int) -> bool:
    """Whether all values of a column that are not null are from ``low`` to ``high``."""
    least, most = column.min(), column.max()
    return least is None or bool(low <= least and most <= high)  # type: ignore[operator]


def _with_possible_durations(frame: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    if _between(frame["duration"], 0, LONGEST_NS):
        return frame, 0
    possible = pl.col("duration").is_between(0, LONGEST_NS)
    count = frame.filter(~possible).height
    kept = pl.when(possible).then("duration").otherwise(pl.lit(0, pl.Int64))
    return frame.with_columns(kept.alias("duration")), count
