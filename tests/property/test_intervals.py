"""The vectorised interval code against loops that anyone can check."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thence.model.intervals import NO_ROW, chain_to, enclosing, union_length, union_lengths

settings.register_profile("thence", deadline=None, max_examples=150)
settings.load_profile("thence")

# (group or track, start, length): few distinct values, so that much overlaps, touches and coincides.
intervals = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 25), st.integers(0, 12)), max_size=40
)
far_apart = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2**61), st.integers(0, 2**60)), max_size=20
)


def columns(rows: list[tuple[int, ...]]) -> list[np.ndarray]:
    return [np.array([row[i] for row in rows], np.int64) for i in range(3)]


@given(intervals)
def test_union_is_the_number_of_covered_nanoseconds(rows: list[tuple[int, int, int]]) -> None:
    group, start, length = columns(rows)
    covered: list[set[int]] = [set(), set(), set()]
    for number, begin, size in rows:
        covered[number] |= set(range(begin, begin + size))
    expected = [len(c) for c in covered]
    assert union_lengths(group, start, start + length, 3).tolist() == expected


@given(intervals)
def test_intervals_that_end_before_they_start_cover_nothing(
    rows: list[tuple[int, int, int]],
) -> None:
    _, start, length = columns(rows)
    assert union_length(start, start - length) == 0


@given(far_apart)
def test_union_of_large_times_is_exact(rows: list[tuple[int, int, int]]) -> None:
    expected, reached = 0, -1
    for _, begin, size in sorted(rows, key=lambda row: row[1]):
        expected += max(0, begin + size - max(begin, reached))
        reached = max(reached, begin + size)
    _, start, length = columns(rows)
    assert union_length(start, start + length) == expected


def sorted_rows(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """By track, start, and the longer first, as `enclosing` wants them."""
    return sorted(rows, key=lambda row: (row[0], row[1], -max(row[2], 1)))


@given(intervals)
def test_enclosing_is_the_last_row_before_that_contains_it(
    rows: list[tuple[int, int, int]],
) -> None:
    rows = sorted_rows(rows)
    expected = []
    for i, (track, begin, size) in enumerate(rows):
        around = [
            j
            for j, (other, first, length) in enumerate(rows[:i])
            if other == track and first <= begin and begin + max(size, 1) <= first + max(length, 1)
        ]
        expected.append(max(around, default=NO_ROW))
    track, start, length = columns(rows)
    assert enclosing(track, start, start + length).tolist() == expected


@given(intervals, st.data())
def test_chain_to_climbs_until_a_wanted_row(
    rows: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    # Any forest: each row's parent is an earlier row or none.
    parent = [data.draw(st.integers(-1, i - 1)) for i in range(len(rows))]
    wanted = [data.draw(st.booleans()) for _ in rows]
    starts = data.draw(st.lists(st.integers(-1, len(rows) - 1), max_size=10))
    expected = []
    for row in starts:
        while row != NO_ROW and not wanted[row]:
            row = parent[row]  # noqa: PLW2901 - climbing
        expected.append(row)
    arrays = np.array(parent, np.int64), np.array(starts, np.int64), np.array(wanted, np.bool_)
    assert chain_to(*arrays).tolist() == expected
    assert arrays[1].tolist() == starts  # the input is left as it was
