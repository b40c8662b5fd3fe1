"""The fields, shapes, device groups and costs of the instructions of an HLO module, each distinct value parsed once.

Reading a field of an instruction is a call into protobuf, so each field is read once, for all instructions
together. Most values repeat: a module of 37,000 instructions has some 300 different shapes, 60 opcodes and
2,000 op_names. `Distinct` lets each distinct value be parsed once. `IntegerLists` keeps a list of integers
for each row (operands, called computations) as two arrays.

HloInstructionProto of hlo.proto has a separate field for each form of device groups: explicit lists
(``{{0,1},{2,3}}``), a reshaped iota (``[2,2]<=[4]``), and axes of a device mesh
(``mesh['data'=2] {'data'}``).

The floating-point operations are computed from shapes the way XLA counts them: an estimate for weighting
and rooflines, not a measurement. The conventions are those of XLA's HloCostAnalysis where that is simple:
a multiply-add counts 2, an elementwise operation 1 per result element whatever the operation, and moving
data 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import polars as pl
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from thence.model.hlo import INSTRUCTIONS
from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.readers.jax.protos.hlo_pb2 import ShapeProto

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from thence.model.arrays import Int64
    from thence.readers.jax.protos.hlo_pb2 import (
        DeviceAssignmentProto,
        HloComputationProto,
        HloInstructionProto,
        HloModuleProto,
        IotaReplicaGroupListProto,
        MeshAxesReplicaGroupListProto,
        ReplicaGroup,
    )
    from thence.units import Bytes


MAX_INT64 = (1 << 63) - 1
MAX_RANK = 64
"""More dimensions than any XLA shape has; keeps a damaged shape with millions of dimensions from hanging the reader."""
# PrimitiveType of xla_data.proto: number to width in bits. TUPLE (13), OPAQUE_TYPE (14), TOKEN (17)
# and BUFFER (34) have no elements of their own.
_ELEMENT_BITS = {
    **dict.fromkeys((30, 31), 1),  # S1 U1
    **dict.fromkeys((26, 27), 2),  # S2 U2
    **dict.fromkeys((21, 22), 4),  # S4 U4
    32: 4,  # F4E2M1FN
    **dict.fromkeys((35, 36), 6),  # F6E3M2FN F6E2M3FN
    1: 8,  # PRED: a byte each
    **dict.fromkeys((2, 6), 8),  # S8 U8
    **dict.fromkeys((19, 20, 23, 24, 25, 28, 29, 33), 8),  # F8 variants, the scale F8E8M0FNU among them
    **dict.fromkeys((3, 7, 10, 16), 16),  # S16 U16 F16 BF16
    **dict.fromkeys((4, 8, 11), 32),  # S32 U32 F32
    **dict.fromkeys((5, 9, 12, 15), 64),  # S64 U64 F64 C64
    18: 128,  # C128
    **dict.fromkeys((13, 14, 17, 34), 0),
}
"""Width of each PrimitiveType in bits; tuples, opaque values, tokens and buffers have none."""
_MAX_INT64 = np.iinfo(np.int64).max
_MAX_VARINT = 10  # bytes
_EMPTY = pl.Series([[]], dtype=pl.List(pl.Int64))
_T = TypeVar("_T", bound="Hashable")
_LISTS = ("operand_ids", "called_computation_ids")
"""Lists of integers, declared here as bytes: the packed field. XLA packs them, as proto3 does: none of the 53 modules
in our recordings has a list that is written number by number."""


def elements(shape: ShapeProto) -> int:
    """Number of elements of an array shape; 0 for others, an upper bound for dynamic dimensions."""
    return _count(shape) if _ELEMENT_BITS.get(shape.element_type) else 0


def _count(shape: ShapeProto) -> int:
    dimensions = shape.dimensions
    if len(dimensions) > MAX_RANK:
        return 0
    return min(prod(d for d in dimensions if d >= 0), MAX_INT64)


def shape_bytes(shape: ShapeProto) -> Bytes:
    """Bytes of an array shape or of all leaves of a tuple; at most `MAX_INT64`.

    Elements narrower than a byte are packed and the last byte is padded: s4[3] has 2 bytes. An element
    size in the layout (element_size_in_bits) takes precedence over the width of the type.
    """
    if shape.tuple_shapes:  # the parts of a tuple, or the element of a BUFFER
        return min(sum(shape_bytes(part) for part in shape.tuple_shapes), MAX_INT64)
    bits = _ELEMENT_BITS.get(shape.element_type, 0)
    if not bits:
        return 0
    stored = shape.layout.element_size_in_bits
    return min(-(-_count(shape) * (stored if 0 < stored <= 128 else bits) // 8), MAX_INT64)


def memory_space(shape: ShapeProto) -> int:
    """Memory space of an array shape: 0 device, 5 host, 1 the one for collectives."""
    return shape.layout.memory_space


@dataclass(frozen=True, slots=True)
class Groups:
    """Number and size of device groups.

    Attributes:
        size: devices of one group; of the largest group if explicit groups differ in size.
        count: number of groups.
    """

    size: int
    count: int


def replica_groups(instruction: HloInstructionProto, devices: DeviceAssignmentProto) -> Groups | None:
    """The device groups of a collective, or None where neither instruction nor module specifies them.

    A collective-permute names pairs instead of groups; each pair counts as a group of size 2.

    Args:
        instruction: from any version of XLA; all forms of groups are tried.
        devices: the module's device assignment; an empty list of groups means all devices in it.
    """
    if instruction.source_target_pairs:
        return Groups(2, len(instruction.source_target_pairs))
    if instruction.HasField("mesh_axes_replica_group_list"):
        return _from_mesh(instruction.mesh_axes_replica_group_list)
    if instruction.HasField("iota_collective_device_list"):
        return _from_iota(instruction.iota_collective_device_list)
    if instruction.HasField("collective_device_list"):
        listed = instruction.collective_device_list
        if listed.HasField("iota_replica_group_list"):
            return _from_iota(listed.iota_replica_group_list)
        if listed.replica_groups:
            return _from_lists(listed.replica_groups)
    return _from_lists(instruction.replica_groups) or _everyone(instruction, devices)


def _from_mesh(grouped: MeshAxesReplicaGroupListProto) -> Groups | None:
    """A group spans the named axes or parts of axes; the number of groups is the size of the remaining mesh."""
    axes = [axis.size for axis in grouped.mesh.axes]
    if len(axes) > MAX_RANK or len(grouped.axes) > MAX_RANK:
        return None
    size = 1
    for reference in grouped.axes:
        if not 0 <= reference.mesh_axis_index < len(axes):
            return None
        part = reference.HasField("sub_axis_info")
        size *= reference.sub_axis_info.size if part else axes[reference.mesh_axis_index]
    return _sane(size, prod(axes) // size) if size > 0 else None


def _sane(size: int, count: int) -> Groups | None:
    return Groups(size, count) if 0 < size <= MAX_INT64 and 0 < count <= MAX_INT64 else None


def _from_iota(iota: IotaReplicaGroupListProto) -> Groups | None:
    return _sane(iota.num_devices_per_group, iota.num_replica_groups)


def _from_lists(groups: Iterable[ReplicaGroup]) -> Groups | None:
    sizes = [len(group.replica_ids) for group in groups]
    largest = max(sizes, default=0)
    return Groups(largest, len(sizes)) if largest else None


def _everyone(instruction: HloInstructionProto, devices: DeviceAssignmentProto) -> Groups | None:
    """The groups of a collective that lists none: all replicas, and, if it has a channel, all partitions too."""
    replicas, partitions = devices.replica_count, devices.computation_count
    if replicas <= 0 or partitions <= 0:
        return None
    across = instruction.channel_id > 0
    return _sane(replicas * partitions if across else replicas, 1 if across else partitions)


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
        operands, called = (IntegerLists.packed([getattr(row, field) for row in rows]) for field in _LISTS)
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
        complete = is_last[end_of_row[end_of_row > 0] - 1].all()
        if not complete or size.max(initial=0) > _MAX_VARINT:
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
        self.of_row: Int64 = np.fromiter(map(places.__getitem__, column), np.int64, len(column))

    def columns(self, **values_of_distinct: Sequence[Any] | pl.Series) -> list[pl.Series]:
        """Columns of `INSTRUCTIONS`, given their values for each distinct value."""
        schema = {name: INSTRUCTIONS[name] for name in values_of_distinct}
        return pl.DataFrame(values_of_distinct, schema=schema)[self.of_row].get_columns()


# ---- Costs


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
