"""Recordings of few steps of many: which steps they have, what stays on disk, and what asks for more."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from recorder_programs import description, program
from thence.capture.recorder.options import Sampling
from thence.capture.session.step_plans import SampledSteps

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000


def planned(plan: SampledSteps, steps: int, durations: dict[int, int] | None = None) -> list[int]:
    """The numbers of the steps that are recorded; a step takes 1 ms unless ``durations`` states another."""
    recorded = []
    previous = False
    for number in range(steps):
        records = plan.records(number)
        if records:
            recorded.append(number)
        first_after = previous and not records
        duration = (durations or {}).get(number, MS)
        plan.lasted(number, duration, recorded=records, counted=plan.compares(number) and not first_after)
        previous = records
    return recorded


def test_windows_are_so_many_steps_apart_and_have_one_step_more() -> None:
    plan = SampledSteps(Sampling(every=50, steps=2, budget=0), lambda: True)
    assert planned(plan, 170) == [0, 1, 2, 50, 51, 52, 100, 101, 102, 150, 151, 152]
    assert plan.again("step").records(0)


def test_windows_are_further_apart_where_they_would_cost_more_than_the_budget() -> None:
    # Each window costs 4 ms on its first step, and 2 ms on the first step after it: 6 ms.
    dear = dict.fromkeys(range(9000), 5 * MS)
    for alone, expected in ((True, 1200), (False, 50)):
        plan = SampledSteps(Sampling(every=50, steps=1, budget=0.01), lambda alone=alone: alone)
        began = [0]
        for number in range(8000):
            records = plan.records(number)
            if records and number - began[-1] > 1:
                began.append(number)
            place = number - began[-1]
            duration = dear[number] if place == 0 else 3 * MS if place == 2 else MS
            plan.lasted(number, duration, recorded=records, counted=plan.compares(number) and place not in (0, 2))
        assert plan.interval == expected  # 6 ms / (half of 1 % of 1 ms a step)
        assert plan.facts()["cost_share"] == pytest.approx(6 / expected)
        assert plan.facts()["window_cost_ns"] == 6 * MS


def test_the_cost_of_a_window_has_the_time_of_the_recorder_itself() -> None:
    """It takes 0.002 ms of each step of 1 ms, and 4 ms after each window."""
    spent = [0]
    plan = SampledSteps(Sampling(every=50, steps=1, budget=0.01), lambda: True, own=lambda: spent[0])
    began, previous = 0, False
    for number in range(200_000):
        records = plan.records(number)
        spent[0] += 2000
        if records and not previous:
            began = number
            spent[0] += 4 * MS
        previous = records
        plan.lasted(number, MS, recorded=records, counted=plan.compares(number) and number - began not in (0, 2))
    # Windows take 4 ms, steps 0.2 % of their time: 0.3 % are left for windows.
    assert plan.interval == pytest.approx(4 / 0.003, rel=0.02)
    assert plan.facts()["cost_share"] == pytest.approx(0.005, rel=0.02)


def test_the_upper_end_of_what_windows_cost_is_kept_to_and_a_checkpoint_in_one_hardly_counts() -> None:
    """Of 30 windows, every second one costs 2 ms and the others 6 ms, in steps of 1 ms; the 20th one lasts 30 s."""
    plan = SampledSteps(Sampling(every=50, steps=1, budget=0.01), lambda: True)
    number, windows, intervals = 0, 0, []
    while plan.windows < 31:
        recorded = plan.records(number)
        first, windows = plan.windows > windows, plan.windows
        if first:
            intervals.append(plan.interval)
        took = MS * (1 + first * (2 if windows % 2 else 6) + 30_000 * (first and windows == 20))
        plan.lasted(number, took, recorded=recorded, counted=plan.compares(number) and not recorded)
        number += 1
    # 18 windows: a mean of 4 ms, deviation 2 ms, so +- 1 ms; half of 1 % of 1 ms a step.
    assert intervals[19] == pytest.approx((4 + 2.1 * 2 / 18**0.5) / 0.005, rel=0.05)
    assert max(intervals[20:]) < 1.5 * intervals[19]


def test_a_recorder_that_takes_more_than_the_budget_still_records_a_window_in_ten_minutes() -> None:
    """It takes a fifth of each step of a second."""
    spent = [0]
    plan = SampledSteps(Sampling(every=50, steps=1, budget=0.01), lambda: True, own=lambda: spent[0])
    for number in range(6_000):
        records = plan.records(number)
        spent[0] += 200 * MS
        plan.lasted(number, 1000 * MS, recorded=records, counted=plan.compares(number) and not records)
    assert plan.interval == 600
    assert plan.windows >= 9


def test_a_slow_step_is_followed_by_a_window_and_the_limit_is_stated() -> None:
    plan = SampledSteps(Sampling(every=1000, budget=0), lambda: True)
    jitter = {number: MS + (number % 5) * 1000 for number in range(400)}
    found = planned(plan, 400, jitter | {200: 9 * MS, 300: 9 * MS})
    assert found == [0, 1, 201, 202]  # the second one within a minute is not followed by another window
    (request,) = plan.requests
    assert request["step"] == 201
    # Values of 1.000 to 1.004 ms, each fifth: the median deviation from their median is 0.001 ms.
    assert request["why"].startswith(
        "step 200 took 9.000 ms; the median of 64 before it is 1.002 ms, their deviation 0.001"
    )


def test_no_step_of_a_varying_program_is_slow() -> None:
    plan = SampledSteps(Sampling(every=1000, budget=0), lambda: True)
    planned(plan, 900, {number: MS * (1 + number % 3) for number in range(900)})
    assert not plan.requests


@pytest.mark.parametrize("given", [{"every": 3}, {"every": 5, "steps": 2}, {"ring": 0}, {"budget": 1.0}])
def test_sampling_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(thence.UsageError):
        Sampling(**given)


LOOP = """
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=10, ring=3, budget=0, slow_steps=False), flush_seconds=0.1
        )
        with thence.record(OUT, options) as recording, thence.mark("training"):
            for step in range(400):
                number, now = fake.launch(), time.time_ns()
                fake.emit(kernel(f"k{step}", now, now + 100_000, correlationId=number, queued=now))
                time.sleep(0.001)
                EXTRA
                recording.step()
