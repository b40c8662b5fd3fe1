"""Decodes in-kernel events: ten million of ours and of Mosaic's, and Mosaic's by JAX's own decoder.

    python benchmarks/decode_inside.py                                     ours alone
    python benchmarks/decode_inside.py --jax-python VENV/bin/python        JAX's loop beside it

Both sides read the same Mosaic buffer; JAX's, a Python loop that writes JSON, a shorter one. Times are
the best of three, per event; memory is the peak above what the buffer itself takes, in a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from command_line import documented_parser
from thence.inside.decoding import decode
from thence.inside.description import Description

NAMES = ("loop", "load", "compute", "epilogue", "store")
# One iteration: a loop with load, compute and a nested epilogue with a store; enter 0, exit 1.
PATTERN = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (4, 1), (3, 1), (0, 1))
TRACES = 4096
JAX_SIDE = """
import io, json, sys, time
import numpy as np
from jax.experimental.mosaic.gpu.profiler import ProfilerSpec
buffer, names, entries, grid, block = (*(json.loads(sys.argv[1])),)
words = np.load(buffer)
spec = ProfilerSpec(entries)
spec.interned_names.update(names)
best = float("inf")
for _ in range(3):
    start = time.perf_counter()
    out = io.StringIO()
    spec.dump(words, out, tuple(grid), tuple(block))
    best = min(best, time.perf_counter() - start)
print(json.dumps([best, len(out.getvalue())]))
"""


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


def mosaic(blocks: int, per_trace: int) -> tuple[np.ndarray, Description]:
    """The same events as JAX's profiler writes them: one warpgroup a block."""
    pattern, cycles = events(blocks, per_trace)
    words = np.zeros((blocks, 3 + 2 * per_trace), np.uint32)
    number = np.arange(blocks)
    words[:, 0], words[:, 1], words[:, 2] = 3_871_351_552 + 32 * number, number % 132, 2 * per_trace
    words[:, 3::2] = (pattern[:, 0] | pattern[:, 1] << 31).astype(np.uint32)
    words[:, 4::2] = (1_000_000 + cycles) & 0xFFFF_FFFF
    about = Description(
        NAMES, (blocks, 1, 1), (128, 1, 1), 1, per_trace, "gemm", "mosaic",
        words_per_trace=3 + 2 * per_trace,
    )  # fmt: skip
    return words.reshape(-1), about


def measured(path: Path) -> None:
    """Prints first and best time, ranges and peak memory above the buffer, as JSON."""
    words, about = np.load(path), Description.from_bytes(path.with_suffix(".json").read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(3):
        start = time.perf_counter()
        decoded = decode(words, about, 1.98)
        times.append(time.perf_counter() - start)
        rows = decoded.ranges.height
        del decoded
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps([times[0], min(times), rows, peak]))


def in_a_process(layout: str, count: int) -> float:
    """Seconds per event."""
    per_trace = max(count // TRACES // 10 * 10, 10)
    words, about = ours(TRACES // 4, per_trace) if layout == "thence" else mosaic(TRACES, per_trace)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "buffer.npy"
        np.save(path, words)
        path.with_suffix(".json").write_bytes(about.to_bytes())
        run = subprocess.run(
            [sys.executable, __file__, "--measure", str(path)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    first, best, rows, peak = json.loads(run.stdout)
    number = TRACES * per_trace
    print(
        f"{layout:8} {number:12,} events {rows:12,} ranges   first {first:6.2f} s   best {best:6.2f} s"
        f"   {best / number * 1e9:7.1f} ns/event   peak {peak / 1e6:6.0f} MB above the buffer"
    )
    return best / number


def by_jax(python: str, count: int) -> float:
    """Seconds per event of JAX's own decoder."""
    per_trace = 200
    blocks = max(count // per_trace, 1)
    words, about = mosaic(blocks, per_trace)
    names = {name: number for number, name in enumerate(NAMES)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "buffer.npy"
        np.save(path, words)
        arguments = [str(path), names, about.trace_words, list(about.grid), list(about.block)]
        run = subprocess.run(
            [python, "-c", JAX_SIDE, json.dumps(arguments)], check=True, capture_output=True, text=True
        )
    best, size = json.loads(run.stdout.splitlines()[-1])
    number = blocks * per_trace
    print(
        f"{'JAX':8} {number:12,} events {number // 2:12,} ranges   best {best:19.2f} s"
        f"   {best / number * 1e9:7.1f} ns/event   {size / 1e6:6.0f} MB of JSON"
    )
    return best / number


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--jax-events", type=int, default=400_000)
    parser.add_argument("--jax-python", help="interpreter with jax 0.8 or newer")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measured(given.measure)
        return
    in_a_process("thence", given.events)
    own = in_a_process("mosaic", given.events)
    if given.jax_python:
        print(f"JAX takes {by_jax(given.jax_python, given.jax_events) / own:.0f} times as long per event")
    else:
        print("no --jax-python given: JAX's own decoder was not measured")


if __name__ == "__main__":
    main()
