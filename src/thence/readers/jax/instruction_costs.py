"""Operands, called computations, bytes and floating-point operations of HLO instructions.

The floating-point operations are computed from shapes the way XLA counts them: an estimate for weighting
and rooflines, not a measurement. The conventions are those of XLA's HloCostAnalysis where that is simple:
a multiply-add counts 2, an elementwise operation 1 per result element whatever the operation, and moving
data 0.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.readers.jax.instructions import MAX_INT64, MAX_RANK, IntegerLists, elements, shape_bytes
from thence.readers.jax.protos.hlo_pb2 import ShapeProto

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.model.arrays import Int64
    from thence.readers.jax.instructions import Body, Distinct
    from thence.readers.jax.protos.hlo_pb2 import HloInstructionProto

_MOVING = """
add-dependency after-all all-gather all-gather-done all-gather-start all-reduce-done all-to-all
async-done async-start async-update bitcast bitcast-convert broadcast call collective-broadcast
collective-permute collective-permute-done collective-permute-start concatenate conditional constant
copy copy-done copy-start custom-call domain dynamic-reshape dynamic-slice dynamic-update-slice
fusion gather get-dimension-size get-tuple-element infeed iota opt-barrier outfeed pad parameter
partition-id ragged-all-to-all recv recv-done replica-id reshape reverse send send-done
set-dimension-size slice topk transpose tuple while
"""
_NO_FLOPS = frozenset(_MOVING.split())
"""Opcodes that count no operations of their own (except in `_COUNTED_BY_SHAPE`): they name, move, call, communicate."""
_GEMM_TARGETS = ("__cublas$", "__hipblas", "__triton_gemm")
_MAX_CONFIG = 1 << 20
_COUNTED_BY_SHAPE = frozenset(
    (
        *("convolution", "custom-call", "dot", "ragged-dot", "reduce", "reduce-window", "scatter"),
        *("select-and-scatter", "sort"),
    )
)
"""Opcodes that do not count one operation for each element of the result."""
# Protobuf writes 64-bit integers as text in JSON.
_Dimension = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,2}$")] | Annotated[int, msgspec.Meta(ge=0, lt=100)]
_Times = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}$")] | Count
_PRODUCTS = frozenset(("convolution", "dot", "ragged-dot", "custom-call"))
_TYPES = {2: "int8", 10: "float16", 11: "float32", 12: "float64", 16: "bfloat16"} | dict.fromkeys(
    (19, 20, 23, 24, 25, 28, 29, 33), "float8"
)
"""Names of element types in which products are computed, by PrimitiveType."""
_TF32_PRECISIONS = frozenset(("DEFAULT", "HIGH"))
"""Precisions at which XLA lets cuBLAS multiply float32 in TF32."""
_PRECISION = 51
"""Field of HloInstructionProto that holds a PrecisionConfig, which our schema leaves out."""
_LIST_HEAD, _HIGH = 2, 1
"""A PrecisionConfig begins with two bytes and the list of its operands' precisions: DEFAULT is 0, HIGH 1, HIGHEST 2. An
algorithm that the program chose follows, with larger numbers."""
_BACKWARD = re.compile("Backward")
_CAUSAL = frozenset(("CAUSAL", "CAUSAL_MASK"))
_NO_MASK = frozenset(("", "NO_MASK"))
_NOWHERE = -1  # row of an operand that does not exist
_NO_SHAPE = ShapeProto()
_SUMS_CALLED = frozenset(("async-start", "call", "fusion"))


def work_columns(body: Body, shapes: Distinct[bytes], parsed: Sequence[ShapeProto]) -> dict[str, Any]:
    """The columns of `INSTRUCTIONS` for operands, called computations, bytes and floating-point operations.

    Raises:
        DecodeError: the operands of an instruction are damaged.
    """
    operands = body.operands
    producers = _producers(body, operands)
    exists = producers != _NOWHERE
    result_bytes = np.array([shape_bytes(shape) for shape in parsed], np.int64)[shapes.of_row]
    ids = np.where(exists, np.array(body.ids)[producers], operands.items)
    given = IntegerLists(producers, operands.counts)
    own_flops = _own_flops(body, shapes, parsed, given)
    return {
        "called": body.called.column(body.called.items),
        "operands": operands.column(ids),
        "result_bytes": result_bytes,
        "operand_bytes": operands.sums(np.where(exists, result_bytes[producers], 0)),
        "flops": _flops_with_callees(body, own_flops),
        "own_flops": own_flops,
        "product_type": _product_types(body, shapes, parsed, given, own_flops),
    }


def _producers(body: Body, operands: IntegerLists) -> Int64:
    """The row of each operand, in the computation of the instruction that uses it, or `_NOWHERE`.

    Some writers leave out the upper 32 bits of an id, which hold the computation's id.
    """
    numbers, starts = operands.items.tolist(), [0, *operands.ends.tolist()]
    producers: list[int] = []
    for computation, rows in body.computations:
        high = computation.id << 32
        row_of = dict(zip(body.ids[rows.start : rows.stop], rows, strict=True))
        wanted = numbers[starts[rows.start] : starts[rows.stop]]
        producers += [row_of[n] if n in row_of else row_of.get(high | n, _NOWHERE) for n in wanted]
    return np.array(producers, np.int64)


def _own_flops(body: Body, shapes: Distinct[bytes], parsed: Sequence[ShapeProto], producers: IntegerLists) -> list[int]:
    """Floating-point operations of each instruction, without those of computations that it calls."""
    elements = [_result_elements(shape) for shape in parsed]
    shape_of = shapes.of_row.tolist()
    result = [
        0 if opcode in _NO_FLOPS else elements[shape] for opcode, shape in zip(body.opcodes, shape_of, strict=True)
    ]
    for row, opcode in enumerate(body.opcodes):
        if opcode in _COUNTED_BY_SHAPE:
            given = [_NO_SHAPE if p == _NOWHERE else parsed[shape_of[p]] for p in producers.of(row)]
            result[row] = _flops(body.instructions[row], parsed[shape_of[row]], given, body.config(row))
    return result


def _product_types(
    body: Body, shapes: Distinct[bytes], parsed: Sequence[ShapeProto], producers: IntegerLists, own_flops: list[int]
) -> list[str | None]:
    """The type in which each product or convolution multiplies."""
    shape_of = shapes.of_row.tolist()
    types: list[str | None] = [None] * len(body.ids)
    for row, opcode in enumerate(body.opcodes):
        first = next(iter(producers.of(row)), _NOWHERE) if opcode in _PRODUCTS and own_flops[row] else _NOWHERE
        if first != _NOWHERE:
            types[row] = _TYPES.get(parsed[shape_of[first]].element_type)
            if types[row] == "float32" and _in_tf32(body.instructions[row], body.config(row)):
                types[row] = "tf32"
    return types


def _in_tf32(instruction: HloInstructionProto, config: bytes) -> bool:
    """Whether XLA lets a product of float32 be computed in TF32, by the precision that the program asks for."""
    if instruction.opcode == "custom-call":
        named = backend_config(config).gemm.precision.operands
        return bool(named) and _TF32_PRECISIONS.issuperset(named)
    unknown = UnknownFieldSet(instruction)
    stated = [unknown[place].data for place in range(len(unknown)) if unknown[place].field_number == _PRECISION]
    return instruction.opcode == "dot" and all(max(data[_LIST_HEAD:], default=0) <= _HIGH for data in stated)


def _flops_with_callees(body: Body, own_flops: list[int]) -> list[int]:
    """Floating-point operations of each instruction, with those of computations that it calls.

    One pass suffices, because a module lists callees before their callers.
    """
    result = own_flops.copy()
    work: dict[int, int] = {}
    calls = body.called.counts.tolist()
    for computation, rows in body.computations:
        for row in rows:
            if calls[row] and body.opcodes[row] in _SUMS_CALLED:
                inner = sum(work.get(callee, 0) for callee in body.called.of(row))
                result[row] = min(own_flops[row] + inner, MAX_INT64)
        work[computation.id] = min(sum(result[rows.start : rows.stop]), MAX_INT64)
    return result


def _flops(instruction: HloInstructionProto, result: ShapeProto, operands: Sequence[ShapeProto], config: bytes) -> int:
    """Floating-point operations of one instruction, without those of computations that it calls.

    Args:
        instruction: one of `_COUNTED_BY_SHAPE`; its dimension numbers are used.
        result: its shape.
        operands: shapes of its operands.
        config: its backend config; cuBLAS calls keep their dimension numbers there.
    """
    opcode = instruction.opcode
    count = 0
    if opcode == "dot":
        numbers = instruction.dot_dimension_numbers.lhs_contracting_dimensions
        count = _dot(result, operands, numbers)
    elif opcode == "ragged-dot":
        ragged = instruction.ragged_dot_dimension_numbers.dot_dimension_numbers
        count = _dot(result, operands, ragged.lhs_contracting_dimensions)
    elif opcode == "convolution":
        count = _convolution(instruction, result, operands)
    elif opcode == "custom-call":
        count = _custom_call(instruction, result, operands, config)
    elif opcode in ("reduce-window", "select-and-scatter"):
        window = instruction.window.dimensions[:MAX_RANK]
        count = _result_elements(result) * prod(dimension.size for dimension in window)
    elif operands:
        count = elements(operands[-1] if opcode == "scatter" else operands[0])
        if opcode == "sort":
            count *= count.bit_length()
    return max(0, min(count, MAX_INT64))


def _dot(result: ShapeProto, operands: Sequence[ShapeProto], contracting: Iterable[int]) -> int:
    """2 * (result elements) * (length of the contraction)."""
    if not operands:
        return 0
    left = operands[0].dimensions[:MAX_RANK]
    return 2 * _result_elements(result) * prod(left[d] for d in set(contracting) if 0 <= d < len(left))


def _convolution(instruction: HloInstructionProto, result: ShapeProto, operands: Sequence[ShapeProto]) -> int:
    """2 * (result elements) * (kernel elements of one output feature)."""
    if len(operands) < 2:
        return 0
    kernel = operands[1]
    feature = instruction.convolution_dimension_numbers.kernel_output_feature_dimension
    outputs = kernel.dimensions[feature] if 0 <= feature < len(kernel.dimensions) else 0
    return 2 * _result_elements(result) * elements(kernel) // outputs if outputs > 0 else 0


def _custom_call(
    instruction: HloInstructionProto, result: ShapeProto, operands: Sequence[ShapeProto], config: bytes
) -> int:
    """Floating-point operations of products, convolutions and attention of libraries; 0 for other targets."""
    target = instruction.custom_call_target
    if target.startswith("__cudnn$conv"):
        return _cudnn_convolution(instruction, result, operands)
    if target.startswith("__cudnn$fmha"):
        return _attention(target, operands, backend_config(config).attention)
    if not target.startswith(_GEMM_TARGETS):
        return 0
    contracting = backend_config(config).gemm.numbers.lhs_contracting
    return _dot(result, operands, map(int, contracting)) if contracting else 0


def _cudnn_convolution(instruction: HloInstructionProto, result: ShapeProto, operands: Sequence[ShapeProto]) -> int:
    """Of a forward convolution and its two gradients: each position of the forward's output meets the kernel.

    The gradient of the input takes (gradient, kernel), that of the kernel (input, gradient) and returns a kernel; the
    dimension numbers are those of the forward.
    """
    if len(operands) < 2:
        return 0
    first = result.tuple_shapes[0] if result.tuple_shapes else result
    target = instruction.custom_call_target
    if target.startswith("__cudnn$convBackwardInput"):
        output, kernel = operands[0], operands[1]
    elif target.startswith("__cudnn$convBackwardFilter"):
        output, kernel = operands[1], first
    else:
        output, kernel = first, operands[1]
    return _convolution(instruction, output, (output, kernel))


def _attention(target: str, operands: Sequence[ShapeProto], config: _Attention) -> int:
    """Of cuDNN's attention by the shape of its scores, [batch, heads, queries, keys]; 0 for lengths on the device."""
    sizes = [int(n) for n in config.scores.dimensions]
    causal = config.mask in _CAUSAL
    if len(sizes) != 4 or len(operands) < 3 or not (causal or config.mask in _NO_MASK):
        return 0
    batch, heads, queries, keys = sizes
    widths = [operand.dimensions[-1] if operand.dimensions else 0 for operand in (operands[0], operands[2])]
    seen = min(queries, keys)
    pairs = seen * (seen + 1) // 2 + (queries - seen) * keys if causal else queries * keys
    forward = 2 * batch * heads * pairs * sum(widths)
    return forward * 5 // 2 if _BACKWARD.search(target) else forward


