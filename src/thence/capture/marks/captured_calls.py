"""The operators that are called during a capture, with the shapes of their inputs: once, so that replays cost nothing.

During a capture a TorchDispatchMode sees each call of an operator below autograd, on all threads that work for the
capturing one, and `CachingAutotuner.run` of Inductor is wrapped, which launches the kernels that it generated. Inputs
are described as Kineto describes them (``HOST.inputs``), by the names of the types in C++.
"""

from __future__ import annotations

import functools
import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Begun = Callable[[str, str, int | None, bool], Callable[[], None]]
    """Called before an operator runs, with what `thence.capture.marks.captured_places.Called` says of it; returns what
    to call afterwards."""

_TYPES = {
    "bool": "bool",
    "bfloat16": "c10::BFloat16",
    "complex128": "c10::complex<double>",
    "complex64": "c10::complex<float>",
    "float16": "c10::Half",
    "float32": "float",
    "float64": "double",
    "int16": "short int",
    "int32": "int",
    "int64": "long int",
    "int8": "signed char",
    "uint8": "unsigned char",
}
"""Kineto's names of element types by those of PyTorch; other types (float8) are ``c10::`` and PyTorch's name."""
_FLOAT8 = "float8_"
_NUMBERS = (
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"),
)
"""Element types in the order of torch::ScalarType, by whose numbers Kineto shows arguments that are types."""
_MORE_NUMBERS = {"float8_e5m2": 23, "float8_e4m3fn": 24}
_SCALARS = (bool, int, float)
_INDUCTOR = "torch._inductor.runtime.triton_heuristics"
_MIN_DISPATCH_MODES = (2, 5)
"""The first version of PyTorch whose dispatch modes can pass on operators of higher order."""


def input_text(arguments: list[Any]) -> str:
    """The inputs of a call as the JSON text of ``HOST.inputs``.

    Args:
        arguments: the arguments in the order of the operator's schema, those left out with their defaults.
    """
    dims: list[Any] = []
    types: list[str] = []
    strides: list[Any] = []
    values: list[str] = []
    for value in arguments:
        shape, kind, stride, text = _described(value)
        dims.append(shape)
        types.append(kind)
        strides.append(stride)
        values.append(text)
    return json.dumps({"dims": dims, "types": types, "strides": strides, "values": values}, separators=(",", ":"))


def _described(value: Any) -> tuple[list[Any], str, list[Any], str]:
    """Sizes, type, strides and text of an argument."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return [int(n) for n in value.shape], _type_name(value), _strides(value), ""
    if isinstance(value, (list, tuple)):
        tensors = [item for item in value if hasattr(item, "dtype")]
        if tensors:
            kinds = {_type_name(tensor) for tensor in tensors}
            kind = f"TensorList<{kinds.pop()}>" if len(kinds) == 1 else "TensorList"
            return [[int(n) for n in t.shape] for t in tensors], kind, [_strides(t) for t in tensors], ""
        if all(isinstance(item, _SCALARS) for item in value):
            return [], "ScalarList", [], str(list(value))
    if isinstance(value, (*_SCALARS, str)):
        return [], "Scalar", [], str(value)
    if type(value).__name__ == "dtype":
        name = str(value).removeprefix("torch.")
        number = _NUMBERS.index(name) if name in _NUMBERS else _MORE_NUMBERS.get(name)
        return [], "Scalar", [], "" if number is None else str(number)
    return [], "", [], ""


def _type_name(tensor: Any) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    return _TYPES.get(name) or f"c10::{name.replace(_FLOAT8, 'Float8_')}"


def _strides(tensor: Any) -> list[int]:
    try:
        return [int(n) for n in tensor.stride()]
    except RuntimeError:  # a sparse tensor has none
        return []


class CapturedCalls:
    """Reports the operators that are called while it is entered; safe to leave on any thread and twice.

    Nothing here raises in the program.

    Args:
        torch: the module.
        begun: see `Begun`.
    """

    def __init__(self, torch: Any, begun: Begun) -> None:
        self._torch = torch
        self._begun = begun
        self._mode: Any = None
        self._leave_inductor: Callable[[], None] = lambda: None

    def enter(self) -> None:
        """Begin to report the calls of this thread and of those that work for it."""
        modes = sys.modules.get("torch.utils._python_dispatch")
        version = str(getattr(self._torch, "__version__", "0")).split(".")[:2]
        if self._mode is not None or modes is None or tuple(map(int, version)) < _MIN_DISPATCH_MODES:
            return
        self._mode = _mode(modes.TorchDispatchMode, self._torch.Tensor.__torch_dispatch__, self._begun)
        self._mode.__enter__()
        self._leave_inductor = _follow_inductor(self._begun)

    def leave(self) -> None:
        """Stop reporting. A mode that the program has entered since stays where it is."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        self._leave_inductor()
        mode.active = False
        get, pop, push = (getattr(self._torch._C, name) for name in _STACK)  # noqa: SLF001 - no public names
        above = []
        for _ in range(get()):
            top = pop(None)
            if top is mode:
                push(mode)
                mode.__exit__(None, None, None)
                break
            above.append(top)
        for other in reversed(above):
            push(other)


