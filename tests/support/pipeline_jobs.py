"""A pipeline whose steps its hosts bound, as Kineto JSON: who is ahead, who waits, and why follow from the truth.

Every stage launches its forward passes, then its backward passes, and the messages between them. A host goes on when
it has launched, but no further ahead of its GPU than the queue of the device is long. A GPU begins what its host has
launched when it is done with what came before; a send and its receive end together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batched_jobs import KERNEL, event, job

if TYPE_CHECKING:
    from pathlib import Path

FORWARD, BACKWARD, TRANSFER = 300, 600, 20
"""us on the GPU."""
CALL = 5
"""us of a launch that does not wait."""


@dataclass
class Op:
    """What a stage launches.

    Attributes:
        step, name: of it.
        host: us that the host takes before it launches.
        device: us that it takes on the GPU.
        peer: the other stage of a message, None for compute.
        began, called, returned: on the host, us.
        start, end: on the GPU, us.
    """

    step: int
    name: str
    host: int
    device: int
    peer: int | None = None
    began: int = 0
    called: int = 0
    returned: int = 0
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class HostBoundPipeline:
    """A pipeline in the schedule of GPipe.

    Attributes:
        hosts: us that the host of each stage takes for a forward pass of a microbatch; twice that for a backward pass.
        microbatches, steps: how many.
        ahead: us by which the host of each stage begins before that of the next.
        queue: how many kernels a host is ahead of its GPU at most.
    """

    hosts: tuple[int, ...]
    microbatches: int = 4
    steps: int = 8
    ahead: int = 4_000
    queue: int = 24

    def host_us(self, stage: int) -> int:
        """What the host of a stage works for a step."""
        return 3 * self.microbatches * self.hosts[stage]

    def write(self, folder: Path) -> list[Path]:
        """A file for each stage."""
        return job(folder, {stage: self._events(stage) for stage in range(len(self.hosts))})

    def _ops(self, stage: int) -> list[Op]:
        last = len(self.hosts) - 1
        found = []
        for step in range(self.steps):
            for name, factor, source, target in (
                ("forward", 1, stage - 1, stage + 1),
                ("backward", 2, stage + 1, stage - 1),
            ):
                device = FORWARD if name == "forward" else BACKWARD
                for _ in range(self.microbatches):
                    if 0 <= source <= last:
                        found.append(Op(step, "recv", 0, TRANSFER, source))
                    found.append(Op(step, name, factor * self.hosts[stage], device))
                    if 0 <= target <= last:
                        found.append(Op(step, "send", 0, TRANSFER, target))
        return found

    @cached_property
    def run(self) -> list[list[Op]]:
        """All that each stage launches, with its times."""
        every = [self._ops(stage) for stage in range(len(self.hosts))]
        done = [0] * len(every)
        while any(at < len(ops) for at, ops in zip(done, every, strict=True)):
            before = list(done)
            for stage, ops in enumerate(every):
                while done[stage] < len(ops) and self._placed(every, done, stage):
                    done[stage] += 1
            assert done != before, "every stage waits for another"
        return every

    def _placed(self, every: list[list[Op]], done: list[int], stage: int) -> bool:
        """Give the next op of a stage its times, and that of its peer; False where the peer is not there yet."""
        op = self._begun(every, done, stage)
        if op.peer is None:
            op.end = op.start + op.device
            return True
        if done[op.peer] >= len(every[op.peer]):
            return False
        other = self._begun(every, done, op.peer)
        if other.peer != stage or other.name == op.name:
            return False
        op.end = other.end = max(op.start, other.start) + op.device
        done[op.peer] += 1
        return True

    def _begun(self, every: list[list[Op]], done: list[int], stage: int) -> Op:
        """The next op of a stage, with all times but its end."""
        ops, at = every[stage], done[stage]
        op = ops[at]
        first = 1_000_000 + stage * self.ahead
        op.began = ops[at - 1].returned if at else first
        op.called = op.began + op.host
        room = ops[at - self.queue].start if at >= self.queue else 0
        op.returned = max(op.called + CALL, room)
        op.start = max(op.called + CALL, ops[at - 1].end if at else 0)
        return op

    def _events(self, stage: int) -> list[dict[str, Any]]:
        ops = self.run[stage]
        events = []
        for step in range(self.steps):
            ours = [op for op in ops if op.step == step]
            begin, end = ours[0].began, ours[-1].returned
            events.append(event("user_annotation", f"ProfilerStep#{step}", begin, end - begin))
        for number, op in enumerate(ops, 1):
            length = op.returned - op.began
            if op.peer is None:
                events.append(event("cpu_op", f"aten::{op.name}", op.began, length))
            else:
                events.append(event("cpu_op", "record_param_comms", op.began, length, **self._said(op)))
            call = op.returned - op.called
            events.append(event("cuda_runtime", "cudaLaunchKernel", op.called, call, correlation=number))
            name = op.name if op.peer is None else KERNEL
            facts = {"correlation": number, "device": 0, "stream": 7}
            said = {} if op.peer is None else self._said(op)
            kernel = event("kernel", name, op.start, op.end - op.start, **facts, **said)
            events.append(kernel | {"tid": 7})
        return events

    def _said(self, op: Op) -> dict[str, Any]:
        ranks = list(range(len(self.hosts)))
        peer = "Dst Rank" if op.name == "send" else "Src Rank"
        return {
            "Collective name": op.name, "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float",
            "Group size": len(ranks), "Process Group Name": "pp", "Process Group Ranks": str(ranks), peer: op.peer,
        }  # fmt: skip
