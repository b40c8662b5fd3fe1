"""What HLO instructions read, call, move and compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thence.readers.protos.hlo_pb2 import ShapeProto
from thence.readers.xla.costs import COUNTED, NO_FLOPS, flops, result_elements
from thence.readers.xla.lists import IntegerLists
from thence.readers.xla.shapes import MAX_INT64, shape_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.readers.xla.body import Body, Distinct

    Int64 = NDArray[np.int64]

__all__ = ["work_columns"]

_NOWHERE = -1  # row of an operand that there is not
_NO_SHAPE = ShapeProto()
_SUMS_CALLED = frozenset(("async-start", "call", "fusion"))


def work_columns(
    body: Body, shapes: Distinct[bytes], parsed: Sequence[ShapeProto]
) -> dict[str, Any]:
    """The columns of `INSTRUCTIONS` that tell what instructions read, call, move and compute.

    Args:
        body: of the module.
        shapes: of the instructions, serialized.
        parsed: the different shapes.

    Raises:
        DecodeError: the operands of an instruction are damaged.
    """
    operands = body.operands
    producers = _producers(body, operands)
    exists = producers != _NOWHERE
    result_bytes = np.array([shape_bytes(shape) for shape in parsed], np.int64)[shapes.of_row]
    ids = np.where(exists, np.array(body.ids)[producers], operands.items)
    own = _own_flops(body, shapes, parsed, IntegerLists(producers, operands.counts))
    return {
        "called": body.called.column(body.called.items),
        "operands": operands.column(ids),
        "result_bytes": result_bytes,
        "operand_bytes": operands.sums(np.where(exists, result_bytes[producers], 0)),
        "flops": _with_called(body, own),
        "own_flops": own,
    }


def _producers(body: Body, operands: IntegerLists) -> Int64:
    """The row of each operand, in the computation of its user, or `_NOWHERE`.

    Some writers leave out the computation's number, 32 bits up.
    """
    numbers, starts = operands.items.tolist(), [0, *operands.ends.tolist()]
    found: list[int] = []
    for computation, rows in body.computations:
        high = computation.id << 32
        row_of = dict(zip(body.ids[rows.start : rows.stop], rows, strict=True))
        wanted = numbers[starts[rows.start] : starts[rows.stop]]
        found += [row_of[n] if n in row_of else row_of.get(high | n, _NOWHERE) for n in wanted]
    return np.array(found, np.int64)


def _own_flops(
    body: Body, shapes: Distinct[bytes], parsed: Sequence[ShapeProto], producers: IntegerLists
) -> list[int]:
    """Floating-point operations of each instruction, without what it calls."""
    elements = [result_elements(shape) for shape in parsed]
    shape_of = shapes.of_row.tolist()
    result = [
        0 if opcode in NO_FLOPS else elements[shape]
        for opcode, shape in zip(body.opcodes, shape_of, strict=True)
    ]
    for row, opcode in enumerate(body.opcodes):
        if opcode in COUNTED:
            given = [_NO_SHAPE if p == _NOWHERE else parsed[shape_of[p]] for p in producers.of(row)]
            result[row] = flops(
                body.instructions[row], parsed[shape_of[row]], given, body.config(row)
            )
    return result


def _with_called(body: Body, own: list[int]) -> list[int]:
    """Floating-point operations of each instruction, with what it calls; callees come first."""
    result = own.copy()
    work: dict[int, int] = {}
    calls = body.called.counts.tolist()
    for computation, rows in body.computations:
        for row in rows:
            if calls[row] and body.opcodes[row] in _SUMS_CALLED:
                inner = sum(work.get(callee, 0) for callee in body.called.of(row))
                result[row] = min(own[row] + inner, MAX_INT64)
        work[computation.id] = min(sum(result[rows.start : rows.stop]), MAX_INT64)
    return result
