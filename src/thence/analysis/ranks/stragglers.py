"""Finds which ranks are late by more than noise, by how much, and since which step.

The sample of a device in a step is the wait that it caused, less the mean of the waits that the other devices caused.
Among equal ranks, of which a different one comes last by chance each time, the mean sample is 0. Stragglers do not
count among the other devices: if some are found, all devices are tested again without them, until no more are found. A
device is a straggler if

- it caused waits of more than `LATE_RANK_SHARE` of a step's time on average, and
- the lower bound of its mean sample is above 0. The bounds of all devices hold together with the probability
  `LATE_CONFIDENCE` (Bonferroni's correction for the number of devices, and of the steps since which a device may be
  late): of a hundred jobs without a late rank, a straggler is named in at most one. The bound that is shown holds with
  `SHOWN_CONFIDENCE`.

A single step that takes far longer than all others tells little about the rest, but makes the error of the mean
large. So in addition to the mean of all samples, the mean without the fifth of the samples at either end is tested
(Yuen, 1974), and the bounds are corrected for both tests.

A device may become late in a later step. All steps are tried: the step that divides the waits best into two parts
(least squares) is found, and the part since that step is tested, corrected for the number of steps. The device is late
since that step if it was in time before, or if it caused less than half as much in `_FEWEST_BEFORE` or more earlier
steps (medians).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.student import quantile
from thence.model.thresholds import LATE_CONFIDENCE, LATE_RANK_SHARE, MIN_STEPS_FOR_LATE_RANKS, SHOWN_CONFIDENCE

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Float64, Int64


_FEWEST_BEFORE = 2
"""Minimum number of steps before a device is late: one may be special, because the late host runs ahead of it."""
_TRIMMED = 5
"""The trimmed mean leaves out 1 of this many samples at either end."""


def late_since(caused: Float64, step_ns: float) -> pl.DataFrame:
    """Finds which devices are stragglers.

    Args:
        caused: the wait that each device caused in each step, ns, shape (devices, steps), in order of time.
        step_ns: mean time of a step.

    Returns:
        One row per device: straggler, since (number of the first late step, 0 if it is late from the beginning;
        null if it is no straggler), mean_ns (wait caused per step, since then), low_ns (lower bound of the mean
        sample; null with fewer than `MIN_STEPS_FOR_LATE_RANKS` steps), steps (number of steps that mean_ns and low_ns
        are of).
    """
    known = np.zeros(len(caused), np.bool_)
    while True:
        found = _late_since(caused, step_ns, known)
        late = found["straggler"].to_numpy()
        if (late == known).all():
            return found
        known = late


def _late_since(caused: Float64, step_ns: float, known: npt.NDArray[np.bool_]) -> pl.DataFrame:
    """`late_since`, if it is known that some devices are stragglers."""
    devices, steps = caused.shape
    counted = caused * ~known[:, None]
    others = (counted.sum(axis=0) - counted) / np.maximum((~known).sum() - ~known, 1)[:, None]
    # One device has nobody to cause anything.
    sample = caused - others if devices > 1 else caused * 0.0
    begin = _divides_best(caused)
    whole, parts = np.zeros(devices, np.int64), _candidates(caused, begin, step_ns)
    tests, least = 2 * devices, LATE_RANK_SHARE * step_ns
    mean, low, sure = _bounds(sample, caused, whole, tests)
    late = (mean > least) & (sure > 0)
    mean_of_part, low_of_part, sure = _bounds(sample, caused, parts, tests * max(steps, 1))
    late_of_part = (mean_of_part > least) & (sure > 0) & (parts > 0)
    # A device that is late over the whole run may still have been in time at first.
    later = late_of_part & (~late | _in_time(caused, parts, step_ns))
    since = np.where(later, parts, 0)
    found = late | later | known
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


def _divides_best(values: Float64) -> Int64:
    """For each row, the first column of the second part in the division into two parts whose means fit best."""
    devices, steps = values.shape
    if steps < MIN_STEPS_FOR_LATE_RANKS + 1:
        return np.zeros(devices, np.int64)
    sums = np.cumsum(values, axis=1)
    total = sums[:, -1:]
    before = np.arange(1, steps)
    # The larger this is, the smaller is the sum of squared residuals.
    between = np.square(sums[:, :-1]) / before + np.square(total - sums[:, :-1]) / (steps - before)
    between[:, steps - MIN_STEPS_FOR_LATE_RANKS :] = -np.inf
    result: Int64 = np.argmax(between, axis=1) + 1
    return result


def _candidates(caused: Float64, begin: Int64, step_ns: float) -> Int64:
    """The first step of the later part, if the device is late there and not in the earlier part; else 0."""
    return np.where(_in_time(caused, begin, step_ns), begin, 0)


def _in_time(caused: Float64, begin: Int64, step_ns: float) -> npt.NDArray[np.bool_]:
    """Whether a device caused more than twice as much since a step, and was in time or half as late before it."""
    after = np.arange(caused.shape[1]) >= begin[:, None]
    count = np.maximum(after.sum(axis=1), 1)
    late = (caused * after).sum(axis=1) / count
    early = (caused * ~after).sum(axis=1) / np.maximum((~after).sum(axis=1), 1)
    half = np.array(
        [
            at >= _FEWEST_BEFORE and 2 * np.median(row[:at]) < np.median(row[at:])
            for row, at in zip(caused, begin, strict=True)
        ],
        np.bool_,
    )
    result: npt.NDArray[np.bool_] = (begin > 0) & ((early < LATE_RANK_SHARE * step_ns) | half) & (late > 2 * early)
    return result


def _bounds(sample: Float64, caused: Float64, begin: Int64, tests: int) -> tuple[Float64, Float64, Float64]:
    """Mean wait caused since a step, and two lower bounds of the mean sample.

    The bounds hold with `SHOWN_CONFIDENCE` and with `LATE_CONFIDENCE`. The larger bound of the plain and the trimmed
    mean counts. Bounds are NaN if there are too few steps.
    """
    counted = np.arange(sample.shape[1]) >= begin[:, None]
    count = counted.sum(axis=1)
    cut = count // _TRIMMED
    # If there are too few samples to trim, both means are equal, and there is one test.
    both = 2 * tests if sample.shape[1] >= _TRIMMED else tests
    plain = _bounds_of_mean(sample, begin, np.zeros_like(count), both)
    trimmed = _bounds_of_mean(sample, begin, cut, both)
    low, sure = (np.maximum(a, b) for a, b in zip(plain, trimmed, strict=True))
    return (caused * counted).sum(axis=1) / np.maximum(count, 1), low, sure


def _bounds_of_mean(sample: Float64, begin: Int64, cut: Int64, tests: int) -> tuple[Float64, Float64]:
    """Lower bounds of each row's mean since a step, with ``cut`` values left out at either end."""
    steps = sample.shape[1]
    counted = np.arange(steps) >= begin[:, None]
    count = counted.sum(axis=1)
    ordered = np.sort(np.where(counted, sample, -np.inf), axis=1)
    first, last = (begin + cut)[:, None], (steps - 1 - cut)[:, None]
    place = np.arange(steps)
    kept = (place >= first) & (place <= last)
    left = np.maximum(kept.sum(axis=1), 1)
    mean = np.where(kept, ordered, 0).sum(axis=1) / left
    # The error of a trimmed mean is computed from the winsorized samples.
    ends = [np.take_along_axis(ordered, np.clip(at, 0, steps - 1), axis=1) for at in (first, last)]
    put = np.where(counted, np.clip(ordered, *ends), 0)
    middle = put.sum(axis=1) / np.maximum(count, 1)
    squares = np.where(counted, np.square(put - middle[:, None]), 0).sum(axis=1)
    error = np.sqrt(squares / left / np.maximum(left - 1, 1))
    enough = left >= MIN_STEPS_FOR_LATE_RANKS
    # `quantile` takes the probability of both tails together.
    low, sure = (
        np.where(enough, mean - quantile(2 * (1 - confidence) / tests, left - 1.0) * error, np.nan)
        for confidence in (SHOWN_CONFIDENCE, LATE_CONFIDENCE)
    )
    return low, sure
