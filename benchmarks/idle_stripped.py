"""What idle time is that a trace of CUDA calls alone leaves unknown: the same traces with and without their other rows.

    python benchmarks/idle_stripped.py TRACE...

For each trace of torch.profiler, of all that it holds of the host only the API calls are kept, as Nsight Systems
records them without NVTX: the causes of idle time with everything, and of calls alone. Then, of what calls alone leave
unknown, by how long each piece is, what the whole traces say of the same time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

import thence
from command_line import documented_parser
from thence.analysis.idle.causes import idle_causes
from thence.model.tables import API_CALLS, Tables

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]

LIMITS_US = (20, 50, 100, 200, 500, 1000)


def calls_alone(tables: Tables) -> Tables:
    """The device's activities and the API calls of the host."""
    nothing = pl.lit(None, pl.Int32())
    host = tables.host.filter(pl.col("category").is_in(API_CALLS))
    host = host.with_columns(parent=nothing, forward=nothing)
    return Tables(gpu=tables.gpu, host=host, meta=replace(tables.meta, formats=("calls alone",)))


def overlaps(first: pl.DataFrame, second: pl.DataFrame) -> tuple[Int64, Int64, Int64]:
    """Rows of both that overlap, and for how many ns; each in order of time, and without overlaps."""
    start, other = first["start"].to_numpy(), second["start"].to_numpy()
    end, other_end = start + first["duration"].to_numpy(), other + second["duration"].to_numpy()
    low = np.searchsorted(other_end, start, side="right")
    count = np.maximum(np.searchsorted(other, end) - low, 0)
    mine = np.repeat(np.arange(len(start)), count)
    theirs = np.arange(len(mine)) - np.repeat(np.cumsum(count) - count - low, count)
    shared = np.minimum(end[mine], other_end[theirs]) - np.maximum(start[mine], other[theirs])
    return mine, theirs, shared


def shares(pieces: pl.DataFrame, total: int) -> str:
    """Causes with their shares, the largest first."""
    causes = pieces.group_by("cause").agg(pl.col("duration").sum()).sort("duration", descending=True)
    return ", ".join(f"{cause} {100 * ns / max(total, 1):.1f} %" for cause, ns in causes.rows())


def measure(path: str, found: dict[str, dict[str, int]]) -> None:
    """Prints a line about one trace, and adds what its silences were."""
    trace = thence.open(path)
    whole = idle_causes(trace.whole)
    stripped = idle_causes(replace(trace, tables=calls_alone(trace.tables)).whole)
    total = int(stripped["duration"].sum())
    print(f"{path[-40:]}: {shares(whole, total)}; of calls alone: {shares(stripped, total)}")
    for (device,), ours in whole.group_by("device"):
        silent = stripped.filter(pl.col("device") == device, (pl.col("reason") == "only_calls").fill_null(value=False))
        mine, theirs, shared = overlaps(silent, ours)
        rows = pl.DataFrame({
            "us": (silent["duration"].to_numpy() / 1000)[mine], "cause": ours["cause"].cast(pl.String).gather(theirs),
            "ns": shared,
        })  # fmt: skip
        for us, cause, ns in rows.rows():
            limit = next((f"below {limit} us" for limit in LIMITS_US if us < limit), "longer")
            of: dict[str, Any] = found.setdefault(limit, {})
            of[cause] = of.get(cause, 0) + ns


if __name__ == "__main__":
    parser = documented_parser(__doc__)
    parser.add_argument("traces", nargs="+")
    silences: dict[str, dict[str, int]] = {}
    for given in parser.parse_args().traces:
        measure(given, silences)
    for name in (*(f"below {limit} us" for limit in LIMITS_US), "longer"):
        causes = silences.get(name, {})
        ms = sum(causes.values()) / 1e6
        parts = ", ".join(
            f"{cause} {ns / 1e4 / max(ms, 1e-9):.1f} %" for cause, ns in sorted(causes.items(), key=lambda row: -row[1])
        )
        print(f"unknown of calls alone, {name:14}{ms:9.2f} ms: {parts}")
