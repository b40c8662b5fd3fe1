"""Batched sends and receives: what one kernel moved and whom it waited for, against raw events paired by hand."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

import thence
from batched_jobs import batch, event, job
from helpers import TORCH

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RANGE = "nccl:coalesced"
Batch = tuple[float, float, list[tuple[str, int, int]]]
"""Start and end (us) of a kernel, and its parts: kind, peer and bytes."""


def raw_batches(path: Path) -> list[Batch]:
    """The batches of a file, by hand from its events."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    kernels = {
        e["args"]["correlation"]: e
        for e in events
        if e["cat"] == "kernel" and e["name"].startswith("ncclDevKernel_SendRecv")
    }
    ops = [e for e in events if e["name"] == "record_param_comms"]
    ops = [e for e in ops if e["args"]["Collective name"] in ("send", "recv")]
    launches = [e for e in events if e.get("args", {}).get("correlation") in kernels]
    launches = [e for e in launches if e["cat"] != "kernel"]
    found, since = [], 0.0
    for around in sorted((e for e in events if e["name"] == RANGE), key=lambda e: e["ts"]):
        (launch,) = [e for e in launches if 0 <= e["ts"] - around["ts"] < around["dur"]]
        parts = [e["args"] for e in ops if since < e["ts"] < around["ts"]]
        since = around["ts"]
        kernel = kernels[launch["args"]["correlation"]]
        moved = [(p["Collective name"], p.get("Dst Rank", p.get("Src Rank")), 4 * p["In msg nelems"]) for p in parts]
        found.append((kernel["ts"], kernel["ts"] + kernel["dur"], moved))
    return found


def expected_waits(ranks: Sequence[list[Batch]]) -> tuple[dict[int, list[float]], dict[int, float], list[float]]:
    """Waits of the kernels by bytes, waits by the rank that caused them, and the transfers; us.

    The k-th send of a pair is its k-th receive. A kernel waits for the last other end of its messages, but for none
    that began after it had ended.
    """
    ends: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for rank, batches in enumerate(ranks):
        for start, end, parts in batches:
            for kind, peer, _ in parts:
                pair = (rank, peer) if kind == "send" else (peer, rank)
                ends[kind, *pair].append((start, end))
    waits: dict[int, list[float]] = defaultdict(list)
    caused: dict[int, float] = dict.fromkeys(range(len(ranks)), 0.0)
    transfers: list[float] = []
    seen: dict[tuple[str, int, int], int] = defaultdict(int)
    for rank, batches in enumerate(ranks):
        for start, end, parts in batches:
            others = []
            for kind, peer, _ in parts:
                pair = (rank, peer) if kind == "send" else (peer, rank)
                other = ("recv" if kind == "send" else "send", *pair)
                others.append((ends[other][seen[kind, *pair]][0], peer))
                seen[kind, *pair] += 1
            last, whom = max([(at, peer) for at, peer in others if at <= end], default=(start, rank))
            wait = max(0.0, last - start)
            waits[sum(size for *_, size in parts)].append(wait)
            if wait:
                caused[whom] += wait
            if all(at <= end for at, _ in others):
                transfers.append(end - max(start, last))
    return waits, caused, transfers


def test_a_recorded_schedule_waits_for_its_slow_stage() -> None:
    """The 1F1B schedule of torch.distributed.pipelining on four GPUs; stage 2 has twice the layers."""
    paths = [TORCH / "waits" / f"schedule_rank{rank}.json.gz" for rank in range(4)]
    ranks = [raw_batches(path) for path in paths]
    waits, caused, transfers = expected_waits(ranks)
    times = thence.open(*paths).collectives("keep")
    assert {len(parts) for rank in ranks for *_, parts in rank} == {1, 2}
    rows = {row["bytes"]: row for row in times.by_size.to_dicts()}
    assert rows.keys() == waits.keys() == {1 << 20, 2 << 20}
    for size, row in rows.items():
        assert row["collective"] == "send-recv"
        assert row["count"] == row["instances"] == len(waits[size])
        assert row["wait_ns_sum"] == pytest.approx(1000 * sum(waits[size]), abs=200)
        assert row["wait_ns_max"] == pytest.approx(1000 * max(waits[size]), abs=5)
    found = dict(times.last_arrivals.select("rank", "waited_ns").rows())
    assert found == {rank: pytest.approx(1000 * us, abs=200) for rank, us in caused.items()}
    assert max(found, key=lambda rank: found[rank]) == 2
    ns = sorted(times.instances["transfer_ns"].drop_nulls().to_list())
    assert ns == pytest.approx(sorted(1000 * us for us in transfers), abs=5)
    assert len(ns) < len(times.instances)


