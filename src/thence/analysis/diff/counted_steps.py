"""Which steps of a run count: stated rules for warm-up, outliers and steps without an end.

last       the last of the steps that are executions of an XLA program: it ends with its own last activity, so the
           idle time before a next one is missing; left out where at least 3 other steps remain.
warm_up    steps at the beginning, one after the other, that take longer than any ordinary step; at most half, and
           only in runs of 4 steps and more.
outlier    other steps that take longer or shorter than any ordinary step; only in runs of 8 steps and more, as
           of fewer nobody can say what is ordinary.

An ordinary step is at most 8 scaled median absolute deviations, and in any case 10 %, from the median of the
second half of the steps (of all for outliers). A scaled deviation estimates the standard deviation of a normal
distribution, whatever the outliers are (Rousseeuw and Croux, 1993).
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
    LAST: "without a next step, so that its end is not known",
    WARM_UP: "warm-up: longer than ordinary steps, at the beginning",
    OUTLIER: "outliers: far from ordinary steps",
}
"""Why a step is left out."""

_SCALE = 1.4826
"""The standard deviation of a normal distribution in median absolute deviations."""
_DEVIATIONS, _LEAST_SHARE = 8, 0.10
_FEWEST_BESIDE_LAST, _FEWEST_FOR_WARM_UP, _FEWEST_FOR_OUTLIERS = 3, 4, 8


def left_out(total: Float, last: Mask, *, outliers: bool = False) -> list[str | None]:
    """For each step of a run why it is left out, a key of `RULES`; None where it counts.

    Args:
        total: length of each step in ns, in order of time.
        last: which have no next step.
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
