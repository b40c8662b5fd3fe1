"""Statistics of a comparison: by hand on small numbers, and their error rates on simulated runs."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from diff_runs import simulated
from thence.analysis.diff.estimates import MAX_RUNS, Estimates, RunMeans, discoveries, estimates, more_runs, run_means


def means_of(*samples: object) -> RunMeans:
    return run_means(samples, {})  # type: ignore[arg-type]


def row(means: RunMeans, found: Estimates, name: str) -> tuple[float, float, float, float]:
    number = means.keys.index(("label", name))
    return tuple(float(v[number]) for v in (found.before, found.after, found.low, found.high))  # type: ignore[return-value]


def test_welch_by_hand() -> None:
    generator = np.random.default_rng(1)
    sides = [
        [simulated(generator, {"x": 1e6 * k}, steps=200, within=1e-4) for _ in range(n)] for k, n in ((1, 4), (1.1, 3))
    ]
    means = means_of(*sides[0], *sides[1])
    found = estimates(means, range(4), range(4, 7))
    values = [[statistics.fmean(s.rows.filter(s.rows["by"] == "label")["ns"]) for s in side] for side in sides]
    errors = [statistics.variance(v) / len(v) for v in values]
    difference = statistics.fmean(values[1]) - statistics.fmean(values[0])
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, values, strict=True))
    before, after, low, high = row(means, found, "x")
    assert after - before == pytest.approx(difference, rel=1e-9)
    assert (low + high) / 2 == pytest.approx(difference, rel=1e-9)
    t = (high - low) / 2 / math.sqrt(sum(errors))
    # Of 3 degrees of freedom t is 3.182, of 4 it is 2.776.
    assert 2.5 < freedom < 5
    assert 2.5 < t < 3.7
    assert found.between


def test_steps_of_a_run_count_once() -> None:
    """Ten times the steps do not make runs that differ agree."""
    generator = np.random.default_rng(2)
    widths = []
    for steps in (20, 200):
        runs = [simulated(generator, {"x": 1e6}, steps=steps, between=0.05, within=0.01) for _ in range(40)]
        means = means_of(*runs)
        _, _, low, high = row(means, estimates(means, range(20), range(20, 40)), "x")
        widths.append(high - low)
    assert widths[1] > 0.6 * widths[0]


def test_runs_that_agree_by_chance_have_the_noise_of_their_steps() -> None:
    runs = [simulated(np.random.default_rng(3), {"x": 1e6}, within=0.02, between=0) for _ in range(4)]
    means = means_of(*runs)  # equal to the last digit
    found = estimates(means, range(2), range(2, 4))
    values = runs[0].rows.filter(runs[0].rows["by"] == "label")["ns"].to_list()
    error = math.sqrt(statistics.variance(values) / len(values))
    _, _, low, high = row(means, found, "x")
    assert high - low == pytest.approx(2 * 4.303 * error, rel=1e-3)  # 2 degrees of freedom, two runs a side


def test_a_single_step_a_side_says_nothing_of_the_noise() -> None:
    generator = np.random.default_rng(4)
    means = means_of(*(simulated(generator, {"x": 1e6 * k}, steps=1) for k in (1, 2)))
    found = estimates(means, [0], [1])
    assert row(means, found, "x")[2:] == (-math.inf, math.inf)
    assert found.p[means.keys.index(("label", "x"))] == 1.0


def test_steps_in_which_a_row_is_absent_count_as_nothing() -> None:
    """The mean of what ran in half of the steps is half of its time."""
    sample = simulated(np.random.default_rng(5), {"x": 1e6, "y": 1e6}, within=0, between=0)
    rows = sample.rows.filter((pl.col("name") != "x") | (pl.col("step") % 2 == 0))
    means = means_of(replace(sample, rows=rows))
    number = means.keys.index(("label", "x"))
    assert means.mean[number, 0] == pytest.approx(5e5)
    assert means.share[number, 0] == 0.5
    # 20 steps, 0 and 1 ms by turns: variance 1e12/4 * 20/19, over 20
    assert means.least[number, 0] == pytest.approx(1e12 / 4 / 19)


def test_benjamini_and_hochberg_by_hand() -> None:
    p = np.array([0.009, 0.03, 0.9, 0.019, 0.02])
    # Of five, the sorted ones may be 0.01, 0.02, 0.03, 0.04, 0.05: four are below theirs.
    assert discoveries(p).tolist() == [True, True, False, True, True]
    assert discoveries(np.array([0.02, 0.9, 0.9])).tolist() == [False] * 3
    assert discoveries(np.array([])).tolist() == []


def test_runs_that_would_tell_are_enough_and_not_many_too_many() -> None:
    generator = np.random.default_rng(6)
    needed = int(more_runs(np.array([0.02]), np.array([0.02]), 3, 0.05)[0]) + 3
    found = {}
    for runs in (needed, needed // 2):
        pairs = generator.standard_normal((4000, 2, runs)) * 0.02
        pairs[:, 1] += 0.02
        zero = np.zeros((4000, 2 * runs))
        means = RunMeans(
            [("label", "x")] * 4000, pairs.reshape(4000, -1) + 1, zero, zero, zero, zero, zero, np.ones(2 * runs)
        )
        found[runs] = (estimates(means, range(runs), range(runs, 2 * runs)).p < 0.05).mean()
    assert 0.75 < found[needed] < 0.92
    assert found[needed // 2] < 0.7
    assert more_runs(np.array([1e-6]), np.array([1.0]), 2, 0.05)[0] == MAX_RUNS


MANY = {f"label {n}": 1e6 for n in range(300)}
KINDS = {
    "plain": {},
    "heavy tails": {"tails": 3.0},
    "correlated steps": {"correlation": 0.6},
    "drift between runs": {"between": 0.03},
    "steps alone": {"between": 0.0},
    "all": {"tails": 4.0, "correlation": 0.4, "between": 0.01},
}


@pytest.mark.parametrize(("kind", "runs"), [*((kind, 4) for kind in KINDS), ("all", 1), ("correlated steps", 1)])
def test_intervals_hold_the_truth_in_nineteen_of_twenty_cases(kind: str, runs: int) -> None:
    """The truth being a difference of 4 %; with one run a side only the steps may vary, as no more is known."""
    options = KINDS[kind] | ({"between": 0.0} if runs == 1 else {})
    generator = np.random.default_rng(hash_of(kind) + runs)
    more = {name: 1.04 * ns for name, ns in MANY.items()}
    held = []
    for _ in range(3):
        sides = [simulated(generator, side, **options) for side in (MANY, more) for _ in range(runs)]
        means = means_of(*sides)
        found = estimates(means, range(runs), range(runs, 2 * runs))
        rows = [n for n, (by, _) in enumerate(means.keys) if by == "label"]
        held.append((found.low[rows] <= 4e4) & (found.high[rows] >= 4e4))
    # 900 cases: the standard error of 95 % is 0.7 %, and three of them are allowed.
    assert np.mean(held) >= 0.95 - 3 * 0.0073


@pytest.mark.parametrize(("kind", "runs"), [*((kind, 4) for kind in KINDS), ("all", 1), ("correlated steps", 1)])
def test_comparisons_of_equals_find_a_difference_in_one_of_twenty_at_most(kind: str, runs: int) -> None:
    """120 comparisons of 10 rows each: the number with any discovery is binomial of 5 % at most."""
    options = KINDS[kind] | ({"between": 0.0} if runs == 1 else {})
    generator = np.random.default_rng(100 + hash_of(kind) + runs)
    rows, comparisons = 10, 120
    names = {f"{n}": 1e6 for n in range(rows * comparisons)}
    means = means_of(*(simulated(generator, names, **options) for _ in range(2 * runs)))
    found = estimates(means, range(runs), range(runs, 2 * runs))
    p = found.p[[n for n, (by, _) in enumerate(means.keys) if by == "label"]]
    wrong = sum(discoveries(part).any() for part in p.reshape(comparisons, rows))
    assert wrong <= 0.05 * comparisons + 3 * math.sqrt(0.05 * 0.95 * comparisons)


def hash_of(text: str) -> int:
    """The same in every process."""
    return sum(map(ord, text))
