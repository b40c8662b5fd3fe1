"""Time of analyses at a size that is known to be expensive, on tables made in memory.

    python benchmarks/analysis_scale.py [labels] [collectives] [programs] [inside]

labels        to join labels to a million graphed kernels: by node id, and by alignment; all labels are checked
collectives   to match the collectives of 8 ranks with 50,000 calls each, with sequence numbers and without
programs      850,000 thunks in 640 executions of ten programs
inside        to decode ten million in-kernel events
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import polars as pl

from command_line import documented_parser
from measuring import peak_mb
from thence.analysis.collectives.answer import collectives
from thence.analysis.collectives.clock_sync import align_clocks
from thence.analysis.collectives.instances import collective_instances
from thence.analysis.programs.answer import By, programs
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.attribute import attribute
from thence.attribution.cuda_graphs.assigned_labels import with_places
from thence.attribution.cuda_graphs.join_labels import join_labels
from thence.inside.decoding import decode
from thence.inside.description import Description
from thence.model.graph_labels import NODES, CapturedGraph, GraphLabels, Kernel, Label
from thence.model.tables import COLLECTIVES, GPU, HOST, PROGRAMS, Tables

KERNELS, RANKS, CALLS, THUNKS, EXECUTIONS, EVENTS = 1_000_000, 8, 50_000, 850_000, 640, 10_000_000
LAYERS, PER_LAYER, EXECUTABLE = 200, 6, 2
# Of each layer: kernel, label, offset of those it waits for (-1: the last of the layer before).
NODES_OF_LAYER = (
    ("gemm", "qkv", (-1,)), ("norm", "side", (0,)), ("gelu", "side", (1,)),
    ("softmax", "attention", (0,)), ("gemm", "attention", (3,)), ("add", "mlp", (4, 2)),
)  # fmt: skip


def captured_graph() -> GraphLabels:
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


def replayed(replays: int, *, ids: bool) -> tuple[Tables, np.ndarray]:
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


def labels() -> None:
    """Labels of a million graphed kernels, by node id and by alignment; all of them are checked."""
    graph = captured_graph()
    replays = -(-KERNELS // (LAYERS * PER_LAYER))
    expected = np.array(["/".join(label.path) for label in graph.labels])
    for way, ids in (("by node id", True), ("by alignment", False)):
        tables, node = replayed(replays, ids=ids)
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            joined = join_labels(tables, [graph])
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


SHARDED_LAYERS = 48
CALLS_OF_STEP = ("_allgather_base",) * SHARDED_LAYERS + ("_reduce_scatter_base",) * SHARDED_LAYERS + ("allreduce",) * 2
SIZES = (1 << 22,) * SHARDED_LAYERS + (1 << 19,) * SHARDED_LAYERS + (4, 1 << 16)
LOST = 3


def job(ranks: int, calls: int, *, numbered: bool) -> Tables:
    """A job in which every rank arrives at every call within 200 us, and all end together 50 us after the last."""
    rng = np.random.default_rng(0)
    begins = np.cumsum(rng.integers(300_000, 700_000, calls))
    arrivals = begins + rng.integers(0, 200_000, (ranks, calls))
    ends = arrivals.max(axis=0) + 50_000
    number = np.arange(calls)
    gpu, described = [], []
    for rank in range(ranks):
        kept = np.ones(calls, np.bool_)
        kept[: 7 * (rank % 2)] = False
        kept[rng.integers(100, calls, LOST)] = False
        skew = int(rng.integers(-(10**9), 10**9))
        place = number[kept] % len(CALLS_OF_STEP)
        count = int(kept.sum())
        gpu.append(
            {
                "rank": np.full(count, rank),
                "start": arrivals[rank][kept] + skew,
                "duration": ends[kept] - arrivals[rank][kept],
            }
        )
        described.append({"place": place, "sequence": number[kept]})
    joined = {name: np.concatenate([part[name] for part in gpu]) for name in gpu[0]}
    rows = len(joined["rank"])
    place = np.concatenate([part["place"] for part in described])
    sequence = np.concatenate([part["sequence"] for part in described])
    return Tables(
        gpu=GPU.frame(
            {
                **joined,
                "device": np.zeros(rows, np.int32),
                "stream": np.full(rows, 7),
                "kind": ["kernel"] * rows,
                "name": ["ncclDevKernel_Generic"] * rows,
            }
        ),
        collectives=COLLECTIVES.frame(
            {
                "gpu": np.arange(rows),
                "collective": np.array(CALLS_OF_STEP)[place].tolist(),
                "bytes": np.array(SIZES)[place],
                "group_size": np.full(rows, ranks),
                "group_name": ["0"] * rows,
                "sequence": sequence if numbered else [None] * rows,
            }
        ),
    )


def collectives_of_ranks() -> None:
    """Collectives matched across ranks, with sequence numbers and without, and what follows from it."""
    print(f"{RANKS} ranks, {RANKS * CALLS:,} calls; seconds")
    print(f"{'':20}{'attribute':>11}{'match':>8}{'clocks':>8}{'collectives':>13}{'unmatched':>11}")
    for numbered in (True, False):
        made = job(RANKS, CALLS, numbered=numbered)
        at = [time.perf_counter()]
        trace = attribute(made)
        at.append(time.perf_counter())
        matched = collective_instances(trace)
        at.append(time.perf_counter())
        alignment = align_clocks(trace, matched)
        at.append(time.perf_counter())
        collectives(trace, alignment=alignment, instances=matched)
        at.append(time.perf_counter())
        took = np.diff(at)
        alone = matched.rows.filter(pl.col("unmatched").is_not_null()).height
        name = "with numbers" if numbered else "without numbers"
        print(f"{name:20}{took[0]:>11.2f}{took[1]:>8.2f}{took[2]:>8.2f}{took[3]:>13.2f}{alone:>11,}")


def executed(thunks: int, executions: int) -> Tables:
    """Executions of ten programs one after the other, thunks back to back with small gaps."""
    random = np.random.default_rng(0)
    duration = random.integers(1_000, 100_000, thunks)
    gap = random.integers(0, 2_000, thunks)
    start = np.cumsum(duration + gap) - duration
    program = np.sort(random.integers(0, executions, thunks)).astype(np.int32)
    program[:executions] = np.arange(executions)  # each has at least one
    program.sort()
    first = np.searchsorted(program, np.arange(executions))
    last = np.append(first[1:], thunks) - 1
    names = pl.Series([f"fusion.{number}" for number in range(2_000)])
    hlo = names[random.integers(0, len(names), thunks)]
    rank = np.zeros(thunks, np.int32)
    gpu = GPU.frame(
        {
            "rank": rank,
            "device": rank,
            "stream": rank,
            "start": start,
            "duration": duration,
            "kind": pl.repeat("thunk", thunks, eager=True),
            "name": hlo,
            "hlo": hlo,
            "program": program,
        }
    )
    which = np.arange(executions) % 10
    zeros = np.zeros(executions, np.int32)
    table = PROGRAMS.frame(
        {
            "rank": zeros,
            "device": zeros,
            "execution": np.arange(executions) // 10,
            "program": [f"jit_step.{number}" for number in which],
            "name": [f"jit_step_{number}" for number in which],
            "start": start[first],
            "duration": start[last] + duration[last] - start[first],
            "launch": start[first] - 10_000,
        }
    )
    return Tables(gpu=gpu, programs=table)


def executions_of_programs() -> None:
    """The analysis of programs."""
    trace = attribute(executed(THUNKS, EXECUTIONS))
    began = time.perf_counter()
    result = programs(trace, WarmUp.HEURISTIC, By.IDENTITY)
    seconds = time.perf_counter() - began
    print(f"{THUNKS:,} thunks in {EXECUTIONS:,} executions of {result.programs.height} programs")
    print(f"{seconds:.2f} s, peak of this process so far {peak_mb():.0f} MB")


NAMES = ("loop", "load", "compute", "epilogue", "store")
# One iteration: a loop with load, compute and a nested epilogue with a store; enter 0, exit 1.
PATTERN = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (3, 1), (0, 1))
TRACES = 4096


def events(traces: int, per_trace: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Tags' parts and clocks: (name, kind) of one trace, and cycles of all, shape (traces, per_trace)."""
    pattern = np.resize(np.array(PATTERN), (per_trace, 2))
    steps = np.random.default_rng(seed).integers(60, 100, (traces, per_trace), dtype=np.int64)
    return pattern, np.cumsum(steps, axis=1)


