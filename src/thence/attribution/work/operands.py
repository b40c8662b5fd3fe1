"""The inputs of a framework operator as profilers record them: shapes, element types, strides and values of scalars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from thence.model.json_fields import JsonInt64, NotAsWritten, decoded

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ELEMENTS = 1 << 60
"""A tensor with more elements than memory can hold bytes is a damaged record."""


class ElementType(NamedTuple):
    """What is known of a type of elements.

    Attributes:
        bytes: of an element.
        short: its short name, for names of shapes.
        data_type: in which products of such elements are computed, of `thence.model.peaks.DTYPES`; None for others.
        floating: whether the result of an operation with integers has this type.
    """

    bytes: int
    short: str
    data_type: str | None = None
    floating: bool = False


ELEMENT_TYPES = {
    "bool": ElementType(1, "bool"),
    "c10::BFloat16": ElementType(2, "bf16", "bfloat16", floating=True),
    "c10::Float8_e4m3fn": ElementType(1, "f8e4m3fn", "float8"),
    "c10::Float8_e4m3fnuz": ElementType(1, "f8e4m3fnuz", "float8"),
    "c10::Float8_e5m2": ElementType(1, "f8e5m2", "float8"),
    "c10::Float8_e5m2fnuz": ElementType(1, "f8e5m2fnuz", "float8"),
    "c10::Float8_e8m0fnu": ElementType(1, "f8e8m0fnu"),
    "c10::Half": ElementType(2, "f16", "float16", floating=True),
    "c10::complex<double>": ElementType(16, "c128", floating=True),
    "c10::complex<float>": ElementType(8, "c64", floating=True),
    "double": ElementType(8, "f64", "float64", floating=True),
    "float": ElementType(4, "f32", "float32", floating=True),
    "int": ElementType(4, "i32"),
    "long int": ElementType(8, "i64"),
    "short int": ElementType(2, "i16"),
    "signed char": ElementType(1, "i8", "int8"),
    "unsigned char": ElementType(1, "u8"),
}
"""Types of elements by their names in Kineto's ``Input type`` (C++ names of torch::ScalarType)."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument.

    Attributes:
        shape: its sizes.
        type: of an element, as Kineto names it; None inside of lists of tensors, whose types Kineto does not record.
        strides: in elements; None if they are not recorded.
    """

    shape: tuple[int, ...]
    type: str | None = None
    strides: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int | None:
        """Bytes of an element; None for unknown types."""
        return ELEMENT_TYPES[self.type].bytes if self.type in ELEMENT_TYPES else None

    @property
    def bytes(self) -> int | None:
        """Bytes of its distinct elements: an expanded dimension, of stride 0, is stored once. None if unknown."""
        size = self.element_bytes
        if size is None:
            return None
        if self.strides is None or len(self.strides) != len(self.shape):
            return size * self.elements
        return size * math.prod(n for n, stride in zip(self.shape, self.strides, strict=True) if stride != 0 or n == 0)


Argument = Tensor | tuple[Tensor, ...] | str | None
"""A tensor, a list of tensors, the text of a scalar or of a list of scalars, or nothing (an argument not given)."""

_LIST = "TensorList"
"""Type of a list of tensors; thence's recorder adds the type that all of its elements have: ``TensorList<float>``."""
_Sizes = list[JsonInt64 | list[JsonInt64]]
"""Sizes of a tensor, or of each tensor of a list."""


class _Inputs(msgspec.Struct):
    """What `HOST.inputs` holds: Kineto's four lists, one entry for each argument."""

    dims: list[_Sizes] = []
    types: list[str] = []
    strides: list[_Sizes] = []
    values: list[str] = []


def arguments_of(inputs: str) -> tuple[Argument, ...] | None:
    """The arguments of an operator; None for text that is damaged or impossible.

    Args:
        inputs: JSON with ``dims``, ``types``, and, where they are recorded, ``strides`` and ``values``.
    """
    try:
        given = decoded(inputs.encode(), _Inputs)
    except NotAsWritten:
        return None
    if len(given.dims) != len(given.types):
        return None
    arguments = []
    for number, (dims, kind) in enumerate(zip(given.dims, given.types, strict=True)):
        strides = given.strides[number] if number < len(given.strides) else None
        value = given.values[number] if number < len(given.values) else ""
        arguments.append(_argument(dims, kind, strides, value))
    every = (tensor for argument in arguments for tensor in tensors_of(argument))
    if any(min(tensor.shape, default=0) < 0 or tensor.elements > MAX_ELEMENTS for tensor in every):
        return None
    return tuple(arguments)


def _argument(dims: _Sizes, kind: str, strides: _Sizes | None, value: str) -> Argument:
    if kind.startswith(_LIST):
        element = kind[len(_LIST) :].strip("<>") or None
        return tuple(Tensor(tuple(sizes), element) for sizes in dims if isinstance(sizes, list))
    if kind in ELEMENT_TYPES or kind.startswith("c10::"):
        return Tensor(_integers(dims), kind, None if strides is None else _integers(strides))
    return value or None


def _integers(sizes: _Sizes) -> tuple[int, ...]:
    return tuple(size for size in sizes if isinstance(size, int))


def tensor_at(arguments: Sequence[Argument], number: int) -> Tensor | None:
    """The tensor at a position; None for a shorter call, and for an argument that is no tensor."""
    argument = arguments[number] if number < len(arguments) else None
    return argument if isinstance(argument, Tensor) else None


def tensors_of(argument: Argument) -> tuple[Tensor, ...]:
    """The tensors in an argument."""
    if isinstance(argument, Tensor):
        return (argument,)
    return argument if isinstance(argument, tuple) else ()


def integers_of(argument: Argument) -> tuple[int, ...] | None:
    """The numbers of a recorded list such as ``[2, 2]``, or of one number; None if it is something else."""
    if not isinstance(argument, str):
        return None
    try:
        return tuple(int(text) for text in argument.strip("[]").split(",") if text.strip())
    except ValueError:
        return None


def flag_of(argument: Argument) -> bool | None:
    """A recorded truth value; None if it was not recorded."""
    return {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}.get(
        argument if isinstance(argument, str) else ""
    )
