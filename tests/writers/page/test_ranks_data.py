"""The ranks of a job on a page: heat map, tables, and what is said where not all of it is there."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from rank_jobs import Plant, RankJob
from thence.analysis.ranks.answer import Job, job_of
from thence.writers.charts.runs import ranks_chart
from thence.writers.page.ranks_data import MAX_CELLS, MAX_RANKS, heat_map, heat_notes, rank_tables, reason_tables


@pytest.fixture(scope="module")
def job() -> Job:
    return job_of(RankJob(ranks=6, steps=8, plant=Plant("kernel", 3, 0.2)).summaries())


def test_the_heat_map_has_every_rank_and_step(job: Job) -> None:
    found = heat_map(job)
    assert found is not None
    titles = [each["title"] for each in found["maps"]]
    values = np.frombuffer(base64.b64decode(found["maps"][titles.index("step")]["values"]), "<f4").reshape(6, 8)
    assert found["names"][0] == "rank 3 GPU 0"
    assert [found["names"][row] for row in found["by_rank"]] == [f"rank {rank} GPU 0" for rank in range(6)]
    assert found["late"] == [True] + [False] * 5
    of_late = job.cells.filter(rank=3).sort(pl.col("key").cast(pl.Enum(job.keys)))
    assert values[0].tolist() == pytest.approx(of_late["step_ns"].to_list(), rel=1e-6)
    assert list(heat_notes(job)) == []


def test_what_nobody_waits_for_is_not_drawn(job: Job) -> None:
    """Equal ranks: no wait anywhere, so that neither a map of waits nor a list of 0.0 % says anything."""
    zero = [pl.lit(0).alias(name) for name in ("caused_share", "wait_caused_ns", "times_last")]
    still = replace(
        job, ranks=job.ranks.with_columns(zero), cells=job.cells.with_columns(caused_ns=pl.lit(0), wait_ns=pl.lit(0))
    )
    found = heat_map(still)
    assert found is not None
    assert [each["title"] for each in found["maps"]] == ["compute", "step"]
    (_, _, every), *_ = rank_tables(still)
    assert not {"others wait for it, of a step", "times last"} & {column["title"] for column in every["columns"]}
    chart = ranks_chart(still)
    assert "No rank makes another one wait." in chart.caption
    assert "0.0 %" not in "".join(chart.rows.values())
    nothing = still.cells.with_columns(step_ns=pl.lit(0), compute_ns=pl.lit(0))
    assert heat_map(replace(still, cells=nothing)) is None


def test_a_rank_without_a_step_has_no_figure(job: Job) -> None:
    gone = (pl.col("rank") == 3) & (pl.col("key") == job.keys[2])
    found = heat_map(replace(job, cells=job.cells.filter(~gone)))
    assert found is not None
    for each in found["maps"]:
        values = np.frombuffer(base64.b64decode(each["values"]), "<f4")
        assert np.flatnonzero(np.isnan(values)).tolist() == [2]


def test_more_steps_and_ranks_than_a_page_shows_are_said(job: Job) -> None:
    keys = tuple(f"step {number}" for number in range(1_000))
    assert list(heat_notes(replace(job, keys=keys))) == ["1,000 steps are shown in 200 columns, the mean of each"]
    count = MAX_RANKS + 1
    numbers = pl.Series("rank", range(count), dtype=pl.Int32)
    ranks = pl.concat([job.ranks] * (count // 6 + 1)).head(count).with_columns(numbers)
    many = replace(job, ranks=ranks)
    found = heat_map(many)
    assert found is not None
    assert len(found["names"]) * len(found["steps"]) <= MAX_CELLS
    assert list(heat_notes(many)) == [
        f"{MAX_RANKS:,} of {count:,} ranks are shown: those that made the others wait most"
    ]
    (_, _, every), *_ = rank_tables(many)
    assert every["note"] == "times are means of a step; 1 more rows are not in this page"


def test_the_reasons_and_parts_of_a_step_are_those_of_the_job(job: Job) -> None:
    ((name, sentence, data),) = reason_tables(job)
    assert name == "late-0"
    assert sentence.startswith("rank 3 GPU 0 makes others wait ")
    assert data["rows"][0][0] == "compute"
    chart = ranks_chart(job)
    parts = chart.to_frame().group_by("name").agg(pl.col("mean_ns").sum())
    steps = {f"rank {rank} GPU 0": ns for rank, ns in job.ranks.select("rank", "step_ns").rows()}
    for name, total in parts.rows():
        assert total == pytest.approx(steps[name.removesuffix(" - late")], rel=0.02), name


def test_a_rank_without_a_step_says_so(job: Job) -> None:
    first = pl.int_range(pl.len()) == 0
    none = job.ranks.with_columns(pl.when(~first).then(pl.col("step_ns", "caused_share")))
    texts = list(ranks_chart(replace(job, ranks=none, reasons=())).rows.values())
    assert texts[0] == "no step, caused 0.0 %"
    assert "no step" not in "".join(texts[1:])
