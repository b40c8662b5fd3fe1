"""Bubbles of pipelines, and stages that are late beyond the schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

import thence
from helpers import TORCH
from pipeline_jobs import HostBoundPipeline
from thence.analysis.ranks.lateness import stage_causes, stages

if TYPE_CHECKING:
    from pathlib import Path


def test_the_stage_with_twice_the_layers_has_the_smallest_bubble_and_is_why_others_wait() -> None:
    found = thence.open(*sorted((TORCH / "waits").glob("schedule_rank*"))).ranks()
    assert found.stages.select("stage", "rank").rows() == [(n, n) for n in range(4)]
    assert found.stages.sort("bubble_ns")["rank"][0] == 2
    assert found.ranks["rank"][0] == 2
    shares = found.stages["bubble_ns"] / found.stages["step_ns"]
    assert shares.to_list() == pytest.approx(found.stages["bubble_share"].to_list())


def rows(own: list[int]) -> pl.DataFrame:
    """One step of a stage on each rank, with this time of its own."""
    count = len(own)
    place = {"rank": list(range(count)), "device": [0] * count}
    return pl.DataFrame(
        {**place, "stage": place["rank"], "key": ["1"] * count, "own_ns": own, "step_ns": [1000] * count}
    )


def test_a_stage_is_late_by_what_it_is_longer_than_the_middle_one() -> None:
    own = [100, 110, 180, 90]
    place = {"rank": [0, 1, 2, 3], "device": [0] * 4, "key": ["1"] * 4}
    steps = pl.DataFrame(
        {
            **place,
            "compute_ns": [80, 80, 140, 70],
            "copy_ns": [0] * 4,
            "idle_ns": [20, 30, 40, 20],
            "host_ns": [None] * 4,
        }
    )
    caused = pl.DataFrame({**place, "caused_ns": [50, 50, 500, 50]})
    late = stage_causes(rows(own), caused, steps).sort("rank")
    # The middle of four is the second in order of its own time: rank 0 with 100.
    assert late["median_rank"].unique().to_list() == [0]
    assert late.select("rank", "own_ns").rows() == [(1, 10), (2, 80)]
    two = late.row(1, named=True)
    assert (two["compute_ns"], two["idle_ns"], two["unknown_ns"]) == (60, 20, 0)


def test_a_stage_causes_no_more_than_others_waited_for_it() -> None:
    place = {"rank": [0, 1, 2], "device": [0] * 3, "key": ["1"] * 3}
    steps = pl.DataFrame(
        {**place, "compute_ns": [10, 10, 90], "copy_ns": [0] * 3, "idle_ns": [0] * 3, "host_ns": [None] * 3}
    )
    caused = pl.DataFrame({"rank": [2], "device": [0], "key": ["1"], "caused_ns": [30]})
    assert stage_causes(rows([10, 10, 90]), caused, steps)["own_ns"].to_list() == [30]


@pytest.mark.parametrize("stages_of_job", [2, 4])
def test_hosts_that_are_equally_slow_are_nobodys_fault(tmp_path: Path, stages_of_job: int) -> None:
    job = HostBoundPipeline((1000,) * stages_of_job)
    job.write(tmp_path)
    found = thence.open(tmp_path).ranks()
    # The GPU of the last stage is idle while those before it, whose hosts are ahead, wait for it.
    idle = {row["rank"]: row["idle_ns"] for row in found.ranks.to_dicts()}
    assert max(idle, key=lambda rank: idle[rank]) == stages_of_job - 1
    assert found.stragglers.is_empty()
    assert found.ranks["caused_share"].max() == pytest.approx(0, abs=0.01)
    assert found.not_caused_share("launched_ahead") > 0.1


@pytest.mark.parametrize("hosts", [(1000, 1500), (1500, 1000), (1000, 1000, 1500, 1000)])
def test_a_slower_host_is_late_by_what_it_is_slower(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    job, late = HostBoundPipeline(hosts), hosts.index(1500)
    job.write(tmp_path)
    found = thence.open(tmp_path).ranks()
    assert found.stragglers["rank"].to_list() == [late]
    slower = job.host_us(late) - job.host_us(late - 1)
    assert found.stragglers["mean_ns"][0] == pytest.approx(slower * 1000, rel=0.02)
    assert found.reasons[0].rows["cause"][0] == "operator"


def test_a_stage_without_waits_has_no_bubble() -> None:
    steps = pl.DataFrame({"rank": [0], "device": [0], "key": ["1"], "duration": [100], "exposed_ns": [0]})
    waits = pl.DataFrame({"rank": [0], "device": [0], "key": ["2"], "wait_ns": [7]})
    of = pl.DataFrame({"rank": [0], "device": [0], "stage": [3]})
    assert stages(waits, steps, of).select("bubble_ns", "own_ns", "stage").rows() == [(0, 100, 3)]
