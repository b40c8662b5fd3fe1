"""Values with units for people."""

from __future__ import annotations

import pytest

from thence.units import format_share, listed, several


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (0, 3, "0.0 %"),
        (1, 10_000, "<0.1 %"),
        (1, 3, "33.3 %"),
        (9_994, 10_000, "99.9 %"),
        (9_999, 10_000, ">99.9 %"),  # a part that is left is not rounded away
        (10_000, 10_000, "100.0 %"),
        (sum([0.1] * 10), 1, "100.0 %"),  # 0.9999999999999999: a sum of shares is rounded
        (1, 0, "-"),
    ],
)
def test_neither_little_nor_nearly_all_is_rounded_away(part: float, whole: float, shown: str) -> None:
    assert format_share(part, whole) == shown


@pytest.mark.parametrize(
    ("count", "what", "shown"),
    [
        (1, "trace", "1 trace"),
        (1_200, "trace", "1,200 traces"),
        (0, "activity", "0 activities"),
        (2, "launch", "2 launches"),
        (2, "copy", "2 copies"),
        (2, "array", "2 arrays"),
    ],
)
def test_a_noun_agrees_with_its_number(count: int, what: str, shown: str) -> None:
    assert several(count, what) == shown


def test_long_lists_are_cut() -> None:
    assert listed([]) == ""
    assert listed(["a", 2]) == "a, 2"
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(5000), 2) == "0, 1 and 4,998 more"
