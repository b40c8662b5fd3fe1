"""Memory that was asked of CUDA itself: who asked, and that it adds up with what the driver counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
