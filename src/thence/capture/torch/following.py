"""The two ways to follow modules and lines: by the stack at each launch, or by an event for each line and call.

The stack is far better: it costs a tenth to a fifth of the events, and no line is ever switched off. It requires the
compiled probe, called at every launch, and a Python version whose stack layout is known
(`thence.capture.boundaries.stacks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from thence.capture.boundaries.chains import MODULE_CALL, Chains
from thence.capture.torch.lines import Lines
from thence.capture.torch.modules import ModuleCalls, ModulePaths
from thence.capture.torch.monitoring import CALLS, Handler, Monitor
from thence.capture.torch.running_nodes import RunningNodes
from thence.capture.torch.stack_following import OwnFunctions, StackCommon, StackModules, StackMonitor, counter_of_nodes
from thence.capture.torch.threads import Common, Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.torch.own_files import OwnFiles
    from thence.capture.torch.phases import PhasePlaces
    from thence.capture.torch.threads import Thread


class Told(Protocol):
    """Receives calls of outermost modules, and errors."""

    def outermost(self, thread: Thread, module: Any, frame: Any) -> None:
        """Handle the call of a module outside of all other modules on its thread."""

    def over(self, thread: Thread) -> None:
        """Handle the end of such a call."""

    def failed(self, error: BaseException) -> None:
        """Handle an internal error, after which nothing is followed any longer."""


class ByEvents:
    """Follows by an event of every line and of every call of a module.

    Attributes:
        common, threads: the state of threads.
        paths: places of modules.
        monitor: the events of Python.
        chains: None, as stacks are not read.

    Args:
        log, places: take boundaries and places.
        is_own: whether a file is the user's.
        told: receives calls and errors.
    """

    chains: Chains | None = None

    def __init__(self, log: BoundaryLog, places: Places, is_own: OwnFiles, told: Told) -> None:
        self.common = Common(log, places)
        self.threads = Threads(self.common)
        self.paths = ModulePaths(places)
        self._lines = Lines(self.common, self.threads, places, is_own)
        self.monitor = Monitor(self._lines.unknown, self._lines.on_line, told.failed)
        self._lines.monitor = self.monitor
        self._calls = ModuleCalls(self.common, self.threads, self.paths, told.outermost, told.over)
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

    def torch_is_there(self, torch: Any) -> str | None:
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


class ByStack:
    """Follows by the stack, which the compiled probe reads at each launch.

    Attributes:
        common, threads, paths, monitor: as in `ByEvents`.
        chains: the chains that are read from stacks.

    Args:
        log, places: take boundaries and places.
        reader: the compiled probe.
        is_own: whether a file is the user's.
        told: receives calls and errors.
        lines: whether lines are noted, or only modules.
    """

    def __init__(
        self, log: BoundaryLog, places: Places, reader: ModuleType, is_own: OwnFiles, told: Told, *, lines: bool
    ) -> None:
        self.chains = chains = log.chains = Chains(reader, places, lines=lines)
        chains.begin()
        self.common = StackCommon(log, places, chains)
        self.threads = Threads(self.common)
        self.paths = ModulePaths(places, reader.add_module)
        self._functions = OwnFunctions(chains, is_own)
        self.monitor = monitor = StackMonitor(chains, self._functions, told.failed)
        self._functions.monitor = monitor
        monitor.modules = StackModules(self.threads, self.paths, told.outermost, told.over, told.failed)
        self._monitor = monitor
        self._lines = lines

    pauses = True
    """See `ByEvents`."""

    def start(self, *, lines: bool) -> None:
        """Begin, with or without the lines of the user's own code."""
        self.monitor.start(everywhere=lines)
        if lines:
            self._functions.follow_running()

    def resume(self, frame: FrameType | None) -> None:
        """Follow again after a pause of the monitor: register what began meanwhile and still runs.

        Lines and modules of launches are read from the stack, so only functions and modules that are new have to be
        made known.

        Args:
            frame: where the calling thread is.
        """
        self.chains.native.events_go_on()
        self.monitor.resume()
        if self._lines:
            self._functions.follow_running()
        around = 0
        for at in outer_frames(frame):
            if self.chains.kind(at.f_code) == MODULE_CALL:
                around = self.paths.number(at.f_locals["self"], around)

    def step(self) -> None:
        """Do nothing at the beginning of a step: no line is switched off."""

    def torch_is_there(self, torch: Any) -> str | None:
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


def outer_frames(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


Way = ByEvents | ByStack
