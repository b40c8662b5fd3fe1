"""What holds memory of a device beside the allocator of the framework: what others got from CUDA, by place.

    outside = bytes of these rows + rest

The rest is CUDA's context, code of kernels, and what CUDA rounds up. Where more is live by the records than the driver
counts, as after returns that were not recorded, nothing is split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.memory.places import DEVICE, HOST_DEVICE, PLACES, MemoryPlaces, with_device
from thence.attribution.host_rows import gathered
from thence.model.tables import CUDA_ALLOCATOR

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

OUTSIDE = {
    "by": pl.String(), "name": pl.String(), "library": pl.String(), "rank": pl.Int32(), "device": pl.Int32(),
    "bytes": pl.Int64(), "count": pl.Int64(),
}  # fmt: skip
"""Columns of `outside`."""
_OF_DEVICE = ("rank", "device")


def outside(trace: Attributed, chosen: pl.DataFrame, by: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What was live outside of the allocators at one moment of each.

    Args:
        chosen: as `thence.analysis.memory.moments.moments` returns it.
        by: one of `thence.model.places.MEMORY_BY`.

    Returns:
        rows in the columns of `OUTSIDE`, the most bytes first; and rank, device and ``rest`` of each device of which
        both the rows and what the driver counts are known.
    """
    live = _live(trace, chosen)
    name = _name(trace, live, by)
    rows = live.group_by(*_OF_DEVICE, name=name, library=pl.col("pool").cast(pl.String)).agg(
        pl.col("bytes").sum(), pl.len().cast(pl.Int64).alias("count")
    )
    sums = rows.group_by(_OF_DEVICE).agg(seen=pl.col("bytes").sum())
    counted = chosen.group_by(_OF_DEVICE).agg(pl.col("outside").max())
    both = sums.join(counted, on=_OF_DEVICE).with_columns(rest=pl.col("outside") - pl.col("seen"))
    too_much = both.filter(pl.col("rest") < 0)
    order = ("bytes", "rank", "device", "name", "library")
    shown = rows.join(too_much, on=_OF_DEVICE, how="anti").with_columns(by=pl.lit(by))
    shown = shown.sort(*order, descending=[True, *[False] * 4], nulls_last=True)
    known = both.filter(pl.col("rest") >= 0).select(*_OF_DEVICE, "rest")
    return shown.select(pl.col(column).cast(dtype) for column, dtype in OUTSIDE.items()), known


def _live(trace: Attributed, chosen: pl.DataFrame) -> pl.DataFrame:
    """What CUDA handed out to others than the allocators whose readings are known, and was live at their moments."""
    of_allocators = with_device(trace.memory_totals).select(DEVICE).unique()
    of_cuda = trace.memory.filter(pl.col("allocator") == CUDA_ALLOCATOR, pl.col("device").is_not_null())
    others = of_cuda.join(of_allocators, on=DEVICE, how="anti", maintain_order="left")
    peaks = chosen.filter(pl.col("device") != HOST_DEVICE).group_by(_OF_DEVICE).agg(at=pl.col("start").max())
    timed = others.join(peaks, on=_OF_DEVICE, maintain_order="left")
    return timed.filter(pl.col("start") <= pl.col("at"), (pl.col("end") > pl.col("at")).fill_null(value=True))


def _name(trace: Attributed, live: pl.DataFrame, by: str) -> pl.Series:
    places = MemoryPlaces(trace, live)
    if by in PLACES:
        return places.of_calls(by).cast(pl.String)
    if by == "rank":
        return live["rank"].cast(pl.String)
    if by == "step":
        return gathered(trace.steps["name"].cast(pl.String), places.step)
    return pl.Series([None] * live.height, dtype=pl.String)