"""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 steps of a kernel each; two of ten are recorded, and the last windows stay. Step 185 asks for a window."""
    out = tmp_path_factory.mktemp("sampled")
    program(LOOP.replace("EXTRA", "os.kill(os.getpid(), 12) if step == 185 else None"), out)
    return out


def numbers(trace: thence.Trace) -> list[int]:
    """The steps of the kernels of a trace."""
    return trace.activities["name"].cast(pl.String).str.strip_prefix("k").cast(pl.Int64).to_list()


def test_the_last_windows_and_those_that_were_asked_for_stay_and_the_rest_is_counted(sampled: Path) -> None:
    about = description(sampled)
    trace = thence.open(sampled)
    found = numbers(trace)
    # SIGUSR2 in step 185: a window from 186 on; the others stay where they are.
    planned_steps = sorted({n for n in range(400) if n % 10 < 2} | {186, 187})
    assert set(found) <= set(planned_steps)
    kept_for_request = [n for n in found if n < 300]
    assert {186, 187} <= set(kept_for_request)
    last = [n for n in found if n >= 300]
    assert last == planned_steps[-len(last) :]
    assert 6 <= len(last) < 60
    assert about["counts"]["kernels"] == len(found)
    assert about["ring"]["rows"]["kernels"] == len(planned_steps) - len(found) > 0
    assert about["sampling"]["requests"] == [{"step": 186, "window": 20, "why": "SIGUSR2"}]
    on_disk = sum(1 for _ in sampled.rglob("kernels-*"))
    assert on_disk < about["parts"]["kernels"]


def test_what_was_deleted_is_no_loss_and_labels_that_began_before_stay(sampled: Path) -> None:
    trace = thence.open(sampled)
    assert trace.check().sound
    assert trace.meta.warnings == ()
    assert set(trace.activities["label"].cast(pl.String)) == {"training"}
    notes = " ".join(trace.meta.notes)
    assert "windows of 1 step were recorded, one in 10 steps" in notes
    assert "were deleted, with" in notes
    assert "recorded out of turn from step 186 on: SIGUSR2" in notes
    times = trace.tables.step_times
    assert times.height >= 399
    assert times.filter("recorded").height == pytest.approx(80, abs=2)