def ours(blocks: int, per_trace: int) -> tuple[np.ndarray, Description]:
    """A buffer in thence's own layout: four warpgroups a block."""
    traces = 4 * blocks
    pattern, cycles = events(traces, per_trace)
    words = np.zeros((traces, 16 + 2 * per_trace), np.uint32)
    number = np.arange(traces)
    words[:, 0], words[:, 1], words[:, 2] = 0x7E4CE001, 2, number % 132
    words[:, 3], words[:, 4] = number // 4, number % 4
    words[:, 5] = words[:, 7] = per_trace
    start = 1_795_196_758_971_754_996 + number // 4 * 1000
    clock = np.random.default_rng(2).integers(0, 1 << 40, traces)
    total = cycles[:, -1] + 100
    for place, value in ((8, start), (10, start + total // 2), (12, clock), (14, clock + total)):
        words[:, place], words[:, place + 1] = value & 0xFFFF_FFFF, value >> 32
    words[:, 16::2] = pattern[:, 0] | pattern[:, 1] << 30
    words[:, 17::2] = (clock[:, None] + cycles) & 0xFFFF_FFFF
    about = Description(NAMES, (blocks, 1, 1), (512, 1, 1), 4, per_trace, "gemm")
    return words.reshape(-1), about


def in_kernel_events() -> None:
    """Ten million events of thence's own layout, as ranges."""
    per_trace = max(EVENTS // TRACES // 10 * 10, 10)
    words, about = ours(TRACES // 4, per_trace)
    spent = []
    for _ in range(3):
        begin = time.perf_counter()
        rows = decode(words, about, 1.98).ranges.height
        spent.append(time.perf_counter() - begin)
    number = TRACES * per_trace
    print(
        f"{number:,} events, {rows:,} ranges: best of 3 {min(spent):.2f} s, {min(spent) / number * 1e9:.1f} ns an event"
    )


PARTS = {
    "labels": labels,
    "collectives": collectives_of_ranks,
    "programs": executions_of_programs,
    "inside": in_kernel_events,
}


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all of them without it")
    for name in parser.parse_args().parts or PARTS:
        print(f"--- {name}")
        PARTS[name]()


if __name__ == "__main__":
    main()
