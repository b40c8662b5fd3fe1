"""Giving CUPTI to torch.profiler when the program starts it: CUPTI serves one at a time.

While a recording has CUPTI, a profile of torch.profiler would hold nothing that ran on a GPU. The user's own
profile comes first, so the recording ends just before it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from thence.importing import torch_is_being_imported

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GivingWay"]

_MODULE = "torch.autograd.profiler"
_PREPARE = "_prepare_profiler"
"""What ``torch.autograd.profiler.profile`` and ``torch.profiler`` call before anything else, since torch 1.8: with
a configuration and the set of activities."""
_ON_GPUS = "CUDA"
"""Name of the ``ProfilerActivity`` that needs CUPTI."""


class GivingWay:
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
        """Watch torch's profiler, if torch is there by now."""
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
        """Watch no longer, for good."""
        self._ended = True
        if self._module is not None and getattr(self._module, _PREPARE, None) is self._wrapper:
            setattr(self._module, _PREPARE, self._prepare)
        self._module = None


def _uses_cuda(arguments: tuple[Any, ...]) -> bool:
    """Whether activities among the arguments need CUPTI; where there are none to be seen, they may."""
    sets = [one for one in arguments if isinstance(one, set | frozenset | list | tuple)]
    names = {getattr(activity, "name", None) for one in sets for activity in one}
    return not sets or _ON_GPUS in names
