"""Memory that grows from step to step: places of which every step leaves some bytes behind."""

from __future__ import annotations

import polars as pl

from thence.analysis.memory.places import DEVICE

MIN_STEPS = 3
"""Steps that must have left memory behind: two may be a warm-up and the step that was running at the end."""
PLACE = ("module", "source", "op")
"""What identifies a place of growth."""
GROWTH = {
    "rank": pl.Int32(), "device": pl.Int32(), "module": pl.String(), "source": pl.String(), "op": pl.String(),
    "steps": pl.Int64(), "bytes_per_step": pl.Int64(), "total_bytes": pl.Int64(),
}  # fmt: skip
"""Columns of `growth`."""


def growth(placed: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """Places where each step allocates memory that is live when the trace ends, in the columns of `GROWTH`.

    A place grows if at least `MIN_STEPS` steps in a row left something, up to the last step or the one before it. What
    only the first steps leave (states of an optimizer) or only the last one (gradients) is not growth.

    Args:
        placed: allocations with rank, device, allocator, end, bytes, step (row of steps) and the columns of `PLACE`.
        steps: of the trace.
    """
    order = steps.with_row_index("step").select(
        pl.col("step").cast(pl.Int64),
        position=pl.col("start").rank("ordinal").over("rank", "device").cast(pl.Int64),
        last=pl.len().over("rank", "device").cast(pl.Int64),
    )
    left = (
        placed.filter(pl.col("end").is_null(), pl.col("step").is_not_null())
        .group_by(*DEVICE, *PLACE, "step")
        .agg(bytes=pl.col("bytes").sum())
        .join(order, on="step")
        .group_by(*DEVICE, *PLACE)
        .agg(
            steps=pl.len().cast(pl.Int64),
            first=pl.col("position").min(),
            until=pl.col("position").max(),
            last=pl.col("last").first(),
            bytes_per_step=pl.col("bytes").median().round().cast(pl.Int64),
            total_bytes=pl.col("bytes").sum(),
        )
    )
    without_gap = pl.col("until") - pl.col("first") + 1 == pl.col("steps")
    growing = left.filter(pl.col("steps") >= MIN_STEPS, without_gap, pl.col("until") >= pl.col("last") - 1)
    return growing.select(pl.col(name).cast(dtype) for name, dtype in GROWTH.items()).sort(
        "total_bytes", "rank", "device", *PLACE, descending=[True, *[False] * 5], nulls_last=True
    )
