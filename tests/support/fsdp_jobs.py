"""Jobs of many steps as Kineto JSON, made of the first recorded step of four real FSDP2 ranks, with planted delays.

A step is the recorded step of all four ranks, as they ran it together. (In the second recorded step, hosts had launched
work ahead that waited for the first one, and waits for nothing if it is placed behind another step.) From step to step,
the recordings go round the ranks (rank 0 runs that of rank 0, then of rank 1 ...), so that no rank is later than
another on average. A step begins when the one before has ended
on all ranks.

A planted delay is a sleep of a host before it launches the last reduce-scatter of the step, during which nothing else
communicates. The kernel then begins ``delay`` after that of the last recorded rank; it ends on all ranks when the last
rank has arrived and the data were moved, and what follows comes later on all ranks.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from helpers import FSDP
from thence.model.collectives import KINETO_KEYS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

Event = dict[str, Any]
HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
CALLS = ("cuda_runtime", "cuda_driver")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
IDS = ("correlation", "External id", "Sequence number")
KEPT = (*IDS, *KINETO_KEYS.values(), "Fwd thread id", "device", "stream", "grid", "block", "bytes")
"""Arguments of events that are kept: the others are not read."""
LAUNCH = 10.0
"""us from a launch to the begin of its kernel on an idle GPU."""
PAUSE = 100.0
"""us between two steps."""


@cache
def recorded() -> list[list[Event]]:
    """Events of the step on every recorded rank; times in us from its begin on the first rank that began."""
    ranks = [[e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if "ts" in e] for path in FSDP]
    marked = [
        sorted((e for e in events if e["name"].startswith("ProfilerStep#")), key=lambda e: e["ts"]) for events in ranks
    ]
    begin = min(steps[0]["ts"] for steps in marked)
    return [
        [e | {"ts": e["ts"] - begin} for e in _of_step(events, steps[0])]
        for events, steps in zip(ranks, marked, strict=True)
    ]


def _of_step(events: list[Event], step: Event) -> list[Event]:
    """The step itself, what its host did in it but for operators that call nothing of CUDA, and what it launched."""
    end = step["ts"] + step["dur"]
    host = [e for e in events if e.get("cat") in HOST and step["ts"] <= e["ts"] < end]
    calls = defaultdict(list)
    for event in sorted((e for e in host if e["cat"] in CALLS), key=lambda e: e["ts"]):
        calls[event["tid"]].append(event["ts"])
    host = [e for e in host if e["cat"] != "cpu_op" or _called(e, calls[e["tid"]])]
    launched = {e["args"]["correlation"] for e in host if "correlation" in e.get("args", {})}
    gpu = [e for e in events if e.get("cat") in GPU and e["args"]["correlation"] in launched]
    return [*host, *gpu]


def _called(op: Event, calls: list[float]) -> bool:
    """Whether one of the calls, in order, is in an operator."""
    first = bisect_left(calls, op["ts"])
    return first < len(calls) and calls[first] < op["ts"] + op["dur"]


def collectives(events: list[Event]) -> list[Event]:
    """The kernels of collectives, in order of time."""
    found = [e for e in events if e["cat"] == "kernel" and "Collective name" in e["args"]]
    return sorted(found, key=lambda e: e["ts"])


@dataclass(frozen=True)
class FsdpJob:
    """A job of four ranks.

    Attributes:
        delays: us by which a rank is late in every step, by rank.
        steps: how many.
        since: first step with delays.
    """

    delays: Mapping[int, float] = field(default_factory=dict)
    steps: int = 10
    since: int = 0

    def write(self, folder: Path, missing: Collection[int] = ()) -> list[Path]:
        """A file for each rank that is not missing."""
        events: list[list[Event]] = [[] for _ in FSDP]
        begin = 1_000_000.0
        for number in range(self.steps):
            ranks = self._step(number)
            for rank, ours in enumerate(ranks):
                placed = [_placed(e, rank, number, begin) for e in ours]
                scheduled = collectives(placed)
                for turn, event in enumerate(scheduled):  # as newer versions of PyTorch write it
                    event["args"]["Seq"] = 2 + number * len(scheduled) + turn
                events[rank] += placed
            begin += PAUSE + max(e["ts"] + e["dur"] for ours in ranks for e in ours)
        paths = []
        for rank, ours in enumerate(events):
            if rank in missing:
                continue
            info = {"backend": "nccl", "rank": rank, "world_size": len(FSDP)}
            path = folder / f"rank{rank}.json"
            document = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": ours}
            path.write_text(json.dumps(document))
            paths.append(path)
        return paths

    def _step(self, number: int) -> list[list[Event]]:
        """The events of every rank in a step, with the delays."""
        count = len(FSDP)
        ranks = [recorded()[(rank + number) % count] for rank in range(count)]
        if not self.delays or number < self.since:
            return ranks
        scatters = [collectives(events)[-1] for events in ranks]
        last = max(e["ts"] for e in scatters)
        later = max(self.delays.values())
        return [
            _late(events, scatter, last + self.delays[rank], later)
            if rank in self.delays else _waiting(events, scatter, later)
            for rank, (events, scatter) in enumerate(zip(ranks, scatters, strict=True))
        ]  # fmt: skip


def _waiting(events: list[Event], scatter: Event, later: float) -> list[Event]:
    """What a rank does whose reduce-scatter ends ``later``: what comes after it comes later, too."""
    end = scatter["ts"] + scatter["dur"]
    result = []
    for event in events:
        if event is scatter or event["ts"] < end < event["ts"] + event["dur"]:
            result.append(event | {"dur": event["dur"] + later})
        else:
            after = event["ts"] >= (scatter["ts"] if event["cat"] in GPU else end)
            result.append(event | {"ts": event["ts"] + later * after})
    return result


def _late(events: list[Event], scatter: Event, arrival: float, later: float) -> list[Event]:
    """What a rank does whose host sleeps before its reduce-scatter, which begins at ``arrival`` and ends ``later``."""
    number = scatter["args"]["correlation"]
    launches = {e["args"]["correlation"]: e for e in events if e["cat"] in HOST and "correlation" in e.get("args", {})}
    asleep = launches[number]["ts"]
    sleep = arrival - LAUNCH - asleep
    result = []
    for event in events:
        if event["cat"] in GPU:
            continue
        opened = event["ts"] < asleep < event["ts"] + event["dur"]
        after = event["ts"] >= asleep
        result.append(event | {"ts": event["ts"] + sleep * after, "dur": event["dur"] + sleep * opened})
    shift = 0.0
    for event in sorted((e for e in events if e["cat"] in GPU), key=lambda e: e["ts"]):
        if event is scatter:
            end = event["ts"] + event["dur"] + later
            result.append(event | {"ts": arrival, "dur": end - arrival})
            shift = later
        elif event["ts"] > scatter["ts"]:
            launched = launches[event["args"]["correlation"]]["ts"]
            launched += sleep * (launched >= asleep)
            shift = max(shift, launched + LAUNCH - event["ts"])
            result.append(event | {"ts": event["ts"] + shift})
        else:
            result.append(event)
    return result


def _placed(event: Event, rank: int, number: int, begin: float) -> Event:
    """An event in a step of a rank: on its device and in its process, with ids of its own."""
    args = {key: value for key, value in event.get("args", {}).items() if key in KEPT}
    for key in IDS:
        if isinstance(args.get(key), int):
            args[key] += 1_000_000 * number
    placed = event | {"ts": begin + event["ts"], "args": args}
    if event["cat"] in GPU:
        args["device"] = rank
        return placed | {"pid": rank}
    if event["name"].startswith("ProfilerStep#"):
        placed["name"] = f"ProfilerStep#{number}"
    return placed | {"pid": 1000 + rank}
