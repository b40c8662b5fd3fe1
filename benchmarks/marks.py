"""What a mark costs when nobody looks, and when somebody does: ns per `with`, best of several rounds.

Somebody is a listener that forgets at once, or the log of a recording, which is emptied between rounds: in Python, and
by the compiled probe, with what emptying takes for each mark. A function of the C library stands for the CUDA function
that tells the counter, so what CUPTI takes for that is not in it.

    python benchmarks/marks.py

Beside it stands an empty context manager of the same shape, measured in the same rounds: the part
that is Python's. With torch installed everything is measured again after importing it, and once more as
it is when CUDA is in use: autograd's sequence numbers are then noted at each mark.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
import time
import timeit
from typing import TYPE_CHECKING

import thence
from command_line import documented_parser
from thence.capture.boundaries.probe import choose_probe
from thence.capture.marks import listen, unlisten
from thence.capture.recorder.names import Names
from thence.capture.session.mark_log import MarkLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Self

TIMES, ROUNDS = 50_000, 15


class Empty:
    """Does nothing."""

    __slots__ = ("lane", "metadata", "name")

    def __init__(self, name: str, lane: str | None = None, **metadata: object) -> None:
        self.name, self.lane, self.metadata = name, lane, metadata

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


class Deaf:
    """A listener that forgets at once."""

    def opened(self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]) -> None: ...

    def closed(self, number: int) -> None: ...

    def backward_opened(self, number: int | None, name: str) -> None: ...

    def backward_closed(self) -> None: ...


def empty() -> None:
    with Empty("attention"):
        pass


def mark() -> None:
    with thence.mark("attention"):
        pass


def mark_with_facts() -> None:
    with thence.mark("attention", layer=3):
        pass


KEPT = thence.mark("attention")


def mark_kept() -> None:
    with KEPT:
        pass


def nothing() -> None:
    pass


def measure(between: Callable[[], object] = nothing, **functions: Callable[[], None]) -> None:
    """Prints each function's best time; rounds take turns, so that a busy moment hits them all."""
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            spent = timeit.timeit(function, number=TIMES) / TIMES
            best[name] = min(best[name], 1e9 * spent)
            between()
    for name, nanoseconds in best.items():
        print(f"    {name.replace('_', ' '):38} {nanoseconds:6.0f} ns")


def all_of_it() -> None:
    measure(empty_context_manager=empty, mark=mark, mark_made_once=mark_kept, mark_with_one_fact=mark_with_facts)
    listener = Deaf()
    listen(listener)
    measure(mark_with_a_listener=mark)
    unlisten(listener)
    for way, log in logs().items():
        spent: list[float] = []
        listen(log)
        measure(lambda log=log, spent=spent: emptied(log, spent), **{f"mark_recorded_{way}": mark})
        unlisten(log)
        print(f"    {f'emptying the log of each, {way}':38} {1e9 * min(spent) / TIMES:6.0f} ns")


def logs() -> dict[str, MarkLog]:
    """Logs of marks by what notes them."""
    found = {"in_Python": MarkLog()}
    probe = choose_probe()
    if probe.compiled is not None:
        address = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0
        found["by_the_probe"] = MarkLog(probe.log(address))
    return found


def emptied(log: MarkLog, spent: list[float]) -> None:
    """Empties a log; notes how many seconds that took."""
    begin = time.perf_counter()
    log.take(Names())
    spent.append(time.perf_counter() - begin)


def main() -> None:
    documented_parser(__doc__).parse_args()
    print(f"Python {sys.version.split()[0]}, no framework imported")
    all_of_it()
    if importlib.util.find_spec("torch") is not None:
        import torch

        print(f"torch {torch.__version__}")
        all_of_it()  # a listener was there, so sequence numbers are noted from here on
        print("torch, autograd followed")
        all_of_it()
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]):
            measure(mark_under_torch_profiler=mark)


if __name__ == "__main__":
    main()
