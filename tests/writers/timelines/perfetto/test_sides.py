"""Two runs in one Perfetto trace, decoded with Perfetto's own protos."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import thence
from diff_runs import STEP, changed, trace_file
from perfetto_reading import decoded
from thence.analysis.diff.aligned_steps import aligned_steps
from thence.writers.timelines.perfetto.sides import write_sides

if TYPE_CHECKING:
    from pathlib import Path


def test_equal_steps_begin_together_and_durations_stay(tmp_path: Path) -> None:
    slow = changed(STEP, "sm90_gemm_64x64_nn", us=900)
    paths = [trace_file(tmp_path / f"{n}.json", n, work, steps=5) for n, work in enumerate((STEP, slow))]
    traces = [thence.open(path) for path in paths]
    aligned = aligned_steps(*(trace.tables for trace in traces))
    stream = io.BytesIO()
    write_sides(aligned, stream)
    found = decoded(stream.getvalue())
    steps = [found.on(f"steps, aligned > {side}") for side in ("before", "after")]
    assert [s.start for s in steps[0]] == [s.start for s in steps[1]]
    assert [s.name for s in steps[0]] == [f"ProfilerStep#{n}" for n in range(1, 5)]
    for side, trace in zip(("before", "after"), traces, strict=True):
        slices = found.on(f"rank 0: GPU 0 > stream 7, {side}")
        gpu = trace.select(steps="1:").tables.gpu.sort("start")  # recording begins in the first step
        assert [s.end - s.start for s in slices] == gpu["duration"].to_list()
        assert [s.name for s in slices] == gpu["name"].cast(str).to_list()
        assert {s.arguments["label"] for s in slices} == {"forward/attention", "forward/mlp", "optimizer"}
    later = [b.start for a, b in zip(steps[1], steps[1][1:], strict=False)]
    assert all(start >= step.end for step, start in zip(steps[1], later, strict=False))
