"""Windows of steps: planted programs by hand, and every nanosecond counted one by one."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from helpers import DATA, TORCH, examples
from thence.analysis.steps.windows import STEP, steps
from thence.attribution.attribute import attribute
from thence.errors import MissingData
from thence.model.intervals import gaps
from thence.model.tables import GPU, HOST, Tables

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
Host = tuple[str, str, int, int]
Work = tuple[str, int, int, int]


def program(ranges: list[tuple[int, int]], launches: list[int], work: list[Work]) -> Tables:
    """Steps (begin, end), when each activity was launched, and activities (name, stream, start, duration)."""
    rows: list[Host] = [(f"ProfilerStep#{n}", "step", b, e - b) for n, (b, e) in enumerate(ranges)]
    rows += [("cudaLaunchKernel", "runtime", begin, 1) for begin in launches]
    correlation = [None] * len(ranges) + list(range(1, len(launches) + 1))
    host = HOST.frame(
        {
            "rank": [0] * len(rows),
            "process": [1] * len(rows),
            "thread": [1] * len(rows),
            "name": [name for name, *_ in rows],
            "category": [category for _, category, _, _ in rows],
            "start": [start for *_, start, _ in rows],
            "duration": [duration for *_, duration in rows],
            "correlation": correlation,
        }
    )
    gpu = GPU.frame(
        {
            "rank": [0] * len(work),
            "device": [0] * len(work),
            "stream": [stream for _, stream, _, _ in work],
            "kind": ["kernel"] * len(work),
            "name": [name for name, *_ in work],
            "start": [start for _, _, start, _ in work],
            "duration": [duration for *_, duration in work],
            "correlation": list(range(1, len(work) + 1)),
        }
    )
    order = host.with_row_index().sort("start", "duration", descending=[False, True])["index"]
    return Tables(gpu=gpu, host=host[order])


def test_a_device_that_waits_for_the_host_has_the_steps_of_the_host() -> None:
    tables = program([(0, 100), (100, 250)], [40, 60, 190], [("a", 7, 50, 10), (NCCL, 7, 70, 20), ("a", 7, 200, 10)])
    frame = steps(attribute(tables)).frame
    assert frame.columns == list(STEP)
    shown = frame.select("start", "duration", "busy_ns", "idle_ns", "exposed_ns", "activities")
    assert shown.rows() == [(0, 100, 30, 70, 20, 2), (100, 150, 10, 140, 0, 1)]
    assert frame["number"].to_list() == [0, 1]
    assert frame["first"].to_list() == [True, False]


def test_a_device_behind_the_host_has_the_steps_of_its_work() -> None:
    tables = program([(0, 10), (10, 20)], [1, 2, 11], [("a", 7, 5, 95), (NCCL, 8, 20, 30), ("a", 7, 101, 60)])
    frame = steps(attribute(tables)).frame
    shown = frame.select("start", "duration", "busy_ns", "communication_ns", "exposed_ns", "host_ns")
    assert shown.rows() == [(0, 100, 95, 30, 0, 10), (100, 61, 60, 0, 0, 10)]


def test_work_outside_of_steps_is_in_none_of_them() -> None:
    tables = program(
        [(100, 200), (300, 400)], [10, 110, 210, 310],
        [("a", 7, 20, 100), ("a", 7, 150, 10), ("eval", 7, 220, 90), ("a", 7, 350, 70)],
    )  # fmt: skip
    frame = steps(attribute(tables)).frame
    assert frame.select("start", "duration", "busy_ns").rows() == [(120, 80, 10), (310, 110, 70)]


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.lists(
        st.tuples(st.sampled_from(["a", NCCL]), st.integers(0, 1), st.integers(0, 90), st.integers(0, 30)),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_against_counting_every_nanosecond(lengths: list[int], work: list[Work]) -> None:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    launches = [max(0, start - 3) for _, _, start, _ in work]
    in_steps = [n for n, time in enumerate(launches) if time < ends[-1]]
    tables = program(ranges, launches, work)
    if not in_steps:
        with pytest.raises(MissingData):
            steps(attribute(tables))
        return
    frame = steps(attribute(tables)).frame
    until = 0
    for row in frame.rows(named=True):
        begin, end = row["start"], row["start"] + row["duration"]
        assert begin >= until, "steps of one device overlap"
        until = end
        ran = [
            {name for name, _, start, duration in work if start <= time < start + duration}
            for time in range(begin, end)
        ]
        assert row["busy_ns"] == sum(1 for names in ran if names)
        assert row["exposed_ns"] == sum(1 for names in ran if names == {NCCL})
        assert row["communication_ns"] == sum(1 for names in ran if NCCL in names)
    assert int(frame["activities"].sum()) == len(in_steps)
    if len(in_steps) == len(work):  # then no time at which something ran is outside
        inside = [t for b, d in frame.select("start", "duration").rows() for t in range(b, b + d)]
        assert all(t in inside for _, _, start, duration in work for t in range(start, start + duration))


def test_steps_of_a_recording_are_all_of_its_idle_time() -> None:
    trace = thence.open(TORCH / "torch_compile_rank0.json.gz").tables
    frame = steps(trace).frame
    start = trace.gpu["start"].to_numpy()
    finish = start + trace.gpu["duration"].to_numpy()
    begin, end = gaps(start, finish)
    opened, closed = frame["start"].to_numpy(), (frame["start"] + frame["duration"]).to_numpy()
    before, after = start.min() - opened.min(), closed.max() - finish.max()
    between = (opened[1:] - closed[:-1]).sum()
    assert frame["idle_ns"].sum() == (end - begin).sum() + before + after - between


def test_executions_of_the_program_are_the_steps_where_there_are_no_others() -> None:
    trace = thence.open(DATA / "nsight" / "jax_train.sqlite.gz").tables
    found = steps(trace)
    assert found.kind == "program"
    assert found.frame["step"].str.starts_with("jit_train_step#").all()
    assert found.frame.height == trace.programs.filter(pl.col("name") == "jit_train_step").height


def test_without_steps_the_answer_says_what_records_them() -> None:
    with pytest.raises(MissingData, match="nothing marks steps"):
        steps(attribute(program([], [1], [("a", 7, 5, 5)])))
