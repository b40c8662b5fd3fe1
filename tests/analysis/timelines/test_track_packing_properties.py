"""Lanes for overlapping slices against definitions that anyone can check."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.timelines.track_packing import nested_sequence, split_lanes

Slice = tuple[int, int, int]
times = st.integers(0, 12)
slices = st.lists(st.tuples(st.integers(0, 2), times, st.integers(0, 8)), max_size=40)
few = st.lists(st.tuples(st.just(0), times, st.integers(1, 8)), min_size=1, max_size=7)


def columns(rows: list[Slice]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    array = np.array(rows, np.int64).reshape(-1, 3)
    return array[:, 0], array[:, 1], array[:, 1] + array[:, 2]


def lanes_of(rows: list[Slice]) -> list[int]:
    return split_lanes(*columns(rows)).tolist()


def cross(a: Slice, b: Slice) -> bool:
    """One begins strictly inside the other and ends strictly after it; what has no length never does."""
    (track, begin, size), (other_track, other_begin, other_size) = sorted((a, b), key=lambda r: r[1])
    if track != other_track or not size or not other_size:
        return False
    return begin < other_begin < begin + size < other_begin + other_size


def allowed(rows: list[Slice], lanes: list[int]) -> bool:
    pairs = itertools.combinations(zip(rows, lanes, strict=True), 2)
    return not any(x == y and cross(a, b) for (a, x), (b, y) in pairs)


@given(slices)
def test_nothing_crosses_on_a_lane(rows: list[Slice]) -> None:
    assert allowed(rows, lanes_of(rows))


@given(slices)
def test_one_lane_exactly_where_nothing_crosses(rows: list[Slice]) -> None:
    lanes = lanes_of(rows)
    for track in range(3):
        here = [row for row in rows if row[0] == track]
        crossing = any(cross(a, b) for a, b in itertools.combinations(here, 2))
        used = {lane for row, lane in zip(rows, lanes, strict=True) if row[0] == track}
        assert (len(used) > 1) == crossing
        assert used == set(range(len(used)))


@given(few)
@settings(max_examples=examples(300))
def test_no_fewer_lanes_would_do(rows: list[Slice]) -> None:
    used = max(lanes_of(rows)) + 1
    for lanes in itertools.product(range(used - 1), repeat=len(rows)):
        assert not allowed(rows, list(lanes))


@given(slices)
def test_never_more_lanes_than_slices_are_open_at_once(rows: list[Slice]) -> None:
    lanes = lanes_of(rows)
    for track in range(3):
        here = [(s, s + max(d, 1)) for t, s, d in rows if t == track]
        open_at_once = max((sum(s <= at < e for s, e in here) for at, _ in here), default=0)
        used = {lane for row, lane in zip(rows, lanes, strict=True) if row[0] == track}
        assert len(used) <= open_at_once


@given(slices)
def test_begins_and_ends_nest_in_the_order_of_time(rows: list[Slice]) -> None:
    track, start, end = columns(rows)
    on = track * 100 + split_lanes(track, start, end)
    steps = nested_sequence(on, start, end)
    stacks: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    seen = []
    for begin, finish in zip(steps.begins.tolist(), steps.ends.tolist(), strict=True):
        if begin >= 0:
            assert start[begin] >= last.get(on[begin], 0)
            last[on[begin]] = start[begin]
            stacks.setdefault(on[begin], []).append(begin)
            seen.append(begin)
        if finish >= 0:
            assert stacks[on[finish]].pop() == finish
            assert end[finish] >= last[on[finish]]
            last[on[finish]] = end[finish]
    assert sorted(seen) == list(range(len(rows)))
    assert not any(stacks.values())


def test_a_long_chain_takes_two_lanes() -> None:
    start = np.arange(5_000, dtype=np.int64) * 10
    lanes = split_lanes(np.zeros(5_000, np.int64), start, start + 15)
    assert lanes.tolist() == [0, 1] * 2_500


def test_times_that_are_far_apart() -> None:
    far = 1 << 61
    rows = [(0, -far, 10), (0, 5 - far, 10), (1, far, 10), (1, far + 5, 10)]
    assert lanes_of(rows) == [0, 1, 0, 1]


def test_any_number_of_slices_that_are_open_at_once_takes_little_time() -> None:
    start = np.arange(50_000, dtype=np.int64)
    lanes = split_lanes(np.zeros(50_000, np.int64), start, start + 20_000)
    assert sorted(set(lanes.tolist())) == list(range(20_000))
    for lane in (0, 7_777, 19_999):
        chosen = start[lanes == lane]
        assert (np.diff(chosen) >= 20_000).all()
