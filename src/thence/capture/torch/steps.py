"""Detects where a step of the program ends and the next one begins, if the program does not say so.

If the recording begins before PyTorch uses CUDA, the first step begins with the first call of a model, so that it does
not include making and loading the model. Otherwise it begins with the recording.

In training, a step ends with the step of the optimizer. With several optimizers it ends with the last of them to step
before the first one steps again, which is known after one round. If a gradient scaler steps the optimizer, or skips it
because gradients overflowed, the step ends with the scaler's update. As long as no optimizer has stepped, each call of
the model that is called most begins a step, with gradients or without: evaluation, training that changes parameters by
itself, and generation (prefill or decode, if the input is token ids). Of models that are called equally often, the one
that was called so often first counts. Where nothing of that is seen, the rounds of the program's loop are steps
(`thence.capture.torch.loops`). Once the program calls `recording.step`, only these calls begin steps.
"""

from __future__ import annotations

import sys
import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.places import LOOP_ROUND, MODEL_CALL, STEP, Place
from thence.model.phases import Serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from thence.capture.boundaries.places import Places
    from thence.capture.torch.threads import Common, Thread, Threads

_NAME = "step"
_MAX_MODELS = 1000
_SUSPENDS = 0x20 | 0x80 | 0x200
"""CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR of `inspect`, which must not be imported here."""
_INPUTS = ("input_ids", "inputs_embeds")
"""Arguments of a language model's call, of shape (batch, tokens, ...)."""


class Steps:
    """Notes steps.

    Args:
        begins: called at the beginning of each step.
        recorded: called before that for each step that the program did not announce, with the frame of the calling
            thread in which it begins, and its kind; returns whether the step is recorded.
    """

    def __init__(
        self,
        common: Common,
        places: Places,
        begins: Callable[[], None],
        recorded: Callable[[FrameType | None, str], bool] = lambda _frame, _kind: True,
    ) -> None:
        self._common = common
        self._places = places
        self._begins = begins
        self._recorded = recorded
        self._models: dict[int, weakref.ref[Any]] = {}
        self._any = False
        self._from_program = False
        self._in_step = True
        self._trains = False
        self._first: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._before: weakref.ref[Any] | None = None
        self._calls: dict[int, int] = {}
        self._max_calls = 0

    def begin(
        self,
        thread: Thread,
        name: str = _NAME,
        detail: str | None = None,
        frame: FrameType | None = None,
        kind: str = "",
    ) -> None:
        """Begin a step. Steps are identified by their order: with numbers in their names, places would never end.

        Durations of steps of different kinds are not compared. The kind is the name, if it is empty.
        """
        self._any = True
        self._note(thread, name, detail, recorded=self._recorded(frame, kind or name))

    def _note(self, thread: Thread, name: str, detail: str | None, *, recorded: bool) -> None:
        if not (recorded or self._in_step):
            return
        self._in_step = recorded
        place = Place(STEP, 0, name, detail)
        number = self._places.number(place) if recorded else self._places.nothing(STEP)
        self._common.cross(thread, number)
        if recorded:
            self._begins()

    @property
    def _counts_calls(self) -> bool:
        """Whether calls of models begin steps: nothing else does so yet."""
        return not (self._from_program or self._trains)

    @property
    def detects(self) -> bool:
        """Whether steps are detected: the program announces none."""
        return not self._from_program

    @property
    def needs_rounds(self) -> bool:
        """Whether nothing but rounds of a loop begins steps so far."""
        return self._counts_calls and not self._models

    def round_began(self, thread: Thread, frame: FrameType, loop: int) -> None:
        """Handle that a round of a loop began, which is a step if nothing else begins any.

        The frame is the one that runs the loop, which has a number.
        """
        if self.needs_rounds:
            self.begin(thread, LOOP_ROUND, None, frame, f"{LOOP_ROUND} {loop}")

    def begin_from_program(self, thread: Thread, *, recorded: bool = True) -> None:
        """Begin a step because the program says so, and say whether it is recorded."""
        self._from_program = self._any = True
        self._note(thread, _NAME, None, recorded=recorded)

    def models(self) -> list[Any]:
        """The models whose calls begin steps."""
        if not self._counts_calls:
            return []
        return [model for ref in self._models.values() if (model := ref()) is not None]

    def differentiated(self, thread: Thread, model: Any, frame: Any) -> None:
        """Handle the call of a module outside of all other modules, with gradients.

        The first step began with the recording or begins here; so the first call of a model begins no other one. The
        frame is that of ``nn.Module._wrapped_call_impl``.
        """
        if not self._any:
            self.begin(thread)
            self._count(model)
        elif self._counts_calls and self._count(model) and self._max_calls > 1:
            self.begin(thread, MODEL_CALL, None, frame)

    def optimizer_stepped(self, thread: Thread, optimizer: Any, frame: FrameType | None = None) -> None:
        """Handle that an optimizer has changed the parameters, or that the gradient scaler around it was updated.

        The frame is the one that called it.
        """
        self._trains = True
        if self._from_program:
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
            self.begin(thread, frame=frame)

    def model_called(self, thread: Thread, model: Any, frame: Any) -> None:
        """Handle the call of a module outside of all other modules, without gradients.

        The frame is that of ``nn.Module._wrapped_call_impl``, whose locals are the arguments of the call.
        """
        if self._counts_calls and self._count(model):
            self.begin(thread, MODEL_CALL, tokens(frame.f_locals), frame)

    def _count(self, model: Any) -> bool:
        """Count a call of a model; returns whether no model was called as often before."""
        if not model._modules:  # noqa: SLF001 - `children` makes a generator
            return False
        if len(self._calls) > _MAX_MODELS:
            self._calls.clear()
            self._max_calls = 0
        calls = self._calls.get(id(model), 0) + 1
        self._calls[id(model)] = calls
        if calls <= self._max_calls:
            return False
        self._max_calls = calls
        if id(model) not in self._models:
            if len(self._models) >= _MAX_MODELS:
                self._models.clear()
            self._models[id(model)] = weakref.ref(model)
        return True


class PausedCalls:
    """Notes, while nothing else is followed, the calls of models that begin steps: a `Handler` of `code_of_call`."""

    def __init__(self, threads: Threads, models: list[Any], called: Callable[[Thread, Any, FrameType], None]) -> None:
        self._threads = threads
        self._models = {id(model): weakref.ref(model) for model in models}
        self._called = called

    def enter(self) -> None:
        """Handle a call of the code: of one of the models, or of another object."""
        frame = sys._getframe(2)  # noqa: SLF001 - no other way to the caller's frame
        name = frame.f_code.co_varnames[0]
        given = frame.f_locals.get(name)
        model = given[0] if isinstance(given, tuple) and given else given
        known = self._models.get(id(model))
        if known is not None and known() is model:
            self._called(self._threads.now, model, frame)

    def leave(self) -> None:
        """Do nothing at the end of a call."""

    def resume(self) -> None:
        """Do nothing: the function is no generator."""


def code_of_call(model: Any) -> CodeType | None:
    """The code that each call of a model runs, and few other calls do; None if it is not known."""
    forward = None if "forward" in vars(model) else getattr(type(model), "forward", None)
    code = getattr(forward, "__code__", None)
    usable = isinstance(code, CodeType) and code.co_varnames and not code.co_flags & _SUSPENDS
    return code if usable else None


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
