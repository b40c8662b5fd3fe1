"""The instructions of an HLO module as columns, as far as they follow from the instructions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.hlo import INSTRUCTIONS
from thence.readers.protos.hlo_pb2 import OpMetadata, ShapeProto
from thence.readers.xla.body import Distinct
from thence.readers.xla.replica_groups import replica_groups
from thence.readers.xla.shapes import memory_space
from thence.readers.xla.work import work_columns

if TYPE_CHECKING:
    from thence.readers.xla.body import Body
    from thence.readers.xla.frames import FrameTable

__all__ = ["ASYNC_STARTS", "instruction_columns"]

_STARTS = """
all-gather-start all-reduce-start async-start collective-permute-start copy-start recv send
"""
ASYNC_STARTS = frozenset(_STARTS.split())
"""Opcodes that begin something another instruction waits for."""

_COLLECTIVE = """
all-gather all-gather-start all-reduce all-reduce-start all-to-all collective-broadcast
collective-permute collective-permute-start collective-reduce ragged-all-to-all recv reduce-scatter
send
"""
_GROUPED = frozenset(_COLLECTIVE.split())
_TRANSFERS = frozenset(("recv", "recv-done", "send", "send-done"))


def instruction_columns(body: Body, frames: FrameTable) -> list[pl.Series]:
    """The columns of `INSTRUCTIONS` that need nothing beyond the instructions.

    Args:
        body: of the module.
        frames: of the module; takes up the source lines that older instructions name themselves.

    Raises:
        DecodeError: a part of an instruction is damaged.
    """
    opcodes, shapes = Distinct(body.opcodes), Distinct[bytes](body.read("shape"))
    parsed = [ShapeProto.FromString(shape) for shape in shapes.values]
    spaces = [None if shape.tuple_shapes else memory_space(shape) for shape in parsed]
    starts = [opcode in ASYNC_STARTS for opcode in opcodes.values]
    columns = {
        "name": body.read("name"),
        "id": body.ids,
        "channel": [number if number > 0 else None for number in body.read("channel_id")],
        **_of_some_opcodes(body),
        **work_columns(body, shapes, parsed),
    }
    return [
        *(pl.Series(name, values, INSTRUCTIONS[name]) for name, values in columns.items()),
        *opcodes.columns(opcode=opcodes.values, is_async_start=starts),
        *shapes.columns(memory_space=spaces),
        *_of_metadata(body, frames),
    ]


def _of_metadata(body: Body, frames: FrameTable) -> list[pl.Series]:
    """Framework scope and source of each instruction."""
    distinct = Distinct[bytes](body.read("metadata"))
    metadata = [OpMetadata.FromString(data) for data in distinct.values]
    numbers = [frames.of(m) for m in metadata]
    places = [frames.place(number) for number in numbers]
    return distinct.columns(
        op_name=[m.op_name or None for m in metadata],
        frame=numbers,
        source_file=[place.file or None for place in places],
        source_line=[place.line if place.line > 0 else None for place in places],
    )


def _of_some_opcodes(body: Body) -> dict[str, list[Any]]:
    """The columns of fields that only instructions of some opcodes have."""
    parameters: list[int | None] = [None] * len(body.ids)
    sizes, counts = parameters.copy(), parameters.copy()
    targets: list[str | None] = [None] * len(body.ids)
    kinds = targets.copy()
    host_transfers = [False] * len(body.ids)
    for row, opcode in enumerate(body.opcodes):
        if opcode == "parameter":
            parameters[row] = body.instructions[row].parameter_number
        elif opcode == "fusion":
            kinds[row] = body.instructions[row].fusion_kind or None
        elif opcode == "custom-call":
            targets[row] = body.instructions[row].custom_call_target or None
        elif opcode in _GROUPED:
            groups = replica_groups(body.instructions[row], body.module.device_assignment)
            if groups:
                sizes[row], counts[row] = groups.size, groups.count
        if opcode in _TRANSFERS:
            host_transfers[row] = body.instructions[row].is_host_transfer
    return {
        "parameter": parameters,
        "fusion_kind": kinds,
        "custom_call_target": targets,
        "group_size": sizes,
        "group_count": counts,
        "is_host_transfer": host_transfers,
    }
