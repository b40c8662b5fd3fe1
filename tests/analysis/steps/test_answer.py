"""Idle time by cause of every step, spread, and steps that stand out."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, TORCH, event, kernel, launch, opened
from thence.analysis.idle.causes import idle_causes
from thence.errors import MissingData

if TYPE_CHECKING:
    from pathlib import Path


def looped(folder: Path, loading: list[int]) -> thence.Trace:
    """One step for each time (us) that its loader takes, each of 20 us of work besides."""
    events, time = [], 1000
    for number, length in enumerate(loading):
        took = length + 50
        events += [
            event("user_annotation", f"ProfilerStep#{number}", time, took),
            event("user_annotation", "enumerate(DataLoader)#it.__next__", time + 2, length),
            launch(number + 1, time + length + 10),
            kernel(number + 1, time + length + 15, 20),
        ]
        time += took
    return opened(folder, events)


def test_the_step_that_stands_out_is_named_with_what_grew(tmp_path: Path) -> None:
    loading = [22, 20, 22, 21, 500, 19, 20]
    found = looped(tmp_path, loading).steps()
    assert (found.frame["duration"] // 1000).to_list() == [length + 50 for length in loading]
    assert (found.frame["idle_loader_ns"] // 1000).to_list() == loading
    row = found.outliers.row(0, named=True)
    assert found.outliers.height == 1
    assert (row["step"], row["because"], row["because_ns"]) == ("ProfilerStep#4", "idle_loader", 479_000)
    spread = found.spread.row(0, named=True)
    rest = [(length + 50) * 1000 for length in loading[1:]]
    assert spread["median_ns"] == statistics.median(rest)
    assert spread["std_ns"] == pytest.approx(statistics.stdev(rest))
    assert (spread["steps"], spread["min_ns"], spread["max_ns"]) == (6, min(rest), max(rest))


def test_selected_steps_are_as_in_the_whole(tmp_path: Path) -> None:
    trace = looped(tmp_path, [20, 30, 40, 50])
    part = trace.select(steps="1:3").steps()
    assert part.frame.rows() == trace.steps().frame[1:3].rows()
    ranges = thence.open(DATA / "recording" / "two_ranks")
    with pytest.raises(MissingData, match="holds no steps"):
        ranges.steps()


@pytest.mark.parametrize(
    "path",
    [
        TORCH / "torch_compile_rank0.json.gz",
        TORCH / "torch_fsdp_rank1.json.gz",
        DATA / "jax" / "jax_single.xplane.pb.gz",
    ],
    ids=lambda path: path.name,
)  # fmt: skip
def test_causes_of_every_step_add_up_to_its_idle_time(path: Path) -> None:
    frame = thence.open(path).steps().frame
    causes = [name for name in frame.columns if name.startswith("idle_") and name != "idle_ns"]
    assert causes
    assert frame.select((pl.sum_horizontal(causes) == pl.col("idle_ns")).all()).item()
    assert (frame["busy_ns"] + frame["idle_ns"] == frame["duration"]).all()


def across(folder: Path, devices: int) -> thence.Trace:
    """Two steps in which each of many devices runs one kernel of 3 us, 40 us after that of the device before."""
    length = 40 * devices
    events = [event("user_annotation", f"ProfilerStep#{i}", i * length, length) for i in range(2)]
    for i in range(2 * devices):
        events += [launch(i + 1, 40 * i), kernel(i + 1, 40 * i + 10, 3, args={"device": i % devices})]
    return opened(folder, events)


def test_idle_time_of_more_devices_than_programs_have_is_not_divided(tmp_path: Path) -> None:
    devices = 1_001
    trace = across(tmp_path, devices)
    frame = trace.steps().frame
    assert frame.height == 2 * devices
    assert (frame["idle_unknown_ns"] == frame["idle_ns"]).all()
    assert set(frame["busy_ns"]) == {3_000}
    idle = trace.idle()
    between = 1000 * (40 * devices - 3)  # from the kernel of the first step to that of the second
    assert idle.idle_ns == devices * between
    assert idle.reasons.rows() == [("too_many", devices * between)]
    one = trace.select(devices=[7]).idle()
    assert one.idle_ns == between
    assert "too_many" not in one.reasons["reason"].to_list()


def test_more_pieces_than_a_trace_has_rows_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = across(tmp_path, 40)  # 40 gaps, each of which holds 40 launches
    divided = idle_causes(trace.tables)
    assert divided.height > 1_600
    monkeypatch.setattr("thence.analysis.idle.causes._MAX_PIECES", 0)
    monkeypatch.setattr("thence.analysis.idle.causes._MAX_PIECES_PER_ROW", 4)
    whole = idle_causes(trace.tables)
    assert whole.height == 40
    assert set(whole["reason"]) == {"too_many"}
    assert whole["duration"].sum() == divided["duration"].sum()
    assert whole.schema == divided.schema
