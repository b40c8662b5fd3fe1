"""What was live at the peak, against PyTorch's and XLA's own figures of the same runs, and counted by hand."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from memory_traces import Memory
from thence.errors import MissingData, UsageError
from thence.readers.jax.protos import xplane_pb2

DATA = Path(__file__).parents[2] / "data"
CONV = DATA / "torch" / "memory" / "conv_training.json.gz"
# torch.cuda.max_memory_allocated, max_memory_reserved and memory_allocated of the run, from gpu_memory.py
PEAK, RESERVED, BEFORE = 595_715_584, 939_524_096, 7_456_256
# What the run with the second stage in a checkpoint needed less, above what was allocated before the step
SAVED = (595_715_584 - 7_456_256) - (531_968_000 - 8_621_056)


@pytest.fixture(scope="module")
def conv() -> thence.Trace:
    return thence.open(CONV)


def test_the_peak_is_that_of_pytorch_and_its_rows_add_up(conv: thence.Trace) -> None:
    for by in ("module", "source", "kind", "rank"):
        answer = conv.memory(by)
        device = answer.devices.row(0, named=True)
        assert (device["peak_bytes"], device["reserved_bytes"], device["before_bytes"]) == (PEAK, RESERVED, BEFORE)
        assert device["inactive_bytes"] == RESERVED - PEAK
        assert answer.rows["bytes"].sum() == PEAK - BEFORE, by


def test_recomputing_a_stage_saves_what_a_run_with_a_checkpoint_saved(conv: thence.Trace) -> None:
    rows = {row["module"]: row for row in conv.memory().recomputed.iter_rows(named=True)}
    assert rows["Model_0/Sequential_1"]["saved_bytes"] == SAVED
    assert rows["Model_0/Sequential_1"]["activation_bytes"] > SAVED, "the peak moves"
    assert rows["Model_0/Sequential_1"]["forward_ns"] > 0


def test_kinds_follow_from_the_passes(conv: thence.Trace) -> None:
    kinds = dict(conv.memory("kind").rows.select("name", "bytes").iter_rows())
    assert set(kinds) == {"activation", "temporary", "gradient", None}
    # What the forward pass keeps is the inputs of convolutions and of batch norms: nearly all of a peak before the end
    # of the backward pass.
    assert kinds["activation"] > 0.85 * (PEAK - BEFORE)
    after = conv.memory("kind", at="1s")  # at the end: only what was there before, and the loss
    assert after.devices["before_bytes"].to_list() == [BEFORE]


def test_memory_that_every_step_leaves_behind_is_named_with_its_bytes(tmp_path: Path) -> None:
    made = Memory(allocated=5000)
    made.range("python_function", "<built-in>", 0.0)
    for step in range(4):
        begin = made.now
        made.change(0x1000, 700)
        call = made.now
        made.change(0x10 + step, 1024)
        made.range("cpu_op", "aten::empty", call)
        made.range("python_function", "train.py(12): remember", call)
        made.change(0x1000, -700)
        if step == 0:
            made.change(0x2000, 4096)  # the state of an optimizer: only one step leaves it
        made.range("user_annotation", f"ProfilerStep#{step}", begin)
    answer = made.opened(tmp_path).memory("source")
    assert answer.growth.select("source", "op", "steps", "bytes_per_step", "total_bytes").rows() == [
        ("train.py:12 remember", "aten::empty", 4, 1024, 4096)
    ]
    assert answer.devices["peak_bytes"].to_list() == [5000 + 4096 + 3 * 1024 + 1024 + 700]
    assert answer.devices["step"].to_list() == ["ProfilerStep#3"]


def test_a_failed_allocation_is_shown_with_who_asked_and_what_was_free(tmp_path: Path) -> None:
    made = Memory()
    call = made.now
    made.change(0x10, 1000)
    made.reserved = 3000  # the allocator returns what it can before it gives up
    made.fail(1 << 30)
    made.range("python_function", "train.py(7): ask", call)
    made.change(0x20, 500)
    trace = made.opened(tmp_path)
    assert trace.memory().devices["peak_bytes"].to_list() == [1500]
    answer = trace.memory(at="oom")
    assert answer.devices.select("peak_bytes", "reserved_bytes", "inactive_bytes").rows() == [(1000, 3000, 2000)]
    assert answer.failures.select("bytes", "source").rows() == [(1 << 30, "train.py:7 ask")]


def test_memory_of_an_xla_program_is_that_of_its_memory_analysis() -> None:
    trace = thence.open(DATA / "jax" / "memory.xplane.pb.gz")
    of_program = pl.col("program") == "jit_train_step"
    device = trace.memory().devices.filter(of_program).row(0, named=True)
    # peak_memory_in_bytes and total_allocation_bytes of compiled.memory_analysis()
    assert (device["peak_bytes"], device["reserved_bytes"]) == (297_894_012, 297_898_526)
    kinds = dict(trace.memory("kind").rows.filter(of_program).select("name", "bytes").iter_rows())
    # argument_size_in_bytes, output_size_in_bytes
    assert (kinds["argument"], kinds["output"]) == (27_277_312, 27_269_244)
    lines = trace.memory("source").rows.filter(pl.col("name").str.contains(":525 "))
    assert lines["kind"].to_list() == ["temporary"] * 2, "the scores of attention, at the line that makes them"
    # Three layers' scores (8 x 8 x 256 x 256 bf16), of what the allocator handed out and as planned
    assert lines["bytes"].to_list() == [3 * 2 * 8 * 8 * 256 * 256] * 2


def calls_of_allocator() -> list[dict[str, Any]]:
    """The events of XLA's allocator as the file has them, in order of time: name, time in ps, and their stats."""
    space = xplane_pb2.XSpace.FromString(gzip.decompress((DATA / "jax" / "memory.xplane.pb.gz").read_bytes()))
    (plane,) = (plane for plane in space.planes if plane.name == b"/host:CPU")
    names = {key: metadata.name.decode() for key, metadata in plane.event_metadata.items()}
    stats = {key: metadata.name.decode() for key, metadata in plane.stat_metadata.items()}
    calls = []
    for line in plane.lines:
        for event in line.events:
            if names[event.metadata_id] in ("MemoryAllocation", "MemoryDeallocation"):
                values = {stats[stat.metadata_id]: getattr(stat, str(stat.WhichOneof("value"))) for stat in event.stats}
                time = 1000 * line.timestamp_ns + event.offset_ps
                calls.append({"name": names[event.metadata_id], "time": time, **values})
    return sorted(calls, key=lambda call: call["time"])


