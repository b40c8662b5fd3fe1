"""How long it takes to nest host ranges: for each, the innermost range around it.

    python benchmarks/nesting.py [ROWS]

Prints seconds for two shapes: calls nested as a program nests them (32 deep at most), and siblings
without end. The same rows are put through a stack in Python for comparison.
"""

from __future__ import annotations

import time

import numpy as np

from command_line import documented_parser
from thence.model.intervals import enclosing


def nested(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """A random walk over depths: each range begins one level below some open one."""
    rng = np.random.default_rng(0)
    depth = np.clip(np.cumsum(rng.integers(-2, 2, rows)), 0, 31)
    start = np.arange(rows, dtype=np.int64) * 10
    end = np.empty(rows, np.int64)
    last = np.full(33, rows * 10, np.int64)
    for row in range(rows - 1, -1, -1):  # a range lasts until the next one at its level or above
        end[row] = last[: depth[row] + 1].min()
        last[depth[row]] = start[row]
        last[depth[row] + 1 :] = rows * 10
    return start, end


def by_stack(start: np.ndarray, end: np.ndarray) -> list[int]:
    """The obvious way."""
    parents, open_ = [], []
    ends = end.tolist()
    for row, (_, stop) in enumerate(zip(start.tolist(), ends, strict=True)):
        while open_ and ends[open_[-1]] < stop:
            open_.pop()
        parents.append(open_[-1] if open_ else -1)
        open_.append(row)
    return parents


def main() -> None:
    options = documented_parser(__doc__)
    options.add_argument("rows", type=int, nargs="?", default=1_000_000, metavar="ROWS")
    rows = options.parse_args().rows
    shapes = {"nested calls": nested(rows)}
    start = np.arange(rows, dtype=np.int64) * 10
    shapes["siblings"] = (start, start + 10)
    for name, (start, end) in shapes.items():
        track = np.zeros(rows, np.int64)
        begin = time.perf_counter()
        ours = enclosing(track, start, end)
        seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        theirs = by_stack(start, end)
        slow = time.perf_counter() - begin
        assert ours.tolist() == theirs
        print(f"{name:13} {rows:,} rows: {seconds:.2f} s, in Python {slow:.2f} s, {slow / seconds:.1f}x")


if __name__ == "__main__":
    main()
