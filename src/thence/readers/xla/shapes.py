"""Sizes of XLA shapes: elements, bytes, memory space."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thence.readers.protos.hlo_pb2 import ShapeProto
    from thence.units import Bytes

__all__ = [
    "ELEMENT_BITS",
    "MAX_INT64",
    "MAX_RANK",
    "elements",
    "memory_space",
    "shape_bytes",
]

MAX_INT64 = (1 << 63) - 1
MAX_RANK = 64
"""More dimensions than any shape of XLA has: multiplying millions must not hang the reader."""

# PrimitiveType of xla_data.proto: number to width in bits. TUPLE (13), OPAQUE_TYPE (14), TOKEN (17)
# and BUFFER (34) have no elements of their own.
ELEMENT_BITS = {
    **dict.fromkeys((30, 31), 1),  # S1 U1
    **dict.fromkeys((26, 27), 2),  # S2 U2
    **dict.fromkeys((21, 22), 4),  # S4 U4
    32: 4,  # F4E2M1FN
    **dict.fromkeys((35, 36), 6),  # F6E3M2FN F6E2M3FN
    1: 8,  # PRED: a byte each
    **dict.fromkeys((2, 6), 8),  # S8 U8
    **dict.fromkeys(
        (19, 20, 23, 24, 25, 28, 29, 33), 8
    ),  # F8 variants, the scale F8E8M0FNU among them
    **dict.fromkeys((3, 7, 10, 16), 16),  # S16 U16 F16 BF16
    **dict.fromkeys((4, 8, 11), 32),  # S32 U32 F32
    **dict.fromkeys((5, 9, 12, 15), 64),  # S64 U64 F64 C64
    18: 128,  # C128
    **dict.fromkeys((13, 14, 17, 34), 0),
}
"""Width of each PrimitiveType in bits; tuples, opaque values, tokens and buffers have none."""


def elements(shape: ShapeProto) -> int:
    """Number of elements of an array shape; 0 for others, an upper bound for dynamic dimensions."""
    return _count(shape) if ELEMENT_BITS.get(shape.element_type) else 0


def shape_bytes(shape: ShapeProto) -> Bytes:
    """Bytes of an array shape or of all leaves of a tuple; at most `MAX_INT64`.

    Elements narrower than a byte are packed, the last byte filled up: s4[3] has 2 bytes. A layout
    may say otherwise (element_size_in_bits), and then it counts.
    """
    if shape.tuple_shapes:  # of a tuple, and of a BUFFER its element
        return min(sum(shape_bytes(part) for part in shape.tuple_shapes), MAX_INT64)
    bits = ELEMENT_BITS.get(shape.element_type, 0)
    if not bits:
        return 0
    stored = shape.layout.element_size_in_bits
    return min(-(-_count(shape) * (stored if 0 < stored <= 128 else bits) // 8), MAX_INT64)


def memory_space(shape: ShapeProto) -> int:
    """Memory space of an array shape: 0 device, 5 host, 1 that of collectives."""
    return shape.layout.memory_space


def _count(shape: ShapeProto) -> int:
    dimensions = shape.dimensions
    if len(dimensions) > MAX_RANK:
        return 0
    return min(prod(d for d in dimensions if d >= 0), MAX_INT64)
