"""Streams and what runs at the same time, against counting every nanosecond."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.streams import Streams, streams
from thence.attribution.attribute import attribute
from thence.model.intervals import covered_lengths, levels, shared_length, union
from thence.model.tables import GPU, Tables

settings.register_profile("thence", deadline=None, max_examples=examples(40))
settings.load_profile("thence")

NAMES = {"gemm": "GEMM", "ncclKernel": "communication", "loop_add_fusion": "elementwise"}

interval = st.tuples(st.integers(-5, 25), st.integers(0, 12))
intervals = st.lists(interval, max_size=30)
# (start, length, device, stream, name): little of everything, so that much coincides.
activities = st.lists(
    st.tuples(
        st.integers(0, 25), st.integers(0, 9), st.integers(0, 1), st.integers(3, 6), st.sampled_from(sorted(NAMES))
    ),
    min_size=1,
    max_size=30,
)


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    start = np.array([row[0] for row in rows], np.int64)
    return start, start + np.array([row[1] for row in rows], np.int64)


def nanoseconds(rows: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in rows for t in range(start, start + length)}


@given(intervals)
def test_a_union_covers_the_same_nanoseconds_in_few_pieces(rows: list[tuple[int, int]]) -> None:
    start, end = union(*columns(rows))
    covered = [t for s, e in zip(start, end, strict=True) for t in range(s, e)]
    assert covered == sorted(nanoseconds(rows))
    assert (start[1:] > end[:-1]).all()
    assert (end > start).all()


@given(intervals)
def test_levels_count_the_intervals_of_every_nanosecond(rows: list[tuple[int, int]]) -> None:
    start, end = columns(rows)
    expected = Counter(t for s, length in rows for t in range(s, s + length))
    found = Counter(
        {
            t: int(level)
            for s, e, level in zip(*levels(start, end, np.ones(len(rows), np.int64)), strict=True)
            for t in range(s, e)
        }
    )
    assert +found == expected


@given(intervals, intervals)
def test_covered_and_shared_are_counted_nanoseconds(rows: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    theirs = nanoseconds(others)
    expected = [len(nanoseconds([row]) & theirs) for row in rows]
    assert covered_lengths(*columns(rows), *columns(others)).tolist() == expected
    both = shared_length(union(*columns(rows)), union(*columns(others)))
    assert both == len(nanoseconds(rows) & theirs)


def measured(rows: list[tuple[int, int, int, int, str]]) -> Streams:
    start, duration, device, stream, name = zip(*rows, strict=True)
    frame = GPU.frame(
        {
            "rank": [0] * len(rows), "device": device, "stream": stream, "kind": ["kernel"] * len(rows),
            "name": name, "start": start, "duration": duration,
        }
    )  # fmt: skip
    return streams(attribute(Tables(gpu=frame)))


@pytest.mark.slow_oracle
@given(activities)
def test_every_number_is_a_count_of_nanoseconds(rows: list[tuple[int, int, int, int, str]]) -> None:
    running: dict[int, dict[int, list[tuple[int, str]]]] = {0: {}, 1: {}}
    for start, length, device, stream, name in rows:
        for t in range(start, start + length):
            running[device].setdefault(t, []).append((stream, NAMES[name]))
    result = measured(rows)
    assert {c.device for c in result.concurrency} == {row[2] for row in rows}
    for found in result.concurrency:
        seconds = running[found.device].values()
        depth = Counter(len({stream for stream, _ in now}) for now in seconds)
        assert dict(enumerate(found.busy_streams_ns, 1)) == {k: depth[k] for k in range(1, max(depth, default=0) + 1)}
        assert found.busy_ns == len(seconds) == sum(found.busy_streams_ns)
        overlap: dict[str, Counter[str]] = defaultdict(Counter)
        for now in seconds:
            groups = Counter(group for _, group in now)
            for a, b in combinations(groups, 2):
                overlap[a][b] += 1
                overlap[b][a] += 1
            for a in groups:
                overlap[a][a] += groups[a] > 1
        expected = {a: dict(+row) for a, row in overlap.items() if +row}
        assert {a: dict(row) for a, row in found.overlap_ns.items()} == expected
        talking = [{g for _, g in now} for now in seconds if ("communication" in {g for _, g in now})]
        assert found.communication_ns == len(talking)
        assert found.hidden_ns == sum(len(groups) > 1 for groups in talking)
        lanes = result.streams.filter(result.streams["device"] == found.device)
        for lane in lanes.iter_rows(named=True):
            mine = [now for now in seconds if lane["stream"] in {s for s, _ in now}]
            assert lane["busy_ns"] == len(mine)
            assert lane["concurrent_ns"] == sum(len({s for s, _ in now}) > 1 for now in mine)


@pytest.mark.slow_oracle
@given(activities)
def test_rows_count_every_activity_once(rows: list[tuple[int, int, int, int, str]]) -> None:
    counts: Counter[tuple[int, int, str]] = Counter()
    totals: Counter[tuple[int, int, str]] = Counter()
    for _, length, device, stream, name in rows:
        counts[device, stream, NAMES[name]] += 1
        totals[device, stream, NAMES[name]] += length
    found = measured(rows).rows
    keys = list(found.select("device", "stream", "group").iter_rows())
    assert dict(zip(keys, found["count"], strict=True)) == dict(counts)
    assert dict(zip(keys, found["total_ns"], strict=True)) == {k: totals[k] for k in counts}
