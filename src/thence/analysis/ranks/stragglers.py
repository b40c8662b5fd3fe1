"""Which ranks are late in more than noise, by how much, and since which step.

Of every device and step the samples are what it caused less what the other devices caused on average: among equal
ranks, whoever comes last by chance, their mean is 0. A straggler is a device

- that caused more than `LEAST_SHARE` of a step's time on average, and
- the lower bound of whose mean sample is above 0, where the bounds of all devices hold together (Bonferroni's
  correction for the devices, and for the steps since which one may be late) with `SURE`: of a hundred jobs in which
  nobody is late, one names somebody at most. The bound that is told holds with `CONFIDENCE`.

It may be late since a later step only: all steps are tried, and where the run as a whole does not pass, the part since
the step that divides the samples best (least squares) is tested, corrected for the number of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.student import quantile

if TYPE_CHECKING:
    import numpy.typing as npt

    Float = npt.NDArray[np.float64]
    Int64 = npt.NDArray[np.int64]

__all__ = ["CONFIDENCE", "FEWEST_STEPS", "LEAST_SHARE", "SURE", "late_since"]

LEAST_SHARE = 0.02
"""Of a step's time that a straggler costs the others."""
CONFIDENCE = 0.95
"""With which all lower bounds that are told hold together."""
SURE = 0.99
"""With which all bounds must be above 0."""
FEWEST_STEPS = 3
"""Of which a bound can be told."""


def late_since(caused: Float, step_ns: float) -> pl.DataFrame:
    """Which devices are stragglers.

    Args:
        caused: what each device caused in each step, ns, shape (devices, steps), in order of time.
        step_ns: mean time of a step.

    Returns:
        one row per device: straggler, since (number of the step, 0 where late from the beginning; null for
        others), mean_ns (of what it caused per step, since then), low_ns (lower bound of the mean
        sample; null with fewer than `FEWEST_STEPS` steps), steps (that these are of).
    """
    devices, steps = caused.shape
    others = (caused.sum(axis=0) - caused) / max(devices - 1, 1)
    sample = (
        caused - others if devices > 1 else caused * 0.0
    )  # one device has nobody to cause anything
    begin = _divides_best(caused)
    whole, parts = np.zeros(devices, np.int64), _candidates(caused, begin, step_ns)
    tests, least = 2 * devices, LEAST_SHARE * step_ns
    mean, low, sure = _bounds(sample, caused, whole, tests)
    late = (mean > least) & (sure > 0)
    mean_of_part, low_of_part, sure = _bounds(sample, caused, parts, tests * max(steps, 1))
    late_of_part = (mean_of_part > least) & (sure > 0) & (parts > 0)
    # A run that is late as a whole may still have begun in time.
    later = late_of_part & (~late | _in_time(caused, parts, step_ns))
    since = np.where(later, parts, 0)
    found = late | later
    lows = np.where(later, low_of_part, low)
    return pl.DataFrame(
        {
            "straggler": found,
            "since": pl.Series(since).set(pl.Series(~found), None),
            "mean_ns": np.where(later, mean_of_part, mean),
            "low_ns": pl.Series(lows).fill_nan(None),
            "steps": steps - since,
        }
    )


def _divides_best(values: Float) -> Int64:
    """For each row the first column of the second part, where two means fit best."""
    devices, steps = values.shape
    if steps < FEWEST_STEPS + 1:
        return np.zeros(devices, np.int64)
    sums = np.cumsum(values, axis=1)
    total = sums[:, -1:]
    before = np.arange(1, steps)
    # The larger this is, the less is left of the squares.
    between = np.square(sums[:, :-1]) / before + np.square(total - sums[:, :-1]) / (steps - before)
    between[:, steps - FEWEST_STEPS :] = -np.inf
    result: Int64 = np.argmax(between, axis=1) + 1
    return result


def _candidates(caused: Float, begin: Int64, step_ns: float) -> Int64:
    """The begin of the later part where it is late and the earlier one is not; else 0."""
    return np.where(_in_time(caused, begin, step_ns), begin, 0)


def _in_time(caused: Float, begin: Int64, step_ns: float) -> npt.NDArray[np.bool_]:
    """Whether a device was in time before a step, and caused more than twice as much since."""
    after = np.arange(caused.shape[1]) >= begin[:, None]
    count = np.maximum(after.sum(axis=1), 1)
    late = (caused * after).sum(axis=1) / count
    early = (caused * ~after).sum(axis=1) / np.maximum((~after).sum(axis=1), 1)
    result: npt.NDArray[np.bool_] = (
        (begin > 0) & (early < LEAST_SHARE * step_ns) & (late > 2 * early)
    )
    return result


def _bounds(sample: Float, caused: Float, begin: Int64, tests: int) -> tuple[Float, Float, Float]:
    """The means of what was caused since a step, and lower bounds of the mean samples: `CONFIDENCE` and `SURE`.

    Bounds are NaN where there are too few steps.
    """
    counted = np.arange(sample.shape[1]) >= begin[:, None]
    count = counted.sum(axis=1)
    mean = (sample * counted).sum(axis=1) / np.maximum(count, 1)
    squares = (np.square(sample - mean[:, None]) * counted).sum(axis=1)
    error = np.sqrt(squares / np.maximum(count - 1, 1) / np.maximum(count, 1))
    enough = count >= FEWEST_STEPS
    freedom = np.maximum(count - 1.0, 1.0)
    # The quantile is of both tails together.
    low, sure = (
        np.where(enough, mean - quantile(2 * (1 - confidence) / tests, freedom) * error, np.nan)
        for confidence in (CONFIDENCE, SURE)
    )
    return (caused * counted).sum(axis=1) / np.maximum(count, 1), low, sure
