"""Time and memory of the analysis of programs at a size that is known to hurt.

python benchmarks/programs_scale.py [--thunks 850000] [--executions 640]
"""

from __future__ import annotations

import resource
import time

import numpy as np
import polars as pl

from command_line import documented_parser
from thence.analysis.programs.programs import By, programs
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.attribute import attribute
from thence.model.tables import GPU, PROGRAMS, Tables


def synthetic(thunks: int, executions: int) -> Tables:
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


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--thunks", type=int, default=850_000)
    parser.add_argument("--executions", type=int, default=640)
    options = parser.parse_args()
    trace = attribute(synthetic(options.thunks, options.executions))
    before = peak_mb()
    began = time.perf_counter()
    result = programs(trace, WarmUp.HEURISTIC, By.IDENTITY)
    seconds = time.perf_counter() - began
    print(f"{options.thunks:,} thunks in {options.executions:,} executions of {result.programs.height} programs")
    print(f"{seconds:.2f} s, peak {peak_mb():.0f} MB, of which {before:.0f} MB before the analysis")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
