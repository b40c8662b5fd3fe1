"""What the package knows of CUPTI's records, against what the C compiler sees in CUPTI's headers."""

from __future__ import annotations

import ctypes
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DATA, examples
from thence.capture.cuda import layouts
from thence.capture.cuda.cupti import CuptiError
from thence.capture.cuda.layouts import LAYOUTS
from thence.capture.recorder import activity_parser
from thence.capture.recorder.activity_parser import ActivityParser

HEADERS: dict[str, Any] = json.loads((DATA / "cupti" / "layouts.json").read_text())
SIZES = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}
# Our column: the header's field.
SHARED = {
    "start": "start", "end": "end", "device": "deviceId", "stream": "streamId",
    "correlation": "correlationId", "node": "graphNodeId", "graph": "graphId", "bytes": "bytes",
    "name": "name",
}  # fmt: skip
OWN = {
    "CONCURRENT_KERNEL": {
        "registers": "registersPerThread", "static_shared": "staticSharedMemory",
        "dynamic_shared": "dynamicSharedMemory", "queued": "queued",
        **{f"{what}_{axis}": f"{what}{axis.upper()}" for what in ("grid", "block") for axis in "xyz"},
    },
    "MEMCPY": {"copy_kind": "copyKind", "source_memory": "srcKind", "destination_memory": "dstKind"},
    "MEMCPY2": {"copy_kind": "copyKind", "source_memory": "srcKind", "destination_memory": "dstKind"},
    "MEMSET": {"memory": "memoryKind"},
    "RUNTIME": {"function": "cbid", "thread": "threadId"},
    "MARKER": {
        "flags": "flags", "time": "timestamp", "id": "id", "thread": "objectId.pt.threadId",
        "domain": "domain",
    },
    "MEMORY2": {
        "operation": "memoryOperationType", "memory": "memoryKind", "address": "address", "time": "timestamp",
    },
    "OVERHEAD": {
        "overhead_kind": "overheadKind", "object_kind": "objectKind", "thread": "objectId.pt.threadId",
    },
}  # fmt: skip


@pytest.mark.parametrize("wheel", HEADERS)
@pytest.mark.parametrize("record", OWN)
def test_every_field_lies_where_the_header_puts_it(wheel: str, record: str) -> None:
    header = HEADERS[wheel]["records"][record]
    layout = LAYOUTS[header["kind"]]
    names = {**SHARED, **OWN[record]}
    assert layout.smallest <= header["bytes"]
    for column, (offset, dtype) in layout.fields.items():
        place, size = header["fields"][names[column]]
        assert (offset, dtype) == (place, SIZES[size]), column
        assert offset + size <= layout.smallest


def test_driver_calls_look_like_runtime_calls() -> None:
    assert LAYOUTS[layouts.DRIVER] == LAYOUTS[layouts.RUNTIME]
    assert {header["records"]["RUNTIME"]["kind"] for header in HEADERS.values()} == {layouts.RUNTIME}


def test_every_version_with_a_header_is_accepted() -> None:
    for header in HEADERS.values():
        layouts.require_known(header["version"])


