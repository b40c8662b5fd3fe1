"""Who waited for whom, and how long the transfers took, against sums over the constructed truth and raw files."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
import statistics
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

import thence
from collective_jobs import Call, Job, joint
from helpers import DATA, TORCH
from thence.analysis.collectives.answer import collectives
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.attribute import attribute
from thence.model.tables import COLLECTIVES, GPU, PROGRAMS, Tables

if TYPE_CHECKING:
    from pathlib import Path

    import polars as pl


NSIGHT = DATA / "nsight"


def arrivals(rows: pl.DataFrame) -> dict[tuple[int, int], tuple[int, int, int]]:
    """By rank and device: how often it arrived last, how long the others waited then, and summed over devices."""
    columns = ("rank", "device", "last", "waited_ns", "waited_device_ns")
    of_devices = rows.filter(rows["code"].is_null()).select(columns).rows()
    return {(rank, device): tuple(rest) for rank, device, *rest in of_devices}  # type: ignore[misc]


def of_nobody(rows: pl.DataFrame) -> dict[str, int]:
    """The longest waits that no device caused, by code."""
    return dict(rows.filter(rows["code"].is_not_null()).select("code", "waited_ns").rows())


def pipeline(microbatches: int) -> list[Call]:
    """Four stages: each hands every microbatch on as soon as both it and the next stage are ready.

    Stage 2 is slow: only stage 1, which hands over to it, and stage 3, which receives from it, may wait.
    """
    rng, calls = random.Random(5), []
    ready = dict.fromkeys(range(4), 0)
    for _ in range(microbatches):
        for source in range(3):
            arrivals = {stage: ready[stage] for stage in (source, source + 1)}
            end = max(arrivals.values()) + 20_000 + rng.randrange(500)
            calls.append(Call("send", 4096, arrivals, dict.fromkeys(arrivals, end)))
            ready[source] = end + rng.randrange(1_000, 9_000)
            work = 900_000 if source + 1 == 2 else 100_000
            ready[source + 1] = end + work + rng.randrange(1_000, 90_000)
    return calls


def test_stages_of_a_pipeline_wait_for_their_own_neighbours(tmp_path: Path) -> None:
    calls = pipeline(12)
    caused: dict[int, int] = dict.fromkeys(range(4), 0)
    for call in calls:
        (a, first), (b, second) = call.arrivals.items()
        caused[a if first > second else b] += abs(first - second)
    times = thence.open(*Job(calls).write(tmp_path)).collectives("keep")
    assert {rank: ns for (rank, _), (_, ns, _) in arrivals(times.last_arrivals).items()} == caused
    assert max(caused, key=lambda rank: caused[rank]) == 2
    rows = {row["collective"]: row for row in times.by_size.to_dicts()}
    waits = [abs(a - b) for a, b in (call.arrivals.values() for call in calls)]
    moving = [max(call.ends.values()) - max(call.arrivals.values()) for call in calls]
    for kind in ("send", "recv"):
        assert rows[kind]["wait_ns_sum"] == sum(waits)
        assert rows[kind]["transfer_ns_median"] == statistics.median(moving)
        assert rows[kind]["transfer_bus_gbps_max"] == pytest.approx(4 * 4096 / min(moving))


def test_pairs_of_a_pipeline_that_lost_calls_are_refused_not_guessed(tmp_path: Path) -> None:
    """Senders may be several calls ahead, so neither order nor time says which send was lost."""
    calls = pipeline(12)
    times = thence.open(*Job(calls, lost={(0, 0)}).write(tmp_path)).collectives("keep")
    kept = [call for call in calls if 0 not in call.arrivals]
    waits = sum(abs(a - b) for a, b in (call.arrivals.values() for call in kept))
    assert times.by_size.filter(collective="send")["wait_ns_sum"].to_list() == [waits]
    (said,) = [note for note in times.notes if "matched with no other rank" in note]
    assert said.startswith("23 of 71 kernels")
    assert "several ways of pairing them" in said


def test_receivers_wait_for_the_root_and_the_root_for_nobody(tmp_path: Path) -> None:
    """Rank 0 is the root. Twice it is done before the others begin, once it is the last to begin."""
    calls = [
        Call("broadcast", 8, {0: 0, 1: 500_000, 2: 900_000}, {0: 9_000, 1: 510_000, 2: 912_000}),
        Call("broadcast", 8, {0: 1_000_000, 1: 1_400_000, 2: 1_300_000}, {0: 1_010_000, 1: 1_411_000, 2: 1_312_000}),
        Call("broadcast", 8, {0: 2_600_000, 1: 2_000_000, 2: 2_100_000}, {0: 2_610_000, 1: 2_612_000, 2: 2_614_000}),
    ]  # fmt: skip
    times = thence.open(*Job(calls).write(tmp_path)).collectives("keep")
    # Rank 1 had waited for 100 us when rank 2, the one in the middle, arrived.
    root = (1, 500_000, 1_000_000)
    found = arrivals(times.last_arrivals)
    assert found == {(0, 0): root, (1, 0): (0, 0, 0), (2, 0): (0, 0, 0)}
    assert of_nobody(times.last_arrivals) == {"early": 100_000}
    assert sorted(times.instances["wait_ns"]) == [0, 0, 600_000]
    # The longest time that a receiver took once the root and itself were there.
    transfers = [912_000 - 900_000, 1_312_000 - 1_300_000, 2_614_000 - 2_600_000]
    assert times.instances.sort("instance")["transfer_ns"].sort().to_list() == sorted(transfers)


def test_the_late_gpu_inside_one_process_is_named() -> None:
    """One JAX process with three GPUs; device 2 begins 300 us late every time."""
    rows = [
        (device, step * 2_000_000 + (300_000 if device == 2 else 1_000 * device))
        for step in range(6)
        for device in range(3)
    ]
    devices, starts = [d for d, _ in rows], [s for _, s in rows]
    count = len(rows)
    ends = [(start // 2_000_000) * 2_000_000 + 350_000 for start in starts]
    lengths = [end - start for end, start in zip(ends, starts, strict=True)]
    place = {"rank": [0] * count, "device": devices, "start": starts, "duration": lengths}
    tables = Tables(
        gpu=GPU.frame(place | {"kind": ["thunk"] * count, "name": ["all-reduce.1"] * count,
                               "hlo": ["all-reduce.1"] * count, "program": range(count)}),
        programs=PROGRAMS.frame(place | {"program": ["step"] * count, "name": ["step"] * count}),
        collectives=COLLECTIVES.frame({"gpu": range(count), "collective": ["all-reduce"] * count,
                                       "bytes": [8] * count, "group_size": [3] * count}),
    )  # fmt: skip
    found = collectives(attribute(tables), WarmUp.KEEP)
    # Device 0 arrived 1 us before device 1, the one in the middle.
    last = (6, 6 * 299_000, 6 * 2 * 299_000)
    nobody = (0, 0, 0)
    assert arrivals(found.last_arrivals) == {(0, 2): last, (0, 0): nobody, (0, 1): nobody}
    assert of_nobody(found.last_arrivals) == {"early": 6 * 1_000}
    assert found.instances["last_device"].to_list() == [2] * 6
    assert found.instances["transfer_ns"].to_list() == [50_000] * 6


def test_waits_are_those_of_the_true_clock_whatever_the_clocks_say(tmp_path: Path) -> None:
    rng, calls, now = random.Random(8), [], 0
    for _ in range(15):
        now += rng.randrange(900_000, 1_100_000)
        calls.append(joint([now + rng.randrange(200_000) for _ in range(3)], 40_000))
    skew = {1: 7_654_321, 2: -1_000_000_123}
    times = thence.open(*Job(calls, skew=skew).write(tmp_path)).collectives("keep")
    starts = [list(call.arrivals.values()) for call in calls]
    row = times.by_size.row(0, named=True)
    assert row["wait_ns_sum"] == pytest.approx(sum(max(s) - min(s) for s in starts), abs=15 * 2)
    waited = sum(max(s) - one for s in starts for one in s)
    assert row["device_wait_ns_sum"] == pytest.approx(waited, abs=45 * 2)
    assert row["transfer_ns_median"] == 40_000


def raw_calls(paths: list[Path]) -> list[list[tuple[str, int, float, float]]]:
    """For each call of the FSDP ranks: (name, bytes, start, duration in us) of every rank, in launch order."""
    ranks = []
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        found = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
        found.sort(key=lambda event: event["args"]["correlation"])
        ranks.append(
            [
                (
                    e["args"]["Collective name"],
                    4 * min(e["args"]["In msg nelems"], e["args"]["Out msg nelems"]),
                    e["ts"],
                    e["dur"],
                )
                for e in found
            ]
        )
    return [list(call) for call in zip(*ranks, strict=True)]


def test_fsdp_ranks_against_their_raw_arrivals() -> None:
    paths = [TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in range(4)]
    calls = raw_calls(paths)
    times = thence.open(*paths).collectives("keep")
    assert len(calls) == times.instances.height == 28
    last, early, waited = dict.fromkeys(range(4), 0), 0.0, 0.0
    for call in calls:
        starts = [start for *_, start, _ in call]
        last[starts.index(max(starts))] += 1
        early += sorted(starts)[1] - min(starts)
        waited += max(starts) - min(starts)
    rows = times.last_arrivals
    assert {rank: n for (rank, _), (n, *_) in arrivals(rows).items()} == last
    # What the hosts of the waiting ranks had launched ahead is not counted for any rank: tests/cli/test_late_ranks.py.
    assert of_nobody(rows)["early"] == pytest.approx(1000 * early, abs=100)
    assert rows["waited_ns"].sum() == pytest.approx(1000 * waited, abs=100)
    for name, kind in (("_allgather_base", "all-gather"), ("_reduce_scatter_base", "reduce-scatter")):
        for size in {c[0][1] for c in calls if c[0][0] == name}:
            chosen = [call for call in calls if call[0][:2] == (name, size)]
            row = times.by_size.filter(collective=kind, bytes=size).row(0, named=True)
            waits = [max(c[2] for c in call) - min(c[2] for c in call) for call in chosen]
            moving = [max(call, key=lambda c: c[2])[3] for call in chosen]
            assert row["wait_ns_mean"] == pytest.approx(1000 * statistics.mean(waits), rel=1e-6)
            assert row["transfer_ns_median"] == pytest.approx(1000 * statistics.median(moving), abs=1)
            best = 3 * size / min(moving) / 1000
            assert row["transfer_bus_gbps_max"] == pytest.approx(best, rel=1e-6)
            middle = statistics.median(3 * size / us / 1000 for us in moving)
            assert row["transfer_bus_gbps_median"] == pytest.approx(middle, rel=1e-6)


def test_ddp_ranks_against_their_raw_arrivals(tmp_path: Path) -> None:
    """Two ranks of DistributedDataParallel in one export of nsys: launch by launch of NCCL's kernels."""
    database = tmp_path / "ddp.sqlite"
    database.write_bytes(gzip.decompress((NSIGHT / "torch_ddp.sqlite.gz").read_bytes()))
    query = (
        "select k.globalPid, k.start, k.end, s.value from CUPTI_ACTIVITY_KIND_KERNEL k "
        "join StringIds s on s.id = k.shortName where s.value like 'nccl%AllReduce%' order by k.start"
    )
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(query).fetchall()
    ranks: dict[int, list[tuple[int, int]]] = {}
    for process, start, end, _ in rows:
        ranks.setdefault(process, []).append((start, end))
    calls = list(zip(*ranks.values(), strict=True))
    waits = [abs(a[0] - b[0]) for a, b in calls]
    moving = [end - start for start, end in (max(pair) for pair in calls)]
    row = (
        thence.open(NSIGHT / "torch_ddp.sqlite.gz")
        .collectives("keep")
        .by_size.filter(collective="all-reduce")
        .row(0, named=True)
    )
    assert row["instances"] == row["transfers"] == len(calls)
    assert (row["wait_ns_sum"], row["wait_ns_max"]) == (sum(waits), max(waits))
    assert row["transfer_ns_median"] == statistics.median(moving)
    assert row["transfer_ns_min"] == min(moving)


