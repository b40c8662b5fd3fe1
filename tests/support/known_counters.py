"""Samples of counters beside kernels of known work, as traces, and how far shares are from the truth.

`tests/data/counters/ORIGIN.md` describes the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import thence
from thence.analysis.counters.measured import measured
from thence.model.tables import COUNTERS, GPU, Device, Meta, Tables

DATA = Path(__file__).parents[1] / "data" / "counters"
PRODUCTS, ADDITIONS = range(5), range(5, 10)
DETERMINED = {
    "tensor_cycles": PRODUCTS, "instructions": range(10), "fma_instructions": ADDITIONS, "dram_read_bytes": ADDITIONS,
}  # fmt: skip
LAUNCHES = 1800
PARTS = {"all launches": LAUNCHES, "a sixth of them": LAUNCHES // 6, "a thirty-sixth": LAUNCHES // 36}


def opened(path: Path) -> tuple[thence.Trace, dict[str, Any]]:
    """The kernels and samples of a file as a trace, and its arrays."""
    with np.load(path) as file:
        data = {name: file[name] for name in file.files}
    names, start, begin = data["counters"].tolist(), np.cumsum(data["kernel_step"]), np.cumsum(data["sample_step"])
    rows, samples = len(start), len(begin)
    zero = np.zeros(rows, np.int32)
    gpu = {
        "rank": zero, "device": zero, "stream": zero, "kind": ["kernel"] * rows, "start": start,
        "name": [f"kernel {number}" for number in data["kernel_name"]], "duration": data["kernel_length"],
    }  # fmt: skip
    counters = {
        "rank": np.zeros(samples, np.int32), "device": np.zeros(samples, np.int32), "start": begin,
        "end": begin + data["sample_length"], **{name: data[name].astype(np.float64) for name in names},
    }  # fmt: skip
    meta = Meta(inputs=(path.name,), devices=(Device(0, 0, "NVIDIA H200", compute_capability="9.0"),))
    return thence.Trace(Tables(gpu=GPU.frame(gpu), counters=COUNTERS.frame(counters), meta=meta)), data


def figures(trace: thence.Trace, data: dict[str, Any], launches: int) -> pl.DataFrame:
    """Error and stated error of each counter that the work determines, for each work and each run of so many launches.

    Returns:
        columns counter, work, part, launches, truth, error (share) and stated (half of the 95 % interval, share).
    """
    part = data["launch"] // launches
    group = part.astype(np.int64) * 10 + data["work"]
    parts = pl.DataFrame({"gpu": np.arange(len(group), dtype=np.int32), "part": trace.tables.gpu["duration"],
                          "group": group})  # fmt: skip
    nothing = pl.DataFrame({"dtype": pl.Series([None] * len(group), dtype=pl.String),
                            "flop": pl.Series([None] * len(group), dtype=pl.Float64)})  # fmt: skip
    exact = measured(trace.tables, parts, nothing, precision=np.inf)
    kernels = np.array([1, 1, 1, 2, 2, 1, 1, 1, 1, 1])
    count = np.bincount(group, minlength=exact.height) / kernels[np.arange(exact.height) % 10]
    rows = []
    for column, (name, works) in enumerate(DETERMINED.items()):
        found = exact.select(name, error=pl.col("error").struct.field(name)).rows()
        for number, (amount, stated) in enumerate(found):
            truth = count[number] * data["known"][number % 10, column]
            if number % 10 in works and truth:
                rows.append((name, number % 10, number // 10, count[number], truth, amount / truth - 1, stated))
    columns = ("counter", "work", "part", "launches", "truth", "error", "stated")
    return pl.DataFrame(rows, columns, orient="row")


def inside(rows: pl.DataFrame, precision: float) -> tuple[int, int, int]:
    """How many figures there are, how many of them are precise enough to be shown, and how many of these hold."""
    shown = rows.filter(pl.col("stated") <= precision)
    amount = 1 + pl.col("error")
    return rows.height, shown.height, shown.filter(pl.col("error").abs() <= amount * pl.col("stated")).height
