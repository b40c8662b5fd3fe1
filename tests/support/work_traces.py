"""Small Kineto traces of operators with inputs on one GPU, so that work and rooflines can be counted by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import thence

if TYPE_CHECKING:
    from pathlib import Path

H100 = "NVIDIA H100 80GB HBM3"
BF16_TFLOPS = 132 * 4096 * 1.83 / 1e3
GBPS = 3352.0


@dataclass
class Work:
    """A trace in the making; times are in us.

    Attributes:
        device: name of the GPU.
        events: of the trace.
        host: when the host makes its next call; it does not wait for the device.
        now: when the device has ended its last activity.
    """

    device: str = H100
    events: list[dict[str, Any]] = field(default_factory=list)
    host: float = 0.0
    now: float = 0.0

    def range(self, name: str, category: str, start: float, end: float) -> None:
        """A range on the host, such as a step."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start, "args": {}}
        )

    def call(
        self, name: str, dims: list[Any], *kernels: tuple[str, float], types: list[str] | None = None, **more: Any
    ) -> None:
        """A call of an operator on bf16 tensors that launches kernels, which run one after the other.

        Args:
            name: of the operator.
            dims: shapes of its inputs.
            kernels: name and duration of each; a name that begins with Memset is one.
            types: of the inputs.
            more: further arguments of the operator in the trace.
        """
        number, start = len(self.events) + 1, self.host
        types = types or ["c10::BFloat16"] * len(dims)
        args = {"External id": number, "Input Dims": dims, "Input type": types, **more}
        operator = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": 2.0, "args": args}
        self.events.append(operator)
        for position, (kernel, duration) in enumerate(kernels):
            correlation = 1000 * number + position
            self.events.append(
                {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
                 "ts": start + 0.5, "dur": 0.1, "args": {"correlation": correlation, "External id": number}}
            )  # fmt: skip
            category = "gpu_memset" if kernel.startswith("Memset") else "kernel"
            self.activity(category, kernel, duration, correlation=correlation, **{"External id": number})
        self.host = start + 3.0

    def activity(self, category: str, name: str, duration: float, **args: Any) -> None:
        """An activity of the device that begins when the one before has ended and the host has launched it."""
        self.now = max(self.now, self.host) + 1.0
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": 7, "ts": self.now, "dur": duration,
             "args": {"device": 0, "stream": 7, **args}}
        )  # fmt: skip
        self.now += duration

    def opened(self, folder: Path) -> thence.Trace:
        """The trace, from a file."""
        path = folder / "trace.json"
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": self.device}],
            "traceEvents": self.events,
        }
        path.write_text(json.dumps(document))
        return thence.open(path)
