"""Parses protobuf messages, xz-compressed or not; every failure becomes a `DamagedInput`."""

from __future__ import annotations

import lzma
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError, Message

from thence.errors import DamagedInput
from thence.readers.expansion import DEFAULT, Expansion

if TYPE_CHECKING:
    from thence.units import Bytes

_MAX_UNPACKED: Bytes = 1 << 30
"""Largest content of an .xz file of any size that is unpacked; optimized HLO protos have some MB to 200 MB."""

_XZ_MAGIC = b"\xfd7zXZ\x00"
_XZ_MEMORY: Bytes = 256 << 20  # `xz -9` needs 65 MB to unpack; a header can claim 4 GB

_M = TypeVar("_M", bound=Message)


def parse(kind: type[_M], data: bytes, path: str) -> _M:
    """One message of the given kind.

    Raises:
        DamagedInput: the bytes are no such message, or end too early.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.name
        raise DamagedInput(path, f"is cut or damaged: its content is not a {name} message") from error
    return message


def unpacked(data: bytes, path: str, expansion: Expansion = DEFAULT) -> bytes:
    """The content of an .xz file; other bytes as they are.

    Args:
        data: the file, which may hold several xz streams.
        path: for messages.
        expansion: how much larger than the file its content may be.

    Raises:
        DamagedInput: the compressed data is cut or damaged, or holds more than is accepted.
    """
    if not data.startswith(_XZ_MAGIC):
        return data
    parts: list[bytes] = []
    stored = len(data)
    limit = left = min(_MAX_UNPACKED, expansion.most(stored))
    while data.startswith(_XZ_MAGIC):
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        try:
            part = decompressor.decompress(data, max_length=left + 1)
        except lzma.LZMAError as error:
            raise DamagedInput(path, f"the xz data is damaged ({error})") from error
        left -= len(part)
        if left < 0:
            expansion.check(path, stored, limit - left)
            raise DamagedInput(path, f"unpacks to more than {limit:,} bytes; no HLO module is that large")
        if not decompressor.eof:
            raise DamagedInput(path, "the xz data ends too early")
        parts.append(part)
        data = decompressor.unused_data.lstrip(b"\0")  # padding between streams
    return b"".join(parts)