def _result_elements(shape: ShapeProto) -> int:
    """Elements of a result; for a tuple (multi-output reductions), those of its first array."""
    return elements(shape.tuple_shapes[0] if shape.tuple_shapes else shape)


class _DotNumbers(msgspec.Struct, frozen=True):
    lhs_contracting: tuple[_Dimension, ...] = msgspec.field(default=(), name="lhs_contracting_dimensions")


class _Precision(msgspec.Struct, frozen=True):
    operands: tuple[str, ...] = msgspec.field(default=(), name="operand_precision")


class _Gemm(msgspec.Struct, frozen=True):
    numbers: _DotNumbers = msgspec.field(default=_DotNumbers(), name="dot_dimension_numbers")
    precision: _Precision = msgspec.field(default=_Precision(), name="precision_config")


class _Scores(msgspec.Struct, frozen=True):
    dimensions: tuple[_Times, ...] = ()


class _Attention(msgspec.Struct, frozen=True):
    scores: _Scores = msgspec.field(default=_Scores(), name="intermediate_tensor_shape")
    mask: str = msgspec.field(default="", name="mask_type")


class _TripCount(msgspec.Struct, frozen=True):
    n: _Times = 0


class BackendConfig(msgspec.Struct, frozen=True):
    """The fields of a backend config in JSON that are read.

    Attributes:
        gemm: of a call of cuBLAS: its dimension numbers.
        attention: of a call of cuDNN's attention: the shape of its scores, and its mask.
        trip_count: of a while; None if it is not known.
    """

    gemm: _Gemm = msgspec.field(default=_Gemm(), name="gemm_backend_config")
    attention: _Attention = msgspec.field(default=_Attention(), name="cudnn_fmha_backend_config")
    trip_count: _TripCount | None = msgspec.field(default=None, name="known_trip_count")


def backend_config(config: bytes) -> BackendConfig:
    """A backend config that is a JSON object; an empty one for others, which can be arbitrary bytes."""
    if not config.startswith(b"{") or len(config) > _MAX_CONFIG:
        return BackendConfig()
    try:
        return decoded(config, BackendConfig)
    except NotAsWritten:
        return BackendConfig()
