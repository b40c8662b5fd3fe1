"""Ranks put together from their summaries: the same collectives, waits and late ranks as from whole traces."""

from __future__ import annotations

import polars as pl
import pytest

import thence
from helpers import DATA, TORCH
from thence.analysis.collectives.instances import Instances, collective_instances
from thence.analysis.ranks.job_collectives import job_collectives
from thence.analysis.ranks.lateness import lateness, step_keys
from thence.analysis.ranks.summary import summarise_ranks

JOBS = {
    "ddp": (DATA / "recording" / "two_ranks",),
    "1f1b": tuple(sorted((TORCH / "waits").glob("schedule_rank*"))),
    "groups": tuple(sorted((TORCH / "waits").glob("group_rank*"))),
    "xla": (DATA / "jax" / "jax_fsdp2.xplane.pb.gz",),
}


@pytest.mark.parametrize("name", ["fsdp", *JOBS])
def test_waits_are_those_of_whole_traces(name: str, fsdp: thence.Trace) -> None:
    trace = fsdp if name == "fsdp" else thence.open(*JOBS[name])
    found = job_collectives(summarise_ranks(trace.tables))
    assert not found.clocks.rows["drift_applied"].any()
    times = trace.collectives("keep" if name == "xla" else "heuristic")
    ours = found.rows.filter("known").group_by("rank", "device").agg(pl.col("wait_ns").sum()).sort("rank", "device")
    theirs = times.last_arrivals
    assert ours["wait_ns"].sum() == pytest.approx(theirs["waited_device_ns"].sum(), rel=2e-3)
    theirs = theirs.filter(pl.col("code").is_null())
    assert ours.height == theirs.height
    last = (
        found.rows.filter(pl.col("wait_ns") > 0).group_by("late_rank", "late_device").agg(pl.col("instance").n_unique())
    )
    assert last["instance"].sum() == pytest.approx(theirs["last"].sum(), rel=0.03)


def test_groups_have_one_number_on_all_ranks() -> None:
    found = job_collectives(summarise_ranks(thence.open(*JOBS["groups"]).tables))
    assert found.groups.height == 3
    members = dict(found.groups.select("group", "ranks").iter_rows())
    for (group,), rows in found.rows.group_by("group"):
        assert set(rows["rank"]) == set(members[group])


def test_tables_without_collectives_have_the_columns_of_those_with(fsdp: thence.Trace) -> None:
    tables = []
    for trace in (fsdp, thence.open(TORCH / "torch_eager_rank0.json.gz")):
        summaries = summarise_ranks(trace.tables)
        collectives = job_collectives(summaries)
        waits = lateness(collectives, step_keys(summaries["steps"]))
        tables.append([collectives.rows, *(v for v in vars(waits).values() if isinstance(v, pl.DataFrame))])
    for job, alone in zip(*tables, strict=True):
        assert alone.schema == job.schema
    assert tables[1][0].is_empty()
    assert Instances().rows.schema == collective_instances(fsdp.whole).rows.schema
