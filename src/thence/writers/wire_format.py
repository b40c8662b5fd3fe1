"""Single values in Protobuf's wire format: https://protobuf.dev/programming-guides/encoding/."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

VARINT, FIXED64, BYTES = 0, 1, 2
"""Wire types."""


def varint(value: int) -> bytes:
    """A number as a varint: seven bits per byte, lowest first; negative numbers in 64-bit two's complement."""
    value &= (1 << 64) - 1  # a negative number is written as its two's complement in 64 bits
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)  # seven bits a byte, the low ones first; the high bit: another byte follows
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
    return field_tag(number, BYTES) + varint(len(content)) + content


def text_field(number: int, text: str) -> bytes:
    """A field with text. Lone surrogates, which UTF-8 cannot hold, become question marks."""
    return bytes_field(number, text.encode("utf-8", "replace"))


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """A field with any number of integers."""
    return bytes_field(number, b"".join(map(varint, values)))


def fixed64_field(number: int, value: int) -> bytes:
    """A field with an unsigned number of always eight bytes."""
    return field_tag(number, FIXED64) + struct.pack("<Q", value)