def test_where_participants_are_missing_transfers_are_unknown() -> None:
    two = [TORCH / f"torch_fsdp_rank{rank}.json.gz" for rank in (0, 2)]
    times = thence.open(*two).collectives()
    assert times.by_size["transfer_ns_median"].null_count() == times.by_size.height
    assert times.by_size["wait_ns_mean"].null_count() == 0
    assert any("transfers are unknown" in note for note in times.notes)
    alone = thence.open(two[0]).collectives()
    assert alone.by_size["wait_ns_mean"].null_count() == alone.by_size.height
    assert any("waits and transfers are unknown" in note for note in alone.notes)


def test_who_arrived_last_is_told_only_if_no_missing_rank_may_have(tmp_path: Path) -> None:
    """Rank 1 comes 500 us after the first, rank 2 20 us after it; all end 20 us after rank 1 came."""
    begins = [1_000_000 * number for number in range(5)]
    calls = [joint([b, b + 500_000, b + 20_000], 20_000, sequence=number + 2) for number, b in enumerate(begins)]
    paths = Job(calls).write(tmp_path)
    # Rank 2 is missing: if it came after rank 1, then by 20 us at most.
    found = thence.open(*paths[:2]).collectives("keep")
    assert arrivals(found.last_arrivals) == {(0, 0): (0, 0, 0), (1, 0): (5, 5 * 500_000, 5 * 500_000)}
    assert of_nobody(found.last_arrivals) == {}
    assert found.instances["last_rank"].to_list() == [1] * 5
    # Rank 1 is missing: rank 2 is the last of those that are shown, and waited for 480 us itself. All that is known is
    # that nobody waited for longer than the kernel of rank 0 ran.
    found = thence.open(paths[0], paths[2]).collectives("keep")
    assert arrivals(found.last_arrivals) == {(0, 0): (0, 0, 0), (2, 0): (0, 0, 0)}
    assert of_nobody(found.last_arrivals) == {"not_all_shown": 5 * 520_000}
    assert found.instances["last_rank"].to_list() == [None] * 5
    assert found.instances["transfer_ns"].to_list() == [None] * 5


