"""What process groups are for, and which links are slow."""

from __future__ import annotations

import polars as pl
import pytest

import thence
from helpers import TORCH
from rank_jobs import RankJob
from thence.analysis.ranks.answer import job_of
from thence.analysis.ranks.job_collectives import job_collectives
from thence.analysis.ranks.process_groups import folded_groups, group_rows


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("mesh_dp", "data"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("mesh_tp", "tensor"),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("mesh_pp", "pipeline"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("mesh_ep", "expert"),
        ("CONTEXT_PARALLEL_GROUP", "context"),
        ("mesh_dp_shard", "data"),
        ("mesh_p2p", "unknown"),
        ("undefined", "unknown"),
    ],
)
def test_a_group_is_for_what_its_name_says(description: str, kind: str) -> None:
    summaries = RankJob(ranks=4, steps=3, small=2).summaries()
    named = pl.when(pl.col("group") == 1).then(pl.lit(description)).otherwise("description")
    groups = summaries["groups"].with_columns(
        description=named, name=pl.when(pl.col("group") == 1).then(pl.lit("7")).otherwise("name")
    )
    rows = group_rows(job_collectives(summaries | {"groups": groups}), 4)
    small = rows.filter(size=2)
    assert small["kind"].to_list() == [kind, kind]
    assert rows.filter(size=4)["kind"].to_list() == ["all"]


def test_groups_that_only_send_are_those_of_a_pipeline() -> None:
    found = thence.open(*sorted((TORCH / "waits").glob("schedule_rank*"))).ranks().groups
    assert found.select("kind", "told_by", "size").rows() == [("pipeline", "traffic", 4)]


def test_waits_of_groups_add_up_to_those_of_ranks() -> None:
    found = job_of(RankJob(ranks=8, steps=6, small=4).summaries())
    waited = found.cells["wait_ns"].sum()
    assert found.groups["exposed_wait_ns"].sum() == pytest.approx(waited, rel=1e-6)
    assert found.groups.height == 3


def test_many_groups_that_are_alike_are_one_row_with_their_sums() -> None:
    every = job_of(RankJob(ranks=32, steps=3, small=4).summaries()).groups
    small, large = every.filter(size=4), every.filter(size=32)
    rows = folded_groups(every)
    assert rows.select("size", "alike").sort("size").rows() == [(4, 8), (32, 1)]
    folded = rows.row(by_predicate=pl.col("size") == 4, named=True)
    for column in ("collectives", "exposed_ns", "exposed_wait_ns", "transfer_ns"):
        assert folded[column] == small[column].sum()
    most = small.sort("exposed_wait_ns", descending=True)["members"][0]
    assert folded["members"] == f"most waits in {most}"
    assert rows.filter(size=32).drop("alike").equals(large)
    few = job_of(RankJob(ranks=8, steps=3, small=4).summaries()).groups
    assert folded_groups(few).drop("alike").equals(few)
