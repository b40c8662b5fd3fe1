"""The history of PyTorch's memory in a recording, with the threads that its allocations were made for.

Places are noted at launches, so an allocation has the place of the launch that it was made for
(`thence.readers.allocations.with_threads`): before it the thread still has the place of the one before.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import InputError
from thence.model.formats import MEMORY_FILE
from thence.readers.memory_snapshot.joining import joined
from thence.readers.recording.cuda_allocations import cuda_allocations, outside_of_segments
from thence.readers.source import Source

if TYPE_CHECKING:
    from thence.model.tables import Tables
    from thence.readers.recording.folder import Folder
    from thence.units import Ns

_UNSEEN = "what libraries asked of CUDA, or returned to it, in steps that were not recorded is not known"
_SAMPLE = {"start": pl.Int64(), "used": pl.Int64()}


def with_memory(tables: Tables, folder: Folder, names: pl.DataFrame, zero_ns: Ns, rank: int) -> Tables:
    """The tables of a recording, with the memory in its folder, if there is one.

    Args:
        names: number and text (Categorical).
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    asked, totals = cuda_allocations(folder, names, zero_ns, rank)
    path = folder.path / MEMORY_FILE
    if path.is_file():
        from thence.readers.memory_snapshot.read import read_with_segments  # most recordings have none

        try:
            with Source.open(str(path), folder.expansion) as source:
                snapshot, segments = read_with_segments(source, lambda _done: None)
        except InputError as error:
            return tables.with_warnings([f"{error}; the memory of PyTorch is missing"])
        tables = joined(tables, snapshot, zero_ns, rank)
        others = pl.concat([tables.memory, outside_of_segments(asked, segments)])
        memory = others.sort("device", "opened", nulls_last=False, maintain_order=True)
        tables = dataclasses.replace(tables, memory=memory)
    elif asked.height:
        tables = dataclasses.replace(tables, memory=asked, memory_totals=totals)
    if asked.height and not tables.step_times["recorded"].all():
        notes = (*tables.meta.notes, f"{folder.path.name}: {_UNSEEN}")
        tables = dataclasses.replace(tables, meta=dataclasses.replace(tables.meta, notes=notes))
    return dataclasses.replace(tables, memory_totals=with_outside(tables.memory_totals, folder, zero_ns))


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
    held = pl.concat(samples).sort("start")
    readings = totals.select("device", "start", "reserved").drop_nulls().sort("start", maintain_order=True)
    # What is joined is sorted; Polars cannot see it in groups.
    held = held.join_asof(readings, on="start", by="device", strategy="backward", check_sortedness=False)
    # A segment that was handed out between the two figures would make it negative.
    beside = held.select("device", "start", outside=pl.col("used") - pl.col("reserved")).filter(pl.col("outside") >= 0)
    rows = totals.select("device", "start").with_row_index("row").drop_nulls().sort("start")
    joined = rows.join_asof(beside, on="start", by="device", strategy="nearest", check_sortedness=False)
    return (
        totals.drop("outside")
        .with_row_index("row")
        .join(joined.select("row", "outside"), on="row", how="left", maintain_order="left")
        .drop("row")
        .select(totals.columns)
    )
