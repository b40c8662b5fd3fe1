"""Summaries of ranks: what they say is what the rank's own file says, counted another way."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import FSDP, event, kernel, launch, opened, shared, unzipped, written
from thence.analysis.rank_tables import concatenated
from thence.analysis.ranks.summary import MAX_ROWS, SUMMARY, summarise_rank, summarise_ranks

if TYPE_CHECKING:
    from pathlib import Path


def merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Their union, one after the other."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def covered(union: list[tuple[int, int]], until: int) -> int:
    return sum(max(min(end, until) - start, 0) for start, end in union)


def activities(path: Path) -> list[dict[str, Any]]:
    """Kernels, copies and sets as the file lists them, in ns."""
    events = json.loads(unzipped(path))["traceEvents"]
    chosen = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for activity in chosen:
        activity["start"] = round(activity["ts"] * 1000)
        activity["end"] = activity["start"] + round(activity["dur"] * 1000)
        activity["talks"] = "nccl" in activity["name"].lower()
    return chosen


@pytest.fixture(scope="module")
def both() -> thence.Trace:
    return shared(*FSDP[:2])


def test_a_rank_among_others_is_summarised_as_alone(both: thence.Trace) -> None:
    alone = concatenated((summarise_rank(thence.open(path).tables) for path in FSDP[:2]), SUMMARY)
    together = summarise_ranks(both.tables)
    for name, table in SUMMARY.items():
        assert dict(together[name].schema) == table.schema
        assert_frame_equal(together[name], alone[name])
    assert all(frame.height for name, frame in alone.items() if name != "parts")


def rank_of_steps(folder: Path, rank: int, *steps: int) -> Path:
    """Two all_reduces with a kernel before each, in steps that begin at the given times (us); no steps without."""
    events = [event("user_annotation", f"ProfilerStep#{i}", start, 400, pid=rank) for i, start in enumerate(steps)]
    for i, start in enumerate((100, 600)):
        talking = kernel(2 * i + 2, start + 80 + rank, 50)
        talking["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
        talking["args"] |= {"Collective name": "allreduce", "In msg nelems": 64, "dtype": "Float",
                            "Process Group Name": "0", "Seq": i}  # fmt: skip
        calls = [launch(2 * i + n, start + 10 * n, pid=rank) for n in (1, 2)]
        events += [*calls, kernel(2 * i + 1, start + 40, 30 + rank), talking]
    return written(folder / f"rank{rank}.json", events, distributedInfo={"rank": rank})


def test_ranks_with_and_without_steps_are_summarised_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six ranks, the second and fifth have no step, and the steps of the third launched nothing."""
    steps = {0: (50, 550), 1: (), 2: (5000, 6000), 3: (50, 550), 4: (), 5: (50, 550)}
    files = [rank_of_steps(tmp_path, rank, *starts) for rank, starts in steps.items()]
    alone = concatenated((summarise_rank(thence.open(path).tables) for path in files), SUMMARY)
    tables = thence.open(*files).tables
    for rows in (200_000, 40):
        monkeypatch.setattr("thence.analysis.ranks.summary._MAX_BATCH_ROWS", rows)
        together = summarise_ranks(tables)
        for name, frame in alone.items():
            assert_frame_equal(together[name], frame)
    assert together["steps"].group_by("rank").len().sort("rank").rows() == [
        (0, 2), (1, 1), (2, 1), (3, 2), (4, 1), (5, 2),
    ]  # fmt: skip
    assert together["collectives"]["rank"].to_list() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_what_lies_between_collectives_is_what_the_file_says() -> None:
    rows = summarise_rank(shared(FSDP[0]).tables)["collectives"].sort("start")
    events = activities(FSDP[0])
    first = min(e["start"] for e in events)
    compute = merged([(e["start"], e["end"]) for e in events if e["cat"] == "kernel" and not e["talks"]])
    with_copies = merged([(e["start"], e["end"]) for e in events if not e["talks"]])
    every = merged([(e["start"], e["end"]) for e in events])
    talking = sorted((e["start"], e["end"]) for e in events if e["talks"])
    assert rows.height == len(talking) > 20
    shift = rows["start"][0] - talking[0][0]
    assert [(start - shift, start - shift + ns) for start, ns in rows.select("start", "duration").rows()] == talking
    for at in range(rows.height):
        for when, moment in zip(("start", "end"), talking[at], strict=True):
            row = rows.row(at, named=True)
            computed = covered(compute, moment)
            assert row[f"compute_{when}_ns"] == computed
            assert row[f"copy_{when}_ns"] == covered(with_copies, moment) - computed
            assert row[f"idle_{when}_ns"] == moment - first - covered(every, moment)


def test_the_longest_exposed_piece_lies_in_its_kernel_and_nothing_computes_there() -> None:
    rows = summarise_rank(shared(FSDP[0]).tables)["collectives"].sort("start")
    events = activities(FSDP[0])
    compute = merged([(e["start"], e["end"]) for e in events if e["cat"] == "kernel" and not e["talks"]])
    shift = rows["start"][0] - min(e["start"] for e in events if e["talks"])
    some = 0
    for row in rows.iter_rows(named=True):
        begin, end = row["exposed_start"] - shift, row["exposed_end"] - shift
        assert row["start"] - shift <= begin <= end <= row["start"] - shift + row["duration"]
        assert covered(compute, end) == covered(compute, begin)
        assert end - begin <= row["exposed_ns"]
        some += end > begin
    assert some > 20


def test_kernels_places_and_idle_time_add_up_to_the_steps() -> None:
    trace = shared(FSDP[1])
    found = summarise_rank(trace.tables)
    events = [e for e in activities(FSDP[1]) if not e["talks"]]
    assert found["kernels"]["total_ns"].sum() == sum(e["end"] - e["start"] for e in events)
    assert found["kernels"]["count"].sum() == len(events)
    for by, rows in found["places"].group_by("by"):
        assert rows["total_ns"].sum() == found["kernels"]["total_ns"].sum(), by
    causes = found["idle"].filter(by="cause")
    # What lies between the windows of two steps is in neither.
    assert 0.999 * trace.idle().idle_ns < causes["total_ns"].sum() <= trace.idle().idle_ns


def test_what_has_no_row_of_its_own_is_one_row_without_a_name(tmp_path: Path) -> None:
    count = MAX_ROWS + 50
    events = []
    for number in range(count):
        events += [launch(number, 100 * number), kernel(number, 100 * number + 10, 1 + number % 90, name=f"k{number}")]
    kernels: pl.DataFrame = summarise_rank(opened(tmp_path, events).tables)["kernels"]
    assert kernels.height == MAX_ROWS + 1
    rest = kernels.filter(pl.col("name").is_null()).row(0, named=True)
    durations = sorted((1000 * (1 + number % 90) for number in range(count)), reverse=True)
    assert rest["count"] == 50
    assert rest["total_ns"] == sum(durations[MAX_ROWS:])


def test_a_trace_without_activities_has_empty_tables(tmp_path: Path) -> None:
    found = summarise_rank(opened(tmp_path, [launch(1, 5)]).tables)
    assert {name: frame.height for name, frame in found.items()} == dict.fromkeys(SUMMARY, 0)
