"""Follows modules and lines by the stack, which the compiled probe reads at each launch.

This costs a tenth to a fifth of following by events (`thence.capture.torch.event_tracker`), and no line is ever
switched off. It requires the compiled probe, called at every launch, and a Python version whose stack layout is known
(`thence.capture.boundaries.stacks`).

`thence.capture.boundaries.chains` binds that part of the probe. No Python code runs at calls of modules and at lines:
the callbacks of `sys.monitoring` are compiled (``_events.c``). They only call Python for modules that have no place
yet, and for calls outside of all other modules. They note in which chain autograd nodes are made, for the backward
pass.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.chains import ENGINE, MODULE_CALL, WATCHED, Chains
from thence.capture.torch.modules import ModulePaths
from thence.capture.torch.monitoring import ALL_LINES, CALLS, EVENTS, Handler, Monitor, outer_frames, running_codes
from thence.capture.torch.running_nodes import RunningNodes, library_function
from thence.capture.torch.threads import Common, ForwardLog, Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.torch.modules import ModuleListener
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.phases import PhasePlaces
    from thence.capture.torch.threads import Thread

MAX_FUNCTIONS = 20_000
"""Limit on tracked functions: a program can make any number of them, and they are kept alive."""
_CALLS_WITHOUT_NODES = 2
"""Calls of a model after which the events of lines are switched off, if no autograd node was made so far."""
_SEQUENCE = "_ZN2at15sequence_number4peekEv"
"""``at::sequence_number::peek``: the number of the next autograd node of the calling thread."""


class StackCommon(Common):
    """`Common` for recordings that read chains from stacks."""

    def __init__(self, log: BoundaryLog, places: Places, chains: Chains) -> None:
        super().__init__(log, places)
        self._log = log
        self._chains = chains
        self._logs: dict[int, ForwardLog] = {}
        self._claimed: set[int] = set()
        self._lock = threading.RLock()

    def joined(self, thread: Thread) -> None:
        """Prepare for the first boundary of a thread; nodes that it made before are known already."""
        if self._chains.native.in_node():  # a thread of the engine, which runs nothing else
            thread.phase = self._chains.phases[0]
        with self._lock:
            self._drain()
            native = threading.get_native_id()
            known = self._logs.get(native)
            if known is not None and native not in self._claimed:
                thread.log = thread.forward = known
            self._logs[native] = thread.log
            self._claimed.add(native)

    def made(self, _thread: Thread) -> None:
        """Bring the logs of all threads up to date."""
        self._chains.native.here()
        self._drain()

    def here(self, _thread: Thread) -> tuple[int, int]:
        """See `Common`."""
        return self._chains.here()

    def make_in(self, thread: Thread, log: ForwardLog) -> None:
        """See `Common`."""
        with self._lock:
            self.made(thread)
            thread.log = self._logs[threading.get_native_id()] = log

    def inside_node(self, thread: Thread) -> bool:
        """See `Common`."""
        return super().inside_node(thread) or self._chains.native.in_node()

    def enter_engine(self, thread: Thread) -> tuple[Any, ...]:
        """See `Common`."""
        return super().enter_engine(thread), self._chains.native.enter_engine()

    def leave_engine(self, thread: Thread, state: tuple[Any, ...]) -> bool:
        """See `Common`."""
        if thread.log is not state[0][-1]:  # it ran nodes with hooks
            self.make_in(thread, state[0][-1])
        super().leave_engine(thread, state[0])
        return bool(self._chains.native.leave_engine(state[1]))

    def begin_node(self, _thread: Thread, module: int | None, line: int | None) -> None:
        """See `Common`."""
        if module is None or line is None:
            return  # the places of the node before hold
        self._chains.native.go_below(0, 1, module, line)
        if self._log.observer is not None:
            for place in (module, line):
                self._log.observer(place)

    def end_nodes(self, thread: Thread) -> None:
        """See `Common`."""
        self.make_in(thread, thread.forward)
        super().end_nodes(thread)
        self._chains.native.go_below(0, 0, 0, 0)

    def _drain(self) -> None:
        with self._lock:
            for rows, modules, lines in self._chains.take_made():
                for native in sorted(set(rows["thread"].tolist())):
                    mine = rows["thread"] == native
                    self._made(native, rows[mine], modules[mine].tolist(), lines[mine].tolist())

    def _made(self, native: int, rows: Any, modules: list[int], lines: list[int]) -> None:
        """Note the nodes that a thread made, given as rows of `Chains.take_made` and their places."""
        begins, end = rows["begin"].tolist(), int(rows["end"][-1])
        log = self._logs.get(native)
        if log is None or begins[0] < log.upcoming:  # an earlier thread had the same number
            log = self._logs[native] = ForwardLog(makers=self.makers)
            self._claimed.discard(native)
        if begins[0] > log.upcoming:
            log.made(begins[0], *self.nowhere[:2])
        log.extend(begins, modules, lines, end)


class OwnFunctions:
    """The functions of the user's own code.

    Attributes:
        monitor: set by the code that makes both objects.
    """

    monitor: Monitor

    def __init__(self, chains: Chains, is_own: OwnFiles) -> None:
        self._chains = chains
        self._is_own = is_own
        self._codes: list[CodeType] = []
        self._events = ALL_LINES
        self._calls = 0
        chains.observed = self.arm

    def unknown(self, code: CodeType) -> None:
        """Register a function that is called for the first time, if it is the user's."""
        if self._is_own(code.co_filename) and len(self._codes) < MAX_FUNCTIONS:
            self._codes.append(code)
            self._chains.own(code)
            self.monitor.rearm(code, self._events)

    def follow_running(self) -> None:
        """Register the functions that run already, on all threads."""
        for code in running_codes():
            if self._chains.kind(code) == 0:
                self.unknown(code)

    def called_without_gradients(self) -> None:
        """Count a call of a model; after two, lines are not followed if no autograd node has been made."""
        self._calls += 1
        if self._calls == _CALLS_WITHOUT_NODES and self._chains.native.go_idle():
            self._switch(0)

    def arm(self) -> None:
        """Follow lines (again), because a node was made or an observer was set."""
        self._calls = 0
        if self._events != ALL_LINES:
            self._switch(ALL_LINES)

    def _switch(self, events: int) -> None:
        self._events = events
        for code in self._codes:
            self.monitor.rearm(code, events)


