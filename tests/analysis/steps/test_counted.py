"""Which steps count, by the stated rules, on lengths made by hand."""

from __future__ import annotations

import numpy as np

from thence.analysis.diff.counted_steps import LAST, OUTLIER, WARM_UP, left_out


def codes(*total: float, last: tuple[int, ...] = (), outliers: bool = False) -> list[str | None]:
    """For steps of these ms."""
    ends = np.zeros(len(total), np.bool_)
    ends[[*last]] = True
    return left_out(np.array(total) * 1e6, ends, outliers=outliers)


def test_long_steps_at_the_beginning_are_warm_up() -> None:
    assert codes(40, 20, 10, 10.1, 9.9, 10) == [WARM_UP, WARM_UP, None, None, None, None]


def test_a_long_step_later_is_an_outlier_in_runs_of_eight_steps() -> None:
    assert codes(10, 10, 10, 30, 10, 10.2, 10, 10) == [None] * 3 + [OUTLIER] + [None] * 4
    assert codes(10, 10, 10, 3, 10, 10.2, 10, 10) == [None] * 3 + [OUTLIER] + [None] * 4
    assert codes(10, 10, 30, 10, 10.2, 10, 10) == [None] * 7
    assert codes(10, 10, 10, 30, 10, 10.2, 10, 10, outliers=True) == [None] * 8


def test_few_steps_all_count() -> None:
    assert codes(51.4, 51.6, 62.2) == [None] * 3
    assert codes(62.2, 51.4) == [None] * 2
    assert codes(5) == [None]


def test_a_step_without_an_end_is_left_out_where_others_remain() -> None:
    assert codes(10, 10, 10, 9, last=(3,)) == [None, None, None, LAST]
    assert codes(10, 10, 9, last=(2,)) == [None] * 3
    assert codes(10, 9, 10, 10, 9, last=(1, 4)) == [None, LAST, None, None, LAST]


def test_steps_that_vary_much_are_ordinary() -> None:
    assert codes(8, 12, 9, 11, 10, 8.5, 11.5, 10) == [None] * 8


def test_at_most_half_is_warm_up() -> None:
    assert codes(50, 40, 30, 20, 10, 10, 10).count(WARM_UP) == 3