def test_a_part_that_is_lost_is_told_from_those_that_were_deleted(sampled: Path, tmp_path: Path) -> None:
    (folder,) = (path.parent for path in sampled.rglob("recording.json"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    newest = max(copy.glob("kernels-*"))
    newest.unlink()
    number = int(newest.stem.partition("-")[2])
    trace = thence.open(copy)
    assert any(f"table kernels: part {number} is missing" in text for text in trace.meta.warnings)
    # A description that claims anything else is refused or bounded.
    about = json.loads((copy / "recording.json").read_text())
    about["ring"]["parts"]["kernels"] = [0, 2**63, 5]
    (copy / "recording.json").write_text(json.dumps(about))
    assert any("recording.json cannot be read" in text for text in thence.open(copy).meta.warnings)


def test_a_file_asks_all_processes_and_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    body = """
        import signal
        heard = []
        signal.signal(signal.SIGUSR2, lambda number, frame: heard.append(number))
        options = thence.RecordOptions(sampling=thence.Sampling(every=1000, budget=0, slow_steps=False))
        with thence.record(OUT, options) as recording:
            for step in range(600):  # the file is seen within a second
                launch(f"k{step}", step + 1)
                if step == 100:
                    os.kill(os.getpid(), signal.SIGUSR2)
                    (OUT / "record-now").touch()
                time.sleep(0.003)
                recording.step()
        assert heard == [signal.SIGUSR2]
    """
    program(body, tmp_path)
    found = numbers(thence.open(tmp_path))
    assert found[:2] == [0, 1]
    asked = found[2:]
    assert len(asked) == 2
    assert 100 < asked[0] == asked[1] - 1 < 500
    (request,) = description(tmp_path)["sampling"]["requests"]
    assert request["why"] == "record-now was touched"


def test_the_command_line_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from click.testing import CliRunner

    from thence.cli.record import command

    refused = CliRunner().invoke(command, ["--every", "30", "--", "true"])
    assert isinstance(refused.exception, thence.UsageError)
    assert "needs --always" in str(refused.exception)
    shown = tmp_path / "shown"
    script = f"import os; open({str(shown)!r}, 'w').write(os.environ['THENCE_RECORD'])"
    given = ["--always", "--every", "30", "--budget", "2", "-o", str(tmp_path / "run"), "--", "python3", "-c", script]
    CliRunner().invoke(command, given)
    capsys.readouterr()
    sampling = json.loads(shown.read_text())["options"]["sampling"]
    assert sampling == {"every": 30, "steps": 1, "ring": 20, "ring_megabytes": 256, "budget": 0.02, "slow_steps": True}
    assert "THENCE_RECORD" not in os.environ


def test_places_that_a_thread_noted_in_a_part_that_was_deleted_still_hold(tmp_path: Path) -> None:
    # As a thread of autograd does, the second thread notes its place once; all of it launches much later.
    program(
        """
        from thence.capture.boundaries.places import PHASE, Place
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=10, ring=1, budget=0, slow_steps=False), flush_seconds=0.1
        )
        go, ended, done = threading.Event(), threading.Event(), False
        def other():
            recording.noted.log.note(recording.noted.places.number(Place(PHASE, 0, "backward")))
            while go.wait() and not done:
                go.clear()
                launch(f"b{step}")
                ended.set()
        with thence.record(OUT, options) as recording:
            step = 0
            thread = threading.Thread(target=other)
            thread.start()
            for step in range(300):
                launch(f"f{step}")
                go.set()
                ended.wait()
                ended.clear()
                time.sleep(0.002)
                recording.step()
            done = True
            go.set()
            thread.join()
        """,
        tmp_path,
    )
    assert description(tmp_path)["ring"]["windows"] > 10
    trace = thence.open(tmp_path)
    phases = trace.activities.select(pl.col("name", "phase").cast(pl.String)).rows()
    assert len(phases) >= 4
    assert {(name[0], phase) for name, phase in phases} == {("f", None), ("b", "backward")}
    assert trace.meta.warnings == () or all("stays attached" in text for text in trace.meta.warnings)


def test_the_end_of_a_window_does_not_wait_for_parts_that_are_due(tmp_path: Path) -> None:
    """The thread that writes has parts to write when a window ends, which takes it 0.3 s each time."""
    body = """
        from thence.capture.recorder import recorder as module
        module._LOOK_SECONDS = module._FIRST_FLUSH_SECONDS = 25.0
        sampling = thence.Sampling(every=10, budget=0, slow_steps=False)
        recording = thence.record(OUT, thence.RecordOptions(sampling=sampling, flush_seconds=25.0))
        recording.start()
        recorder = recording._recorder
        save, flush, pause, took = recorder._save, recorder._flush, recorder.pause, []
        recorder._save = lambda: (save(), time.sleep(0.3))
        recorder._flush = lambda **how: (time.sleep(0.1), flush(**how))
        def timed(**how):
            begin = time.monotonic()
            recorder._due = begin - 1
            recorder._buffers.filled.put(None)
            pause(**how)
            took.append(time.monotonic() - begin)
        recorder.pause = timed
        while recorder.sampling is None:
            recorder._due = 0.0
            recorder._buffers.filled.put(None)
            time.sleep(0.1)
        for step in range(20):
            launch("k")
            recording.step()
        print(took)
        recording.stop()
    """
    took = json.loads(program(body, tmp_path).stdout)
    assert len(took) == 2
    assert max(took) < 10  # 0.1 s each; 25 s more where the thread sleeps until the next parts are due
