"""How long it takes to match collectives across ranks, with sequence numbers and without, and what follows from it.

    python benchmarks/match_collectives.py [--ranks 8] [--calls 50000]

Makes the tables of a job in memory: every rank runs the same calls, in equal steps; clocks differ by up to a
second, the profile of every second rank begins some calls later, and some calls are lost.
"""

from __future__ import annotations

import time

import numpy as np
import polars as pl

from command_line import documented_parser
from thence.analysis.collectives.clock_sync import align_clocks
from thence.analysis.collectives.communication import collectives
from thence.analysis.collectives.instances import collective_instances
from thence.attribution.attribute import attribute
from thence.model.tables import COLLECTIVES, GPU, Tables

LAYERS = 48
STEP = ("_allgather_base",) * LAYERS + ("_reduce_scatter_base",) * LAYERS + ("allreduce",) * 2
SIZES = (1 << 22,) * LAYERS + (1 << 19,) * LAYERS + (4, 1 << 16)
LOST = 3


def tables(ranks: int, calls: int, *, numbered: bool) -> Tables:
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
        place = number[kept] % len(STEP)
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
                "collective": np.array(STEP)[place].tolist(),
                "bytes": np.array(SIZES)[place],
                "group_size": np.full(rows, ranks),
                "group_name": ["0"] * rows,
                "sequence": sequence if numbered else [None] * rows,
            }
        ),
    )


def main() -> None:
    parser = documented_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=50_000, help="of each rank")
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {given.ranks * given.calls:,} calls; seconds")
    print(f"{'':20}{'attribute':>11}{'match':>8}{'clocks':>8}{'collectives':>13}{'unmatched':>11}")
    for numbered in (True, False):
        made = tables(given.ranks, given.calls, numbered=numbered)
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


if __name__ == "__main__":
    main()
