"""A protobuf wire reader and writer for tests: an outside truth for the readers' schemas."""

from __future__ import annotations

from typing import Any


def fields(data: bytes) -> list[tuple[int, Any]]:
    """(field number, int or bytes) pairs of one message, in order."""
    at, result = 0, []
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        elif key & 7 == 2:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            size = 8 if key & 7 == 1 else 4
            value, at = data[at : at + size], at + size
        result.append((key >> 3, value))
    return result


def first(data: bytes) -> dict[int, Any]:
    """The last value of each field, as for singular fields."""
    return dict(fields(data))


def every(data: bytes, number: int) -> list[Any]:
    """All values of a repeated field."""
    return [value for key, value in fields(data) if key == number]


def packed(data: bytes) -> list[int]:
    """The integers of a packed field."""
    at, result = 0, []
    while at < len(data):
        value, at = _varint(data, at)
        result.append(value)
    return result


def message(*pairs: tuple[int, Any]) -> bytes:
    """A message from (field number, int | str | bytes) pairs."""
    out = bytearray()
    for number, value in pairs:
        if isinstance(value, int):
            out += _encoded(number << 3) + _encoded(value)
        else:
            content = value.encode() if isinstance(value, str) else value
            out += _encoded(number << 3 | 2) + _encoded(len(content)) + content
    return bytes(out)


def pack(*values: int) -> bytes:
    """A packed list of integers."""
    return b"".join(_encoded(value) for value in values)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _encoded(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
