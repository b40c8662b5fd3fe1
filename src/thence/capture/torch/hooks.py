"""Follows a PyTorch program while it is recorded, so that it needs no annotations.

Modules, lines, phases and steps are noted when the program enters or leaves them (`thence.capture.boundaries`).
No function of PyTorch is replaced and no module hook is set, because both change what torch.compile generates.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol

from thence.capture.boundaries.stacks import why_unreadable
from thence.capture.torch.backward import BackwardCalls
from thence.capture.torch.compiled import CompiledPlaces, CurrentPlaces
from thence.capture.torch.event_tracker import EventTracker
from thence.capture.torch.loops import Loops
from thence.capture.torch.monitoring import CALLS, Handler, outer_frames, why_not
from thence.capture.torch.own_files import OwnFiles
from thence.capture.torch.phases import PhaseCalls, PhasePlaces, code_of, inner_code, phase_functions
from thence.capture.torch.stack_tracker import StackTracker
from thence.capture.torch.steps import PausedCalls, Steps, code_of_call
from thence.importing import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from thence.capture.boundaries.log import BoundaryLog
    from thence.capture.boundaries.places import Places
    from thence.capture.torch.running_nodes import RunningNodes
    from thence.capture.torch.threads import Thread

_LOG = logging.getLogger("thence.capture.recorder")

PlaceTracker = EventTracker | StackTracker


class HooksOptions(Protocol):
    """The options of `thence.RecordOptions` for hooks."""

    @property
    def modules(self) -> bool:
        """Whether modules, phases and steps are noted."""

    @property
    def lines(self) -> bool:
        """Whether lines are noted."""

    @property
    def own(self) -> tuple[str, ...]:
        """Further packages whose code counts as the user's own."""


