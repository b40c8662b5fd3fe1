"""Batches of cases, each in a process of its own, several at a time: what a batch did, and a table of all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

RUN = Path(__file__).with_name("run.py")
GRACE_SECONDS = 60
"""How long a batch may go on with its last case after the time is over."""
GUESS_SECONDS = 60.0
"""CPU time of a batch of which none has ended yet."""
_COUNTED = re.compile(r"^counted (\S+): (\d+) cases, ([\d.]+) CPU s, (\d+) failures, (\d+) stopped$", re.MULTILINE)


@dataclass(frozen=True)
class Batch:
    """What a process did with some cases of a format.

    Attributes:
        code: exit code; negative where a signal ended it.
        cases: those that were begun.
        failed: those that failed; one more where the process ended in anything but an exit.
        stopped: whether its last case was stopped, the time being over.
        cpu_seconds: of the process and of the processes that it started.
        text: what it printed; its last words too, where it did not end as it should.
    """

    format: str
    seed: int
    code: int
    cases: int
    failed: int
    stopped: bool
    cpu_seconds: float
    text: str

    @property
    def counted(self) -> str:
        """The line of a log from which `Totals.of_logs` adds up several runs."""
        return (
            f"counted {self.format}: {self.cases} cases, {self.cpu_seconds:.2f} CPU s, "
            f"{self.failed} failures, {int(self.stopped)} stopped\n"
        )


@dataclass(frozen=True)
class Plan:
    """How batches are run.

    Attributes:
        cases: of each batch.
        every: one of so many cases goes through verbs.
        seed: of the first batch of each format; the next ones count on.
        keep: folder for inputs that fail.
        corpus: folder for mutants that reach new lines.
    """

    cases: int
    every: int
    seed: int
    keep: Path | None = None
    corpus: Path | None = None


@dataclass
class _Running:
    name: str
    seed: int
    process: subprocess.Popen[bytes]
    folder: Path
    stopped: bool = False

    def stop(self) -> None:
        """Ends it with its last case undone."""
        self.stopped = True
        self.process.kill()

    def ended(self) -> Batch | None:
        """What it did, once it has ended."""
        number, status, usage = os.wait4(self.process.pid, os.WNOHANG)
        if number == 0:
            return None
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        said = (self.folder / "stdout").read_text(errors="replace")
        told = (self.folder / "stderr").read_text(errors="replace")
        failed = len(re.findall(rf"^{self.name} seed {self.seed} case \d+ failed:", said, re.MULTILINE))
        if self.stopped:
            said += f"{self.name} seed {self.seed}: stopped at its end: {told[-20:]}\n"
        elif code not in (0, 1):
            failed += 1
            said += f"{self.name} seed {self.seed}: ended with {code}: {told[-1500:]}\n"
        cases = len(re.findall(r"^at \d+$", told, re.MULTILINE))
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return Batch(self.name, self.seed, code, cases, failed, self.stopped, cpu_seconds, said)


def run_all(names: list[str], plan: Plan, *, processes: int, seconds: float | None) -> Iterator[Batch]:
    """Runs batches of formats, and tells each as it ends.

    Args:
        processes: so many at a time.
        seconds: after which no case is begun; until then each format gets the same CPU time. None: one batch each.
    """
    end = None if seconds is None else time.monotonic() + seconds
    begun: Counter[str] = Counter()
    spent: defaultdict[str, list[float]] = defaultdict(list)
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        while True:
            while len(running) < processes:
                name = _next(names, begun, spent, end)
                if name is None:
                    break
                running.append(_started(name, plan, begun[name], Path(place), end))
                begun[name] += 1
            if not running:
                return
            for one in list(running):
                batch = one.ended()
                if batch is None:
                    if end is not None and time.monotonic() > end + GRACE_SECONDS:
                        one.stop()
                    continue
                running.remove(one)
                spent[batch.format].append(batch.cpu_seconds)
                _kept(one, batch, plan.keep)
                yield batch
            time.sleep(0.05)


def _next(names: list[str], begun: Counter[str], spent: dict[str, list[float]], end: float | None) -> str | None:
    """The format that had the least CPU time, those that run counted as its other batches; none: all is begun."""
    if end is None:
        return next((name for name in names if not begun[name]), None)
    if time.monotonic() > end:
        return None

    def time_of(name: str) -> float:
        ended = spent[name]
        mean = sum(ended) / len(ended) if ended else GUESS_SECONDS
        return sum(ended) + mean * (begun[name] - len(ended))

    return min(names, key=time_of)


def _started(name: str, plan: Plan, number: int, place: Path, end: float | None) -> _Running:
    seed = plan.seed + number
    folder = place / f"{name}-{seed}"
    folder.mkdir()
    command = [sys.executable, str(RUN), name, "--cases", str(plan.cases), "--seed", str(seed)]
    command += ["--every", str(plan.every)]
    if plan.keep is not None:
        command += ["--keep", str(plan.keep)]
    if plan.corpus is not None:
        command += ["--corpus", str(plan.corpus)]
    if end is not None:
        command += ["--stop-after", str(max(1.0, end - time.monotonic()))]
    # Threads that wait for each other take a sixth of the CPU time; one batch of four has two all the same.
    threads = "2" if number % 4 == 3 else "1"
    environment = os.environ | {"POLARS_MAX_THREADS": threads, "TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)}
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment)
    return _Running(name, seed, process, folder)


def _kept(one: _Running, batch: Batch, keep: Path | None) -> None:
    """Keeps the input with which a process ended that did not end itself, and clears the rest."""
    if keep is not None and batch.code not in (0, 1):
        for left in one.folder.glob("fuzz-*"):
            target = keep / f"{one.name}-{one.seed}-ended"
            shutil.copytree(left, target, dirs_exist_ok=True)
            (target / "failure.txt").write_text(batch.text, errors="replace")
    shutil.rmtree(one.folder, ignore_errors=True)


@dataclass
class Totals:
    """Cases, CPU seconds and failures of each format."""

    cases: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    cpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, batch: Batch) -> None:
        self.cases[batch.format] += batch.cases
        self.failed[batch.format] += batch.failed
        self.stopped[batch.format] += batch.stopped
        self.cpu_seconds[batch.format] += batch.cpu_seconds

    @classmethod
    def of_logs(cls, texts: Iterable[str]) -> Totals:
        """Those of all batches that several runs have told of, also of runs that did not come to their end."""
        totals = cls()
        for text in texts:
            for name, cases, seconds, failed, stopped in _COUNTED.findall(text):
                totals.cases[name] += int(cases)
                totals.cpu_seconds[name] += float(seconds)
                totals.failed[name] += int(failed)
                totals.stopped[name] += int(stopped)
        return totals

    def table(self) -> str:
        """A line for each format, and one for all."""
        lines = [f"{'format':12} {'cases':>9} {'CPU s':>9} {'failures':>9} {'stopped':>9}"]
        lines += [
            f"{name:12} {self.cases[name]:9,} {self.cpu_seconds[name]:9,.0f} "
            f"{self.failed[name]:9,} {self.stopped[name]:9,}"
            for name in self.cases
        ]
        cases, failed, stopped = (sum(counts.values()) for counts in (self.cases, self.failed, self.stopped))
        seconds = sum(self.cpu_seconds.values())
        lines.append(f"{'all':12} {cases:9,} {seconds:9,.0f} {failed:9,} {stopped:9,}")
        return "\n".join(lines) + "\n"
