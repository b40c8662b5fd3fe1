"""Leaves CUPTI to torch.profiler when the program starts a profile, because CUPTI has one subscriber at a time.

While a recording uses CUPTI, a profile of torch.profiler would contain no GPU activity. The user's own profile takes
precedence, so the recording ends just before it begins.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from thence.importing import torch_is_being_imported

if TYPE_CHECKING:
    from collections.abc import Callable

_AUTOGRAD, _PREPARE = "torch.autograd.profiler", "_prepare_profiler"
"""The function that ``torch.autograd.profiler.profile`` and ``torch.profiler`` call first, since torch 1.8, with a
configuration and the set of activities."""
_PROFILER, _CLASS, _PREPARE_TRACE = "torch.profiler.profiler", "_KinetoProfile", "prepare_trace"
"""The method that subscribes to CUPTI if a profile has a ``CuspyConfig``, since torch 2.15; CUDA is then missing among
the activities of `_PREPARE`."""
_CUSPY = "_use_cuspy"
"""Attribute of a profile: whether it has a ``CuspyConfig``."""
_ON_GPUS = "CUDA"
"""Name of the ``ProfilerActivity`` that needs CUPTI."""


class _Wrapped(NamedTuple):
    owner: Any
    name: str
    original: Any
    wrapper: Any


class ProfilerHandover:
    """Calls a function before a profile with CUDA begins."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._ended = False
        self._wrapped: list[_Wrapped] = []

    def look(self) -> None:
        """Wrap the functions of torch's profiler, if torch has been imported by now."""
        if self._ended or self._wrapped or torch_is_being_imported():
            return
        self._wrap(sys.modules.get(_AUTOGRAD), _PREPARE, _uses_cuda)
        self._wrap(getattr(sys.modules.get(_PROFILER), _CLASS, None), _PREPARE_TRACE, _uses_cuspy)

    def _wrap(self, owner: Any, name: str, needs_cupti: Callable[[tuple[Any, ...]], bool]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        def prepare_after_recording(*arguments: Any, **named: Any) -> Any:
            if needs_cupti((*arguments, *named.values())):
                self._stop()
            return original(*arguments, **named)

        self._wrapped.append(_Wrapped(owner, name, original, prepare_after_recording))
        setattr(owner, name, prepare_after_recording)

    def end(self) -> None:
        """Unwrap the functions, and never wrap them again."""
        self._ended = True
        for owner, name, original, wrapper in self._wrapped:
            if getattr(owner, name, None) is wrapper:
                setattr(owner, name, original)
        self._wrapped.clear()


def _uses_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether activities among the arguments need CUPTI; True if no argument looks like a set of activities."""
    sets = [argument for argument in arguments if isinstance(argument, set | frozenset | list | tuple)]
    names = {getattr(activity, "name", None) for activities in sets for activity in activities}
    return not sets or _ON_GPUS in names


def _uses_cuspy(arguments: tuple[Any, ...]) -> bool:
    """Whether the profile, whose method this is, has a ``CuspyConfig``."""
    return bool(getattr(arguments[0], _CUSPY, False))
