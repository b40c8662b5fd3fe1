"""GPU time by kind of place: what the trace does not say is a reason, never a crash."""

from __future__ import annotations

import thence
from thence.model.tables import GPU, Meta, Tables


def two_kernels() -> Tables:
    """One on stream 7, and one of which the trace does not say the stream."""
    gpu = GPU.frame(
        {
            "rank": [0, 0],
            "device": [0, 0],
            "stream": [7, None],
            "kind": ["kernel", "kernel"],
            "name": ["a", "b"],
            "start": [0, 10],
            "duration": [3, 5],
        }
    )
    return Tables(gpu=gpu, meta=Meta(inputs=("x",), formats=("x",)))


def test_a_column_that_is_null_has_the_reason_that_the_trace_does_not_say() -> None:
    rows = thence.Trace(two_kernels()).report("stream").rows
    found = {row["name"]: (row["total_ns"], row["reason"]) for row in rows.to_dicts()}
    assert found == {"rank 0 device 0 stream 7": (3, None), "[the trace does not say]": (5, "not_recorded")}
