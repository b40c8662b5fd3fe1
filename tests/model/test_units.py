"""Values with units for people."""

from __future__ import annotations

import pytest

from thence.units import format_share


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
def test_neither_little_nor_nearly_all_is_rounded_away(
    part: float, whole: float, shown: str
) -> None:
    assert format_share(part, whole) == shown