class Library:
    """Knows the sizes of records, as libcupti does."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes

    def next_record(self, buffer: int, valid_bytes: int, record: int | None) -> int | None:
        assert record is not None
        kind = ctypes.c_uint32.from_address(record).value
        if kind not in self.sizes:
            raise CuptiError("cuptiActivityGetNextRecord", 21, "no such kind")
        following = record + self.sizes[kind]
        return following if following < buffer + valid_bytes else None


@pytest.mark.parametrize("seed", range(12))
def test_every_record_of_a_mixed_buffer_is_found_once_and_in_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = {10: 216, 5: 40, 4: 40, 12: 56, 1: 96, 99: 24}
    kinds: list[int] = []
    for _ in range(int(random.integers(1, 40))):  # runs, and turns of several kinds
        some = random.choice(list(sizes), size=int(random.integers(1, 4)), replace=False)
        kinds += random.choice(some, size=int(random.integers(1, 300))).tolist()
    numbers = {10: 92, 5: 32, 4: 32, 12: 16, 1: 44, 99: 8}  # offset of some number of each record
    buffer = bytearray()
    for i, kind in enumerate(kinds):
        record = bytearray(random.bytes(sizes[kind]))
        record[:4] = kind.to_bytes(4, "little")
        record[numbers[kind] : numbers[kind] + 4] = i.to_bytes(4, "little")
        buffer += record
    memory = np.frombuffer(bytes(buffer) + bytes(64), np.uint8).copy()
    parser = ActivityParser(Library(sizes))  # type: ignore[arg-type]
    found: dict[int, list[int]] = {}
    for kind, columns in parser.read(int(memory.ctypes.data), len(buffer)):
        field = "id" if kind == 12 else "correlation"
        found.setdefault(kind, []).extend(columns[field].tolist())
    for kind in set(kinds) - {99}:
        assert found[kind] == [i for i, k in enumerate(kinds) if k == kind]
    assert set(found) == set(kinds) - {99}
    assert parser.unknown == ({99: kinds.count(99)} if 99 in kinds else {})


def test_a_cut_buffer_gives_what_is_whole() -> None:
    memory = np.zeros(216 * 3, np.uint8)
    memory[0::216] = 10
    parser = ActivityParser(Library({10: 216}))  # type: ignore[arg-type]
    ((kind, columns),) = parser.read(int(memory.ctypes.data), 216 * 2)
    assert (kind, len(columns["start"])) == (10, 2)
    assert list(parser.read(int(memory.ctypes.data), 0)) == []
    ((_, columns),) = parser.read(int(memory.ctypes.data), 216 * 2 + 8)
    assert len(columns["start"]) == 2


KINDS = {10: 216, 5: 40, 4: 40, 12: 56, 1: 96, 2: 88, 99: 24, 300: 8, 70_000: 16}
"""Sizes; the last three are of kinds that nobody reads."""
NUMBERS = {10: (92, "correlation"), 5: (32, "correlation"), 4: (32, "correlation"), 12: (16, "id"),
           1: (44, "correlation"), 2: (44, "correlation")}  # fmt: skip
"""Offset of a number in a record of each kind, and the column that it comes in."""


def one_by_one(content: bytes) -> tuple[dict[int, list[int]], dict[int, int], bool]:
    """Numbers by kind, passed-over records by kind, and whether it ends in what is no record."""
    found: dict[int, list[int]] = {}
    unknown: dict[int, int] = {}
    at, end = 0, len(content) // 8 * 8
    asked = set()
    while at < end:
        (kind,) = struct.unpack_from("<I", content, at)
        if kind not in KINDS:
            return found, unknown, True
        size = KINDS[kind]
        if at + size > end and kind in asked:
            break  # cut off
        whole = at + size <= end
        if at + size < end:
            asked.add(kind)
        if kind in NUMBERS and (whole or end - at >= LAYOUTS[kind].smallest):
            found.setdefault(kind, []).append(struct.unpack_from("<I", content, at + NUMBERS[kind][0])[0])
        else:
            unknown[kind] = unknown.get(kind, 0) + 1
        at += size
    return found, unknown, False


def walked(content: bytes) -> tuple[dict[int, list[int]], dict[int, int], bool]:
    """The same of a `ActivityParser`; around the buffer lies what would be records."""
    around = struct.pack("<Q", 10) * 64
    memory = np.frombuffer(around + content + around, np.uint8).copy()
    parser = ActivityParser(Library(KINDS))  # type: ignore[arg-type]
    found: dict[int, list[int]] = {}
    damaged = False
    try:
        for kind, columns in parser.read(int(memory.ctypes.data) + len(around), len(content)):
            found.setdefault(kind, []).extend(columns[NUMBERS[kind][1]].tolist())
    except CuptiError:
        damaged = True
    return found, parser.unknown, damaged


def record(kind: int, filling: int) -> bytes:
    """A record whose every other word is `filling`: a kind, perhaps, so that it looks like another one."""
    return struct.pack("<II", kind, filling) + struct.pack("<Q", filling) * (KINDS[kind] // 8 - 1)


FILLINGS = st.one_of(st.sampled_from([0, *KINDS]), st.integers(0, (1 << 32) - 1))
RUNS = st.tuples(st.sampled_from(list(KINDS)), FILLINGS, st.sampled_from([1, 1, 1, 2, 33, 700]))


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(RUNS, max_size=30), st.integers(0, 300), st.integers(1, 40), st.binary(max_size=64))
def test_any_sequence_of_kinds_is_walked_as_one_by_one(
    runs: list[tuple[int, int, int]], cut: int, times: int, garbage: bytes
) -> None:
    content = b"".join(record(kind, filling) * n for kind, filling, n in runs)
    content = (content * times)[: 3 << 20]
    content = content[: len(content) - cut] if cut else content + garbage
    assert walked(content) == one_by_one(content)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.one_of(FILLINGS, st.sampled_from(list(KINDS))), max_size=400))
def test_any_words_are_walked_as_one_by_one(words: list[int]) -> None:
    content = struct.pack(f"<{len(words)}Q", *words)
    assert walked(content) == one_by_one(content)


def test_words_in_records_that_look_like_records_of_their_own() -> None:
    # From word 1 on a second chain runs through all these records, and a third one through the calls.
    kernel = struct.pack("<27Q", 10, 10, *[5] * 25)
    call = struct.pack("<5Q", 5, 5, 5, 4, 4)
    content = (kernel + call * 2) * 5000
    found, unknown, damaged = walked(content)
    assert (len(found[10]), len(found[5]), set(found)) == (5000, 10_000, {5, 10})
    assert (unknown, damaged) == ({}, False)


def test_fields_of_newer_records_are_read_where_records_have_them() -> None:
    """The library that asked for memory is at byte 120 of the records of CUDA 12.6 and newer, which have 128 bytes."""
    newer, older = (activity_parser._dtype(layouts.MEMORY2, size // 8) for size in (128, 120))
    assert newer is not None
    assert older is not None
    assert newer.fields is not None
    assert newer.fields["source"] == (np.dtype("<u8"), 120)
    assert (newer.itemsize, set(newer.names or ()) - set(older.names or ())) == (128, {"source"})
