"""Ranks and steps without device work, and ranks that were recorded at another time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl

from faults import changed
from helpers import DATA, FSDP, event, kernel, launch, opened
from thence.analysis.soundness.check import check
from thence.model.concat_tables import concat
from thence.model.formats import THENCE_RECORDING
from thence.model.tables import Tables
from thence.readers.registry import read

if TYPE_CHECKING:
    from pathlib import Path


def shifted(tables: Tables, rank: int, ns: int) -> Tables:
    moved = pl.col("start") + pl.when(pl.col("rank") == rank).then(ns).otherwise(0)
    return changed(tables, gpu=tables.gpu.with_columns(start=moved), host=tables.host.with_columns(start=moved))


def test_a_rank_of_another_time_is_named() -> None:
    tables = read(FSDP)
    late = shifted(tables, 2, 5_000_000_000)
    (finding,) = check(late).findings
    assert (finding.code, finding.rank, finding.device) == ("windows_apart", 2, 2)
    rest = late.gpu.filter(pl.col("rank") != 2)
    last = int((rest["start"] + rest["duration"]).max())
    first = int(late.gpu.filter(pl.col("rank") == 2)["start"].min())
    assert finding.span_ns == first - last


def test_copies_of_a_rank_are_noted() -> None:
    tables = concat([read(FSDP), read([FSDP[1]]), read([FSDP[3]])])
    (note,) = (note for note in check(tables).notes if note.code == "copied_ranks")
    assert (note.count, note.rank) == (2, None)
    assert "(ranks 1, 4)" in note.text
    one_later = tables.gpu.with_columns(pl.col("start") + (pl.int_range(pl.len()) == tables.gpu.height - 1).cast(int))
    assert [n.count for n in check(changed(tables, gpu=one_later)).notes if n.code == "copied_ranks"] == [1]
    assert "copied_ranks" not in {note.code for note in check(read(FSDP)).notes}


def test_recorded_ranks_of_other_times_are_found_in_recordings() -> None:
    tables = shifted(read([DATA / "recording" / "two_ranks"]), 1, -60_000_000_000)
    assert [(f.code, f.rank) for f in check(tables).findings] == [("windows_apart", 1)]


def test_without_a_common_clock_it_is_not_checked() -> None:
    paths = [DATA / "nsight" / "torch_ddp_cuda_gpu_trace.csv.gz"] * 2
    tables = concat([read([path]) for path in paths])
    reasons = {entry.code: entry.text for entry in check(tables).not_checked}
    assert "do not state the Unix time at which their clock starts" in reasons["windows_apart"]


def test_a_rank_without_device_work_is_named() -> None:
    tables = read(FSDP)
    kept = tables.gpu.filter(pl.col("rank") != 3)
    soundness = check(changed(tables, gpu=kept))
    assert {(f.code, f.rank) for f in soundness.findings} == {("no_device_work", 3), ("launch_without_work", 3)}
    launches = tables.host.filter(pl.col("rank") == 3, pl.col("name").cast(pl.String).str.contains("LaunchKernel"))
    assert all(f.count == launches.height for f in soundness.findings)
    assert all(f.span_share == 1 for f in soundness.findings)


def test_a_trace_without_anything_is_unsound() -> None:
    (finding,) = check(Tables()).findings
    assert finding.code == "no_device_work"


def step(number: int, start: int, operators: int, *, launches: bool) -> list[dict[str, Any]]:
    events = [event("user_annotation", f"ProfilerStep#{number}", start, 1000)]
    for i in range(operators):
        events.append(event("cpu_op", "aten::mm", start + 10 + 10 * i, 8))
        if launches:
            correlation = 100 * number + i + 1
            events += [launch(correlation, start + 12 + 10 * i), kernel(correlation, start + 20 + 10 * i)]
    return events


def test_a_step_that_the_host_did_not_work_in_may_be_empty(tmp_path: Path) -> None:
    """``profiler.step()`` after the last iteration opens one more."""
    full = [x for n in range(3) for x in step(n, 2000 * n, 20, launches=True)]
    assert opened(tmp_path, [*full, *step(3, 6000, 1, launches=False)]).check().sound
    (finding,) = opened(tmp_path, [*full, *step(3, 6000, 20, launches=False)]).check().findings
    assert (finding.code, finding.count) == ("empty_steps", 1)
    assert "1 of 4 steps" in finding.text
    assert "ProfilerStep#3" in finding.text


def test_what_comes_after_the_last_iteration_of_a_recording_is_no_empty_step(tmp_path: Path) -> None:
    """A recording counts what it loses, so a last step without a launch had no work."""
    for idle, found in (((3,), []), ((1, 3), [1])):
        events = [x for n in range(4) for x in step(n, 2000 * n, 20, launches=n not in idle)]
        tables = opened(tmp_path, events).recorded
        recorded = changed(tables, meta=replace(tables.meta, formats=(THENCE_RECORDING,)))
        assert [f.count for f in check(recorded).findings if f.code == "empty_steps"] == found


def test_thirty_of_thirty_two_steps(tmp_path: Path) -> None:
    events = [x for n in range(32) for x in step(n, 2000 * n, 20, launches=n in (7, 9))]
    (finding,) = opened(tmp_path, events).check().findings
    assert (finding.code, finding.count) == ("empty_steps", 30)
