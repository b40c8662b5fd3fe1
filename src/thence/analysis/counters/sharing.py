"""Shares what was counted in samples of a device among the activities that ran in them, with an error for every figure.

A sample holds the work of whatever ran in it, and activities rarely begin and end with samples. Activities of one kind
are taken to count at the same rates: one at their beginning, one at their end (`COUNTER_ENDS_NS` each), one in between,
because a kernel loads first and stores last. The amount of a sample is shared in proportion to (rate) x (time in it).
The rates follow from the shares, and so on until they stay: the likeliest rates for counts (Richardson 1972, Lucy
1974). A share by time alone would give cold kernels a part of the work of the hot ones beside them. All of a sample in
which anything ran is given away, and all of a sample in which nothing ran is idle, so that amounts are conserved.

Errors are standard deviations, from three independent causes. Each is zero for a place that shares its samples with no
other place.

rates     The covariance of the rates by least squares, for the variances that the residuals of the samples show. Kinds
          that only ever run together cannot be told apart, however many samples there are: then the largest rate that
          any sample shows is all that bounds theirs.
samples   In one sample, the work of a kind differs from its rates, as residuals of its samples do.
edges     Samples and activities are not timed to the same instant, and kernels are not uniform. At each edge,
          `COUNTER_EDGE_NS` of the work, and `COUNTER_UNEVEN` standard deviations of the part in the sample, may be
          the neighbour's, in all launches of a kind in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import Intervals, gaps
from thence.model.thresholds import COUNTER_EDGE_NS, COUNTER_ENDS_NS, COUNTER_UNEVEN

if TYPE_CHECKING:
    from thence.model.arrays import Float64, Int64

ROUNDS = 60
"""Most rounds; back to back kernels of known work on an H200 took 6, several streams need more."""
_LONGEST = 1e3
"""Rounds that one step may stand for."""
_SETTLED = 1e-6
"""Part of the amount that may still move."""
_DRAWS = 64
"""Rates that are drawn from their covariance to see what it means for places: it makes errors uncertain by 10 %."""
_SEED = 45
_AT_ONCE = 1 << 22
"""Pairs of rates that are held at once."""
_EXACT = 1e-4
"""Part of the largest rate to which no rate is known better; it keeps the equations solvable."""
_FLOOR = 0.5
"""Part of the common relative variance that each rate has at least: a rare kind's residuals are small by chance."""


def sums(number: Int64, values: Float64, groups: int) -> Float64:
    """The sum of values for each number below ``groups``."""
    return np.bincount(number, values, groups).astype(np.float64, copy=False)


@dataclass(frozen=True)
class Pairs:
    """Which part of which activity was in which sample of a device: one element for each such pair.

    Attributes:
        sample: row of the sample, ascending.
        activity: row of the activity; -1 for idle time.
        rate: number of the rate at which it counts.
        time: ns in common.
        edges: how many ends of the activity are in the sample.
        samples, rates: number of samples and of rates.
    """

    sample: Int64
    activity: Int64
    rate: Int64
    time: Float64
    edges: Float64
    samples: int
    rates: int

    @cached_property
    def ran(self) -> Int64:
        """Number of pairs of each sample."""
        return np.bincount(self.sample, minlength=self.samples)

    def per_sample(self, values: Float64) -> Float64:
        """Sum of values of pairs for each sample."""
        return sums(self.sample, values, self.samples)

    def per_rate(self, values: Float64) -> Float64:
        """Sum of values of pairs for each rate."""
        return sums(self.rate, values, self.rates)


