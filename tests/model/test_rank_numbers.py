"""Numbers of ranks that several inputs hold, determined by hand."""

from __future__ import annotations

from thence.model.rank_numbers import rank_numbers


def test_ranks_that_are_stated_stay_and_others_follow_in_the_order_of_the_inputs() -> None:
    """Both inputs that state rank 1 after the first one, and the one that only seems to have it, move above rank 3."""
    parts = [((0,), False), ((1,), True), ((1,), True), ((3,), True), ((1,), False), ((2,), False), ((0, 1), True)]
    assert rank_numbers(parts) == [(0,), (1,), (4,), (3,), (5,), (2,), (6, 7)]


def test_the_highest_possible_rank_leaves_the_numbers_below_it() -> None:
    highest = (1 << 31) - 1
    assert rank_numbers([((highest,), True), ((0,), True), ((highest,), True)]) == [(highest,), (0,), (1,)]
