"""Idle time of a selection: that of its steps, programs or time, and unknown where only names are selected."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thence
from helpers import DATA, STACK, kernel, launch, opened, recording, run_thence, shared
from thence.analysis.selection.windows import busy_in_windows, cut_to_windows, windows_of_selection
from thence.model.selection import Selection

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("read_once")

EAGER = recording("torch_eager_rank0")
RECORDED = DATA / "jax" / "recording"


def everywhere(trace: thence.Trace) -> set[int | None]:
    """Idle time by every verb that states it."""
    steps = trace.selection.steps
    found = {trace.report().idle_ns, trace.idle().idle_ns}
    frames = trace.flame("ops", idle="include").nodes.filter("idle")
    found.add(int(frames["self_ns"].sum()) if frames.height else None)
    if steps is not None:
        found.add(int(trace.steps().frame["idle_ns"].sum()))
    return found


def test_time_outside_of_what_a_name_selects_is_not_idle() -> None:
    whole = shared(EAGER)
    selected = whole.select(only="attention")
    assert everywhere(selected) == {None}
    assert selected.report().idle_is == "unknown"
    assert "other work ran between" in selected.report().idle_unknown
    assert selected.idle().causes.is_empty()
    assert selected.idle().pieces.is_empty()


def test_the_time_of_warm_up_that_is_left_out_is_not_idle() -> None:
    selected = shared(RECORDED).select(warm_up="heuristic")
    assert everywhere(selected) == {None}
    assert "--warm-up heuristic left out work" in selected.report().idle_unknown
    assert everywhere(shared(RECORDED).select(warm_up="keep")) == everywhere(shared(RECORDED))


@pytest.mark.parametrize(("path", "steps"), [(EAGER, "typical"), (STACK, "1:2"), (RECORDED, "0:2")])
def test_idle_time_of_selected_steps_is_that_of_their_windows(path: Path, steps: str) -> None:
    trace = shared(path).select(steps=steps)
    (idle,) = everywhere(trace)
    assert idle is not None
    frame = shared(path).steps().frame
    kept = frame.filter(pl.col("left_out").is_null()) if steps == "typical" else frame.filter(
        pl.col("number").is_between(int(steps[0]), int(steps[2]), closed="left")
    )  # fmt: skip
    assert idle == kept["idle_ns"].sum()
    summary = trace.report()
    assert summary.span_ns == kept["duration"].sum()
    assert summary.busy_ns == kept["busy_ns"].sum()
    assert summary.windows == kept.height
    named = shared(path).select(steps=steps, only=str(trace.tables.gpu["name"].cast(pl.String)[0][:6]))
    assert everywhere(named) == {idle}


def test_idle_time_of_a_program_is_that_inside_its_executions() -> None:
    whole = shared(RECORDED)
    trace = whole.select(program="jit_chain")
    (idle,) = everywhere(trace)
    rows = whole.tables.programs.filter(pl.col("name").cast(pl.String) == "jit_chain")
    ran = np.zeros(0, np.int64)
    for start, duration in rows.select("start", "duration").rows():
        inside = whole.tables.gpu.filter(
            pl.col("start") < start + duration, pl.col("start") + pl.col("duration") > start
        )
        nanoseconds = np.zeros(duration, np.bool_)
        for begin, length in inside.select("start", "duration").rows():
            nanoseconds[max(begin - start, 0) : max(begin + length - start, 0)] = True
        ran = np.append(ran, nanoseconds.sum())
    assert trace.report().span_ns == rows["duration"].sum()
    assert trace.report().busy_ns == ran.sum()
    assert idle == rows["duration"].sum() - ran.sum()


def test_the_main_program_is_found_and_others_are_refused_with_names_like_it() -> None:
    whole = shared(RECORDED)
    main = whole.select(program="main")
    assert set(main.tables.places["program"].cast(pl.String)) == {"jit_chain"}
    assert main.report().sum_ns == whole.select(program="jit_chain").report().sum_ns
    with pytest.raises(thence.UsageError, match=r"no XLA program is named 'chain'.*jit_chain"):
        whole.select(program="chain")
    with pytest.raises(thence.MissingData, match="holds no XLA programs"):
        shared(EAGER).select(program="main")


def test_a_program_is_a_selection_of_every_verb_that_selects(tmp_path: Path) -> None:
    for verb in ("report", "idle", "steps", "programs", "streams"):
        assert run_thence(verb, RECORDED, "--program", "main").returncode == 0, verb
    flame = ("flame", RECORDED, "--program", "main", "-o", tmp_path / "flame.html")
    assert run_thence(*flame).returncode == 0
    sharded = DATA / "jax" / "jax_fsdp2.xplane.pb.gz"
    for verb in ("collectives", "ranks"):
        assert run_thence(verb, sharded, "--program", "main").returncode == 0, verb
    rows = json.loads(run_thence("programs", RECORDED, "--program", "main", "--format", "json").stdout)
    assert [row["program"] for row in rows["rows"]] == ["jit_chain"]


def test_work_that_began_before_a_window_keeps_the_device_busy_in_it(tmp_path: Path) -> None:
    """A kernel on another stream runs from 10 to 200; of the window from 50 on, two short ones are selected."""
    events = [
        *(launch(1, 1), kernel(1, 10, 190, args={"stream": 9})),
        *(launch(2, 2), kernel(2, 60, 10)),
        *(launch(3, 3), kernel(3, 100, 10)),
    ]
    part = opened(tmp_path, events).select(window="50us:")
    assert part.tables.gpu.height == 2
    assert part.report().span_ns == 50_000
    assert everywhere(part) == {0, None}  # no frames of idle time, because there is none


def test_the_report_says_that_idle_time_is_unknown() -> None:
    document = json.loads(run_thence("report", EAGER, "--only", "attention", "--format", "json").stdout)
    assert (document["idle_ns"], document["idle_is"]) == (None, "unknown")
    shown = run_thence("report", EAGER, "--only", "attention").stdout.decode()
    assert "idle time is unknown: other work ran between what --only selected" in shown
    assert "idle unknown" in shown
    steps = json.loads(run_thence("idle", EAGER, "--steps", "1:2", "--format", "json").stdout)
    assert (steps["idle_ns"], steps["idle_is"]) == (shared(EAGER).steps().frame["idle_ns"][1], "exact")


def test_the_extent_of_a_whole_trace_is_from_its_first_to_its_last_activity() -> None:
    trace = shared(EAGER).tables
    gpu = trace.gpu
    last = int((gpu["start"] + gpu["duration"]).max())  # type: ignore[arg-type]
    start = int(gpu["start"].min())  # type: ignore[arg-type]
    assert windows_of_selection(trace).rows() == [(0, 0, start, last - start)]
    assert windows_of_selection(shared(EAGER).selected(Selection(only="attention")).tables).is_empty()


INTERVALS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 9)), max_size=12)


def frame_of(rows: list[tuple[int, int, int]]) -> pl.DataFrame:
    columns = {"rank": [0] * len(rows), "device": [d for d, *_ in rows],
               "start": [s for _, s, _ in rows], "duration": [n for *_, n in rows]}  # fmt: skip
    schema = {"rank": pl.Int32, "device": pl.Int32, "start": pl.Int64, "duration": pl.Int64}
    return pl.DataFrame(columns, schema).sort("rank", "device", "start")


@given(INTERVALS, INTERVALS)
def test_parts_and_cover_are_those_counted_nanosecond_by_nanosecond(
    some: list[tuple[int, int, int]], more: list[tuple[int, int, int]]
) -> None:
    disjoint: dict[int, int] = {}
    windows = []
    for device, start, length in sorted(more):
        if start >= disjoint.get(device, 0):
            windows.append((device, start, length))
            disjoint[device] = start + length
    intervals, of = frame_of(some), frame_of(windows)

    def instants(row: tuple[int, ...]) -> set[tuple[int, int]]:
        return {(row[1], t) for t in range(row[2], row[2] + row[3])}

    row, window, start, end = cut_to_windows(intervals, of)
    for r, w, s, e in zip(row, window, start, end, strict=True):
        inside = instants(intervals.row(int(r))) & instants(of.row(int(w)))
        assert inside == {(of.row(int(w))[1], t) for t in range(s, e)}
    total = sum(len(instants(i) & instants(w)) for i in intervals.rows() for w in of.rows())
    assert (end - start).sum() == total
    union: set[tuple[int, int]] = set().union(*(instants(i) for i in intervals.rows()), set())
    expected = [len(instants(w) & union) for w in of.rows()]
    assert busy_in_windows(of, intervals).tolist() == expected