class StackModules:
    """Handles the calls of modules that ``_events.c`` reports."""

    def __init__(self, threads: Threads, module_paths: ModulePaths, listener: ModuleListener) -> None:
        self._threads = threads
        self._paths = module_paths
        self._listener = listener

    def begins(self, module: Any, is_outermost: int, around: int) -> None:
        """Handle the call of a module that has no place yet, or of a module outside of all other modules."""
        try:
            self._paths.number(module, around)
            if is_outermost:
                frame = sys._getframe(1)  # noqa: SLF001 - no other way to the caller's frame
                self._listener.outermost(self._threads.now, module, frame)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self._listener.failed(error)

    def ends(self) -> None:
        """Handle the end of a call outside of all other modules."""
        try:
            self._listener.outermost_ended(self._threads.now)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self._listener.failed(error)


class StackMonitor(Monitor):
    """`Monitor`, with the callbacks of ``_events.c``.

    Attributes:
        modules: handles calls of modules; set by the code that makes both objects.
    """

    modules: StackModules

    def __init__(self, chains: Chains, functions: OwnFunctions, failed: Callable[[BaseException], None]) -> None:
        super().__init__(functions.unknown, lambda _: chains.native.on_line, failed)
        self._chains = chains
        self._functions = functions

    def watch(self, code: CodeType, handler: Handler, events: int) -> None:
        """See `Monitor`."""
        self._chains.watch(code, WATCHED)
        super().watch(code, handler, events)

    def watch_engine(self, code: CodeType, handler: Handler) -> None:
        """Follow autograd's engine."""
        super().watch(code, handler, CALLS)
        self._chains.watch(code, ENGINE)

    def watch_modules(self, code: CodeType) -> None:
        """Follow the calls of modules, whose first local is the module."""
        self._chains.watch(code, MODULE_CALL)
        self.rearm(code, CALLS)  # without a `Handler`: the compiled callbacks handle these calls

    def stop(self) -> None:
        """See `Monitor`."""
        super().stop()
        self._chains.end()
        self._chains.native.observe_stacks(None)
        self._chains.native.set_callbacks(())

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        native, python = self._chains.native, super()._callbacks()
        given = [python[event] for event in (EVENTS.PY_START, EVENTS.PY_RESUME, EVENTS.PY_RETURN)]
        ours = (self.modules.begins, self.modules.ends, self._functions.arm)
        native.set_callbacks((*given, python[EVENTS.PY_THROW], *ours))
        leave = native.on_leave
        return {
            EVENTS.PY_START: native.on_start,
            EVENTS.PY_RESUME: native.on_resume,
            EVENTS.PY_RETURN: leave,
            EVENTS.PY_YIELD: leave,
            EVENTS.PY_UNWIND: leave,
            EVENTS.PY_THROW: native.on_throw,
            EVENTS.LINE: native.on_line,
        }


