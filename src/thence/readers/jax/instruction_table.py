"""The instructions of an HLO module by field, with lists of integers and distinct values as arrays.

Reading a field of an instruction is a call into protobuf, so each field is read once, for all instructions
together. Most values repeat: a module of 37,000 instructions has some 300 different shapes, 60 opcodes and
2,000 op_names. `Distinct` lets each distinct value be parsed once. `IntegerLists` keeps a list of integers
for each row (operands, called computations) as two arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import polars as pl
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from thence.model.hlo import INSTRUCTIONS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from thence.model.arrays import Int64
    from thence.readers.jax.protos.hlo_pb2 import HloComputationProto, HloInstructionProto, HloModuleProto


_MAX_INT64 = np.iinfo(np.int64).max
_MAX_VARINT = 10  # bytes
_EMPTY = pl.Series([[]], dtype=pl.List(pl.Int64))
_T = TypeVar("_T", bound="Hashable")
_LISTS = {36: "operand_ids", 38: "called_computation_ids"}
"""Lists of integers that hlo.proto declares as bytes, by field number."""
_PLACE = {number: place for place, number in enumerate(_LISTS)}
_WITHOUT_OPERANDS = frozenset(("constant", "iota", "parameter"))
_CALLING = frozenset(
    ("all-reduce", "call", "conditional", "fusion", "map", "reduce", "reduce-scatter", "scatter", "sort", "while")
)  # fmt: skip
"""Opcodes whose instructions never have operands, and those whose instructions call computations."""
_VARINT = 0
"""Wire type (https://protobuf.dev/programming-guides/encoding#structure)."""


@dataclass(frozen=True)
class Body:
    """All instructions of a module, one computation after the other.

    Attributes:
        module: the module of the instructions.
        computations: of the module, each with the rows of its instructions.
        instructions: one for each row.
        ids: of the instructions.
        opcodes: of the instructions.
        operands: of the instructions: ids of instructions.
        called: by the instructions: ids of computations.
    """

    module: HloModuleProto
    computations: list[tuple[HloComputationProto, range]]
    instructions: list[HloInstructionProto]
    ids: list[int]
    opcodes: list[str]
    operands: IntegerLists
    called: IntegerLists

    @classmethod
    def of(cls, module: HloModuleProto) -> Body:
        """The instructions of a module.

        Raises:
            DecodeError: a list of operands or of called computations is damaged.
        """
        computations = []
        rows: list[HloInstructionProto] = []
        for computation in module.computations:
            first = len(rows)
            rows += computation.instructions
            computations.append((computation, range(first, len(rows))))
        ids, opcodes = (list(map(attrgetter(field), rows)) for field in ("id", "opcode"))
        operands, called = map(IntegerLists.packed, _packed(rows, opcodes))
        return cls(module, computations, rows, ids, opcodes, operands, called)

    def read(self, field: str) -> list[Any]:
        """One field of all instructions."""
        return list(map(attrgetter(field), self.instructions))

    def config(self, row: int) -> bytes:
        """Backend config of a row: a field, or since 2026 a payload, inline or in the module's list."""
        instruction, payloads = self.instructions[row], self.module.payloads
        if not instruction.HasField("backend_config_payload"):
            return instruction.backend_config
        payload = instruction.backend_config_payload
        if payload.WhichOneof("payload") != "id":
            return payload.value
        return payloads[payload.id] if 0 <= payload.id < len(payloads) else b""


def _packed(rows: Sequence[HloInstructionProto], opcodes: Sequence[str]) -> list[list[bytes]]:
    """Operands and callees of each row as packed fields, whether the producer packed them or not.

    A list that is not packed has one field for each number, of a wire type that the schema does not declare:
    protobuf keeps these as unknown fields. Reading the unknown fields of all rows takes a fifth of the
    decoding time, so they are first read of the rows whose lists should not be empty; if one of these has
    such fields, those of all rows are read.
    """
    operands, called = columns = [list(map(attrgetter(field), rows)) for field in _LISTS.values()]
    suspects = (
        row
        for row, (opcode, of_row, calls) in enumerate(zip(opcodes, operands, called, strict=True))
        if (not of_row and opcode not in _WITHOUT_OPERANDS) or (not calls and opcode in _CALLING)
    )
    if any(_numbers(rows[row]) for row in suspects):
        for row, instruction in enumerate(rows):
            for number, value in _numbers(instruction):
                columns[_PLACE[number]][row] += _encoded(value)
    return columns


def _numbers(instruction: HloInstructionProto) -> list[tuple[int, int]]:
    """Field number and value of each element of a list that is not packed, in order."""
    unknown = UnknownFieldSet(instruction)
    fields = [unknown[place] for place in range(len(unknown))]
    return [
        (field.field_number, field.data)
        for field in fields
        if field.field_number in _LISTS and field.wire_type == _VARINT
    ]


def _encoded(value: int) -> bytes:
    """A number encoded as a varint, as in a packed field."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))


@dataclass(frozen=True)
class IntegerLists:
    """A list of integers for each row.

    Attributes:
        items: of all rows, one row after the other.
        counts: how many of them each row has.
    """

    items: Int64
    counts: Int64

    @classmethod
    def packed(cls, fields: Sequence[bytes]) -> IntegerLists:
        """Decodes packed repeated fields (https://protobuf.dev/programming-guides/encoding#packed).

        Args:
            fields: content of the field, one for each row; empty where it is missing.

        Raises:
            DecodeError: a number is cut, or longer than protobuf allows.
        """
        data = np.frombuffer(b"".join(fields), np.uint8)
        end_of_row = np.cumsum(np.fromiter(map(len, fields), np.int64, len(fields)))
        is_last = data < 128
        numbers = np.concatenate([[0], np.cumsum(is_last)])  # complete before each byte
        counts = np.diff(numbers[end_of_row], prepend=0)
        end = np.flatnonzero(is_last) + 1
        size = np.diff(end, prepend=0)
        whole = is_last[end_of_row[end_of_row > 0] - 1].all()
        if not whole or size.max(initial=0) > _MAX_VARINT:
            raise DecodeError("a packed field ends within a number")
        begin = end - size
        shift = 7 * (np.arange(len(data)) - np.repeat(begin, size)).astype(np.uint64)
        parts = (data & 127).astype(np.uint64) << shift
        items = np.bitwise_or.reduceat(parts, begin) if len(begin) else parts
        return cls(items.view(np.int64), counts)

    @cached_property
    def ends(self) -> Int64:
        """The end of each row's items in `items`."""
        return np.cumsum(self.counts)

    @cached_property
    def rows(self) -> Int64:
        """The row of each item."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def of(self, row: int) -> list[int]:
        """The list of one row."""
        end = self.ends[row]
        items: list[int] = self.items[end - self.counts[row] : end].tolist()
        return items

    def column(self, items: Int64) -> pl.Series:
        """A Polars column of these lists with their items replaced; faster than building it from Python lists."""
        flat = pl.DataFrame({"row": pl.Series(self.rows).set_sorted(), "items": items})
        filled = flat.group_by("row", maintain_order=True).agg("items")
        place = np.zeros(len(self.counts), np.int64)  # 0: the empty list
        place[filled["row"].to_numpy()] = np.arange(1, filled.height + 1)
        return pl.concat([_EMPTY, filled["items"]])[place]

    def sums(self, values: Int64) -> Int64:
        """The sum for each row of non-negative values, one value for each item; at most 2**63 - 1.

        The 32-bit halves are summed separately, because doubles hold those sums exactly.
        """
        rows, mask = len(self.counts), 0xFFFF_FFFF
        low = np.bincount(self.rows, values & mask, rows).astype(np.int64)
        high = np.bincount(self.rows, values >> 32, rows).astype(np.int64) + (low >> 32)
        return np.where(high >> 31, _MAX_INT64, high << 32 | low & mask)


class Distinct(Generic[_T]):
    """The distinct values of a column, and which of them each row has.

    Attributes:
        values: in the order of their first occurrence.
        of_row: for each row, the position of its value in ``values``.
    """

    def __init__(self, column: Sequence[_T]) -> None:
        self.values = tuple(dict.fromkeys(column))
        places = {value: place for place, value in enumerate(self.values)}
        self.of_row: NDArray[np.int64] = np.fromiter(map(places.__getitem__, column), np.int64, len(column))

    def columns(self, **values_of_distinct: Sequence[Any] | pl.Series) -> list[pl.Series]:
        """Columns of `INSTRUCTIONS`, given their values for each distinct value."""
        schema = {name: INSTRUCTIONS[name] for name in values_of_distinct}
        return pl.DataFrame(values_of_distinct, schema=schema)[self.of_row].get_columns()
