"""Intervals of many groups on one timeline keep their lengths and overlaps, and meet no other group's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.grouped_intervals import GroupedIntervals, GroupedTimes, GroupedUnion, numbered, rows_of_groups
from thence.model.intervals import NEVER, NO_ROW, union
from thence.units import LATEST_NS

GROUPS = 3
FAR = (-LATEST_NS, 0, LATEST_NS - 100)
"""Stretches as far apart as clocks allow: spans of several devices do not fit int64."""
INTERVALS = st.lists(
    st.tuples(st.integers(0, GROUPS - 1), st.sampled_from(FAR), st.integers(0, 25), st.integers(0, 9)), max_size=30
)  # fmt: skip


@settings(deadline=None, max_examples=examples(100))
@given(INTERVALS)
def test_against_counting_every_nanosecond(rows: list[tuple[int, int, int, int]]) -> None:
    group = np.array([g for g, *_ in rows], np.int64)
    start = np.array([far + at for _, far, at, _ in rows], np.int64)
    length = np.array([n for *_, n in rows], np.int64)
    moved = GroupedIntervals.of(group, start, start + length, GROUPS)
    assert (moved.end - moved.start == length).all()
    for i, (g, far, at, n) in enumerate(rows):
        for j, (other, other_far, other_at, m) in enumerate(rows):
            shared = 0
            if (g, far) == (other, other_far):
                shared = len({*range(at, at + n)} & {*range(other_at, other_at + m)})
            low, high = max(moved.start[i], moved.start[j]), min(moved.end[i], moved.end[j])
            assert max(high - low, 0) == shared
    begins, ends = union(moved.start, moved.end)
    covered = {(g, far + t) for g, far, at, n in rows for t in range(at, at + n)}
    expected = [sum(g == number for g, _ in covered) for number in range(GROUPS)]
    assert moved.sums(begins, ends - begins).tolist() == expected


TIMES = st.lists(st.tuples(st.integers(0, GROUPS - 1), st.sampled_from(FAR), st.integers(0, 9)), max_size=12)


@settings(deadline=None, max_examples=examples(100))
@given(TIMES, TIMES, st.booleans(), st.booleans())
def test_times_are_searched_in_their_groups(
    rows: list[tuple[int, int, int]], asked: list[tuple[int, int, int]], near: bool, begins: bool
) -> None:
    """As `bisect` does in pairs of group and time; near: the shifted times fit int64; begins: groups begin at NEVER."""
    of, queries = ([(g, at if near else far + at) for g, far, at in part] for part in (rows, asked))
    of = sorted(of + [(g, NEVER) for g in range(NO_ROW, GROUPS) if begins])
    group, time = np.array(of, np.int64).reshape(-1, 2).T
    times = GroupedTimes.of(group, time, GROUPS)
    wanted, moments = np.array(queries, np.int64).reshape(-1, 2).T
    assert times.search(wanted, moments, "left").tolist() == [bisect_left(of, query) for query in queries]
    after = [bisect_right(of, query) for query in queries]
    assert times.search(wanted, moments, "right").tolist() == after
    last = [n - 1 if n and of[n - 1][0] == query[0] else NO_ROW for n, query in zip(after, queries, strict=True)]
    assert times.last(wanted, moments).tolist() == last


@settings(deadline=None, max_examples=examples(50))
@given(INTERVALS, INTERVALS)
def test_what_the_union_of_a_group_covers(
    rows: list[tuple[int, int, int, int]], asked: list[tuple[int, int, int, int]]
) -> None:
    group, start, length = (np.array(c, np.int64) for c in ([r[0] for r in rows], [r[1] + r[2] for r in rows],
                                                            [r[3] for r in rows]))  # fmt: skip
    union_of_groups = GroupedUnion.of(group, start, start + length, GROUPS)
    covering = {(g, far + t) for g, far, at, n in rows for t in range(at, at + n)}
    wanted, begin = np.array([(g, far + at) for g, far, at, _ in asked], np.int64).reshape(-1, 2).T
    lasting = np.array([n for *_, n in asked], np.int64)
    expected = [sum((g, far + t) in covering for t in range(at, at + n)) for g, far, at, n in asked]
    assert union_of_groups.covered(wanted, begin, begin + lasting).tolist() == expected


def test_numbers_of_values_ascend_and_null_comes_first() -> None:
    frame = pl.DataFrame({"a": [2, 1, 2, 1], "b": [7, None, 7, 3]})
    number, distinct = numbered(frame, "a", "b")
    assert number.tolist() == [2, 0, 2, 1]
    assert distinct.rows() == [(1, None), (1, 3), (2, 7)]


def test_names_are_numbered_by_their_letters() -> None:
    """Not by their codes: "z" has a lower one than "a"."""
    names = pl.Series(["z", None, "a", "a", None], dtype=pl.Categorical())
    number, distinct = numbered(pl.DataFrame({"name": names, "flag": [True, None, True, False, None]}), "name", "flag")
    assert number.tolist() == [3, 0, 2, 1, 0]
    assert distinct.rows() == [(None, None), ("a", False), ("a", True), ("z", True)]
    number, distinct = numbered(pl.DataFrame({"rank": pl.Series([], dtype=pl.Int32)}), "rank")
    assert (number.tolist(), distinct.height) == ([], 0)


@given(st.lists(st.integers(0, GROUPS - 1), max_size=20))
def test_each_row_is_in_its_group_and_groups_without_rows_are_empty(number: list[int]) -> None:
    found = rows_of_groups(np.array(number, np.int64), GROUPS)
    assert [rows.tolist() for rows in found] == [
        [row for row, of in enumerate(number) if of == group] for group in range(GROUPS)
    ]
    assert rows_of_groups(np.empty(0, np.int64), 0) == []
