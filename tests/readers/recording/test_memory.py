"""The history of PyTorch's memory in a recording: its clock, its rank, and the threads of its allocations."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING

import polars as pl

from thence.model.formats import DESCRIPTION, MEMORY_FILE
from thence.model.tables import GPU, HOST, MEMORY, MEMORY_TOTALS, Tables
from thence.readers.allocations import with_threads
from thence.readers.recording.folder import Folder
from thence.readers.recording.memory import with_memory, with_outside
from torch_allocator import Allocator, snapshot

if TYPE_CHECKING:
    from pathlib import Path

NO_NAMES = pl.DataFrame(schema={"number": pl.Int64(), "text": pl.Categorical()})


def test_it_is_on_the_clock_of_the_recording(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.malloc(1000)
    (tmp_path / MEMORY_FILE).write_bytes(pickle.dumps(snapshot(allocator)))
    zero = (allocator.trace[0]["time_us"] - 50) * 1000
    tables = with_memory(Tables(), Folder(tmp_path), NO_NAMES, zero, rank=3)
    assert tables.memory.select("rank", "start", "bytes").rows() == [(3, 53_000, 1024)]
    assert tables.memory_totals.select("rank", "start", "allocated").rows() == [
        (3, 50_000, 0),
        (3, 50_000, 0),
        (3, 53_000, 1024),
    ]


def test_a_damaged_history_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / MEMORY_FILE).write_bytes(b"\x80\x04}(X")
    tables = with_memory(Tables(), Folder(tmp_path), NO_NAMES, 0, rank=0)
    assert "the memory of PyTorch is missing" in tables.meta.warnings[0]
    assert tables.memory.is_empty()


def test_an_allocation_is_of_the_thread_that_launches_next_on_its_device() -> None:
    """Threads 11 and 12 launch at 1,000 and 5,000 ns; the second device has a launch at 3,000, thread 13."""
    calls = {"start": [1000, 3000, 5000], "thread": [11, 13, 12], "correlation": [1, 2, 3], "duration": [10] * 3}
    host = HOST.frame({**calls, "rank": [0] * 3, "process": [9] * 3, "category": ["runtime"] * 3, "name": ["l"] * 3})
    gpu = {"device": [0, 1, 0], "correlation": [1, 2, 3], "start": [2000, 4000, 6000], "duration": [10] * 3}
    gpu = GPU.frame({**gpu, "rank": [0] * 3, "stream": [7] * 3, "kind": ["kernel"] * 3, "name": ["k"] * 3})
    starts = [None, 900, 1001, 2000, 6000, 2999]
    devices = [0, 0, 0, 1, 0, 1]
    memory = {"start": starts, "device": devices, "rank": [0] * 6, "bytes": [1] * 6, "allocator": ["torch"] * 6}
    found = with_threads(MEMORY.frame(memory), Tables(gpu=gpu, host=host))
    assert found["thread"].to_list() == [None, 11, 12, 13, None, 13]
    assert found["launch"].to_list() == [None, 1000, 5000, 3000, None, 3000]
    assert found.filter(pl.col("thread").is_not_null())["process"].unique().to_list() == [9]


def test_what_the_process_held_beside_the_allocator_is_that_of_the_nearest_sample(tmp_path: Path) -> None:
    """The allocator of device 0 held 100 bytes from 10 ns on and 700 from 50; the process 150, 160 and 1,000."""
    zero = 1000
    taken = [
        {"device": 0, "times_ns": [zero + 20, zero + 45, zero + 60], "bytes": [150, 160, 1000]},
        {"device": 1, "times_ns": [zero + 20, zero + 30], "bytes": [90, 210]},
    ]
    (tmp_path / DESCRIPTION).write_text(json.dumps({"process_memory": taken}))
    rows = {"device": [0, 0, 0, 1, 1, 2], "start": [10, 30, 50, 15, 40, 10], "reserved": [100, 100, 700, 200, 200, 5]}
    totals = MEMORY_TOTALS.frame({**rows, "rank": [3] * 6, "allocator": ["torch"] * 6, "allocated": [1] * 6})
    found = with_outside(totals, Folder(tmp_path), zero)
    assert found.drop("outside").equals(totals.drop("outside"))
    # Device 1: at 20 the process seemed to hold less than its allocator, which had just got more.
    assert found["outside"].to_list() == [50, 50, 60, 10, 10, None]
