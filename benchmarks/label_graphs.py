"""How long it takes to join labels to a million graphed kernels: by node id, and by alignment.

    python benchmarks/label_graphs.py [KERNELS]

The graph: identical layers with a stretch on a side stream each, 1,200 nodes; every replay has other
times, and its side work on other streams. All labels are checked. Prints seconds, best and median of 5.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import polars as pl

from command_line import documented_parser
from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.join_labels import join_labels, with_places
from thence.model.graph_labels import NODES, CapturedGraph, GraphLabels, Kernel, Label
from thence.model.tables import GPU, HOST, Tables

LAYERS, PER_LAYER, EXECUTABLE = 200, 6, 2
# Of each layer: kernel, label, offset of those it waits for (-1: the last of the layer before).
NODES_OF_LAYER = (
    ("gemm", "qkv", (-1,)), ("norm", "side", (0,)), ("gelu", "side", (1,)),
    ("softmax", "attention", (0,)), ("gemm", "attention", (3,)), ("add", "mlp", (4, 2)),
)  # fmt: skip


def captured() -> GraphLabels:
    names = list(dict.fromkeys(kernel for kernel, _, _ in NODES_OF_LAYER))
    labels, rows, edges = [], [], []
    for layer in range(LAYERS):
        for kernel, label, before in NODES_OF_LAYER:
            number = len(rows)
            base = layer * PER_LAYER
            edges += [(base + b if b >= 0 else base - 1, number) for b in before if layer or b >= 0]
            labels.append(Label((f"layer{layer}", label)))
            rows.append((number, names.index(kernel)))
    count = len(rows)
    nodes = pl.DataFrame(
        {
            "number": [number for number, _ in rows],
            "type": ["kernel"] * count,
            "label": range(count),
            "kernel": [kernel for _, kernel in rows],
            "grid": [[1, 1, 1]] * count,
            "block": [[32, 1, 1]] * count,
            "shared_memory": [0] * count,
            "parent": [None] * count,
        },
        schema=NODES,
    )
    graph = CapturedGraph(1, (EXECUTABLE,), 0, nodes, np.array(edges))
    return GraphLabels("made", labels=tuple(labels), kernels=tuple(map(Kernel, names)), graphs=(graph,))


def trace(replays: int, *, ids: bool) -> tuple[Tables, np.ndarray]:
    """Replays of the graph, and the node that each row of gpu was."""
    chance = np.random.default_rng(0)
    nodes = LAYERS * PER_LAYER
    duration = chance.integers(1500, 9000, (replays, nodes))
    start = np.zeros((replays, nodes), np.int64)
    done = np.arange(replays) * 20_000_000
    for layer in range(LAYERS):
        base = layer * PER_LAYER
        for i, (_, _, before) in enumerate(NODES_OF_LAYER):
            waits = [done if b < 0 else start[:, base + b] + duration[:, base + b] for b in before]
            start[:, base + i] = np.maximum.reduce(waits) + chance.integers(0, 700, replays)
        done = start[:, base + PER_LAYER - 1] + duration[:, base + PER_LAYER - 1]
    side = np.tile([i in (1, 2) for i in range(PER_LAYER)], LAYERS)
    stream = np.where(side, chance.integers(100, 140, (replays, nodes)), 7)
    node = np.broadcast_to(np.arange(nodes), start.shape)
    names = pl.Series([kernel for kernel, _, _ in NODES_OF_LAYER], dtype=pl.Categorical())
    order = np.argsort(start, axis=None)

    def flat(values: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values).reshape(-1)[order]

    rows = len(order)
    correlation = flat(np.broadcast_to(np.arange(replays)[:, None], start.shape)) + 100
    shape = pl.Series([[1, 1, 1], [32, 1, 1]], dtype=pl.Array(pl.UInt32, 3))
    gpu = {
        "rank": np.zeros(rows, np.int32), "device": np.zeros(rows, np.int32), "stream": flat(stream),
        "kind": pl.Series(["kernel"], dtype=pl.Enum(GPU.schema["kind"].categories)).new_from_index(0, rows),
        "name": names.gather(flat(node) % PER_LAYER), "start": flat(start), "duration": flat(duration),
        "correlation": correlation, "grid": shape.gather(np.zeros(rows, np.uint32)),
        "block": shape.gather(np.ones(rows, np.uint32)), "shared_memory": np.zeros(rows, np.int64),
    }  # fmt: skip
    if ids:
        gpu |= {"graph": np.full(rows, EXECUTABLE), "node": (EXECUTABLE << 32) + flat(node)}
    host = {
        "rank": np.zeros(replays, np.int32), "process": np.ones(replays), "thread": np.ones(replays),
        "category": ["runtime"] * replays, "name": ["cudaGraphLaunch"] * replays,
        "start": start.min(axis=1) - 1, "duration": np.ones(replays), "correlation": np.arange(replays) + 100,
    }  # fmt: skip
    return Tables(GPU.frame(gpu), HOST.frame(host)), flat(node)


def main() -> None:
    options = documented_parser(__doc__)
    options.add_argument("kernels", type=int, nargs="?", default=1_000_000, metavar="KERNELS")
    kernels = options.parse_args().kernels
    labels = captured()
    replays = -(-kernels // (LAYERS * PER_LAYER))
    expected = np.array(["/".join(label.path) for label in labels.labels])
    for way, ids in (("by node id", True), ("by alignment", False)):
        tables, node = trace(replays, ids=ids)
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            joined = join_labels(tables, [labels])
            seconds.append(time.perf_counter() - begin)
        right = (joined.places["label"].cast(pl.String).to_numpy() == expected[node]).sum()
        begin = time.perf_counter()
        attribute(with_places(tables, joined))
        places = time.perf_counter() - begin
        print(
            f"{way}: {tables.gpu.height:,} kernels of {replays:,} replays, {right:,} labelled right: "
            f"best {min(seconds):.2f} s, median {statistics.median(seconds):.2f} s; "
            f"places of all afterwards {places:.2f} s"
        )


if __name__ == "__main__":
    main()
