"""An export of Nsight Systems as the tables of a trace."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.intervals import NO_ROW, enclosing
from thence.model.tables import GPU, HOST, HOST_CATEGORIES, THREADS, Meta, Tables
from thence.readers.nsight import processes
from thence.readers.nsight.activities import activities
from thence.readers.nsight.nccl import described
from thence.readers.nsight.nodes import creation_rows
from thence.readers.nsight.nvtx import XLA, nvtx
from thence.readers.nsight.store import process_of, thread_of
from thence.readers.nsight.times import lasting

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.readers.nsight.nvtx import Nvtx
    from thence.readers.nsight.store import Store

__all__ = ["NAME", "tables_of"]

NAME = "Nsight Systems export"

_DRIVER = 1  # ENUM_NSYS_EVENT_CLASS: 0 is the CUDA runtime, 1 the driver
_CALL_VERSION = r"^(cuda\w+?)_v\d{4,5}$"  # cudaLaunchKernel_v7000: the version of the call's shape
_RANGE = {
    "process": pl.Int64(), "thread": pl.Int64(), "category": pl.String(), "name": pl.Categorical(),
    "start": pl.Int64(), "duration": pl.Int64(), "correlation": pl.Int64(),
    "domain": pl.Categorical(), "row": pl.Int64(),
}  # fmt: skip


def tables_of(store: Store) -> Tables:
    """The tables of one export.

    Raises:
        DamagedInput: a table cannot be read, or there is nothing in any.
    """
    gpu, warnings = activities(store)
    ranges = nvtx(store)
    host, more = _host(store, ranges, gpu["process"].unique())
    warnings += [*ranges.warnings, *more]
    if gpu.is_empty() and host.is_empty():
        raise DamagedInput(
            store.name,
            "holds neither device activities nor host ranges; nsys profile --trace=cuda,nvtx records them",
        )
    payloads = described(store)
    named = processes.threads(store, ranges.threads)
    used = sorted(gpu["process"].unique())
    found = processes.ranks(used, named, payloads.ranks(ranges.ranges), store.name)
    gpu = gpu.with_columns(found.column(gpu["process"])).sort(
        "rank", "device", "start", "stream", maintain_order=True
    )
    host = _nested(host.with_columns(found.column(host["process"])))
    tables = Tables(
        gpu=GPU.frame({c: gpu[c] for c in gpu.columns if c in GPU.schema}),
        host=HOST.frame({c: host[c] for c in host.columns if c in HOST.schema}),
        collectives=payloads.collectives(host),
        threads=_threads(named, host),
    )
    if (host["domain"] == XLA).any():
        from thence.readers.nsight.xla import with_programs

        created = creation_rows(store, gpu, host)
        tables, more = with_programs(tables, host["domain"], _launches(tables), created)
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


def _host(store: Store, ranges: Nvtx, with_device: pl.Series) -> tuple[pl.DataFrame, list[str]]:
    """NVTX ranges, API calls and the profiler's own work, in the columns of `_RANGE`."""
    of_nvtx = ranges.ranges
    if (of_nvtx["domain"] == XLA).any():
        from thence.readers.nsight.xla import with_compilation

        of_nvtx = with_compilation(of_nvtx, store.name)
    calls, warnings = lasting(_calls(store), "API calls")
    # Of processes that used no device no call launched anything; their ids would only collide.
    launches = pl.col("process").is_in(with_device.implode())
    calls = calls.with_columns(correlation=pl.when(launches).then("correlation"))
    overhead, more = lasting(_overhead(store), "overhead ranges")
    parts = [
        part.select(
            pl.col(c).cast(dtype) if c in part.columns else pl.lit(None, dtype).alias(c)
            for c, dtype in _RANGE.items()
        )
        for part in (of_nvtx, calls, overhead)
    ]
    return pl.concat(parts), [*warnings, *more]


