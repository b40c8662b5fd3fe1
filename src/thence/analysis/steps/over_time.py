"""The steps of a job over time: how long each took, divided into compute, exposed communication and idle time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from thence.analysis.steps.windows import Steps

MAX_COLUMNS = 300
"""With more steps, consecutive ones are put together."""
_TOO_LONG = 4
"""Steps that take longer than this many typical steps, as those that compile, are listed and not drawn."""


@dataclass(frozen=True)
class StepsOverTime:
    """The steps over time. Times are ns, means over the devices.

    Attributes:
        rows: in order of time: name (of the step, or of the first and the last of several), left_out (the rule by
            which the step is not typical, as in `Steps`; null if it is), start_ns (since the first step) and end, and
            as means of its steps compute_ns (the GPU is busy, and not only with communication), exposed_ns (it only
            communicates) and idle_ns, which add up to their duration.
        too_long: name and duration_ns of the steps that are not in ``rows``, as they are so long that nothing could be
            seen beside them.
        steps: number of steps.
        devices: number of devices.
    """

    rows: pl.DataFrame
    too_long: pl.DataFrame
    steps: int
    devices: int


def steps_over_time(steps: Steps) -> StepsOverTime:
    """The steps over time. The nth steps of all devices count as one."""
    device = ["rank", "device"]
    times = ("duration", "busy_ns", "exposed_ns", "idle_ns")
    every = (
        steps.frame.with_columns(
            turn=pl.int_range(pl.len()).over(device), start=pl.col("start") - pl.col("start").min().over(device)
        )
        .group_by("turn")
        .agg(pl.col("step", "left_out").first(), pl.col("start", *times).mean())
        .sort("turn")
    )
    typical = float(str(steps.typical["duration"].median()))
    long = pl.col("duration") > _TOO_LONG * typical
    shown, too_long = every.filter(~long), every.filter(long)
    together = -(-shown.height // MAX_COLUMNS)
    rows = (
        shown.with_columns(column=pl.int_range(pl.len()) // max(together, 1))
        .group_by("column", maintain_order=True)
        .agg(
            first=pl.col("step").first().cast(pl.String),
            last=pl.col("step").last().cast(pl.String),
            left_out=pl.col("left_out").first(),
            start_ns=pl.col("start").min(),
            end=(pl.col("start") + pl.col("duration")).max(),
            compute_ns=(pl.col("busy_ns") - pl.col("exposed_ns")).mean(),
            exposed_ns=pl.col("exposed_ns").mean(),
            idle_ns=pl.col("idle_ns").mean(),
        )
        .with_columns(
            name=pl.when(pl.col("first") == pl.col("last")).then("first").otherwise(
                pl.format("mean of {} to {}", "first", "last")
            )
        )
        .drop("column", "first", "last")
    )  # fmt: skip
    names = too_long.select(name=pl.col("step").cast(pl.String), duration_ns="duration")
    return StepsOverTime(rows, names, every.height, steps.frame.select(device).n_unique())
