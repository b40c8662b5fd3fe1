"""Host samples under stress: whether the process lives, and whether names, lines and callers in samples are true.

    python benchmarks/host_samples_stress.py [--seconds 600] [--threads 6] [--period-us 100]

No GPU: threads launch on the libcupti of the tests. They come and go; each builds functions by ``exec``, runs them as
plain calls, generators and through exceptions, and forgets them; there are garbage collections, recursions 900 deep,
and a fork each second whose child launches too. Sampling ends and begins anew every three seconds.

Each function has the number of its thread, a serial number, its level and the line of its call in its name, and the
serial number in the name of its file. A sample is wrong if its names mix threads or serial numbers, if a level or the
root is missing, if a caller is not at the line of its call, or if that thread did not run that program at that time.
Prints counts, and wrong samples; the exit code is 1 if there is any.
"""

from __future__ import annotations

import collections
import ctypes
import faulthandler
import gc
import itertools
import os
import random
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from command_line import documented_parser

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
NAME = re.compile(r"g?t(\d+)_n(\d+)_l(\d+)_c(\d+)$")
SLACK_NS = 700_000
"""The time of a sample is uncertain by as long as it may take (``LONG_READ_NS`` of _samples.c), and clocks are read."""
SHOWN = 4
ROUND_SECONDS = 3.0


class Programs:
    """Threads that run programs made by exec; what ran when."""

    def __init__(self, launch: Any, until: float) -> None:
        self.launch, self.until = launch, until
        self.numbers = itertools.count(1)
        self.made = self.threads = 0
        self.spans: dict[int, list[int]] = {}
        self.of_thread: dict[int, list[tuple[int, int]]] = {}

    def run(self, slot: int, life: float) -> None:
        """The work of one thread."""
        rng = random.Random()
        until = min(time.monotonic() + life, self.until)
        thread = threading.get_native_id()
        self.launch()
        while time.monotonic() < until:
            number = next(self.numbers)
            text, first = program(slot, number, rng)
            space: dict[str, Any] = {}
            exec(compile(text, f"file_n{number}.py", "exec"), space)
            self.made += 1
            span = self.spans[number] = [thread, time.time_ns(), 0]
            for _ in range(rng.randrange(1, 12)):
                result = space[first](rng.choice((10, 1000, 20_000)))
                if first.startswith("g"):
                    collections.deque(result, maxlen=0)
                if rng.random() < 0.1:
                    time.sleep(0.0005)
                if rng.random() < 0.05:
                    self.launch()
            if rng.random() < 0.02:
                gc.collect()
            if rng.random() < 0.02:
                down(0)
            del space, result
            span[2] = time.time_ns()

    def forget(self) -> None:
        """Forget programs that ended some time ago."""
        now = time.time_ns()
        self.spans = {number: span for number, span in self.spans.items() if not span[2] or now - span[2] < 5e9}


def down(depth: int) -> bytes:
    """Recurses 900 deep."""
    return down(depth + 1) if depth < 900 else bytes(10)


def program(slot: int, number: int, rng: random.Random) -> tuple[str, str]:
    """Functions that call each other, each on the line in its own name, and the name of the outermost one."""
    levels = rng.choice((3, 8, 30))
    lines: list[str] = []
    inner = f"t{slot}_n{number}_l{levels}_c0"
    lines += [f"def {inner}(work):", "    x = 0", "    for i in range(work): x += i", "    return x"]
    for level in range(levels - 1, -1, -1):
        pad, kind = rng.randrange(4), rng.random()
        generator = inner.startswith("g")
        caught = kind > 0.85 and not generator
        call = len(lines) + 2 + pad + caught
        name = f"t{slot}_n{number}_l{level}_c{call}"
        body = [f"    return {inner}(work)"]
        if generator:
            body = [f"    return [*{inner}(work)]"]
        if kind < 0.2:
            name = f"g{name}"
            body = [f"    for x in {inner}(work): yield x" if generator else f"    yield {inner}(work)"]
        elif caught:
            body = ["    try:", f"        {inner}(work); raise ValueError", "    except ValueError: return 1"]
        lines += [f"def {name}(work):", *["    x = 1"] * pad, *body]
        inner = name
    return "\n".join(lines), inner


