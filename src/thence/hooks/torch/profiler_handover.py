"""Leaves CUPTI to torch.profiler when the program starts a profile, because CUPTI has one subscriber at a time.

While a recording uses CUPTI, a profile of torch.profiler would contain no GPU activity. The user's own profile takes
precedence, so the recording ends just before it begins.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from thence.importing import torch_is_being_imported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ProfilerHandover"]

_MODULE = "torch.autograd.profiler"
_PREPARE = "_prepare_profiler"
"""The function that ``torch.autograd.profiler.profile`` and ``torch.profiler`` call first, since torch 1.8, with a
configuration and the set of activities."""
_ON_GPUS = "CUDA"
"""Name of the ``ProfilerActivity`` that needs CUPTI."""


class ProfilerHandover:
    """Calls a function before a profile with CUDA begins.

    Args:
        stop: ends the recording.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._ended = False
        self._module: Any = None
        self._prepare: Any = None
        self._wrapper: Any = None

    def look(self) -> None:
        """Wrap the function of torch's profiler, if torch has been imported by now."""
        module: Any = sys.modules.get(_MODULE)
        prepare = getattr(module, _PREPARE, None)
        if self._ended or self._module is not None or prepare is None or torch_is_being_imported():
            return

        def prepare_after_recording(*arguments: Any, **named: Any) -> Any:
            if _uses_cuda((*arguments, *named.values())):
                self._stop()
            return prepare(*arguments, **named)

        self._module, self._prepare, self._wrapper = module, prepare, prepare_after_recording
        setattr(module, _PREPARE, prepare_after_recording)

    def end(self) -> None:
        """Unwrap the function, and never wrap it again."""
        self._ended = True
        if self._module is not None and getattr(self._module, _PREPARE, None) is self._wrapper:
            setattr(self._module, _PREPARE, self._prepare)
        self._module = None


def _uses_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether activities among the arguments need CUPTI; True if no argument looks like a set of activities."""
    sets = [one for one in arguments if isinstance(one, set | frozenset | list | tuple)]
    names = {getattr(activity, "name", None) for one in sets for activity in one}
    return not sets or _ON_GPUS in names
