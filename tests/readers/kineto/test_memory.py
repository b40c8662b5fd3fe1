"""PyTorch's events about memory: what was live follows from their addresses, in the order of the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import thence
from memory_traces import Memory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["compiled", "python"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of decoding give equal tables."""
    if request.param == "python":
        monkeypatch.setenv("THENCE_SCANNER", "python")


@pytest.mark.usefixtures("decoder")
def test_allocations_end_where_their_address_is_returned_or_handed_out_again(tmp_path: Path) -> None:
    made = Memory(allocated=4096)
    made.change(0x10, 1024)
    made.change(0x20, 512)
    made.change(0x10, -1024)
    made.change(0x10, 2048)
    made.change(0x30, -256)  # from before the trace
    made.fail(1 << 30)
    # Other tools use such keys for texts; their events are kept.
    made.range("cpu_op", "aten::copy_", 0.0, **{"Bytes": "12 MB", "Addr": None, "Device Id": [1]})
    tables = made.opened(tmp_path).tables
    assert tables.host.height == 1
    assert tables.memory.select("opened", "closed", "start", "end", "address", "bytes").rows() == [
        (None, 4, None, 9_000, 0x30, 256),
        (0, 2, 1_000, 5_000, 0x10, 1024),
        (1, None, 3_000, None, 0x20, 512),
        (3, None, 7_000, None, 0x10, 2048),
    ]
    totals = [5120, 5632, 4608, 6656, 6400]
    assert tables.memory_totals["allocated"].to_list() == totals
    assert tables.memory_totals["inactive"].to_list() == [(1 << 20) - size for size in totals]
    assert tables.memory_failures.select("after", "start", "bytes", "allocated").row(0) == (4, 11_000, 1 << 30, 6400)


@pytest.mark.usefixtures("decoder")
def test_events_with_impossible_values_are_left_out_with_a_warning(tmp_path: Path) -> None:
    made = Memory()
    made.change(0x10, 1024)
    made.change(0x20, 512)
    made.events[-1]["args"]["Total Allocated"] = -1
    trace = made.opened(tmp_path)
    assert trace.tables.memory["bytes"].to_list() == [1024]
    assert any("left out: 1 memory event with impossible values" in text for text in trace.meta.warnings)


def test_memory_of_the_host_has_no_device(tmp_path: Path) -> None:
    made = Memory()
    made.change(0x10, 1024)
    made.events[-1]["args"] |= {"Device Type": 0, "Device Id": -1, "Total Reserved": 0}
    made.change(0x10, 512)  # the same address on a device is another place
    tables = made.opened(tmp_path).tables
    assert tables.memory.select("device", "bytes", "closed").rows() == [(None, 1024, None), (0, 512, None)]
    assert tables.memory_totals["reserved"].to_list() == [None, 1 << 20]


def test_of_several_ranks_each_refers_to_its_own_changes(tmp_path: Path) -> None:
    paths = []
    for rank, size in enumerate((1000, 3000)):
        made = Memory()
        made.change(0x10, size)
        made.change(0x10, -size)
        made.change(0x20, 2 * size)
        paths.append(tmp_path / f"rank{rank}.json")
        made.opened(tmp_path, paths[-1].name)
    job = thence.open(*paths)
    assert job.tables.memory["opened"].to_list() == [0, 2, 3, 5]
    assert job.memory("rank").devices.select("rank", "peak_bytes").rows() == [(0, 2000), (1, 6000)]
    assert job.select(ranks=[1]).memory("rank").devices.select("rank", "peak_bytes").rows() == [(1, 6000)]
