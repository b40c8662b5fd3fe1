"""The line of the user's own code that runs, as a chain of calls, noted as it changes.

A line is watched until it has run `QUIET_RUNS` times without anything being launched meanwhile; then its events
are switched off, and at a later step (`CHANCE_SECONDS`) it gets one more chance. A line that launched once stays on
for good.

Switched-off lines leave no trace, so a place that is noted for a line must hold for them too. *Line X is noted with
its number only where every line that can run right after it is watched* (`successors`): then the next event ends
it, and what was launched in between is X's. Otherwise its place is that of the function, with the line 0. To keep
numbers for lines that launch, the lines right after them are never switched off.

A function that ran `QUIET_CALLS` times without launching is not looked at any more; what it should launch later
counts as its caller's. So what watching costs is bounded, whatever a program does.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from thence.boundaries.log import ENDS
from thence.boundaries.places import LINE, Place
from thence.hooks.torch.monitoring import ALL_LINES, Monitor
from thence.hooks.torch.successors import successors

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from thence.boundaries.places import Places
    from thence.hooks.torch.own_files import OwnFiles
    from thence.hooks.torch.threads import Common, Thread, Threads

__all__ = [
    "BLIND_RUNS",
    "CHANCE_SECONDS",
    "QUIET_CALLS",
    "QUIET_RUNS",
    "Activation",
    "Function",
    "Lines",
]

QUIET_RUNS = 32
QUIET_CALLS = 10_000
BLIND_RUNS = 20_000
"""Runs after which a line is switched off where the counter does not say what launched: every launch is recorded."""
CHANCE_SECONDS = 0.5
"""How often lines that were switched off get another chance, at most: short steps would pay more than it tells."""
MOST_FUNCTIONS = 20_000
"""Functions that are followed at most: a program can make them without end."""
MOST_PLACES = 200_000
"""Places beyond which chains are no longer told apart, only lines."""
_MOST_FRAMES = 500


class Activation:
    """One call of a function.

    Attributes:
        function: which.
        table: places of the function's lines in this chain of calls.
        parent: place of the line that called it.
        number: of the line that runs; 0 as long as none is known.
        line: that line; None as long as it is not known.
        moved: `Thread.moved` when the line began.
        began: `Thread.moved` when the call began; -1 as long as it has crossed no boundary.
    """

    __slots__ = ("began", "function", "line", "moved", "number", "parent", "table")

    def __init__(self, function: Function, parent: int) -> None:
        self.function = function
        self.parent = parent
        self.table = function.table(parent)
        self.number = 0
        self.line: _Line | None = None
        self.moved = 0
        self.began = -1

    def place(self) -> int:
        """The place of the line that runs."""
        return self.table.get(self.number) or self.function.place(self, self.number)


class _Line:
    """What is known of one line.

    Attributes:
        quiet: how often it ran without anything being launched.
        most: how often it may, before it is switched off.
        loud: whether it has launched.
    """

    __slots__ = ("loud", "most", "quiet")

    def __init__(self, most: int) -> None:
        self.quiet = 0
        self.most = most
        self.loud = False


class Function:
    """A function of the user's, as a `Handler`.

    Attributes:
        code: its code.
        lines: its lines by number.
        off: numbers of the lines that are switched off.
        kept: numbers of those that are not to be: one that launches may run right before them.
        wanted: whether some of the latter are switched off.
        quiet: calls without any launch.
    """

    __slots__ = ("_after", "_tables", "_watch", "code", "kept", "lines", "off", "quiet", "wanted")

    def __init__(self, code: CodeType, watch: Lines) -> None:
        self.code = code
        self.lines: dict[int, _Line] = {}
        self.off: set[int] = set()
        self.kept: set[int] = set()
        self.wanted = False
        self.quiet = 0
        self._tables: dict[int, dict[int, int]] = {}
        self._after: dict[int, frozenset[int]] | None = None
        self._watch = watch

    def table(self, parent: int) -> dict[int, int]:
        """Places of its lines when it is called from a place; `place` fills it."""
        found = self._tables.get(parent)
        if found is None:
            found = self._tables[parent] = {}
        return found

    def place(self, activation: Activation, number: int) -> int:
        """The place of a line; of the function, where lines are not certain."""
        exact = number and not (self.off and self.off & self.after(number))
        place = self._watch.place(self.code, activation.parent, number if exact else 0)
        activation.table[number] = place
        return place

    def after(self, number: int) -> frozenset[int]:
        """Lines that can run right after a line."""
        if self._after is None:
            self._after = successors(self.code)
        return self._after.get(number, frozenset())

    def launched(self, number: int) -> None:
        """A line launched something, for the first time."""
        self.lines[number].loud = True
        self.kept |= self.after(number)
        self.wanted = bool(self.off & self.kept)

    def switch_off(self, number: int) -> None:
        """A line has no events from now on."""
        self.off.add(number)
        for table in self._tables.values():
            table.clear()

    def rearm(self) -> None:
        """All lines are watched again; those that were switched off for one run."""
        for number in self.off:
            line = self.lines[number]
            line.most = line.quiet + 1
        self.off.clear()
        self.wanted = False
        for table in self._tables.values():
            table.clear()
        self._watch.monitor.rearm(self.code, ALL_LINES)

    def enter(self) -> Any:
        """It is called."""
        if self.quiet >= QUIET_CALLS:
            return self._watch.monitor.disable
        if self.wanted:
            self.rearm()
        thread = self._watch.threads.now
        stack = thread.stack
        activation = Activation(self, stack[-1].place() if stack else 0)
        stack.append(activation)
        if self.off:  # its first line may be one of them
            self._watch.common.line(thread, activation.place())
            activation.began = thread.moved
        return None

    def leave(self) -> None:
        """It returns, yields or fails: its caller's line goes on."""
        watch = self._watch
        thread = watch.threads.now
        stack = thread.stack
        if not stack or stack[-1].function is not self:
            if any(one.function is self for one in stack) or not stack:
                thread.stack = watch.activations(sys._getframe(2).f_back)  # noqa: SLF001
                self._return_to_caller(thread)
            return
        activation = stack.pop()
        if stack:
            caller = stack[-1]
            place = caller.table.get(caller.number) or caller.place()
            if place != thread.line:
                watch.common.line(thread, place)
        else:
            self._return_to_caller(thread)
        line = activation.line
        if line is not None and not line.loud:
            watch.judge(activation, line, thread)
        if activation.began == thread.moved:
            self.quiet += 1
            if self.quiet == QUIET_CALLS:
                watch.monitor.rearm(self.code, 0)

    def resume(self) -> Any:
        """It goes on after a yield, in the middle of a line."""
        if self.quiet >= QUIET_CALLS:
            return self._watch.monitor.disable
        thread = self._watch.threads.now
        stack = thread.stack
        activation = Activation(self, stack[-1].place() if stack else 0)
        stack.append(activation)
        number = sys._getframe(2).f_lineno or 0  # noqa: SLF001 - no other way to the caller's frame
        activation.number = number
        self._watch.common.line(thread, activation.place())
        activation.line = self.lines.setdefault(number, _Line(self._watch.most_runs))
        activation.moved = activation.began = thread.moved
        return None

    def _return_to_caller(self, thread: Thread) -> None:
        stack = thread.stack
        place = stack[-1].place() if stack else thread.below
        if place == thread.line:
            return
        # A thread that has left the user's code waits for more of it; the main thread may be in a library's.
        idle = not stack and not thread.modules and thread.log is thread.forward
        ends = idle and thread.number != self._watch.main
        self._watch.common.line(thread, place, ENDS if ends else 0)