def recorded(job: str) -> list[Path]:
    """The ranks of a job recorded on four GPUs, with what launched its kernels."""
    return [TORCH / "waits" / f"{job}_rank{rank}.json.gz" for rank in range(4)]


def kernels_of(path: Path, **wanted: object) -> list[tuple[float, float]]:
    """Start and end in us of a file's NCCL kernels with these arguments, in launch order."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    found = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    found = [e for e in found if all(e["args"].get(name) == is_ for name, is_ in wanted.items())]
    found.sort(key=lambda event: event["args"]["correlation"])
    return [(e["ts"], e["ts"] + e["dur"]) for e in found]


def test_a_recorded_pipeline_waits_for_its_slow_stage() -> None:
    """The k-th send of a pair is its k-th receive; a send that ended before did not wait."""
    paths = recorded("pipeline")
    caused = dict.fromkeys(range(4), 0.0)
    for source in range(3):
        sends = kernels_of(paths[source], **{"Dst Rank": source + 1})
        receives = kernels_of(paths[source + 1], **{"Src Rank": source})
        assert len(sends) == len(receives) == 12
        for (sent, done), (received, _) in zip(sends, receives, strict=True):
            if sent > received:
                caused[source] += sent - received
            elif done >= received:
                caused[source + 1] += received - sent
    times = thence.open(*paths).collectives("keep")
    found = {rank: ns for (rank, _), (_, ns, _) in arrivals(times.last_arrivals).items()}
    assert found == {rank: pytest.approx(1000 * us, abs=100) for rank, us in caused.items()}
    assert max(found, key=lambda rank: found[rank]) == 2


def test_recorded_groups_lose_the_call_that_made_their_communicator() -> None:
    """Two pairs of ranks, each with six calls, the first of which took about 0.28 s on the host; then all four."""
    times = thence.open(*recorded("group")).collectives()
    sizes = times.by_size.select("group_size", "count").rows()
    assert sizes == [(2, 20), (4, 4)]
    first = [kernels_of(path, **{"Group size": 2})[0] for path in recorded("group")]
    taken = sum(end - start for start, end in first)
    assert times.left_out["duration_ns"] == pytest.approx(1000 * taken, abs=10)
    assert "the first call of 2 communicators, 4 kernels" in times.statement
