"""Programs without steps are recorded in windows of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from recorder_programs import description, program
from thence.capture.recorder.options import Sampling
from thence.capture.session.step_plans import TIME_SPAN, SampledSteps

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
SERVER = """
        from thence.capture.session import time_spans
        time_spans._SILENCE_NS = 200_000_000
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=5, ring=100, budget=0, slow_steps=False), flush_seconds=0.05
        )
        launched, shares = 0, []
        with thence.record(OUT, options) as recording:
            began = time.monotonic()
            while time.monotonic() < began + 3:
                worker = threading.Thread(target=launch, args=("request",)) if THREADS else None
                worker.start() if worker else launch("request")
                worker.join() if worker else None
                launched += 1
                time.sleep(0.003)
                if recording._steps.kind:
                    shares.append(recording._steps._recording)
        print(launched, sum(shares) / len(shares))
"""


@pytest.mark.parametrize("threads", [True, False])
def test_a_server_is_recorded_in_windows_of_time(tmp_path: Path, threads: bool) -> None:
    """Two spans of five are recorded. Where each request has a thread, the next one may launch at any moment."""
    launched, share = program(SERVER.replace("THREADS", str(threads)), tmp_path).stdout.split()
    about = description(tmp_path)
    assert 0.25 < float(share) < 0.6
    assert 100 < about["counts"]["kernels"] < 0.75 * int(launched)
    assert about["sampling"]["windows"] >= 3
    assert (about["detachments"] > 0) is (not threads)
    trace = thence.open(tmp_path)
    assert any("no steps that thence knows" in warning for warning in trace.meta.warnings)
    spans = trace.steps().frame["duration"]
    assert 90 * MS < spans.median() < 300 * MS
    assert trace.activities.filter(pl.col("step").is_null()).height == 0


def test_all_of_a_window_of_time_counts_as_its_cost() -> None:
    """A window of two spans of 100 ms may take half of 1 % of the time: one in 40 s."""
    plan = SampledSteps(Sampling(), lambda: True).again(TIME_SPAN)
    for number in range(2_000):
        plan.lasted(number, 100 * MS, recorded=plan.records(number), counted=plan.compares(number))
    assert isinstance(plan, SampledSteps)
    assert plan.interval == 400
