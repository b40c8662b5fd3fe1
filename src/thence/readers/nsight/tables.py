"""The tables of a trace, from any store of an Nsight Systems export.

**Graph nodes.** nsys records the creation of CUDA graph nodes in CUDA_GRAPH_NODE_EVENTS. Instantiating a graph clones
its nodes; the record of a clone names its original node (``originalGraphNodeId``). The ranges that were open on the
same thread when the original node was created, such as the XLA thunk that recorded the command, show where the node
comes from.

**Waits.** CUPTI_ACTIVITY_KIND_SYNCHRONIZATION holds waits of hosts and streams, CUPTI_ACTIVITY_KIND_CUDA_EVENT the
records of events. A wait is for the record with the same process, eventId and eventSyncId; if the export lists
records but not this one, the event was never recorded. nsys 2025.3 writes cudaStreamSynchronize with the type of
cudaStreamWaitEvent and no event, so the type of a row is not read: the API call with the row's correlation id
determines the kind of the wait.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.columns import row_numbers
from thence.model.formats import NSIGHT_EXPORT
from thence.model.intervals import NO_ROW, innermost
from thence.model.launches import IDENTIFIED, matched_rows
from thence.model.losses import Loss, says_lost
from thence.model.tables import GPU, HOST, THREADS, Meta, Tables
from thence.model.waiting import CALL_FACTS, call_facts, with_waiting
from thence.readers.host_ranges import in_order
from thence.readers.nsight import processes
from thence.readers.nsight.activities import activities
from thence.readers.nsight.gpu_metrics import gpu_metrics
from thence.readers.nsight.ranges import XLA, described, host_ranges, nvtx
from thence.readers.nsight.store import gathered, numbered, process_of, thread_of
from thence.readers.nsight.xla import with_compilation, with_programs

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.tables import Table
    from thence.readers.nsight.processes import Ranks
    from thence.readers.nsight.store import Store

_DIAGNOSTICS = "DIAGNOSTIC_EVENT"
_WARNING, _ERROR = 2, 3  # ENUM_DIAGNOSTIC_SEVERITY_LEVEL
_MAX_DIAGNOSTICS = 20
_SYNCHRONIZATIONS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_RECORDS = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_SYNC_COLUMNS = ("globalPid", "correlationId", "deviceId", "streamId", "eventId", "eventSyncId")
_NO_NUMBER = (1 << 32) - 1
"""Value that the exporter writes if there is no stream, event or record."""
_MAX_CLONE_STEPS = 8  # from a clone to the first node; child graphs take two or three


def diagnosed(store: Store) -> tuple[Loss, ...]:
    """Losses for the recording's warnings and errors that report missing records; at most the 20 most frequent.

    Raises:
        DamagedInput: the table cannot be read.
    """
    events = store.frame(_DIAGNOSTICS, ("severity",), ("text",)).filter(
        pl.col("severity").is_in([_WARNING, _ERROR]), pl.col("text").is_not_null()
    )
    texts = events["text"].cast(pl.String)
    counted = texts.filter(texts.map_elements(says_lost, pl.Boolean)).value_counts(sort=True)
    return tuple(
        Loss("dropped", store.name, int(n), f"{store.name}: Nsight Systems reports: {text.strip()}")
        for text, n in counted.head(_MAX_DIAGNOSTICS).rows()
    )


def waiting_facts(store: Store, ranks: Ranks) -> pl.DataFrame:
    """The facts that an export records about API calls, as `thence.model.waiting.CALL_FACTS`.

    Raises:
        DamagedInput: a table cannot be read.
    """
    waits = _sync_rows(store, _SYNCHRONIZATIONS)
    records = _sync_rows(store, _RECORDS)
    lists_records = bool(store.columns(_RECORDS))
    made = records.drop_nulls(["event", "record"]).select(
        "process", "event", "record", recorded_by="correlation", recorded_on="stream"
    )
    made = made.unique(["process", "event", "record"], keep="none")
    keys = ["process", "event", "record"]
    waits = waits.join(made, on=keys, how="left", maintain_order="left").with_columns(
        never_recorded=pl.lit(lists_records) & pl.col("event").is_not_null() & pl.col("recorded_by").is_null()
    )
    both = pl.concat([waits, records], how="diagonal")
    return call_facts(both.with_columns(ranks.column(both["process"])).select(list(CALL_FACTS)).to_dict())


def _sync_rows(store: Store, table: str) -> pl.DataFrame:
    frame = store.frame(table, _SYNC_COLUMNS)

    def known(column: str) -> pl.Expr:
        return pl.when(pl.col(column).is_between(0, _NO_NUMBER - 1)).then(pl.col(column))

    return frame.select(
        process_of(pl.col("globalPid")).fill_null(0).alias("process"),
        known("correlationId").alias("correlation"),
        pl.when(pl.col("deviceId").is_between(0, (1 << 31) - 1)).then("deviceId").alias("device"),
        known("streamId").alias("stream"),
        known("eventId").alias("event"),
        known("eventSyncId").alias("record"),
    )


def tables_of(store: Store) -> Tables:
    """The tables of one export.

    Raises:
        DamagedInput: a table cannot be read, or the export holds no activities and no ranges.
    """
    gpu, warnings, losses = activities(store)
    lost = diagnosed(store)
    nvtx_data = nvtx(store)
    ranges = nvtx_data.ranges
    if (ranges["domain"] == XLA).any():
        ranges = with_compilation(ranges, store.name)
    payloads = described(store)
    thread_names = processes.threads(store, nvtx_data.threads)
    processes_with_gpu = sorted(gpu["process"].unique())
    rank_of_process = processes.ranks(processes_with_gpu, thread_names, payloads.ranks(ranges), store.name)
    gpu = _sorted_activities(gpu.with_columns(rank_of_process.column(gpu["process"])))
    counters, about_counters = gpu_metrics(store, gpu)
    host, threads, more_warnings = host_ranges(store, ranges, rank_of_process)
    warnings += [*nvtx_data.warnings, *more_warnings]
    if gpu.is_empty() and host.is_empty():
        raise DamagedInput(
            store.name,
            "holds neither device activities nor host ranges; record them with nsys profile --trace=cuda,nvtx",
        )
    tables = Tables(
        gpu=_conformed(GPU, gpu),
        host=_conformed(HOST, host),
        collectives=payloads.collectives(_nvtx_host_rows(host, ranges)),
        threads=THREADS.frame(threads.join(thread_names, on=["process", "thread"], maintain_order="left").to_dict()),
        counters=counters,
    )
    tables = with_waiting(tables, waiting_facts(store, rank_of_process))
    if (ranges["domain"] == XLA).any():
        created = _creation_rows(store, gpu, host)
        domain = ranges["domain"].gather(host["nvtx"])
        launches = matched_rows(tables.gpu, tables.host, "correlation", IDENTIFIED)
        tables, more_warnings = with_programs(tables, domain, launches, created)
        warnings += more_warnings
    meta = Meta(
        inputs=(store.name,),
        formats=(NSIGHT_EXPORT,),
        epoch_ns=_epoch(store),
        facts=(
            {"producer": "Nsight Systems", "processes": _process_names(store, processes_with_gpu), **about_counters},
        ),
        devices=processes.devices(store, tables.gpu),
        warnings=(
            *(f"{store.name}: {t}" for t in (*warnings, *rank_of_process.warnings)),
            *(loss.text for loss in lost),
        ),
        losses=(*losses, *lost),
    )
    return dataclasses.replace(tables, meta=meta)


def _sorted_activities(gpu: pl.DataFrame) -> pl.DataFrame:
    """The activities sorted by rank, device, start and stream."""
    track = numbered(*gpu.select(pl.col("rank", "device").cast(pl.Int64)))
    stream = gpu["stream"].to_numpy()
    order = in_order(track, gpu["start"].to_numpy(), lambda rows: [stream[rows]])
    columns = dict(zip(gpu.columns, gpu.get_columns(), strict=True))
    gpu = gpu.clear()
    gathered(columns, order)
    return pl.DataFrame(columns)


def _conformed(table: Table, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with exactly the columns of a table; absent columns are null, and take no memory until used."""
    return frame.select(
        pl.col(c).cast(dtype) if c in frame.columns else pl.lit(None, dtype).alias(c)
        for c, dtype in table.schema.items()
    )