class StackTracker:
    """Follows by the stack, which the compiled probe reads at each launch.

    Attributes:
        common, threads, paths, monitor: as in `EventTracker`.
        chains: the chains that are read from stacks.

    Args:
        lines: whether lines are noted, or only modules.
    """

    def __init__(
        self,
        log: BoundaryLog,
        places: Places,
        reader: ModuleType,
        is_own: OwnFiles,
        listener: ModuleListener,
        *,
        lines: bool,
    ) -> None:
        self.chains = chains = log.chains = Chains(reader, places, lines=lines)
        chains.begin()
        self.common = StackCommon(log, places, chains)
        self.threads = Threads(self.common)
        self.paths = ModulePaths(places, reader.add_module)
        self._functions = OwnFunctions(chains, is_own)
        self.monitor = monitor = StackMonitor(chains, self._functions, listener.failed)
        self._functions.monitor = monitor
        monitor.modules = StackModules(self.threads, self.paths, listener)
        self._monitor = monitor
        self._lines = lines

    pauses = True
    """See `EventTracker`."""

    def start(self, *, lines: bool) -> None:
        """Begin, with or without the lines of the user's own code."""
        self.monitor.start(everywhere=lines)
        if lines:
            self._functions.follow_running()

    def resume(self, frame: FrameType | None) -> None:
        """Follow again after a pause of the monitor: register what began meanwhile and still runs.

        Lines and modules of launches are read from the stack, so only functions and modules that are new have to be
        made known.
        """
        self.chains.native.events_go_on()
        self.monitor.resume()
        if self._lines:
            self._functions.follow_running()
        around = 0
        for outer in outer_frames(frame):
            if self.chains.kind(outer.f_code) == MODULE_CALL:
                around = self.paths.number(outer.f_locals["self"], around)

    def step(self) -> None:
        """Do nothing at the beginning of a step: no line is switched off."""

    def torch_imported(self, torch: Any) -> str | None:
        """Handle the import of PyTorch; returns a sentence about what it lacks, None if nothing."""
        self.common.sequence = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - no public name
        address = counter_of_nodes(torch)
        self.chains.native.count_nodes(address)
        if address:
            return None
        return "the sequence numbers of autograd nodes cannot be read from this PyTorch version"

    def running_nodes(self, torch: Any, phases: PhasePlaces) -> RunningNodes | None:
        """Returns the reader of the autograd node that runs, which needs no hooks once it has been tested."""
        self.chains.phases = phases.backward, phases.gradient
        return RunningNodes(torch, self.chains.native, self.chains.nodes)

    def watch_modules(self, code: CodeType) -> None:
        """Follow calls of modules, by the code of ``nn.Module._wrapped_call_impl``."""
        self._monitor.watch_modules(code)

    def watch_engine(self, code: CodeType, handler: Handler) -> None:
        """Follow calls of autograd's engine."""
        self._monitor.watch_engine(code, handler)

    def called_without_gradients(self) -> None:
        """Note that a model was called without gradients."""
        self._functions.called_without_gradients()

    @property
    def too_many(self) -> bool:
        """Whether there were too many chains of calls to distinguish them."""
        return bool(self.chains.lost()[2])


def counter_of_nodes(torch: Any) -> int:
    """Address of the function that returns the number of the next autograd node; 0 if there is none that works."""
    address = library_function(torch, _SEQUENCE)
    if not address:
        return 0
    expected = torch._C._autograd._get_sequence_nr()  # noqa: SLF001 - no public name
    return address if ctypes.CFUNCTYPE(ctypes.c_uint64)(address)() == expected else 0
