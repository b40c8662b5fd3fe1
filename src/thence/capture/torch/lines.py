"""Notes the line of the user's own code that runs, with its chain of calls, whenever it changes.

A line is watched until it has run `QUIET_RUNS` times without a launch meanwhile; then its events are switched off. At
a later step (`CHANCE_SECONDS`) they are switched on again for one run. A line that has launched
once is not switched off any more.

Lines that are switched off cause no boundaries, so the place noted before them holds for them, too. *Line X is noted
with its number only if every line that can run right after it is watched* (`successors`): then the next event ends
X, and every launch in between belongs to X. Otherwise the place noted is that of the function, with the line 0. To keep
the numbers of lines that launch, the lines right after them are never switched off.

A function that was called `QUIET_CALLS` times without a launch is not watched any more; what it launches later is
attributed to its caller. So the cost of watching is bounded for every program.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.log import ENDS
from thence.capture.boundaries.places import LINE, Place
from thence.capture.torch.monitoring import ALL_LINES, Monitor
from thence.capture.torch.successors import successors

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from thence.capture.boundaries.places import Places
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.threads import Common, Thread, Threads

QUIET_RUNS = 32
QUIET_CALLS = 10_000
"""Calls in a row without a launch after which a function is no longer watched."""
BLIND_RUNS = 20_000
"""Runs after which a line is switched off if the counter does not work, because every launch is recorded instead."""
CHANCE_SECONDS = 0.5
"""The shortest time after which lines are switched on again: doing it at every short step would cost too much."""
MOST_FUNCTIONS = 20_000
"""The most functions that are followed: a program can make any number of them."""
MOST_PLACES = 200_000
"""The number of places from which on only lines are distinguished, not their chains of calls."""
_MOST_FRAMES = 500


class Activation:
    """One call of a function.

    Attributes:
        function: the function that is called.
        table: places of the function's lines in this chain of calls.
        parent: place of the line that called it.
        number: number of the line that runs; 0 as long as no line is known.
        line: state of that line; None as long as no line is known.
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
    """The state of one line.

    Attributes:
        quiet: how often the line ran without a launch.
        most: how often it may do so before it is switched off.
        loud: whether it has launched something.
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
        kept: numbers of the lines that must not be switched off, as they may run right after a line that launches.
        wanted: whether some lines of `kept` are switched off.
        quiet: number of calls without any launch since the last call with one.
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
        """Places of the function's lines if it is called from the place `parent`; `place` fills the table."""
        found = self._tables.get(parent)
        if found is None:
            found = self._tables[parent] = {}
        return found

    def place(self, activation: Activation, number: int) -> int:
        """The place of a line, or of the function if a line that is switched off can run right after it."""
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
        """Note that a line launched something, for the first time."""
        self.lines[number].loud = True
        self.kept |= self.after(number)
        self.wanted = bool(self.off & self.kept)

    def switch_off(self, number: int) -> None:
        """Note that a line has no events from now on."""
        self.off.add(number)
        for table in self._tables.values():
            table.clear()

    def rearm(self) -> None:
        """Watch all lines again; those that were switched off, for one run."""
        for number in self.off:
            line = self.lines[number]
            line.most = line.quiet + 1
        self.off.clear()
        self.wanted = False
        for table in self._tables.values():
            table.clear()
        self._watch.monitor.rearm(self.code, ALL_LINES)

    def enter(self) -> Any:
        """Handle a call of the function."""
        if self.quiet >= QUIET_CALLS:
            return self._watch.monitor.disable
        if self.wanted:
            self.rearm()
        thread = self._watch.threads.now
        stack = thread.stack
        activation = Activation(self, stack[-1].place() if stack else 0)
        stack.append(activation)
        if self.off:  # its first line may be switched off
            self._watch.common.line(thread, activation.place())
            activation.began = thread.moved
        return None

    def leave(self) -> None:
        """Handle that the function returns, yields or raises: its caller's line continues."""
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
        else:
            self.quiet = 0

    def resume(self) -> Any:
        """Handle that the function continues after a yield, in the middle of a line."""
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
        # A thread that has left the user's code is taken to be waiting. The main thread may be in a library instead.
        idle = not stack and not thread.modules and thread.log is thread.forward
        ends = idle and thread.number != self._watch.main
        self._watch.common.line(thread, place, ENDS if ends else 0)


class Lines:
    """Notes the lines of the user's own code.

    Args:
        common, threads: the state of threads.
        places: gives numbers to lines.
        is_own: whether a file is the user's.

    Attributes:
        monitor: set by the code that makes both objects.
        too_many: whether there were too many chains of calls to distinguish them.
        main: identifier of the main thread.
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
        """Switch lines on again at the beginning of a step, for one run."""
        now = monotonic()
        due = now >= self._next_chance
        if due:
            self._next_chance = now + CHANCE_SECONDS
        for function in self._functions:
            if function.off and (due or function.wanted) and function.quiet < QUIET_CALLS:
                function.rearm()

    def place(self, code: CodeType, parent: int, number: int) -> int:
        """The place of a line in a call from the place `parent`."""
        if len(self._places) >= MOST_PLACES:
            self.too_many, parent = True, 0
        return self._places.number(Place(LINE, parent, code.co_qualname, code.co_filename, number))

    @property
    def most_runs(self) -> int:
        """How often a line may run without a launch before it is switched off."""
        return BLIND_RUNS if self.common.blind else QUIET_RUNS

    @staticmethod
    def judge(activation: Activation, line: _Line, thread: Thread) -> None:
        """Note at the end of a line, which was not known to launch, whether it did."""
        if thread.moved == activation.moved:
            line.quiet += 1
        else:
            activation.function.launched(activation.number)

    def activations(self, frame: FrameType | None) -> list[Activation]:
        """The activations of a frame and its callers, to rebuild the stack of a thread after missed events."""
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

    def on_line(  # noqa: C901 - helper functions would cost more than their work
        self, failed: Callable[[BaseException], None]
    ) -> Callable[[CodeType, int], Any]:
        """Returns the callback of `sys.monitoring` for lines that begin; it passes its errors to `failed`."""
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
