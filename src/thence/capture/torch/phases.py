"""Notes which phase of a training step runs, by calls of the PyTorch functions that make it up."""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.places import PHASE, Place
from thence.importing import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.capture.boundaries.places import Places
    from thence.capture.torch.threads import Common, Thread, Threads

_OF_PHASE: dict[str, dict[str, tuple[str, ...]]] = {
    "gradient": {
        "torch.nn.utils.clip_grad": (
            *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"),
        ),
        "torch.optim.optimizer": ("Optimizer.zero_grad",),
        "torch.nn.modules.module": ("Module.zero_grad",),
        "torch.amp.grad_scaler": (*("GradScaler.unscale_", "GradScaler.step", "GradScaler.update"),),
        "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel.clip_grad_norm_",),
    },
    "input": {"torch.utils.data.dataloader": ("_BaseDataLoaderIter.__next__",)},
    "generation": {"transformers.generation.utils": ("GenerationMixin.generate",)},
    "reward": {
        "trl.trainer.grpo_trainer": ("GRPOTrainer._calculate_rewards",),
        "trl.trainer.rloo_trainer": ("RLOOTrainer._calculate_rewards",),
    },
}
"""Functions of PyTorch, and of libraries around it, whose calls are a phase, by phase and module."""


class PhasePlaces:
    """Numbers of phases (`thence.model.phases.Phase`)."""

    def __init__(self, places: Places) -> None:
        (
            self.forward,
            self.backward,
            self.recompute,
            self.gradient,
            self.optimizer,
            self.input,
            self.generation,
            self.reward,
            self.other,
        ) = (
            places.number(Place(PHASE, 0, name))
            for name in (
                *("forward", "backward", "recompute", "gradient", "optimizer", "input"),
                *("generation", "reward", "other"),
            )
        )
        self.none = places.nothing(PHASE)


class PhaseCalls:
    """A `Handler` of functions whose calls are a phase.

    Args:
        ended: called with thread and frame at the end of each call that is not inside another one of the same phase.

    Attributes:
        phase: as given.
    """

    def __init__(
        self, common: Common, threads: Threads, phase: int, ended: Callable[[Thread, Any], None] | None = None
    ) -> None:
        self._common = common
        self._threads = threads
        self.phase = phase
        self._ended = ended

    def enter(self) -> None:
        """Handle a call of such a function: the phase begins."""
        thread = self._threads.now
        thread.phases.append(thread.phase)
        self._common.phase(thread, self.phase)

    def leave(self) -> None:
        """Handle the end of the call: the phase around it continues."""
        thread = self._threads.now
        if not thread.phases:
            return  # it began before the recording
        self._common.phase(thread, thread.phases.pop())
        if self._ended is not None and thread.phase != self.phase:
            self._ended(thread, sys._getframe(2))  # noqa: SLF001 - no other way to the caller's frame

    def resume(self) -> None:
        """Do nothing: the function is no generator."""


def phase_functions(watch: Callable[[str, CodeType], None]) -> list[Callable[[], None]]:
    """Calls `watch` with phase and code of each function of `_OF_PHASE`, as soon as its module has been imported.

    Returns:
        functions that cancel the waiting for modules that have not been imported yet.
    """

    def look(phase: str, names: tuple[str, ...], module: Any) -> None:
        for name in names:
            code = code_of(module, name)
            if code is not None:
                watch(phase, code)

    def waiting(phase: str, module: str, names: tuple[str, ...]) -> Callable[[], None]:
        return when_imported(module, lambda there: look(phase, names, there))

    return [waiting(phase, module, names) for phase, modules in _OF_PHASE.items() for module, names in modules.items()]


def code_of(module: Any, name: str) -> CodeType | None:
    """The code of a module's function without its decorators; None if this PyTorch has no such function."""
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def inner_code(code: CodeType | None, name: str) -> CodeType | None:
    """The code of a function that is defined inside another one, at any depth; None if there is none."""
    return next((inner for inner in _inside(code) if inner.co_name == name), None)


def _inside(code: CodeType | None) -> Iterator[CodeType]:
    for constant in code.co_consts if code is not None else ():
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)
