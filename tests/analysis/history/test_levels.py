"""Levels of a series of runs, on series whose levels are known."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from thence.analysis.history.levels import cuts, probability


def test_a_level_begins_where_it_was_made() -> None:
    random = np.random.default_rng(2)
    values = np.concatenate([random.normal(100, 1, 20), random.normal(110, 1, 15), random.normal(95, 1, 12)])
    assert cuts(values, 0.01) == [20, 35]


def test_runs_far_from_the_others_begin_no_level_and_do_not_move_one() -> None:
    random = np.random.default_rng(4)
    values = random.normal(100, 1, 40)
    values[[5, 22, 39]] = 1_000
    assert cuts(values, 0.01) == []
    values[25:] += 8
    assert cuts(values, 0.01) == [25]


def test_the_probability_is_that_of_all_orders() -> None:
    # Of ten runs, the five slowest are all last in 1 of 252 choices, all first in another; no other cut scores as high.
    highest = 25 * 0.5 * 2 / 2 / np.sqrt(5 * 5 * 11 / 12)
    assert probability(highest, 10) == pytest.approx(2 / comb(10, 5), rel=0.3)


@pytest.mark.parametrize(("runs", "found"), [(9, False), (10, True)])
def test_ten_runs_are_the_fewest_that_tell(runs: int, *, found: bool) -> None:
    assert bool(cuts(np.arange(runs, dtype=float), 0.01)) is found


def test_equal_runs_and_a_new_place_in_the_last_run_are_no_change() -> None:
    assert cuts(np.zeros(30), 0.01) == []
    assert cuts(np.append(np.zeros(29), 5.0), 0.01) == []
    assert cuts(np.append(np.zeros(15), np.full(15, 5.0)), 0.01) == [15]
