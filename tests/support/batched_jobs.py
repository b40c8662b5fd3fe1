"""Constructed batches of sends and receives, as torch.profiler writes them: ops, a range, and one kernel."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
RANGE = "nccl:coalesced"

Part = tuple[str, int]
"""send or recv, and the other rank."""


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 2, "cat": cat, "name": name, "ts": ts, "dur": dur} | {"args": args}


def batch(number: int, start: float, end: float, parts: Sequence[Part], group: Sequence[int]) -> list[dict[str, Any]]:
    """The ops of a batch, its range with the launch, and its kernel; times in us, the host 50 us ahead."""
    events, at = [], start - 50.0
    for kind, peer in parts:
        facts = {"Collective name": kind, "In msg nelems": 1000, "Out msg nelems": 1000}
        facts |= {"dtype": "Float", "Group size": len(group), "Process Group Name": "pp"}
        facts["Process Group Ranks"] = str(list(group))
        facts["Dst Rank" if kind == "send" else "Src Rank"] = list(group).index(peer)
        events.append(event("cpu_op", "record_param_comms", at, 1.0, **facts))
        at += 2.0
    events.append(event("user_annotation", RANGE, at, 10.0))
    events.append(event("cuda_runtime", "cudaLaunchKernel", at + 2, 3.0, correlation=number))
    kernel = event("kernel", KERNEL, start, end - start, correlation=number, device=0, stream=7)
    return [*events, kernel | {"tid": 7}]


def job(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> list[Path]:
    paths = []
    for rank, events in ranks.items():
        info = {"backend": "nccl", "rank": rank, "world_size": 8}
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
        paths.append(path)
    return paths
