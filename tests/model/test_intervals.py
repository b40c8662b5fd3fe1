"""The interval around each interval: against the definition, and where nesting is very deep."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model import intervals
from thence.model.intervals import NO_ROW, enclosing

RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 9)), max_size=40)


def by_definition(rows: list[tuple[int, int, int]]) -> list[int]:
    """The last row before each that is on its track and reaches as far."""
    ends = [max(end, start + 1) for _, start, end in rows]
    return [
        max((j for j in range(i) if rows[j][0] == track and ends[j] >= ends[i]), default=NO_ROW)
        for i, (track, _, _) in enumerate(rows)
    ]


@settings(max_examples=examples(300), deadline=None)
@given(RANGES, st.integers(1, 50))
def test_the_innermost_around_each(ranges: list[tuple[int, int, int]], at_once: int) -> None:
    rows = sorted(
        ((track, start, start + length) for track, start, length in ranges),
        key=lambda row: (row[0], row[1], -max(row[2], row[1] + 1)),
    )
    expected = by_definition(rows)
    track, start, end = (np.array([row[n] for row in rows], np.int64) for n in range(3))
    before = intervals._AT_ONCE
    intervals._AT_ONCE = at_once
    try:
        found = enclosing(track, start, end)
    finally:
        intervals._AT_ONCE = before
    assert found.tolist() == expected


def test_many_ranges_after_a_tall_tower_take_no_longer() -> None:
    depth, count = 20_000, 200_000
    steps = np.arange(depth)
    later = 10 * depth + 2 * np.arange(count)
    start = np.concatenate([steps, later])
    end = np.concatenate([10 * depth - steps, later + 1])
    end[0] = later[-1] + 5
    begin = time.perf_counter()
    found = enclosing(np.zeros(len(start), np.int64), start, end)
    assert time.perf_counter() - begin < 10  # climbing step by step takes minutes
    assert found[:depth].tolist() == [NO_ROW, *range(depth - 1)]
    assert set(found[depth:].tolist()) == {0}
