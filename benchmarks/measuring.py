"""What benchmarks share: processes that are measured, and work that takes turns."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True)
class Used:
    """What a process and its children used: seconds until it ended, CPU seconds, the largest resident set in MB."""

    wall: float
    cpu: float
    peak_mb: float
    code: int


def run_measured(command: list[str], environment: Mapping[str, str] | None = None) -> Used:
    """Runs a command, its output thrown away."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Used(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000, process.returncode)


def peak_mb() -> float:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def by_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Results of each way in each round; the first of a round changes, so that a busy moment hits them all."""
    names, results = list(ways), {name: [] for name in ways}
    for number in range(rounds):
        turn = number % len(names)
        for name in (*names[turn:], *names[:turn]):
            results[name].append(ways[name]())
    return results


def table_row(cells: Iterable[object]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"
