"""Detects where a step of the program ends and the next one begins, if the program does not say so.

If the recording begins before PyTorch uses CUDA, the first step begins with the first call of a model, so that it does
not include making and loading the model. Otherwise it begins with the recording.

In training, a step ends with the step of the optimizer. With several optimizers it ends with the last of them to step
before the first one steps again, which is known after one round. If a gradient scaler steps the optimizer, or skips it
because gradients overflowed, the step ends with the scaler's update. As long as no optimizer has stepped, each call
without gradients of the model that is called most begins a step: prefill or decode, if its input is token ids. Once the
program calls `recording.step`, only these calls begin steps.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from thence.boundaries.places import MODEL_CALL, STEP, Place
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
        common: the state that threads share.
        places: gives numbers.
        begins: called at the beginning of each step.
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

    def begin(self, thread: Thread, name: str = _NAME, detail: str | None = None) -> None:
        """Begin a step. Steps are identified by their order: with numbers in their names, places would never end."""
        self._any = True
        self._common.cross(thread, self._places.number(Place(STEP, 0, name, detail)))
        self._begins()

    def told(self, thread: Thread) -> None:
        """Begin a step because the program says so."""
        self._told = True
        self.begin(thread)

    def differentiated(self, thread: Thread) -> None:
        """Handle the call of a module outside of all other modules, with gradients: it may begin the first step."""
        if not self._any:
            self.begin(thread)

    def optimizer_stepped(self, thread: Thread, optimizer: Any) -> None:
        """Handle that an optimizer has changed the parameters, or that the gradient scaler around it was updated."""
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
        """Handle the call of a module outside of all other modules, without gradients."""
        if self._told or self._trains or not model._modules:  # noqa: SLF001 - `children` makes a generator
            return
        if len(self._calls) > _MOST_MODELS:
            self._calls.clear()
        calls = self._calls.get(id(model), 0) + 1
        self._calls[id(model)] = calls
        if calls >= self._most:
            self._most = calls
            self.begin(thread, MODEL_CALL, tokens(frame.f_locals))


def tokens(arguments: dict[str, Any]) -> str | None:
    """Prefill or decode, for a call of a language model, with its batch size and the number of tokens per sequence.

    Args:
        arguments: ``args`` and ``kwargs`` of the call.

    Returns:
        a text such as ``decode batch=4 tokens=1``; None for other models.
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
