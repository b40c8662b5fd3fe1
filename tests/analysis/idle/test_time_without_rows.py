"""The cause of time in which nothing of a process was recorded: against traces with stacks, without their frames."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

import thence
from helpers import STACK, TORCH, event, kernel, launch, opened
from thence.analysis.idle.causes import idle_causes
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables

MAIN = 100
"""Process, and its main thread."""


def without_python(tables: Tables) -> Tables:
    """The tables as the producer writes them without stacks: rows of Python are gone."""
    host = tables.host
    kept = ~host["category"].is_in(["python", "module"]).to_numpy()
    place = np.cumsum(kept) - 1
    parent = host["parent"].fill_null(NO_ROW).to_numpy().astype(np.int64)
    while (gone := (parent != NO_ROW) & ~kept[parent]).any():
        parent[gone] = parent[parent[gone]]
    forward = host["forward"].fill_null(NO_ROW).to_numpy().astype(np.int64)

    def moved(rows: Any) -> pl.Series:
        return pl.Series(np.where(rows == NO_ROW, NO_ROW, place[rows])).replace(NO_ROW, None)

    def renumbered(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(host=pl.Series(place[frame["host"].to_numpy()]).cast(pl.Int32))

    rows = host.with_columns(parent=moved(parent).cast(pl.Int32), forward=moved(forward).cast(pl.Int32))
    return replace(
        tables, host=rows.filter(pl.Series(kept)), events=renumbered(tables.events),
        waits=renumbered(tables.waits),
    )  # fmt: skip


@pytest.mark.parametrize("path", [STACK, TORCH / "checkpoints" / "with_stacks.json.gz"])
def test_what_is_told_without_stacks_is_what_stacks_say(path: Path | str) -> None:
    trace = thence.open(path)
    silent = replace(trace, recorded=without_python(trace.recorded))
    told = idle_causes(silent.whole).filter(pl.col("cause") == "host", pl.col("host").is_null())
    assert told.height
    shown: dict[str, int] = {}
    recorded = idle_causes(trace.whole).with_columns(pl.col("cause").cast(pl.String))
    until = pl.col("start") + pl.col("duration")
    for start, end in told.select("start", until.alias("end")).rows():
        inside = recorded.select("cause", ns=pl.min_horizontal(until, end) - pl.max_horizontal("start", start)).filter(
            pl.col("ns") > 0
        )
        for cause, ns in inside.rows():
            shown[cause] = shown.get(cause, 0) + ns
    # Frames also tell what of the program it is, such as a data loader; it is never anything else.
    assert set(shown) <= {"python", "host", "loader", "gc", "compile"}
    assert shown["python"] > 0.8 * sum(shown.values())


def op(name: str, start: float, duration: float, thread: int = MAIN) -> dict[str, Any]:
    return event("cpu_op", name, start, duration, pid=MAIN, tid=thread)


def launched(number: int, start: float, thread: int = MAIN) -> dict[str, Any]:
    return launch(number, start) | {"pid": MAIN, "tid": thread}


def named(thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": MAIN, "tid": thread, "args": {"name": name}}


def outcome(folder: Path, *rows: dict[str, Any]) -> list[tuple[str, str | None, int]]:
    """Cause, reason and us of what is idle before the second launch."""
    events = [*rows, kernel(1, 20, 10), kernel(2, 100, 10)]
    pieces = idle_causes(opened(folder, events).tables)
    before = pieces.filter(pl.col("cause") != "launch").with_columns(pl.col("duration") // 1000)
    return before.select("cause", "reason", "duration").rows()


def test_the_main_thread_of_a_python_program_runs_it_between_operators(tmp_path: Path) -> None:
    rows = [op("aten::add", 5, 15), launched(1, 10), op("aten::add", 85, 15), launched(2, 90)]
    # Idle from 30: 55 us until the operator, 5 until its launch.
    for number, name in enumerate(("thread 100 (python3)", "MainThread", "pt_main_thread")):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = outcome(folder, *rows, named(MAIN, name))
        assert found == [("host", None, 55), ("operator", None, 5)]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        # another program's main thread; a thread that is not the main one; no operators at all
        ([op("aten::add", 5, 15), launched(1, 10), launched(2, 90), named(MAIN, "trainer")], "outside"),
        ([op("aten::add", 5, 15, 7), launched(1, 10, 7), launched(2, 90, 7)], "outside"),
        ([launched(1, 10), launched(2, 90), named(MAIN, "python3")], "only_calls"),
    ],
)  # fmt: skip
def test_without_evidence_of_the_main_thread_it_is_unknown(
    tmp_path: Path, rows: list[dict[str, Any]], reason: str
) -> None:
    assert outcome(tmp_path, *rows) == [("unknown", reason, 60)]


def test_before_the_main_thread_is_seen_it_is_unknown(tmp_path: Path) -> None:
    rows = [launched(1, 10, 7), op("aten::add", 70, 15), launched(2, 90), named(MAIN, "python3")]
    # Idle from 30: until 70 nothing shows the main thread; then its operator, then 5 us of the program.
    assert outcome(tmp_path, *rows) == [("unknown", "outside", 40), ("operator", None, 15), ("host", None, 5)]


def test_the_critical_path_names_the_same_time_alike(tmp_path: Path) -> None:
    """A worker launches while the main thread is in an operator (20 to 40) and in nothing recorded (40 to 60)."""
    rows = [
        op("aten::add", 0, 5), op("aten::add", 20, 20), op("aten::add", 100, 5), named(MAIN, "python3"),
        launched(1, 10, 7), launched(2, 60, 7),
        kernel(1, 15, 3), kernel(2, 70, 10),
    ]  # fmt: skip
    trace = opened(tmp_path, rows)
    idle = trace.idle().unnamed.filter(pl.col("cause") != "launch")
    # From the first kernel's end at 18: 2 us of the program, the operator, 20 us of the program until the launch.
    assert idle.select("start", "duration", pl.col("cause").cast(pl.String)).rows() == [
        (18_000, 2_000, "host"), (20_000, 20_000, "operator"), (40_000, 20_000, "host"),
    ]  # fmt: skip
    path = trace.critical_path().filter(pl.col("kind") == "host")
    for start, duration, cause in idle.select("start", "duration", "cause").rows():
        inside = path.filter(pl.col("start") < start + duration, pl.col("start") + pl.col("duration") > start)
        assert set(inside["cause"]) == {cause}


@pytest.mark.parametrize("name", ["torch_eager_rank0", "torch_compile_rank0"])
def test_what_idle_calls_host_is_host_on_the_critical_path(name: str) -> None:
    trace = thence.open(TORCH / f"{name}.json.gz")
    idle = trace.idle().unnamed.filter(pl.col("cause") == "host").sort("start")
    begins, ends = idle["start"].to_numpy(), (idle["start"] + idle["duration"]).to_numpy()
    path = trace.critical_path().filter(pl.col("kind") == "host").sort("start")
    middle = (path["start"] + path["duration"] // 2).to_numpy()
    at = np.searchsorted(begins, middle, side="right") - 1
    same = path.filter(pl.Series((at >= 0) & (middle < ends[at])))
    assert same.height > 100
    assert "unknown" not in set(same["cause"])  # a few are of operators of another thread
    assert (same["cause"] == "host").mean() > 0.9
