"""Follows modules and lines by events of Python: where the stack is not read at each launch (`stack_tracker`).

Of the ten setups that are supported with the compiled probe (PyTorch or JAX on Python 3.11 to 3.15), four need these
events: JAX on Python 3.12 and newer. CUPTI records the launches of JAX, so no callback of a launch reads stacks. Four
read the stack: PyTorch on Python 3.12 and newer. It needs the events only with ``--with launches``, without the
compiled probe (no compiler, a Python without a GIL, ``THENCE_PROBE=python``), or if the layout of the stack is not the
known one. The other two have neither: for Python 3.11 there is no `sys.monitoring` and no known layout, so modules,
lines, phases and steps are not recorded there.

The line of the user's own code that runs is noted with its chain of calls, whenever it changes. A line is watched until
it has run `QUIET_RUNS` times without a launch meanwhile; then its events are switched off. At a later step
(`CHANCE_SECONDS`) they are switched on again for one run. A line that has launched once is not switched off any more.

Lines that are switched off cause no boundaries, so the place noted before them holds for them, too. *Line X is noted
with its number only if every line that can run right after it is watched* (`successors`): then the next event ends
X, and every launch in between belongs to X. Otherwise the place noted is that of the function, with the line 0. To keep
the numbers of lines that launch, the lines right after them are never switched off.

A function that was called `QUIET_CALLS` times without a launch is not watched any more; what it launches later is
attributed to its caller. So the cost of watching is bounded for every program.
"""

from __future__ import annotations

import dis
import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.log import ENDS
from thence.capture.boundaries.places import LINE, Place
from thence.capture.torch.modules import ModuleCalls, ModulePaths
from thence.capture.torch.monitoring import ALL_LINES, CALLS, Handler, Monitor, running_codes
from thence.capture.torch.threads import Common, Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from thence.capture.boundaries.chains import Chains
    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.torch.modules import ModuleListener
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.phases import PhasePlaces
    from thence.capture.torch.running_nodes import RunningNodes
    from thence.capture.torch.threads import Thread

QUIET_RUNS = 32
"""Runs in a row without a launch after which a line is switched off."""
QUIET_CALLS = 10_000
"""Calls in a row without a launch after which a function is no longer watched."""
BLIND_RUNS = 20_000
"""Runs after which a line is switched off if the counter does not work, because every launch is recorded instead."""
CHANCE_SECONDS = 0.5
"""The shortest time after which lines are switched on again: doing it at every short step would cost too much."""
MAX_FUNCTIONS = 20_000
"""Limit on tracked functions: a program can make any number of them."""
MAX_PLACES = 200_000
"""The number of places from which on only lines are distinguished, not their chains of calls."""
_MAX_FRAMES = 500
"""Limit on the depth of a stack that is rebuilt."""
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "INTERPRETER_EXIT"})
_JUMPS_ALWAYS = frozenset(
    {*("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP", "JUMP_NO_INTERRUPT")}
)
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


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
        max_quiet: how often it may do so before it is switched off.
        loud: whether it has launched something.
    """

    __slots__ = ("loud", "max_quiet", "quiet")

    def __init__(self, max_quiet: int) -> None:
        self.quiet = 0
        self.max_quiet = max_quiet
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
        return self._tables.setdefault(parent, {})

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
            line.max_quiet = line.quiet + 1
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
            # An event was missed, as that of a call which began before the recording: the frames say what runs.
            if any(activation.function is self for activation in stack) or not stack:
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
                watch.monitor.rearm(self.code, 0)  # its beginning, an event of all code, is disabled by `enter`
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
        activation.line = self.lines.setdefault(number, _Line(self._watch.max_quiet_runs))
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
        if not self._is_own(code.co_filename) or len(self._functions) >= MAX_FUNCTIONS:
            return None
        function = Function(code, self)
        self._functions.append(function)
        self.monitor.watch(code, function, ALL_LINES)
        return function

    def follow_running(self) -> None:
        """Follow the functions that run already, on all threads."""
        for code in running_codes():
            if self.monitor.handler(code) is None:
                self.unknown(code)

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
        if len(self._places) >= MAX_PLACES:
            self.too_many, parent = True, 0
        return self._places.number(Place(LINE, parent, code.co_qualname, code.co_filename, number))

    @property
    def max_quiet_runs(self) -> int:
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
        while frame is not None and len(frames) < _MAX_FRAMES:
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
                if not stack or stack[-1].function.code is not code:  # an event was missed
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
                    line = function.lines[number] = _Line(self.max_quiet_runs)
                activation.line, activation.number, activation.moved = line, number, thread.moved
                if activation.began < 0:
                    activation.began = thread.moved
                upcoming, log = common.sequence(), thread.log
                if upcoming != log.upcoming:
                    log.made(upcoming, thread.module, thread.line)
                thread.line = place
                if line.quiet >= line.max_quiet and not line.loud and number not in function.kept:
                    function.switch_off(number)
                    return disable
            except Exception as error:  # noqa: BLE001 - the program comes first
                failed(error)
            return None

        return line_begins


class EventTracker:
    """Follows by an event of every line and of every call of a module.

    Attributes:
        common, threads: the state of threads.
        paths: places of modules.
        monitor: the events of Python.
        chains: None, as stacks are not read.
    """

    chains: Chains | None = None

    def __init__(self, log: BoundaryLog, places: Places, is_own: OwnFiles, listener: ModuleListener) -> None:
        self.common = Common(log, places)
        self.threads = Threads(self.common)
        self.paths = ModulePaths(places)
        self._lines = Lines(self.common, self.threads, places, is_own)
        self.monitor = Monitor(self._lines.unknown, self._lines.on_line, listener.failed)
        self._lines.monitor = self.monitor
        self._calls = ModuleCalls(self.common, self.threads, self.paths, listener)
        self.step: Callable[[], None] = self._lines.step

    def start(self, *, lines: bool) -> None:
        """Begin, with or without the lines of the user's own code."""
        self.common.calibrate()
        self.monitor.start(everywhere=lines)
        if lines:
            self._lines.follow_running()

    pauses = False
    """Whether following can be switched off for a time: not if the state of threads is kept by events."""

    def resume(self, frame: FrameType | None) -> None:
        """Do nothing: there is no pause."""

    def torch_imported(self, torch: Any) -> str | None:
        """Handle the import of PyTorch; returns a sentence about what it lacks, None if nothing."""
        self.common.sequence = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - no public name
        return None

    def running_nodes(self, _torch: Any, _phases: PhasePlaces) -> RunningNodes | None:
        """Returns None: the autograd node that runs is not known without hooks."""
        return None

    def watch_modules(self, code: CodeType) -> None:
        """Follow calls of modules, by the code of ``nn.Module._wrapped_call_impl``."""
        self.monitor.watch(code, self._calls, CALLS)

    def watch_engine(self, code: CodeType, handler: Handler) -> None:
        """Follow calls of autograd's engine."""
        self.monitor.watch(code, handler, CALLS)

    def called_without_gradients(self) -> None:
        """Do nothing when a model is called without gradients."""

    @property
    def too_many(self) -> bool:
        """Whether there were too many chains of calls to distinguish them."""
        return self._lines.too_many


