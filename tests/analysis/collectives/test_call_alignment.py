"""Pairing the calls of two participants: what is paired is true, and what cannot be told is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.collectives import call_alignment
from thence.analysis.collectives.call_alignment import Calls, Pairs, pair_calls

STEP = ["gather", "gather", "scatter", "reduce"]


def calls(tokens: list[str], ends: list[int], joint: bool = True) -> Calls:
    numbers = {token: number for number, token in enumerate(sorted({*STEP, *tokens}))}
    return Calls(
        np.array([numbers[token] for token in tokens], np.int64), np.array(ends, np.int64), np.full(len(tokens), joint)
    )


def jittered(count: int, seed: int = 0) -> list[int]:
    """Ends about 1 ms apart, as real steps are: never exactly the same distance."""
    rng = random.Random(seed)
    times, now = [], 0
    for _ in range(count):
        now += rng.randrange(900_000, 1_100_000)
        times.append(now)
    return times


def partners(pairs: Pairs) -> dict[int, int]:
    return dict(zip(pairs.second.tolist(), pairs.first.tolist(), strict=True))


@pytest.mark.parametrize("skew", [0, 700, 5_000_000, -(10**12)])
@pytest.mark.parametrize(("first", "last"), [(1, 40), (0, 37), (4, 40), (9, 31)])
def test_a_profile_that_begins_later_or_ends_earlier(first: int, last: int, skew: int) -> None:
    tokens, ends = STEP * 10, jittered(40)
    late = calls(tokens[first:last], [end + skew for end in ends[first:last]])
    found = pair_calls(calls(tokens, ends), late, one_clock=False)
    assert partners(found) == {number: number + first for number in range(last - first)}


@pytest.mark.parametrize("lost", [[13], [5, 20], [7, 8, 9, 30], [0, 17, 39]])
def test_calls_lost_in_the_middle(lost: list[int]) -> None:
    tokens, ends = STEP * 10, jittered(40)
    kept = [number for number in range(40) if number not in lost]
    other = calls([tokens[n] for n in kept], [ends[n] + 123_456 for n in kept])
    found = pair_calls(calls(tokens, ends), other, one_clock=False)
    assert partners(found) == dict(enumerate(kept))


def test_each_lost_another_call_of_the_same_kind() -> None:
    ends = jittered(30)
    ours = [n for n in range(30) if n != 8]
    theirs = [n for n in range(30) if n != 19]
    found = pair_calls(
        calls(["reduce"] * 29, [ends[n] for n in ours]),
        calls(["reduce"] * 29, [ends[n] + 77 for n in theirs]),
        one_clock=False,
    )
    assert {theirs[b]: ours[a] for b, a in partners(found).items()} == {n: n for n in range(30) if n not in (8, 19)}


def test_steps_that_nothing_tells_apart_are_refused() -> None:
    tokens, ends = STEP * 10, [1_000_000 * number for number in range(40)]
    late = calls(tokens[4:], [end + 333_000 for end in ends[4:]])
    found = pair_calls(calls(tokens, ends), late, one_clock=False)
    assert not len(found.first)
    assert found.ambiguous > 1


def test_regular_steps_on_clocks_that_agree_are_told_apart() -> None:
    tokens, ends = STEP * 10, [1_000_000 * number for number in range(40)]
    late = calls(tokens[4:], [end + 900 for end in ends[4:]])
    for one_clock in (False, True):
        found = pair_calls(calls(tokens, ends), late, one_clock=one_clock)
        assert partners(found) == {number: number + 4 for number in range(36)}


def test_calls_that_need_not_end_together_are_paired_if_none_is_left() -> None:
    ends = [1_000_000 * number for number in range(5)]
    later = [end + 300_000 * (number % 3) for number, end in enumerate(ends)]
    ours, theirs = (calls(["reduce"] * 5, times, joint=False) for times in (ends, later))
    assert partners(pair_calls(ours, theirs, one_clock=False)) == dict(enumerate(range(5)))
    assert pair_calls(ours, theirs.part(1, 5), one_clock=False).ambiguous > 1


def test_a_sender_that_is_several_calls_ahead_is_paired_by_order() -> None:
    """As recorded on four GPUs: the ends of buffered sends look like those of later receives."""
    sends = [947, 1789, 2631, 3474, 4317, 5161, 6006, 8367, 11587, 14809, 18034, 21259]
    receives = [961, 1864, 2768, 3675, 5120, 8346, 11565, 14788, 18013, 21238, 24462, 27685]
    ours, theirs = (calls(["reduce"] * 12, [1000 * end for end in ends], joint=False) for ends in (sends, receives))
    assert partners(pair_calls(ours, theirs, one_clock=False)) == dict(enumerate(range(12)))
    assert pair_calls(ours, theirs.part(3, 12), one_clock=True).ambiguous > 1


def test_ends_that_scatter_less_than_calls_are_apart_stay_paired() -> None:
    ends = jittered(12)
    theirs = [end + (70_000 if number == 0 else 100 * number) for number, end in enumerate(ends)]
    found = pair_calls(calls(["reduce"] * 12, ends), calls(["reduce"] * 12, theirs), one_clock=False)
    assert partners(found) == dict(enumerate(range(12)))


def test_without_a_common_call_nothing_is_paired() -> None:
    found = pair_calls(calls(["gather"], [5]), calls(["reduce"], [5]), one_clock=True)
    assert (len(found.first), found.ambiguous) == (0, 0)
    nothing = calls([], [])
    assert not len(pair_calls(nothing, calls(["reduce"], [5]), one_clock=True).first)


def test_many_calls_are_paired_by_windows() -> None:
    tokens, ends = STEP * 1500, jittered(6000)
    kept = [n for n in range(7, 6000) if n != 3111]
    other = calls([tokens[n] for n in kept], [ends[n] - 10**9 for n in kept])
    found = pair_calls(calls(tokens, ends), other, one_clock=False)
    assert partners(found) == dict(enumerate(kept))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from(STEP), min_size=3, max_size=8),
    st.integers(3, 8),
    st.sets(st.integers(0, 60), max_size=4),
    st.sets(st.integers(0, 60), max_size=4),
    st.integers(-(10**9), 10**9),
    st.integers(0, 1000),
)
def test_no_pair_is_wrong(step: list[str], steps: int, ours: set[int], theirs: set[int], skew: int, seed: int) -> None:
    """Whatever is lost on either side, what is paired was the same call."""
    tokens = step * steps
    ends = jittered(len(tokens), seed)
    ours, theirs = ({n for n in range(len(tokens)) if n not in lost} for lost in (ours, theirs))
    a, b = sorted(ours), sorted(theirs)
    if len(a) < 6 or len(b) < 6:
        return
    found = pair_calls(
        calls([tokens[n] for n in a], [ends[n] for n in a]),
        calls([tokens[n] for n in b], [ends[n] + skew for n in b]),
        one_clock=False,
    )
    assert all(a[i] == b[j] for i, j in zip(found.first, found.second, strict=True))
    if not found.ambiguous:
        assert len(found.first) >= len(ours & theirs) // 2


@settings(max_examples=examples(40) // 2, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 2000), st.integers(1, 60), st.integers(1, 4))
def test_offsets_are_left_out_only_where_no_long_run_is(seed: int, count: int, period: int, kinds: int) -> None:
    """Both shortcuts against the definition: every run at every offset."""
    rng = np.random.default_rng(seed)
    tokens = np.tile(rng.integers(0, kinds, period), count // period + 1)[:count]
    ends = np.cumsum(rng.integers(1, 2_000_000, count)) + rng.integers(0, 3_000_000, count)
    kept = [rng.random(count) > share for share in (0.002, 0.01)]
    a, b = (Calls(tokens[k], ends[k] + n * 777, rng.random(k.sum()) > 0.3) for n, k in enumerate(kept))
    every = list(call_alignment._runs(a.token, b.token))
    longest = max((run.length for run in every), default=0)
    assert call_alignment._longest_runs(a.token, b.token) == [run for run in every if 2 * run.length > longest]
    rated = [call_alignment._rated(a, b, run, one_clock=False) for run in every]
    near = [run.second - run.first for run in rated if abs(run.shift - 777) <= 50_000]
    least, most = call_alignment._offsets_at(a.end, b.end, 777, 50_000)
    assert all(least <= -offset <= most for offset in near)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(0, 3), max_size=24), st.lists(st.integers(0, 3), max_size=24))
def test_all_offsets_at_once_give_the_runs_of_each_offset(ours: list[int], theirs: list[int]) -> None:
    runs = {}
    for offset in range(1 - len(theirs), len(ours)):
        best = (0, 0)
        for begin in range(len(theirs)):
            length = 0
            while (
                begin + length < len(theirs)
                and 0 <= begin + length + offset < len(ours)
                and ours[begin + length + offset] == theirs[begin + length]
            ):
                length += 1
            best = max(best, (length, -begin))
        runs[offset] = best
    longest = max((length for length, _ in runs.values()), default=0)
    expected = [(offset - begin, -begin, length) for offset, (length, begin) in runs.items() if 2 * length > longest]
    a, b = (np.array(tokens, np.int64) for tokens in (ours, theirs))
    found = call_alignment._longest_runs(a, b)
    assert [(run.first, run.second, run.length) for run in found] == expected
