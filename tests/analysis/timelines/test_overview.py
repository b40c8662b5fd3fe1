"""The timeline overview, with numbers worked out by hand."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from collective_jobs import skewed
from helpers import DIFFERENT, FSDP, kernel, launch, opened, shared
from thence.analysis.timelines import overview as timeline_overview

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.timelines.overview import Overview


def of(folder: Path, *kernels: tuple[str, int, int, int]) -> Overview:
    """The overview of kernels: name, stream, start and duration in us."""
    events = [launch(i, i) for i in range(1, len(kernels) + 1)]
    for i, (name, stream, start, duration) in enumerate(kernels, 1):
        events.append(kernel(i, start, duration, name=name, args={"stream": stream}, tid=stream))
    return opened(folder, events).overview()


def named(view: Overview, frame: pl.DataFrame) -> list[tuple[object, ...]]:
    """Its rows with names instead of their numbers."""
    return [(*row[:-1], view.names[row[-1]]) for row in frame.iter_rows()]


def test_bins_hold_what_ran_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_overview, "MAX_BINS", 4)
    monkeypatch.setattr(timeline_overview, "_MIN_BINS", 4)
    # 0-10 a, 15-35 b, 36-40 c: bins of 10 us hold 10 a, 5 b, 10 b, 5 b and 4 c.
    view = of(tmp_path, ("a", 7, 100, 10), ("b", 7, 115, 20), ("c", 7, 136, 4))
    assert (view.span_ns, view.bin_ns, view.bin_count) == (40_000, 10_000, 4)
    assert named(view, view.bins.select("lane", "bin", "busy_ns", "name")) == [
        (0, 0, 10_000, "a"),
        (0, 1, 5_000, "b"),
        (0, 2, 10_000, "b"),
        (0, 3, 9_000, "b"),
    ]
    assert named(view, view.slices.select("start", "duration", "name")) == [
        (0, 10_000, "a"),
        (15_000, 20_000, "b"),
        (36_000, 4_000, "c"),
    ]
    coarse = view.coarser(2)
    assert (coarse.bin_ns, coarse.bin_count) == (20_000, 2)
    assert named(coarse, coarse.bins.select("bin", "busy_ns", "name")) == [(0, 15_000, "a"), (1, 19_000, "b")]
    assert view.coarser(4) is view


def test_overlap_on_one_stream_counts_once(tmp_path: Path) -> None:
    view = of(tmp_path, ("a", 7, 100, 10), ("b", 7, 104, 12), ("c", 7, 105, 2), ("d", 9, 100, 3))
    assert view.lanes.select("stream", "count", "busy_ns").rows() == [(7, 3, 16_000), (9, 1, 3_000)]
    assert view.bins["busy_ns"].sum() == 19_000
    assert view.slices.height == 4


def test_communication_and_copies_are_told_apart(tmp_path: Path) -> None:
    view = of(tmp_path, ("gemm", 7, 100, 5), ("ncclDevKernel_AllReduce_Sum", 8, 100, 5))
    assert view.slices.sort("lane")["class"].to_list() == [0, 1]


def test_many_activities_become_bins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_overview, "MAX_SLICES", 2)
    view = of(tmp_path, *(("a", 7, 100 + 10 * i, 5) for i in range(3)))
    assert view.slices.is_empty()
    assert view.bins["busy_ns"].sum() == 15_000
    assert view.notes[0].startswith("3 activities are shown in bins of")


def test_many_streams_leave_out_the_least_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_overview, "_MAX_LANES", 2)
    view = of(tmp_path, ("a", 7, 100, 5), ("a", 8, 100, 1), ("a", 9, 100, 4))
    assert view.lanes["stream"].to_list() == [7, 9]
    assert "1 of 3 streams, those with the least time (10 % of it), are not drawn" in view.notes


def test_nothing_ran(tmp_path: Path) -> None:
    with pytest.raises(thence.MissingData):
        opened(tmp_path, [launch(1, 1)]).overview()


@pytest.mark.parametrize("path", DIFFERENT, ids=lambda path: path.name)
def test_bins_of_a_recording_add_up_to_busy_time(path: Path) -> None:
    trace = thence.open(path)
    view = trace.overview()
    sums = view.bins.group_by("lane").agg(pl.col("busy_ns").sum()).sort("lane")
    streams = trace.streams().streams.sort("rank", "device", "stream")
    assert sums["busy_ns"].to_list() == streams["busy_ns"].to_list() == view.lanes["busy_ns"].to_list()
    assert view.bins["busy_ns"].is_between(1, view.bin_ns).all()


def test_ranks_are_on_one_clock(tmp_path: Path) -> None:
    """The clock of rank 1 is 5 ms ahead."""
    trace = thence.open(*skewed(tmp_path))
    view = trace.overview()
    assert view.lanes["rank"].unique().sort().to_list() == [0, 1]
    (note,) = [note for note in view.notes if note.startswith("clocks aligned by")]
    moved = {int(r): int(ns.replace(",", "")) for r, ns in re.findall(r"rank (\d) by ([+-][\d,]+) ns", note)}
    assert moved[0] - moved[1] == pytest.approx(5_000_000, abs=2_000)


def test_clocks_that_agree_are_left_alone_and_the_timeline_says_so() -> None:
    notes = shared(*FSDP).overview().notes
    assert any("clocks agree" in note and note.endswith("none is shifted") for note in notes)
    assert not any("; shifted: " in note for note in notes)
