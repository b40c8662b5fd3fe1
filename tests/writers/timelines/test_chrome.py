"""Chrome JSON that we write, and read back."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from collective_jobs import skewed
from helpers import DIFFERENT, FSDP, PAIR, assert_same_tables, event, kernel, launch, opened, shared
from thence.writers.timelines.chrome import write_chrome

if TYPE_CHECKING:
    from pathlib import Path


def document(trace: thence.Trace, clocks: str = "aligned") -> dict[str, Any]:
    stream = io.BytesIO()
    write_chrome(trace.timeline(clocks=clocks), stream)
    return dict(json.loads(stream.getvalue()))


@pytest.mark.parametrize("path", DIFFERENT, ids=lambda path: path.name)
def test_reading_back_a_recording_gives_an_equal_trace(path: Path, tmp_path: Path) -> None:
    trace = thence.open(path)
    target = tmp_path / ("again.json.gz" if path in FSDP else "again.json")
    trace.convert(target)
    again = thence.open(target)
    assert_same_tables(trace.recorded, again.recorded)
    changed = {"inputs": again.meta.inputs}
    assert dataclasses.replace(trace.meta, **changed) == again.meta
    assert_frame_equal(trace.tables.places, again.tables.places, categorical_as_str=True)


def test_reading_back_what_is_odd(tmp_path: Path) -> None:
    odd = [
        event("cpu_op", 'aten::"quoted" \\ Ω\u2028 <b>', "0.001", "0.000", args={"External id": 0}),
        event("user_annotation", "ProfilerStep#3", 5, 100), event("user_annotation", "FSDP::x", 6, 1),
        event("python_function", "nn.Module: Linear_3", 7, 5), event("python_function", "a.py(1): f", 7, 5),
        event("cuda_driver", "cuLaunchKernel", 8, 1, args={"correlation": 1}),
        event("overhead", "Buffer Flush", 9, 1, pid=-1), event("cpu_op", "elsewhere", 9, 1, pid="tag", tid="name"),
        kernel(1, "-1.001", "0.010", name="", args={"graph node id": (1 << 64) - 1, "graph id": 3}),
        kernel(2, 50, cat="gpu_memcpy", args={"bytes": 0, "External id": 7}), kernel(3, 60, cat="gpu_memset"),
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": 'the "main" one'}},
    ]  # fmt: skip
    trace = opened(tmp_path, odd)
    trace.convert(tmp_path / "again.json")
    assert_same_tables(trace.recorded, thence.open(tmp_path / "again.json").recorded)


def test_reading_back_collectives_of_kernels_and_ops(tmp_path: Path) -> None:
    args = {
        "Collective name": "allreduce", "In msg nelems": 100, "Out msg nelems": 100, "Group size": 2,
        "dtype": "BFloat16", "Process Group Name": "tp", "Process Group Description": "tensor",
        "Process Group Ranks": "[0, 1]", "In split size": "[]", "Seq": 9, "Src Rank": 0, "Dst Rank": 1,
    }  # fmt: skip
    op = event("cpu_op", "record_param_comms", 10, 20, args={**args, "Collective name": "send"})
    trace = opened(tmp_path, [op, launch(1, 12), kernel(1, 40), kernel(2, 60, args=args)])
    trace.convert(tmp_path / "again.json")
    again = thence.open(tmp_path / "again.json")
    assert again.recorded.collectives["sequence"].to_list() == [9, 9]
    assert_same_tables(trace.recorded, again.recorded)


def test_several_ranks_in_one_file_are_told_apart_again(tmp_path: Path) -> None:
    trace = shared(*FSDP[:2])
    trace.convert(tmp_path / "all.json", clocks="recorded")
    again = thence.open(tmp_path / "all.json")
    for table in ("gpu", "host", "threads"):
        assert_frame_equal(getattr(trace.tables, table), getattr(again.tables, table), categorical_as_str=True)
    order = ["gpu", "host"]
    left, right = (t.recorded.collectives.sort(order) for t in (trace, again))
    assert_frame_equal(left, right, categorical_as_str=True)


def test_corrected_clocks_are_said_in_the_file(tmp_path: Path) -> None:
    trace = thence.open(*skewed(tmp_path))
    corrections = dict(trace.alignment.corrections.select("rank", "correction_ns").rows())
    said = document(trace)["thence"]
    assert said["clock_corrections_ns"] == {str(r): ns for r, ns in corrections.items() if ns}
    *offsets, rule = said["clocks"]
    assert len(offsets) == len(said["clock_corrections_ns"]) > 0
    assert rule.startswith("durations are as recorded")
    assert document(trace, "recorded")["thence"]["clock_corrections_ns"] == {}
    assert document(shared(*FSDP[:2]))["thence"]["clock_corrections_ns"] == {}  # one host


def test_events_are_what_viewers_expect(tmp_path: Path) -> None:
    events = document(opened(tmp_path, PAIR))["traceEvents"]
    (label,) = [e for e in events if e["name"] == "train"]
    expected = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "train",
        "pid": 1,
        "tid": 2,
        "ts": 1.5,
        "dur": 99.0,
        "args": {},
    }
    assert label == expected
    first = next(e for e in events if e.get("cat") == "kernel")
    assert first["args"] == {
        "device": 0,
        "stream": 7,
        "correlation": 1,
        "label": "train",
        "op": "aten::mm",
        "phase": "other",
    }
    assert (first["ts"], first["dur"]) == (40.25, 5.125)
    arrows = [(e["ph"], e["id"], e["ts"], e["pid"]) for e in events if e.get("cat") == "ac2g"]
    assert arrows == [("s", 2, 12.001, 1), ("s", 3, 50.0, 1), ("f", 2, 40.25, 0), ("f", 3, 60.0, 0)]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {(0, 7): "stream 7"}


def test_a_graph_has_one_arrow_tail_and_many_heads(tmp_path: Path) -> None:
    call = event("cuda_runtime", "cudaGraphLaunch", 5, 2, args={"correlation": 1})
    events = document(opened(tmp_path, [call, *(kernel(1, 10 + 10 * i) for i in range(5))]))["traceEvents"]
    arrows = [e for e in events if e.get("cat") == "ac2g"]
    assert [e["ph"] for e in arrows] == ["s", "f", "f", "f", "f", "f"]
    assert len({e["id"] for e in arrows}) == 1


def test_a_trace_of_jax_becomes_json(tmp_path: Path) -> None:
    from helpers import DATA

    trace = thence.open(DATA / "jax" / "jax_single_nocb.xplane.pb.gz")
    trace.convert(tmp_path / "jax.json")
    again = thence.open(tmp_path / "jax.json")
    columns = ["start", "duration", "stream", pl.col("name").cast(pl.String)]
    left, right = (t.tables.gpu.select(columns).sort(pl.all()) for t in (trace, again))
    assert_frame_equal(left, right)


def test_parquet_tables_are_the_traces(tmp_path: Path) -> None:
    trace = shared(FSDP[0])
    trace.convert(tmp_path / "tables.parquet")
    for name in ("gpu", "host", "places", "collectives", "threads"):
        again = pl.read_parquet(tmp_path / "tables.parquet" / f"{name}.parquet")
        assert_frame_equal(again, getattr(trace.tables, name), categorical_as_str=True)
    meta = json.loads((tmp_path / "tables.parquet" / "meta.json").read_bytes())
    assert meta["inputs"] == [str(FSDP[0])]
