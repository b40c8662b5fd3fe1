"""How long the check of a trace takes beside its attribution, and which planted defects it finds in real traces.

    python benchmarks/check_soundness.py 2000000
    python benchmarks/check_soundness.py trace.json.gz
    python benchmarks/check_soundness.py --planted

The defects and the traces are those of tests/support/planted_defects.py; the traces are sound before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import polars as pl

import thence
from command_line import documented_parser
from thence.analysis.soundness.check import check
from thence.model.tables import GPU, HOST, Meta, Tables
from thence.readers.registry import read
from thence.trace import Trace

sys.path += [str(Path(__file__).parents[1] / "tests" / name) for name in ("", "support")]

from planted_defects import DEFECTS, TRACES

KERNELS = 300
GRAPH_NODES = 100


def made(rows: int) -> Tables:
    """One rank that launches kernels of one stream; the second half are replays of a graph."""
    random = np.random.default_rng(0)
    at = np.arange(rows) * 5000
    kernel = random.integers(0, KERNELS, rows)
    correlation = np.arange(1, rows + 1)
    graphs = np.arange(rows) >= rows // 2
    correlation[graphs] = rows + np.arange(graphs.sum()) // GRAPH_NODES
    size = np.ones((rows, 3), np.uint32)
    size[:, 0] += kernel.astype(np.uint32)
    gpu = {
        "rank": np.zeros(rows, int),
        "device": np.zeros(rows, int),
        "stream": np.full(rows, 7),
        "kind": pl.Series(["kernel"]).gather(np.zeros(rows, np.uint32)),
        "name": names(f"void kernel_{i}<float>" for i in range(KERNELS)).gather(kernel.astype(np.uint32)),
        "start": at + 10_000,
        "duration": random.integers(1000, 4900, rows),
        "correlation": correlation,
        "graph": pl.Series(np.where(graphs, 1, -1)).replace(-1, None),
        "node": pl.Series(np.where(graphs, np.arange(rows) % GRAPH_NODES, -1)).replace(-1, None),
        "grid": pl.Series(size, dtype=pl.Array(pl.UInt32, 3)),
        "block": pl.Series(size, dtype=pl.Array(pl.UInt32, 3)),
    }
    calls, first = np.unique(correlation, return_index=True)
    both = np.tile([0, 1], len(calls)).astype(np.uint32)
    graph_calls = np.repeat(graphs[first], 2) * both
    host = {
        "rank": np.zeros(2 * len(calls), int),
        "process": np.ones(2 * len(calls), int),
        "thread": np.ones(2 * len(calls), int),
        "category": pl.Series(["op", "runtime"]).gather(both),
        "name": names(["aten::add", "cudaLaunchKernel", "cudaGraphLaunch"]).gather(both + graph_calls),
        "start": np.repeat(at[first], 2) - 100 + 100 * both,
        "duration": np.where(both, 3000, 4000),
        "correlation": pl.Series(np.where(both, np.repeat(calls, 2), -1)).replace(-1, None),
    }
    meta = Meta(inputs=("made",), formats=("torch.profiler (Kineto JSON)",))
    return Tables(gpu=GPU.frame(gpu), host=HOST.frame(host), meta=meta)


def names(texts: object) -> pl.Series:
    return pl.Series(list(texts), dtype=pl.Categorical())  # type: ignore[call-overload]


def planted() -> None:
    """Prints for each defect in how many traces it is found, and for each trace by which rules."""
    whole = {name: read(paths) for name, paths in TRACES.items()}
    for plant in DEFECTS:
        damaged = {name: plant(tables) for name, tables in whole.items()}
        codes = {
            name: sorted({finding.code for finding in check(tables).findings})
            for name, tables in damaged.items()
            if tables is not None
        }
        print(f"{plant.__name__}: found in {sum(map(bool, codes.values()))} of {len(codes)} traces")
        for name, found in codes.items():
            print(f"    {name}: {', '.join(found) or 'not found'}")


def main() -> None:
    options = documented_parser(__doc__)
    options.add_argument("what", nargs="*", help="number of activities of a made trace, or a trace")
    options.add_argument("--planted", action="store_true", help="which planted defects are found")
    given = options.parse_args()
    if given.planted:
        planted()
    what = given.what
    numbers = [int(text) for text in what if text.isdigit()]
    paths = [text for text in what if not text.isdigit()]
    tables = [*(made(n) for n in numbers), *(thence.open(path).recorded for path in paths)]
    check(made(1000))  # what Polars prepares once
    for part in tables:
        times = []
        for work in (lambda part=part: check(part), lambda part=part: Trace(part).tables):
            began = time.perf_counter()
            result = work()
            times.append(time.perf_counter() - began)
            if len(times) == 1 and result.findings:
                print(result.findings)
        print(
            f"{part.gpu.height:,} activities, {part.host.height:,} ranges: check {times[0]:.2f} s, attribution"
            f" {times[1]:.2f} s"
        )


if __name__ == "__main__":
    main()
