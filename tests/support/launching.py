"""Programs that launch on a GPU that is not there, and where thence says that they launched.

`launch` stands for a kernel: it counts CUPTI's counter up and writes down by which line, of which thread, it was
called. `Watched` runs a program with hooks and then tells for each launch what the boundaries say of it: with
the counter in Python, where modules and lines are known by events, or with the compiled probe and the fake
libcupti, where they are read of the stack.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fake_cupti import library_path
from thence.capture.boundaries.log import BEGINS, ENDS, BoundaryLog
from thence.capture.boundaries.places import LINE, Place, Places
from thence.capture.boundaries.probe import Followed, choose_probe
from thence.capture.boundaries.stacks import why_unreadable
from thence.capture.torch.hooks import Hooks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LAUNCH = """
def launch(name=None):
    counter.launched(name, sys._getframe(1))
"""


@dataclass(frozen=True)
class Launch:
    """One launch, as it was.

    Attributes:
        counter: its number.
        thread: id of the thread.
        stack: (function, line) of the user's functions on the stack, outermost first.
        name: given by the program.
    """

    counter: int
    thread: int
    stack: tuple[tuple[str, int], ...]
    name: object


class Counter:
    """CUPTI's counter.

    Args:
        own: by how much reading it moves it.
    """

    def __init__(self, own: int, file: str) -> None:
        self.value = 1000
        self.own = own
        self.file = file
        self.launches: list[Launch] = []
        self.lock = threading.Lock()

    def read(self) -> int:
        with self.lock:
            self.value += self.own
            return self.value

    def stack(self, frame: FrameType | None) -> tuple[tuple[str, int], ...]:
        stack = []
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                stack.append((frame.f_code.co_qualname, frame.f_lineno))
            frame = frame.f_back
        return tuple(reversed(stack))

    def launched(self, name: object, frame: FrameType | None) -> None:
        stack = self.stack(frame)
        with self.lock:
            self.value += 1
            self.launches.append(Launch(self.value, threading.get_native_id(), stack, name))

    def end(self) -> None:
        """Nothing launches any more."""


class CompiledCounter(Counter):
    """The counter of the fake libcupti, which calls the compiled probe back for every launch."""

    def __init__(self, file: str) -> None:
        super().__init__(0, file)
        probe = choose_probe()
        probe.follow(Followed.CALLS)
        if (why := why_unreadable(probe.compiled)) is not None:
            pytest.skip(f"stacks cannot be read: {why}")
        self.library = library = ctypes.CDLL(library_path())
        self.handle = ctypes.c_void_p()
        callback = ctypes.c_void_p(probe.callback)
        assert library.cuptiSubscribe(ctypes.byref(self.handle), callback, None) == 0
        for domain, function in ((2, 1), (2, 2), (1, 2)):
            library.cuptiEnableCallback(1, self.handle, domain, function)
        library.fake_count_from(1000)
        self.log = probe.log(ctypes.cast(library.cudaDriverGetVersion, ctypes.c_void_p).value or 0)
        self.log.stack_reader = probe.compiled

    def launched(self, name: object, frame: FrameType | None) -> None:
        stack = self.stack(frame)
        number = self.library.fake_launch()
        with self.lock:
            self.launches.append(Launch(number, threading.get_native_id(), stack, name))

    def end(self) -> None:
        self.library.cuptiUnsubscribe(self.handle)


class Watched:
    """A program under hooks.

    Attributes:
        by_stack: whether stacks are read; a fixture may change what holds for all.
        places, rows: what was noted; `known` the places by number.
        launches: what was launched.
        warnings: those of the hooks.
    """

    by_stack = False

    def __init__(
        self,
        source: str,
        file: Path,
        *,
        own: int = 0,
        packages: Sequence[str] = (),
        modules: bool = False,
        lines: bool = True,
        variables: dict[str, Any] | None = None,
        between: bool = False,
    ) -> None:
        self.file = str(file)
        self.places = Places()
        self.log: BoundaryLog
        counter: Counter
        if self.by_stack:
            counter = CompiledCounter(self.file)
            self.log = counter.log
        else:
            counter = Counter(own, self.file)
            self.log = BoundaryLog(counter.read)
        options = SimpleNamespace(modules=modules, lines=lines, own=(*packages, "!launching"))
        self.hooks = Hooks(self.log, self.places, options)
        library: dict[str, Any] = {"counter": counter, "sys": sys}
        exec(compile(_LAUNCH, "/lib/site-packages/gpu/launch.py", "exec"), library)
        self.variables = {
            "launch": library["launch"],
            "step": self.hooks.step,
            "__name__": "program",
            **({"hooks": self.hooks, "again": (self.log, self.places, options)} if between else {}),
            **(variables or {}),
        }
        code = compile(source, str(file), "exec")
        self.hooks.start()
        try:
            exec(code, self.variables)
        finally:
            self.hooks.stop()
            counter.end()
        self.warnings = self.hooks.warnings()
        self.launches = counter.launches
        self.rows = self.log.take()
        self.known = dict(self.places.take())
        self._found: dict[tuple[int, int], tuple[Any, Any, Any]] = {}

    def place(self, launch: Launch, kind: int) -> Place | None:
        """The innermost place of a kind that the launch's thread was in; None: none noted."""
        number = self.number(launch, kind)
        return None if number is None else self.known[number]

    def number(self, launch: Launch, kind: int) -> int | None:
        counters, places = self._of(launch.thread, kind)
        at = int(np.searchsorted(counters, launch.counter, "left")) - 1
        return int(places[at]) if at >= 0 else None

    def _of(self, thread: int, kind: int) -> tuple[Any, Any]:
        """Counters and places of a thread's boundaries; of one kind, or (0) all."""
        if (thread, kind) not in self._found:
            place = self.rows["place"]
            mine = self.rows["thread"] == thread
            if kind:
                mine &= np.isin(place, [n for n, one in self.known.items() if one.kind == kind])
            counters = self.rows["counter"][mine].astype(np.int64)
            assert (np.diff(counters) >= 0).all()
            self._found[thread, kind] = counters, place[mine], self.rows["flags"][mine]
        return self._found[thread, kind][:2]

    def chain(self, launch: Launch) -> list[tuple[str, int]]:
        """(function, line) of the line that it is said to be of, and of those that called it, outermost first."""
        number = self.number(launch, LINE)
        found = []
        while number:
            place = self.known[number]
            if place.detail == self.file:
                found.append((place.name or "", place.line))
            number = place.parent
        return found[::-1]

    def idle(self, launch: Launch) -> bool:
        """Whether the thread had said that it launches nothing."""
        counters, _ = self._of(launch.thread, 0)
        flags = self._found[launch.thread, 0][2]
        after = int(np.searchsorted(counters, launch.counter, "left"))
        begins = after < len(flags) and flags[after] & BEGINS
        return bool(begins or (after and flags[after - 1] & ENDS))

    def verdicts(self) -> dict[str, int]:
        """How many launches have their line, their function only, or something wrong."""
        counts = {"line": 0, "function": 0, "wrong": 0}
        for launch in self.launches:
            counts[self.verdict(launch)] += 1
        return counts

    def verdict(self, launch: Launch) -> str:
        chain = self.chain(launch)
        if self.idle(launch) or len(chain) != len(launch.stack):
            return "wrong"
        pairs = list(zip(chain, launch.stack, strict=True))
        if any(said[0] != true[0] or said[1] not in (0, true[1]) for said, true in pairs):
            return "wrong"
        return "line" if chain[-1][1] else "function"
