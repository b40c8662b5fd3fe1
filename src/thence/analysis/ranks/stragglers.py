"""Which ranks are late in more than noise, by how much, and since which step.

Of every device and step the samples are what it caused less what the other devices caused on average: among equal
ranks, whoever comes last by chance, their mean is 0. A straggler is a device

- that caused more than `LEAST_SHARE` of a step's time on average, and
- the lower bound of whose mean sample is above 0, where the bounds of all devices hold together (Bonferroni's
  correction for the devices, and for the steps since which one may be late) with `SURE`: of a hundred jobs without a
  late rank at most one names a straggler. The bound that is shown holds with `CONFIDENCE`.

Single steps that take far longer than all others say little of the rest, and much of the mean's error: beside the mean
of all samples, that of the samples without the fifth at either end is tested (Yuen, 1974), for both tests corrected.

A device may become late in a later step: all steps are tried, and where the run as a whole does not pass, the part
since the step that divides the samples best (least squares) is tested, corrected for the number of steps. Since then
it is late if it was in time before, or caused less than half as much (medians) in at least `FEWEST_STEPS` steps.
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
_TRIMMED = 5
"""The samples of which one at either end is left out, of the trimmed mean."""


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
    """Whether a device was in time before a step, or half as late, and caused more than twice as much since."""
    after = np.arange(caused.shape[1]) >= begin[:, None]
    count = np.maximum(after.sum(axis=1), 1)
    late = (caused * after).sum(axis=1) / count
    early = (caused * ~after).sum(axis=1) / np.maximum((~after).sum(axis=1), 1)
    half = np.array(
        [
            at >= FEWEST_STEPS and 2 * np.median(row[:at]) < np.median(row[at:])
            for row, at in zip(caused, begin, strict=True)
        ],
        np.bool_,
    )
    result: npt.NDArray[np.bool_] = (
        (begin > 0) & ((early < LEAST_SHARE * step_ns) | half) & (late > 2 * early)
    )
    return result


def _bounds(sample: Float, caused: Float, begin: Int64, tests: int) -> tuple[Float, Float, Float]:
    """The means of what was caused since a step, and lower bounds of the mean samples: `CONFIDENCE` and `SURE`.

    Bounds are NaN where there are too few steps.
    """
    counted = np.arange(sample.shape[1]) >= begin[:, None]
    count = counted.sum(axis=1)
    cut = count // _TRIMMED
    # Where nothing can be cut both means are one, and one test.
    both = 2 * tests if sample.shape[1] >= _TRIMMED else tests
    plain = _bounds_of_mean(sample, begin, np.zeros_like(count), both)
    trimmed = _bounds_of_mean(sample, begin, cut, both)
    low, sure = (np.maximum(a, b) for a, b in zip(plain, trimmed, strict=True))
    return (caused * counted).sum(axis=1) / np.maximum(count, 1), low, sure


def _bounds_of_mean(sample: Float, begin: Int64, cut: Int64, tests: int) -> tuple[Float, Float]:
    """Lower bounds of each row's mean since a step, without the ``cut`` smallest and largest values."""
    steps = sample.shape[1]
    counted = np.arange(steps) >= begin[:, None]
    count = counted.sum(axis=1)
    ordered = np.sort(np.where(counted, sample, -np.inf), axis=1)
    first, last = (begin + cut)[:, None], (steps - 1 - cut)[:, None]
    place = np.arange(steps)
    kept = (place >= first) & (place <= last)
    left = np.maximum(kept.sum(axis=1), 1)
    mean = np.where(kept, ordered, 0).sum(axis=1) / left
    # The error of a trimmed mean is that of the samples with the cut ones put at the ends of the others.
    ends = [np.take_along_axis(ordered, np.clip(at, 0, steps - 1), axis=1) for at in (first, last)]
    put = np.where(counted, np.clip(ordered, *ends), 0)
    middle = put.sum(axis=1) / np.maximum(count, 1)
    squares = np.where(counted, np.square(put - middle[:, None]), 0).sum(axis=1)
    error = np.sqrt(squares / left / np.maximum(left - 1, 1))
    enough = left >= FEWEST_STEPS
    # The quantile is of both tails together.
    low, sure = (
        np.where(enough, mean - quantile(2 * (1 - confidence) / tests, left - 1.0) * error, np.nan)
        for confidence in (CONFIDENCE, SURE)
    )
    return low, sure
