"""Captured graphs and replays made by hand: a scheduler runs a graph on streams, respecting its edges."""

from __future__ import annotations

import dataclasses
import gzip
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.tables import GPU, HOST, Meta, Tables
from thence.readers.label_files import read_labels

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence
    from pathlib import Path

    from thence.model.graph_labels import GraphLabels

PID = 4321


@dataclass
class Made:
    """A graph: kernel name, label and predecessors of each node."""

    kernels: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)

    def node(self, kernel: str, label: str | None, *before: int) -> int:
        self.kernels.append(kernel)
        self.labels.append(label)
        self.before.append(before)
        return len(self.kernels) - 1

    def document(self, **changes: Any) -> dict[str, Any]:
        """The labels file that a capture of it gives."""
        labels = list(dict.fromkeys(label for label in self.labels if label is not None))
        kernels = list(dict.fromkeys(self.kernels))
        count = len(self.kernels)
        return {
            "format": "thence.graph-labels",
            "version": 1,
            "process": {"pid": PID, "rank": 0, "boot": "x", "started_ns": 1000, "saved_ns": 2000},
            "labels": [
                {"path": label.split("/"), "phase": "forward", "lane": None, "metadata": {}} for label in labels
            ],
            "kernels": [{"name": name, "demangled": name} for name in kernels],
            "graphs": [
                {
                    "id": 1,
                    "executables": [2],
                    "device": 0,
                    "nodes": {
                        "number": list(range(count)),
                        "type": ["kernel"] * count,
                        "label": [-1 if x is None else labels.index(x) for x in self.labels],
                        "kernel": [kernels.index(name) for name in self.kernels],
                        "grid": [[1, 1, 1]] * count,
                        "block": [[32, 1, 1]] * count,
                        "shared_memory": [0] * count,
                        "parent": [-1] * count,
                    },
                    "edges": [[a, b] for b, before in enumerate(self.before) for a in before],
                }
            ],
            "notes": [],
            **changes,
        }


@dataclass
class Ran:
    """One activity of a replay: which node it was, when and where."""

    node: int
    start: int
    duration: int
    stream: int


def replay(made: Made, streams: int, chance: random.Random, at: int = 0, shortest: int = 0) -> list[Ran]:
    """A run of the graph: nodes begin in a random order that the edges allow, on random streams."""
    ends: dict[int, int] = {}
    free = [at] * streams
    left = set(range(len(made.kernels)))
    ran = []
    while left:
        ready = [n for n in sorted(left) if all(b in ends for b in made.before[n])]
        node = chance.choice(ready)
        stream = chance.randrange(streams)
        waits = max([free[stream], at, *(ends[b] for b in made.before[node])])
        start = waits + chance.choice((0, 1, 500, 3000))
        duration = max(shortest, chance.choice((0, 1, 900, 2500, 20_000)))
        ends[node] = free[stream] = start + duration
        left.discard(node)
        ran.append(Ran(node, start, duration, stream))
    return ran


def tables_of(
    made: Made,
    launches: Sequence[Sequence[Ran]],
    *,
    ids: bool = False,
    executable: int = 2,
    pid: int = PID,
    epoch: int | None = 10**18,
) -> tuple[Tables, list[int]]:
    """The trace of some launches, and the node that each row of gpu was."""
    rows = [(r, number) for number, ran in enumerate(launches) for r in ran]
    rows.sort(key=lambda row: (row[0].start, row[0].stream))
    gpu = {
        "rank": [0] * len(rows),
        "device": [0] * len(rows),
        "stream": [r.stream for r, _ in rows],
        "kind": ["kernel"] * len(rows),
        "name": [made.kernels[r.node] for r, _ in rows],
        "start": [r.start for r, _ in rows],
        "duration": [r.duration for r, _ in rows],
        "correlation": [100 + number for _, number in rows],
        "grid": [[1, 1, 1]] * len(rows),
        "block": [[32, 1, 1]] * len(rows),
        "shared_memory": [0] * len(rows),
    }
    if ids:
        gpu["graph"] = [executable] * len(rows)
        gpu["node"] = [(executable << 32) + r.node for r, _ in rows]
    begins = [min((r.start for r in ran), default=0) - 1 for ran in launches]
    host = {
        "rank": [0] * len(launches),
        "process": [pid] * len(launches),
        "thread": [1] * len(launches),
        "category": ["runtime"] * len(launches),
        "name": ["cudaGraphLaunch"] * len(launches),
        "start": begins,
        "duration": [1] * len(launches),
        "correlation": [100 + number for number in range(len(launches))],
    }
    meta = Meta(inputs=("made",), formats=("made",), epoch_ns=epoch)
    return Tables(GPU.frame(gpu), HOST.frame(host), meta=meta), [r.node for r, _ in rows]


