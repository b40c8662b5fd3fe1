"""What the package knows of CUPTI's records, against what the C compiler sees in CUPTI's headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thence.recorder import layouts
from thence.recorder.layouts import LAYOUTS
from thence.recorder.walking import Walker

HEADERS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "cupti" / "layouts.json").read_text()
)
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
        "dynamic_shared": "dynamicSharedMemory",
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
    assert {header["records"]["RUNTIME"]["kind"] for header in HEADERS.values()} == {
        layouts.RUNTIME
    }


def test_every_version_with_a_header_is_accepted() -> None:
    for header in HEADERS.values():
        layouts.require_known(header["version"])


class Library:
    """Knows the sizes of records, as libcupti does."""

    def __init__(self, sizes: dict[int, int]) -> None:
        self.sizes = sizes

    def next_record(self, buffer: int, valid_bytes: int, record: int | None) -> int | None:
        import ctypes

        assert record is not None
        following = record + self.sizes[ctypes.c_uint32.from_address(record).value]
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
    walker = Walker(Library(sizes))  # type: ignore[arg-type]
    found: dict[int, list[int]] = {}
    for kind, records in walker.read(int(memory.ctypes.data), len(buffer)):
        field = "id" if kind == 12 else "correlation"
        found.setdefault(kind, []).extend(records[field].tolist())
    for kind in set(kinds) - {99}:
        assert found[kind] == [i for i, k in enumerate(kinds) if k == kind]
    assert set(found) == set(kinds) - {99}
    assert walker.unknown == ({99: kinds.count(99)} if 99 in kinds else {})


def test_a_cut_buffer_gives_what_is_whole() -> None:
    memory = np.zeros(216 * 3, np.uint8)
    memory[0::216] = 10
    walker = Walker(Library({10: 216}))  # type: ignore[arg-type]
    ((kind, records),) = walker.read(int(memory.ctypes.data), 216 * 2)
    assert (kind, len(records)) == (10, 2)
    walker.read(int(memory.ctypes.data), 0)
    ((_, records),) = walker.read(int(memory.ctypes.data), 216 * 2 + 8)
    assert len(records) == 2
