"""Selects the host NVTX ranges of an archive that are part of compilation, as host ranges of category compile.

These are the XlaCompile ranges, XLA's ranges inside them on the same thread, and XLA's ranges on other threads
during an XlaCompile range: XLA compiles with a thread pool, on whose threads the outermost ranges have no parent.
Ranges of other libraries (cuBLAS, NCCL) are left out, so their time counts as time of the XLA range around them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.intervals import NO_ROW, chain_to, longest_begun
from thence.model.tables import HOST_CATEGORIES
from thence.readers.nesting import host_order, host_parents
from thence.readers.nsys_jax.archive import as_int64, renamed
from thence.readers.nsys_jax.projection import bounded_nesting

if TYPE_CHECKING:
    import numpy.typing as npt

_COLUMNS = {
    "name": ("Name",),
    "start": ("Start (ns)", "Start"),
    "end": ("End (ns)", "End"),
    "process": ("PID", ""),  # dropped by newer wrappers
    "thread": ("TID",),
}
_NUMBERS = ("start", "end", "process", "thread")
_COMPILE = r"^(?:TSL:)?XlaCompile(?::#|$)"
_OF_XLA = r"^(?:TSL:)?(?:Xla|Thunk:#)"


def compile_ranges(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    """Compile ranges with columns name, start, duration (ns), process, thread and parent (row).

    Rows are sorted by process, thread and start. A parent is on the same thread; the outermost range of
    a worker thread has none. If the table lacks process ids, process is null.

    Args:
        frame: content of report_nvtx_pushpop_trace, as Parquet or CSV.
        path: for messages.

    Raises:
        DamagedInput: a needed column is missing or of another type.
    """
    ranges = renamed(frame, _COLUMNS, path)
    if ranges.schema["name"] not in (pl.String, pl.Categorical, pl.Null):
        raise DamagedInput(path, f"holds names of type {ranges.schema['name']}; expected text")
    ranges = (
        as_int64(ranges, _NUMBERS, path)
        .with_columns(pl.col("name").cast(pl.String))
        .filter(pl.col("name").str.contains(_OF_XLA), pl.col("end") >= pl.col("start"))
        .filter(pl.col("thread").is_not_null())
    )
    ranges, parent = _nested(ranges)
    kept = _in_compilation(ranges, parent)
    numbers = np.full(ranges.height + 1, NO_ROW, np.int64)  # the last element is for no parent
    numbers[np.flatnonzero(kept)] = np.arange(kept.sum())
    parents = pl.Series(numbers[parent[kept]], dtype=pl.Int64)
    return ranges.filter(pl.Series(kept)).select(
        pl.col("name").str.strip_prefix("TSL:"),
        "start",
        (pl.col("end") - pl.col("start")).alias("duration"),
        "process",
        "thread",
        parents.replace(NO_ROW, None).alias("parent"),
    )


def _nested(ranges: pl.DataFrame) -> tuple[pl.DataFrame, npt.NDArray[np.int64]]:
    """The ranges sorted by process, thread and start, and the parent of each."""
    track = ranges.select(pl.struct("process", "thread").rank("dense")).to_series().to_numpy()
    category = np.full(ranges.height, HOST_CATEGORIES.index("compile"), np.uint8)
    start = ranges["start"].to_numpy()
    duration = ranges["end"].to_numpy() - start
    order = host_order(track, category, start, duration)
    parent = host_parents(track[order], category, start[order], duration[order])
    return ranges[order], bounded_nesting(parent)


def _in_compilation(ranges: pl.DataFrame, parent: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """A mask of the ranges below an XlaCompile, and of ranges of other threads that lie inside one in time."""
    is_compile: npt.NDArray[np.bool_] = ranges["name"].str.contains(_COMPILE).to_numpy()
    rows = np.arange(ranges.height)
    below: npt.NDArray[np.bool_] = chain_to(parent, rows, is_compile) >= 0
    top = chain_to(parent, rows, parent == NO_ROW)
    start, end = ranges["start"].to_numpy(), ranges["end"].to_numpy()
    compiles = np.flatnonzero(is_compile)
    if len(compiles) == 0:
        return below
    # Of the XlaCompile ranges that began before an outermost range, it is enough to check the one that ends last:
    # if any of them contains the range, so does that one. A range below an XlaCompile is in the mask anyway.
    longest = longest_begun(start[compiles], end[compiles], start[top])
    during = (longest != NO_ROW) & (end[compiles[longest]] >= end[top])
    result: npt.NDArray[np.bool_] = below | (during & ~is_compile[top])
    return result
