"""Exposed time: when only the work of one row ran on a GPU."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import thence
from helpers import TORCH, examples

settings.register_profile("thence", deadline=None, max_examples=examples(40) // 2)
settings.load_profile("thence")

Work = tuple[str, int, int, int, int]
"""A kernel: name, device, stream, start and end in us."""


def opened(work: list[Work], folder: str | Path) -> thence.Trace:
    events: list[dict[str, Any]] = [
        {
            "ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream,
            "ts": begin, "dur": end - begin, "args": {"device": device, "stream": stream},
        }
        for name, device, stream, begin, end in work
    ]  # fmt: skip
    path = Path(folder) / "run" / "traces" / "trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return thence.open(path)


def by_name(summary: thence.Summary) -> dict[str, int]:
    return dict(summary.rows.select("name", "exposed_ns").iter_rows())


def test_time_in_which_another_row_runs_is_not_exposed(tmp_path: Path) -> None:
    work = [("a", 0, 7, 0, 10), ("b", 0, 8, 6, 16), ("b", 0, 8, 20, 25), ("c", 0, 7, 22, 24)]
    summary = opened(work, tmp_path).report("kernel")
    # a alone: 0 to 6; b alone: 10 to 16, 20 to 22, 24 to 25; both: 6 to 10; b and c: 22 to 24.
    assert by_name(summary) == {"a": 6000, "b": 9000, "c": 0}
    assert summary.overlapped_ns == 6000
    assert summary.busy_ns == 21000


def test_work_of_one_row_beside_itself_and_work_of_other_devices_is_exposed(tmp_path: Path) -> None:
    work = [("a", 0, 7, 0, 10), ("a", 0, 8, 5, 20), ("b", 1, 7, 0, 30)]
    summary = opened(work, tmp_path).report("kernel")
    assert by_name(summary) == {"a": 20000, "b": 30000}
    assert summary.overlapped_ns == 0


def test_work_that_is_not_selected_counts_as_other_work(tmp_path: Path) -> None:
    work = [("chosen", 0, 7, 0, 10), ("other", 0, 8, 4, 6), ("other", 0, 8, 30, 40)]
    summary = opened(work, tmp_path).select(only="chosen").report("kernel")
    assert by_name(summary) == {"chosen": 8000}
    assert summary.overlapped_ns == 2000


kernels = st.tuples(
    st.sampled_from("abc"), st.integers(0, 1), st.integers(7, 9), st.integers(0, 40), st.integers(0, 12)
).map(lambda k: (k[0], k[1], k[2], k[3], k[3] + k[4]))  # fmt: skip


@given(st.lists(kernels, min_size=1, max_size=20))
def test_exposed_time_equals_a_count_of_every_microsecond(work: list[Work]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        summary = opened(work, folder).report("kernel")
    alone = dict.fromkeys((name for name, *_ in work), 0)
    several = 0
    for device in (0, 1):
        for us in range(60):
            running = {n for n, d, _, begin, end in work if d == device and begin <= us < end}
            if len(running) == 1:
                alone[running.pop()] += 1000
            several += 1000 * (len(running) > 1)
    assert by_name(summary) == alone
    assert summary.overlapped_ns == several


def test_exposed_and_overlapped_time_of_real_traces_add_up_to_the_busy_time() -> None:
    for path in (TORCH / "torch_fsdp_rank0.json.gz", TORCH / "torch_eager_rank0.json.gz"):
        for by in ("kernel", "label", "stream", "collective" if "fsdp" in path.name else "op"):
            summary = thence.open(path).report(by)
            exposed = int(summary.rows["exposed_ns"].sum())
            assert exposed + summary.overlapped_ns == summary.busy_ns
            assert (summary.rows["exposed_ns"] <= summary.rows["total_ns"]).all()
    # The sum of four streams counts time in which several ran once to three times too often.
    streams = thence.open(TORCH / "torch_fsdp_rank0.json.gz").report("stream")
    assert streams.overlapped_ns <= streams.sum_ns - streams.busy_ns <= 3 * streams.overlapped_ns
    assert streams.overlapped_ns > 0
