"""A training loop on one GPU as Kineto JSON, made by a simulation whose truth is known, with a planted reason to wait.

The host loads data, goes through labelled parts, launches kernels one by one, and may wait. The GPU runs a kernel when
the one before has ended and the launch has arrived. The same program without what was planted is simulated as well, so
that what removing it gains is measured, not computed from the trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
LATENCY = 6
"""From the begin of a launch to the begin of its kernel on an idle GPU, us."""
CALL = 4
"""Length of a launching call, us."""
GAP = 1
"""Between two kernels that were launched before, us."""
_LABELS = ("embed", "attention", "mlp", "router", "norms", "head", "loss", "update")
_KERNELS = (
    "gemm_bf16_tn", "flash_fwd", "layer_norm_kernel", "softmax_kernel", "gelu_kernel", "copy_kernel", "topk_kernel",
    "adam_kernel",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A label with one kernel: us of the kernel, and of the operator that launches it."""

    label: str
    kernel: str
    us: int
    operator_us: int


@dataclass(frozen=True)
class Loop:
    """A loop.

    Attributes:
        parts: of each step, in order.
        steps: how many.
        loader_us: how long the host loads the data of a step.
        pause_us: how long the host runs other code in the label ``paused`` in each step, without launching.
        paused: that label.
        waits: whether the host waits for the device at the end of each step.
        reads: whether the host reads a number after each label, as ``item()`` does.
        gpu: name of the GPU.
    """

    parts: tuple[Part, ...]
    steps: int = 7
    loader_us: int = 15
    pause_us: int = 0
    paused: str = ""
    waits: bool = True
    reads: bool = False
    gpu: str = "NVIDIA H100 80GB HBM3"

    @cached_property
    def run(self) -> Run:
        """The simulated run."""
        return Run(self)

    @property
    def kernel_us(self) -> dict[str, int]:
        """Time of each kernel in a step."""
        return {part.kernel: part.us for part in self.parts}

    def without(self, **changed: Any) -> Loop:
        """The loop with changes."""
        return replace(self, **changed)

    def faster(self, kernel: str, factor: float) -> Loop:
        """The loop in which a kernel takes its time multiplied by a factor."""
        parts = (replace(p, us=round(p.us * factor)) if p.kernel == kernel else p for p in self.parts)
        return replace(self, parts=tuple(parts))

    def write(self, path: Path, *, host: bool = True, labels: bool = True) -> Path:
        """The trace as a file.

        Args:
            path: of the file.
            host: whether it holds what the host did.
            labels: whether it holds labels.
        """
        events = [e for e in self.run.events if host or e["cat"] == "kernel"]
        events = [e for e in events if labels or e["cat"] != "user_annotation" or "ProfilerStep" in e["name"]]
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.gpu}],
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
            "traceEvents": events,
        }
        path.write_text(json.dumps(document))
        return path