_STACK = ("_len_torch_dispatch_stack", "_pop_torch_dispatch_stack", "_push_on_torch_dispatch_stack")


def _mode(base: Any, plain: Any, begun: Begun) -> Any:
    """A dispatch mode that reports calls; `plain` is how classes of tensors dispatch that take no operator."""

    class Calls(base):  # type: ignore[misc]
        supports_higher_order_operators = True
        active = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True  # so that compiled code is used under it

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            schema = getattr(func, "_schema", None)
            if not self.active or schema is None:
                return func(*args, **kwargs)
            if any(kind.__torch_dispatch__ is not plain for kind in types):
                return NotImplemented  # a subclass takes it: what that calls is seen
            composite = _composite(func)
            if composite is not None:  # as in inference mode, where autograd has not taken it apart
                with self:
                    return composite(*args, **kwargs)
            ended = _nothing
            with suppress(Exception):  # the program comes first; the call has no inputs then
                given = [
                    args[n] if n < len(args) else kwargs.get(argument.name, argument.default_value)
                    for n, argument in enumerate(schema.arguments)
                ]
                ended = begun(str(schema.name), input_text(given), *_autograd_node())
            try:
                return func(*args, **kwargs)
            finally:
                ended()

    return Calls()


def _autograd_node() -> tuple[int | None, bool]:
    """The number of the autograd node that runs, and True; else of the node that was made last, and False.

    The node of a forward operator is made before the operator runs below autograd.
    """
    torch = sys.modules["torch"]
    running = torch._C._current_autograd_node()  # noqa: SLF001 - no public name
    if running is not None:
        return int(running._sequence_nr()), True  # noqa: SLF001
    return int(torch.autograd._get_sequence_nr()) - 1, False  # noqa: SLF001


def _nothing() -> None:
    """What follows a call that is not reported."""


@functools.cache
def _composite(func: Any) -> Any:
    """The function in C++ that takes an operator apart on each device; None if it has kernels of its own."""
    torch = sys.modules["torch"]
    key = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - no public name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001
    name = func.name()
    if key in getattr(func, "py_kernels", {}) or not has_kernel(name, key) or has_kernel(name, "CUDA"):
        return None
    return functools.partial(func._op_dk, key)  # noqa: SLF001


def _follow_inductor(begun: Begun) -> Callable[[], None]:
    """Report the launches of kernels that Inductor generated; the result undoes that."""
    owner = getattr(sys.modules.get(_INDUCTOR), "CachingAutotuner", None)
    if owner is None:
        return _nothing
    original = owner.run

    @functools.wraps(original)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        ended = _nothing
        with suppress(Exception):  # the program comes first; the launch has no inputs then
            ended = begun(str(self.fn.__name__), input_text(list(args)), *_autograd_node())
        try:
            return original(self, *args, **kwargs)
        finally:
            ended()

    owner.run = run

    def undo() -> None:
        if owner.run is run:
            owner.run = original

    return undo