def successors(code: CodeType) -> dict[int, frozenset[int]]:
    """For each line, the other lines that can run next in the same call, through any jump or exception.

    Instructions without a line are skipped over to the instructions after them, as no line begins there.
    """
    instructions = list(dis.get_instructions(code))
    positions = {instruction.offset: position for position, instruction in enumerate(instructions)}
    lines = [instruction.positions.lineno if instruction.positions else None for instruction in instructions]
    edges: list[list[int]] = []
    for position, instruction in enumerate(instructions):
        targets = []
        if instruction.opcode in _JUMPS:
            targets.append(positions[instruction.argval])
        if instruction.opname not in _ENDS and instruction.opname not in _JUMPS_ALWAYS:
            targets.append(position + 1)
        edges.append([target for target in targets if target < len(instructions)])
    for start, end, target in _handlers(code):
        handler = positions.get(target)
        for offset in range(start, end, 2):
            if handler is not None and (position_ := positions.get(offset)) is not None:
                edges[position_].append(handler)
    after: dict[int, set[int]] = {line: set() for line in lines if line is not None}
    for position, line in enumerate(lines):
        if line is not None:
            after[line] |= _next_lines(position, edges, lines)
    return {line: frozenset(following - {line}) for line, following in after.items()}


def _next_lines(position: int, edges: list[list[int]], lines: list[int | None]) -> set[int]:
    """The lines that can begin right after the instruction at a position."""
    waiting, seen, following = list(edges[position]), set(edges[position]), set()
    while waiting:
        target = waiting.pop()
        line = lines[target]
        if line is not None:
            following.add(line)
            continue
        new = [after for after in edges[target] if after not in seen]
        seen.update(new)
        waiting += new
    return following


def _handlers(code: CodeType) -> list[tuple[int, int, int]]:
    """Start, end and target (byte offsets) of every range whose exceptions are handled.

    The format is described in CPython's ``Objects/exception_handling_notes.txt``: an entry is the numbers start, length
    and target, in units of two bytes, and depth. A number has six bits in each byte; bit 6 is set if another byte
    follows, and bit 7 in the first byte of an entry.
    """
    data = iter(code.co_exceptiontable)

    def number() -> int:
        byte = next(data)
        # bit 7 marks the beginning of an entry and is no part of the number
        value = byte & 63
        while byte & 64:
            byte = next(data)
            value = value << 6 | byte & 63
        return value

    ranges = []
    try:
        while True:
            start, length, target, _depth = number(), number(), number(), number()
            ranges.append((2 * start, 2 * (start + length), 2 * target))
    except StopIteration:
        return ranges