def test_what_xlas_allocator_handed_out_is_that_of_its_events_and_split_by_the_plan() -> None:
    trace = thence.open(DATA / "jax" / "memory.xplane.pb.gz")
    live: dict[int, dict[str, Any]] = {}
    most, at_peak = 0, {}
    for call in calls_of_allocator():
        if call["name"] == "MemoryAllocation":
            live[call["addr"]] = call
        else:
            live.pop(call["addr"], None)
        if call["bytes_allocated"] > most:
            most, at_peak = call["bytes_allocated"], dict(live)
    memory = trace.memory("kind")
    memory.self_check()
    device = memory.most
    assert device["program"] is None
    assert device["peak_bytes"] == most
    assert device["before_bytes"] == most - sum(call["allocation_bytes"] for call in at_peak.values())
    rounding = sum(call["allocation_bytes"] - call["requested_bytes"] for call in at_peak.values())
    assert device["rounding_bytes"] == rounding
    assert device["step"] == "train#0"
    # At the peak, the first step has all that it makes, of which the scratch memory is one allocation.
    kinds = dict(memory.held.select("name", "bytes").iter_rows())
    scratch = max(call["requested_bytes"] for call in at_peak.values())
    assert kinds["output"] == sum(call["requested_bytes"] for call in at_peak.values()) - scratch
    assert kinds["temporary"] + kinds[None] == scratch + rounding
    planned = memory.rows.filter(pl.col("program").is_not_null(), pl.col("name") == "temporary")
    assert kinds["temporary"] == planned["bytes"].item()
    assert trace.memory(at="100ms").devices["program"].to_list() == [None]
    assert trace.flame(weight="memory").total_ns == most


