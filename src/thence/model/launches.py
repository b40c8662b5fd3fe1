"""Matches device activities to the host rows that launched them, by shared ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["CALLS", "IDENTIFIED", "matched_rows"]

CALLS = pl.col("category").is_in(API_CALLS)
"""Host rows that are API calls."""
IDENTIFIED = pl.col("correlation") != 0
"""Host rows with a correlation id: CUPTI and Nsight Systems write 0 where there is none."""


def matched_rows(
    gpu: pl.DataFrame, host: pl.DataFrame, key: str, among: pl.Expr
) -> npt.NDArray[np.int64]:
    """The host row with the same key as each activity, in the same rank.

    A key that several of these host rows share identifies none of them.

    Args:
        gpu: table of activities.
        host: table of host ranges.
        key: column of both: correlation or external.
        among: which host rows count.

    Returns:
        Row numbers in ``host``, one for each row of ``gpu``; `NO_ROW` where there is none.
    """
    used = gpu.select("rank", key).filter(pl.col(key).is_not_null()).unique().lazy()
    once = (
        host.with_row_index("launch")
        .lazy()
        .filter(among)
        .select("rank", key, "launch")
        .join(used, on=["rank", key], how="semi")
        .unique(["rank", key], keep="none")
    )
    joined = (
        gpu.lazy()
        .select("rank", key)
        .join(once, on=["rank", key], how="left", maintain_order="left")
    )
    return (
        joined.select(pl.col("launch").cast(pl.Int64).fill_null(NO_ROW))
        .collect()
        .to_series()
        .to_numpy()
    )
