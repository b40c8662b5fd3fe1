"""What a recording of few steps of many costs: blocks of steps with and without it, in turn, in one process.

    python benchmarks/gpu_always.py [--seconds 60] [--every 50]       # on a GPU with torch

The programs of `gpu_paused.py` without CUDA graphs: a decode of 12 tokens whose layers are launched one by one, and a
training step. A block has steps for 1.5 s. Prints for each program the loss, which is the mean of the
differences of neighbouring blocks, with its 95 % interval (Student's t), beside the cost that the recordings measured
themselves; and how much memory the process had before the first and after the last recording.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import documented_parser
from gpu_paused import program

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAMS = ("decode", "training")
BLOCK_SECONDS = 1.5
_WINDOWS_BEFORE = 3
_T95 = 2.05
"""Student's t of 95 % for some 30 pairs."""


def child(name: str, out: Path, seconds: float, every: int) -> dict[str, Any]:
    """Alternates blocks with and without a recording; times a step in ms."""
    step = program(name)
    for _ in range(50):
        step()
    begin = time.perf_counter()
    for _ in range(50):
        step()
    count = max(2, round(BLOCK_SECONDS / ((time.perf_counter() - begin) / 50) / every)) * every
    found: dict[str, Any] = {"with": [], "without": [], "about": [], "steps": count}
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() - began < seconds:
        number = len(found["with"])
        if number % 2:
            found["without"].append(without_recording(step, count))
        recorded, about = sampled(step, count, every, out / str(number))
        found["with"].append(recorded)
        found["about"].append(about)
        if not number % 2:
            found["without"].append(without_recording(step, count))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**found, "megabytes": (after - before) / 1e3}


def without_recording(step: Callable[[], None], count: int) -> float:
    """Ms a step."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return 1e3 * (time.perf_counter() - start) / count


def sampled(step: Callable[[], None], count: int, every: int, out: Path) -> tuple[float, dict[str, Any]]:
    """Ms a step, after as many windows as it takes to find the interval, and the description of the recording."""
    import thence

    recording = thence.record(out, thence.RecordOptions(sampling=thence.Sampling(every=every, slow_steps=False)))
    recording.start()
    for _ in range(_WINDOWS_BEFORE * every):
        step()
        recording.step()
    start = time.perf_counter()
    for _ in range(count):
        step()
        recording.step()
    took = 1e3 * (time.perf_counter() - start) / count
    recording.stop()
    about: dict[str, Any] = json.loads(next(out.rglob("recording.json")).read_text())
    return took, {"kernels": about["counts"]["kernels"], **about["sampling"]}


def report(name: str, found: dict[str, Any]) -> None:
    """Prints what one program lost."""
    pairs = list(zip(found["with"], found["without"], strict=True))
    losses = [100 * (a / b - 1) for a, b in pairs]
    mean = statistics.mean(losses)
    half = _T95 * statistics.stdev(losses) / math.sqrt(len(losses))
    stated = [about["cost_share"] for about in found["about"] if about["cost_share"] is not None]
    print(
        f"{name}: {statistics.median(b for _, b in pairs):.3f} ms a step, {found['steps']} steps a block, "
        f"{len(pairs)} pairs: loss {mean:+.2f} % ({mean - half:+.2f} to {mean + half:+.2f}), median "
        f"{statistics.median(losses):+.2f} %\n"
        f"  stated by the recordings: {100 * statistics.median(stated):.2f} % with a window each "
        f"{statistics.median(about['interval'] for about in found['about']):g} steps, which costs "
        f"{statistics.median(about['window_cost_ns'] or 0 for about in found['about']) / 1e6:.1f} ms; "
        f"{sum(about['kernels'] for about in found['about']):,} kernels; {found['megabytes']:+.0f} MB"
    )


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--child", help="name of the program; for the processes that this script starts")
    given = parser.parse_args()
    if given.child:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(child(given.child, Path(folder), given.seconds, given.every)))
        return
    for name in PROGRAMS:
        more = ["--seconds", str(given.seconds), "--every", str(given.every)]
        done = subprocess.run(
            [sys.executable, __file__, "--child", name, *more], capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name}: exit code {done.returncode}\n{done.stderr[-1500:]}")
            continue
        report(name, json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    main()