def _calls(store: Store) -> pl.DataFrame:
    columns = ("start", "end", "globalTid", "correlationId", "nameId", "eventClass")
    frame = store.frame("CUPTI_ACTIVITY_KIND_RUNTIME", columns)
    texts = store.strings(frame["nameId"]).with_columns(
        pl.col("value").cast(pl.String).str.replace(_CALL_VERSION, "$1").cast(pl.Categorical()),
        of_runtime=pl.col("value").cast(pl.String).str.starts_with("cuda"),
    )
    by_name = pl.col("eventClass").is_null() & ~pl.col("of_runtime").fill_null(value=True)
    is_driver = (pl.col("eventClass") == _DRIVER).fill_null(value=False) | by_name
    return frame.join(
        texts, left_on="nameId", right_on="id", how="left", maintain_order="left"
    ).select(
        *_place(),
        pl.col("correlationId").alias("correlation"),
        pl.when(is_driver).then(pl.lit("driver")).otherwise(pl.lit("runtime")).alias("category"),
    )


def _overhead(store: Store) -> pl.DataFrame:
    frame = store.frame("PROFILER_OVERHEAD", ("start", "end", "globalTid", "nameId"))
    texts = store.strings(frame["nameId"])
    return frame.join(
        texts, left_on="nameId", right_on="id", how="left", maintain_order="left"
    ).select(*_place(), pl.lit("overhead").alias("category"))


def _place() -> tuple[pl.Expr, ...]:
    thread = pl.col("globalTid")
    return (
        *(pl.col("start"), pl.col("end")),
        process_of(thread).fill_null(0).alias("process"),
        thread_of(thread).fill_null(0).alias("thread"),
        pl.col("value").fill_null(pl.lit("(unnamed)").cast(pl.Categorical())).alias("name"),
    )


def _nested(host: pl.DataFrame) -> pl.DataFrame:
    """The ranges in the order of `HOST`, with the range around each."""
    keys = ("rank", "process", "thread")
    tracks = host.select(keys).unique().sort(keys).with_row_index("track")
    track = host.select(keys).join(tracks, on=keys, how="left", maintain_order="left")["track"]
    category = pl.col("category").cast(pl.Enum(HOST_CATEGORIES))
    # One number for the thread orders faster than three.
    host = host.with_columns(category, track.cast(pl.Int64)).sort(
        "track", "start", pl.col("duration").clip(1), "category", maintain_order=True,
        descending=[False, False, True, False],
    )  # fmt: skip
    start, duration = host["start"].to_numpy(), host["duration"].to_numpy()
    parent = enclosing(host["track"].to_numpy(), start, start + duration)
    above = pl.Series("parent", parent.astype(np.int32))
    return host.drop("track").with_columns(above.set(above == NO_ROW, None))


def _launches(tables: Tables) -> npt.NDArray[np.int64]:
    """Host row of the API call that launched each activity: ids count within a process."""
    keys = ["rank", "correlation"]
    calls = tables.host.with_row_index("launch").select("launch", *keys).drop_nulls("correlation")
    calls = calls.join(tables.gpu.select(keys).unique(), on=keys, how="semi")
    found = tables.gpu.select(keys).join(
        calls.unique(keys, keep="none"), on=keys, how="left", maintain_order="left"
    )
    return found["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()


def _threads(named: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Names of the threads that have ranges."""
    keys = ["process", "thread"]
    used = host.select("rank", *keys).unique(maintain_order=True)
    return THREADS.frame(used.join(named, on=keys, maintain_order="left").to_dict())


def _epoch(store: Store) -> int | None:
    epoch = store.frame("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))["utcEpochNs"]
    return next((int(value) for value in epoch if value is not None and value > 0), None)


def _process_names(store: Store, used: list[int]) -> dict[int, str]:
    """Names of the programs, not their command lines, of the processes that used a device."""
    frame = store.frame("PROCESSES", ("globalPid",), ("name",)).select(
        process_of(pl.col("globalPid")), pl.col("name").cast(pl.String)
    )
    return {process: name for process, name in frame.drop_nulls().rows() if process in used}
