"""Sequences matched by their order, against all alignments listed one by one."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from thence.attribution.cuda_graphs import sequences
from thence.attribution.cuda_graphs.sequences import FITS, match, most_in_common

if TYPE_CHECKING:
    import pytest

EQUAL = (FITS * np.eye(256)).astype(np.int8)


def matched(launches: str, activities: str) -> str:
    """The launch that each activity can only be, as its position; `.` where it is open, `-` where it has none."""
    found = match(EQUAL, *(np.array([ord(x) for x in text], np.int64) for text in (launches, activities)))
    possible = set(found.activity.tolist())
    return "".join(
        chr(ord("0") + launch) if launch >= 0 else "." if at in possible else "-"
        for at, launch in enumerate(found.only().tolist())
    )


def test_a_foreign_kernel_costs_its_neighbours_nothing() -> None:
    assert matched("abcabd", "abXcabd") == "01-2345"
    assert matched("abcabdX", "abcabd") == "012345"
    assert matched("Xabcabd", "abcabd") == "123456"


def test_an_ambiguous_stretch_stays_open_and_nothing_else() -> None:
    assert matched("xaaay", "xaay") == "0..4"
    assert matched("xaay", "xaaay") == "0...3"
    assert matched("xabababy", "xababy") == "0....7"


def test_two_that_are_exchanged_are_open() -> None:
    assert matched("wabz", "wbaz") == "0..3"


@given(
    weight=st.lists(st.lists(st.sampled_from([0, 1, 2, 2]), min_size=3, max_size=3), min_size=3, max_size=3),
    launches=st.lists(st.integers(0, 2), max_size=5),
    activities=st.lists(st.integers(0, 2), min_size=1, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_only_pairs_of_all_best_alignments_are_certain(
    weight: list[list[int]], launches: list[int], activities: list[int]
) -> None:
    every = []
    for count in range(min(len(launches), len(activities)) + 1):
        for rows in combinations(range(len(launches)), count):
            for columns in combinations(range(len(activities)), count):
                pairs = tuple(zip(rows, columns, strict=True))
                weights = [weight[launches[i]][activities[j]] for i, j in pairs]
                if all(weights):
                    every.append((sum(weights), pairs))
    best = max(total for total, _ in every)
    alignments = [pairs for total, pairs in every if total == best]
    kinds = np.array(weight, np.int8)
    found = match(kinds, np.array(launches, np.int64), np.array(activities, np.int64))
    possible = {pair for pairs in alignments for pair in pairs}
    assert set(zip(found.launch.tolist(), found.activity.tolist(), strict=True)) == possible
    for at, launch in enumerate(found.only().tolist()):
        of_each = {{j: i for i, j in pairs}.get(at, -1) for pairs in alignments}
        assert launch == (of_each.pop() if len(of_each) == 1 else -1)
    assert found.pairs in {len(pairs) for pairs in alignments}


def test_long_sequences_are_divided_at_unique_kernels_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "_MAX_CELLS", 16)
    assert matched("aaaaUaabaVaaca", "aaaaUaXbaVaaca") == "01234.-789:;<="
    # Two that changed places divide nothing, and what is too long to be compared stays open.
    assert matched("aaUbVaa", "abVbUaa").count("-") == 7


def test_the_most_that_two_sequences_have_in_common_is_an_upper_bound() -> None:
    launches, activities = (np.array([ord(x) for x in t], np.int64) for t in ("abcab", "abXab"))
    assert most_in_common(EQUAL, launches, activities) == 4
