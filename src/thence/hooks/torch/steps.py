"""Where a step of the program ends and the next one begins, without being told.

Where the recording begins before PyTorch uses CUDA, the first step begins with the first call of a model: making and
loading the model is no part of it. Else it begins with the recording.

In training a step ends with the optimizer's; of several optimizers with that of the last one before the first one's
turn comes again, which is known after one turn. Of an optimizer that a gradient scaler steps, or leaves out because
gradients overflowed, a step ends with the scaler's update. Before any optimizer stepped, each call without gradients
of the model that is called most begins a step: prefill or decode, where its input is token ids. Who calls
`recording.step` decides alone from then on.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from thence.boundaries.places import STEP, Place
from thence.model.phases import Serving

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.boundaries.places import Places
    from thence.hooks.torch.threads import Common, Thread

__all__ = ["Steps", "tokens"]

_NAME = "step"
_MOST_MODELS = 1000
_INPUTS = ("input_ids", "inputs_embeds")
"""Arguments of a language model's call, of shape (batch, tokens, ...)."""


class Steps:
    """Notes steps.

    Args:
        common: what is known of threads.
        places: takes numbers.
        begins: told of each step.
    """

    def __init__(self, common: Common, places: Places, begins: Callable[[], None]) -> None:
        self._common = common
        self._places = places
        self._begins = begins
        self._any = False
        self._told = False
        self._trains = False
        self._first: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._before: weakref.ref[Any] | None = None
        self._calls: dict[int, int] = {}
        self._most = 0

    def begin(self, thread: Thread, detail: str | None = None) -> None:
        """A step begins. Steps are told apart by their order: a number in their names would never end."""
        self._any = True
        self._common.cross(thread, self._places.number(Place(STEP, 0, _NAME, detail)))
        self._begins()

    def told(self, thread: Thread) -> None:
        """The program says that a step begins."""
        self._told = True
        self.begin(thread)

    def differentiated(self, thread: Thread) -> None:
        """A module is called outside of all others, with gradients."""
        if not self._any:
            self.begin(thread)

    def optimizer_stepped(self, thread: Thread, optimizer: Any) -> None:
        """An optimizer has changed the parameters, or the gradient scaler that calls it was updated."""
        self._trains = True
        if self._told:
            return
        first = self._first() if self._first is not None else None
        last = self._last() if self._last is not None else None
        before = self._before() if self._before is not None else None
        here = weakref.ref(optimizer)
        if first is None or last is None:
            self._first = self._last = here
            last = optimizer
        elif optimizer is first and before is not None and before is not first:
            self._last, last = self._before, before
        self._before = here
        if optimizer is last:
            self.begin(thread)

    def model_called(self, thread: Thread, model: Any, frame: Any) -> None:
        """A module is called outside of all others, without gradients."""
        if self._told or self._trains or not model._modules:  # noqa: SLF001 - `children` makes a generator
            return
        if len(self._calls) > _MOST_MODELS:
            self._calls.clear()
        calls = self._calls.get(id(model), 0) + 1
        self._calls[id(model)] = calls
        if calls >= self._most:
            self._most = calls
            self.begin(thread, tokens(frame.f_locals))


def tokens(arguments: dict[str, Any]) -> str | None:
    """Which part of serving a call of a language model is, its batch size and the number of tokens of each.

    Args:
        arguments: ``args`` and ``kwargs`` of the call.

    Returns:
        such as ``decode batch=4 tokens=1``; None for other models.
    """
    given = next((v for name in _INPUTS if (v := arguments["kwargs"].get(name)) is not None), None)
    if given is None and arguments["args"]:
        first = arguments["args"][0]
        if str(getattr(first, "dtype", "")) in {"torch.int64", "torch.int32"}:
            given = first
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) < 2:
        return None
    part = Serving.DECODE if shape[1] == 1 else Serving.PREFILL
    return f"{part} batch={shape[0]} tokens={shape[1]}"
