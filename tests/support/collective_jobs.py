"""Constructed jobs of several ranks as Kineto JSON, whose truth is known: who arrived when, and what ended when.

A job is a list of calls. Each call says when each rank arrives on the true clock, and how long it moves data;
kernels follow from that by the rule of its kind. A rank may see its clock shifted, lose calls, and begin late.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

NCCL = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}


@dataclass(frozen=True)
class Call:
    """One collective, or one transfer between two ranks, on the true clock; times are ns.

    Attributes:
        kind: as Kineto names it; ``send`` for a transfer from the first rank of ``arrivals`` to the second.
        elements: of 4 bytes, that each rank puts in.
        arrivals: start of its kernel, by rank.
        ends: end of its kernel, by rank.
        group: name of the process group.
        sequence: number in the group; None where the producer writes none.
        described: whether the producer describes it.
        host_ns: how long the host op around its launch took; None where the trace holds none.
    """

    kind: str
    elements: int
    arrivals: Mapping[int, int]
    ends: Mapping[int, int]
    group: str = "0"
    sequence: int | None = None
    described: bool = True
    host_ns: int | None = None


def joint(arrivals: Sequence[int], transfer: int, elements: int = 1000, kind: str = "allreduce", **more: Any) -> Call:
    """A call in which everyone waits for the last, and all end together ``transfer`` ns after that."""
    end = max(arrivals) + transfer
    by_rank = dict(enumerate(arrivals))
    return Call(kind, elements, by_rank, dict.fromkeys(by_rank, end), **more)


def skewed(folder: Path, skew: int = 5_000_000) -> list[Path]:
    """Files of two ranks with eight all-reduces, the clock of rank 1 ahead."""
    calls = [joint([1_000_000 * n + 7_000 * n * n, 1_000_000 * n + 40_000], 50_000) for n in range(8)]
    return Job(calls, skew={1: skew}).write(folder)


@dataclass(frozen=True)
class Job:
    """The calls of a job, and what its profiles do to them.

    Attributes:
        calls: in the order of their launch.
        skew: ns by which the clock of a rank is ahead.
        lost: (rank, number of the call) that a profile does not hold.
        compute: (rank, start, duration) of kernels that compute.
    """

    calls: Sequence[Call]
    skew: Mapping[int, int] = field(default_factory=dict)
    lost: Collection[tuple[int, int]] = ()
    compute: Sequence[tuple[int, int, int]] = ()

    @property
    def ranks(self) -> list[int]:
        """Ranks with a call, ascending."""
        return sorted({rank for call in self.calls for rank in call.arrivals})

    def write(self, folder: Path) -> list[Path]:
        """A file for each rank."""
        paths = []
        for rank in self.ranks:
            path = folder / f"rank{rank}.json"
            path.write_text(json.dumps(self._document(rank)))
            paths.append(path)
        return paths

    def _document(self, rank: int) -> dict[str, Any]:
        skew, members = self.skew.get(rank, 0), self.ranks
        events = []
        for number, call in enumerate(self.calls):
            if rank in call.arrivals and (rank, number) not in self.lost:
                start, end = call.arrivals[rank] + skew, call.ends[rank] + skew
                kind = self._kind(call, rank)
                args = self._described(call, kind) if call.described else {}
                events += _launched(NCCL[kind], start, end - start, number + 1, 7, args)
                if call.host_ns is not None:
                    began = (start - 4000 - call.host_ns) / 1e3  # it ends 1 us after its launch began
                    events.append(
                        {"ph": "X", "pid": 1, "tid": 2, "cat": "cpu_op", "name": "c10d::allreduce_"}
                        | {"ts": began, "dur": (call.host_ns + 500) / 1e3, "args": {"External id": number}}
                    )
        for number, (where, start, duration) in enumerate(self.compute):
            if where == rank:
                events += _launched("gemm", start + skew, duration, 100_000 + number, 8, {})
        return {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": len(members)},
            "traceEvents": events,
        }

    def _kind(self, call: Call, rank: int) -> str:
        if call.kind != "send":
            return call.kind
        return "send" if rank == next(iter(call.arrivals)) else "recv"

    def _described(self, call: Call, kind: str) -> dict[str, Any]:
        source, *others = call.arrivals
        peers = {"send": {"Dst Rank": others[0] if others else None}, "recv": {"Src Rank": source}}
        members = self.ranks if kind in peers else sorted(call.arrivals)
        return {
            "Collective name": kind,
            "In msg nelems": call.elements,
            "Out msg nelems": call.elements,
            "Group size": len(members),
            "dtype": "Float",
            "Process Group Name": call.group,
            "Process Group Description": "default_pg",
            "Process Group Ranks": str(members),
            **({} if call.sequence is None else {"Seq": call.sequence}),
            **peers.get(kind, {}),
        }


def _launched(
    name: str, start: int, duration: int, correlation: int, stream: int, args: dict[str, Any]
) -> list[dict[str, Any]]:
    """A kernel, and its launch 5 us before."""
    common = {"ph": "X", "pid": 1}
    return [
        common
        | {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 2, "ts": (start - 5000) / 1e3}
        | {"dur": 1.0, "args": {"correlation": correlation}},
        common
        | {"cat": "kernel", "name": name, "tid": stream, "ts": start / 1e3, "dur": duration / 1e3}
        | {"args": {"device": 0, "stream": stream, "correlation": correlation, **args}},
    ]
