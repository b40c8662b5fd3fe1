"""Intervals of shares that are estimated from windows contain the shares of all steps."""

from __future__ import annotations

import numpy as np
import pytest

from thence.watch.estimates import MIN_WINDOWS, share_intervals


def test_windows_drawn_1000_times_from_all_steps_give_intervals_that_contain_their_shares() -> None:
    """20 windows of 5,000 steps; of ten modules some vary a lot, and one runs in every fourth step alone."""
    dice = np.random.default_rng(46)
    steps = 5_000
    modules = np.stack(
        [share * dice.lognormal(0, spread, steps) for share, spread in zip(range(10, 0, -1), [0.05, 0.2, 0.4] * 4)],  # noqa: B905
        axis=1,
    )
    modules[:, 7] *= 4 * (np.arange(steps) % 4 == 0)
    parts = np.concatenate([modules.sum(axis=1, keepdims=True), modules], axis=1)
    whole = parts[:, 0] + 30 * dice.lognormal(0, 0.3, steps)
    truth = parts.sum(axis=0) / whole.sum()
    inside = np.zeros(11)
    for _ in range(1_000):
        drawn = dice.choice(steps, 20, replace=False)
        bounds = share_intervals(parts[drawn], whole[drawn])
        assert bounds is not None
        inside += (bounds[0] <= truth) & (truth <= bounds[1])
    assert inside[0] >= 950  # busy
    assert np.delete(inside, 8)[1:].min() >= 940  # 950, less the error of 1,000 draws
    assert inside[8] >= 900


def test_an_interval_is_as_wide_as_theory_says() -> None:
    """Of a constant whole, the share is a mean: its interval is that of Student's t, at 97 % as the module states."""
    part = np.random.default_rng(3).normal(50, 10, 40)
    low, high = share_intervals(part[:, None], np.full(40, 100.0))[:, 0]  # type: ignore[index]
    error = part.std(ddof=1) / 100 / np.sqrt(40)
    assert (high - low) / 2 == pytest.approx(2.25 * error, rel=0.08)  # t of 97 % with 39 degrees: 2.25


def test_few_windows_give_none_and_many_are_put_together() -> None:
    assert share_intervals(np.ones((MIN_WINDOWS - 1, 1)), np.full(MIN_WINDOWS - 1, 2.0)) is None
    low, high = share_intervals(np.ones((30_000, 1)), np.full(30_000, 2.0))[:, 0]  # type: ignore[index]
    assert (low, high) == (0.5, 0.5)
