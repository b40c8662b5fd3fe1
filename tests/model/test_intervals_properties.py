"""The vectorised interval code against loops that anyone can check."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.intervals import (
    NEVER,
    NO_ROW,
    chain_to,
    covered_lengths,
    enclosing,
    gaps,
    innermost,
    last_begun,
    levels,
    longest_begun,
    reached_before,
    union,
    union_lengths,
    unions,
)

settings.register_profile("thence", deadline=None, max_examples=examples(150))
settings.load_profile("thence")

# (group or track, start, length): few distinct values, so that much overlaps, touches and coincides.
intervals = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 25), st.integers(0, 12)), max_size=40)
far_apart = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2**61), st.integers(0, 2**60)), max_size=20)


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
def test_intervals_that_end_before_they_start_cover_nothing(rows: list[tuple[int, int, int]]) -> None:
    group, start, length = columns(rows)
    assert union_lengths(group, start, start - length, 3).tolist() == [0, 0, 0]


@given(far_apart)
def test_union_of_large_times_is_exact(rows: list[tuple[int, int, int]]) -> None:
    expected, reached = 0, -1
    for _, begin, size in sorted(rows, key=lambda row: row[1]):
        expected += max(0, begin + size - max(begin, reached))
        reached = max(reached, begin + size)
    _, start, length = columns(rows)
    one = np.zeros(len(rows), np.int64)
    assert union_lengths(one, start, start + length, 1).tolist() == [expected]


def sorted_rows(rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """By track, start, and the longer first, as `enclosing` wants them."""
    return sorted(rows, key=lambda row: (row[0], row[1], -max(row[2], 1)))


@given(intervals)
def test_enclosing_is_the_last_row_before_that_contains_it(rows: list[tuple[int, int, int]]) -> None:
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
def test_chain_to_climbs_until_a_wanted_row(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
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


@given(intervals)
def test_reached_before_is_the_latest_end_of_the_rows_before_in_the_group(rows: list[tuple[int, int, int]]) -> None:
    rows = sorted(rows)
    expected = [
        max((s + n for other, s, n in rows[:i] if other == group), default=NEVER)
        for i, (group, _, _) in enumerate(rows)
    ]
    group, start, length = columns(rows)
    assert reached_before(start + length, group).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-(2**62), 2**62)), max_size=20))
def test_reached_before_is_exact_for_times_that_far_apart(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    expected = [
        max((end for other, end in rows[:i] if other == group), default=NEVER) for i, (group, _) in enumerate(rows)
    ]
    group, end = (np.array([row[i] for row in rows], np.int64) for i in range(2))
    assert reached_before(end, group).tolist() == expected


def test_reached_before_of_few_large_groups() -> None:
    # Each group has more rows than make it worth calls of its own; ends rise in one, fall in the other.
    size = 1200
    group = np.repeat([5, 3], size)
    end = np.concatenate([np.arange(size), -np.arange(size)])
    expected = [NEVER, *range(size - 1), NEVER, *[0] * (size - 1)]
    assert reached_before(end, group).tolist() == expected


def runs(moments: set[int]) -> list[tuple[int, int]]:
    """Maximal runs of neighbouring numbers, as half-open intervals."""
    begins = sorted(m for m in moments if m - 1 not in moments)
    ends = sorted(m + 1 for m in moments if m + 1 not in moments)
    return list(zip(begins, ends, strict=True))


@given(intervals)
def test_unions_are_the_runs_of_covered_nanoseconds(rows: list[tuple[int, int, int]]) -> None:
    expected = []
    for number in range(3):
        covered = {m for g, s, n in rows if g == number for m in range(s, s + n)}
        expected += [(number, begin, end) for begin, end in runs(covered)]
    group, start, length = columns(rows)
    found = unions(group, start, start + length)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


@given(intervals)
def test_union_and_gaps_are_the_covered_and_the_other_nanoseconds(rows: list[tuple[int, int, int]]) -> None:
    covered = {m for _, s, n in rows for m in range(s, s + n)}
    _, start, length = columns(rows)
    found = union(start, start + length)
    assert list(zip(*(column.tolist() for column in found), strict=True)) == runs(covered)
    # Also an interval of no length marks a moment between which there can be gaps.
    last = max((s + n for _, s, n in rows), default=0)
    free = {m for m in range(min((s for _, s, _ in rows), default=0), last) if m not in covered}
    begins, ends = gaps(start, start + length)
    assert {m for b, e in zip(begins, ends, strict=True) for m in range(b, e)} == free


@given(intervals, intervals)
def test_covered_lengths_count_the_nanoseconds_in_both(
    asked: list[tuple[int, int, int]], others: list[tuple[int, int, int]]
) -> None:
    covered = {m for _, s, n in others for m in range(s, s + n)}
    expected = [len(covered & set(range(s, s + n))) for _, s, n in asked]
    (_, start, length), (_, other, lasting) = columns(asked), columns(others)
    found = covered_lengths(start, start + length, other, other + lasting)
    assert found.tolist() == expected


@given(intervals)
def test_levels_are_sums_at_every_nanosecond(rows: list[tuple[int, int, int]]) -> None:
    weight, start, length = columns(rows)
    begins, ends, sums = levels(start, start + length, weight)
    assert (begins < ends).all()
    assert (ends[:-1] == begins[1:]).all()
    times = {m for _, s, n in rows for m in (s, s + n)}
    assert {*begins.tolist(), *ends.tolist()} == (times if len(times) > 1 else set())
    for begin, end, level in zip(begins.tolist(), ends.tolist(), sums.tolist(), strict=True):
        for moment in range(begin, end):
            assert level == sum(w for w, s, n in rows if s <= moment < s + n)


def test_levels_of_halves_are_floats() -> None:
    # 0.5 from 0 to 10 and 0.25 from 4 to 6.
    start, end = np.array([0, 4]), np.array([10, 6])
    begins, ends, sums = levels(start, end, np.array([0.5, 0.25]))
    assert begins.tolist() == [0, 4, 6]
    assert ends.tolist() == [4, 6, 10]
    assert sums.tolist() == [0.5, 0.75, 0.5]


@given(intervals, st.lists(st.integers(-2, 40), max_size=10))
def test_what_began_by_a_moment(rows: list[tuple[int, int, int]], moments: list[int]) -> None:
    _, start, length = columns(rows)
    asked = np.array(moments, np.int64)
    last, longest = last_begun(start, asked), longest_begun(start, start + length, asked)
    for moment, of_last, of_longest in zip(moments, last.tolist(), longest.tolist(), strict=True):
        begun = [i for i, (_, s, _) in enumerate(rows) if s <= moment]
        assert of_last == max(begun, key=lambda i: (rows[i][1], i), default=NO_ROW)
        by_end = [(rows[i][1] + rows[i][2], -rows[i][1], -i) for i in begun]
        assert of_longest == (-max(by_end)[2] if by_end else NO_ROW)


@given(st.lists(st.tuples(st.just(0), st.integers(0, 40), st.integers(0, 40)), max_size=12), st.data())
def test_innermost_is_the_last_range_around_a_moment(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    # Ranges that nest: each is kept only if it crosses none of those before it.
    nested: list[tuple[int, int]] = []
    for _, begin, size in sorted_rows(rows):
        end = begin + size
        if all(end <= e or begin >= e for _, e in nested):
            nested.append((begin, end))
    track = np.zeros(len(nested), np.int64)
    start, end = (np.array([row[i] for row in nested], np.int64) for i in range(2))
    asked = data.draw(st.lists(st.tuples(st.integers(-1, 85), st.integers(0, 5)), max_size=10))
    begin, length = (np.array([row[i] for row in asked], np.int64) for i in range(2))
    found = innermost(np.arange(len(nested)), start, end, enclosing(track, start, end), (begin, begin + length))
    for (b, n), row in zip(asked, found.tolist(), strict=True):
        around = [i for i, (s, e) in enumerate(nested) if s <= b and b + n <= e]
        if row != NO_ROW:
            assert row in around
        assert row == max(around, default=NO_ROW)
