"""What changes gain in programs recorded by thence: simulated programs, without and with the change asked about.

The simulation knows nothing of thence's graph. Recordings hold no operators, but calls with begin and end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

import thence
from helpers import DATA, kernel, launch, opened
from thence.analysis.whatif.answer import PROGRAMS, WhatIf, what_if
from thence.analysis.whatif.changes import parse_change
from thence.analysis.whatif.graph import program_graph
from thence.analysis.whatif.prediction import PlainPace
from thence.attribution.attribute import attribute
from thence.errors import MissingData
from thence.model.tables import GPU, HOST, STEP_TIMES, Meta, Tables

if TYPE_CHECKING:
    from pathlib import Path

STEPS, CALL, LATENCY, QUEUE = 12, 5_000, 6_000, 400
MAIN, ENGINE = 1, 2


@dataclass(frozen=True)
class Program:
    """A step, in ns.

    Attributes:
        pause: of the host, in a range "pause".
        first: pause before the first step.
        kernels: how many "first" and "second" are launched in turns.
        host: work of the host before each launch.
        first_ns, second_ns: the kernels.
        backward: whether another thread launches the second half.
        item: whether the host waits for the copy of one number with which the step ends.
        copy: bytes of a copy of pageable memory at the end, or 0.
    """

    pause: int = 0
    first: int = 0
    kernels: int = 10
    host: int = 20_000
    first_ns: int = 10_000
    second_ns: int = 10_000
    backward: bool = False
    item: bool = True
    copy: int = 0


@dataclass
class Run:
    """Rows of the host and of the device that a run left."""

    host: list[dict[str, Any]] = field(default_factory=list)
    gpu: list[dict[str, Any]] = field(default_factory=list)
    time: int = 0
    free: int = 0

    def row(self, category: str, name: str, start: int, thread: int = MAIN, **more: Any) -> None:
        """A host row until now."""
        self.host.append(
            {"rank": 0, "process": 1, "thread": thread, "category": category, "name": name,
             "start": start, "duration": self.time - start, "correlation": None, **more}
        )  # fmt: skip

    def launch(self, name: str, took: int, thread: int = MAIN, size: int | None = None) -> None:
        """Launches a kernel or a copy to the host; the call returns as soon as the queue has room."""
        begin, number = self.time, len(self.gpu)
        start = max(begin + LATENCY, self.free + 1_000)
        self.free = start + took
        self.time = begin + CALL
        if number >= QUEUE:
            first = self.gpu[number - QUEUE]
            self.time = max(self.time, first["start"] + first["duration"] + 1_000)
        self.gpu.append(
            {"rank": 0, "device": 0, "stream": 7, "kind": "memcpy" if size else "kernel", "name": name,
             "start": start, "duration": took, "correlation": number + 1, "bytes": size}
        )  # fmt: skip
        if name.startswith("Memcpy HtoD"):
            self.time = max(self.time, self.free + 2_000)
        call = "cudaMemcpyAsync" if size else "cudaLaunchKernel"
        self.row("runtime", call, begin, thread, correlation=number + 1)

    def work(self, ns: int) -> None:
        """The host works."""
        self.time += ns


def run(program: Program) -> Run:
    """Runs it."""
    found = Run()
    found.work(program.first)
    for number in range(STEPS):
        begin = 0 if number == 0 else found.time
        start = found.time
        found.work(program.pause)
        found.row("range", "pause", start)
        half = program.kernels // 2 if program.backward else program.kernels
        for place in range(program.kernels):
            if place == half:
                called = found.time
                found.launch("seed", 2_000)  # the gradient of the loss
                found.work(300_000)  # until the engine's thread runs
            found.work(program.host)
            name, ns = (("first", program.first_ns), ("second", program.second_ns))[place % 2]
            thread = MAIN if place < half else ENGINE
            started = found.time
            found.launch(name, ns, thread)
            if thread == ENGINE:
                found.row("phase", "backward", started, ENGINE)
        if program.backward:
            found.work(50_000)
            found.row("phase", "backward", called)
        if program.copy:
            found.launch("Memcpy HtoD (Pageable -> Device)", 20_000, size=program.copy)
        found.launch("Memcpy DtoH (Device -> Pinned)", 1_000, size=4)
        if program.item:
            waited = found.time
            found.time = max(found.time + 2_000, found.free + 3_000)
            found.row("runtime", "cudaStreamSynchronize", waited)
        found.work(10_000)
        found.row("step", "step", begin)
    return found


def step_ns(found: Run) -> float:
    """Mean time of the steps after the first, from when its device has nothing left to do."""
    steps = [row for row in found.host if row["category"] == "step"]
    end = max(steps[-1]["start"] + steps[-1]["duration"], found.free)
    begin = steps[1]["start"]
    calls = {row["correlation"]: row["start"] for row in found.host if row["correlation"]}
    before = [row for row in found.gpu if calls[row["correlation"]] < begin]
    last = max(row["start"] + row["duration"] for row in before)
    return float(end - max(begin, last)) / (STEPS - 1)


def answer(
    found: Run,
    action: str,
    text: str,
    calls: list[str] | None = ["waits", "launches"],  # noqa: B006 - is not changed
    plain: PlainPace | None = None,
    step_times: list[dict[str, Any]] | None = None,
) -> WhatIf:
    """The answer for a recording of the run."""
    rows = sorted(found.host, key=lambda row: (row["thread"], row["start"], -row["duration"]))
    host = HOST.frame({name: [row[name] for row in rows] for name in rows[0]})
    gpu = GPU.frame({name: [row[name] for row in found.gpu] for name in found.gpu[0]})
    meta = Meta(facts=({"producer": "thence record", "calls": calls},))
    times = STEP_TIMES.frame({name: [row[name] for row in step_times or ()] for name in STEP_TIMES.schema})
    trace = attribute(Tables(gpu=gpu, host=host, meta=meta, step_times=times))
    return what_if(trace, program_graph(trace), [parse_change(action, text)], plain)


def with_unrecorded(found: Run, first: int, count: int) -> tuple[Run, list[dict[str, Any]]]:
    """The run without what some steps left but their marks; and rows of the table of step times."""
    steps = [row for row in found.host if row["category"] == "step"]
    begin, end = (steps[number]["start"] for number in (first, first + count))
    marks = [row for row in found.host if row["category"] == "step"]
    host = [row for row in found.host if row["category"] != "step" and not begin <= row["start"] < end]
    kept = {row["correlation"] for row in host if row["correlation"]}
    gpu = [row for row in found.gpu if row["correlation"] in kept]
    times = [
        {"rank": 0, "number": number, "start": row["start"], "duration": row["duration"],
         "recorded": not first <= number < first + count, "counted": number > 0}
        for number, row in enumerate(steps)
    ]  # fmt: skip
    return Run([*host, *marks], gpu), times


def after_ns(found: Run, action: str, text: str, part: str = "", **more: Any) -> float:
    """The step that is predicted, in ns."""
    rows = answer(found, action, text, **more).rows.filter(part=part)
    return float(rows["after_ns"].item())


def test_the_first_step_of_a_recording_is_left_out() -> None:
    program = Program(first=400_000_000)
    found = answer(run(program), "free", "label:pause")
    assert found.program == PROGRAMS[1]
    assert found.steps == STEPS - 1
    assert found.step_ns == pytest.approx(step_ns(run(program)), rel=0.02)


def test_waiting_for_the_device_is_no_work_of_the_host() -> None:
    program = Program(first_ns=400_000, second_ns=100_000)
    expected = step_ns(run(replace(program, first_ns=200_000)))
    assert after_ns(run(program), "scale", "kernel:^first$=0.5") == pytest.approx(expected, rel=0.01)


def test_a_wait_for_a_copy_of_one_number_is_an_item() -> None:
    program = Program(pause=500_000, first_ns=60_000, second_ns=60_000)
    expected = step_ns(run(replace(program, item=False)))
    assert expected < 0.9 * step_ns(run(program))
    assert after_ns(run(program), "no-wait", "item") == pytest.approx(expected, rel=0.03)


def test_a_pause_before_the_engine_runs_on_another_thread_can_be_removed() -> None:
    program = Program(pause=800_000, backward=True)
    expected = step_ns(run(replace(program, pause=0)))
    found = after_ns(run(program), "free", "label:pause", "with host work")
    assert found == pytest.approx(expected, rel=0.01)


def test_a_launch_that_waits_for_room_in_the_queue_is_no_work_of_the_host() -> None:
    program = Program(kernels=200, host=5_000, first_ns=60_000, second_ns=40_000, item=False)
    found = run(program)
    blocked = [row for row in found.host if row["category"] == "runtime" and row["duration"] > CALL]
    assert len(blocked) > 0.7 * len(found.gpu)
    expected = step_ns(run(replace(program, first_ns=30_000)))
    assert after_ns(found, "scale", "kernel:^first$=0.5") == pytest.approx(expected, rel=0.05)


def test_a_copy_of_pageable_memory_waits_for_the_work_before_it() -> None:
    program = Program(item=False, copy=1 << 20, first_ns=200_000)
    expected = step_ns(run(replace(program, first_ns=100_000)))
    assert after_ns(run(program), "scale", "kernel:^first$=0.5") == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("calls", "lacking"),
    [
        (None, "the calls that wait for the device and the ends of launches"),
        ([], "the calls that wait for the device and the ends of launches"),
        (["waits"], "the ends of launches"),
    ],
)
def test_a_recording_that_cannot_tell_waiting_from_work_is_refused(calls: list[str] | None, lacking: str) -> None:
    with pytest.raises(MissingData, match=f"does not hold {lacking}, so .* record the program again"):
        answer(run(Program()), "free", "kernel:.", calls)


def test_an_older_recording_is_refused() -> None:
    with pytest.raises(MissingData, match="does not hold the calls that wait"):
        thence.open(DATA / "recording" / "two_ranks").whatif(free=["kernel:."])


def test_traces_of_profilers_hold_their_calls(tmp_path: Path) -> None:
    events = [launch(1, 10), kernel(1, 20, 30, name="a")]
    assert opened(tmp_path, events).whatif(free=["kernel:a"]).rows.height == 1


@pytest.mark.parametrize(
    ("action", "text", "part", "change"),
    [
        ("free", "label:pause", "with host work", {"pause": 0}),
        ("scale", "kernel:^first$=0.5", "", {"first_ns": 7_500}),
        ("scale", "kernel:^second$=3", "", {"second_ns": 45_000}),
        ("no-wait", "item", "", {"item": False}),
    ],
)
def test_where_the_plain_step_is_known_changes_are_of_the_program_without_its_recorder(
    action: str, text: str, part: str, change: dict[str, Any]
) -> None:
    plain = Program(pause=3_000_000, kernels=60, host=18_000, first_ns=15_000, second_ns=15_000)
    recorded = run(replace(plain, host=32_000))
    share = step_ns(run(plain)) / step_ns(recorded)
    expected = step_ns(run(replace(plain, **change)))
    told = PlainPace(share, 0.01)
    found = answer(recorded, action, text, plain=told)
    assert found.program == PROGRAMS[2]
    assert found.step_ns == pytest.approx(step_ns(run(plain)), rel=0.01)
    row = found.rows.filter(part=part)
    assert row["after_ns"].item() == pytest.approx(expected, rel=0.03)
    assert row["low_share"].item() <= 1 - expected / step_ns(run(plain)) <= row["high_share"].item()


def test_what_the_host_cannot_explain_of_the_plain_step_widens_the_interval() -> None:
    found = run(Program(kernels=60, host=5_000, first_ns=200_000, second_ns=200_000))
    narrow, wide = (
        answer(found, "free", "kernel:^first$", plain=PlainPace(share, 0.0)).rows.row(0, named=True)
        for share in (1.0, 0.8)
    )
    widths = [row["high_share"] - row["low_share"] for row in (narrow, wide)]
    assert widths[0] < 0.1
    assert widths[1] > 2 * 0.2


def test_steps_that_were_not_recorded_do_not_change_the_prediction() -> None:
    program = Program(pause=300_000, kernels=20, first_ns=60_000)
    left_out, times = with_unrecorded(run(program), 4, 6)
    whole, part = (
        answer(found, "free", "kernel:^first$", plain=PlainPace(1.0, 0.0), step_times=rows)
        for found, rows in ((run(program), None), (left_out, times))
    )
    assert (whole.steps, part.steps) == (STEPS - 1, STEPS - 1 - 6)
    assert part.step_ns == pytest.approx(whole.step_ns, rel=0.01)
    after = [found.rows["after_ns"].item() for found in (part, whole)]
    assert after[0] == pytest.approx(after[1], rel=0.01)


def test_the_plain_step_of_a_recording_is_that_of_its_unrecorded_steps() -> None:
    program = Program(kernels=60, host=32_000)
    found, times = with_unrecorded(run(program), 3, 6)
    for row in times:  # 3 of 12 are recorded near them: too few, so each step counts as several
        row["duration"] = 1_380_000 if not row["recorded"] else 2_220_000
    times = [
        row | {"number": 100 * copy + row["number"], "start": row["start"] + copy} for copy in range(3) for row in times
    ]
    told = answer(found, "free", "label:pause", step_times=times)
    assert told.program == PROGRAMS[2]
    assert told.step_ns == pytest.approx(step_ns(run(program)) * 1_380 / 2_220, rel=0.02)
