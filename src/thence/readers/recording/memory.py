"""Memory in a recording: the history of PyTorch's allocator, and what was asked of CUDA itself.

Places are noted at launches, so an allocation has the place of the launch that it was made for
(`thence.readers.allocations.with_threads`): before it the thread still has the place of the one before.

Memory is asked of CUDA itself, too, by libraries such as NCCL, and by allocators; CUPTI records it. What PyTorch's
allocator asked for lies in its segments, which its own history names; it is left out, because the allocator's readings
hold it. Memory of hosts and managed memory is no device's. A record has no thread: it has that of the call to CUDA that
has its number, which callbacks note.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import InputError
from thence.model.formats import MEMORY_FILE
from thence.model.tables import CUDA_ALLOCATOR, MEMORY, MEMORY_TOTALS
from thence.readers.allocations import allocations
from thence.readers.memory_snapshot.joining import joined
from thence.readers.source import Source

if TYPE_CHECKING:
    from thence.model.tables import Tables
    from thence.readers.recording.folder import Folder
    from thence.units import Ns

_UNSEEN = "what libraries asked of CUDA, or returned to it, in steps that were not recorded is not known"
_SAMPLE = {"start": pl.Int64(), "used": pl.Int64()}
_ALLOCATES, _RETURNS = 1, 2
"""CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_ALLOCATION and _RELEASE"""
_OF_DEVICES = (3, 4, 6)
"""CUPTI_ACTIVITY_MEMORY_KIND_DEVICE, _ARRAY and _DEVICE_STATIC"""


def with_memory(tables: Tables, folder: Folder, names: pl.DataFrame, zero_ns: Ns, rank: int) -> Tables:
    """The tables of a recording, with the memory in its folder, if there is one.

    Args:
        names: number and text (Categorical).
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    asked, totals = _cuda_allocations(folder, names, zero_ns, rank)
    path = folder.path / MEMORY_FILE
    if path.is_file():
        from thence.readers.memory_snapshot.read import read_with_segments  # most recordings have none

        try:
            with Source.open(str(path), folder.expansion) as source:
                snapshot, segments = read_with_segments(source, lambda _done: None)
        except InputError as error:
            return tables.with_warnings([f"{error}; the memory of PyTorch is missing"])
        tables = joined(tables, snapshot, zero_ns, rank)
        others = pl.concat([tables.memory, _outside_of_segments(asked, segments)])
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


def _cuda_allocations(folder: Folder, names: pl.DataFrame, zero_ns: Ns, rank: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Rows of `thence.model.tables.MEMORY` and `MEMORY_TOTALS` of everything that was asked of CUDA.

    Args:
        names: number and text (Categorical).
        zero_ns: Unix time at which the trace's clock reads 0.
        rank: of the process.
    """
    asked = (pl.col("operation") == _ALLOCATES) & pl.col("memory").is_in(_OF_DEVICES) & (pl.col("bytes") > 0)
    changes = (
        folder.table("allocations").drop_nulls(["address", "device"]).filter(asked | (pl.col("operation") == _RETURNS))
    )
    if changes.is_empty():
        return MEMORY.empty(), MEMORY_TOTALS.empty()
    changes = _with_callers(_paired(changes.sort("time", maintain_order=True)), folder.table("calls"), names)
    held = pl.col("bytes").cum_sum().over("device")
    rows = changes.with_columns(rank=pl.lit(rank), process=pl.lit(folder.description.pid), allocated=held)
    events = {
        **{name: rows[name].to_numpy() for name in ("rank", "process", "device", "address", "bytes", "allocated")},
        "thread": rows["thread"].fill_null(-1).to_numpy(),
        "start": (rows["time"] - zero_ns).to_numpy(),
        "reserved": rows["allocated"].to_numpy(),
    }
    memory, totals = allocations(events, CUDA_ALLOCATOR)
    # `opened` is the row of an allocation among these; they are of one process, in order of device.
    library = rows.sort("device", maintain_order=True)["library"].gather(memory["opened"])
    return memory.with_columns(pl.when(pl.col("thread") >= 0).then("thread").alias("thread"), pool=library), totals


def _paired(changes: pl.DataFrame) -> pl.DataFrame:
    """The allocations, and those returns that follow one at their address, with negative bytes of that one."""
    allocates = pl.col("operation") == _ALLOCATES
    before = changes.with_columns(before=pl.when(allocates).then("bytes").shift(1).over("device", "address"))
    size = pl.when(allocates).then("bytes").otherwise(-pl.col("before"))
    return before.with_columns(bytes=size).drop_nulls("bytes")


def _with_callers(changes: pl.DataFrame, calls: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """The changes with the thread of the call that made each, and the file name of the library that called."""
    numbered = calls.select("correlation", "thread").drop_nulls().unique("correlation", keep="first")
    called = changes.join(numbered, on="correlation", how="left", maintain_order="left")
    path = called.select(pl.col("source").alias("number")).join(names, on="number", how="left", maintain_order="left")
    library = path["text"].cast(pl.String).str.extract(r"([^/]+)$").cast(pl.Categorical())
    return called.with_columns(library=library)


def _outside_of_segments(memory: pl.DataFrame, segments: pl.DataFrame) -> pl.DataFrame:
    """The allocations that an allocator did not make for its segments, without rows of readings.

    Args:
        memory: as `_cuda_allocations` returns it.
        segments: device, address and bytes of what the allocator itself ever asked for. If something else was given an
            address of it later, that is left out, too.
    """
    address = memory["address"].cast(pl.Int64).to_numpy()
    device = memory["device"].to_numpy()
    inside = np.zeros(memory.height, np.bool_)
    for number in segments["device"].unique().to_list():
        ranges = segments.filter(pl.col("device") == number).sort("address")
        begin = ranges["address"].to_numpy()
        end = np.maximum.accumulate((ranges["address"] + ranges["bytes"]).to_numpy())
        last = np.searchsorted(begin, address, side="right") - 1
        inside |= (device == number) & (last >= 0) & (address < end[last])
    none = pl.lit(None, pl.Int32())
    return memory.filter(pl.Series(~inside)).with_columns(opened=none, closed=none)
