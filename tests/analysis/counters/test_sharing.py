"""Amounts of samples are shared as planted, all of them, and errors hold what they promise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from counter_samples import Kernels, back_to_back, with_gaps
from thence.analysis.counters.sharing import Pairs, Shares, of_places, pairs_of, pieces_of, shared, with_idle
from thence.model.intervals import Intervals
from thence.model.thresholds import COUNTER_ERROR_SHARE

DURATIONS = (6_000, 9_000, 14_000, 30_000, 80_000)
RATES = (5.0, 1.0, 0.0, 2.0, 3.0)
TRIALS, INSIDE = 25, 0.95


def shared_of(kernels: Kernels, interval: int = 10_000) -> Shares:
    start, end, amounts = kernels.samples(interval)
    return shared(pairs_of(Intervals(start, end), Intervals(kernels.start, kernels.end), kernels.kind), amounts)


def by_kind(kernels: Kernels, shares: Shares) -> tuple[np.ndarray, np.ndarray]:
    kinds = int(kernels.kind.max()) + 1
    rows = np.arange(len(kernels.kind))
    return of_places(shares, pieces_of(shares.pairs, rows, kernels.kind, np.ones(len(rows)), kinds))


@pytest.mark.parametrize(("rise", "late"), [(0.0, 0.0), (2_500.0, 0.0), (1_500.0, 700.0)])
def test_the_truth_is_inside_of_the_interval_in_95_of_100(rise: float, late: float) -> None:
    """Kernels whose rate rises at their beginning, and counters that are later than the records."""
    inside = shown = 0
    for trial in range(TRIALS):
        made = replace(back_to_back(np.random.default_rng(trial), DURATIONS, RATES, 40), rise=rise, late=late)
        amount, deviation = by_kind(made, shared_of(made))
        truth = np.bincount(made.kind, made.work, len(DURATIONS))
        precise = (amount > 0) & (1.96 * deviation <= COUNTER_ERROR_SHARE * amount)
        shown += int(precise.sum())
        inside += int((precise & (np.abs(amount - truth) <= 1.96 * deviation)).sum())
    assert shown > 2 * TRIALS, "most figures are precise"
    assert inside / shown >= INSIDE


def test_all_is_shared_and_idle_keeps_its_own() -> None:
    made = with_gaps(back_to_back(np.random.default_rng(1), DURATIONS, RATES, 20), 25_000)
    start, end, amounts = made.samples(10_000)
    pairs = pairs_of(Intervals(start, end), Intervals(made.start, made.end), made.kind)
    nothing = pairs.ran == 0
    amounts = amounts + np.where(nothing, 17.0, 0.0)
    shares = shared(pairs, amounts)
    assert shares.idle == 17.0 * nothing.sum() > 0
    assert shares.of_pairs.sum() + shares.idle == pytest.approx(amounts.sum(), rel=1e-12)
    each = np.bincount(pairs.sample, shares.of_pairs, pairs.samples)
    assert each == pytest.approx(np.where(nothing, 0, amounts), rel=1e-9), "every sample keeps its amount"


def test_kernels_that_are_alone_are_exact() -> None:
    """Gaps of more than a sample: every sample has one kernel, so that nothing is estimated."""
    made = with_gaps(back_to_back(np.random.default_rng(2), DURATIONS, RATES, 10), 40_000)
    amount, deviation = by_kind(made, shared_of(made))
    assert amount == pytest.approx(np.bincount(made.kind, made.work), rel=1e-9)
    assert deviation == pytest.approx(np.zeros(len(DURATIONS)), abs=1e-6 * amount.max())


def test_one_short_launch_has_no_figure_and_many_have() -> None:
    made = back_to_back(np.random.default_rng(3), DURATIONS, RATES, 60)
    once = int(np.flatnonzero(made.kind == 1)[30])
    kind = made.kind.copy()
    kind[once] = len(DURATIONS)
    made = replace(made, kind=kind)
    amount, deviation = by_kind(made, shared_of(made))
    error = 1.96 * deviation / np.maximum(amount, 1e-9)
    assert error[-1] > COUNTER_ERROR_SHARE
    assert error[3] < COUNTER_ERROR_SHARE
    assert error[4] < COUNTER_ERROR_SHARE


def test_kinds_that_only_run_together_have_no_figures() -> None:
    """Two streams with equal times always: nothing tells whose work it is. Together they are known."""
    rng = np.random.default_rng(4)
    made = back_to_back(rng, (20_000, 35_000), (4.0, 1.0), 100)
    twin = replace(made, kind=np.where(made.kind == 0, 2, 1), work=made.work / 3)
    start, end, amounts = made.samples(10_000)
    amounts = amounts + twin.samples(10_000)[2]
    kind = np.concatenate([made.kind, twin.kind])
    times = Intervals(np.tile(made.start, 2), np.tile(made.end, 2))
    shares = shared(pairs_of(Intervals(start, end), times, kind), amounts)
    rows = np.arange(len(kind))
    apart = of_places(shares, pieces_of(shares.pairs, rows, kind, np.ones(len(rows)), 3))
    assert (1.96 * apart[1] / apart[0])[[0, 2]].min() > COUNTER_ERROR_SHARE
    together = of_places(shares, pieces_of(shares.pairs, rows, np.minimum(kind, 1), np.ones(len(rows)), 2))
    both = of_places(shares, pieces_of(shares.pairs, rows, (kind == 1).astype(np.int64), np.ones(len(rows)), 2))
    assert both[0][0] == pytest.approx(made.work[made.kind == 0].sum() * 4 / 3, rel=0.02)
    assert 1.96 * both[1][0] / both[0][0] < COUNTER_ERROR_SHARE
    assert together[0].sum() == pytest.approx(both[0].sum())


def test_kinds_on_two_streams_that_meet_in_all_ways_are_told_apart() -> None:
    left = back_to_back(np.random.default_rng(5), (22_000, 31_000), (4.0, 1.0), 150)
    right = back_to_back(np.random.default_rng(6), (27_000, 45_000), (2.0, 3.0), 120)
    right = replace(right, kind=right.kind + 2)
    first, last = left.samples(10_000, after=60), right.samples(10_000, after=200)
    rows = max(len(first[0]), len(last[0]))
    start = min(first[0][0], last[0][0]) + 10_000 * np.arange(rows)
    amounts = np.zeros(rows)
    for _, _, amount in (first, last):
        amounts[: len(amount)] += amount
    kind = np.concatenate([left.kind, right.kind])
    times = Intervals(np.concatenate([left.start, right.start]), np.concatenate([left.end, right.end]))
    shares = shared(pairs_of(Intervals(start, start + 10_000), times, kind), amounts)
    each = np.arange(len(kind))
    amount, deviation = of_places(shares, pieces_of(shares.pairs, each, kind, np.ones(len(each)), 4))
    truth = np.bincount(kind, np.concatenate([left.work, right.work]))
    assert (np.abs(amount - truth) <= 3 * deviation).all()
    assert (1.96 * deviation / amount)[[0, 3]].max() < COUNTER_ERROR_SHARE


def test_a_counter_that_counted_nothing_is_exactly_nothing() -> None:
    made = back_to_back(np.random.default_rng(7), DURATIONS, RATES, 10)
    made = replace(made, work=np.zeros(len(made.work)))
    amount, deviation = by_kind(made, shared_of(made))
    assert not amount.any()
    assert not deviation.any()


def test_an_activity_at_two_places_is_divided_by_weight() -> None:
    made = with_gaps(back_to_back(np.random.default_rng(8), (30_000,), (2.0,), 5), 50_000)
    shares = shared_of(made)
    rows = np.repeat(np.arange(5), 2)
    amount, _ = of_places(shares, pieces_of(shares.pairs, rows, np.tile([0, 1], 5), np.tile([0.25, 0.75], 5), 2))
    assert amount == pytest.approx(made.work.sum() * np.array([0.25, 0.75]), rel=1e-9)


def test_idle_time_has_its_own_rate_where_it_costs_something() -> None:
    """100 W idle and 600 W busy, in samples longer than the kernels."""
    rng = np.random.default_rng(9)
    lasting, gap = rng.integers(1, 20, 400) * 10_000_000, rng.integers(1, 20, 400) * 10_000_000
    begin = np.cumsum(lasting + gap) - lasting
    busy = Kernels(begin, begin + lasting, np.zeros(400, np.int64), 500e-9 * lasting)
    start, end, amounts = busy.samples(100_000_000, before=0, after=0)
    amounts = amounts + 100e-9 * (end - start)
    samples = Intervals(start, end)
    ran = Intervals(begin, begin + lasting)
    pairs = with_idle(pairs_of(samples, ran, busy.kind, ends=False), samples, ran)
    shares = shared(pairs, amounts)
    assert shares.rates * 1e9 == pytest.approx([600, 100], rel=0.02)


def test_pairs_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(10)
    start = np.sort(rng.integers(0, 1000, 30))
    end = start + rng.integers(1, 200, 30)
    samples = np.arange(100, 900, 50)
    pairs: Pairs = pairs_of(Intervals(samples, samples + 40), Intervals(start, end), np.zeros(30, np.int64), ends=False)
    wanted = {
        (s, a): min(end[a], samples[s] + 40) - max(start[a], samples[s])
        for s in range(len(samples))
        for a in range(30)
        if min(end[a], samples[s] + 40) > max(start[a], samples[s])
    }
    found = zip(pairs.sample.tolist(), pairs.activity.tolist(), pairs.time, strict=True)
    assert {(s, a): time for s, a, time in found} == wanted
