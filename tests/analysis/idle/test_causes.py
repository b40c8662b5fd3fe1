"""Causes of idle time: programs with planted causes, counted one by one, and conservation on recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from helpers import DATA, DIFFERENT, STACK, TORCH, event, examples, kernel, launch, opened
from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES, REASON_TITLES, REASONS, host_causes
from thence.analysis.idle.places import names_of_contexts
from thence.analysis.report.summary import summarize
from thence.attribution.attribute import attribute
from thence.attribution.launch_places import places_of_rows
from thence.model.own_code import OwnCode
from thence.model.tables import GPU, HOST, HOST_CATEGORIES, Tables

if TYPE_CHECKING:
    from pathlib import Path

PLANTED = {
    "loader": ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "framework"),
    "sync": ("cudaStreamSynchronize", "runtime"),
    "allocation": ("cudaMalloc", "runtime"),
    "first_use": ("cuModuleLoadData", "driver"),
    "compile": ("_compile.compile_inner (dynamo_timed)", "op"),
    "operator": ("aten::mm", "op"),
    "python": ("train.py(12): step", "python"),
    "gc": ("<built-in function collect>", "python"),
    "unknown": ("", ""),
}
LATENCY, CALL = 7, 3
Segment = tuple[str, int]


def simulated(segments: list[Segment]) -> tuple[Tables, dict[str, int]]:
    """A host that is in one planted row after the other, each followed by a launch, and a device that waits for it.

    Returns:
        the tables, and the idle time that each cause must have, counted nanosecond by nanosecond.
    """
    host: list[tuple[str, str, int, int, int | None]] = []
    gpu: list[tuple[int, int]] = []
    at: dict[int, str] = {}
    time = 0
    for number, (cause, length) in enumerate(segments):
        name, category = PLANTED[cause]
        if name:
            host.append((name, category, time, length, None))
        at |= dict.fromkeys(range(time, time + length), cause)
        time += length
        host.append(("cudaLaunchKernel", "runtime", time, CALL, number + 1))
        start = time + LATENCY
        if gpu:
            start = max(start, sum(gpu[-1]))
        at |= dict.fromkeys(range(time, start), "launch")
        gpu.append((start, 2))
        time += CALL
    expected: dict[str, int] = {}
    until = sum(gpu[0])
    launches = [row[2] for row in host if row[4] is not None]
    for number, (start, length) in enumerate(gpu[1:], start=1):
        for t in range(until, start):
            # What the launch before is still doing is another launch.
            cause = "launch" if launches[number - 1] <= t < launches[number - 1] + CALL else at[t]
            if t >= launches[number]:
                queued = launches[number] <= until and t >= launches[number] + CALL
                cause = "queued" if queued else "launch"
            expected[cause] = expected.get(cause, 0) + 1
        until = start + length
    columns = list(zip(*host, strict=True))
    frame = HOST.frame(
        {
            "rank": [0] * len(host), "process": [1] * len(host), "thread": [1] * len(host),
            "name": columns[0], "category": columns[1], "start": columns[2], "duration": columns[3],
            "correlation": columns[4],
        }
    )  # fmt: skip
    count = len(gpu)
    activities = GPU.frame(
        {
            "rank": [0] * count, "device": [0] * count, "stream": [7] * count, "kind": ["kernel"] * count,
            "name": ["k"] * count, "start": [start for start, _ in gpu], "duration": [d for _, d in gpu],
            "correlation": list(range(1, count + 1)),
        }
    )  # fmt: skip
    return Tables(gpu=activities, host=frame), expected


@settings(deadline=None, max_examples=examples(15))
@given(st.lists(st.tuples(st.sampled_from(sorted(PLANTED)), st.integers(0, 40)), min_size=2, max_size=10))
def test_planted_causes_are_found_to_the_nanosecond(segments: list[Segment]) -> None:
    tables, expected = simulated(segments)
    pieces = idle_causes(attribute(tables))
    found = pieces.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("duration").sum())
    assert dict(found.rows()) == expected


def of_cause(trace: thence.Trace) -> dict[str, int]:
    """Idle microseconds by cause."""
    pieces = idle_causes(trace.tables)
    sums = pieces.group_by(pl.col("cause").cast(pl.String)).agg(pl.col("duration").sum() // 1000)
    return dict(sums.rows())


def call(name: str, start: float, duration: float, **rest: Any) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, args={"correlation": int(start) + 1000}, **rest)


def test_a_call_that_asks_for_the_name_of_a_kernel_loads_nothing(tmp_path: Path) -> None:
    calls = [
        ("cuKernelGetName", 2),
        ("cuKernelGetAttribute", 3),
        ("cuKernelSetAttribute", 10),
        ("cuKernelGetFunction", 20),
    ]
    events, time = [launch(1, 0), kernel(1, 2, 3)], 5.0
    for name, took in calls:
        events.append(call(name, time, took))
        time += took
    events += [launch(2, time), kernel(2, time + 1, 5)]
    assert of_cause(opened(tmp_path, events)) == {"operator": 2 + 3, "first_use": 10 + 20, "launch": 1}


def test_queued_kernels_wait_for_each_other_and_for_events(tmp_path: Path) -> None:
    events = [
        launch(1, 1), launch(2, 2), launch(3, 3), call("cudaEventRecord", 4, 1), call("cudaStreamWaitEvent", 5, 1),
        launch(4, 6), kernel(1, 20, 10), kernel(2, 33, 7), kernel(3, 80, 20),
        kernel(4, 130, 5, args={"stream": 8}),
    ]  # fmt: skip
    # 3 us and the first 5 of 40 are between queued kernels; the other 35 nothing explains; 25 of the last 30 an event.
    assert of_cause(opened(tmp_path, events)) == {"queued": 3 + 5 + 5, "unknown": 35, "event_wait": 25}


def test_kernels_of_one_launch_of_a_graph_wait_for_each_other(tmp_path: Path) -> None:
    graph = {"graph id": 3, "graph node id": 1}
    launches = [call("cudaGraphLaunch", at, 2) | {"args": {"correlation": at}} for at in (1, 4)]
    events = [
        *launches,
        kernel(1, 20, 10, args=graph), kernel(1, 70, 10, args=graph), kernel(4, 120, 10, args=graph),
    ]  # fmt: skip
    # The 40 us inside of the first launch are between its nodes; of the 40 until the second one only the first 5 are.
    assert of_cause(opened(tmp_path, events)) == {"queued": 40 + 5, "unknown": 35}


def test_a_long_call_loads_only_the_first_kernel_of_its_name(tmp_path: Path) -> None:
    events = [kernel(1, 5, 5), launch(1, 1)]
    for number, (name, begin) in enumerate([("new", 20), ("new", 1020)], start=2):
        events += [event("cuda_runtime", "cudaLaunchKernel", begin, 500, args={"correlation": number})]
        events += [kernel(number, begin + 500, 10, name=name)]
    # From the end of a kernel to the next launch nothing is recorded.
    assert of_cause(opened(tmp_path, events)) == {"first_use": 500, "launch": 500, "unknown": 10 + 490}


def test_an_operator_that_takes_long_until_its_first_kernel_makes_it(tmp_path: Path) -> None:
    # Once long; always long; always short.
    planted = [("once", 2000), ("once", 900), ("always", 2000), ("always", 2000), ("short", 900)]
    events = [kernel(1, 5, 5), launch(1, 1)]
    for number, (name, took) in enumerate(planted, start=2):
        begin = 100 + 5000 * (number - 2)
        events += [event("cpu_op", "aten::erfinv", begin, took + 20), launch(number, begin + took)]
        events += [kernel(number, begin + took + 10, 10, name=name)]
    assert of_cause(opened(tmp_path, events)) == {
        "first_use": 2000,
        "operator": 900 + 2000 + 2000 + 900,
        "launch": 5 * 10,
        "unknown": 90 + sum(5000 - took - 20 for _, took in planted[:-1]),
    }


def test_where_the_launching_thread_is_in_nothing_the_thread_that_works_tells(tmp_path: Path) -> None:
    events = [
        launch(1, 1), kernel(1, 5, 5), event("cpu_op", "aten::mm", 10, 60),
        launch(2, 100, tid=9), kernel(2, 110, 5), event("cpu_op", "AddBackward0", 90, 30, tid=9),
    ]  # fmt: skip
    pieces = idle_causes(opened(tmp_path, events).tables)
    rows = pieces.select("cause", pl.col("duration") // 1000).rows()
    assert rows == [("operator", 60), ("unknown", 20), ("operator", 10), ("launch", 10)]


def test_the_wait_that_emptied_the_queue_stands_beside(tmp_path: Path) -> None:
    events = [
        launch(1, 1), kernel(1, 5, 50), call("cudaStreamSynchronize", 10, 48), event("cpu_op", "aten::add", 60, 30),
        launch(2, 80), kernel(2, 90, 5), launch(3, 85), kernel(3, 96, 5),
    ]  # fmt: skip
    trace = opened(tmp_path, events)
    pieces = idle_causes(trace.tables)
    first = pieces.filter(pl.col("gpu") == 1)
    assert dict(first.group_by("cause").agg(pl.col("duration").sum() // 1000).rows()) == {
        "sync": 3, "unknown": 2, "operator": 20, "launch": 10,
    }  # fmt: skip
    assert set(trace.tables.host["name"].gather(first["wait"].cast(pl.UInt32))) == {"cudaStreamSynchronize"}
    assert pieces.filter(pl.col("gpu") == 2)["wait"].null_count() == 1
    after = trace.idle().waits
    assert after.select("name", "total_ns", "count").rows() == [("cudaStreamSynchronize", 35_000, 1)]


def test_without_launches_all_is_unknown_with_the_reason(tmp_path: Path) -> None:
    pieces = idle_causes(opened(tmp_path, [kernel(1, 5, 5), kernel(2, 60, 5)]).tables)
    assert pieces.select("cause", "reason", "duration").rows() == [("unknown", "no_launch", 50_000)]


SEVERAL_FORMATS = (
    DATA / "nsight" / "torch_ddp.sqlite.gz",
    DATA / "jax" / "jax_fsdp2.xplane.pb.gz",
    DATA / "recording" / "two_ranks",
)


@pytest.mark.parametrize("path", [*DIFFERENT[::3], STACK, *SEVERAL_FORMATS], ids=lambda path: path.name)
def test_every_idle_nanosecond_of_a_recording_has_one_cause(path: Path) -> None:
    trace = thence.open(path)
    total = summarize(trace.tables, "kernel")
    found = trace.idle()
    assert found.idle_ns == total.span_ns - total.busy_ns == int(found.causes["total_ns"].sum())
    assert int(found.rows["total_ns"].sum()) == found.idle_ns
    until = pl.col("start") + pl.col("duration")
    ordered = found.pieces.sort("rank", "device", "start")
    assert ordered.filter(pl.col("start") < until.shift(1).over("rank", "device")).is_empty()
    assert (ordered["duration"] > 0).all()
    unknown = found.pieces.filter(pl.col("cause") == "unknown")
    assert unknown["reason"].null_count() == 0
    assert found.pieces.filter(pl.col("cause") != "unknown", pl.col("reason").is_not_null()).is_empty()


@pytest.mark.parametrize("path", [TORCH / "checkpoints" / "with_stacks.json.gz"], ids=lambda path: path.name)
def test_a_piece_has_the_place_of_its_own_host_row(path: Path) -> None:
    trace = thence.open(path).tables
    pieces = idle_causes(trace).drop_nulls("host")
    rows = pieces["host"].unique().sort()
    own = OwnCode.of(trace.own, trace.installed)
    kinds = ["source", "label", "module", "op"]
    context, names = names_of_contexts(trace, pieces, kinds)
    found = {by: name.gather(context) for by, name in names.items()}
    asked = places_of_rows(trace, rows.to_numpy().astype(np.int64), own, kinds)
    at = rows.search_sorted(pieces["host"])
    for by in kinds:
        expected = asked[by].gather(at).cast(pl.String)
        assert found[by].cast(pl.String).to_list() == expected.to_list()
    assert any(found[by].null_count() < pieces.height for by in ("source", "label", "module"))


def test_idle_by_each_kind_adds_up() -> None:
    trace = thence.open(TORCH / "torch_compile_rank0.json.gz")
    totals = {by: trace.idle(by) for by in ("source", "op", "step", "kernel", "wait", "reason", "rank")}
    assert {int(found.rows["total_ns"].sum()) for found in totals.values()} == {totals["op"].idle_ns}
    document = totals["step"].to_json()
    for cause in document["causes"]:
        assert sum(row["total_ns"] for row in cause["rows"]) == cause["total_ns"]
    assert {cause["cause"] for cause in document["causes"]} <= set(CAUSES)
    assert totals["step"].rows["name"].drop_nulls().str.starts_with("ProfilerStep#").all()


def test_idle_by_device_is_that_of_each_device_alone() -> None:
    trace = thence.open(TORCH / "torch_fsdp_rank0.json.gz", TORCH / "torch_fsdp_rank1.json.gz")
    rows = trace.idle("device").rows
    found = dict(rows.group_by("name").agg(pl.col("total_ns").sum()).rows())
    assert found == {f"rank {rank} device {rank}": trace.select(ranks=[rank]).report().idle_ns for rank in (0, 1)}


@pytest.mark.parametrize(
    ("busy_us", "expected"), [(5, {"ProfilerStep#1": 85_000, None: 295_000}), (110, {None: 275_000})]
)
def test_idle_time_is_of_the_step_in_whose_window_it_begins(
    tmp_path: Path, busy_us: int, expected: dict[str | None, int]
) -> None:
    """The step lasts from 0 to 100 us, or until its work ends; the kernels at 300 and 400 us are of none."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100), launch(1, 8), kernel(1, 10, busy_us),
        launch(2, 298), kernel(2, 300), launch(3, 398), kernel(3, 400),
    ]  # fmt: skip
    rows = opened(tmp_path, events).idle("step").rows
    assert dict(rows.group_by("name").agg(pl.col("total_ns").sum()).rows()) == expected


