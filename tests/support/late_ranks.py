"""A job of several ranks as Kineto JSON in which one host sleeps in backward; all times follow from the truth.

In every step each rank computes a forward and a backward kernel, then all meet in an all-reduce and begin the next
step when it ends: the length of the steps is the same on all ranks, whoever is late.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from helpers import STACK

if TYPE_CHECKING:
    from pathlib import Path

FORWARD, BACKWARD, TRANSFER = 30_000, 60_000, 10_000  # us
AFTER = 10
"""From the end of the all-reduce to the next step, us: the host waits for it."""
HOST_EVENTS = ("cpu_op", "python_function", "cuda_runtime", "cuda_driver", "user_annotation")
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
            path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": ours}))
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

    def _step(self, rank: int, step: int, begin: int, arrival: int, end: int) -> list[dict[str, Any]]:
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

        def launched(name: str, at: int, start: int, stop: int, id_: int, **args: Any) -> list[dict[str, Any]]:
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
            return [host("cuda_runtime", "cudaLaunchKernel", at, at + 10, correlation=id_), gpu | {"args": given}]

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


@dataclass(frozen=True)
class RealJob:
    """A job whose ranks run one recorded training step over and over, and meet in an all-reduce at its end.

    The host of one rank sleeps in a backward operator: what was open then lasts longer, what came later comes later.

    Attributes:
        ranks, steps: how many.
        late: rank whose host sleeps.
        sleep: us, in every step.
        op: name of the operator, the first of its name that is open.
    """

    ranks: int = 3
    steps: int = 4
    late: int = 2
    sleep: float = 200_000.0
    op: str = "autograd::engine::evaluate_function: GeluBackward0"

    @cached_property
    def recorded(self) -> list[dict[str, Any]]:
        """Events of the last recorded step, from its begin."""
        events = [e for e in json.loads(gzip.decompress(STACK.read_bytes()))["traceEvents"] if "ts" in e]
        step = max((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["ts"])
        begin, end = step["ts"], step["ts"] + step["dur"]
        on_gpu = ("kernel", "gpu_memset", "gpu_memcpy")
        host = [e for e in events if begin <= e["ts"] < end and e.get("cat") in HOST_EVENTS]
        launched = {e["args"]["correlation"] for e in host if "correlation" in e.get("args", {})}
        gpu = [e for e in events if e.get("cat") in on_gpu and e["args"]["correlation"] in launched]
        return [e | {"ts": e["ts"] - begin} for e in (*host, *gpu)]

    @cached_property
    def sleeping(self) -> dict[str, Any]:
        """The recorded operator in which the host sleeps."""
        return min((e for e in self.recorded if e["name"] == self.op), key=lambda e: e["ts"])

    @property
    def forward(self) -> dict[str, Any]:
        """The forward operator that it belongs to: the outermost with its sequence number, on another thread."""
        ours = self.sleeping
        number = ours["args"]["Sequence number"]
        same = [e for e in self.recorded if e.get("args", {}).get("Sequence number") == number]
        return min((e for e in same if e["tid"] != ours["tid"]), key=lambda e: e["ts"])

    def around(self, event: dict[str, Any]) -> list[str]:
        """Names of what is open around an event on its thread, the outermost first."""
        end = event["ts"] + event["dur"]
        open_then = [
            e for e in self.recorded
            if e["tid"] == event["tid"] and e["ts"] <= event["ts"] and e["ts"] + e["dur"] >= end
        ]  # fmt: skip
        return [e["name"] for e in sorted(open_then, key=lambda e: e["ts"])]

    def write(self, folder: Path) -> list[Path]:
        """A file for each rank."""
        last = max(e["ts"] + e["dur"] for e in self.recorded if e["cat"] == "kernel")
        length = last + self.sleep + TRANSFER
        paths = []
        for rank in range(self.ranks):
            events = []
            for step in range(self.steps):
                begin = 1_000_000 + step * (length + 100)
                events += [self._moved(e, rank, step, begin) for e in self.recorded]
                events += self._reduced(step, begin + last + self._delay(rank), begin + length)
            info = {"backend": "nccl", "rank": rank, "world_size": self.ranks}
            path = folder / f"rank{rank}.json"
            path.write_text(json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}))
            paths.append(path)
        return paths

    def _delay(self, rank: int) -> float:
        return self.sleep if rank == self.late else 0.0

    def _moved(self, event: dict[str, Any], rank: int, step: int, begin: float) -> dict[str, Any]:
        """An event in a step of a rank, with ids of its own."""
        asleep = self.sleeping["ts"] + 1.0
        after = event["ts"] >= asleep
        opened = event["cat"] in HOST_EVENTS and not after and event["ts"] + event["dur"] > asleep
        args = dict(event.get("args", {}))
        for key in ("correlation", "External id", "Sequence number", "Python id", "Python parent id"):
            if isinstance(args.get(key), int):
                args[key] += 1_000_000 * step
        name = f"ProfilerStep#{step}" if event["name"].startswith("ProfilerStep") else event["name"]
        delay = self._delay(rank)
        times = {"ts": begin + event["ts"] + delay * after, "dur": event["dur"] + delay * opened}
        return event | times | {"name": name, "args": args}

    def _reduced(self, step: int, arrival: float, end: float) -> list[dict[str, Any]]:
        """The all-reduce, and its launch by the thread of the step."""
        thread = next(e for e in self.recorded if e["name"].startswith("ProfilerStep"))
        number = 900_000 + 1_000_000 * step
        described = {
            "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": self.ranks,
            "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": str(list(range(self.ranks))), "Seq": step + 2,
        }  # fmt: skip
        launch = {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": thread["pid"],
            "tid": thread["tid"],
        }
        kernel = {"ph": "X", "cat": "kernel", "name": NCCL, "pid": 0, "tid": 27}
        args = {"device": 0, "stream": 27, "correlation": number, **described}
        return [
            launch | {"ts": arrival - 5, "dur": 4, "args": {"correlation": number}},
            kernel | {"ts": arrival, "dur": end - arrival, "args": args},
        ]
