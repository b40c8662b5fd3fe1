"""Offset and drift of clocks from shared collectives, as they were made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from rank_jobs import RankJob
from thence.analysis.collectives.clock_sync import quantiles
from thence.analysis.ranks.job_collectives import job_collectives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.analysis.ranks.answer import Job
    from thence.analysis.ranks.job_collectives import Clocks


def clocks(summaries: Mapping[str, pl.DataFrame]) -> Clocks:
    return job_collectives(summaries).clocks


def made(job: RankJob) -> tuple[np.ndarray, np.ndarray]:
    """Offsets (ns) and drifts (ns per second) that a job draws, the same numbers in the same order."""
    random = np.random.default_rng(job.seed)
    job._times(random)
    return random.normal(0, job.skew_ns, job.ranks), random.normal(0, job.drift, job.ranks)


def test_offsets_are_those_that_were_made() -> None:
    job = RankJob(ranks=6, steps=8, seed=4)
    random = np.random.default_rng(job.seed)
    job._times(random)
    truth = random.normal(0, job.skew_ns, job.ranks)
    rows = clocks(job.summaries()).rows
    assert not rows["drift_applied"].any()
    found = rows["offset_ns"].to_numpy()
    np.testing.assert_allclose(found - found.mean(), truth - truth.mean(), atol=400)
    assert rows["residual_p90_ns"].max() < 3_000


def test_drifts_are_found_and_corrected() -> None:
    job = RankJob(ranks=4, steps=40, seed=9, drift=400_000.0)
    _, truth = made(job)
    found = clocks(job.summaries())
    slopes = found.rows["drift_ns_per_s"].to_numpy()
    np.testing.assert_allclose(slopes - slopes.mean(), truth - truth.mean(), atol=20_000)
    assert found.rows["drift_applied"].sum() >= 2
    assert found.rows.filter("drift_applied")["residual_p90_ns"].max() < 3_000
    assert any("drift" in text for text in found.statements)


def test_waits_do_not_depend_on_the_clocks() -> None:
    right = job_collectives(RankJob(ranks=4, steps=20, seed=1, skew_ns=0.0).summaries()).rows
    wrong = job_collectives(RankJob(ranks=4, steps=20, seed=1, skew_ns=5e6).summaries()).rows
    key = ["rank", "instance"]
    both = right.select(*key, "wait_ns").join(wrong.select(*key, other="wait_ns"), on=key)
    assert (both["wait_ns"] - both["other"]).abs().max() < 5_000  # type: ignore[operator]


def test_a_rank_that_shares_nothing_says_so() -> None:
    summaries = RankJob(ranks=4, steps=4, seed=0).summaries()
    alone = summaries | {"collectives": summaries["collectives"].filter(pl.col("rank") != 2)}
    found = clocks(alone)
    assert found.unaligned == [2]
    assert any(text.startswith("rank 2: no collective is shared") for text in found.statements)


def test_real_clocks_of_one_host_are_left_alone(fsdp_job: Job) -> None:
    found = fsdp_job.clocks
    assert found.rows["offset_ns"].to_list() == [0, 0, 0, 0]
    assert not found.rows["drift_applied"].any()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_quantiles_of_groups_are_those_of_each(share: float) -> None:
    random = np.random.default_rng(3)
    group = random.integers(0, 7, 200)
    group[group == 4] = 5
    value = random.normal(size=200)
    found = quantiles(group, value, 8, share)
    for number in range(8):
        ours = value[group == number]
        if len(ours):
            assert found[number] == pytest.approx(np.quantile(ours, share))
        else:
            assert np.isnan(found[number])
