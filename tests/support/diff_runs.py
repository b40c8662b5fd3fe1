"""Runs with known differences: traces of a small program, and step tables without any trace."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.sample import Conditions, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

GPU = {"id": 0, "name": "NVIDIA H100", "numSms": 132, "computeMajor": 9, "computeMinor": 0}


@dataclass(frozen=True)
class Work:
    """A kernel of each step: the label and op around its launch, its name, its microseconds and grid."""

    label: str
    op: str
    kernel: str
    us: float
    grid: tuple[int, int, int] = (8, 1, 1)
    idle_us: float = 1.0


STEP = (
    Work("forward/attention", "aten::mm", "sm90_gemm_128x64_tn", 400),
    Work("forward/attention", "aten::sdpa", "flash_fwd_kernel", 300),
    Work("forward/mlp", "aten::addmm", "sm90_gemm_64x64_nn", 500),
    Work("optimizer", "aten::add_", "vectorized_add", 100),
)
"""A step of 1.3 ms busy and 4 us idle."""


def trace_file(
    path: Path,
    seed: int,
    work: Sequence[Work] = STEP,
    *,
    steps: int = 6,
    noise: float = 0.005,
    between: float = 0.003,
    **metadata: Any,
) -> Path:
    """A Kineto trace of a run: every kernel varies by a share between runs and by another between steps."""
    generator = np.random.default_rng(seed)
    of_run = 1 + between * generator.standard_normal(len(work))
    events: list[dict[str, Any]] = []
    time, correlation = 1000.0, 0
    for step in range(steps):
        begin = time
        for number, part in enumerate(work):
            correlation += 1
            duration = part.us * of_run[number] * (1 + noise * generator.standard_normal())
            time += part.idle_us
            outer, _, inner = part.label.partition("/")
            ranges = [(outer, "user_annotation", 0.4), (inner, "user_annotation", 0.3), (part.op, "cpu_op", 0.2)]
            events += [
                _event(category, name, time - 0.5 + 0.05 * depth, length, 1, 2)
                for depth, (name, category, length) in enumerate(ranges)
                if name
            ]
            launch = _event("cuda_runtime", "cudaLaunchKernel", time - 0.35, 0.02, 1, 2)
            events.append({**launch, "args": {"correlation": correlation}})
            kernel = _event("kernel", part.kernel, time, round(duration, 3), 0, 7)
            about = {"device": 0, "stream": 7, "correlation": correlation, "grid": [*part.grid], "block": [128, 1, 1]}
            events.append({**kernel, "args": about})
            time = round(time + duration, 3)
        # The step of the host ends before the next one's first launch.
        events.append(_event("user_annotation", f"ProfilerStep#{step}", begin - 0.2, time - begin, 1, 2))
    content = {"schemaVersion": 1, "deviceProperties": [GPU], "traceEvents": events, "trace_id": f"{seed}", **metadata}
    path.write_text(json.dumps(content))
    return path


def _event(category: str, name: str, start: float, duration: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": round(start, 3), "dur": round(duration, 3),
    }  # fmt: skip


def changed(work: Sequence[Work], which: str, /, **changes: Any) -> tuple[Work, ...]:
    """The same step with one kernel changed."""
    return tuple(replace(part, **changes) if part.kernel == which else part for part in work)


CONDITIONS = Conditions(
    identity=(0,),
    gpus=("NVIDIA H100",),
    clocks={},
    ranks=1,
    world_size=None,
    devices=1,
    formats=("Kineto",),
    options={},
    versions={},
    unsound=None,
    copied_bytes=0.0,
    grids=pl.DataFrame(schema={"kernel": pl.String, "grid": pl.String, "count": pl.Float64, "ns": pl.Float64}),
)


def simulated(
    generator: np.random.Generator,
    means: Mapping[str, float],
    *,
    steps: int = 20,
    within: float = 0.01,
    between: float = 0.005,
    correlation: float = 0.0,
    tails: float | None = None,
    **conditions: Any,
) -> Sample:
    """The step table of a run: labels with these mean times in ns, and the whole step as their sum.

    Args:
        generator: of random numbers.
        means: label to its time.
        steps: how many.
        within: deviation of a step, as a share of the label's time.
        between: deviation of the run.
        correlation: of neighbouring steps.
        tails: degrees of freedom of Student's t for all deviations; None for a normal distribution.
        conditions: what differs from `CONDITIONS`.
    """

    def deviations(*shape: int) -> np.ndarray:
        if tails is None:
            return generator.standard_normal(shape)
        return generator.standard_t(tails, shape) / np.sqrt(tails / (tails - 2))

    of_step = deviations(steps, len(means))
    for step in range(1, steps):
        of_step[step] = correlation * of_step[step - 1] + np.sqrt(1 - correlation**2) * of_step[step]
    values = np.array([*means.values()]) * (1 + between * deviations(1, len(means)) + within * of_step)
    names = [*means, "all", "all", "all"]
    by = [*(["label"] * len(means)), "step", "busy", "idle"]
    whole = values.sum(axis=1, keepdims=True)
    columns = np.concatenate([values, whole, whole, np.zeros((steps, 1))], axis=1)
    frame = pl.DataFrame(
        {
            "by": pl.Series(by).gather(np.repeat(np.arange(len(by)), steps)),
            "name": pl.Series(names).gather(np.repeat(np.arange(len(by)), steps)),
            "step": np.tile(np.arange(steps, dtype=np.int32), len(by)),
            "ns": columns.T.ravel(),
            "count": np.ones(columns.size),
        }
    )
    table = pl.DataFrame(
        {"name": [f"step {n}" for n in range(steps)], "total_ns": values.sum(axis=1), "left_out": [None] * steps},
        schema={"name": pl.String, "total_ns": pl.Float64, "left_out": pl.String},
    )  # fmt: skip
    text = dict.fromkeys(("name", "label", "module", "op_name", "op"), pl.String)
    kernels = pl.DataFrame(schema={**text, "ns": pl.Float64, "count": pl.Float64})
    about = replace(CONDITIONS, **{"identity": (float(values.sum()),), **conditions})
    return Sample(("simulated",), "steps", table, frame, kernels, about, 0.0)
