"""Estimates from windows: shares of all steps, with intervals, from those that were recorded.

A share is the sum over windows of a part, over the sum of the whole. Its interval is a bootstrap over windows: as many
windows are drawn with replacement, many times, and quantiles of the share bound it. Few windows vary less among each
other than all steps do, so the quantiles lie further out, by Student's t (Hesterberg, What teachers should know about
the bootstrap, The American Statistician 69, 2015: the expanded percentile interval). With 10 to 50 windows of skewed
times, 2.5 % on each side still left out 6 to 7 % instead of 5 %; `_OUTSIDE` makes up for that.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from thence.analysis.student_t import quantile

if TYPE_CHECKING:
    from thence.model.arrays import Float64

MIN_WINDOWS = 5
"""Fewer windows give no interval."""
CONFIDENCE = 0.95
"""The share of intervals that contain the share of all steps, at least."""
_OUTSIDE = 0.015  # of the draws, on each side; not 0.025, as said above
_DRAWS = 2_000
_MAX_BLOCKS = 200
"""More windows are put together, each with those that follow it."""
_SEED = 0  # fixed: the same windows have the same interval


def share_intervals(parts: Float64, whole: Float64) -> Float64 | None:
    """Bounds between which the shares of parts lie with `CONFIDENCE`, each for itself.

    Args:
        parts: a row for each window, in order of time, with a column for each part.
        whole: of each window, above 0.

    Returns:
        a row of low and one of high bounds; None if there are fewer than `MIN_WINDOWS`.
    """
    if len(whole) < MIN_WINDOWS:
        return None
    blocks = min(len(whole), _MAX_BLOCKS)
    begins = np.linspace(0, len(whole), blocks, endpoint=False).astype(np.int64)
    parts, whole = np.add.reduceat(parts, begins, axis=0), np.add.reduceat(whole, begins)
    drawn = _draws(blocks)
    shares = (drawn @ parts) / (drawn @ whole)[:, None]
    bounds: Float64 = np.quantile(shares, (_outside(blocks), 1 - _outside(blocks)), axis=0)
    return bounds


@lru_cache(maxsize=8)
def _draws(windows: int) -> Float64:
    """How often each window is in each draw."""
    drawn = np.random.default_rng(_SEED).multinomial(windows, np.full(windows, 1 / windows), _DRAWS)
    return drawn.astype(np.float64)


@lru_cache(maxsize=512)
def _outside(windows: int) -> float:
    t = float(quantile(2 * _OUTSIDE, np.array([windows - 1.0]))[0])
    return NormalDist().cdf(-t * float(np.sqrt(windows / (windows - 1))))
