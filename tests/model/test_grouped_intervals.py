"""Intervals of many groups on one timeline keep their lengths and overlaps, and meet no other group's."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.model.grouped_intervals import GroupedIntervals, numbered, rows_of_groups
from thence.model.intervals import union
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
