"""The instructions of an HLO module as protobuf gives them, and how to read many at a time.

To read a field of an instruction is a call into protobuf, so each is read once, for all of them in a
row. Most values repeat: a module of 37,000 instructions has some 300 different shapes, 60 opcodes and
2,000 op_names. `Distinct` lets them be parsed and computed once each.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import polars as pl

from thence.model.hlo import INSTRUCTIONS
from thence.readers.xla.lists import IntegerLists

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from numpy.typing import NDArray

    from thence.readers.protos.hlo_pb2 import (
        HloComputationProto,
        HloInstructionProto,
        HloModuleProto,
    )

__all__ = ["Body", "Distinct"]

_T = TypeVar("_T", bound="Hashable")


@dataclass(frozen=True)
class Body:
    """All instructions of a module, one computation after the other.

    Attributes:
        module: that they are from.
        computations: of the module, each with the rows of its instructions.
        instructions: a row each.
        ids: of the instructions.
        opcodes: of the instructions.
        called: by the instructions: ids of computations.
    """

    module: HloModuleProto
    computations: list[tuple[HloComputationProto, range]]
    instructions: list[HloInstructionProto]
    ids: list[int]
    opcodes: list[str]
    called: IntegerLists

    @classmethod
    def of(cls, module: HloModuleProto) -> Body:
        """The instructions of a module.

        Raises:
            DecodeError: what an instruction calls is damaged.
        """
        computations = []
        rows: list[HloInstructionProto] = []
        for computation in module.computations:
            first = len(rows)
            rows += computation.instructions
            computations.append((computation, range(first, len(rows))))
        ids, opcodes, called = (
            list(map(attrgetter(field), rows))
            for field in ("id", "opcode", "called_computation_ids")
        )
        return cls(module, computations, rows, ids, opcodes, IntegerLists.packed(called))

    def read(self, field: str) -> list[Any]:
        """One field of all instructions."""
        return list(map(attrgetter(field), self.instructions))

    def config(self, row: int) -> bytes:
        """Backend config: a field, or since 2026 a payload, inline or in the module's list."""
        instruction, payloads = self.instructions[row], self.module.payloads
        if not instruction.HasField("backend_config_payload"):
            return instruction.backend_config
        payload = instruction.backend_config_payload
        if payload.WhichOneof("payload") != "id":
            return payload.value
        return payloads[payload.id] if 0 <= payload.id < len(payloads) else b""


class Distinct(Generic[_T]):
    """The different values of a column, and which of them each row has.

    Attributes:
        values: in the order in which they first come.
        of_row: for each row the place of its value.
    """

    def __init__(self, column: Sequence[_T]) -> None:
        self.values = tuple(dict.fromkeys(column))
        places = {value: place for place, value in enumerate(self.values)}
        self.of_row: NDArray[np.int64] = np.fromiter(
            map(places.__getitem__, column), np.int64, len(column)
        )

    def columns(self, **known: Sequence[Any]) -> list[pl.Series]:
        """Columns of `INSTRUCTIONS` from what is known of each different value."""
        schema = {name: INSTRUCTIONS[name] for name in known}
        return pl.DataFrame(known, schema=schema)[self.of_row].get_columns()
