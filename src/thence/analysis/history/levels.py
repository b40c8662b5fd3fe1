"""Divides a series of runs into levels: stretches within which the runs are alike.

Whether a stretch has a change is told by ranks, and where it is by medians:

    rank of a run      = its place among the runs of the stretch, by time (ties: their mean)
    score of a cut     = |sum of the ranks before it - what is expected| / standard deviation
    score of a stretch = the largest score of its cuts
    cut of a stretch   = of those with a certain score, the one whose runs differ least from the median of their side

The score of a cut is that of the rank-sum test (Wilcoxon, Mann and Whitney) of the runs before against those after, so
that of the stretch is a test for a change at an unknown run (Pettitt, 1979, with weights). Ranks make it robust: a run
that took ten times as long counts no more than the slowest one, and nothing is assumed about how runs are distributed.
But they do not show how far a run is from the others, so the cut is chosen by times.

Without a change, every order of the runs is equally likely. The probability of a score is counted among
`_ORDERS` random orders, the same ones each time. It depends on nothing but the number of runs; with ties it is an upper
bound. A stretch is cut if this probability is at most the level that is asked for; both parts are then examined alike.
"""

from __future__ import annotations

from bisect import insort
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thence.model.arrays import Float64

_ORDERS = 20_000  # random orders of the runs: probabilities down to 1 / 20,001
_CELLS = 2_000_000
"""Most ranks in memory at a time, while orders are drawn."""
_SEED = 20_000  # fixed: the same runs have the same probabilities


def cuts(values: Float64, level: float) -> list[int]:
    """The numbers of the runs at which a level begins, ascending, without the first.

    Args:
        values: time of each run, in order of time, shape (runs,).
        level: probability with which a stretch without a change is cut.
    """
    places: list[int] = []
    waiting = [(0, len(values))]
    while waiting:
        begin, end = waiting.pop()
        if end - begin < 2:
            continue
        stretch = values[begin:end]
        scores = _scores(_ranks(stretch)[None])[0]
        certain = np.array([probability(score, end - begin) <= level for score in scores])
        if not certain.any():
            continue
        cut = begin + 1 + int(np.argmin(np.where(certain, _differences(stretch), np.inf)))
        places.append(cut)
        waiting += [(begin, cut), (cut, end)]
    return sorted(places)


def best_near(values: Float64, cut: int, most: int) -> int:
    """The cut, at most so many runs from another, whose runs differ least from the median of their side.

    Args:
        values: time of each run, shape (runs,).
        cut: number of runs before it, at least 1 and less than all.
        most: runs.
    """
    low = max(cut - most, 1)
    return low + int(np.argmin(_differences(values)[low - 1 : cut + most]))


def probability(score: float, runs: int) -> float:
    """The probability that runs without a change have at least this score."""
    highest = _highest(runs)
    # 1 +: the order of the runs is one of the possible ones, so no probability is 0.
    return float(1 + len(highest) - np.searchsorted(highest, score - 1e-9)) / (1 + len(highest))


def _ranks(values: Float64) -> Float64:
    """The place of each value among all, from 1; equal values have the mean of their places."""
    _, value_number, many = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Float64 = (np.cumsum(many) - (many - 1) / 2)[value_number]
    return ranks


def _differences(values: Float64) -> Float64:
    """For each cut, the sum of the differences of the runs from the median of their side, shape (runs - 1,)."""
    before, after = _spread(values), _spread(values[::-1])[::-1]
    differences: Float64 = before[:-1] + after[1:]
    return differences


def _spread(values: Float64) -> Float64:
    """Of the first run, the first two, and so on: the sum of the differences from their median."""
    ordered: list[float] = []
    spreads = []
    for value in values.tolist():
        insort(ordered, value)
        half = len(ordered) // 2
        spreads.append(sum(ordered[len(ordered) - half :]) - sum(ordered[:half]))
    return np.array(spreads)


def _scores(ranks: Float64) -> Float64:
    """The score of each cut, shape (orders, runs - 1), of ranks of shape (orders, runs)."""
    runs = ranks.shape[1]
    before = np.arange(1, runs)
    sums = np.cumsum(ranks, axis=1)[:, :-1]
    # Of a sum of ranks, as in the test of Mann and Whitney.
    deviation = np.sqrt(before * (runs - before) * (runs + 1) / 12)
    scores: Float64 = np.abs(sums - before * (runs + 1) / 2) / deviation
    return scores


@lru_cache(maxsize=128)
def _highest(runs: int) -> Float64:
    """The scores of stretches of this length whose runs are in random order, ascending."""
    generator = np.random.default_rng(_SEED)
    ranks = np.arange(1.0, runs + 1)
    at_once = max(1, _CELLS // runs)
    parts = []
    for begin in range(0, _ORDERS, at_once):
        orders = np.tile(ranks, (min(at_once, _ORDERS - begin), 1))
        parts.append(_scores(generator.permuted(orders, axis=1)).max(axis=1))
    return np.sort(np.concatenate(parts))
