"""What is known of each thread: the innermost place of every kind, and in which places autograd nodes were made.

CUPTI's counter, read at every boundary of a thread, tells whether anything was launched since its boundary
before; another thread's launches count too, so that "nothing was launched" is certain and "something was" is not.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from thence.boundaries.places import LINE, MODULE, PHASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.boundaries.log import BoundaryLog
    from thence.boundaries.places import Places

__all__ = ["Common", "ForwardLog", "Thread", "Threads"]

_LOG_LIMIT = 1 << 17
"""Entries of a forward log that are kept at least: those of one forward pass, many times over."""
_MOST_MAKERS = 64
"""Threads whose forward logs are kept, those that have ended included."""
_WORD = (1 << 32) - 1


class ForwardLog:
    """In which module and line the autograd nodes of a thread were made.

    Attributes:
        starts: sequence numbers of nodes, ascending: the first of those that were made in one place.
        modules: place of the innermost module from there on.
        lines: place of the innermost line from there on.
        upcoming: sequence number from which on nothing is noted yet.

    Args:
        upcoming: the same.
        makers: gets this log when it has more than what a thread did before its first boundary.
    """

    __slots__ = ("lines", "makers", "modules", "starts", "upcoming")

    def __init__(self, upcoming: int = 0, makers: list[ForwardLog] | None = None) -> None:
        self.makers = makers
        self.starts: list[int] = []
        self.modules: list[int] = []
        self.lines: list[int] = []
        self.upcoming = upcoming

    def made(self, upcoming: int, module: int, line: int) -> None:
        """Nodes were made, up to before this number, while a module and a line were innermost."""
        self.starts.append(self.upcoming)
        self.modules.append(module)
        self.lines.append(line)
        self.upcoming = upcoming
        if len(self.starts) == 2:
            self._join_makers()
        if len(self.starts) > 2 * _LOG_LIMIT:
            self._forget(_LOG_LIMIT)

    def extend(
        self, starts: list[int], modules: list[int], lines: list[int], upcoming: int
    ) -> None:
        """Nodes were made in several places, one after another; the first from `upcoming` on."""
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
            del self.makers[:-_MOST_MAKERS]

    def _forget(self, count: int) -> None:
        del self.starts[:count], self.modules[:count], self.lines[:count]

    def since(self, sequence: int) -> tuple[list[int], list[int], list[int]]:
        """`starts`, `modules` and `lines` that hold for nodes of a sequence number and greater ones."""
        first = max(bisect_right(self.starts, sequence) - 1, 0)
        return self.starts[first:], self.modules[first:], self.lines[first:]


class Thread:
    """One thread of the program.

    Attributes:
        number: what the interpreter calls it.
        last: the counter at its last boundary.
        moved: how often the counter had moved between two of its boundaries.
        module, line, phase: numbers of its innermost places.
        modules: numbers of the places of the modules that it is in, outermost first.
        phases: those around the innermost.
        stack: activations of the user's functions (`thence.hooks.torch.lines`), outermost first.
        below: the line below the outermost of these: of the forward, where an autograd node runs.
        around: the module around the outermost of `modules`, likewise.
        log: where autograd nodes are made now; `forward`, or another one while it runs such a node.
        running: the backward pass whose nodes it runs, if another thread called for it.
    """

    __slots__ = (
        *(
            "__weakref__",
            "around",
            "below",
            "forward",
            "last",
            "line",
            "log",
            "module",
            "modules",
            "moved",
        ),
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
        """What a backward pass changes, for `restore`."""
        places = (self.module, self.line, self.phase, self.around, self.below)
        return (*places, self.modules, self.stack, self.log)

    def restore(self, state: tuple[object, ...]) -> None:
        """Be where it was when `state` was asked."""
        self.module, self.line, self.phase, self.around, self.below = state[:5]  # type: ignore[assignment]
        self.modules, self.stack, self.log = state[5:]  # type: ignore[assignment]


class Threads(threading.local):
    """The calling thread, as attribute `now`.

    Args:
        common: what all threads share.
    """

    def __init__(self, common: Common) -> None:
        self.now = Thread(common.nowhere, common.makers)
        common.joined(self.now)


class Common:
    """What all threads share.

    Attributes:
        note: `BoundaryLog.note`.
        own: by how much a boundary itself moves the counter.
        blind: whether the counter is always 0, so that nothing says what launched.
        nowhere: places for no module, no line, no phase.
        makers: forward logs of the threads that made autograd nodes.
        sequence: the next sequence number of autograd on the calling thread; 0 always as long as torch is not there.
    """

    def __init__(self, log: BoundaryLog, places: Places) -> None:
        self.note = log.note
        self.own = 0
        self.blind = False
        self.nowhere = (places.nothing(MODULE), places.nothing(LINE), places.nothing(PHASE))
        self.sequence: Callable[[], int] = lambda: 0
        self.makers: list[ForwardLog] = []

    def calibrate(self) -> None:
        """See by how much a boundary itself moves the counter: other threads may move it, too."""
        counters = [self.note(0) for _ in range(5)]
        self.blind = not any(counters)
        self.own = min((after - before) & _WORD for before, after in pairwise(counters))

    def cross(self, thread: Thread, place: int, flags: int = 0) -> None:
        """The calling thread crosses a boundary."""
        now = self.note(place, flags)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now

    def made(self, thread: Thread) -> None:
        """The calling thread may have made autograd nodes since its boundary before, in the places that it was in."""
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)

    def joined(self, thread: Thread) -> None:
        """A thread is about to cross its first boundary."""

    def here(self, thread: Thread) -> tuple[int, int]:
        """Places of module and line that the calling thread is in."""
        return thread.module, thread.line

    def make_in(self, thread: Thread, log: ForwardLog) -> None:
        """What the calling thread makes from here on goes to another log."""
        thread.log = log

    def inside_node(self, thread: Thread) -> bool:
        """Whether the calling thread runs a node of autograd's."""
        return thread.log is not thread.forward

    def enter_engine(self, thread: Thread) -> tuple[Any, ...]:
        """The calling thread calls autograd's engine; returns the state to leave it with."""
        state = thread.state()
        thread.modules, thread.stack = [], []
        return state

    def leave_engine(self, thread: Thread, state: tuple[Any, ...]) -> bool:
        """The engine is done: the thread is where it was. Whether it is known to have run nodes that launched."""
        thread.restore(state)
        return False

    def begin_node(self, thread: Thread, module: int | None, line: int | None) -> None:
        """A node of autograd's begins on the calling thread, in the places of its forward; None: as before."""
        thread.around = thread.module if module is None else module
        thread.below = thread.line if line is None else line
        if thread.around != thread.module:
            self.module(thread, thread.around)
        if thread.below != thread.line:
            self.line(thread, thread.below)

    def end_nodes(self, thread: Thread) -> None:
        """The last node of a backward pass is over, on a thread of autograd's."""
        thread.log = thread.forward
        thread.around, thread.below = self.nowhere[:2]
        thread.modules, thread.stack, thread.phases = [], [], []

    # `module` and `line` are `cross` and `made` written out: two calls less at every event of the program.

    def module(self, thread: Thread, place: int) -> None:
        """A module is the innermost one now."""
        now = self.note(place, 0)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)
        thread.module = place

    def line(self, thread: Thread, place: int, flags: int = 0) -> None:
        """A line is the innermost one now."""
        now = self.note(place, flags)
        if now - thread.last != self.own:
            thread.moved += 1
        thread.last = now
        upcoming, log = self.sequence(), thread.log
        if upcoming != log.upcoming:
            log.made(upcoming, thread.module, thread.line)
        thread.line = place

    def phase(self, thread: Thread, place: int, flags: int = 0) -> None:
        """A phase begins."""
        if place != thread.phase:
            self.cross(thread, place, flags)
            thread.phase = place
