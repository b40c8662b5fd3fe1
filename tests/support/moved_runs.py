"""Traces whose steps all run the same kernels at the same times, on streams of choice."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Kernel = tuple[str, int, float, float]
"""Name, stream, and start and end in us after the begin of the step."""


def trace_file(path: Path, kernels: Sequence[Kernel], length: float, *, steps: int = 8) -> Path:
    """A trace whose steps all run the same kernels at the same times; the device is always behind the host."""
    events: list[dict[str, Any]] = []

    def event(category: str, name: str, start: float, end: float, tid: int, **args: Any) -> None:
        times = {"ts": round(start, 3), "dur": round(end - start, 3)}
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, **times})
        if args:
            events[-1]["args"] = args

    correlation = 0
    for step in range(steps):
        begin = 1000 + step * length
        event("user_annotation", f"ProfilerStep#{step}", begin - 1, begin - 1 + length, 2)
        for number, (name, stream, start, end) in enumerate(kernels):
            correlation += 1
            at = begin - 0.9 + 0.1 * number
            event("cuda_runtime", "cudaLaunchKernel", at, at + 0.05, 2, correlation=correlation)
            about = {"device": 0, "stream": stream, "correlation": correlation, "grid": [8, 1, 1]}
            event("kernel", name, begin + start, begin + end, stream, **about, block=[128, 1, 1])
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "trace_id": path.stem}))
    return path
