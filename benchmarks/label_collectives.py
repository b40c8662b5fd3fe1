"""What labelling costs a collective: us per call, over Gloo on the CPU, everything in one run.

    python benchmarks/label_collectives.py

Three ways take turns, so that a busy moment hits them all: plain; labelled while nobody listens; labelled
and told to the log that a recording keeps. Medians of all rounds, and their ratio to plain. Once in a
group of one process, which Gloo serves in a few us; once in one of 4096 that only pretends to communicate.
Last the memory, and the time of the thread that writes, that the log takes for each call.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING

from command_line import documented_parser
from measuring import by_turns

if __name__ == "__main__":
    documented_parser(__doc__).parse_args()

import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import thence
from thence.capture.marks import listen, unlisten
from thence.capture.recorder.names import Names
from thence.capture.session.mark_log import MarkLog

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS, ROUNDS, LOGGED = 500, 41, 20_000
SMALL = torch.ones(8)


def once() -> None:
    """The call that is measured."""
    distributed.all_reduce(SMALL)


def timed() -> float:
    """Us per call."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        once()
    return (time.perf_counter() - begin) / CALLS * 1e6


def plain() -> float:
    """As PyTorch is."""
    return timed()


def labelled() -> float:
    """With labels that nobody hears of."""
    undo = thence.torch.label_collectives()
    try:
        return timed()
    finally:
        undo()


def recorded() -> float:
    """With labels, told to a recording's log."""
    log = MarkLog()
    listen(log)
    try:
        return labelled()
    finally:
        unlisten(log)


WAYS: tuple[Callable[[], float], ...] = (plain, labelled, recorded)


def measure(title: str) -> None:
    """Prints the three ways."""
    for way in WAYS:
        way()
    times = by_turns({way.__name__: way for way in WAYS}, ROUNDS)
    base = statistics.median(times["plain"])
    print(title)
    for name, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        print(
            f"    {name:9} {median:8.2f} us a call (quartiles {low:.2f} to {high:.2f}), "
            f"{median / base:5.2f} x plain, {median - base:+.2f} us"
        )


def kept() -> None:
    """What a recording keeps in memory of each call, and what its writing thread spends on it."""
    log, names = MarkLog(), Names()
    listen(log)
    undo = thence.torch.label_collectives()
    once()
    log.take(names)
    names.new()
    spent = written(log, names)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    written(log, names)
    stays = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    undo()
    unlisten(log)
    print(
        f"    a recording keeps {stays / LOGGED:.0f} bytes a call; "
        f"{spent / LOGGED * 1e6:.1f} us a call in the thread that writes"
    )


def written(log: MarkLog, names: Names) -> float:
    """Seconds that the log and the names take to make rows of many calls."""
    spent = 0.0
    for _ in range(LOGGED // CALLS):
        for _ in range(CALLS):
            once()
        begin = time.perf_counter()
        log.take(names)
        names.new()
        spent += time.perf_counter() - begin
    return spent


def main() -> None:
    """One process over Gloo, then 4096 ranks that pretend."""
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    store = distributed.FileStore(str(Path(tempfile.mkdtemp()) / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    measure("gloo, 1 process")
    kept()
    distributed.destroy_process_group()
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
    measure("pretended, 4096 ranks")
    kept()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
