"""What a recording of few steps of many leaves in a process between two windows, part by part.

    python benchmarks/gpu_between_windows.py OUT [--seconds 50] [--program decode|training]    # on a GPU with torch

The programs of `gpu_always.py`, both limited by their launches. Each measurement alternates short blocks, so that what
varies in the host hits both sides:

switched   one process. Blocks without a recording stand around blocks of a recording between two windows: as it is,
           without calls of `step()`, without what the recorder's thread looks at, without samples of the clock
windows    one process. Blocks of 200 steps with four windows, and without a recording; the time of each step by its
           distance from the window
residue    two processes in turn, before and after one of them was recorded and CUPTI was detached: what CUPTI leaves

Writes the times of all steps to OUT, and prints the mean difference of neighbouring blocks with its 95 % interval.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser
from gpu_paused import program

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = ("decode", "training")
PARTS = {"switched": 1.0, "windows": 0.8, "residue": 0.5}
"""The parts, and the share of the seconds that each takes."""
STATES = ("all", "silent", "no looks", "no clock")
BLOCK_SECONDS = 0.2
EVERY, WINDOWS = 50, 4
_FAR = 10_000_000
_NEAR = 20
"""Steps after a window whose times are printed one by one."""


def timed(step: Callable[[], None], count: int, after: Callable[[], None] | None = None) -> list[float]:
    """Ms of each of so many steps, with what is called after each."""
    times, clock = [], time.perf_counter
    begin = clock()
    for _ in range(count):
        step()
        if after is not None:
            after()
        end = clock()
        times.append(1e3 * (end - begin))
        begin = end
    return times


def warm(name: str) -> tuple[Callable[[], None], int]:
    """The program's step, and how many make a block."""
    step = program(name)
    timed(step, 100)
    return step, max(4, round(1e3 * BLOCK_SECONDS / statistics.median(timed(step, 50))))


def started(out: Path, every: int = _FAR) -> Any:
    """A recording whose windows are so many steps apart."""
    import thence

    sampling = thence.Sampling(every=every, slow_steps=False, budget=0)
    recording = thence.record(out, thence.RecordOptions(sampling=sampling))
    recording.start()
    return recording


