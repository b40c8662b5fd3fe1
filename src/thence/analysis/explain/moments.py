"""Moments that show a finding: the longest execution of a kernel, the longest piece of idle time, the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.explain.finding import Moment
from thence.analysis.steps.windows import selected_steps
from thence.model.answer import result_or_reason

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

WINDOWS = {"rank": pl.Int32, "device": pl.Int32, "step": pl.String, "start": pl.Int64, "duration": pl.Int64}
"""Columns of the windows of steps."""


def longest_executions(trace: Attributed) -> dict[str, Moment]:
    """The longest execution of the kernel that takes most time, by its name."""
    sums = trace.gpu.group_by("name").agg(pl.col("duration").sum(), text=pl.col("name").first().cast(pl.String))
    largest = sums.sort("duration", "text", descending=[True, False]).head(1)
    longest = longest_piece(trace.gpu.join(largest.select("name"), on="name", how="semi"))
    return {} if longest is None else {str(largest["text"][0]): longest}


def step_windows(trace: Attributed) -> pl.DataFrame:
    """`thence.analysis.explain.answer.Composed.windows` of a trace; empty if it has no steps."""
    steps = result_or_reason(lambda: selected_steps(trace)).result
    empty = pl.DataFrame(schema=WINDOWS)
    return empty if steps is None else steps.frame.select(pl.col(n).cast(t) for n, t in WINDOWS.items())


def longest_piece(pieces: pl.DataFrame) -> Moment | None:
    """The longest of some pieces of time."""
    rows = pieces.sort("duration", "rank", "device", "start", descending=[True, False, False, False]).head(1)
    columns = ("rank", "device", "start", "duration")
    return next((Moment(*map(int, row)) for row in rows.select(columns).rows()), None)
