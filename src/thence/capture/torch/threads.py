"""The state of each thread: the innermost place of every kind, and the places in which autograd nodes were made.

CUPTI's counter, which is read at every boundary of a thread, shows whether anything was launched since the thread's
previous boundary. Launches of other threads count, too: "nothing was launched" is certain, "something was" is not.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.places import LINE, MODULE, PHASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places

_LOG_LIMIT = 1 << 17
"""The least number of entries of a forward log that is kept: enough for many forward passes."""
_MAX_MAKERS = 64
"""Limit on the number of threads whose forward logs are kept, including threads that have ended."""
_WORD = (1 << 32) - 1


class ForwardLog:
    """The module and line in which the autograd nodes of a thread were made.

    Attributes:
        starts: ascending sequence numbers: for each range of nodes made in one place, that of its first node.
        modules: place of the innermost module for each range.
        lines: place of the innermost line for each range.
        upcoming: the first sequence number for which nothing is noted yet.

    Args:
        upcoming: the initial value of the attribute.
        makers: gets this log once it holds more than the nodes made before the thread's first boundary.
    """

    __slots__ = ("lines", "makers", "modules", "starts", "upcoming")

    def __init__(self, upcoming: int = 0, makers: list[ForwardLog] | None = None) -> None:
        self.makers = makers
        self.starts: list[int] = []
        self.modules: list[int] = []
        self.lines: list[int] = []
        self.upcoming = upcoming

    def made(self, upcoming: int, module: int, line: int) -> None:
        """Note that nodes up to before the number `upcoming` were made, with this innermost module and line."""
        self.starts.append(self.upcoming)
        self.modules.append(module)
        self.lines.append(line)
        self.upcoming = upcoming
        if len(self.starts) == 2:
            self._join_makers()
        if len(self.starts) > 2 * _LOG_LIMIT:
            self._forget(_LOG_LIMIT)

    def extend(self, starts: list[int], modules: list[int], lines: list[int], upcoming: int) -> None:
        """Note several ranges of nodes, the first of which begins at the old `upcoming`; sets `upcoming`."""
        before = len(self.starts)
        self.starts += starts
        self.modules += modules
        self.lines += lines
        self.upcoming = upcoming
        if before < 2 <= len(self.starts):
            self._join_makers()
        if len(self.starts) > 2 * _LOG_LIMIT:
            self._forget(len(self.starts) - _LOG_LIMIT)

    def _join_makers(self) -> None:
        if self.makers is not None:
            self.makers.append(self)
            del self.makers[:-_MAX_MAKERS]

    def _forget(self, count: int) -> None:
        del self.starts[:count], self.modules[:count], self.lines[:count]

    def since(self, sequence: int) -> tuple[list[int], list[int], list[int]]:
        """The parts of `starts`, `modules` and `lines` for nodes with at least this sequence number."""
        first = max(bisect_right(self.starts, sequence) - 1, 0)
        return self.starts[first:], self.modules[first:], self.lines[first:]


class Thread:
    """One thread of the program.

    Attributes:
        number: its identifier in the interpreter (`threading.get_ident`).
        last: the counter at its last boundary.
        moved: how often the counter had moved between two of its boundaries.
        module, line, phase: numbers of its innermost places.
        modules: numbers of the places of the modules that it is in, outermost first.
        phases: numbers of the phases around the innermost one.
        stack: activations of the user's functions (`thence.capture.torch.event_tracker`), outermost first.
        below: place of the line under `stack`: while an autograd node runs, the line of its forward operation.
        around: place of the module around `modules`, likewise.
        log: where the nodes that it makes are noted; `forward`, or another log while it runs an autograd node.
        running: the backward pass whose nodes it runs, if another thread called the engine.
    """

    __slots__ = (
        *("__weakref__", "around", "below", "forward", "last", "line", "log", "module", "modules", "moved"),
        *("number", "phase", "phases", "running", "stack"),
    )

    def __init__(self, nowhere: tuple[int, int, int], makers: list[ForwardLog]) -> None:
        self.number = threading.get_ident()
        self.last = 0
        self.moved = 0
        self.module, self.line, self.phase = nowhere
        self.around, self.below = self.module, self.line
        self.modules: list[int] = []
        self.phases: list[int] = []
        self.stack: list[Any] = []
        self.log = self.forward = ForwardLog(makers=makers)
        self.running: object = None

    def state(self) -> tuple[object, ...]:
        """The attributes that a backward pass changes, for `restore`."""
        places = (self.module, self.line, self.phase, self.around, self.below)
        return (*places, self.modules, self.stack, self.log)

    def restore(self, state: tuple[object, ...]) -> None:
        """Set the attributes to the values that `state` returned."""
        self.module, self.line, self.phase, self.around, self.below = state[:5]  # type: ignore[assignment]
        self.modules, self.stack, self.log = state[5:]  # type: ignore[assignment]


class Threads(threading.local):
    """The calling thread, as attribute `now`."""

    def __init__(self, common: Common) -> None:
        self.now = Thread(common.nowhere, common.makers)
        common.joined(self.now)


class Common:
    """The state that all threads share.

    Attributes:
        note: `BoundaryLog.note`.
        own: by how much a boundary itself moves the counter.
        blind: whether the counter is always 0, so that launches cannot be detected by it.
        nowhere: places for no module, no line, no phase.
        makers: forward logs of the threads that made autograd nodes.
        sequence: returns autograd's next sequence number on the calling thread; 0 until torch is imported.
    """

    def __init__(self, log: BoundaryLog, places: Places) -> None:
        self.note = log.note
        self.own = 0
        self.blind = False
        self.nowhere = (places.nothing(MODULE), places.nothing(LINE), places.nothing(PHASE))
        self.sequence: Callable[[], int] = lambda: 0
        self.makers: list[ForwardLog] = []

    def calibrate(self) -> None:
        """Measure by how much a boundary itself moves the counter: the smallest step, as other threads move it, too."""
        counters = [self.note(0) for _ in range(5)]
        self.blind = not any(counters)
        self.own = min((after - before) & _WORD for before, after in pairwise(counters))

    def cross(self, thread: Thread, place: int, flags: int = 0) -> None:
        """Note that the calling thread crosses a boundary."""
        now = self.note(place, flags)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now

    def made(self, thread: Thread) -> None:
        """Note the autograd nodes that the calling thread made since its previous boundary, in its present places."""
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)

    def joined(self, thread: Thread) -> None:
        """Prepare for the first boundary of a thread."""

    def here(self, thread: Thread) -> tuple[int, int]:
        """Places of module and line that the calling thread is in."""
        return thread.module, thread.line

    def make_in(self, thread: Thread, log: ForwardLog) -> None:
        """Note the nodes that the calling thread makes from now on in another log."""
        thread.log = log

    def inside_node(self, thread: Thread) -> bool:
        """Whether the calling thread runs an autograd node."""
        return thread.log is not thread.forward

    def enter_engine(self, thread: Thread) -> tuple[Any, ...]:
        """Handle a call of autograd's engine by the calling thread; returns the state for `leave_engine`."""
        state = thread.state()
        thread.modules, thread.stack = [], []
        return state

    def leave_engine(self, thread: Thread, state: tuple[Any, ...]) -> bool:
        """Restore the thread's state after the engine; returns whether it is known to have run nodes that launched."""
        thread.restore(state)
        return False

    def begin_node(self, thread: Thread, module: int | None, line: int | None) -> None:
        """Note that an autograd node begins on the calling thread, in the places of its forward; None: unchanged."""
        thread.around = thread.module if module is None else module
        thread.below = thread.line if line is None else line
        if thread.around != thread.module:
            self.module(thread, thread.around)
        if thread.below != thread.line:
            self.line(thread, thread.below)

    def end_nodes(self, thread: Thread) -> None:
        """Reset the state of a thread of the engine after its last node of a backward pass."""
        thread.log = thread.forward
        thread.around, thread.below = self.nowhere[:2]
        thread.modules, thread.stack, thread.phases = [], [], []

    # `module` and `line` inline `cross` and `made`, which saves two calls at every event of the program.

    def module(self, thread: Thread, place: int) -> None:
        """Note that a module is the innermost one from now on."""
        now = self.note(place, 0)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)
        thread.module = place

    def line(self, thread: Thread, place: int, flags: int = 0) -> None:
        """Note that a line is the innermost one from now on."""
        now = self.note(place, flags)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)
        thread.line = place

    def phase(self, thread: Thread, place: int, flags: int = 0) -> None:
        """Note that a phase begins."""
        if place != thread.phase:
            self.cross(thread, place, flags)
            thread.phase = place
