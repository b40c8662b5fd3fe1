"""A job of several ranks as Kineto JSON in which one host sleeps in backward; all times follow from the truth.

In every step each rank computes a forward and a backward kernel, then all meet in an all-reduce and begin the next
step when it ends: the length of the steps is the same on all ranks, whoever is late.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FORWARD, BACKWARD, TRANSFER = 30_000, 60_000, 10_000  # us
AFTER = 10
"""From the end of the all-reduce to the next step, us: the host waits for it."""
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass(frozen=True)
class SleepyJob:
    """A job.

    Attributes:
        ranks, steps: how many.
        late: rank whose host sleeps.
        sleep: us, in every step.
        since: first step with the sleep.
        skew: us by which the clock of each rank is ahead of that of the rank before.
        uneven: us by which the backward kernel of rank r takes longer in step s, times (r + s) modulo 3.
    """

    ranks: int = 3
    steps: int = 6
    late: int = 1
    sleep: int = 200_000
    since: int = 0
    skew: int = 3_000
    uneven: int = 100

    def write(self, folder: Path) -> list[Path]:
        """A file for each rank."""
        events: list[list[dict[str, Any]]] = [[] for _ in range(self.ranks)]
        begin = 1_000_000
        for step in range(self.steps):
            arrivals = [begin + self._work(rank, step) for rank in range(self.ranks)]
            end = max(arrivals) + TRANSFER
            for rank in range(self.ranks):
                events[rank] += self._step(rank, step, begin, arrivals[rank], end)
            begin = end + AFTER
        paths = []
        for rank, ours in enumerate(events):
            path = folder / f"rank{rank}.json"
            info = {"backend": "nccl", "rank": rank, "world_size": self.ranks}
            path.write_text(
                json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": ours})
            )
            paths.append(path)
        return paths

    def sleeps(self, rank: int, step: int) -> int:
        """How long the host of a rank sleeps in a step, us."""
        return self.sleep if rank == self.late and step >= self.since else 0

    def backward(self, rank: int, step: int) -> int:
        """How long its backward kernel takes, us."""
        return BACKWARD + self.uneven * ((rank + step) % 3)

    def _work(self, rank: int, step: int) -> int:
        """From the begin of a step to the arrival of a rank, us."""
        return 100 + FORWARD + self.sleeps(rank, step) + 100 + self.backward(rank, step)

    def _step(
        self, rank: int, step: int, begin: int, arrival: int, end: int
    ) -> list[dict[str, Any]]:
        shift, number = rank * self.skew, 10 * step
        backward = begin + 100 + FORWARD + self.sleeps(rank, step)  # the host launches it then
        described = {
            "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": self.ranks,
            "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.ranks))), "Seq": step + 2,
        }  # fmt: skip

        def host(category: str, name: str, start: int, stop: int, **args: Any) -> dict[str, Any]:
            return {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": 2,
                "ts": start + shift,
                "dur": stop - start,
                "args": args,
            }

        def launched(
            name: str, at: int, start: int, stop: int, id_: int, **args: Any
        ) -> list[dict[str, Any]]:
            given = {"device": 0, "stream": 7, "correlation": id_, **args}
            gpu = {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": 7,
                "ts": start + shift,
                "dur": stop - start,
            }
            return [
                host("cuda_runtime", "cudaLaunchKernel", at, at + 10, correlation=id_),
                gpu | {"args": given},
            ]

        ends = backward + 100 + self.backward(rank, step)
        ids = {"External id": number + 1, "Sequence number": number}
        grid = {"grid": [8, 1, 1], "block": [128, 1, 1]}
        return [
            host("user_annotation", f"ProfilerStep#{step}", begin, end + AFTER),
            host("cpu_op", "aten::mm", begin + 10, begin + 60, **ids),
            *launched("gemm_forward", begin + 50, begin + 100, begin + 100 + FORWARD, number + 1, **grid),
            host("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 200, backward + 60,
                 **{"External id": number + 2, "Sequence number": number, "Fwd thread id": 1}),
            host("python_function", "nn.Module: Mlp_3", begin + 210, backward + 50),
            host("python_function", "/home/me/train.py(40): hook", begin + 220, backward + 40),
            *launched("gemm_backward", backward, backward + 100, ends, number + 2, **grid),
            *launched(NCCL, backward + 80, arrival, end, number + 3, **described),
            host("cuda_runtime", "cudaDeviceSynchronize", backward + 95, end + 5, correlation=number + 4),
        ]  # fmt: skip
