"""A real job in which one rank slept: it is named with step, cause, line and module, though all steps take as long.

What was planted is told in tests/data/recording/ORIGIN.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from thence.analysis.ranks.lateness import step_keys
from thence.analysis.ranks.summary import summarise_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.ranks.answer import Job

STEPS, SINCE, SLEEP = 14, 5, 30e6
LATE, OTHER = 1, 0
ALL_REDUCES = 5
"""Of a step: the buckets of the model's gradients."""


@pytest.fixture(scope="module")
def trace(late_in_backward: Path) -> thence.Trace:
    return thence.open(late_in_backward)


@pytest.fixture(scope="module")
def job(trace: thence.Trace) -> Job:
    return trace.ranks()


def test_the_steps_of_a_recording_are_told_apart_though_all_have_one_name(trace: thence.Trace, job: Job) -> None:
    steps = trace.tables.host.filter(pl.col("category") == "step")
    assert steps["name"].cast(pl.String).unique().to_list() == ["step"]
    assert len(job.counted) == STEPS - 1  # without the first
    assert job.cells.filter(pl.col("key").is_in(job.counted)).height == 2 * (STEPS - 1)
    summaries = summarise_ranks(trace.tables)
    collectives = summaries["collectives"].filter(pl.col("step") >= 0)
    of_step = collectives.group_by("rank", "step").len()
    # DistributedDataParallel makes its buckets anew after its first step.
    assert of_step.filter(pl.col("step") > 0)["len"].unique().to_list() == [ALL_REDUCES]
    assert step_keys(summaries["steps"])["key"].n_unique() == len(job.keys)


def test_the_rank_that_sleeps_is_the_only_straggler_since_it_sleeps(job: Job) -> None:
    assert job.stragglers["rank"].to_list() == [LATE]
    row = job.stragglers.row(0, named=True)
    assert job.keys.index(row["since_step"]) == SINCE
    assert 0.8 * SLEEP <= row["mean_ns"] <= 1.05 * SLEEP
    since = job.cells.filter(pl.col("key").is_in(job.counted[SINCE - 1 :])).group_by("rank")
    times = dict(since.agg(pl.col("step_ns").mean()).iter_rows())
    # Who waits takes as long as who is waited for.
    assert times[OTHER] == pytest.approx(times[LATE], rel=0.03)


def test_it_is_named_by_line_and_module_and_little_else_is(job: Job) -> None:
    (why,) = job.reasons
    rows = why.rows.filter(cause=why.rows["cause"][0])
    assert (why.rank, why.median_rank) == (LATE, OTHER)
    assert rows["cause"][0] == "host"  # recorded without samples, nothing shows that it slept
    # What the other rank computed while it waited, the late one computed later: that is not the reason.
    assert rows["share"][0] > 0.75
    by = dict(rows.select("by", "name").iter_rows())
    assert by["source"].endswith("job_faults.py:105 LateBackward.backward")
    assert (by["module"], by["phase"]) == ("layers.2", "backward")
