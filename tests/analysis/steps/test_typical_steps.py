"""Which steps count, by the stated rules, on lengths made by hand."""

from __future__ import annotations

import numpy as np
import polars as pl

from thence.analysis.steps.windows import FIRST, LAST, OUTLIER, WARM_UP, left_out, left_out_of_windows, without_end


def codes(*total: float, last: tuple[int, ...] = (), outliers: bool = False) -> list[str | None]:
    """For steps of these ms."""
    ends = np.zeros(len(total), np.bool_)
    ends[[*last]] = True
    return left_out(np.array(total) * 1e6, ends, outliers=outliers)


def test_the_first_step_is_left_out_if_there_are_others() -> None:
    assert codes(5) == [None]
    assert codes(62.2, 51.4) == [FIRST, None]
    assert codes(51.4, 51.6, 62.2) == [FIRST, None, None]


def test_long_steps_at_the_beginning_are_warm_up() -> None:
    assert codes(40, 20, 10, 10.1, 9.9, 10) == [WARM_UP, WARM_UP, None, None, None, None]


def test_a_long_step_later_is_an_outlier_in_runs_of_eight_steps() -> None:
    assert codes(10, 10, 10, 30, 10, 10.2, 10, 10) == [FIRST, *[None] * 2, OUTLIER, *[None] * 4]
    assert codes(10, 10, 10, 3, 10, 10.2, 10, 10) == [FIRST, *[None] * 2, OUTLIER, *[None] * 4]
    assert codes(10, 10, 30, 10, 10.2, 10, 10) == [FIRST, *[None] * 6]
    assert codes(10, 10, 10, 30, 10, 10.2, 10, 10, outliers=True) == [FIRST, *[None] * 7]


def test_a_step_without_an_end_is_left_out_where_others_remain() -> None:
    assert codes(10, 10, 10, 9, last=(3,)) == [FIRST, None, None, LAST]
    assert codes(10, 10, 9, last=(2,)) == [FIRST, None, None]
    assert codes(10, 9, 10, 10, 9, last=(1, 4)) == [FIRST, LAST, None, None, LAST]


def test_steps_that_vary_much_are_ordinary() -> None:
    assert codes(8, 12, 9, 11, 10, 8.5, 11.5, 10) == [FIRST, *[None] * 7]


def test_at_most_half_is_warm_up() -> None:
    assert codes(50, 40, 30, 20, 10, 10, 10).count(WARM_UP) == 3


def test_the_last_step_has_no_end_if_nothing_marks_it_or_it_is_a_rest() -> None:
    assert without_end(np.array([8.0, 8, 8]), endless=True).tolist() == [False, False, True]
    assert without_end(np.array([8.0, 8, 3]), endless=False).tolist() == [False, False, True]
    assert without_end(np.array([8.0, 8, 5]), endless=False).tolist() == [False, False, False]


def test_a_step_of_several_devices_is_left_out_on_all_of_them() -> None:
    """Device 1 began with the second step, which is therefore left out there and counts on device 0."""
    frame = pl.DataFrame(
        {
            "rank": [0] * 7, "device": [0] * 4 + [1] * 3, "step": ["a", "b", "c", "d", "b", "c", "d"],
            "start": [0, 10, 20, 30, 10, 20, 30], "duration": [10, 10, 10, 8, 10, 10, 8],
            "busy_ns": [9, 9, 9, 1, 9, 9, 1], "exposed_ns": [0] * 7,
            "first": [True, False, False, False, True, False, False],
        }
    )  # fmt: skip
    found = left_out_of_windows(frame, endless=False)
    assert found.to_list() == [FIRST, None, None, LAST, FIRST, None, LAST]
