"""Memory that was asked of CUDA itself: who asked, and that it adds up with what the driver counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import thence
from recorder_programs import program

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
    ALLOCATES, RETURNS, PINNED, DEVICE, STATIC = 1, 2, 2, 3, 6
    def asks(address, size, operation=ALLOCATES, kind=DEVICE):
        fake.asks_cuda(memoryOperationType=operation, memoryKind=kind, address=address, bytes=size, deviceId=0)

    with thence.record(OUT, thence.RecordOptions(memory=True, baseline=False)):
        launch("k")
        with thence.mark("communicator"):
            asks(4096, 1000)
            asks(8192, 300)
        with thence.mark("workspace"):
            asks(65536, 5000)
            asks(65536, 5000, RETURNS)  # address and size as CUPTI states them
            asks(4096, 0, RETURNS)
            asks(99, 7, RETURNS)  # from before the recording
        asks(12288, 40, kind=STATIC)
        asks(1, 1 << 40, kind=PINNED)
        launch("k")
"""


def test_what_is_asked_of_cuda_is_memory_with_the_place_of_the_call(tmp_path: Path) -> None:
    """1,000 and 300 bytes in one label, 5,000 more at the peak in another: 6,300; 340 at the end."""
    program(PROGRAM, tmp_path)
    trace = thence.open(tmp_path)
    peak = trace.memory("label")
    assert peak.devices.select("peak_bytes", "before_bytes").rows() == [(6300, 0)]
    assert dict(peak.rows.select("name", "bytes").iter_rows()) == {"communicator": 1300, "workspace": 5000}
    assert trace.tables.memory_totals["allocated"].to_list() == [1000, 1300, 6300, 1300, 300, 340]
    assert trace.tables.memory["end"].null_count() == 2


BESIDE_TORCH = """
    import pickle
    from torch_allocator import Allocator, snapshot
    from thence.model.formats import MEMORY_FILE

    def asks(address, size, operation=1):
        fake.asks_cuda(memoryOperationType=operation, memoryKind=3, address=address, bytes=size, deviceId=0)

    with thence.record(OUT, thence.RecordOptions(memory=True, baseline=False)) as recording:
        launch("k")
        allocator = Allocator()
        allocator.time_us = time.time_ns() // 1000
        small, large = allocator.malloc(1000), allocator.malloc(30 << 20)
        with thence.mark("communicator"):
            asks(1 << 40, 9_000_000)
        for segment in allocator.segments:  # the model asks for 2 and 30 MiB
            asks(segment.address, segment.size)
        asks(1 << 41, 50_000)
        asks(1 << 41, 50_000, 2)
        time.sleep(0.01)
        launch("k")
        allocator.time_us = time.time_ns() // 1000
        largest = allocator.malloc(40 << 20)
        asks(allocator.segments[-1].address, allocator.segments[-1].size)
        asks(1 << 42, 70)  # after the peak
    (recording.folder / MEMORY_FILE).write_bytes(pickle.dumps(snapshot(allocator)))
    about = recording.folder / "recording.json"
    import json
    document = json.loads(about.read_text())
    now = time.time_ns()
    document["process_memory"] = [{"device": 0, "times_ns": [now], "bytes": [(72 << 20) + HELD]}]
    about.write_text(json.dumps(document))
"""


@pytest.mark.parametrize(("held", "outside", "rest"), [(12_000_000, 9_000_000, 3_000_000), (8_999_999, None, None)])
def test_beside_pytorch_what_is_outside_is_split_into_what_was_asked_and_the_rest(
    held: int, outside: int | None, rest: int | None, tmp_path: Path
) -> None:
    """PyTorch holds 72 MiB in three segments; one library asked for 9 MB, and another had returned what it got."""
    program(f"    HELD = {held}\n" + BESIDE_TORCH, tmp_path)
    trace = thence.open(tmp_path)
    found = trace.memory("label")
    device = found.devices.row(0, named=True)
    assert (device["peak_bytes"], device["reserved_bytes"]) == (1024 + (70 << 20), 72 << 20)
    assert (device["outside_bytes"], device["outside_rest_bytes"]) == (held, rest)
    rows = found.outside.select("name", "library", "bytes", "count").rows()
    assert rows == ([] if outside is None else [("communicator", None, outside, 1)])
    assert found.rows["bytes"].sum() == device["peak_bytes"]
    found.self_check()
    # A converted trace keeps PyTorch's memory alone, as its format has one allocator.
    trace.convert(tmp_path / "converted.json")
    assert thence.open(tmp_path / "converted.json").memory().devices["peak_bytes"].to_list() == [device["peak_bytes"]]
