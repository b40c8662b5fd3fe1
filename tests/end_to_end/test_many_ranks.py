"""The files of many small ranks: what each of them costs in addition, counted and not timed."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from helpers import event, kernel, launch, output, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX_QUERIES = 10
"""Of Polars for each further rank, reading its file included; a verb took 97 and more."""


def rank_file(folder: Path, rank: int) -> None:
    """Two steps of three kernels and an all_reduce, and a call that waits for the device."""
    events = []
    for step in range(2):
        begin = 100 + 1000 * step
        events.append(event("user_annotation", f"ProfilerStep#{step}", begin, 900, pid=rank))
        for i in range(4):
            number, start = 10 * step + i + 1, begin + 100 * i
            events.append(event("cpu_op", f"aten::op{i}", start, 50, pid=rank))
            events.append(launch(number, start + 10, pid=rank))
            work = kernel(number, start + 20 + rank % 3)
            if i == 3:
                work["name"] = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
                work["args"] |= {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64,
                                 "dtype": "Float", "Process Group Name": "0", "Seq": step}  # fmt: skip
            events.append(work)
    events.append(event("cuda_runtime", "cudaDeviceSynchronize", 2100, 50, pid=rank))
    written(folder / f"rank{rank:03}.json", events, distributedInfo={"backend": "nccl", "rank": rank})


def queries(call: Callable[[], Any]) -> int:
    """How many queries Polars runs, in all threads of Python."""
    calls: list[str] = []

    def counted(_frame: Any, what: str, function: Any) -> None:
        owner = type(getattr(function, "__self__", None)).__name__
        if what == "c_call" and owner == "PyLazyFrame" and function.__name__ == "collect":
            calls.append(owner)

    before = sys.getprofile()
    threading.setprofile(counted)
    sys.setprofile(counted)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return len(calls)


@pytest.mark.parametrize("verb", [("ranks",), ("report", "--by", "rank"), ("check",)])
def test_a_further_rank_costs_few_queries(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    counts = []
    for ranks in (4, 14):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        for rank in range(ranks):
            rank_file(folder, rank)
        counts.append(queries(lambda: output(capsys, *verb, folder)))  # noqa: B023 - called at once
    few, many = counts
    assert few > 0
    assert (many - few) / 10 <= MAX_QUERIES
