"""Times that cannot be, and times that are hard to believe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

from faults import changed
from helpers import DATA, event, kernel, launch, opened, recording
from thence.analysis.soundness.check import check
from thence.readers.registry import read
from thence.units import LATEST_NS

if TYPE_CHECKING:
    from pathlib import Path


def codes(soundness: Any) -> list[str]:
    return [finding.code for finding in soundness.findings]


def runs(durations: list[float], name: str = "gemm") -> list[dict[str, Any]]:
    events, now = [], 1000.0
    for i, duration in enumerate(durations, 1):
        events += [launch(i, now), kernel(i, now + 2, duration, name=name)]
        now += duration + 10
    return events


@pytest.mark.parametrize("longest", [999, 1001])
def test_a_thousand_times_the_median_is_the_limit(tmp_path: Path, longest: int) -> None:
    soundness = opened(tmp_path, runs([2.0] * 20 + [2.0 * longest])).check()
    assert codes(soundness) == (["outlier"] if longest > 1000 else [])


def test_few_executions_make_no_median(tmp_path: Path) -> None:
    assert opened(tmp_path, runs([2.0] * 5 + [50_000.0])).check().sound


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum", "spin_kernel", "DelayKernel"])
def test_kernels_that_wait_may_take_long(tmp_path: Path, name: str) -> None:
    assert opened(tmp_path, runs([2.0] * 20 + [50_000.0], name)).check().sound


def test_an_execution_that_is_not_alone_depends_on_its_data(tmp_path: Path) -> None:
    soundness = opened(tmp_path, runs([2.0] * 20 + [50_000.0, 20_000.0])).check()
    assert soundness.sound
    assert {note.code for note in soundness.notes} == {"outlier"}


def test_kernels_of_one_stream_may_overlap_but_start_in_order(tmp_path: Path) -> None:
    overlapping = [launch(1, 1), kernel(1, 10, 20), launch(2, 3), kernel(2, 15, 20)]
    assert opened(tmp_path, overlapping).check().sound
    disordered = [launch(1, 1), kernel(1, 10, 20), launch(2, 3), kernel(2, 9, 20)]
    (finding,) = opened(tmp_path, disordered).check().findings
    assert (finding.code, finding.count, finding.span_ns) == ("broken_order", 1, 1000)
    other_stream = kernel(2, 9, 20, args={"stream": 8})
    assert opened(tmp_path, [*disordered[:3], other_stream]).check().sound
    other_thread = launch(2, 3) | {"tid": 3}
    assert opened(tmp_path, [*disordered[:2], other_thread, disordered[3]]).check().sound


@pytest.mark.parametrize(("later", "found"), [(9, 0), (10, 1)])
def test_an_activity_does_not_outlast_ten_later_ones_of_its_stream(tmp_path: Path, later: int, found: int) -> None:
    long = [launch(100, 0), kernel(100, 1, 5000.0, name="copies")]
    events = [*long, *(one | {"ts": one["ts"] - 900} for one in runs([2.0] * later))]
    soundness = opened(tmp_path, events).check()
    assert codes(soundness) == ["impossible_time"] * found
    other_stream = kernel(100, 1, 5000.0, name="copies", args={"stream": 8})
    assert opened(tmp_path, [*events[:1], other_stream, *events[2:]]).check().sound
    node = kernel(100, 1, 5000.0, name="copies", args={"graph id": 3, "graph node id": 1})
    assert "impossible_time" not in codes(opened(tmp_path, [events[0], node, *events[2:]]).check())


@pytest.mark.parametrize(("early", "findings", "notes"), [(5, 0, 0), (40, 0, 1), (80, 1, 0)])
def test_clocks_may_differ_by_fifty_microseconds(tmp_path: Path, early: int, findings: int, notes: int) -> None:
    events = [launch(1, 100), kernel(1, 100 - early, 200)]
    soundness = opened(tmp_path, events).check()
    assert codes(soundness) == ["work_before_launch"] * findings
    assert [note.code for note in soundness.notes] == ["work_before_launch"] * notes


@pytest.mark.parametrize(
    ("path", "start"),
    [
        (DATA / "nsight" / "torch_ddp.sqlite.gz", -1),
        (DATA / "nsight" / "torch_ddp_cuda_gpu_trace.csv.gz", 0),
        (DATA / "jax" / "jax_single_nocb.xplane.pb.gz", 10**18),
        (recording("torch_eager_rank0"), 0),
    ],
    ids=["Nsight Systems", "CSV", "xplane", "torch.profiler"],
)
def test_an_impossible_start_is_found_in_every_format(path: Path, start: int) -> None:
    tables = read([path])
    row = tables.gpu.height // 2
    gpu = tables.gpu.with_columns(start=pl.when(pl.int_range(pl.len()) == row).then(start).otherwise("start"))
    found = [f for f in check(changed(tables, gpu=gpu)).findings if f.code == "impossible_time"]
    (finding,) = found
    assert (finding.rank, finding.device) == tuple(tables.gpu.select("rank", "device").row(row))
    assert finding.count == 1
    assert f"starts at {start:,} ns" in finding.text


def test_starts_before_the_first_input_s_clock_are_no_fault(tmp_path: Path) -> None:
    """Times of a second input are expressed on the first one's clock, and may be negative."""
    host = event("cpu_op", "aten::mm", 10, 5)
    for rank, base in enumerate((10**18 + 10**9, 10**18)):
        content = [launch(1, 100), kernel(1, 105, 10**6), host]
        opened(tmp_path, content, baseTimeNanoseconds=base, distributedInfo={"rank": rank})
        (tmp_path / "trace.json").rename(tmp_path / f"rank{rank}.json")
    tables = read(sorted(tmp_path.glob("rank*.json")))
    assert int(tables.gpu["start"].min()) < 0
    assert "impossible_time" not in codes(check(tables))


def test_a_negative_duration_that_a_reader_let_through_is_found() -> None:
    tables = read([recording("torch_eager_rank0")])
    gpu = tables.gpu.with_columns(duration=pl.when(pl.int_range(pl.len()) == 9).then(-5).otherwise("duration"))
    assert "impossible_time" in codes(check(changed(tables, gpu=gpu)))


def test_starts_as_far_apart_as_clocks_reach_are_judged() -> None:
    tables = read([recording("torch_eager_rank0")])
    far = LATEST_NS * (2 * (pl.int_range(pl.len()) % 2) - 1)
    assert not check(changed(tables, gpu=tables.gpu.with_columns(start=far))).sound
