"""What a recording of few steps of many costs a program that its launches limit: between windows, by windows, after it.

    python benchmarks/gpu_always.py OUT [--seconds 60] [--part PART] [--program PROGRAM]      # on a GPU with torch

The programs of `gpu_paused.py` without CUDA graphs: a decode of 12 tokens whose layers are launched one by one, and a
training step. Hosts of GPUs get faster and slower by 10 to 30 % within seconds, so what is compared lies as close
together as it can; each measurement has a process of its own, and its mean has a 95 % interval:

between    blocks of four steps between two windows, in pairs: with the recorder's thread and calls of `step()`, and
           with that thread held at its gate and no calls. What the thread does in a second then happens in half of it
windows    a window every 25 steps: by how much its steps, and the seven after it, are longer than the others, beside
           what the recording itself measures; what of it attaches and detaches CUPTI; memory of the process
residue    six processes in turn that launch a kernel 500 times, before and after three of them were recorded and CUPTI
           was detached: by how much their times change more than those of the others is what CUPTI leaves behind
estimates  few steps of many, then 100 in full, into OUT: whether windows tell what the whole is like
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
    from collections.abc import Callable, Iterable

PROGRAMS = ("decode", "training")
PARTS = {"between": 1.0, "windows": 0.27, "residue": 0.3, "estimates": 0.1}
"""The parts, and the share of the seconds that each takes for a program."""
BLOCK_STEPS = 4
EVERY, NEAR = 25, 10
"""Steps from one window to the next, and those of them that belong to the window or follow it."""
LAUNCHES, PROCESSES = 500, 6
_FAR = 10_000_000
_T95 = 1.97


def timed(step: Callable[[], None], count: int, after: Callable[[], object] | None = None) -> list[float]:
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


def started(out: Path, every: int) -> Any:
    """A recording whose windows are so many steps apart, whatever they cost."""
    import thence

    sampling = thence.Sampling(every=every, slow_steps=False, budget=0)
    recording = thence.record(out, thence.RecordOptions(sampling=sampling))
    recording.start()
    return recording


def stopped(recording: Any) -> dict[str, Any]:
    """Ends a recording; what it says of its sampling."""
    recording.stop()
    about: dict[str, Any] = json.loads((recording.folder / "recording.json").read_text())
    return {**about["sampling"], "detachments": about["detachments"], "warnings": about["warnings"]}


def between(name: str, out: Path, seconds: float) -> None:
    """Pairs of blocks with and without what runs between two windows."""
    step = program(name)
    timed(step, 100)
    recording = started(out, _FAR)
    timed(step, 16, recording.step)  # the window, and the steps that are compared with it
    recorder, gate = recording._recorder, threading.Event()  # noqa: SLF001 - what is switched has no other name
    attached, looks = recorder.attached, recorder._looks  # noqa: SLF001
    recorder._looks = lambda: (gate.wait(), looks())  # noqa: SLF001
    gate.set()
    losses, plain = [], []
    began, cpu, own = time.monotonic(), recorder.cpu_ns, recording._steps.own_ns  # noqa: SLF001
    order = random.Random(0)
    while time.monotonic() - began < seconds:
        took = {}
        for on in (True, False) if order.random() < 0.5 else (False, True):
            (gate.set if on else gate.clear)()
            took[on] = sum(timed(step, BLOCK_STEPS, recording.step if on else None))
        losses.append(100 * math.log(took[True] / took[False]))
        plain.append(took[False] / BLOCK_STEPS)
    gate.set()
    spent = time.monotonic() - began
    steps = BLOCK_STEPS * len(losses)
    print(
        f"  {statistics.mean(plain):.2f} ms a step, {len(losses)} pairs: {interval(losses)} %; attached {attached}\n"
        f"  by its own clock: {(recorder.cpu_ns - cpu) / 1e7 / spent:.3f} % of the time in the recorder's thread, "
        f"{(recording._steps.own_ns - own) / steps / 1e3:.1f} us in each step()"  # noqa: SLF001
    )
    recording.stop()


def windows(name: str, out: Path, seconds: float) -> None:
    """Windows one after the other."""
    step = program(name)
    timed(step, 100)
    before = resident()
    recording = started(out, EVERY)
    spent: dict[str, list[float]] = {}
    recorder = recording._recorder  # noqa: SLF001
    for owner, names in (
        (recording, ("pause", "resume")),
        (recorder, ("_attach", "_enable", "_flush", "_detach")),
        (recorder._counting, ("attach", "detach")),  # noqa: SLF001
        (recorder._cupti, ("subscribe",)),  # noqa: SLF001
    ):
        for function in names:
            setattr(
                owner,
                function,
                clocked(getattr(owner, function), spent.setdefault(f"{function} of {owner.__class__.__name__}", [])),
            )
    timed(step, 2 * EVERY, recording.step)
    times: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        times += timed(step, EVERY, recording.step)
    after = resident()
    about = stopped(recording)
    # Step 0 of each row is the one before the window: `step()` is called after it.
    rows = [times[i : i + EVERY] for i in range(EVERY - 1, len(times) - EVERY, EVERY)]
    plain = [statistics.median(row[NEAR:]) for row in rows]
    costs = [sum(row[:NEAR]) - NEAR * usual for row, usual in zip(rows, plain, strict=True)]
    usual = statistics.median(plain)
    middle = [statistics.median(row[k] for row in rows) - usual for k in range(NEAR)]
    stated, of_step = about["window_cost_ns"] or 0, about["plain_step_ns"] or 1
    apart = math.ceil(100 * stated / of_step)
    means = [statistics.mean(row[k] for row in rows) - usual for k in range(NEAR)]
    print(
        f"  {usual:.2f} ms a step, {len(rows)} windows; one costs {interval(costs)} ms\n"
        f"  stated {stated / 1e6:.1f} ms, so that 1 % needs a window each {apart} steps; one costs "
        f"{100 * statistics.mean(costs) / (apart * usual):.2f} % of these\n"
        f"  ms above the others of its steps: medians {rounded(middle)}, means {rounded(means)}\n"
        f"  ms, median and most: { {what: rounded((statistics.median(t), max(t))) for what, t in spent.items()} }\n"
        f"  {about['detachments']} detachments, {before:.0f} and {after:.0f} MB, {about['warnings']}"
    )


def rounded(values: Iterable[float]) -> list[float]:
    """With two digits."""
    return [round(value, 2) for value in values]


def clocked(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    """The function, which notes how many ms it takes."""

    def clocked_function(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*given, **named)
        finally:
            into.append(1e3 * (time.perf_counter() - begin))

    return clocked_function


def resident() -> float:
    """MB of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def estimates(name: str, out: Path, _seconds: float) -> None:
    """Recordings of few steps of many and of all, one after the other."""
    import thence

    step = program(name)
    timed(step, 100)
    recording = started(out / f"{name}_few", EVERY)
    timed(step, 20 * EVERY, recording.step)
    about = stopped(recording)
    with thence.record(out / f"{name}_all", thence.RecordOptions(baseline=False)) as recording:
        timed(step, 100, recording.step)
    print(f"  {about['windows']} windows, then 100 steps: see OUT")


