"""The time that a host works for a step: a lower bound of the step's length, whatever the other ranks do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import covered_lengths
from thence.model.thresholds import FULL_QUEUE_CALL_NS, FULL_QUEUE_CALL_RATIO

if TYPE_CHECKING:
    from thence.model.attributed import Attributed


def host_work(trace: Attributed, steps: pl.DataFrame) -> pl.Series:
    """The length of each step on its host, less calls that waited for the device and launches that waited for room.

    Args:
        trace: the attributed trace.
        steps: rank, host_start and host_ns, as `thence.analysis.steps.windows` returns them.

    Returns:
        ns, in the order of the steps; null if the step has no times on the host, or the rank no launch.
    """
    rows = steps.select("rank", "host_start", "host_ns").with_row_index("at")
    work = np.zeros(rows.height, np.int64)
    known = np.zeros(rows.height, np.bool_)
    waited = _waited(trace)
    rows = rows.drop_nulls()
    number, ranks = numbered(pl.concat([rows.select("rank"), waited.select("rank")]), "rank")
    steps_of = rows_of_groups(number[: rows.height], ranks.height)
    waited_of = rows_of_groups(number[rows.height :], ranks.height)
    at, begin, length = (rows[name].to_numpy() for name in ("at", "host_start", "host_ns"))
    start, end, waits = (waited[name].to_numpy() for name in ("start", "end", "waits"))
    for ours, of_rank in zip(steps_of, waited_of, strict=True):
        if not len(of_rank):
            continue
        waiting = of_rank[waits[of_rank]]
        covered = covered_lengths(begin[ours], begin[ours] + length[ours], start[waiting], end[waiting])
        work[at[ours]], known[at[ours]] = length[ours] - covered, True
    return pl.Series("host_ns", work).set(pl.Series(~known), None)


def _waited(trace: Attributed) -> pl.DataFrame:
    """Launches, and calls that wait for the device: rank, start, end, and waits (whether it waited for the device)."""
    columns = ("rank", "start", "duration")
    rows = trace.places["launch"].drop_nulls().unique()
    launches = trace.host[rows.cast(pl.UInt32)].select(columns)
    usual = pl.col("duration").median().over("rank")
    slow = (pl.col("duration") > FULL_QUEUE_CALL_RATIO * usual) & (pl.col("duration") > FULL_QUEUE_CALL_NS)
    waits = trace.host[trace.waits["host"].cast(pl.UInt32)].select(columns)
    every = pl.concat([launches.with_columns(waits=slow), waits.with_columns(waits=pl.lit(value=True))])
    return every.with_columns(end=pl.col("start") + pl.col("duration")).sort("rank", "start")
