"""A snapshot of PyTorch's memory that is given beside the trace of the same process: lines of one, modules of both."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import thence
from thence.errors import UsageError
from torch_allocator import Allocator, snapshot

if TYPE_CHECKING:
    from pathlib import Path

FRAMES = [{"filename": "/home/user/model.py", "line": 12, "name": "forward"}]


def _trace(path: Path, zero_us: int, rank: int) -> Path:
    """A module from 100 to 200 us in which one kernel is launched at 150 us, on thread 7 of process 5."""
    events: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": "ProfilerStep#3", "ts": 50, "dur": 250, "tid": 7},
        {"cat": "python_function", "name": "nn.Module: Block_0", "ts": 100, "dur": 100, "tid": 7,
         "args": {"Python id": 1, "Python parent id": None, "Python module id": 0}},
        {"cat": "cpu_op", "name": "aten::mm", "ts": 140, "dur": 30, "tid": 7},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 150, "dur": 5, "tid": 7, "args": {"correlation": 1}},
        {"cat": "kernel", "name": "gemm", "ts": 160, "dur": 90, "pid": 0, "tid": 7,
         "args": {"correlation": 1, "device": 0, "stream": 7}},
    ]  # fmt: skip
    rows = [{"ph": "X", "pid": 5, **event} for event in events]
    content = {"schemaVersion": 1, "baseTimeNanoseconds": zero_us * 1000, "traceEvents": rows}
    content["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
    path.write_text(json.dumps(content))
    return path


def _snapshot(path: Path) -> tuple[Path, int]:
    """2,048 bytes from before the history, and 3,000 that line 12 asked for; and the time of the latter in us."""
    allocator = Allocator()
    allocator.recording = False
    allocator.malloc(2048)
    allocator.recording = True
    allocator.malloc(3000, frames=FRAMES)
    path.write_bytes(pickle.dumps(snapshot(allocator)))
    return path, allocator.trace[-1]["time_us"]


def test_bytes_and_lines_are_the_snapshots_and_modules_and_steps_the_traces(tmp_path: Path) -> None:
    memory, asked_us = _snapshot(tmp_path / "memory.pickle")
    trace = thence.open(_trace(tmp_path / "trace.json", asked_us - 148, 2), memory)  # 2 us before the launch
    for by, name in (("source", "model.py:12 forward"), ("module", "Block_0"), ("op", "aten::mm"), ("step", "3")):
        answer = trace.memory(by)
        assert answer.devices.select("rank", "peak_bytes", "before_bytes").rows() == [(2, 2048 + 3072, 2048)], by
        rows = answer.rows.select("name", "bytes").rows()
        assert rows[0][1] == 3072
        assert name in str(rows[0][0]), (by, rows)
    assert any("is joined to" in note for note in trace.meta.notes)
    trace.self_check()


def test_a_snapshot_of_another_time_or_rank_is_not_joined(tmp_path: Path) -> None:
    memory, asked_us = _snapshot(tmp_path / "memory_rank0.pickle")
    of_rank_2 = thence.open(_trace(tmp_path / "trace.json", asked_us - 148, 2), memory)
    assert of_rank_2.tables.ranks == [0, 2]
    with pytest.raises(UsageError, match="both hold rank 0"):
        thence.open(_trace(tmp_path / "later.json", asked_us + 10_000_000, 0), memory)