def test_traces_without_memory_say_how_to_record_it(conv: thence.Trace) -> None:
    with pytest.raises(MissingData, match="profile_memory=True"):
        thence.open(DATA / "torch" / "torch_eager_rank0.json.gz").memory()
    with pytest.raises(MissingData, match="no allocation failed"):
        conv.memory(at="oom")
    with pytest.raises(UsageError, match="no places by kernel"):
        conv.memory(by="kernel")
    with pytest.raises(UsageError, match="cannot read the time"):
        conv.memory(at="soon")


def test_the_flame_graph_of_memory_has_the_bytes_of_the_peak(conv: thence.Trace) -> None:
    for by in ("module", "stack"):
        flame = conv.flame(by=by, weight="memory")
        assert (flame.total_ns, flame.sum_ns, flame.weight.unit) == (PEAK, PEAK, "bytes")
        sums = {name: size for (name, *rest), size in flame.stacks() if not rest}
        assert sums["[allocated before the trace]"] == BEFORE
    stage = conv.flame(by="module", weight="memory").nodes.filter(pl.col("name") == "Sequential_1")
    rows = conv.memory("module").rows.filter(pl.col("name").str.contains("/Sequential_1/"))
    assert stage["total_ns"].to_list() == [rows["bytes"].sum()]


def test_chrome_json_keeps_memory_and_perfetto_counts_it(conv: thence.Trace, tmp_path: Path) -> None:
    conv.convert(tmp_path / "again.json")
    again = thence.open(tmp_path / "again.json").tables
    for name in ("memory", "memory_totals", "memory_failures"):
        assert_frame_equal(getattr(again, name), getattr(conv.tables, name), categorical_as_str=True)
    timeline = conv.timeline()
    counted = timeline.counters.filter(pl.col("counter") == "allocated memory")
    assert counted["value"].max() == PEAK
    assert timeline.spans is not None
    live = timeline.spans.filter(pl.col("track").str.starts_with("live memory"))
    assert live.height == conv.tables.memory["device"].count()
    assert "Model_0/Sequential_0/Conv2d_1 (67.11 MB)" in live["name"].to_list()


def test_a_trace_that_lost_returns_of_memory_is_refused(tmp_path: Path) -> None:
    made = Memory()
    made.change(0x10, 1000)
    made.allocated -= 1000  # returned, and the event was lost
    made.change(0x20, 400)
    made.change(0x30, 800)
    with pytest.raises(MissingData, match="events about memory are missing: more is live"):
        made.opened(tmp_path).memory()


def test_of_several_devices_the_highest_peak_is_explained(tmp_path: Path) -> None:
    paths = []
    for rank, size in enumerate((1000, 4000)):
        made = Memory(allocated=300)
        call = made.now
        made.change(0x10, 500)
        made.range("python_function", "train.py(3): same", call)
        call = made.now
        made.change(0x20, size)
        made.range("python_function", "train.py(9): different", call)
        paths.append(tmp_path / f"rank{rank}.json")
        made.opened(tmp_path, paths[-1].name)
    answer = thence.open(*paths).memory("source")
    assert answer.highest == {
        "rank": 1, "device": 0, "than_rank": 0, "than_device": 0, "more_bytes": 3000,
        "rows": [{"name": "train.py:9 different", "more_bytes": 3000}],
    }  # fmt: skip
    assert thence.open(paths[0]).memory().highest is None


def test_memory_over_time_adds_up_to_what_was_allocated(conv: thence.Trace) -> None:
    found = conv.memory_over_time("module")
    sums = found.points.group_by("time").agg(pl.col("bytes").sum())["bytes"]
    assert (sums.max(), sums.min()) == (PEAK, BEFORE)
    assert found.points["bytes"].min() == 0
    assert found.names[0] == found.before
