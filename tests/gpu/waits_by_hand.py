"""A part of waits.py: who waited for whom, from the raw events of each job alone, beside what thence says.

Collectives of all ranks are joined by their ends, which are the same for all; the ranks share one host and its
clock. Broadcasts come from rank 0. The k-th send of a pair is its k-th receive; the parts of a batch are the ops
since the range ``nccl:coalesced`` before.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import thence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TOGETHER_US = 100.0
"""Ends of one collective are at most so far apart, also where two groups share the GPUs."""
TOLERANCE_US = 1.0


@dataclass(frozen=True)
class Kernel:
    """A kernel of NCCL; times in us."""

    rank: int
    start: float
    end: float
    about: dict[str, Any] = field(default_factory=dict)


@dataclass
class Waits:
    """What was found, us: waits of the instances, transfers that are known, and by rank the waits when it came last.

    The latter count from the arrival of the median rank, except for sends and receives.
    """

    waits: list[float] = field(default_factory=list)
    transfers: list[float] = field(default_factory=list)
    caused: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    last: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, by_rank: Iterable[tuple[float, int]], transfer: float | None, most: float = float("inf")) -> None:
        """One instance: each wait with the rank that it was for, and the time since the median rank arrived."""
        wait, whom = max(by_rank)
        self.waits.append(max(wait, 0.0))
        if wait > 0:
            self.caused[whom] += min(wait, most)
            self.last[whom] += 1
        if transfer is not None and transfer > 0:
            self.transfers.append(transfer)


def _events(path: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _kernels(rank: int, events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """The kernels of NCCL in the order of their launch."""
    found = [e for e in events if e.get("cat") == "kernel" and e["name"].startswith("nccl")]
    found.sort(key=lambda e: e["args"]["correlation"])
    return [Kernel(rank, e["ts"], e["ts"] + e["dur"], e["args"]) for e in found]


def _together(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """The kernels of one group that end together."""
    instances: list[list[Kernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.end):
        ours = instances[-1] if instances else []
        same = ours and kernel.end - ours[0].end < TOGETHER_US
        if same and kernel.rank not in {other.rank for other in ours}:
            ours.append(kernel)
        else:
            instances.append([kernel])
    return instances


def _joint(kernels: list[Kernel], result: Waits) -> None:
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        about = kernel.about
        groups[about["Process Group Name"], about["Process Group Ranks"]].append(kernel)
    for members in groups.values():
        for instance in _together(members):
            last = max(instance, key=lambda kernel: kernel.start)
            if len(instance) > 1:
                whole = len(instance) == last.about["Group size"]
                waits = [(last.start - kernel.start, last.rank) for kernel in instance]
                since = last.start - _median(instance)
                if whole:
                    result.add(waits, last.end - last.start, since)
                else:  # a rank that is not there may have been the last one
                    result.waits.append(max(wait for wait, _ in waits))


def _broadcasts(kernels: list[Kernel], result: Waits) -> None:
    by_rank: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        by_rank[kernel.rank].append(kernel)
    for root, *others in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True):
        waits = [(0.0 if other.end < root.start else root.start - other.start, root.rank) for other in others]
        since = max(root.start - _median([root, *others]), 0.0)
        moved = max(other.end - max(root.start, other.start) for other in others)
        result.add(waits, moved, since)


def _median(instance: Sequence[Kernel]) -> float:
    """When the kernel in the middle began, of two the first."""
    return sorted(kernel.start for kernel in instance)[(len(instance) - 1) // 2]


def _pairs(kernels: list[Kernel], result: Waits) -> None:
    messages: dict[tuple[int, int], list[list[Kernel]]] = defaultdict(lambda: [[], []])
    for kernel in kernels:
        if kernel.about["Collective name"] == "send":
            messages[kernel.rank, kernel.about["Dst Rank"]][0].append(kernel)
        else:
            messages[kernel.about["Src Rank"], kernel.rank][1].append(kernel)
    for sends, receives in messages.values():
        for pair in zip(sends, receives, strict=True):
            first, last = sorted(pair, key=lambda kernel: kernel.start)
            wait = 0.0 if first.end < last.start else last.start - first.start
            result.add([(wait, last.rank)], max(kernel.end - last.start for kernel in pair))


def _batches(by_rank: dict[int, list[dict[str, Any]]], result: Waits) -> None:
    """Kernels that do several sends and receives; each waits for the last other end of its messages."""
    ends: dict[tuple[str, int, int], list[Kernel]] = defaultdict(list)
    batches = []
    for rank, events in by_rank.items():
        kernels = {kernel.about["correlation"]: kernel for kernel in _kernels(rank, events)}
        launches = [e for e in events if e.get("args", {}).get("correlation") in kernels]
        launches = [e for e in launches if e["cat"].startswith("cuda")]
        ops = [e for e in events if e["name"] == "record_param_comms"]
        ops = [e for e in ops if e["args"]["Collective name"] in ("send", "recv")]
        ranges = [e for e in events if e["name"] == "nccl:coalesced" and e["cat"] == "user_annotation"]
        before = 0.0
        for around in sorted(ranges, key=lambda e: e["ts"]):
            (launch,) = [e for e in launches if 0 <= e["ts"] - around["ts"] < around["dur"]]
            kernel = kernels[launch["args"]["correlation"]]
            parts = []
            for op in sorted((e for e in ops if before < e["ts"] < around["ts"]), key=lambda e: e["ts"]):
                kind = op["args"]["Collective name"]
                peer = op["args"]["Dst Rank" if kind == "send" else "Src Rank"]
                pair = (rank, peer) if kind == "send" else (peer, rank)
                other = ("recv" if kind == "send" else "send", *pair)
                parts.append((other, len(ends[kind, *pair])))
                ends[kind, *pair].append(kernel)
            before = around["ts"]
            batches.append((kernel, parts))
    for kernel, parts in batches:
        others = [ends[other][number] for other, number in parts]
        there = [other for other in others if other.start <= kernel.end]
        last = max(there, key=lambda other: other.start, default=kernel)
        arrival = max(kernel.start, last.start)
        result.add(
            [(last.start - kernel.start, last.rank)], kernel.end - arrival if len(there) == len(others) else None
        )


def by_hand(paths: Sequence[Path]) -> Waits:
    """Waits and transfers of a job from its raw events, a file per rank."""
    result = Waits()
    events = {rank: _events(path) for rank, path in enumerate(paths)}
    kernels = [kernel for rank in events for kernel in _kernels(rank, events[rank])]
    if any("Collective name" not in kernel.about for kernel in kernels):
        _batches(events, result)
        return result
    kinds: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        kind = kernel.about["Collective name"]
        kinds["pair" if kind in ("send", "recv") else kind].append(kernel)
    ways = {"pair": _pairs, "broadcast": _broadcasts}
    for kind, chosen in kinds.items():
        ways.get(kind, _joint)(chosen, result)
    return result


def by_thence(paths: Sequence[Path]) -> Waits:
    """The same as thence says."""
    times = thence.open(*paths).collectives("keep", late=False)
    result = Waits()
    seen = times.instances
    result.waits = [ns / 1e3 for ns in seen["wait_ns"].drop_nulls()]
    result.transfers = [ns / 1e3 for ns in seen["transfer_ns"].drop_nulls()]
    of_ranks = times.last_arrivals.filter(times.last_arrivals["code"].is_null())
    for rank, last, caused in of_ranks.select("rank", "last", "waited_ns").iter_rows():
        result.last[rank] += last
        result.caused[rank] += caused / 1e3
    return result


def _far_apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two lists, once sorted; infinite where they differ in length."""
    if len(ours) != len(theirs):
        return float("inf")
    pairs = zip(sorted(ours), sorted(theirs), strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def check(folder: Path, jobs: Iterable[str]) -> bool:
    """Prints both for each job of a folder; returns whether all are there and agree within `TOLERANCE_US`."""
    agree = True
    print(f"{'job':10}{'':12}{'instances':>10}{'waits us':>12}{'transfers':>10}{'us':>11}  late: rank times us")
    for job in jobs:
        paths = sorted(folder.glob(f"{job}_rank*.json.gz"))
        if not paths:
            print(f"{job:10}not there")
            agree = False
            continue
        hand, said = by_hand(paths), by_thence(paths)
        for name, found in (("by hand", hand), ("thence", said)):
            late = ", ".join(
                f"{rank} {found.last[rank]} {found.caused[rank]:.1f}" for rank in sorted(found.last) if found.last[rank]
            )
            print(
                f"{job:10}{name:12}{len(found.waits):>10}{sum(found.waits):>12.1f}"
                f"{len(found.transfers):>10}{sum(found.transfers):>11.1f}  {late}"
            )
        apart = max(
            _far_apart(hand.waits, said.waits),
            _far_apart(hand.transfers, said.transfers),
            *(abs(hand.caused[rank] - said.caused[rank]) for rank in range(len(paths))),
        )
        agree &= apart <= TOLERANCE_US
        verdict = "agree" if apart <= TOLERANCE_US else "DIFFER"
        print(f"{'':10}{verdict}: largest difference {apart:.3f} us")
    return agree
