"""Student's t distribution, its quantiles, and bounds of a binomial share, for arrays, with NumPy alone.

The probability of both tails of t is the regularized incomplete beta function I_x(df/2, 1/2) at x = df / (df + t^2).
It is computed by its continued fraction (Abramowitz and Stegun, Handbook of Mathematical Functions,
26.5.8), which converges fast for x < (a + 1) / (a + b + 2); for larger x, I_x(a, b) = 1 - I_(1-x)(b, a) is used.
"""

from __future__ import annotations

from functools import lru_cache
from math import lgamma
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thence.model.arrays import Float64

_ROUNDS = 300
"""Upper bound on the terms of the continued fraction."""
_CLOSE = 1e-12  # relative change at which the continued fraction ends
_HALVINGS = 60
_ITERATIONS = 60
"""Upper bound on the iterations that find a quantile; a dozen suffice."""
_DEGREES = np.geomspace(1.0, 200.0, 80)
"""Degrees of freedom at which quantiles are computed. Between them, quantiles are interpolated in 1 / df; beyond the
last, between it and the normal distribution at 1 / df = 0."""
_SMALLEST = 1e-300  # in the place of 0 where something is divided by it, as Lentz's method does


def two_sided(t: Float64, df: Float64) -> Float64:
    """The probability that |T| is at least |t|.

    Args:
        t: any shape; the result is 0 where t is not finite.
        df: degrees of freedom, above 0, of the same shape.
    """
    t, df = np.broadcast_arrays(np.asarray(t, np.float64), np.asarray(df, np.float64))
    squared = np.square(np.where(np.isfinite(t), t, 0.0))
    share = beta_share(df / (df + squared), df / 2, np.full(df.shape, 0.5))
    return np.where(np.isfinite(t), share, 0.0)


def quantile(probability: float, df: Float64) -> Float64:
    """The t that T exceeds in absolute value with a probability: 0.05 gives the bounds of a 95 % interval.

    Args:
        probability: of both tails together, above 0 and below 1.
        df: degrees of freedom, any shape; below 1 counts as 1.
    """
    inverse, logarithms = _quantiles(probability)
    result: Float64 = np.exp(np.interp(1 / np.maximum(df, 1.0), inverse, logarithms))
    return result


@lru_cache(maxsize=64)
def _quantiles(probability: float) -> tuple[Float64, Float64]:
    """1 / df, ascending from 0, and the logarithm of t there, by Newton's method."""
    normal = NormalDist().inv_cdf(1 - probability / 2)
    # Bounds: the normal quantile is the least, that of one degree of freedom (the Cauchy distribution) the largest.
    low = np.full(len(_DEGREES), np.log(normal))
    high = np.full(len(_DEGREES), -np.log(np.tan(np.pi * probability / 2)))
    scale = _log_beta(_DEGREES / 2, np.full(len(_DEGREES), 0.5)) + np.log(_DEGREES) / 2
    middle = (low + high) / 2
    for _ in range(_ITERATIONS):
        beyond = two_sided(np.exp(middle), _DEGREES)
        low, high = (np.where(beyond > probability, middle, low), np.where(beyond > probability, high, middle))
        # Newton's method for log(tail) as a function of log(t); bisection where it would leave the bounds.
        density = -scale - (_DEGREES + 1) / 2 * np.log1p(np.exp(2 * middle) / _DEGREES)
        slope = -2 * np.exp(middle + density) / np.maximum(beyond, _SMALLEST)
        slope = np.minimum(slope, -1e-6)  # something is divided by it
        step = middle - np.log(np.maximum(beyond, _SMALLEST) / probability) / slope
        halves = ~((step >= low) & (step <= high))
        before, middle = middle, np.where(halves, (low + high) / 2, step)
        if np.abs(middle - before).max() < 1e-9:
            break
    inverse = np.concatenate([[0.0], 1 / _DEGREES[::-1]])
    return inverse, np.concatenate([[np.log(normal)], middle[::-1]])


def beta_share(x: Float64, a: Float64, b: Float64) -> Float64:
    """The regularized incomplete beta function I_x(a, b), for arrays of one shape.

    Args:
        x: from 0 to 1.
        a: above 0.
        b: above 0.
    """
    swapped = x > (a + 1) / (a + b + 2)  # where the fraction converges slowly, I_x(a, b) = 1 - I_(1-x)(b, a) is used
    near = np.where(swapped, 1 - x, x)
    first, second = np.where(swapped, b, a), np.where(swapped, a, b)
    inside = np.clip(near, _SMALLEST, 1 - 1e-16)
    scale = np.exp(first * np.log(inside) + second * np.log1p(-inside) - _log_beta(first, second)) / first
    part = np.where(near <= 0, 0.0, scale / _fraction(inside, first, second))
    return np.clip(np.where(swapped, 1 - part, part), 0.0, 1.0)


def _log_beta(a: Float64, b: Float64) -> Float64:
    """The logarithm of B(a, b), computed once for equal pairs."""
    pairs, place = np.unique(np.stack([a.ravel(), b.ravel()]), axis=1, return_inverse=True)
    logs = [lgamma(p) + lgamma(q) - lgamma(p + q) for p, q in pairs.T]
    return np.array(logs)[place.ravel()].reshape(a.shape)


def _fraction(x: Float64, a: Float64, b: Float64) -> Float64:
    """The continued fraction 1 + d1/(1 + d2/(1 + ...)) by the method of Lentz."""
    value = np.ones(x.shape)
    above, below = value.copy(), np.zeros(x.shape)
    for term in range(1, _ROUNDS):
        half = term // 2
        if term % 2:
            step = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            step = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        below = 1 + step * below
        below = 1 / np.where(np.abs(below) < _SMALLEST, _SMALLEST, below)
        above = 1 + step / above
        above = np.where(np.abs(above) < _SMALLEST, _SMALLEST, above)
        value = value * above * below
        if np.abs(above * below - 1).max(initial=0.0) < _CLOSE:
            break
    return value


def highest_share(hits: int, trials: int, confidence: float = 0.95) -> float:
    """The upper confidence bound of a binomial share (Clopper and Pearson, one-sided).

    Args:
        confidence: probability that the share is not above the bound.
    """
    if hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        at_most = 1 - beta_share(np.array([middle]), np.array([hits + 1.0]), np.array([float(trials - hits)]))
        low, high = (middle, high) if at_most[0] > 1 - confidence else (low, middle)
    return high