class Run:
    """A loop, run.

    Attributes:
        events: of the trace; times in us.
        kernels: begin and end of each kernel, by step.
        hosts: begin and end of what the host did by what it was: loader, pause, wait.
    """

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.events: list[dict[str, Any]] = []
        self.kernels: list[list[tuple[int, int]]] = []
        self.hosts: dict[str, list[tuple[int, int]]] = {"loader": [], "pause": [], "wait": []}
        self._now, self._free, self._id = 1_000_000, 0, 0
        for step in range(loop.steps):
            self._step(step)

    @property
    def step_us(self) -> float:
        """From the first kernel of a step to that of the next, without the first two steps: mean."""
        first = [kernels[0][0] for kernels in self.kernels]
        return float(np.mean(np.diff(first[2:])))

    @property
    def busy_share(self) -> float:
        """Share of a step in which a kernel ran."""
        return sum(self.loop.kernel_us.values()) / self.step_us

    def idle_during(self, what: str) -> float:
        """Share of a step in which no kernel ran while the host did something."""
        begin, end = self.kernels[2][0][0], self.kernels[-1][0][0]
        busy = [k for step in self.kernels for k in step]
        gaps = [(a[1], b[0]) for a, b in pairwise(busy) if begin <= a[1] and b[0] <= end]
        common = sum(max(0, min(g[1], h[1]) - max(g[0], h[0])) for g in gaps for h in self.hosts[what])
        return common / (end - begin)

    def _step(self, step: int) -> None:
        loop, begin = self.loop, self._now
        self.kernels.append([])
        self._during("loader", "user_annotation", LOADER, loop.loader_us)
        for part in loop.parts:
            opened = self._now
            self._now += 2
            operator = self._now
            self._launch(part)
            self._now = max(self._now, operator + part.operator_us)
            self._event("cpu_op", f"aten::{part.label}", operator, self._now, **{"External id": self._id})
            if part.label == loop.paused and loop.pause_us:
                self._during("pause", "python_function", "train.py(17): save_metrics", loop.pause_us)
            if loop.reads:
                self._read()
            self._now += 2
            self._event("user_annotation", part.label, opened, self._now)
        if loop.waits:
            called = self._now
            self._id += 1
            self._now = max(self._now + 3, self._free + 3)
            self._event("cuda_runtime", "cudaDeviceSynchronize", called, self._now, correlation=self._id)
            self.hosts["wait"].append((called, self._now))
        self._event("user_annotation", f"ProfilerStep#{step}", begin, self._now)
        self._now += 5

    def _during(self, what: str, category: str, name: str, length: int) -> None:
        begin = self._now
        self._now += length
        self._event(category, name, begin, self._now)
        self.hosts[what].append((begin, self._now))

    def _launch(self, part: Part) -> None:
        self._id += 1
        call = self._now + 1
        self._event("cuda_runtime", "cudaLaunchKernel", call, call + CALL, correlation=self._id)
        self._now = call + CALL + 1
        begin = max(call + LATENCY, self._free + GAP)
        self._free = begin + part.us
        args = {"device": 0, "stream": 7, "correlation": self._id, "grid": [8, 1, 1], "block": [128, 1, 1]}
        self._event("kernel", part.kernel, begin, self._free, pid=0, tid=7, **args)
        self.kernels[-1].append((begin, self._free))

    def _read(self) -> None:
        """Reads a number: the host waits until the device has ended."""
        self._id += 1
        begin = self._now
        self._now = max(begin + 3, self._free + 3)
        self._event("cuda_runtime", "cudaStreamSynchronize", begin + 1, self._now, correlation=self._id)
        self._now += 1
        self._event("cpu_op", "aten::item", begin, self._now, **{"External id": 10_000 + self._id})
        self.hosts["wait"].append((begin + 1, self._now - 1))

    def _event(
        self, category: str, name: str, start: int, end: int, *, pid: int = 1, tid: int = 2, **args: Any
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": end - start,
             "args": args}
        )  # fmt: skip


def parts(seed: int, *, us: tuple[int, int], operator_us: tuple[int, int] = (12, 20)) -> tuple[Part, ...]:
    """Six parts with kernels of different lengths in a range; the largest is longer than the next by a tenth or more.

    Args:
        seed: of everything that is drawn.
        us: least and greatest length of kernels.
        operator_us: of operators.
    """
    draw = np.random.default_rng(seed)
    labels, kernels = draw.permutation(_LABELS)[:6], draw.permutation(_KERNELS)[:6]
    lengths = np.sort(draw.integers(*us, 6))
    lengths[-1] = max(lengths[-1], round(1.1 * lengths[-2]) + 1)
    lengths += np.arange(6)
    operators = draw.integers(*operator_us, 6)
    rows = zip(labels, kernels, draw.permutation(lengths), operators, strict=True)
    return tuple(Part(str(label), str(kernel), int(length), int(operator)) for label, kernel, length, operator in rows)
