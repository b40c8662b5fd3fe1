"""How long a host works for a step: a step can be no shorter than that, whatever the other ranks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import covered_lengths

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]

__all__ = ["host_work"]

_SLOW = 20
"""How many times the median a launch has to take to be one that waited: for room in the device's queue."""
_LEAST_NS = 100_000
"""What such a launch takes at least."""


def host_work(trace: Attributed, steps: pl.DataFrame) -> pl.Series:
    """The length of each step on its host, less calls that waited for the device and launches that waited for room.

    Args:
        trace: attributed.
        steps: rank, host_start, host_ns, of `thence.analysis.steps.windows`.

    Returns:
        ns, in the order of the steps; null where the host shows no step, or the rank no launch.
    """
    rows = steps.select("rank", "host_start", "host_ns").with_row_index("at")
    work = np.zeros(rows.height, np.int64)
    known = np.zeros(rows.height, np.bool_)
    waited = _waited(trace)
    for (rank,), ours in rows.drop_nulls().group_by("rank"):
        of_rank = waited.filter(pl.col("rank") == rank)
        if of_rank.is_empty():
            continue
        waits = of_rank.filter("waits")
        begin, length = ours["host_start"].to_numpy(), ours["host_ns"].to_numpy()
        covered = covered_lengths(
            begin, begin + length, waits["start"].to_numpy(), waits["end"].to_numpy()
        )
        at = ours["at"].to_numpy()
        work[at], known[at] = length - covered, True
    return pl.Series("host_ns", work).set(pl.Series(~known), None)


def _waited(trace: Attributed) -> pl.DataFrame:
    """Launches, and calls that wait for the device: rank, start, end, and whether the device made it wait."""
    columns = ("rank", "start", "duration")
    rows = trace.places["launch"].drop_nulls().unique()
    launches = trace.host[rows.cast(pl.UInt32)].select(columns)
    usual = pl.col("duration").median().over("rank")
    slow = (pl.col("duration") > _SLOW * usual) & (pl.col("duration") > _LEAST_NS)
    waits = trace.host[trace.waits["host"].cast(pl.UInt32)].select(columns)
    every = pl.concat(
        [launches.with_columns(waits=slow), waits.with_columns(waits=pl.lit(value=True))]
    )
    return every.with_columns(end=pl.col("start") + pl.col("duration")).sort("rank", "start")