class Lines:
    """Notes the lines of the user's own code.

    Args:
        common, threads: what is known of threads.
        places: takes numbers for lines.
        is_own: whether a file is the user's.

    Attributes:
        monitor: set by who makes both.
        too_many: whether chains of calls were too many to be told apart.
        main: the main thread's number.
    """

    monitor: Monitor

    def __init__(self, common: Common, threads: Threads, places: Places, is_own: OwnFiles) -> None:
        self.common = common
        self.threads = threads
        self.too_many = False
        self.main = threading.main_thread().ident
        self._places = places
        self._is_own = is_own
        self._functions: list[Function] = []
        self._next_chance = 0.0

    def unknown(self, code: CodeType) -> Function | None:
        """Follow a function that is called for the first time, if it is the user's."""
        if not self._is_own(code.co_filename) or len(self._functions) >= MOST_FUNCTIONS:
            return None
        function = Function(code, self)
        self._functions.append(function)
        self.monitor.watch(code, function, ALL_LINES)
        return function

    def follow_running(self) -> None:
        """Follow the functions that run already, on all threads."""
        for frame in sys._current_frames().values():  # noqa: SLF001 - no other name
            at: FrameType | None = frame
            while at is not None:
                if self.monitor.handler(at.f_code) is None:
                    self.unknown(at.f_code)
                at = at.f_back

    def step(self) -> None:
        """A step begins: lines that were switched off get another chance."""
        now = monotonic()
        due = now >= self._next_chance
        if due:
            self._next_chance = now + CHANCE_SECONDS
        for function in self._functions:
            if function.off and (due or function.wanted) and function.quiet < QUIET_CALLS:
                function.rearm()

    def place(self, code: CodeType, parent: int, number: int) -> int:
        """The place of a line that is reached from another."""
        if len(self._places) >= MOST_PLACES:
            self.too_many, parent = True, 0
        return self._places.number(Place(LINE, parent, code.co_qualname, code.co_filename, number))

    @property
    def most_runs(self) -> int:
        """How often a line may run without any launch, before it is switched off."""
        return BLIND_RUNS if self.common.blind else QUIET_RUNS

    @staticmethod
    def judge(activation: Activation, line: _Line, thread: Thread) -> None:
        """A line is over that was not known to launch."""
        if thread.moved == activation.moved:
            line.quiet += 1
        else:
            activation.function.launched(activation.number)

    def activations(self, frame: FrameType | None) -> list[Activation]:
        """The stack of a thread in a frame: where events were missed."""
        frames: list[tuple[Function, int]] = []
        while frame is not None and len(frames) < _MOST_FRAMES:
            function = self.monitor.handler(frame.f_code)
            if isinstance(function, Function) and function.quiet < QUIET_CALLS:
                frames.append((function, frame.f_lineno or 0))
            frame = frame.f_back
        stack: list[Activation] = []
        for function, number in reversed(frames):
            activation = Activation(function, stack[-1].place() if stack else 0)
            activation.number = number
            stack.append(activation)
        return stack

    def on_line(  # noqa: C901 - every call would cost more than what it does
        self, failed: Callable[[BaseException], None]
    ) -> Callable[[CodeType, int], Any]:
        """The callback of `sys.monitoring` for lines that begin; `failed` is told of its errors."""
        threads, common, note = self.threads, self.common, self.common.note
        own, disable = common.own, self.monitor.disable
        activations, judge = self.activations, self.judge

        def line_begins(code: CodeType, number: int) -> Any:
            try:
                thread = threads.now
                stack = thread.stack
                if not stack or stack[-1].function.code is not code:
                    stack = thread.stack = activations(sys._getframe(1))  # noqa: SLF001
                    if not stack or stack[-1].function.code is not code:
                        return None
                activation = stack[-1]
                function = activation.function
                place = activation.table.get(number) or function.place(activation, number)
                now = note(place, 0)
                if now - thread.last != own:
                    thread.moved += 1
                thread.last = now
                before = activation.line
                if before is not None and not before.loud:
                    judge(activation, before, thread)
                line = function.lines.get(number)
                if line is None:
                    line = function.lines[number] = _Line(self.most_runs)
                activation.line, activation.number, activation.moved = line, number, thread.moved
                if activation.began < 0:
                    activation.began = thread.moved
                upcoming, log = common.sequence(), thread.log
                if upcoming != log.upcoming:
                    log.made(upcoming, thread.module, thread.line)
                thread.line = place
                if line.quiet >= line.most and not line.loud and number not in function.kept:
                    function.switch_off(number)
                    return disable
            except Exception as error:  # noqa: BLE001 - the program comes first
                failed(error)
            return None

        return line_begins