def layers(count: int) -> Made:
    """Identical layers: a stretch on the main stream and, forked from it and joined again, one on the side."""
    made = Made()
    last: tuple[int, ...] = ()
    for layer in range(count):
        a = made.node("gemm", f"layer{layer}/qkv", *last)
        side = made.node("norm", f"layer{layer}/side", a)
        side = made.node("gelu", f"layer{layer}/side", side)
        b = made.node("softmax", f"layer{layer}/attention", a)
        c = made.node("gemm", f"layer{layer}/attention", b)
        last = (made.node("add", f"layer{layer}/mlp", c, side),)
    return made


def symmetric() -> Made:
    """A graph that alignment alone cannot label."""
    made = Made()
    first = made.node("embed", "embed")
    branches = [made.node("gemm", name, first) for name in ("q", "k", "v")]
    made.node("attention", "attention", *branches)
    return made


def read(made: Made, folder: Path, **changes: Any) -> GraphLabels:
    """The labels of a graph, as read from the file that a capture of it gives."""
    path = folder / "labels.json"
    path.write_text(json.dumps(made.document(**changes)))
    return read_labels(path)


def truth_document(truth: Path, trace: Path, pid: int) -> dict[str, Any]:
    """A labels file made of the recorded truth: its labels and edges, with kernels from a trace with ids."""
    recorded = json.loads(truth.read_text())
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ran: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            ran.setdefault(event["args"]["graph node id"] & 0xFFFFFFFF, event)
    made = Made()
    for node in recorded["nodes"]:
        made.node(ran[node["id"] & 0xFFFFFFFF]["name"], node["label"])
    document = made.document()
    document["process"]["pid"] = pid
    graph = document["graphs"][0]
    graph["edges"] = [[a & 0xFFFFFFFF, b & 0xFFFFFFFF] for a, b in recorded["edges"]]
    arguments = [ran[number]["args"] for number in graph["nodes"]["number"]]
    graph["nodes"]["grid"] = [args["grid"] for args in arguments]
    graph["nodes"]["block"] = [args["block"] for args in arguments]
    graph["nodes"]["shared_memory"] = [None] * len(arguments)
    return document


def as_eager(tables: Tables, labels: list[str]) -> Tables:
    """The same launches one by one, each in a range of its own."""
    calls = tables.host.with_columns(name=pl.lit("cudaLaunchKernel").cast(pl.Categorical()))
    ranges = calls.with_columns(
        category=pl.lit("range", calls.schema["category"]),
        name=pl.Series(labels, dtype=pl.Categorical()),
        start=pl.col("start") - 1,
        duration=pl.lit(5, pl.Int64),
        correlation=pl.lit(None, pl.Int64),
    )
    rows = [row for pair in zip(ranges.rows(), calls.rows(), strict=True) for row in pair]
    host = pl.DataFrame(rows, schema=calls.schema, orient="row")
    parent = [None if row % 2 == 0 else row - 1 for row in range(host.height)]
    return dataclasses.replace(tables, host=host.with_columns(parent=pl.Series(parent, dtype=pl.Int32)))
