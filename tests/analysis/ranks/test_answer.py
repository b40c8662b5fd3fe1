"""Late ranks: planted faults are named as what they are, nobody is named by chance, and sums are as by hand."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import DATA, FSDP, examples, shared, unzipped
from late_ranks import BACKWARD, FORWARD, TRANSFER, RealJob, SleepyJob
from rank_jobs import LINE, MODULE, Plant, RankJob
from thence.analysis.ranks.answer import job_of
from thence.analysis.ranks.job_collectives import job_collectives
from thence.analysis.ranks.lateness import lateness, step_keys
from thence.analysis.ranks.reasons import REASON
from thence.analysis.ranks.summary import summarise_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.ranks.answer import Job

CAUSES = {"backward": "python", "kernel": "compute", "slow_gpu": "slower_gpu", "loader": "loader", "batch": "more_work"}


@pytest.mark.parametrize(
    ("kind", "overlapped"), [*zip(sorted(CAUSES), [False, True, False, True, False], strict=True), ("slow_gpu", False)]
)
def test_a_planted_fault_is_named_as_what_it_is(kind: str, overlapped: bool) -> None:
    plant = Plant(kind, rank=5, share=0.15, since=4)
    job = RankJob(plant=plant, overlapped=overlapped, steps=16, noise=0.01, seed=11)
    found = job_of(job.summaries())
    assert found.stragglers["rank"].to_list() == [5]
    # A pause of another rank hides the first step or two of a small fault.
    assert found.stragglers["since_step"][0] in found.keys[3:6]
    (why,) = found.reasons
    assert why.rows["cause"][0] == CAUSES[kind]
    assert why.rows.schema == REASON
    causes = why.rows.filter(by="cause")
    assert causes["share"][0] > 0.6
    if kind in ("backward", "kernel"):
        assert {LINE, MODULE, "backward"} <= set(why.rows.filter(cause=CAUSES[kind])["name"])
    if kind not in ("slow_gpu", "batch"):
        more = plant.share * job.step.length
        assert found.stragglers["mean_ns"][0] == pytest.approx(more, rel=0.15)


def test_a_slow_link_is_named_by_its_group_and_no_rank_outside_is() -> None:
    job = RankJob(ranks=16, steps=16, small=4, noise=0.01, plant=Plant("link", 6, 0.2), seed=2)
    found = job_of(job.summaries())
    assert found.links["members"].to_list() == ["[4, 5, 6, 7]"]
    assert found.links["extra_ns"][0] == pytest.approx(0.2 * job.step.length, rel=0.05)
    assert set(found.stragglers["rank"]) <= {4, 5, 6, 7}
    for why in found.reasons:
        assert why.rows["cause"][0] == "transfer"
        assert "[4, 5, 6, 7]" in why.rows.filter(cause="transfer")["name"].to_list()


def test_where_nobody_is_late_somebody_is_named_in_about_one_job_of_a_hundred() -> None:
    named = 0
    for seed in range(tries := examples(40)):
        random = np.random.default_rng(seed)
        job = RankJob(
            ranks=int(random.choice([2, 4, 8])), steps=int(random.integers(4, 20)), noise=0.1,
            overlapped=bool(seed % 2), drift=20_000.0, seed=seed,
        )  # fmt: skip
        found = job_of(job.summaries())
        assert found.statement.startswith("no straggler") == found.stragglers.is_empty()
        assert found.links.is_empty()
        named += not found.stragglers.is_empty()
    assert named <= max(1, tries // 30)  # with `SURE`, three or more happen in 2 of 100 runs of 60 jobs


def test_a_rank_that_sleeps_in_backward_is_named_though_all_steps_are_equally_long(tmp_path: Path) -> None:
    job = SleepyJob()
    job.write(tmp_path)
    found = thence.open(tmp_path).ranks()
    lengths = found.cells.group_by("rank").agg(pl.col("step_ns").sum())["step_ns"]
    assert max(lengths) - min(lengths) < 0.001 * max(lengths)
    assert found.stragglers["rank"].to_list() == [1]
    others = [
        max(job._work(1, step) - job._work(rank, step) for rank in (0, 2))
        for step in range(1, job.steps)  # without the first
    ]
    caused = found.stragglers["wait_caused_ns"][0]
    # Of the device that waited longest in each step; one and the same device of all steps waits a little less.
    assert 0.999 * 1000 * sum(others) <= caused <= 1000 * sum(others)
    assert found.stragglers["times_last"][0] == job.steps - 1  # without the first
    (why,) = found.reasons
    sleeping = why.rows.filter(cause="python")
    named = dict(sleeping.select("by", "name").iter_rows())
    assert named["source"] == "/home/me/train.py:40 hook"
    assert named["module"] == "Mlp_3"
    assert named["phase"] == "backward"
    assert sleeping["total_ns"][0] == pytest.approx(1000 * job.sleep * (job.steps - 1), rel=0.001)
    assert found.clocks.rows["offset_ns"].to_list() == [-3_000_000, 0, 3_000_000]


def test_the_step_since_which_a_rank_sleeps_is_named_with_module_and_line(tmp_path: Path) -> None:
    job = SleepyJob(ranks=4, steps=10, late=2, since=4)
    job.write(tmp_path)
    found = thence.open(tmp_path).ranks()
    walls = found.cells.group_by("key").agg(pl.col("step_ns").max() - pl.col("step_ns").min())
    assert walls["step_ns"].max() < 1_000_000  # type: ignore[operator]
    late = found.stragglers.row(0, named=True)
    assert (late["rank"], late["since_step"]) == (2, "ProfilerStep#4")
    assert late["mean_ns"] == pytest.approx(1000 * job.sleep, rel=0.001)
    named = dict(found.reasons[0].rows.filter(cause="python").select("by", "name").iter_rows())
    assert (named["source"], named["module"]) == ("/home/me/train.py:40 hook", "Mlp_3")


def test_a_sleep_in_backward_of_a_recorded_step_is_named_by_operator_module_and_line(tmp_path: Path) -> None:
    job = RealJob()
    job.write(tmp_path)
    found = thence.open(tmp_path).ranks()
    lengths = found.cells["step_ns"]
    assert lengths.max() - lengths.min() < 0.01 * lengths.max()  # type: ignore[operator]
    assert found.stragglers.select("rank", "since_step").rows() == [(2, "ProfilerStep#1")]
    assert found.stragglers["mean_ns"][0] == pytest.approx(1000 * job.sleep, rel=0.001)
    (why,) = found.reasons
    assert why.rows.select("cause", "by").row(0) == ("operator", "cause")
    assert why.rows["total_ns"][0] == pytest.approx(1000 * job.sleep * (job.steps - 1), rel=0.01)
    named = dict(why.rows.filter(cause="operator").select("by", "name").iter_rows())
    assert named["op"] == job.op
    assert named["phase"] == "backward"
    around = job.around(job.forward)
    modules = [name.removeprefix("nn.Module: ") for name in around if name.startswith("nn.Module")]
    assert len(modules) > 1
    assert named["module"] == "/".join(modules)
    lines = [name for name in around if name.startswith("torch_gpt.py(")]
    file, line, function = re.fullmatch(r"(.+)\((\d+)\): (.+)", lines[-1]).groups()  # type: ignore[union-attr]
    assert named["source"] == f"{file}:{line} {modules[-1].rpartition('_')[0]}.{function}"


def test_figures_of_ranks_are_per_step(tmp_path: Path) -> None:
    job = SleepyJob(uneven=0)
    job.write(tmp_path)
    rows = thence.open(tmp_path).ranks().ranks.sort("rank")
    length = 1000 * (200 + FORWARD + BACKWARD + TRANSFER + job.sleep)
    for row in rows.iter_rows(named=True):
        assert row["steps"] == job.steps - 1
        assert row["step_ns"] == pytest.approx(length, abs=200_000)
        assert row["compute_ns"] == 1000 * (FORWARD + BACKWARD)
        waited = 0 if row["rank"] == 1 else 1000 * job.sleep
        assert row["exposed_wait_ns"] == waited
        assert row["transfer_ns"] == 1000 * TRANSFER
        assert row["steps_per_second"] == pytest.approx(1e9 / row["step_ns"])


def by_hand() -> tuple[dict[int, int], dict[int, int], set[int]]:
    """In the second step of the FSDP job: how often each rank was last, how long it waited, and who arrived after
    the median rank.

    The clocks agree. What its own rank computes in a wait is taken off. A collective is the n-th of its kind on
    every rank.
    """
    talks: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    compute: dict[int, list[tuple[int, int]]] = {}
    for rank, path in enumerate(FSDP):
        seen: dict[str, int] = {}
        events = [e for e in json.loads(unzipped(path))["traceEvents"] if e.get("cat") == "kernel"]
        for event in sorted(events, key=lambda e: e["ts"]):
            start = round(event["ts"] * 1000)
            interval = (start, start + round(event["dur"] * 1000))
            kind = event["args"].get("Collective name")
            if kind is None:
                compute.setdefault(rank, []).append(interval)
            else:
                number = seen[kind] = seen.get(kind, -1) + 1
                talks.setdefault((kind, number), {})[rank] = interval
    last, waited = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    causing = set()
    count = {kind: 1 + max(n for k, n in talks if k == kind) for kind, _ in talks}
    for (kind, number), arrivals in talks.items():
        late = max(arrivals, key=lambda rank: arrivals[rank][0])
        if number < count[kind] / 2:  # both steps have as many
            continue
        last[late] += 1
        median = sorted(start for start, _ in arrivals.values())[1]  # the earlier one of the two
        causing |= {rank for rank, (start, _) in arrivals.items() if start > median}
        for rank, (start, _) in arrivals.items():
            if rank != late:
                inside = [c for c in compute[rank] if c[0] < arrivals[late][0] and c[1] > start]
                waited[rank] += (
                    arrivals[late][0]
                    - start
                    - sum(min(end, arrivals[late][0]) - max(begin, start) for begin, end in inside)
                )
    return last, waited, causing


def test_real_ranks_are_late_as_counted_by_hand(fsdp_job: Job) -> None:
    found = fsdp_job
    last, waited, causing = by_hand()
    rows = found.ranks.sort("rank")
    assert rows["times_last"].to_list() == list(last.values())
    for row in rows.iter_rows(named=True):
        whole = row["exposed_wait_ns"] * row["steps"]
        # Where compute lies within a collective is known to within its transfer.
        assert 0.98 * waited[row["rank"]] <= whole <= 1.005 * waited[row["rank"]]
    # Ranks 0 and 2 waited as long as they did for rank 3, which is last each time; rank 1 is late, but never last.
    first = found.ranks.row(0, named=True)
    assert (first["rank"], first["times_last"]) == (3, 14)
    assert 0.98 * max(waited.values()) <= first["awaited_ns"] <= 1.005 * max(waited.values())
    assert [why.rank for why in found.reasons] == [3, 1]
    # What is nobody's fault is not blamed on a rank that arrived before the last one.
    ahead = found.not_caused.filter(code="launched_ahead")["wait_ns"][0]
    assert (found.ranks["wait_caused_ns"] + ahead).max() <= max(waited.values()) * 1.005  # type: ignore[operator]
    caused = set(found.ranks.filter(pl.col("wait_caused_ns") > 0)["rank"])
    assert caused == causing
    assert found.stragglers.is_empty()
    assert found.statement.startswith("no late rank is named: 1 step counts, which is too few")


def test_the_wait_at_the_first_collective_has_no_cause_and_a_reason_for_that(fsdp: thence.Trace) -> None:
    job = fsdp.select(steps="0:1").ranks()  # of several steps, the first is left out
    first = []
    for path in FSDP:
        events = json.loads(unzipped(path))["traceEvents"]
        starts = [e["ts"] for e in events if "Collective name" in e.get("args", {})]
        first.append(round(min(starts) * 1000))
    late = first.index(max(first))
    (why,) = [why for why in job.reasons if why.rank == late]
    (row,) = why.rows.filter(pl.col("cause") == "unknown").iter_rows(named=True)
    assert row["total_ns"] == pytest.approx(max(first) - sorted(first)[1], rel=0.01)  # since the median rank
    assert row["detail"].startswith("the first collective of its group in the trace")


def test_real_ranks_of_a_ddp_job_waited_as_counted_by_hand() -> None:
    """By the rows of the tables: a collective is a group and a sequence number; the first of each group is left out.

    The root of a broadcast, the first to end, waits for nobody.
    """
    trace = thence.open(DATA / "recording" / "two_ranks")
    gpu = trace.tables.gpu.with_columns(end=pl.col("start") + pl.col("duration")).rows(named=True)
    talks: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
    described, broadcasts = set(), set()
    texts = pl.col("group_name", "collective").cast(pl.String)
    for row in trace.tables.collectives.with_columns(texts).rows(named=True):
        kernel = gpu[row["gpu"]]
        described.add(row["gpu"])
        if row["sequence"] > 1:
            arrivals = talks.setdefault((row["group_name"], row["sequence"]), {})
            arrivals[kernel["rank"]] = (kernel["start"], kernel["end"])
            if row["collective"] == "broadcast":
                broadcasts.add((row["group_name"], row["sequence"]))
    compute = {
        rank: [
            (row["start"], row["end"])
            for at, row in enumerate(gpu)
            if row["rank"] == rank and row["kind"] == "kernel" and at not in described
        ]
        for rank in (0, 1)
    }
    waited = dict.fromkeys((0, 1), 0)
    for key, arrivals in talks.items():
        late = max(arrivals, key=lambda rank: arrivals[rank][0])
        if key in broadcasts and arrivals[1 - late][1] < arrivals[late][1]:
            continue
        start, limit = arrivals[1 - late][0], arrivals[late][0]
        inside = sum(max(min(end, limit) - max(begin, start), 0) for begin, end in compute[1 - late])
        waited[1 - late] += limit - start - inside
    rows = trace.ranks().ranks.sort("rank")
    for rank, wait in enumerate(rows["exposed_wait_ns"] * rows["steps"]):
        assert wait == pytest.approx(waited[rank], rel=0.03)


def test_who_waited_itself_is_not_to_blame() -> None:
    job = RankJob(ranks=16, steps=12, small=4, noise=0.01, plant=Plant("kernel", 5, 0.2), seed=1)
    summaries = job.summaries()
    assert job_of(summaries).stragglers["rank"].to_list() == [5]
    late = lateness(job_collectives(summaries), step_keys(summaries["steps"])).late
    # The other ranks of its small group come late to the collectives of all, because they waited for it.
    others = late.filter(pl.col("rank").is_in([4, 6, 7]), pl.col("wait_ns") > 0.5 * 0.2 * job.step.length)
    assert others.height >= 4
    assert others["own_ns"].sum() < 0.1 * others["wait_ns"].sum()


@pytest.mark.parametrize("slower", [False, True])
def test_who_launches_late_is_late_only_where_its_host_is_slower(slower: bool) -> None:
    """The host of rank 0 is ahead by an hour: whether it would have taken as long, its launches tell."""
    job = RankJob(ranks=2, steps=12, noise=0.0, plant=Plant("backward", 1, 0.2), seed=2)
    summaries = job.summaries()
    rows = summaries["collectives"].sort("rank", "number")
    first, late = (rows.filter(rank=rank) for rank in (0, 1))
    launch = late["launch"] - 3600 * 10**9
    if slower:
        launch -= (late["start"] - first["start"]).clip(lower_bound=0).cum_sum()
    summaries["collectives"] = pl.concat([first.with_columns(launch=launch), late])
    found = job_of(summaries)
    assert found.stragglers["rank"].to_list() == ([1] if slower else [])
    assert (found.not_caused_share("launched_ahead") > 0.1) is not slower
    share = found.ranks.filter(rank=1)["mean_ns"][0] / (0.2 * job.step.length)
    assert share > 0.8 if slower else share < 0.1


def test_summaries_that_are_read_lazily_give_the_same(fsdp: thence.Trace, fsdp_job: Job) -> None:
    whole = fsdp_job
    lazy = job_of({name: frame.lazy() for name, frame in summarise_ranks(fsdp.tables).items()})
    assert_frame_equal(whole.ranks, lazy.ranks)
    assert whole.to_json() == lazy.to_json()


def test_reasons_add_up_to_what_the_rank_caused() -> None:
    plant = Plant("loader", rank=2, share=0.2)
    found = job_of(RankJob(plant=plant, steps=12, seed=5).summaries())
    causes = found.reasons[0].rows.filter(by="cause")
    assert causes["share"].sum() == pytest.approx(1, abs=0.06)
    assert causes["total_ns"].sum() == pytest.approx(found.ranks["wait_caused_ns"][0], rel=0.1)


def test_one_rank_of_several_may_have_waited_for_those_that_are_missing() -> None:
    found = shared(FSDP[0]).ranks()
    share = 100 * found.ranks["exposed_ns"][0] / found.step_ns
    assert found.statement == (
        "no late rank is named: one device is not enough to tell who waits for whom; the trace shows 1 of 4 ranks; "
        f"missing 1-3, for which up to {share:.1f} % of a step may be waits"
    )
    assert found.reasons == ()
