"""The foreign-function handler, called as XLA calls it: with structures laid out by hand.

Offsets are those of xla/ffi/api/c_api.h as a C compiler gives them, for jaxlib 0.6.2 and 0.7.2
(API 0.1), 0.8.2 (0.2), 0.10.2 (0.3), 0.11.2 (0.4) and 0.12.0 (0.5).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest

from thence.errors import MissingRequirement
from thence.timing import xla_ffi

API_BYTES = {1: 192, 2: 192, 3: 192, 4: 200, 5: 208}
POISON = 0x5A5A5A5A


class Memory:
    """Zeroed bytes at an address, written and read at offsets."""

    def __init__(self, size: int) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.bytes)

    def put(self, form: str, offset: int, value: int) -> None:
        struct.pack_into(form, self.bytes, offset, value)

    def get(self, form: str, offset: int) -> int:
        return int(struct.unpack_from(form, self.bytes, offset)[0])


class Xla:
    """XLA's side: an API with two functions, and call frames."""

    def __init__(self, minor: int) -> None:
        self.errors: list[tuple[str, int]] = []
        self.contexts: list[int] = []
        self.stream, self.stream_error = 0x5EED, 0
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self._create, self._get = kind(self._error_create), kind(self._stream_get)
        self.api = Memory(API_BYTES[minor])
        self.api.put("<Q", 0, API_BYTES[minor])
        self.api.put("<i", 36, minor)
        self.api.put("<Q", 48, ctypes.cast(self._create, ctypes.c_void_p).value or 0)
        self.api.put("<Q", 80, ctypes.cast(self._get, ctypes.c_void_p).value or 0)

    def _error_create(self, arguments: int) -> int:
        message, code = struct.unpack("<Qi", ctypes.string_at(arguments + 16, 12))
        self.errors.append((ctypes.string_at(message).decode(), code))
        return 0xE0 + len(self.errors)

    def _stream_get(self, arguments: int) -> int:
        self.contexts.append(struct.unpack("<Q", ctypes.string_at(arguments + 16, 8))[0])
        ctypes.memmove(arguments + 24, struct.pack("<Q", self.stream), 8)
        return self.stream_error

    def frame(self, stage: int, extension: int = 0, *, with_api: bool = True) -> Memory:
        frame = Memory(176)
        frame.put("<Q", 0, 168)
        frame.put("<Q", 8, extension)
        frame.put("<Q", 16, self.api.address if with_api else 0)
        frame.put("<Q", 24, 0xC0DE)
        frame.put("<i", 32, stage)
        return frame


def called(function: Any, frame: Memory) -> int | None:
    address = ctypes.cast(function, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(frame.address)  # type: ignore[no-any-return,arg-type]


def metadata_asked(xla: Xla, function: Any, *, with_api: bool = True, kind: int = 1) -> Memory:
    metadata = Memory(56)
    for offset in range(24, 56, 4):
        metadata.put("<I", offset, POISON)
    metadata.put("<Q", 0, 36)
    extension = Memory(32)
    extension.put("<Q", 0, 24)
    extension.put("<i", 8, kind)
    extension.put("<Q", 24, metadata.address)
    assert called(function, xla.frame(0, extension.address, with_api=with_api)) is None
    return metadata


@pytest.mark.parametrize("minor", API_BYTES)
def test_metadata_states_the_version_that_xla_has(minor: int) -> None:
    function = xla_ffi.handler(lambda _stream: pytest.fail("no stream is asked for"))
    # Before 0.2, XLA asks without an API.
    metadata = metadata_asked(Xla(minor), function, with_api=minor > 1)
    assert (metadata.get("<i", 24), metadata.get("<i", 28)) == (0, minor)
    assert metadata.get("<I", 32) == 0  # no traits: not compatible with command buffers
    untouched = POISON << 32 | POISON
    assert metadata.get("<Q", 40) == (0 if minor > 1 else untouched)
    assert metadata.get("<Q", 48) == untouched


@pytest.mark.parametrize("minor", API_BYTES)
def test_the_stream_of_the_call_is_handed_over(minor: int) -> None:
    streams: list[int] = []
    xla, function = Xla(minor), xla_ffi.handler(streams.append)
    assert called(function, xla.frame(3)) is None
    assert streams == [0x5EED]
    assert xla.contexts == [0xC0DE]
    assert xla.errors == []


@pytest.mark.parametrize("stage", [0, 1, 2, 4])
def test_other_stages_do_nothing(stage: int) -> None:
    function = xla_ffi.handler(lambda _stream: pytest.fail("not executing"))
    assert called(function, Xla(5).frame(stage)) is None


def test_another_extension_is_no_question() -> None:
    function = xla_ffi.handler(lambda _stream: pytest.fail("not executing"))
    metadata = metadata_asked(Xla(4), function, kind=2)
    assert metadata.get("<I", 24) == POISON


def test_the_default_stream_is_0() -> None:
    streams: list[int] = []
    xla = Xla(3)
    xla.stream = 0
    assert called(xla_ffi.handler(streams.append), xla.frame(3)) is None
    assert streams == [0]


def test_an_error_of_xlas_is_passed_on() -> None:
    xla = Xla(4)
    xla.stream_error = 0xBAD
    function = xla_ffi.handler(lambda _stream: pytest.fail("there is no stream"))
    assert called(function, xla.frame(3)) == 0xBAD


@pytest.mark.parametrize(
    ("raised", "said"),
    [(MissingRequirement("cuEventRecord failed"), "cuEventRecord failed"), (KeyError("é"), "KeyError: 'é'")],
)
def test_what_goes_wrong_becomes_an_error_of_the_program(raised: Exception, said: str) -> None:
    def run(_stream: int) -> None:
        raise raised

    xla = Xla(5)
    assert called(xla_ffi.handler(run), xla.frame(3)) == 0xE1
    assert xla.errors == [(said, 13)]


def test_an_api_that_is_too_short_is_refused() -> None:
    xla = Xla(1)
    xla.api.put("<Q", 0, 80)
    function = xla_ffi.handler(lambda _stream: pytest.fail("there is no function to ask"))
    assert called(function, xla.frame(3)) == 0xE1
    assert "80 bytes" in xla.errors[0][0]
