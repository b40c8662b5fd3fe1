"""Programs without steps are recorded in windows of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

import thence
from recorder_programs import description, program

if TYPE_CHECKING:
    from pathlib import Path

SERVER = """
        from thence.capture.session import time_spans
        time_spans._SILENCE_NS = 200_000_000
        options = thence.RecordOptions(
            sampling=thence.Sampling(every=10, ring=100, budget=0, slow_steps=False), flush_seconds=0.05
        )
        over, made, recorded = threading.Event(), [], []
        def serve():
            while not over.wait(0.002):
                launch("request")
                made.append(time.monotonic())
        with thence.record(OUT, options) as recording:
            worker = threading.Thread(target=serve)
            worker.start()
            began, seen = time.monotonic(), []
            while time.monotonic() < began + 4:
                time.sleep(0.005)
                if recording._steps.kind:
                    seen.append(recording._steps._recording)
            over.set()
            worker.join()
        print(len(made), sum(seen) / len(seen))
"""


def test_a_server_that_launches_on_a_thread_of_its_own_is_recorded_in_windows_of_time(tmp_path: Path) -> None:
    """Two spans of ten are recorded; the first quarter of a second is, too, before it is known that there are none."""
    launched, share = program(SERVER, tmp_path).stdout.split()
    about = description(tmp_path)
    assert 0.1 < float(share) < 0.5
    assert about["counts"]["kernels"] < 0.6 * int(launched)
    assert about["sampling"]["windows"] >= 3
    trace = thence.open(tmp_path)
    assert any("no steps that thence knows" in warning for warning in trace.meta.warnings)
    steps = trace.steps().frame
    assert steps.height >= 4
    assert steps["duration"].median() < 400_000_000
    in_steps = trace.activities.filter(pl.col("step").is_not_null()).height
    assert in_steps > 0.5 * about["counts"]["kernels"]
