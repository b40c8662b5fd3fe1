"""Which kernels are one collective, on jobs whose truth is known."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import polars as pl

import thence
from collective_jobs import Call, Job, joint
from thence.analysis.collectives.instances import collective_instances, unmatched_reasons
from thence.attribution.attribute import attribute
from thence.model.tables import COLLECTIVES, GPU, PROGRAMS, Tables

if TYPE_CHECKING:
    from pathlib import Path

BIG, SMALL = 7_350_000, 4_200_000  # elements of 4 bytes: 29.4 MB and 16.8 MB


def training(ranks: int, steps: int, seed: int = 0) -> list[Call]:
    """Steps of three all-reduces, 16.8 MB, 29.4 MB and 4 kB; ranks arrive up to 300 us apart."""
    rng, calls, now = random.Random(seed), [], 0
    for _ in range(steps):
        for elements in (SMALL, BIG, 1000):
            now += rng.randrange(900_000, 1_100_000)
            arrivals = [now + rng.randrange(300_000) for _ in range(ranks)]
            calls.append(joint(arrivals, 100_000, elements))
    return calls


def instances(job: Job, folder: Path) -> pl.DataFrame:
    """Matched kernels with the number of the call that each is, by its true start."""
    trace = thence.open(*job.write(folder))
    truth = {
        (rank, start + job.skew.get(rank, 0)): number
        for number, call in enumerate(job.calls)
        for rank, start in call.arrivals.items()
    }
    rows = collective_instances(trace.tables).rows
    number = [truth[rank, start] for rank, start in rows.select("rank", "start").rows()]
    return rows.with_columns(call=pl.Series(number))


def wrong(rows: pl.DataFrame) -> int:
    """Instances that put different calls together."""
    return rows.group_by("instance").agg(pl.col("call").n_unique()).filter(pl.col("call") > 1).height


def test_a_rank_whose_profile_begins_one_call_later(tmp_path: Path) -> None:
    """Counted from the start, its 29.4 MB would be paired with 16.8 MB of the others."""
    job = Job(training(4, 6), lost={(1, 0)}, skew={1: 3_000_000})
    rows = instances(job, tmp_path)
    assert wrong(rows) == 0
    assert rows.filter(rank=1)["matched"].to_list() == [4] * 17
    assert rows.filter(call=0)["matched"].to_list() == [3] * 3
    sizes = rows.group_by("instance").agg(pl.col("bytes").n_unique())
    assert sizes["bytes"].to_list() == [1] * sizes.height


def test_calls_lost_in_the_middle(tmp_path: Path) -> None:
    lost = {(0, 4), (2, 9), (2, 10)}
    rows = instances(Job(training(3, 6), lost=lost, skew={2: -(10**9)}), tmp_path)
    assert wrong(rows) == 0
    assert rows["unmatched"].null_count() == rows.height
    for number in range(18):
        missing = sum(call == number for _, call in lost)
        assert rows.filter(call=number)["matched"].to_list() == [3 - missing] * (3 - missing)


def test_a_call_that_only_one_profile_holds_has_no_partner(tmp_path: Path) -> None:
    rows = instances(Job(training(2, 4), lost={(1, 0)}), tmp_path)
    assert rows.filter(call=0).select("rank", "unmatched").rows() == [(0, "no_partner")]
    (said,) = unmatched_reasons(rows)
    assert said.startswith("1 of 23 kernels are matched with no other rank")


def test_steps_that_nothing_tells_apart_are_refused_with_the_reason(tmp_path: Path) -> None:
    calls = [joint([number * 1_000_000, number * 1_000_000 + 50_000], 9_000) for number in range(20)]
    trace = thence.open(*Job(calls, lost={(1, 0)}, skew={1: 400_000}).write(tmp_path))
    rows = collective_instances(trace.tables).rows
    assert set(rows["unmatched"]) == {"ambiguous"}
    times = trace.collectives()
    assert times.by_size["wait_ns_mean"].to_list() == [None]
    assert times.last_arrivals.is_empty()
    assert any("several ways of pairing them fit equally well" in note for note in times.notes)
    assert trace.alignment.matched == 0


def test_sequence_numbers_need_no_times(tmp_path: Path) -> None:
    calls = [
        joint([number * 1_000_000, number * 1_000_000 + 50_000], 9_000, sequence=number + 40) for number in range(20)
    ]
    rows = instances(Job(calls, lost={(1, 0)}, skew={1: 400_000}), tmp_path)
    assert wrong(rows) == 0
    assert rows.filter(rank=1)["matched"].to_list() == [2] * 19


def test_groups_are_matched_apart(tmp_path: Path) -> None:
    rng, calls, now = random.Random(2), [], 0
    for _ in range(8):
        for group, members in (("a", (0, 1)), ("b", (2, 3))):
            now += rng.randrange(900_000, 1_100_000)
            arrivals = {rank: now + rng.randrange(90_000) for rank in members}
            ends = dict.fromkeys(members, max(arrivals.values()) + 50_000)
            calls.append(Call("allreduce", 1000, arrivals, ends, group))
    rows = instances(Job(calls), tmp_path)
    assert wrong(rows) == 0
    assert rows["matched"].to_list() == [2] * 32


def executions(ends: dict[int, list[int]]) -> Tables:
    """Ranks of one device that run program "step", each execution with one all-reduce of 10 us."""
    rows = [(rank, end) for rank, times in ends.items() for end in times]
    count = len(rows)
    place = {
        "rank": [rank for rank, _ in rows],
        "device": [0] * count,
        "start": [end - 10_000 for _, end in rows],
        "duration": [10_000] * count,
    }
    name = ["all-reduce.1"] * count
    of_kernel = {"kind": ["thunk"] * count, "name": name, "hlo": name, "program": range(count)}
    described = {"gpu": range(count), "collective": ["all-reduce"] * count}
    return Tables(
        gpu=GPU.frame(place | of_kernel),
        programs=PROGRAMS.frame(place | {"program": ["step"] * count, "name": ["step"] * count}),
        collectives=COLLECTIVES.frame(described | {"group_size": [2] * count}),
    )


def test_a_process_whose_profile_begins_one_execution_later() -> None:
    rng, ends, now = random.Random(3), [], 0
    for _ in range(9):
        now += rng.randrange(9_000_000, 11_000_000)
        ends.append(now)
    tables = executions({0: ends, 1: [end + 70_000_000 for end in ends[1:]]})
    rows = collective_instances(attribute(tables)).rows
    numbers = dict(rows.filter(rank=0).select("start", "instance").rows())
    for start, instance in rows.filter(rank=1).select("start", "instance").rows():
        assert numbers[start - 70_000_000] == instance
    assert rows.filter(rank=0)["unmatched"].to_list() == ["no_partner"] + [None] * 8


def test_the_peer_of_a_group_with_a_number_that_no_rank_has() -> None:
    """torch.profiler gives the peer's place in the group's list of ranks."""
    tables = Tables(
        gpu=GPU.frame(
            {
                "rank": [3, 3], "device": [0, 0], "stream": [7, 7], "kind": ["kernel"] * 2,
                "name": ["ncclDevKernel_SendRecv"] * 2, "start": [0, 100], "duration": [50, 50],
            }
        ),
        collectives=COLLECTIVES.frame(
            {
                "gpu": [0, 1], "collective": ["recv"] * 2, "group_size": [2] * 2,
                "group_ranks": ["[3, 99999999999999999999]", "[3, 5]"], "source_rank": [1, 1],
            }
        ),
    )  # fmt: skip
    rows = collective_instances(attribute(tables)).rows
    assert rows.sort("start")["source_rank"].to_list() == [None, 5]
