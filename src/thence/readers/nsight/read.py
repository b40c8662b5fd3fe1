"""An export of Nsight Systems as the tables of a trace."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput
from thence.model.launches import IDENTIFIED, matched_rows
from thence.model.tables import GPU, HOST, THREADS, Meta, Tables
from thence.readers.nsight import processes
from thence.readers.nsight.activities import activities
from thence.readers.nsight.nccl import described
from thence.readers.nsight.nodes import creation_rows
from thence.readers.nsight.nvtx import XLA, nvtx
from thence.readers.nsight.order import gathered, numbered
from thence.readers.nsight.ranges import host_ranges
from thence.readers.nsight.store import process_of
from thence.readers.nsight.xla import with_compilation, with_programs
from thence.readers.sorting import in_order

if TYPE_CHECKING:
    from thence.model.tables import Table
    from thence.readers.nsight.store import Store

__all__ = ["NAME", "tables_of"]

NAME = "Nsight Systems export"


def tables_of(store: Store) -> Tables:
    """The tables of one export.

    Raises:
        DamagedInput: a table cannot be read, or there is nothing in any.
    """
    gpu, warnings = activities(store)
    told = nvtx(store)
    ranges = told.ranges
    if (ranges["domain"] == XLA).any():
        ranges = with_compilation(ranges, store.name)
    payloads = described(store)
    named = processes.threads(store, told.threads)
    used = sorted(gpu["process"].unique())
    found = processes.ranks(used, named, payloads.ranks(ranges), store.name)
    gpu = _in_order(gpu.with_columns(found.column(gpu["process"])))
    host, threads, more = host_ranges(store, ranges, found)
    warnings += [*told.warnings, *more]
    if gpu.is_empty() and host.is_empty():
        raise DamagedInput(
            store.name,
            "holds neither device activities nor host ranges; nsys profile --trace=cuda,nvtx records them",
        )
    tables = Tables(
        gpu=_shaped(GPU, gpu),
        host=_shaped(HOST, host),
        collectives=payloads.collectives(_of_nvtx(host, ranges)),
        threads=THREADS.frame(
            threads.join(named, on=["process", "thread"], maintain_order="left").to_dict()
        ),
    )
    if (ranges["domain"] == XLA).any():
        created = creation_rows(store, gpu, host)
        domain = ranges["domain"].gather(host["nvtx"])
        launches = matched_rows(tables.gpu, tables.host, "correlation", IDENTIFIED)
        tables, more = with_programs(tables, domain, launches, created)
        warnings += more
    meta = Meta(
        inputs=(store.name,),
        formats=(NAME,),
        epoch_ns=_epoch(store),
        facts=({"producer": "Nsight Systems", "processes": _process_names(store, used)},),
        devices=processes.devices(store, tables.gpu),
        warnings=tuple(f"{store.name}: {t}" for t in (*warnings, *found.warnings)),
    )
    return dataclasses.replace(tables, meta=meta)


def _in_order(gpu: pl.DataFrame) -> pl.DataFrame:
    """Activities by rank, device, start and stream."""
    track = numbered(*gpu.select(pl.col("rank", "device").cast(pl.Int64)))
    stream = gpu["stream"].to_numpy()
    order = in_order(track, gpu["start"].to_numpy(), lambda rows: [stream[rows]])
    columns = dict(zip(gpu.columns, gpu.get_columns(), strict=True))
    gpu = gpu.clear()
    gathered(columns, order)
    return pl.DataFrame(columns)


def _shaped(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame's columns that the table has; the others are null, and take no room until used."""
    return frame.select(
        pl.col(c).cast(dtype) if c in frame.columns else pl.lit(None, dtype).alias(c)
        for c, dtype in table.schema.items()
    )


def _of_nvtx(host: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
    """Host rows of NVTX ranges: host (row), name, domain and row (in NVTX_EVENTS)."""
    rows = host.select("nvtx").with_row_index("host").drop_nulls()
    return ranges.select("name", "domain", "row")[rows["nvtx"]].with_columns(rows["host"])


def _epoch(store: Store) -> int | None:
    epoch = store.frame("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"]
    return next((int(value) for value in epoch if value is not None and value > 0), None)


def _process_names(store: Store, used: list[int]) -> dict[int, str]:
    """Names of the programs, not their command lines, of the processes that used a device."""
    frame = store.frame("PROCESSES", ("globalPid",), ("name",)).select(
        process_of(pl.col("globalPid")), pl.col("name").cast(pl.String)
    )
    return {process: name for process, name in frame.drop_nulls().rows() if process in used}