RING = (1, 3, 6)


def ring(folder: Path, last: int = 3) -> list[Path]:
    """Three ranks of a larger job pass tensors around; in each round another one comes last, by 100 to 300 us."""
    ranks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in RING}
    for number in range(last):
        late = 100.0 * (number + 1)
        base = 1000.0 * (number + 1)
        for place, rank in enumerate(RING):
            parts = [("send", RING[(place + 1) % 3]), ("recv", RING[(place - 1) % 3])]
            start = base + (late if place == number % 3 else float(place))
            ranks[rank] += batch(number, start, base + late + 20, parts, RING)
    return job(folder, ranks)


def test_each_kernel_of_a_ring_waits_for_its_last_neighbour(tmp_path: Path) -> None:
    times = thence.open(*ring(tmp_path)).collectives("keep")
    (row,) = times.by_size.to_dicts()
    assert (row["collective"], row["bytes"], row["count"]) == ("send-recv", 8000, 9)
    # In round n the other two wait until it comes: its lateness less their own, which is their place.
    waits = {n: [100_000 * (n + 1) - 1000 * p for p in range(3) if p != n] for n in range(3)}
    assert row["wait_ns_sum"] == row["device_wait_ns_sum"] == sum(map(sum, waits.values()))
    caused = dict(times.last_arrivals.select("rank", "waited_ns").rows())
    assert caused == {rank: sum(waits[place]) for place, rank in enumerate(RING)}
    assert times.instances["transfer_ns"].to_list() == [20_000] * 9
    assert times.instances["devices"].to_list() == [3] * 9


def test_of_a_neighbour_that_the_trace_lacks_nothing_is_claimed(tmp_path: Path) -> None:
    """Waits are those for the neighbour that is there, transfers are unknown; a rank alone knows neither."""
    times = thence.open(*ring(tmp_path)[:2]).collectives("keep")
    assert times.instances["transfer_ns"].null_count() == times.instances.height == 6
    waits = [100_000 - 1000, 200_000, 1000]
    assert times.by_size["wait_ns_sum"].to_list() == [sum(waits)]
    assert any("transfers are unknown" in note for note in times.notes)


def test_a_rank_alone_has_sizes_only(tmp_path: Path) -> None:
    times = thence.open(ring(tmp_path)[0]).collectives("keep")
    assert times.by_size["bytes"].to_list() == [8000]
    assert times.by_size["wait_ns_sum"].to_list() == [None]


def test_a_plain_send_that_a_batch_receives(tmp_path: Path) -> None:
    """It waits like a batch: for the other end of its message."""
    op, _, launch, kernel = batch(1, 1000.0, 1500.0, [("send", 3)], (1, 3))
    around = op | {"dur": 30.0}
    plain = event("user_annotation", "nccl:send 0->1", op["ts"] + 1, 20.0)
    other = batch(1, 1400.0, 1500.0, [("recv", 1)], (1, 3))
    times = thence.open(*job(tmp_path, {1: [around, plain, launch, kernel], 3: other}))
    rows = times.collectives("keep").by_size
    found = {row["collective"]: row for row in rows.to_dicts()}
    assert {kind: row["wait_ns_sum"] for kind, row in found.items()} == {"send": 400_000, "send-recv": 0}


def test_a_part_of_the_trace_keeps_the_parts(tmp_path: Path) -> None:
    trace = thence.open(*ring(tmp_path))
    part = trace.select(ranks=[RING[1], RING[2]])
    assert part.tables.collective_parts.height == 12
    assert part.collectives("keep").by_size["bytes"].to_list() == [8000]
    names = part.tables.host["name"].gather(part.tables.collective_parts["host"]).unique()
    assert names.to_list() == ["record_param_comms"]
