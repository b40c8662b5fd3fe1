"""Charts of results have the numbers of the results."""

from __future__ import annotations

import statistics
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DATA, FSDP, kernel, launch, opened, recording, shared
from thence.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

PLOTS = [name for name in vars(Trace) if name.startswith("plot_")]
ELSEWHERE = {
    "plot_compile": "compiled",
    "plot_programs": "xla",
    "plot_spread": "one",
    "plot_by": "one",
    "plot_memory": "memory",
}


@pytest.fixture(scope="module")
def traces() -> dict[str, thence.Trace]:
    return {
        "ranks": shared(*FSDP),
        "xla": thence.open(DATA / "jax" / "remat.xplane.pb.gz"),
        "compiled": thence.open(DATA / "jax" / "recording"),
        "one": shared(recording("torch_eager_rank0")),
        "memory": thence.open(DATA / "torch" / "memory" / "conv_training.json.gz"),
    }


@pytest.mark.parametrize("name", PLOTS)
def test_every_chart_is_drawn_and_has_numbers(name: str, traces: dict[str, thence.Trace]) -> None:
    chart = getattr(traces[ELSEWHERE.get(name, "ranks")], name)()
    assert chart.to_frame().height > 1
    root = ET.fromstring(chart.to_svg())
    marks = [each for tag in ("rect", "circle", "path", "polyline") for each in root.iter(
        f"{{http://www.w3.org/2000/svg}}{tag}")]  # fmt: skip
    assert len(marks) > 1
    width = float(root.attrib["viewBox"].split()[2])
    assert width == 720
    for mark in marks:
        x = mark.attrib.get("x", "0%")
        if x.endswith("%"):
            assert 0 <= float(x[:-1]) <= 100.1
            assert float(mark.attrib.get("width", "0%").removesuffix("%")) >= 0


def test_bars_by_kernel_are_those_of_the_summary(traces: dict[str, thence.Trace]) -> None:
    summary = traces["one"].report()
    chart = traces["one"].plot_by(top=5)
    rows = chart.to_frame()
    sums = rows.group_by("name", maintain_order=True).agg(pl.col("total_ns").sum())
    assert sums["total_ns"].to_list()[:5] == summary.rows["total_ns"].to_list()[:5]
    assert rows.filter(series="backward")["total_ns"].to_list() == summary.rows["backward_ns"].to_list()[:5]
    assert rows["total_ns"].sum() == summary.sum_ns
    assert list(chart.rows)[5] == f"{summary.rows.height - 5} more"


def test_the_timeline_has_every_activity_or_its_bins(tmp_path: Path, traces: dict[str, thence.Trace]) -> None:
    few = opened(tmp_path, [launch(1, 1), kernel(1, 10, 2), launch(2, 2), kernel(2, 20, 5)])
    assert few.plot_timeline().to_frame().select("start_ns", "end").rows() == [(0, 2000), (10_000, 15_000)]
    overview = traces["ranks"].overview()
    assert traces["ranks"].plot_timeline().to_frame()["busy_ns"].sum() == overview.lanes["busy_ns"].sum()


def test_groups_and_concurrency_are_those_of_the_streams(traces: dict[str, thence.Trace]) -> None:
    streams = traces["ranks"].streams()
    groups = traces["ranks"].plot_streams().to_frame()
    expected = streams.rows.group_by(pl.col("group").cast(pl.String)).agg(pl.col("total_ns").sum())
    assert dict(groups.group_by("series").agg(pl.col("total_ns").sum()).rows()) == dict(expected.rows())
    busy = traces["ranks"].plot_concurrency().to_frame()
    assert busy["total_ns"].sum() == sum(sum(device.busy_streams_ns) for device in streams.concurrency)
    first = next(iter(streams.concurrency)).busy_streams_ns
    assert busy.filter(device="rank 0 GPU 0", series="1 stream")["total_ns"].to_list() == [first[0]]


@pytest.mark.parametrize("ranks", [FSDP, FSDP[:2]], ids=["transfers", "whole kernels"])
def test_lines_of_bandwidth_go_through_the_middle_of_their_dots(ranks: tuple[Path, ...]) -> None:
    """Two of four ranks show no whole transfer: then both dots and lines are of kernels."""
    chart = shared(*ranks).plot_bandwidth()
    whole = len(ranks) == 4
    column, middle = ("transfer_bus_gbps", statistics.median) if whole else ("bus_gbps", statistics.fmean)
    assert chart.y.column == column
    dots = {each.name: each.data for each in chart.series if each.mark == "dot"}
    lines = {each.name: each.data for each in chart.series if each.mark == "line"}
    assert dots.keys() == lines.keys()
    assert len(lines) == 2
    for name, line in lines.items():
        for size, gbps in line.select("bytes", column).rows():
            assert gbps == pytest.approx(middle(dots[name].filter(bytes=size)[column].to_list()), rel=1e-3)


def test_waits_are_those_of_the_collectives(traces: dict[str, thence.Trace]) -> None:
    waits = traces["ranks"].collectives().instances.filter(pl.col("wait_ns").is_not_null())
    histogram = traces["ranks"].plot_wait_histogram().to_frame()
    for kind, begin, end, count in histogram.select("series", "from_ns", "end", "count").rows():
        own = [ns for name, ns in waits.select("collective", "wait_ns").rows() if str(name) == kind]
        assert count == sum(begin <= ns < end for ns in own)
    for box in traces["ranks"].plot_waits().to_frame().iter_rows(named=True):
        own = [ns for name, ns in waits.select("collective", "wait_ns").rows() if str(name) == box["collective"]]
        assert (box["low"], box["high"], box["count"]) == (min(own), max(own), len(own))
        assert box["median"] == statistics.median(own)
    drawn = [each.data for each in traces["ranks"].plot_wait_sizes().series if each.mark == "dot"]
    points = sorted(point for data in drawn for point in data.rows())
    assert points == sorted(waits.filter(pl.col("wait_ns") > 0).select("bytes", "wait_ns").rows())
    last = traces["ranks"].collectives().last_arrivals
    assert traces["ranks"].plot_last_arrivals().to_frame()["waited_ns"].to_list() == last["waited_ns"].to_list()


def test_programs_compile_phases_and_spread_are_those_of_the_results(traces: dict[str, thence.Trace]) -> None:
    programs = traces["xla"].programs().programs
    shown = traces["xla"].plot_programs().to_frame()
    for name, column in (("busy", "busy_ns_total"), ("idle inside", "idle_inside_ns"),
                         ("idle between", "idle_between_ns")):  # fmt: skip
        assert shown.filter(series=name)["total_ns"].sum() == programs[column].sum()
    phases = traces["compiled"].compile().phases
    assert traces["compiled"].plot_compile().to_frame()["self_ns"].to_list() == phases["self_ns"].to_list()
    with pytest.raises(thence.MissingData):
        traces["one"].plot_compile()
    spread = traces["one"].spread().filter(pl.col("count") > 1)
    points = traces["one"].plot_spread().to_frame()
    assert sorted(points.select("mean_ns", "spread").rows()) == sorted(spread.select("mean_ns", "spread").rows())


def test_the_flame_graph_has_the_time_of_its_frames(traces: dict[str, thence.Trace]) -> None:
    flame = traces["ranks"].flame().largest(300)
    frames = traces["ranks"].plot_flame().to_frame()
    assert frames.filter(depth=0).select(pl.col("end") - pl.col("start_ns")).item() == flame.total_ns
    assert frames.filter(series="communication").height == flame.nodes.filter(kind="communication").height