def _nvtx_host_rows(host: pl.DataFrame, ranges: pl.DataFrame) -> pl.DataFrame:
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


def _creation_rows(store: Store, gpu: pl.DataFrame, host: pl.DataFrame) -> Int64:
    """Host row of the innermost range that was open when each activity's graph node was created.

    Args:
        gpu: process and node of the activities.
        host: ranges in the order of `HOST`: process, thread, start, duration and parent.

    Returns:
        int64 array, `NO_ROW` for activities outside graphs and for nodes whose creation is not recorded.

    Raises:
        DamagedInput: the table cannot be read.
    """
    columns = ("start", "globalTid", "graphNodeId", "originalGraphNodeId")
    frame = store.frame("CUDA_GRAPH_NODE_EVENTS", columns).select(
        "start",
        process_of(pl.col("globalTid")).alias("process"),
        thread_of(pl.col("globalTid")).alias("thread"),
        pl.col("graphNodeId").cast(pl.UInt64, strict=False).alias("node"),
        pl.col("originalGraphNodeId").cast(pl.UInt64, strict=False).alias("original"),
    )
    # A clone is recorded twice: without its original node when it is made, and again with its original node.
    events = frame.drop_nulls(["start", "node", "process"]).sort("original", nulls_last=True)
    events = _created_as_original(events.unique(["process", "node"], keep="first", maintain_order=True))
    events = events.with_columns(range=pl.Series(_innermost_ranges(events, host), dtype=pl.Int64))
    keys = ["process", "node"]
    range_of_node = gpu.select(keys).join(events.select(*keys, "range"), on=keys, how="left", maintain_order="left")
    return row_numbers(range_of_node["range"])