class Checks:
    """Compares samples with what ran."""

    def __init__(self) -> None:
        self.wrong: collections.Counter[str] = collections.Counter()
        self.examples: list[Any] = []
        self.chains = self.timed = 0
        self._lives: dict[int, list[tuple[int, int]]] = {}

    def chain(self, frames: list[tuple[str, str, int]]) -> tuple[int, int] | None:
        """Checks name, file and line of the frames of a chain, innermost first; returns thread slot and program."""
        own = [(match, frame) for frame in frames if (match := NAME.match(frame[0]))]
        if not own:
            return None
        self.chains += 1
        levels = [int(match[3]) for match, _ in own]
        faults = {
            "several threads": len({match[1] for match, _ in own}) > 1,
            "several programs": len({match[2] for match, _ in own}) > 1,
            "file of another": any(frame[1] != f"file_n{match[2]}.py" for match, frame in own),
            "a level is missing": levels != list(range(levels[0], -1, -1)),
            "line of a caller": any(frame[2] != int(match[4]) for match, frame in own[1:]),
            "no root": [frame[0] for frame in frames].count("Programs.run") != 1,
        }
        for fault, there in faults.items():
            if there:
                self.say(fault, frames)
        return int(own[0][0][1]), int(own[0][0][2])

    def say(self, fault: str, frames: list[tuple[str, str, int]]) -> None:
        self.wrong[fault] += 1
        if len(self.examples) < SHOWN:
            self.examples.append((fault, frames[:12]))

    def moment(self, span: list[int], row: Any, frames: list[tuple[str, str, int]]) -> None:
        """Checks the thread and the time of a sample."""
        self.timed += 1
        if span[0] != row["thread"]:
            self.say("of another thread", frames)
        if row["time"] < span[1] - SLACK_NS or (span[2] and row["time"] > span[2] + SLACK_NS):
            self.say("of another time", frames)


def check(native: Any, sample: Any, programs: Programs, checks: Checks) -> int:
    """Checks all samples since the last call; returns their number."""
    import numpy as np

    from thence.capture.boundaries.samples import ChainNames

    rows = np.frombuffer(native.take_samples(), sample)
    names = ChainNames(native)
    known: dict[int, Any] = {}
    for row in rows:
        number = int(row["chain"])
        if number not in known:
            frames = [
                (names.of(code).name, names.of(code).file, names.of(code).line(at)) for code, at in names.chain(number)
            ]
            known[number] = frames, checks.chain(frames)
        frames, found = known[number]
        if found is not None and found[1] in programs.spans:
            checks.moment(programs.spans[found[1]], row, frames)
    return int(rows["count"].sum())


def run_for(seconds: float, threads: int, programs: Programs, wrong: collections.Counter[str]) -> int:
    """Keeps so many threads running, and forks each second; returns the number of forks."""
    slots: dict[int, threading.Thread] = {}
    end, forked, forks = time.monotonic() + seconds, time.monotonic(), 0
    while time.monotonic() < end:
        for slot in range(threads):
            if slot not in slots or not slots[slot].is_alive():
                life = random.choice((0.001, 0.01, 0.1, 0.5))
                slots[slot] = threading.Thread(target=programs.run, args=(slot, life), daemon=True)
                slots[slot].start()
                programs.threads += 1
        time.sleep(0.002)
        if time.monotonic() - forked > 1:
            forked = time.monotonic()
            child = os.fork()
            if not child:
                programs.launch()
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                wrong[f"child ended with {status}"] += 1
            forks += 1
    return forks


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--period-us", type=int, default=100)
    given = parser.parse_args()
    sys.path.insert(0, str(SUPPORT))
    from fake_cupti import library_path
    from thence.capture.boundaries.probe import Followed, choose_probe
    from thence.capture.boundaries.samples import COUNTS, SAMPLE, why_not_sampled

    faulthandler.enable()
    warnings.simplefilter("ignore", DeprecationWarning)  # it forks, although it has threads
    sys.setrecursionlimit(3000)
    probe = choose_probe()
    native: Any = probe.compiled
    if (why := why_not_sampled(native)) is not None:
        sys.exit(f"threads cannot be sampled here: {why}")
    library, handle = ctypes.CDLL(library_path()), ctypes.c_void_p()
    library.cuptiSubscribe(ctypes.byref(handle), ctypes.c_void_p(probe.callback), None)
    for domain, function in ((2, 1), (2, 2), (1, 2)):
        library.cuptiEnableCallback(1, handle, domain, function)
    probe.follow(Followed.CALLS)
    until = time.monotonic() + given.seconds
    programs, checks = Programs(library.fake_launch, until), Checks()
    counts: collections.Counter[str] = collections.Counter()
    forks = samples = 0
    while time.monotonic() < until:
        native.begin_samples(0, given.period_us * 1000)
        forks += run_for(ROUND_SECONDS, given.threads, programs, checks.wrong)
        native.end_samples()
        samples += check(native, SAMPLE, programs, checks)
        counts.update(dict(zip(COUNTS, native.count_samples(), strict=True)))
        probe.take_calls()
        programs.forget()
    print(
        f"Python {sys.version.split()[0]}, malloc {os.environ.get('PYTHONMALLOC', 'default')}, {given.seconds:.0f} s, "
        f"{given.threads} threads at once, a sample each {given.period_us} us: {programs.threads:,} threads, "
        f"{programs.made:,} programs, {forks} forks, {samples:,} samples {dict(counts)}; {checks.chains:,} chains "
        f"checked, {checks.timed:,} rows checked for thread and time; wrong: {dict(checks.wrong)}"
    )
    for example in checks.examples:
        print(example)
    sys.exit(bool(checks.wrong))


if __name__ == "__main__":
    main()