def switched(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Blocks between two windows in each state, between blocks without a recording."""
    step, count = warm(name)
    found: dict[str, Any] = {"times": {state: [] for state in ("none", *STATES)}, "threads": [], "steps": count}
    found["threads_before"] = threads()
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        found["times"]["none"].append(timed(step, count))
        recording = started(out / str(number))
        timed(step, 16, recording.step)  # the window, and the steps that are compared with it
        recorder = recording._recorder  # noqa: SLF001 - what is switched has no other name
        if number == 0:
            found["attached"], found["warnings"] = recorder.attached, list(recorder._warnings)  # noqa: SLF001
        looks, works = recorder._looks, recording._clocks._works  # noqa: SLF001
        order = list(STATES)
        random.Random(number).shuffle(order)
        before, since = threads(), time.monotonic()
        for state in order:
            recorder._looks = (lambda: None) if state == "no looks" else looks  # noqa: SLF001
            recording._clocks._works = works and state != "no clock"  # noqa: SLF001
            timed(step, 2)
            found["times"][state].append(timed(step, count, recording.step if state == "all" else None))
        recorder._looks = looks  # noqa: SLF001
        found["threads"].append([time.monotonic() - since, before, threads()])
        recording.stop()
        timed(step, 4)
        number += 1
    found["times"]["none"].append(timed(step, count))
    found["threads_after"] = threads()
    return found


def threads() -> dict[str, list[Any]]:
    """Name and CPU seconds of each thread of this process by its number."""
    rows = {}
    known = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        try:
            text, name = (task / "schedstat").read_text(), (task / "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        rows[task.name] = [known.get(task.name, f"{name} (not of Python)"), int(text.split()[0]) / 1e9]
    return rows


def windows(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Blocks with windows, and without a recording."""
    step, _ = warm(name)
    count = WINDOWS * EVERY
    found: dict[str, Any] = {"none": [], "with": [], "resident": [resident()], "about": []}
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        for state in ("none", "with") if number % 2 else ("with", "none"):
            if state == "none":
                timed(step, 4)
                found["none"].append(timed(step, count))
                continue
            recording = started(out / str(number), EVERY)
            timed(step, 2 * EVERY - 1, recording.step)  # the first window has the start of the recording
            found["with"].append(timed(step, count, recording.step))
            recording.stop()
            about = json.loads(next((out / str(number)).rglob("recording.json")).read_text())
            found["about"].append({**about["sampling"], "detachments": about["detachments"]})
            found["resident"].append(resident())
        number += 1
    return found


def resident() -> float:
    """MB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(name: str, out: Path) -> None:
    """Makes a block for each line of its input; ``record``: is recorded, and CUPTI detached, first."""
    step, count = warm(name)
    print("[]", flush=True)
    for number, line in enumerate(sys.stdin):
        if line.strip() == "record":
            recording = started(out / str(number))
            timed(step, 16, recording.step)
            recording.stop()
            timed(step, 20)
            print("[]", flush=True)
        else:
            timed(step, 1)
            print(json.dumps(timed(step, count)), flush=True)


def residue(name: str, out: Path, seconds: float) -> dict[str, Any]:
    """Blocks of two processes in turn, before and after one of them was recorded."""
    command = [sys.executable, __file__, str(out), "--program", name, "--serve"]
    children = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]

    def ask(number: int, what: str) -> list[float]:
        child = children[number]
        assert child.stdin is not None
        assert child.stdout is not None
        print(what, file=child.stdin, flush=True)
        answer: list[float] = json.loads(child.stdout.readline())
        return answer

    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    found: dict[str, Any] = {"before": [], "after": []}
    for when in ("before", "after"):
        began, number = time.monotonic(), 0
        while time.monotonic() - began < seconds / 2:
            order = (0, 1) if number % 2 else (1, 0)
            pair = {which: ask(which, "block") for which in order}
            found[when].append([pair[0], pair[1]])
            number += 1
        if when == "before":
            ask(0, "record")
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.wait(20)
    return found


def interval(values: list[float]) -> str:
    """Mean of values with its 95 % interval, and their median."""
    mean, half = statistics.mean(values), 1.97 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}), median {statistics.median(values):+.2f}"


def say_switched(found: dict[str, Any]) -> None:
    """Prints each state against the blocks without a recording around it, and against the others."""
    times = found["times"]
    means = {state: [statistics.mean(block) for block in blocks] for state, blocks in times.items()}
    middles = {state: [statistics.median(block) for block in blocks] for state, blocks in times.items()}
    none = means["none"]
    print(
        f"  none {statistics.median(none):.3f} ms a step, {found['steps']} a block, {len(none) - 1} rounds, "
        f"attached {found['attached']}, {found['warnings']}"
    )
    for what, of in (("mean of a block", means), ("median of a block", middles)):
        for state in STATES:
            around = [(a + b) / 2 for a, b in zip(of["none"], of["none"][1:], strict=False)]
            losses = [100 * (a / b - 1) for a, b in zip(of[state], around, strict=True)]
            print(f"  {what}: {state} against none: {interval(losses)} %")
        for state in STATES[:1] + STATES[2:]:
            losses = [100 * (a / b - 1) for a, b in zip(of[state], of["silent"], strict=True)]
            print(f"  {what}: {state} against silent: {interval(losses)} %")
    spent: dict[str, float] = {}
    total = sum(row[0] for row in found["threads"])
    for _, before, after in found["threads"]:
        for thread, (thread_name, seconds) in after.items():
            spent[thread_name] = spent.get(thread_name, 0) + seconds - before.get(thread, [0, seconds])[1]
    print("  CPU ms a second by thread between windows:", {k: round(1e3 * v / total, 2) for k, v in spent.items() if v})
    for when in ("before", "after"):
        print(f"  threads {when}:", sorted(row[0] for row in found[f"threads_{when}"].values()))


def say_windows(found: dict[str, Any]) -> None:
    """Prints the loss with a window each so many steps, and the times of steps near a window."""
    none, recorded = found["none"], found["with"]
    losses = [100 * (sum(a) / sum(b) - 1) for a, b in zip(recorded, none, strict=True)]
    plain = statistics.mean(sum(block) / len(block) for block in none)
    by_distance = [[block[i] for block in recorded for i in range(k, len(block), EVERY)] for k in range(EVERY)]
    excess = [statistics.mean(rows) - plain for rows in by_distance]
    middle = statistics.median([time for block in none for time in block])
    print(
        f"  none {plain:.3f} ms a step (median {middle:.3f}); a window each {EVERY}: {interval(losses)} %, {len(losses)} pairs"
    )
    print("  ms above none by the steps after the window's first:", [round(x, 2) for x in excess[:_NEAR]])
    medians = [statistics.median(rows) - middle for rows in by_distance]
    print("  the same of medians:", [round(x, 3) for x in medians[:_NEAR]])
    far = [statistics.mean(rows) for rows in by_distance[_NEAR:]]
    print(
        f"  steps {_NEAR} to {EVERY} of a window: {100 * (statistics.mean(far) / plain - 1):+.2f} %, medians "
        f"{100 * statistics.mean(medians[_NEAR:]) / middle:+.2f} %; a window costs {sum(excess[:_NEAR]):.1f} ms by its "
        f"first {_NEAR} steps, stated {statistics.median((a['window_cost_ns'] or 0) / 1e6 for a in found['about']):.1f}; "
        f"resident MB {found['resident'][0]:.0f}, {found['resident'][1]:.0f}, {found['resident'][-1]:.0f}; "
        f"detachments {[a['detachments'] for a in found['about']][:3]}"
    )


def say_residue(found: dict[str, Any]) -> None:
    """Prints by how much the ratio of the two processes changed."""
    for what in (statistics.mean, statistics.median):
        logs = {when: [100 * math.log(what(a) / what(b)) for a, b in found[when]] for when in ("before", "after")}
        means = {when: statistics.mean(rows) for when, rows in logs.items()}
        half = 1.97 * math.sqrt(sum(statistics.variance(rows) / len(rows) for rows in logs.values()))
        change = means["after"] - means["before"]
        print(
            f"  {what.__name__} of a block: {change:+.2f} % ({change - half:+.2f} to {change + half:+.2f}), medians "
            f"{statistics.median(logs['after']) - statistics.median(logs['before']):+.2f} %; ratio before "
            f"{means['before']:+.1f} %, {len(logs['before'])} and {len(logs['after'])} pairs"
        )


def main() -> None:
    """Reads the options."""
    parser = documented_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=50)
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("--part", choices=[*PARTS])
    parser.add_argument("--serve", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.serve:
        with tempfile.TemporaryDirectory() as folder:
            serve(given.program, Path(folder))
        return
    if given.part and given.program:
        with tempfile.TemporaryDirectory() as folder:
            found = globals()[given.part](given.program, Path(folder), given.seconds * PARTS[given.part])
        (given.out / f"{given.program}_{given.part}.json").write_text(json.dumps(found))
        print(f"{given.program}, {given.part}:")
        {"switched": say_switched, "windows": say_windows, "residue": say_residue}[given.part](found)
        return
    for name in [given.program] if given.program else PROGRAMS:
        for part in [given.part] if given.part else PARTS:
            command = [sys.executable, __file__, str(given.out), "--program", name, "--part", part]
            subprocess.run([*command, "--seconds", str(given.seconds)], check=False)


if __name__ == "__main__":
    main()