def _created_as_original(events: pl.DataFrame) -> pl.DataFrame:
    """Replaces the time and thread of a clone's creation by those of the first node in its chain of clones."""
    moments = events.select(
        "process", pl.col("node").alias("original"), pl.col("start").alias("began"),
        pl.col("thread").alias("on"), pl.col("original").alias("further"),
    )  # fmt: skip
    for _ in range(_MAX_CLONE_STEPS):
        if events["original"].null_count() == events.height:
            break
        joined = events.join(moments, on=["process", "original"], how="left", maintain_order="left")
        events = joined.select(
            "process", "node", start=pl.coalesce("began", "start"),
            thread=pl.coalesce("on", "thread"), original="further",
        )  # fmt: skip
    return events


def _innermost_ranges(events: pl.DataFrame, host: pl.DataFrame) -> Int64:
    """Row of the innermost host range around each creation event, on its process and thread."""
    result = np.full(events.height, NO_ROW, np.int64)
    start = host["start"].to_numpy()
    end = start + host["duration"].to_numpy()
    parent = row_numbers(host["parent"])
    keys = ["process", "thread"]
    rows = host.select(*keys).with_row_index("row").group_by(keys).agg(
        pl.col("row").min().alias("low"), pl.len().alias("count")
    )  # fmt: skip
    moments = events.with_row_index("event").join(rows, on=keys)
    for (low, count), part in moments.group_by("low", "count"):
        time = part["start"].to_numpy()
        track = int(str(low)) + np.arange(int(str(count)))
        result[part["event"].to_numpy()] = innermost(track, start, end, parent, (time, time))
    return result
