"""Tables events and waits: ids of producers against their own files, and ids that cannot be true."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, TORCH, event, kernel, launch, opened, written
from thence.model.concat_tables import concat
from thence.model.tables import EVENTS, WAITS
from thence.model.waiting import names_of_calls, waiting_tables
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path

TWO_STREAMS = TORCH / "events" / "two_streams.json.gz"
DDP = DATA / "nsight" / "torch_ddp.sqlite.gz"


def call(name: str, correlation: int, start: float, duration: float = 1, **rest: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, args={"correlation": correlation}, **rest)


def sync(name: str, correlation: int, stream: int, **arguments: int) -> dict[str, Any]:
    told = {"correlation": correlation, "stream": stream, "device": 0, **arguments}
    return event("cuda_sync", name, 0, 1, args=told)


def named(record: int, stream: int) -> dict[str, int]:
    return {"wait_on_cuda_event_record_corr_id": record, "wait_on_stream": stream}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaStreamSynchronize", "stream"),
        ("cuStreamSynchronize", "stream"),
        ("hipDeviceSynchronize", "device"),
        ("cudaEventRecordWithFlags", "record"),
        ("cudaStreamWaitEvent_ptsz", "wait"),
        ("cudaMemcpy", "copy"),
        ("cudaMemcpyAsync", None),
        ("cudaEventQuery", None),
        ("cudaEventSynchronizeLike", None),
    ],
)
def test_calls_are_told_by_their_whole_names(name: str, kind: str | None) -> None:
    found = names_of_calls(pl.Series([name], dtype=pl.Categorical()))
    assert found["kind"].to_list() == ([] if kind is None else [kind])


def test_ids_of_kineto_are_those_of_its_file() -> None:
    trace = thence.open(TWO_STREAMS)
    raw = json.loads(gzip.decompress(TWO_STREAMS.read_bytes()))["traceEvents"]
    waits = {
        e["args"]["correlation"]: (e["args"]["wait_on_cuda_event_record_corr_id"], e["args"]["stream"])
        for e in raw
        if e.get("name") == "Stream Wait Event"
    }
    records = {e["args"]["correlation"]: e["args"]["stream"] for e in raw if e.get("cat") == "cuda_event"}
    assert len(waits) == 95
    correlation = trace.tables.host["correlation"].gather(trace.tables.events["host"].cast(pl.UInt32))
    rows = trace.tables.events.with_columns(correlation=correlation)
    by_row = rows["correlation"]
    seen = rows.filter(pl.col("kind") == "wait")
    assert (seen["known"] == "recorded").all()
    found = {row["correlation"]: (by_row[row["record"]], row["stream"]) for row in seen.iter_rows(named=True)}
    assert found == waits
    made = rows.filter(pl.col("kind") == "record")
    assert dict(made.select("correlation", "stream").rows()) == records


def test_ids_of_nsight_are_those_of_its_tables(tmp_path: Path) -> None:
    path = tmp_path / "export.sqlite"
    path.write_bytes(gzip.decompress(DDP.read_bytes()))
    query = """
        select count(*), count(e.eventId) from CUPTI_ACTIVITY_KIND_SYNCHRONIZATION s
        join CUPTI_ACTIVITY_KIND_RUNTIME r
          on r.correlationId = s.correlationId and r.globalTid / 0x1000000 = s.globalPid / 0x1000000
        join StringIds n on n.id = r.nameId
        left join CUPTI_ACTIVITY_KIND_CUDA_EVENT e
          on e.globalPid = s.globalPid and e.eventId = s.eventId and e.eventSyncId = s.eventSyncId
        where n.value like '%StreamWaitEvent%'
    """
    with closing(sqlite3.connect(path)) as connection:
        all_waits, matched = connection.execute(query).fetchone()
    trace = thence.open(path)
    waits = trace.tables.events.filter(pl.col("kind") == "wait")
    known = dict(waits["known"].value_counts().rows())
    assert (waits.height, known["recorded"]) == (all_waits, matched)
    assert known["never_recorded"] == all_waits - matched > 0
    start = trace.tables.host["start"]
    events = trace.tables.events.with_columns(time=start.gather(trace.tables.events["host"].cast(pl.UInt32)))
    recorded = events.filter(pl.col("record").is_not_null())
    assert (recorded["time"] > events["time"].gather(recorded["record"].cast(pl.UInt32))).all()
    assert set(trace.tables.waits["kind"]) == {"device", "stream", "event", "free"}
    assert trace.tables.waits.filter(pl.col("kind") == "stream")["stream"].null_count() == 0


def test_a_record_that_the_trace_does_not_hold_or_that_comes_later_is_none(tmp_path: Path) -> None:
    events = [
        call("cudaEventRecord", 10, 5), call("cudaStreamWaitEvent", 11, 6), call("cudaStreamWaitEvent", 12, 7),
        call("cudaStreamWaitEvent", 13, 8), call("cudaEventRecord", 14, 9),
        sync("Stream Wait Event", 11, 7, **named(10, 20)), sync("Stream Wait Event", 12, 7, **named(99, 20)),
        sync("Stream Wait Event", 13, 7, **named(14, 20)), kernel(1, 50), launch(1, 2),
    ]  # fmt: skip
    tables = read([written(tmp_path / "trace.json", events)])
    waits = tables.events.filter(pl.col("kind") == "wait")
    assert waits["record"].to_list() == [0, None, None]
    assert waits["known"].to_list() == ["recorded", None, None]
    assert tables.events["stream"].to_list() == [20, 7, 7, 7, None]


def test_calls_without_ids_are_still_rows(tmp_path: Path) -> None:
    trace = opened(tmp_path, [call("cudaDeviceSynchronize", 3, 5), call("cudaMemcpy", 4, 8), kernel(1, 50)])
    assert trace.tables.waits["kind"].to_list() == ["device", "copy"]
    assert trace.tables.waits["known"].to_list() == ["recorded", "recorded"]
    assert trace.tables.events.is_empty()
    assert trace.tables.events.schema == EVENTS.schema
    assert trace.tables.waits.schema == WAITS.schema


def test_row_references_follow_their_rows_when_ranks_are_joined_and_selected() -> None:
    part = read([TWO_STREAMS])
    whole = concat([part, part])
    assert whole.events.height == 2 * part.events.height
    for frame in (whole.events, whole.waits):
        names = whole.host["name"].cast(pl.String).gather(frame["host"].cast(pl.UInt32))
        assert names.str.contains("Event|Synchronize").all()
    second = whole.events.filter(pl.col("rank") == 1)["record"].drop_nulls()
    first = part.events["record"].drop_nulls()
    assert second.to_list() == (first + part.events.height).to_list()
    trace = thence.Trace(whole).select(ranks=[1])
    assert trace.tables.events["record"].to_list() == part.events["record"].to_list()
    assert trace.tables.events["host"].to_list() == part.events["host"].to_list()


def test_a_host_table_without_such_calls_gives_empty_tables() -> None:
    host = read([TWO_STREAMS]).host
    events, waits = waiting_tables(host.filter(pl.col("name").cast(pl.String) == "cudaLaunchKernel"))
    assert events.is_empty()
    assert waits.is_empty()
