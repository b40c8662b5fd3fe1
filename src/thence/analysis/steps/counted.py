"""Decides which steps of a run are typical, by rules for the first step, warm-up, outliers and steps without an end.

Every typical figure is of the steps that no rule leaves out: the headline of ``report``, the spread of ``steps``, the
steps that ``--steps typical`` selects, the times of ``whatif``, and comparisons. ``ranks`` keeps outliers, because a
late rank makes them.

first      the first step of the run, and of each device, if there are others: recording begins in it or right before
           it, with an empty queue and, in short runs, with work that later steps do not have
last       the last step if nothing marks its end (`thence.model.tables.ENDLESS`), or if it computed for less than half
           of the median: recording or the loop ended in it. It is left out if at least 3 other steps remain
warm_up    consecutive steps at the beginning that take longer than any ordinary step; at most half of the steps, and
           only in runs of 4 or more steps
outlier    other steps that take longer or shorter than any ordinary step; only in runs of 8 or more steps, because
           fewer steps do not show what is ordinary

The length of an ordinary step differs from the median of the second half of the steps (for outliers, of all steps)
by at most 8 scaled median absolute deviations or 10 % of the median, whichever is more. A scaled deviation estimates
the standard deviation of a normal distribution and is robust against outliers (Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.thresholds import (
    MIN_STEPS_BESIDE_LAST,
    MIN_STEPS_FOR_OUTLIERS,
    MIN_STEPS_FOR_WARM_UP,
    OUTLIER_DEVIATIONS,
    OUTLIER_SHARE,
    REST_OF_STEP_SHARE,
    STANDARD_DEVIATIONS_PER_MAD,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Float64, Mask


FIRST, LAST, WARM_UP, OUTLIER = "first", "last", "warm_up", "outlier"
RULES = {
    FIRST: "the first: recording begins in it or right before it",
    WARM_UP: "warm-up: longer than ordinary steps, at the beginning",
    OUTLIER: "outliers: far from ordinary steps",
    LAST: "the last: nothing marks its end, or it has less than half of the work of the others",
}
"""Why a step is left out."""


def left_out(total: Float64, last: Mask, *, outliers: bool = False) -> list[str | None]:
    """For each step of a run, the key of `RULES` by which it is left out; None if it counts.

    Args:
        total: length of each step in ns, in order of time.
        last: whether a step has no next step.
        outliers: whether outliers count.
    """
    codes: list[str | None] = [None] * len(total)
    counted = np.ones(len(total), np.bool_)
    if (~last).sum() >= MIN_STEPS_BESIDE_LAST:
        _leave_out(codes, counted, np.flatnonzero(last), LAST)
    rows = np.flatnonzero(counted)
    if len(rows) >= MIN_STEPS_FOR_WARM_UP:
        _, high = _ordinary(total[rows[len(rows) // 2 :]])
        long = total[rows] > high
        leading = int(np.argmin(long)) if not long.all() else 0
        _leave_out(codes, counted, rows[: min(leading, len(rows) // 2)], WARM_UP)
    rows = np.flatnonzero(counted)
    if len(rows) >= MIN_STEPS_FOR_OUTLIERS and not outliers:
        low, high = _ordinary(total[rows])
        _leave_out(codes, counted, rows[(total[rows] < low) | (total[rows] > high)], OUTLIER)
    if counted[1:].any() and counted[0]:
        codes[0] = FIRST
    return codes


def without_end(compute: Float64, *, endless: bool) -> Mask:
    """Whether each step of a run is the last one and has no end of its own.

    Args:
        compute: time in which each step computed, in order of time.
        endless: whether nothing marks the ends of the steps.
    """
    last = np.zeros(len(compute), np.bool_)
    if len(compute):
        last[-1] = endless or bool(compute[-1] < REST_OF_STEP_SHARE * np.median(compute))
    return last


def left_out_of_windows(frame: pl.DataFrame, *, endless: bool) -> pl.Series:
    """For each window of a step on a device, the key of `RULES` by which it is left out; null if it is typical.

    A step of several devices is left out on all of them, by the medians over the devices.

    Args:
        frame: rank, device, step, start, duration, busy_ns, exposed_ns and first, as `thence.analysis.steps.windows`
            has them, in its order.
        endless: whether nothing marks the ends of the steps.
    """
    keys = ("step", "occurrence")
    device = ("rank", "device")
    windows = frame.with_columns(occurrence=pl.int_range(pl.len()).over(*device, "step"))
    order = (
        windows.group_by(keys)
        .agg(
            pl.col("start").min(),
            pl.col("duration").median(),
            compute=(pl.col("busy_ns") - pl.col("exposed_ns")).median(),
        )
        .sort("start", *keys)
    )
    last = without_end(order["compute"].to_numpy(), endless=endless)
    codes = left_out(order["duration"].to_numpy(), last)
    of_step = order.select(keys).with_columns(code=pl.Series(codes, dtype=pl.String))
    first = pl.when(pl.col("first") & (pl.len().over(device) > 1)).then(pl.lit(FIRST))
    return windows.join(of_step, on=keys, how="left", maintain_order="left").select(
        left_out=pl.coalesce("code", first)
    )["left_out"]


def _leave_out(codes: list[str | None], counted: Mask, rows: npt.NDArray[np.int64], code: str) -> None:
    counted[rows] = False
    for row in rows:
        codes[row] = code


def _ordinary(total: Float64) -> tuple[float, float]:
    """The shortest and the longest ordinary step."""
    if not len(total):
        return 0.0, float("inf")
    median = float(np.median(total))
    deviation = STANDARD_DEVIATIONS_PER_MAD * float(np.median(np.abs(total - median)))
    away = max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * median)
    return median - away, median + away
