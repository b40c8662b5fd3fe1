"""Events and waits inferred from the order of calls: against recorded ids, and against planted times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from helpers import TORCH, event, kernel, launch, opened
from thence.attribution.attribute import attribute
from thence.attribution.host_rows import row_numbers
from thence.attribution.waiting import event_edges
from thence.model.tables import EVENTS, WAITS
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path

TWO_STREAMS = TORCH / "events" / "two_streams.json.gz"


def call(name: str, start: float, duration: float = 1, **rest: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, args={"correlation": int(start) + 1000}, **rest)


def on(stream: int, correlation: int, start: float, duration: float) -> dict[str, Any]:
    return kernel(correlation, start, duration, args={"stream": stream})


def handed_over(late: float) -> list[dict[str, Any]]:
    """Stream 8 waits for a kernel of stream 7 and starts at ``late``."""
    return [
        launch(1, 1), call("cudaEventRecord", 3), call("cudaStreamWaitEvent", 5), launch(2, 7),
        on(7, 1, 10, 40), on(8, 2, late, 10),
    ]  # fmt: skip


def test_the_order_of_calls_finds_what_was_recorded() -> None:
    tables = read([TWO_STREAMS])
    exact = attribute(tables)
    stripped = tables.__class__(gpu=tables.gpu, host=tables.host, meta=tables.meta)
    guessed = attribute(stripped)
    edges = event_edges(exact, row_numbers(exact.places["launch"]))
    found = event_edges(guessed, row_numbers(guessed.places["launch"]))
    key = ["waiting", "awaited"]
    wrong = found.select(key).join(edges.select(key), on=key, how="anti")
    assert edges.height >= 5
    # The side stream has no work after the fifth: by order alone the sixth wait may be of either stream.
    assert wrong.height <= 1
    assert found.height >= 0.8 * edges.height
    assert set(guessed.events["known"]) <= {"inferred", "unknown"}


def test_an_inferred_wait_names_both_streams_and_both_activities(tmp_path: Path) -> None:
    trace = opened(tmp_path, handed_over(51))
    assert trace.tables.events["stream"].to_list() == [7, 8]
    assert trace.tables.events["record"].to_list() == [None, 0]
    assert trace.tables.events["known"].to_list() == ["inferred", "inferred"]
    edges = event_edges(trace.tables, row_numbers(trace.tables.places["launch"]))
    assert edges.rows() == [(1, 1, 0)]


def test_what_times_contradict_is_unknown(tmp_path: Path) -> None:
    trace = opened(tmp_path, handed_over(30))  # began while the other ran: it did not wait for it
    wait = trace.tables.events.row(1, named=True)
    assert (wait["record"], wait["known"]) == (None, "unknown")
    assert event_edges(trace.tables, row_numbers(trace.tables.places["launch"])).is_empty()


def through_a_stream_of_none(begins: float, *, waits: bool = True) -> list[dict[str, Any]]:
    """Stream 26 waits for stream 22 by way of stream 14, on which nothing runs: so NCCL orders its kernels.

    The trace names the streams of records and of the wait of 26; of the wait of 14 it holds the call alone.
    """
    made = {"device": 0, "cuda_event_id": 4}
    calls = [
        launch(1, 1), call("cudaEventRecord", 3), call("cudaStreamWaitEvent", 5),
        call("cudaEventRecord", 7), call("cudaStreamWaitEvent", 9), launch(2, 11),
    ]  # fmt: skip
    earlier = [call("cudaEventRecord", 0)]  # on stream 14: the last record of its thread there
    told = [
        event("cuda_event", "Event Record", at, 0, args={**made, "correlation": at + 1000, "stream": stream})
        for at, stream in ((0, 14), (3, 22), (7, 14))
    ]  # fmt: skip
    waited = {"correlation": 1009, "stream": 26, "device": 0, "wait_on_stream": 14,
              "wait_on_cuda_event_record_corr_id": 1007, "wait_on_cuda_event_id": 4}  # fmt: skip
    told.append(event("cuda_sync", "Stream Wait Event", 9, 0, args=waited))
    if not waits:
        calls = [each for each in calls if each["ts"] != 5]
    return [*earlier, *calls, *told, on(22, 1, 12, 40), on(26, 2, begins, 10)]


def test_a_wait_of_a_stream_on_which_nothing_runs_is_passed_on(tmp_path: Path) -> None:
    trace = opened(tmp_path, through_a_stream_of_none(53))
    of_14 = trace.tables.events.filter(pl.col("kind") == "wait").sort("host").row(0, named=True)
    assert (of_14["stream"], of_14["known"]) == (14, "inferred")
    edges = event_edges(trace.tables, row_numbers(trace.tables.places["launch"]))
    assert edges.select("waiting", "awaited").rows() == [(1, 0)]


def test_without_that_wait_nothing_is_passed_on(tmp_path: Path) -> None:
    trace = opened(tmp_path, through_a_stream_of_none(53, waits=False))
    assert event_edges(trace.tables, row_numbers(trace.tables.places["launch"])).is_empty()


def test_what_times_contradict_is_not_passed_on(tmp_path: Path) -> None:
    trace = opened(tmp_path, through_a_stream_of_none(30))
    assert event_edges(trace.tables, row_numbers(trace.tables.places["launch"])).is_empty()


def test_a_wait_of_the_host_is_for_the_stream_launched_on_last(tmp_path: Path) -> None:
    events = [launch(1, 1), launch(2, 3), call("cudaStreamSynchronize", 5, 60), on(7, 1, 10, 5), on(8, 2, 20, 40)]
    wait = opened(tmp_path, events).tables.waits.row(0, named=True)
    assert (wait["kind"], wait["stream"], wait["known"]) == ("stream", 8, "inferred")


def test_a_wait_that_returned_before_the_stream_was_done_is_for_another(tmp_path: Path) -> None:
    events = [launch(1, 1), launch(2, 3), call("cudaStreamSynchronize", 5, 20), on(7, 1, 10, 5), on(8, 2, 20, 40)]
    wait = opened(tmp_path, events).tables.waits.row(0, named=True)
    assert (wait["stream"], wait["known"]) == (None, "unknown")


def test_a_wait_for_an_event_has_the_record_on_its_thread(tmp_path: Path) -> None:
    events = [
        launch(1, 1), call("cudaEventRecord", 2), launch(2, 3), call("cudaEventSynchronize", 5, 12),
        on(7, 1, 10, 5), on(7, 2, 20, 40),
    ]  # fmt: skip
    trace = opened(tmp_path, events)
    wait = trace.tables.waits.row(0, named=True)
    assert (wait["kind"], wait["record"], wait["known"]) == ("event", 0, "inferred")


def test_a_trace_without_launches_knows_nothing_but_the_calls(tmp_path: Path) -> None:
    trace = opened(tmp_path, [call("cudaEventRecord", 2), call("cudaStreamWaitEvent", 4), on(7, 1, 10, 5)])
    assert trace.tables.events["known"].to_list() == ["unknown", "unknown"]
    assert trace.tables.events.schema == EVENTS.schema
    assert trace.tables.waits.schema == WAITS.schema
    assert trace.sql("select kind from events")["kind"].to_list() == ["record", "wait"]


def test_tables_reach_parquet(tmp_path: Path) -> None:
    trace = opened(tmp_path, handed_over(51))
    trace.convert(tmp_path / "out.parquet")
    assert pl.read_parquet(tmp_path / "out.parquet" / "events.parquet").height == 2
    assert pl.read_parquet(tmp_path / "out.parquet" / "waits.parquet").is_empty()
