"""The history of PyTorch's memory in a recording, with the threads that its allocations were made for.

The allocator's history has no threads and no stacks, and its streams are addresses, which CUPTI does not know. An
operator allocates its results and then launches what writes them. So an allocation belongs to the thread of the next
launch on its device, if that follows soon, and has the place of this launch: places are noted at launches, so that
before it the thread still has the place of the one before. Where threads launch at the same time, it may be that of
another one.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import InputError
from thence.model.formats import MEMORY_FILE
from thence.readers.source import Source

if TYPE_CHECKING:
    from thence.model.tables import Tables
    from thence.readers.recording.folder import Folder
    from thence.units import Ns

_SAMPLE = {"start": pl.Int64(), "used": pl.Int64()}
_SOON_NS = 1_000_000
"""Between an allocation and the launch that it was made for: a few us in programs that were recorded."""


def with_memory(tables: Tables, folder: Folder, zero_ns: Ns, rank: int) -> Tables:
    """The tables of a recording, with the memory in its folder, if there is one.

    Args:
        tables: of one process.
        folder: of the process.
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    path = folder.path / MEMORY_FILE
    if not path.is_file():
        return tables
    from thence.readers.memory_snapshot.read import read  # most recordings have none

    try:
        with Source.open(str(path), folder.expansion) as source:
            found = read(source, lambda _done: None)
    except InputError as error:
        return tables.with_warnings([f"{error}; the memory of PyTorch is missing"])
    shift = (found.meta.epoch_ns or zero_ns) - zero_ns
    time = [pl.col("start") + shift]
    of_rank = pl.lit(rank, pl.Int32()).alias("rank")
    memory = found.memory.with_columns(of_rank, *time, pl.col("end") + shift)
    failures = found.memory_failures.with_columns(of_rank, *time)
    tables = dataclasses.replace(
        tables,
        memory=with_threads(memory, tables),
        memory_totals=with_outside(found.memory_totals.with_columns(of_rank, *time), folder, zero_ns),
        memory_failures=failures,
    )
    notes = (*tables.meta.notes, *found.meta.notes)
    losses = (*tables.meta.losses, *found.meta.losses)
    tables = dataclasses.replace(tables, meta=dataclasses.replace(tables.meta, notes=notes, losses=losses))
    return tables.with_warnings(found.meta.warnings)


def with_outside(totals: pl.DataFrame, folder: Folder, zero_ns: Ns) -> pl.DataFrame:
    """Rows of `thence.model.tables.MEMORY_TOTALS` with what the process held of each device beside reserved.

    Args:
        totals: of one process, sorted by device and time.
        folder: of the process, whose description has samples of what the driver counted as the process's.
        zero_ns: Unix time at which the trace's clock reads 0.
    """
    samples = [
        pl.DataFrame({"start": taken.times_ns[:known], "used": taken.bytes[:known]}, schema=_SAMPLE).select(
            pl.lit(taken.device, pl.Int32()).alias("device"), pl.col("start") - zero_ns, "used"
        )
        for taken in folder.description.process_memory
        if (known := min(len(taken.times_ns), len(taken.bytes)))
    ]
    if not samples:
        return totals
    near = {"on": "start", "by": "device", "check_sortedness": False}  # Polars cannot see the order in groups
    held = pl.concat(samples).sort("start")
    readings = totals.select("device", "start", "reserved").drop_nulls().sort("start", maintain_order=True)
    held = held.join_asof(readings, strategy="backward", **near)
    # A segment that was handed out between the two figures would make it negative.
    beside = held.select("device", "start", outside=pl.col("used") - pl.col("reserved")).filter(pl.col("outside") >= 0)
    rows = totals.select("device", "start").with_row_index("row").drop_nulls().sort("start")
    found = rows.join_asof(beside, strategy="nearest", **near)
    return totals.drop("outside").with_row_index("row").join(
        found.select("row", "outside"), on="row", how="left", maintain_order="left"
    ).drop("row").select(totals.columns)


def with_threads(memory: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Allocations of one process, with process, thread and time of the next launch on their device.

    Args:
        memory: rows of `thence.model.tables.MEMORY`, without threads.
        tables: of the process, with its activities and calls.
    """
    called = tables.host.filter(pl.col("correlation").is_not_null()).select(
        "correlation", "process", "thread", launched="start"
    )
    launches = (
        tables.gpu.select("device", "correlation")
        .drop_nulls()
        .join(called.unique("correlation", keep="first"), on="correlation")
        .select("device", "process", "thread", "launched")
        .sort("launched")
    )
    asked = memory.select("device", "start").with_row_index("row").drop_nulls().sort("start")
    found = asked.join_asof(
        launches,
        left_on="start",
        right_on="launched",
        by="device",
        strategy="forward",
        tolerance=_SOON_NS,
        check_sortedness=False,  # both are sorted above; Polars cannot see it in groups
    ).sort("row")
    rows = found["row"].to_numpy()
    columns = {}
    for name, of_launch in (("process", "process"), ("thread", "thread"), ("launch", "launched")):
        values, known = np.zeros(memory.height, np.int64), np.zeros(memory.height, np.bool_)
        values[rows] = found[of_launch].fill_null(0).to_numpy()
        known[rows] = found[of_launch].is_not_null().to_numpy()
        columns[name] = pl.Series(values).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Int64))
    return memory.with_columns(**columns)
