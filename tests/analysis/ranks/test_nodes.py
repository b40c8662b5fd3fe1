"""A job of 16 nodes with 8 ranks each, made of one recorded rank: late nodes, late ranks, slow links, clocks.

Every rank is in a group of the ranks of its node, and in one of the ranks with the same place in their nodes.
"""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from rank_jobs import EPOCH, Plant, RankJob
from thence.analysis.ranks.answer import Job, job_of
from thence.analysis.ranks.job_collectives import job_collectives
from thence.analysis.ranks.nodes import nodes_of, with_links
from thence.model.tables import Device

PER_NODE, NODES = 8, 16
RAIL = list(range(5, NODES * PER_NODE, PER_NODE))


def job(plant: Plant | None, **more: object) -> RankJob:
    given = {"steps": 10, "seed": 3, "skew_ns": 5e6, "detailed": (0, 77)} | more
    return RankJob(ranks=NODES * PER_NODE, small=PER_NODE, nodes=True, plant=plant, **given)  # type: ignore[arg-type]


def found(plant: Plant | None, **more: object) -> Job:
    made = job(plant, **more)
    return job_of(made.summaries(), made.node_of)


def test_nobody_is_named_where_nobody_is_late_and_links_are_told() -> None:
    quiet = found(None)
    assert quiet.statement.startswith("no straggler")
    assert quiet.late_nodes.is_empty()
    assert quiet.links.is_empty()
    links = quiet.groups.group_by("kind", "nodes", "link").len().sort("kind").rows()
    assert links == [("data", 16, "network", 8), ("tensor", 1, "node", 16)]


def test_a_late_node_is_named_as_one() -> None:
    late = found(Plant("node", 43, 0.15, since=4))
    assert late.late_nodes.select("node", "ranks", "devices", "since_step").rows() == [
        (5, list(range(40, 48)), 8, "ProfilerStep#7")
    ]
    assert late.late_nodes["mean_ns"][0] == pytest.approx(0.15 * job(None).step.length, rel=0.1)
    assert late.links.is_empty()
    assert late.statement.startswith("1 late node among 128 devices, 9 steps: node 5, ranks 40-47 (")


def test_a_late_rank_is_no_late_node() -> None:
    late = found(Plant("backward", 77, 0.15, since=4))
    assert late.stragglers.select("rank", "node", "slow_link").rows() == [(77, 9, None)]
    assert late.late_nodes.is_empty()
    assert late.links.is_empty()


@pytest.mark.parametrize(
    ("kind", "ranks", "link", "named"),
    [
        ("rail", RAIL, "network", "network between 16 nodes, ranks 5, 13, 21"),
        ("link", list(range(24, 32)), "node", "within node 3, ranks 24-31"),
    ],
)
def test_a_slow_link_is_named_and_not_the_ranks_that_it_makes_late(
    kind: str, ranks: list[int], link: str, named: str
) -> None:
    slow = found(Plant(kind, ranks[0], 0.15, since=4))
    assert slow.links.select("ranks", "link", "since_step").rows() == [(ranks, link, "ProfilerStep#7")]
    assert slow.statement.startswith(f"1 slow link among 128 devices, 9 steps: {named}")
    assert slow.late_nodes.is_empty()
    assert {*slow.stragglers["rank"]} <= {*ranks}
    assert slow.stragglers["slow_link"].null_count() == 0


@pytest.mark.parametrize("missing", [(), (8, 17)])
def test_clocks_of_nodes_are_aligned_over_all_groups(missing: tuple[int, ...]) -> None:
    made = job(None, steps=20, drift=300_000.0, missing=missing)
    random = np.random.default_rng(made.seed)
    made._times(random)
    offset, drift = made.clocks(random)
    joined = job_collectives(made.summaries(), made.node_of)
    clocks = joined.clocks
    shown = [rank for rank in range(made.ranks) if rank not in missing]
    assert clocks.rows["cluster"].unique().to_list() == [0]
    slope = clocks.rows["drift_ns_per_s"].to_numpy() - drift[shown]
    assert np.abs(slope - slope.mean()).max() < 20_000
    # Offsets hold in the middle of the recording.
    since = (clocks.middle + joined.origin - EPOCH) / 1e9
    middle = clocks.rows["offset_ns"].to_numpy() - offset[shown] - drift[shown] * since
    assert np.abs(middle - np.median(middle)).max() < 1_000


def test_links_are_unknown_where_machines_are() -> None:
    devices = [Device(0, 0, node="b"), Device(1, 0, node="b"), Device(2, 0, node="a"), Device(3, 0)]
    nodes = nodes_of(devices)
    assert nodes == {0: 0, 1: 0, 2: 1}
    groups = pl.DataFrame({"ranks": [[0, 1], [0, 2], [0, 3], [0, 2, 3], None]}, schema={"ranks": pl.List(pl.Int32)})
    assert with_links(groups, nodes).select("nodes", "link").rows() == [
        (1, "node"), (2, "network"), (None, "unknown"), (None, "network"), (None, "unknown"),
    ]  # fmt: skip