def pairs_of(samples: Intervals, activities: Intervals, kind: Int64, *, ends: bool = True) -> Pairs:
    """All pairs of a sample and a part of an activity that have time in common.

    Args:
        samples: in the order of time, not overlapping.
        activities: they may overlap.
        kind: of each activity, from 0.
        ends: whether the beginning and the end of activities have rates of their own.
    """
    start, end = activities.start, activities.end
    kinds = int(kind.max(initial=-1)) + 1
    rows = np.arange(len(start))
    if not ends:
        return _pairs(samples, activities, rows, kind, activities, kinds)
    apart = np.minimum(COUNTER_ENDS_NS, activities.duration // 3)
    first, last = start + apart, end - apart
    parts = Intervals(np.concatenate([start, first, last]), np.concatenate([first, last, end]))
    whole = Intervals(np.tile(start, 3), np.tile(end, 3))
    rate = np.concatenate([kind, kind + kinds, kind + 2 * kinds])
    return _pairs(samples, parts, np.tile(rows, 3), rate, whole, 3 * kinds)


def _pairs(samples: Intervals, parts: Intervals, activity: Int64, rate: Int64, whole: Intervals, rates: int) -> Pairs:
    """See `pairs_of`; ``whole`` is the time of the activity of each part."""
    first = np.searchsorted(samples.end, parts.start, side="right")
    count = np.maximum(np.searchsorted(samples.start, parts.end, side="left") - first, 0)
    part = np.repeat(np.arange(len(parts.start)), count)
    sample = np.repeat(first - np.cumsum(count) + count, count) + np.arange(int(count.sum()))
    order = np.argsort(sample, kind="stable")
    sample, part = sample[order], part[order]
    low, high = np.maximum(parts.start[part], samples.start[sample]), np.minimum(parts.end[part], samples.end[sample])
    edges = (low == whole.start[part]).astype(np.float64) + (high == whole.end[part])
    held = high > low
    sample, part = sample[held], part[held]
    time = (high - low)[held].astype(np.float64)
    return Pairs(sample, activity[part], rate[part], time, edges[held], len(samples.start), rates)


def with_idle(pairs: Pairs, samples: Intervals, activities: Intervals) -> Pairs:
    """The same pairs and those with idle time, which has a rate of its own, the last one."""
    first, last = samples.start[:1], samples.end[-1:]
    begin, end = (np.concatenate([first, times, last]) for times in (activities.start, activities.end))
    alone = Intervals(*gaps(begin, end))
    count = len(alone.start)
    idle = _pairs(samples, alone, np.full(count, -1), np.zeros(count, np.int64), alone, 1)
    sample = np.concatenate([pairs.sample, idle.sample])
    order = np.argsort(sample, kind="stable")

    rate = np.concatenate([pairs.rate, idle.rate + pairs.rates])[order]
    return replace(
        pairs,
        sample=sample[order],
        activity=np.concatenate([pairs.activity, idle.activity])[order],
        rate=rate,
        time=np.concatenate([pairs.time, idle.time])[order],
        edges=np.concatenate([pairs.edges, idle.edges])[order],
        rates=pairs.rates + 1,
    )


@dataclass(frozen=True)
class Shares:
    """One counter of a device, shared.

    Attributes:
        pairs: of samples and activities.
        amounts: of each sample.
        rates: amount in a ns.
        expected: of each sample, by the rates.
    """

    pairs: Pairs
    amounts: Float64
    rates: Float64
    expected: Float64

    @property
    def total(self) -> float:
        """Amount of all samples."""
        return float(self.amounts.sum())

    @property
    def idle(self) -> float:
        """Amount of the samples in which nothing ran."""
        return float(self.amounts[self.pairs.ran == 0].sum())

    @cached_property
    def of_pairs(self) -> Float64:
        """Amount of each pair."""
        return _divided(self.pairs, self.amounts, self.rates)

    @cached_property
    def variance(self) -> Float64:
        """Of the work of each rate in a ns: what explains the squares of the residuals, in the same way as amounts."""
        pairs = self.pairs
        squares = np.where(pairs.ran > 0, (self.amounts - self.expected) ** 2, 0.0)
        ran = int((pairs.ran > 0).sum())
        squares *= ran / max(ran - pairs.rates, 1)  # the rates were fitted to the same samples
        common = squares.sum() / max(float((self.rates[pairs.rate] ** 2 * pairs.time).sum()), np.finfo(float).tiny)
        variance: Float64 = np.maximum(_fitted(pairs, squares), _FLOOR * common * self.rates**2)
        return variance

    @cached_property
    def drawn(self) -> Float64:
        """Rates as they might be, one column for each draw (see the module's docstring)."""
        pairs = self.pairs
        spread = pairs.per_sample(pairs.time * self.variance[pairs.rate])
        busy = pairs.per_sample(pairs.time)
        most = float(_ratio(self.amounts, busy).max(initial=0.0, where=busy >= np.median(busy)))
        spread = np.maximum(spread, (_EXACT * most * busy) ** 2)
        weight = _ratio(np.full(pairs.samples, most**2), spread)
        information = _information(pairs, weight) + np.eye(pairs.rates)  # each rate is known to some extent: to `most`
        rng = np.random.default_rng(_SEED)
        # The solution for noise of this covariance has the inverse covariance, which is that of the rates.
        noise = [
            pairs.per_rate(pairs.time * (np.sqrt(weight) * rng.standard_normal(pairs.samples))[pairs.sample])
            for _ in range(_DRAWS)
        ]
        seen = np.stack(noise, axis=1) + rng.standard_normal((pairs.rates, _DRAWS))
        moved = np.linalg.solve(information, seen) * most
        drawn: Float64 = np.maximum(self.rates[:, None] + moved, 0.0)
        return drawn


def shared(pairs: Pairs, amounts: Float64) -> Shares:
    """Shares the amounts of samples.

    Args:
        pairs: of samples and activities.
        amounts: of each sample; none is negative.
    """
    rates = _fitted(pairs, amounts)
    expected = pairs.per_sample(pairs.time * rates[pairs.rate])
    return Shares(pairs, amounts, rates, expected)


def _fitted(pairs: Pairs, amounts: Float64) -> Float64:
    """The likeliest rates; steps are made longer as in SQUAREM (Varadhan and Roland 2008), which converges sooner."""
    time = pairs.per_rate(pairs.time)
    counted = float(amounts[pairs.ran > 0].sum())
    rates = np.full(pairs.rates, counted / max(float(time.sum()), 1.0))

    def round_of(old: Float64) -> Float64:
        return _ratio(pairs.per_rate(_divided(pairs, amounts, old)), time)

    for _ in range(ROUNDS):
        first = round_of(rates)
        second = round_of(first)
        step, bend = (first - rates) * time, (second - 2 * first + rates) * time
        if float(np.abs(step).sum()) <= _SETTLED * counted:
            return second
        bent = float(np.linalg.norm(bend))
        length = min(max(float(np.linalg.norm(step)) / bent, 1.0), _LONGEST) if bent else 1.0
        ahead = rates + 2 * length * (first - rates) + length**2 * (second - 2 * first + rates)
        rates = round_of(np.where(ahead > 0, ahead, second))
    return rates


def _divided(pairs: Pairs, amounts: Float64, rates: Float64) -> Float64:
    """The amount of each pair for these rates."""
    work = pairs.time * rates[pairs.rate]
    divided: Float64 = work * _ratio(amounts, pairs.per_sample(work))[pairs.sample]
    return divided


def _ratio(value: Float64, by: Float64) -> Float64:
    return np.divide(value, by, out=np.zeros(len(value)), where=by > 0)


def _information(pairs: Pairs, weight: Float64) -> Float64:
    """Information of the samples on each pair of rates: the sum of weight x time x time; shape (rates, rates)."""
    key, number = np.unique(pairs.sample * pairs.rates + pairs.rate, return_inverse=True)
    time = sums(number, pairs.time, len(key))
    sample, rate = key // pairs.rates, key % pairs.rates
    count = np.bincount(sample, minlength=pairs.samples)
    first = np.cumsum(count) - count
    result = np.zeros(pairs.rates**2)
    reached = np.cumsum(count[sample])
    begin = 0
    while begin < len(sample):
        before = reached[begin - 1] if begin else 0
        until = max(int(np.searchsorted(reached, before + _AT_ONCE)), begin + 1)
        some = np.arange(begin, until)
        others = count[sample[some]]
        left = np.repeat(some, others)
        right = np.repeat(first[sample[some]] - np.cumsum(others) + others, others) + np.arange(len(left))
        both = time[left] * time[right] * weight[sample[left]]
        result += sums(rate[left] * pairs.rates + rate[right], both, pairs.rates**2)
        begin = until
    return result.reshape(pairs.rates, pairs.rates)


@dataclass(frozen=True)
class Pieces:
    """The pairs of places: an activity that belongs to several places has a piece for each.

    Attributes:
        pair: row in pairs.
        place: number of the place, from 0.
        weight: part of the activity that counts.
        places: number of places.
    """

    pair: Int64
    place: Int64
    weight: Float64
    places: int


def pieces_of(pairs: Pairs, activity: Int64, place: Int64, weight: Float64, places: int) -> Pieces:
    """Pieces of places.

    Args:
        pairs: of samples and activities.
        activity, place, weight: of each part of an activity at a place.
        places: number of places.
    """
    order = np.argsort(activity, kind="stable")
    first = np.searchsorted(activity[order], pairs.activity, side="left")
    count = np.searchsorted(activity[order], pairs.activity, side="right") - first
    pair = np.repeat(np.arange(len(count)), count)
    part = order[np.repeat(first - np.cumsum(count) + count, count) + np.arange(len(pair))]
    return Pieces(pair, place[part], weight[part], places)


def of_places(shares: Shares, pieces: Pieces, edge_ns: float = COUNTER_EDGE_NS) -> tuple[Float64, Float64]:
    """What a counter counted for each place, and its standard deviation.

    Args:
        shares: of the counter.
        edge_ns: by how much the times of samples and of activities may differ.
    """
    amount = _placed(shares.of_pairs, pieces)
    if not shares.total:
        return amount, np.zeros(pieces.places)
    variance = _of_rates(shares, pieces, amount) + _of_samples_and_edges(shares, pieces, edge_ns)
    return amount, np.sqrt(variance)


def _placed(of_pairs: Float64, pieces: Pieces) -> Float64:
    return sums(pieces.place, of_pairs[pieces.pair] * pieces.weight, pieces.places)


def _of_rates(shares: Shares, pieces: Pieces, amount: Float64) -> Float64:
    """Variance of each place because rates are uncertain."""
    squares = np.zeros(pieces.places)
    for rates in shares.drawn.T:
        squares += (_placed(_divided(shares.pairs, shares.amounts, rates), pieces) - amount) ** 2
    return squares / _DRAWS


def _of_samples_and_edges(shares: Shares, pieces: Pieces, edge_ns: float) -> Float64:
    """Variance of each place because single samples differ from the rates, and because edges are uncertain."""
    pairs, places = shares.pairs, pieces.places
    sample, rate = pairs.sample[pieces.pair], pairs.rate[pieces.pair]
    cell, number = np.unique(sample * places + pieces.place, return_inverse=True)
    sample_of_cell, place = cell // places, cell % places

    def of_cells(values: Float64) -> Float64:
        return sums(number, values[pieces.pair] * pieces.weight, len(cell))

    work, spread = pairs.time * shares.rates[pairs.rate], pairs.time * shares.variance[pairs.rate]
    part = np.clip(_ratio(of_cells(work), shares.expected[sample_of_cell]), 0.0, 1.0)
    own, all_spread = of_cells(spread), pairs.per_sample(spread)[sample_of_cell]
    of_samples = sums(place, _ratio(own * np.maximum(all_spread - own, 0.0), all_spread), places)
    edge = edge_ns / 2 * pairs.edges * shares.rates[pairs.rate]
    uneven = edge + COUNTER_UNEVEN * np.sqrt(spread)
    kind, of_kind = np.unique(pieces.place * pairs.rates + rate, return_inverse=True)
    lost = sums(of_kind, uneven[pieces.pair] * pieces.weight * (1 - part[number]), len(kind))
    gained = sums(place, part * np.maximum(pairs.per_sample(edge)[sample_of_cell] - of_cells(edge), 0.0), places)
    variance: Float64 = of_samples + sums(kind // pairs.rates, lost**2, places) + gained**2
    return variance
