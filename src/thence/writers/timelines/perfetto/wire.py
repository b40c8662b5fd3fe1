"""Protobuf's wire format (https://protobuf.dev/programming-guides/encoding/), single values and whole columns.

The records of many rows with the same fields are joined from `Part`s. A part has the same number of bytes for
each row, of which a row uses the first few. Every step is a NumPy operation over all rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.model.arrays import Array, Int64, Mask, UInt8


VARINT, FIXED64, _BYTES = 0, 1, 2
"""Wire types."""


def varint(value: int) -> bytes:
    """A number as a varint: seven bits per byte, lowest first; negative numbers in 64-bit two's complement."""
    value &= (1 << 64) - 1
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def field_tag(number: int, wire_type: int) -> bytes:
    """The tag in front of a value: the field's number and the wire type."""
    return varint(number << 3 | wire_type)


def uint_field(number: int, value: int) -> bytes:
    """A field with a number, a truth value or an enum."""
    return field_tag(number, VARINT) + varint(value)


def bytes_field(number: int, content: bytes) -> bytes:
    """A field with bytes or a message."""
    return field_tag(number, _BYTES) + varint(len(content)) + content


def text_field(number: int, text: str) -> bytes:
    """A field with text. Lone surrogates, which UTF-8 cannot hold, become question marks."""
    return bytes_field(number, text.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes at one position in the records of many rows.

    Attributes:
        data: uint8, shape (width, rows), or (width, 1) if all rows have the same bytes.
        length: int64, shape (rows,): number of bytes that each row uses.
        ragged: uint8; if given, ``data`` is empty and ``ragged`` has the bytes of all rows one after the
            other, ``length`` bytes for each row.
    """

    data: UInt8
    length: Int64
    ragged: UInt8 | None = None


def constant(content: bytes, rows: int) -> Part:
    """The same bytes in every row."""
    data = np.frombuffer(content, np.uint8)[:, None]
    return Part(data, np.full(rows, len(content), np.int64))


def varint_column(values: Array) -> Part:
    """A varint per row.

    Args:
        values: any integers; negative integers are encoded in 64-bit two's complement.
    """
    unsigned = values.astype(np.uint64)
    largest = int(unsigned.max(initial=0))
    if largest < 1 << 32:
        unsigned = unsigned.astype(np.uint32)
    width = max(1, -(-largest.bit_length() // 7))
    data = np.empty((width, len(values)), np.uint8)
    length = np.ones(len(values), np.int64)
    for place in range(width):
        data[place] = unsigned & 0x7F
        if place + 1 < width:
            unsigned >>= 7
            more = unsigned > 0
            data[place] |= more.view(np.uint8) << 7
            length += more
    return Part(data, length)


def fixed64_column(values: Array) -> Part:
    """A little-endian 64-bit integer per row."""
    data = values.astype("<u8").view(np.uint8).reshape(len(values), 8).T
    return Part(data, np.full(len(values), 8, np.int64))


def double_column(values: Array) -> Part:
    """A little-endian double per row."""
    data = values.astype("<f8").view(np.uint8).reshape(len(values), 8).T
    return Part(data, np.full(len(values), 8, np.int64))


def ragged(content: UInt8, length: Int64) -> Part:
    """Any number of bytes per row.

    Args:
        content: the bytes of all rows, one after the other.
        length: number of bytes of each row.
    """
    return Part(np.empty((0, 1), np.uint8), length, content)


def only_where(parts: Iterable[Part], present: Mask) -> list[Part]:
    """The parts, with no bytes in the rows that are not present; no part may be ragged."""
    return [Part(part.data, np.where(present, part.length, 0)) for part in parts]


def sizes(parts: Iterable[Part]) -> Int64:
    """Number of bytes of each row, summed over the parts."""
    total: Int64 = np.sum([part.length for part in parts], axis=0, dtype=np.int64)
    return total


def delimited(number: int, parts: Sequence[Part]) -> list[Part]:
    """The parts as a message in a field: with the tag and the length in front."""
    length = sizes(parts)
    return [constant(field_tag(number, _BYTES), len(length)), varint_column(length), *parts]


def joined(parts: Sequence[Part]) -> UInt8:
    """The bytes of all rows, row after row; the bytes of a row are in the order of the parts."""
    rows = len(parts[0].length)
    width = sum(part.data.shape[0] for part in parts)
    data = np.empty((width, rows), np.uint8)
    used = np.empty((width, rows), np.bool_)
    offset = 0
    for part in parts:
        below = offset + part.data.shape[0]
        data[offset:below] = part.data
        np.less(np.arange(below - offset)[:, None], part.length, out=used[offset:below])
        offset = below
    # Each byte position is filled as a contiguous row, then all are transposed once: faster than strided writes.
    regular = np.ascontiguousarray(data.T)[np.ascontiguousarray(used.T)]
    return _with_ragged(regular, parts)


def _with_ragged(regular: UInt8, parts: Sequence[Part]) -> UInt8:
    """Inserts the bytes of the ragged part, if there is one, into the bytes of the other parts."""
    place = next((i for i, part in enumerate(parts) if part.ragged is not None), None)
    if place is None:
        return regular
    content, extra = parts[place].ragged, parts[place].length
    assert content is not None
    assert all(part.ragged is None for part in parts[place + 1 :]), "one ragged part at most"
    if not len(content):
        return regular
    row = sizes(parts)
    begin = np.cumsum(row) - row + (sizes(parts[:place]) if place else 0)
    edges = np.zeros(len(regular) + len(content) + 1, np.int8)
    filled = extra > 0
    edges[begin[filled]] += 1
    edges[(begin + extra)[filled]] -= 1
    inserted = np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)
    result = np.empty(len(inserted), np.uint8)
    result[inserted] = content
    result[~inserted] = regular
    return result