@pytest.mark.parametrize("category", HOST_CATEGORIES)
def test_a_host_row_of_every_category_stands_for_a_cause(category: str) -> None:
    host = simulated([("python", 3)])[0].host
    row = host.filter(host["name"].cast(pl.String) == "train.py(12): step")
    (number,) = host_causes(row.with_columns(category=pl.lit(category, HOST.schema["category"])))
    assert (CAUSES[number] == "unknown") == (category == "overhead")


def test_the_phase_input_of_a_recording_is_loading() -> None:
    host = simulated([("python", 3)])[0].host
    row = host.filter(host["name"].cast(pl.String) == "train.py(12): step").with_columns(
        category=pl.lit("phase", HOST.schema["category"]), name=pl.lit("input", HOST.schema["name"])
    )
    assert [CAUSES[number] for number in host_causes(row)] == ["loader"]


def test_what_is_inside_of_a_loader_is_loading_and_a_collection_stays_one(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "enumerate(DataLoader)#it.__next__", 0, 100), event("cpu_op", "aten::stack", 10, 20),
        event("python_function", "<built-in function collect>", 40, 20), call("cudaHostAlloc", 70, 5),
        launch(1, 90), kernel(1, 95), event("user_annotation", "download_model", 200, 10),
    ]  # fmt: skip
    host = opened(tmp_path, events).tables.host
    found = dict(zip(host["name"].cast(pl.String), [CAUSES[n] for n in host_causes(host)], strict=True))
    assert found == {
        "enumerate(DataLoader)#it.__next__": "loader", "aten::stack": "loader",
        "<built-in function collect>": "gc", "cudaHostAlloc": "allocation", "cudaLaunchKernel": "loader",
        "download_model": "host",
    }  # fmt: skip


