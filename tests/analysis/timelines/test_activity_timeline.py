"""The timeline of single activities and gaps, with numbers worked out by hand and counted in the files."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import DIFFERENT, event, kernel, launch, opened, unzipped
from thence.analysis.timelines import activity_timeline as module
from thence.analysis.timelines.activity_timeline import ActivityTimeline, activity_timeline

if TYPE_CHECKING:
    from pathlib import Path

US = 1000


def timeline(trace: thence.Trace) -> ActivityTimeline:
    return activity_timeline(trace.tables, trace.idle().pieces)


def made(folder: Path) -> ActivityTimeline:
    """Kernels at 100-110, 115-135 and 136-140 us, the second launched inside an operator inside a range."""
    return timeline(
        opened(
            folder,
            [
                launch(1, 1), launch(2, 20), launch(3, 50),
                event("user_annotation", "train", 15, 10), event("cpu_op", "aten::mm", 18, 5, args={"External id": 5}),
                kernel(1, 100, 10, name="a"), kernel(2, 115, 20, name="b"), kernel(3, 136, 4, name="c"),
            ],
        )
    )  # fmt: skip


def test_every_activity_has_its_times_its_launch_and_its_place(tmp_path: Path) -> None:
    view = made(tmp_path)
    rows = view.rows
    assert view.span_ns == 40 * US
    assert rows.select("start", "duration", "busy_ns", "count").rows() == [
        (0, 10 * US, 10 * US, 1),
        (15 * US, 20 * US, 20 * US, 1),
        (36 * US, 4 * US, 4 * US, 1),
    ]
    assert [view.details.names[i] for i in rows["name"]] == [("a", None), ("b", None), ("c", None)]
    assert rows.select("lead_ns", "call_ns").rows() == [(99 * US, US), (95 * US, US), (86 * US, US)]
    assert view.details.calls == ("cudaLaunchKernel on thread 2",)
    places = [dict(zip(view.details.kinds, view.details.places[i], strict=True)) for i in rows["place"]]
    assert places[1]["op"] == ("aten::mm", None)
    assert places[1]["label"] == ("train", None)
    assert places[0]["op"] == (None, "launched outside every operator")


def test_gaps_are_told_apart_by_cause(tmp_path: Path) -> None:
    view = made(tmp_path)
    assert view.gaps.select("start", "duration", "idle_ns", "parts").rows() == [
        (10 * US, 5 * US, 5 * US, 1),
        (35 * US, 1 * US, 1 * US, 1),
    ]
    assert [(view.causes[i][0], ns) for i, ns in view.parts.rows()] == [("queued", 5 * US), ("queued", US)]


def test_neighbours_become_one_row_that_counts_them(tmp_path: Path) -> None:
    view = made(tmp_path)
    assert view.coarser(3) is view
    two = view.coarser(2)
    # The first width that leaves two rows is 32,768 ns: the first two begin in its first cell, the third after it.
    assert two.rows.select("start", "duration", "busy_ns", "count", "call").rows() == [
        (0, 35 * US, 30 * US, 2, None),
        (36 * US, 4 * US, 4 * US, 1, 0),
    ]
    assert [two.details.names[i][0] for i in two.rows["name"]] == ["b", "c"]
    assert len(two.notes) == 1
    assert two.notes[0].startswith("2 of 3 activities, all shorter than 32.77 us, are merged")
    one = view.coarser(1)
    assert one.rows.select("start", "duration", "busy_ns", "count").rows() == [(0, 40 * US, 34 * US, 3)]
    assert one.gaps.select("start", "duration", "idle_ns", "parts").rows() == [(10 * US, 26 * US, 6 * US, 2)]
    assert one.parts["ns"].to_list() == [5 * US, US]


def test_of_many_causes_of_a_gap_the_small_ones_are_one(tmp_path: Path) -> None:
    ops = [event("cpu_op", f"op{i}", 20 + 10 * i, 10 - i, args={"External id": i}) for i in range(6)]
    view = timeline(opened(tmp_path, [launch(1, 1), kernel(1, 5), *ops, launch(2, 90), kernel(2, 95)]))
    assert view.gaps["parts"].to_list() == [4]
    assert view.parts["cause"].is_null().to_list() == [False, False, False, True]
    largest = view.parts["ns"].to_list()[:3]
    assert largest == sorted(largest, reverse=True)
    assert view.parts["ns"].sum() == 85 * US


def test_texts_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TEXTS", 2)
    view = made(tmp_path)
    assert [view.details.names[i][0] for i in view.rows["name"]] == [
        "a",
        "b",
        "one of 1 other names, which took less time",
    ]


def test_nothing_ran(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(1, 1)])
    with pytest.raises(thence.MissingData):
        activity_timeline(trace.tables, pl.DataFrame())


@pytest.mark.parametrize("path", DIFFERENT, ids=lambda path: path.name)
def test_a_recording_has_each_of_its_activities_and_all_of_its_idle_time(path: Path) -> None:
    trace = thence.open(path)
    view = timeline(trace)
    events = [
        event
        for event in json.loads(unzipped(path))["traceEvents"]
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    of_stream = Counter((e["args"]["device"], e["args"]["stream"]) for e in events)
    lanes = view.lanes.select("device", "stream", "count").rows()
    assert {(device, stream): count for device, stream, count in lanes} == of_stream
    assert view.rows.height == len(events)
    idle = sum(_idle(_intervals(events, device)) for device in {e["args"]["device"] for e in events})
    assert view.gaps["idle_ns"].sum() == view.parts["ns"].sum() == idle
    for rows in (100, 7):
        coarse = view.coarser(rows)
        assert coarse.rows.height <= max(rows, view.lanes.height)
        assert coarse.rows["count"].sum() == len(events)
        assert coarse.rows["busy_ns"].sum() == view.rows["busy_ns"].sum()
        assert coarse.parts["ns"].sum() == idle
        assert (coarse.gaps["idle_ns"] <= coarse.gaps["duration"]).all()


def _intervals(events: list[dict[str, object]], device: int) -> list[tuple[int, int]]:
    """Starts and ends of a device's activities in ns, from the decimals of the file."""
    return sorted(
        (ns := round(e["ts"] * 1000), ns + round(e["dur"] * 1000)) for e in events if e["args"]["device"] == device
    )


def _idle(intervals: list[tuple[int, int]]) -> int:
    idle, reached = 0, intervals[0][0]
    for start, end in intervals:
        idle += max(0, start - reached)
        reached = max(reached, end)
    return idle
