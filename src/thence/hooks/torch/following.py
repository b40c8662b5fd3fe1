"""The two ways in which modules and lines are known: by the stack at each launch, or by events of every one.

The stack is the better way by far: it costs a tenth to a fifth, and no line is ever switched off. It takes the
compiled probe, called at every launch, and a version of Python whose stack is known (`thence.boundaries.stacks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from thence.boundaries.chains import Chains
from thence.hooks.torch.lines import Lines
from thence.hooks.torch.modules import ModuleCalls, ModulePaths
from thence.hooks.torch.monitoring import CALLS, Handler, Monitor
from thence.hooks.torch.running_nodes import RunningNodes
from thence.hooks.torch.stack_following import (
    OwnFunctions,
    StackCommon,
    StackModules,
    StackMonitor,
    counter_of_nodes,
)
from thence.hooks.torch.threads import Common, Threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, ModuleType

    from thence.boundaries.log import BoundaryLog
    from thence.boundaries.places import Places
    from thence.hooks.torch.own_files import OwnFiles
    from thence.hooks.torch.phases import PhasePlaces
    from thence.hooks.torch.threads import Thread

__all__ = ["ByEvents", "ByStack", "Told", "Way"]


class Told(Protocol):
    """Who is told of calls of modules, and of errors."""

    def outermost(self, thread: Thread, module: Any, frame: Any) -> None:
        """A module is called outside of all others on its thread."""

    def over(self, thread: Thread) -> None:
        """That call is over."""

    def failed(self, error: BaseException) -> None:
        """An error of ours: nothing is followed any longer."""


class ByEvents:
    """By an event of every line and of every call of a module.

    Attributes:
        common, threads: what is known of threads.
        paths: places of modules.
        monitor: events of Python's.
        chains: what is read of stacks: nothing.

    Args:
        log, places: take boundaries and places.
        is_own: whether a file is the user's.
        told: of calls and errors.
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
        """Begin; with the user's own lines or without."""
        self.common.calibrate()
        self.monitor.start(everywhere=lines)
        if lines:
            self._lines.follow_running()

    def torch_is_there(self, torch: Any) -> str | None:
        """PyTorch was imported; returns what it lacks, in words."""
        self.common.sequence = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - no public name
        return None

    def running_nodes(self, _torch: Any, _phases: PhasePlaces) -> RunningNodes | None:
        """Autograd's nodes that run, without hooks: not known."""
        return None

    def watch_modules(self, code: CodeType) -> None:
        """Follow calls of modules, by the code of ``nn.Module._wrapped_call_impl``."""
        self.monitor.watch(code, self._calls, CALLS)

    def watch_engine(self, code: CodeType, handler: Handler) -> None:
        """Follow calls of autograd's engine."""
        self.monitor.watch(code, handler, CALLS)

    def called_without_gradients(self) -> None:
        """A model was called without gradients."""

    @property
    def too_many(self) -> bool:
        """Whether chains of calls were too many to be told apart."""
        return self._lines.too_many


class ByStack:
    """By the stack, which the compiled probe reads at each launch.

    Attributes:
        common, threads, paths, monitor: as `ByEvents` has them.
        chains: what is read of stacks.

    Args:
        log, places: take boundaries and places.
        reader: the compiled probe.
        is_own: whether a file is the user's.
        told: of calls and errors.
        lines: whether lines are noted, or modules alone.
    """

    def __init__(
        self,
        log: BoundaryLog,
        places: Places,
        reader: ModuleType,
        is_own: OwnFiles,
        told: Told,
        *,
        lines: bool,
    ) -> None:
        self.chains = chains = log.chains = Chains(reader, places, lines=lines)
        chains.begin()
        self.common = StackCommon(log, places, chains)
        self.threads = Threads(self.common)
        self.paths = ModulePaths(places, reader.add_module)
        self._functions = OwnFunctions(chains, is_own)
        self.monitor = monitor = StackMonitor(chains, self._functions, told.failed)
        self._functions.monitor = monitor
        monitor.modules = StackModules(
            self.threads, self.paths, told.outermost, told.over, told.failed
        )
        self._monitor = monitor

    def start(self, *, lines: bool) -> None:
        """Begin; with the user's own lines or without."""
        self.monitor.start(everywhere=lines)
        if lines:
            self._functions.follow_running()

    def step(self) -> None:
        """A step begins."""

    def torch_is_there(self, torch: Any) -> str | None:
        """PyTorch was imported; returns what it lacks, in words."""
        self.common.sequence = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - no public name
        address = counter_of_nodes(torch)
        self.chains.native.count_nodes(address)
        if address:
            return None
        return "this PyTorch does not tell the numbers of autograd's nodes as thence knows it"

    def running_nodes(self, torch: Any, phases: PhasePlaces) -> RunningNodes | None:
        """Autograd's nodes that run, without hooks, if that can be known."""
        self.chains.phases = phases.backward, phases.gradient
        return RunningNodes(torch, self.chains.native, self.chains.nodes)

    def watch_modules(self, code: CodeType) -> None:
        """Follow calls of modules, by the code of ``nn.Module._wrapped_call_impl``."""
        self._monitor.watch_modules(code)

    def watch_engine(self, code: CodeType, handler: Handler) -> None:
        """Follow calls of autograd's engine."""
        self._monitor.watch_engine(code, handler)

    def called_without_gradients(self) -> None:
        """A model was called without gradients."""
        self._functions.called_without_gradients()

    @property
    def too_many(self) -> bool:
        """Whether chains of calls were too many to be told apart."""
        return bool(self.chains.lost()[2])


Way = ByEvents | ByStack