def test_after_the_last_activity_nothing_shows_what_a_step_waited_for(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100), launch(1, 5), kernel(1, 10, 80),
        event("user_annotation", "ProfilerStep#2", 100, 100), launch(2, 105), kernel(2, 110, 60),
    ]  # fmt: skip
    rows = opened(tmp_path, events).select(steps="typical").idle().rows
    assert rows.filter(cause="unknown").select("name", "total_ns").rows() == [("nothing_after", 30_000)]


def test_a_traced_frame_of_python_that_waits_for_the_device_is_no_python() -> None:
    """Innermost of the steps' Python frames: 0.9 ms of 1.5 in jax's try_to_block, which calls block_until_ready."""
    host = thence.open(DATA / "jax" / "memory.xplane.pb.gz").tables.host
    found = dict(zip(host["name"].cast(pl.String), [CAUSES[n] for n in host_causes(host)], strict=True))
    assert found["api.py(2768): try_to_block"] == found["api.py(2757): block_until_ready"] == "sync"
    assert found["tree_util.py(99): tree_leaves"] == "python"


def test_tables_name_reasons_in_words_and_documents_by_their_code(tmp_path: Path) -> None:
    found = opened(tmp_path, [kernel(1, 5, 5), kernel(2, 60, 5)]).idle()
    assert found.rows.select("by", "name").rows() == [("reason", "no_launch")]
    assert found.shown_rows["name"].to_list() == ["no launch recorded"]
    assert found.notes[0].startswith("unknown (no launch recorded): 50.00 us: ")
    assert REASON_TITLES.keys() == REASONS.keys()


def test_the_program_in_silence_is_in_nothing_recorded() -> None:
    found = thence.open(DATA / "recording" / "two_ranks").idle()
    silent = found.shown_rows.filter(pl.col("by").is_null())
    assert silent.select("cause", "name").rows() == [("host", "(in no recorded range or call)")]
    pieces = found.pieces.filter(pl.col("cause") == "host", pl.col("host").is_null())
    assert silent["total_ns"].to_list() == [pieces["duration"].sum()] == [found.silent_ns]
