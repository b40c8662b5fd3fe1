"""Log directories with several runs, and files that hold one rank: which of them are one job."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, kernel, launch, run_thence, written

if TYPE_CHECKING:
    from pathlib import Path

SECOND = 10**9
MORNING = 1_700_000_000 * SECOND  # Unix ns


def trace(path: Path, began: int, rank: int | None = None, duration: int = 5) -> Path:
    """One kernel, a µs after the clock of the file began, lasting a number of µs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"baseTimeNanoseconds": began}
    if rank is not None:
        facts["distributedInfo"] = {"rank": rank}
    return written(path, [launch(1, 0), kernel(1, 1, duration)], **facts)


def durations(opened: thence.Trace) -> dict[int, int]:
    """µs by rank."""
    rows = opened.recorded.gpu.select("rank", "duration").sort("rank").iter_rows()
    return {rank: duration // 1000 for rank, duration in rows}


def busy(path: Path, **options: Any) -> int:
    """The ns of all activities."""
    return int(thence.open(path, **options).recorded.gpu["duration"].sum())


def test_the_newest_run_of_a_jax_log_directory(tmp_path: Path) -> None:
    runs = tmp_path / "plugins" / "profile"
    for name, source in (("2026_01_02_10_00_00", "default"), ("2026_01_02_09_00_00", "moved")):
        (runs / name).mkdir(parents=True)
        shutil.copy(DATA / "jax" / f"streams_{source}.xplane.pb", runs / name / "host.xplane.pb")
        os.utime(runs / name / "host.xplane.pb", (1, 1))  # what a copy says of the time is nothing
    alone = {source: busy(DATA / "jax" / f"streams_{source}.xplane.pb") for source in ("default", "moved")}
    newest = thence.open(tmp_path)
    assert newest.recorded.gpu["duration"].sum() == alone["default"]
    (note,) = newest.meta.left_out
    assert "holds 2 runs; only the newest, 2026_01_02_10_00_00, is read" in note
    assert "2026_01_02_09_00_00" in note
    assert newest.check().all_notes()[0] == newest.steps().all_notes()[0] == note
    assert busy(tmp_path, run="2026_01_02_09_00_00") == alone["moved"]
    assert busy(tmp_path, add=True) == alone["default"] + alone["moved"]


def test_runs_without_a_time_in_their_name_go_by_the_time_of_their_files(tmp_path: Path) -> None:
    runs = tmp_path / "plugins" / "profile"
    for name, changed, source in (("b", 1000, "moved"), ("a", 2000, "default")):
        (runs / name).mkdir(parents=True)
        path = runs / name / "host.xplane.pb"
        shutil.copy(DATA / "jax" / f"streams_{source}.xplane.pb", path)
        os.utime(path, (changed, changed))
    (note,) = thence.open(tmp_path).meta.left_out
    assert "the newest, a, is read;" in note


def test_the_newest_cycle_of_each_process(tmp_path: Path) -> None:
    for rank, pid in ((0, 71), (1, 72)):
        for cycle in range(3):
            began = MORNING + 60 * cycle * SECOND
            name = f"host_{pid}.{began + rank}.pt.trace.json"
            trace(tmp_path / name, began, rank, 10 * cycle + rank + 1)
    newest = thence.open(tmp_path)
    assert durations(newest) == {0: 21, 1: 22}
    (note,) = newest.meta.left_out
    assert note.startswith("left out: 4 files of earlier profiling cycles of the same processes")
    assert durations(thence.open(tmp_path, run=str(MORNING + 1))) == {1: 2}
    assert len(thence.open(tmp_path, add=True).tables.gpu) == 6


def test_a_run_that_began_anew_is_not_filled_up_with_ranks_of_the_last_one(tmp_path: Path) -> None:
    for rank in range(4):
        trace(tmp_path / f"first_{rank}.json", MORNING, rank, 10 + rank)
    for rank in range(2):
        trace(tmp_path / f"again_{rank}.json", MORNING + 60 * SECOND, rank, 20 + rank)
    newest = thence.open(tmp_path)
    assert durations(newest) == {0: 20, 1: 21}
    (note,) = newest.meta.left_out
    assert "holds several runs; only the newest, 2 of 6 files, is read; left out: " in note
    assert "first_0.json" in note
    assert "and 1 more" in note


def test_of_older_files_that_state_a_rank_only_the_first_bytes_are_read(tmp_path: Path) -> None:
    """An older file whose events are no JSON is an error if it is decoded."""
    for number in range(6):
        run, rank = divmod(number, 2)
        facts = {"baseTimeNanoseconds": MORNING + run * SECOND, "distributedInfo": {"rank": rank}}
        events = [{"ph": "X", "ts": 1.5}] if run < 2 else [launch(1, 0), kernel(1, 1, 10 + rank)]
        content = json.dumps({**facts, "traceEvents": events})
        (tmp_path / f"{number}.json").write_text(content if run == 2 else content.replace("1.5}", "1.5, "))
    opened = thence.open(tmp_path)
    assert durations(opened) == {0: 10, 1: 11}
    assert "2 of 6 files, is read; left out: 0.json, 1.json, 2.json and 1 more" in opened.meta.left_out[0]
    with pytest.raises(thence.DamagedInput):
        thence.open(tmp_path, add=True)


def test_runs_in_folders(tmp_path: Path) -> None:
    for number, run in enumerate(("baseline", "tuned")):
        for rank in range(2):
            path = tmp_path / run / f"rank{rank}.json"
            trace(path, MORNING + 60 * number * SECOND, None, 10 * number + rank + 1)
    assert durations(thence.open(tmp_path)) == {0: 11, 1: 12}
    assert durations(thence.open(tmp_path, run="baseline")) == {0: 1, 1: 2}
    with pytest.raises(thence.InputError, match="holds no run 'best'; expected one of: baseline, tuned"):
        thence.open(tmp_path, run="best")
    with pytest.raises(thence.UsageError, match="no input is a directory"):
        thence.open(tmp_path / "tuned" / "rank0.json", run="tuned")


def test_ranks_of_one_job_in_folders_are_all_read(tmp_path: Path) -> None:
    for rank in range(3):
        trace(tmp_path / f"rank{rank}" / "trace.json", MORNING + rank, rank, rank + 1)
    opened = thence.open(tmp_path)
    assert durations(opened) == {0: 1, 1: 2, 2: 3}
    assert opened.meta.left_out == ()


def test_files_that_do_not_say_their_rank_are_one_job_if_they_ran_at_one_time(tmp_path: Path) -> None:
    at_once = [trace(tmp_path / "a" / f"{n}.json", MORNING + n * 1000, None, 9) for n in range(2)]
    assert durations(thence.open(tmp_path / "a")) == {0: 9, 1: 9}
    assert durations(thence.open(*at_once)) == {0: 9, 1: 9}
    later = trace(tmp_path / "a" / "2.json", MORNING + SECOND, None, 7)
    assert durations(thence.open(tmp_path / "a")) == {0: 7}
    with pytest.raises(thence.UsageError, match="recorded at different times"):
        thence.open(at_once[0], later)


def test_two_files_of_one_rank_are_refused_by_name_unless_added(tmp_path: Path) -> None:
    first = trace(tmp_path / "a.json", MORNING, 3, 4)
    second = trace(tmp_path / "b.json", MORNING, 3, 6)
    with pytest.raises(thence.UsageError, match=r"a\.json and .*b\.json both hold rank 3"):
        thence.open(first, second)
    assert durations(thence.open(first, second, add=True)) == {3: 4, 4: 6}
    refused = run_thence("report", first, second)
    assert refused.returncode == 2
    assert "both hold rank 3: they are not one job" in refused.stderr.decode()
    assert run_thence("report", first, second, "--add").returncode == 0


def test_two_directories_of_one_rank_are_refused_by_name(tmp_path: Path) -> None:
    for run in ("a", "b"):
        trace(tmp_path / run / "rank0.json", MORNING)
    with pytest.raises(thence.UsageError, match="both hold rank 0"):
        thence.open(tmp_path / "a", tmp_path / "b")


def test_a_file_that_is_given_counts_even_if_a_newer_run_is_beside_it(tmp_path: Path) -> None:
    older = trace(tmp_path / "host_1.1700000000000000000.pt.trace.json", MORNING, 0, 3)
    trace(tmp_path / "host_1.1700000060000000000.pt.trace.json", MORNING + 60 * SECOND, 0, 4)
    assert durations(thence.open(older)) == {0: 3}


def test_inputs_in_a_list_are_the_same_as_one_by_one(tmp_path: Path) -> None:
    paths = [trace(tmp_path / f"rank{rank}.json", MORNING, rank, rank + 1) for rank in range(3)]
    assert durations(thence.open(paths)) == {0: 1, 1: 2, 2: 3}
    assert durations(thence.open(paths[:2], str(paths[2]))) == {0: 1, 1: 2, 2: 3}
    with pytest.raises(thence.UsageError, match="no input was given"):
        thence.open([])


def test_the_command_line_says_which_run_it_read(tmp_path: Path) -> None:
    for number in range(2):
        path = tmp_path / f"run{number}" / "rank0.json"
        trace(path, MORNING + 60 * number * SECOND, 0, 3 + number)
    shown = run_thence("report", tmp_path, COLUMNS="300")
    assert shown.returncode == 0
    assert "holds several runs; only the newest, 1 of 2 files" in shown.stdout.decode()
    chosen = run_thence("report", tmp_path, "--run", "run0", "--format", "json")
    assert b'"sum_ns": 3000' in chosen.stdout
