"""Decides which steps of a run count, by rules for warm-up, outliers and steps without an end.

last       the last of the steps that are executions of an XLA program: it ends with its own last activity, so the
           idle time before the next execution is missing; left out if at least 3 other steps remain.
warm_up    consecutive steps at the beginning that take longer than any ordinary step; at most half of the steps, and
           only in runs of 4 or more steps.
outlier    other steps that take longer or shorter than any ordinary step; only in runs of 8 or more steps, because
           fewer steps do not show what is ordinary.

The length of an ordinary step differs from the median of the second half of the steps (for outliers, of all steps)
by at most 8 scaled median absolute deviations or 10 % of the median, whichever is more. A scaled deviation estimates
the standard deviation of a normal distribution and is robust against outliers (Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Float = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["LAST", "OUTLIER", "RULES", "WARM_UP", "left_out"]

LAST, WARM_UP, OUTLIER = "last", "warm_up", "outlier"
RULES = {
    LAST: "without a next step, so the end is unknown",
    WARM_UP: "warm-up: longer than ordinary steps, at the beginning",
    OUTLIER: "outliers: far from ordinary steps",
}
"""Why a step is left out."""

_SCALE = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""
_DEVIATIONS, _LEAST_SHARE = 8, 0.10
_FEWEST_BESIDE_LAST, _FEWEST_FOR_WARM_UP, _FEWEST_FOR_OUTLIERS = 3, 4, 8


def left_out(total: Float, last: Mask, *, outliers: bool = False) -> list[str | None]:
    """For each step of a run, the key of `RULES` by which it is left out; None if it counts.

    Args:
        total: length of each step in ns, in order of time.
        last: whether a step has no next step.
        outliers: whether outliers count.
    """
    codes: list[str | None] = [None] * len(total)
    counted = np.ones(len(total), np.bool_)
    if (~last).sum() >= _FEWEST_BESIDE_LAST:
        _leave_out(codes, counted, np.flatnonzero(last), LAST)
    rows = np.flatnonzero(counted)
    if len(rows) >= _FEWEST_FOR_WARM_UP:
        _, high = _ordinary(total[rows[len(rows) // 2 :]])
        long = total[rows] > high
        leading = int(np.argmin(long)) if not long.all() else 0
        _leave_out(codes, counted, rows[: min(leading, len(rows) // 2)], WARM_UP)
    rows = np.flatnonzero(counted)
    if len(rows) >= _FEWEST_FOR_OUTLIERS and not outliers:
        low, high = _ordinary(total[rows])
        _leave_out(codes, counted, rows[(total[rows] < low) | (total[rows] > high)], OUTLIER)
    return codes


def _leave_out(
    codes: list[str | None], counted: Mask, rows: npt.NDArray[np.int64], code: str
) -> None:
    counted[rows] = False
    for row in rows:
        codes[row] = code


def _ordinary(total: Float) -> tuple[float, float]:
    """The shortest and the longest ordinary step."""
    if not len(total):
        return 0.0, float("inf")
    median = float(np.median(total))
    deviation = _SCALE * float(np.median(np.abs(total - median)))
    away = max(_DEVIATIONS * deviation, _LEAST_SHARE * median)
    return median - away, median + away