def serve(out: Path) -> None:
    """Makes a block for each line of its input; ``record``: is recorded, and CUPTI detached, first."""
    import torch

    x = torch.zeros(16, device="cuda")

    def step() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()

    timed(step, 50)
    for line in sys.stdin:
        if line.strip() == "record":
            recording = started(out, _FAR)
            timed(step, 16, recording.step)
            recording.stop()
            timed(step, 50)
        timed(step, 1)
        print(json.dumps(timed(step, 3)), flush=True)


def residue(_name: str, out: Path, seconds: float) -> None:
    """Blocks of processes in turn, before and after half of them were recorded; all on one core, which they share."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    command = [sys.executable, __file__, str(out), "--part", "serve"]
    children = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(PROCESSES)]
    logs: dict[str, list[list[float]]] = {"before": [], "after": []}
    for child in children:
        asked(child, "block")
    for when, rounds in logs.items():
        for child in children[1::2] if when == "after" else ():
            asked(child, "record")
        began, order = time.monotonic(), list(range(PROCESSES))
        while time.monotonic() - began < seconds / 2:
            random.Random(len(rounds)).shuffle(order)
            took = {which: min(asked(children[which], "block")) for which in order}
            middle = statistics.mean(math.log(took[which]) for which in order)
            rounds.append([100 * (math.log(took[which]) - middle) for which in range(PROCESSES)])
    for child in children:
        child.communicate(timeout=20)
    usual = {when: [statistics.median(column) for column in zip(*rounds, strict=True)] for when, rounds in logs.items()}
    change = [after - before for before, after in zip(usual["before"], usual["after"], strict=True)]
    print(
        f"  change in %, recorded {rounded(change[1::2])}, others {rounded(change[::2])}: "
        f"{statistics.mean(change[1::2]) - statistics.mean(change[::2]):+.2f}; "
        f"{len(logs['before'])} and {len(logs['after'])} rounds"
    )


def asked(child: subprocess.Popen[str], what: str) -> list[float]:
    """The answer of a process to a line."""
    assert child.stdin is not None
    assert child.stdout is not None
    print(what, file=child.stdin, flush=True)
    answer: list[float] = json.loads(child.stdout.readline())
    return answer


def interval(values: Iterable[float]) -> str:
    """Mean of values with its 95 % interval, and their median."""
    values = list(values)
    mean, half = statistics.mean(values), _T95 * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.2f} ({mean - half:+.2f} to {mean + half:+.2f}; median {statistics.median(values):+.2f})"


def main() -> None:
    """Reads the options."""
    parser = documented_parser(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--program", choices=PROGRAMS)
    parser.add_argument("--part", choices=(*PARTS, "serve"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "serve":
        with tempfile.TemporaryDirectory() as folder:
            serve(Path(folder))
        return
    if given.part and given.program:
        with tempfile.TemporaryDirectory() as folder:
            out = given.out if given.part == "estimates" else Path(folder)
            globals()[given.part](given.program, out, given.seconds * PARTS[given.part])
        return
    for part in [given.part] if given.part else PARTS:
        for name in [given.program] if given.program else PROGRAMS[: 1 if part == "residue" else 2]:
            print(f"{name}, {part}:", flush=True)
            command = [sys.executable, __file__, str(given.out), "--program", name, "--part", part]
            subprocess.run([*command, "--seconds", str(given.seconds)], check=False)


if __name__ == "__main__":
    main()