class Hooks:
    """Notes in which places a program is.

    Nothing here raises in the program, initialises CUDA or waits for a lock of PyTorch.

    Args:
        log: takes boundaries; `log.note` is called on the program's threads.
        recorded: see `Steps`.
        on_main_thread: see `Loops`.

    Attributes:
        missing: why nothing is noted; None if something is.
        no_stacks: why modules and lines are followed by events or not at all; None if they are read from stacks.
    """

    def __init__(
        self,
        log: BoundaryLog,
        places: Places,
        options: HooksOptions,
        recorded: Callable[[FrameType | None, str], bool] = lambda _frame, _kind: True,
        on_main_thread: Callable[[Callable[[], None]], None] = lambda _function: None,
    ) -> None:
        self._options = options
        self.missing = why_not() if options.modules or options.lines else "the options modules and lines are off"
        self.no_stacks = self.missing or why_unreadable(log.stack_reader)
        is_own = OwnFiles(options.own)
        # Made even if nothing can be followed (`missing`): what is made below needs its state of threads.
        self._tracker: PlaceTracker
        reader = log.stack_reader
        if self.no_stacks is None and reader is not None:
            self._tracker = StackTracker(log, places, reader, is_own, self, lines=options.lines)
        else:
            self._tracker = EventTracker(log, places, is_own, self)
        self._common, self._threads = self._tracker.common, self._tracker.threads
        self._monitor = self._tracker.monitor
        self._steps = Steps(self._common, places, self._tracker.step, recorded)
        self._loops = Loops(
            is_own, on_main_thread, lambda frame, loop: self._steps.round_began(self._threads.now, frame, loop)
        )
        self._phases = PhasePlaces(places)
        here = CurrentPlaces(self._common, self._threads, self._tracker.paths, is_own)
        self._compiled = CompiledPlaces(places, log, here, chains=self._tracker.chains)
        self._log = log
        self._nodes: RunningNodes | None = None
        self._backward: BackwardCalls | None = None
        self._grad_enabled: Callable[[], bool] = lambda: False
        self._waiting: list[Callable[[], None]] = []
        self._warnings: list[str] = []
        self._ending_steps: dict[CodeType, Handler] = {}
        self._module_call: CodeType | None = None
        self._live = False
        self._paused = False
        self._called: Any = None
        self._began_pause: int | None = None

    def start(self) -> None:
        """Begin; PyTorch may be imported later."""
        if self.missing is not None:
            return
        self._live = True
        self._tracker.start(lines=self._options.lines)
        if self._options.modules:
            if _cuda_is_used():  # past its beginning: no step is to wait for the first call of a model
                self._steps.begin(self._threads.now)
            self._waiting.append(when_imported("torch", self._on_torch_imported))
            self._waiting += phase_functions(self._phase_function)
            self._compiled.begin()
            self._waiting.append(self._compiled.end)

    def forward_method(self) -> dict[str, str | None]:
        """For ``recording.json``: how modules and lines are followed; ``trouble``: why not by the stack."""
        method = None if self.missing is not None else "events" if self.no_stacks else "stack"
        return {"by": method, "trouble": self.no_stacks}

    def backward_method(self) -> dict[str, str | None]:
        """The same for the backward pass, which is followed by the numbers of nodes, by hooks, or not at all."""
        if self._backward is None:
            return {"by": None, "trouble": "PyTorch was not followed"}
        if self._nodes is None:
            return {"by": "hooks", "trouble": self.no_stacks}
        return {"by": "hooks" if self._nodes.trouble else "numbers", "trouble": self._nodes.trouble}

    def stop(self) -> None:
        """Note nothing from now on. Stopping twice does nothing."""
        self._live = False
        self._loops.stop()
        while self._waiting:
            self._waiting.pop()()
        self._monitor.stop()

    def look(self) -> None:
        """Look for the loop of a program in which nothing else begins steps; called after work was launched.

        Only PyTorch's events tell how long its rounds take on the device (`thence.capture.session.step_times`).
        """
        if self._live and self._options.modules and _cuda_is_used():
            if self._steps.needs_rounds:
                self._loops.look()
            else:
                self._loops.stop()

    def step(self, *, recorded: bool = True) -> None:
        """Begin a step because the program says so; from then on, only the program begins steps."""
        if self._live:
            self._steps.begin_from_program(self._threads.now, recorded=recorded)

    def pause(self) -> bool:
        """Follow nothing until `resume`, except what begins a step; returns whether that is so.

        Nothing changes while a backward pass runs, or where the state of threads is kept by events.
        """
        if not self._live or not self._tracker.pauses:
            return not self._live
        if self._backward is not None and self._backward.running:
            return False
        models = self._steps.models()
        calls: dict[CodeType, Handler] = {
            code: PausedCalls(self._threads, models, self._called_in_pause)
            for code in {code_of_call(model) or self._module_call for model in models}
            if code is not None
        }
        # Where the program announces its steps, nothing is followed.
        self._monitor.pause({**(self._ending_steps if self._steps.detects else {}), **calls})
        self._compiled.end()
        self._paused = True
        # A pause can begin with a call of a model, whose code then runs in the pause and must not begin a step again.
        began = self._called is not None and code_of_call(self._called) is not None
        self._began_pause = id(self._called) if began else None
        return True

    def resume(self, frame: FrameType | None) -> None:
        """Follow again after `pause`."""
        if not self._paused:
            return
        self._paused = False
        if not self._live:
            return
        try:
            self._compiled.begin()
            self._tracker.resume(frame)
            self._find_phase(frame)
        except Exception as error:  # noqa: BLE001 - the program comes first
            self.failed(error)

    def _find_phase(self, frame: FrameType | None) -> None:
        """Find the phases that the calling thread is in, by its frames; outside of these, that of before the pause."""
        thread = self._threads.now
        phase = thread.phases[0] if thread.phases else thread.phase
        around = []
        for outer in outer_frames(frame):
            handler = self._monitor.handler(outer.f_code)
            if isinstance(handler, PhaseCalls):
                around.append(phase)
                phase = handler.phase
        thread.phases = around
        self._common.phase(thread, phase)

    def _called_in_pause(self, thread: Thread, module: Any, frame: FrameType) -> None:
        """Note the call of a model that begins steps, unless it is the call with which the pause began."""
        if self._began_pause == id(module):
            self._began_pause = None
            return
        outer: FrameType | None = frame
        while outer is not None and outer.f_code is not self._module_call:
            outer = outer.f_back
        if outer is not None:
            called = self._steps.differentiated if self._grad_enabled() else self._steps.model_called
            called(thread, module, outer)

    def forked(self) -> None:
        """Stop recording in a forked child: the recording is its parent's."""
        self.stop()

    def warnings(self) -> list[str]:
        """Sentences about what could not be followed; that nothing is noted is one only if PyTorch is in use."""
        warnings = list(self._warnings)
        wanted = self._options.modules or self._options.lines
        if self.missing is not None and wanted and "torch" in sys.modules:
            warnings.append(
                "modules, lines, phases and steps are not recorded, because Python's monitoring "
                f"events are not available: {self.missing}"
            )
        if "torch._inductor" in sys.modules:
            warnings += self._compiled.notes
        if self._tracker.too_many:
            warnings.append(
                "the program has more distinct call chains than are recorded: lines of later chains lack their callers"
            )
        if self._backward is not None and self._backward.unknown_threads:
            by_number = self._nodes is not None and self._nodes.trouble is None
            passes = "of the first backward pass" if by_number else "of backward passes"
            warnings.append(f"several threads ran forward passes, so modules and lines {passes} are not known")
        if self._backward is not None and self._backward.compiled:
            warnings.append("compiled autograd ran backward passes: modules and lines of these are not known")
        return warnings

    def failed(self, error: BaseException) -> None:
        """Handle an internal error: warn, and note nothing any longer."""
        if self._live:
            _LOG.warning("thence: modules and lines are no longer recorded: %r", error)
            self._warnings.append(
                f"modules and lines are recorded only in part, because of an internal error of thence: {error!r}"
            )
            self.stop()

    def _watch(self, code: CodeType | None, handler: Handler, what: str) -> None:
        self._known(code, lambda code: self._monitor.watch(code, handler, CALLS), what)

    def _known(self, code: CodeType | None, watch: Callable[[CodeType], None], what: str) -> None:
        if code is None:
            self._warnings.append(
                f"{what} not known: thence does not know the internal functions of this PyTorch version"
            )
        else:
            watch(code)

    def _phase_function(self, phase: str, code: CodeType) -> None:
        ended = self._scaler_updated if code.co_qualname == "GradScaler.update" else None
        calls = PhaseCalls(self._common, self._threads, getattr(self._phases, phase), ended)
        if ended is not None:
            self._ending_steps[code] = calls
        self._watch(code, calls, f"the phase {phase} is")

    def _on_torch_imported(self, torch: Any) -> None:
        common, threads, phases = self._common, self._threads, self._phases
        try:
            lacking = self._tracker.torch_imported(torch)
            if lacking is not None:
                self._warnings.append(f"modules and lines of backward passes are not known: {lacking}")
            self._grad_enabled = torch.is_grad_enabled
            self._nodes = self._tracker.running_nodes(torch, phases)
            self._backward = backward = BackwardCalls(torch, common, threads, phases, self._log, self._nodes)
            self._module_call = code_of(torch.nn.Module, "_wrapped_call_impl")
            self._known(self._module_call, self._tracker.watch_modules, "modules are")
            self._known(
                code_of(torch.autograd.graph, "_engine_run_backward"),
                lambda code: self._tracker.watch_engine(code, backward),
                "the backward pass's modules and lines are",
            )
            for name in ("backward", "grad"):
                ending = PhaseCalls(common, threads, phases.backward, self._backward_ended)
                self._watch(code_of(torch.autograd, name), ending, "the backward pass is")
            wrapper = inner_code(code_of(torch.optim.Optimizer, "profile_hook_step"), "wrapper")
            stepping = PhaseCalls(common, threads, phases.optimizer, self._optimizer_ended)
            if wrapper is not None:
                self._ending_steps[wrapper] = stepping
            self._watch(wrapper, stepping, "the optimizer's steps are")
            recompute = PhaseCalls(common, threads, phases.recompute)
            self._waiting.append(
                when_imported("torch.utils.checkpoint", lambda module: self._checkpoint(module, recompute))
            )
        except Exception as error:  # noqa: BLE001 - the program comes first
            self.failed(error)

    def _checkpoint(self, module: Any, handler: Handler) -> None:
        name = "_checkpoint_without_reentrant_generator"
        codes = (code_of(module, name + ending) for ending in ("_impl", ""))
        inner = next(filter(None, (inner_code(code, "recompute_fn") for code in codes)), None)
        self._watch(inner, handler, "recomputation is")

    def outermost(self, thread: Thread, module: Any, frame: Any) -> None:
        """Note phase and step for the call of a module outside of all other modules on its thread."""
        if self._common.inside_node(thread):
            thread.phases.append(thread.phase)
            self._common.phase(thread, self._phases.recompute)
        elif self._grad_enabled():
            self._called = module
            self._steps.differentiated(thread, module, frame)
            self._called = None
            # A closure that the optimizer's step calls runs the whole forward and backward pass.
            if not thread.phases or thread.phase == self._phases.optimizer:
                self._common.phase(thread, self._phases.forward)
        else:
            if not thread.phases:
                self._common.phase(thread, self._phases.other)
            self._called = module
            self._steps.model_called(thread, module, frame)
            self._called = None
            self._tracker.called_without_gradients()

    def outermost_ended(self, thread: Thread) -> None:
        """Note the phase after such a call."""
        if self._common.inside_node(thread):
            if thread.phases:
                self._common.phase(thread, thread.phases.pop())
        elif thread.phase == self._phases.other and not thread.phases:
            self._common.phase(thread, self._phases.none)

    def _backward_ended(self, thread: Thread, _frame: Any) -> None:
        if not thread.phases:  # the forward pass before it has ended, too
            self._common.phase(thread, self._phases.none)
        elif thread.phase == self._phases.forward:  # it ran in a closure that the optimizer's step calls
            self._common.phase(thread, self._phases.optimizer)

    def _optimizer_ended(self, thread: Thread, frame: Any) -> None:
        # Within GradScaler.step (phase gradient), the step ends with GradScaler.update.
        scaled = thread.phase == self._phases.gradient
        if not scaled and self._backward is not None and not self._backward.inside():
            arguments = frame.f_locals.get("args")
            if arguments:
                self._steps.optimizer_stepped(thread, arguments[0], frame.f_back)

    def _scaler_updated(self, thread: Thread, frame: Any) -> None:
        self._steps.optimizer_stepped(thread, frame.f_locals["self"], frame.f_back)


def _cuda_is_used() -> bool:
    """Whether PyTorch has initialised CUDA; a program that has not done so is at its beginning, before any step."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and bool(cuda.is_initialized())
