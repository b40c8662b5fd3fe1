"""Work that one thread hands to another, beside a plain search of all threads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.whatif.edges import GraphBuilder, RecordedWork, add_handovers, latencies
from thence.model.intervals import Intervals

US = 1000
Row = tuple[int, int, int, int, str]
"""Rank, thread, start and duration (us), category."""
rows = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 4),
        st.sampled_from([*range(0, 200, 20), *range(2000, 2200, 20), 90, 5000]),
        st.sampled_from([0, 0, 10, 20, 40, 300]),
        st.sampled_from(["op", "op", "runtime", "python"]),
    ),
    max_size=25,
).map(lambda found: sorted(found, key=lambda row: row[:3]))


def searched(document: list[Row]) -> list[tuple[int, int, int, int]]:
    """(start, its thread, end of the other thread's work, that thread) of each handover, thread by thread."""
    keys = sorted({row[:2] for row in document})
    periods: dict[int, list[list[int]]] = {}
    for number, key in enumerate(keys):
        mine = [row for row in document if row[:2] == key]
        if not any(row[4] == "op" for row in mine):
            continue
        for _, _, start, duration, category in mine:
            if category == "python":
                continue
            found = periods.setdefault(number, [])
            if not found or start > found[-1][1] + 15:
                found.append([start, start + duration])
            else:
                found[-1][1] = max(found[-1][1], start + duration)
    result = []
    for number, found in periods.items():
        for place, (start, _) in enumerate(found):
            ends = [
                (end, -other)
                for other, theirs in periods.items()
                if other != number and keys[other][0] == keys[number][0]
                for _, end in theirs
                if end <= start
            ]
            if not ends:
                continue
            end, other = max(ends)
            if place and (end <= found[place - 1][1] or start - end >= 2000):
                continue
            result.append((start, number, end, -other))
    return result


@settings(max_examples=examples(200), deadline=None)
@given(rows)
def test_handovers_are_those_of_a_plain_search(document: list[Row]) -> None:
    frame = pl.DataFrame(document, schema=["rank", "thread", "start", "duration", "category"], orient="row").cast(
        {"start": pl.Int64, "duration": pl.Int64, "rank": pl.Int64, "category": pl.String}
    )
    start = frame["start"].to_numpy() * US
    keys = [row[:2] for row in document]
    thread = np.array([sorted(set(keys)).index(key) for key in keys], np.int64)
    trace = cast("Any", SimpleNamespace(host=frame))
    host = Intervals(start, start + frame["duration"].to_numpy() * US)
    nothing = np.empty(0, np.int64)
    builder = GraphBuilder(RecordedWork(trace, Intervals(nothing, nothing), host, nothing, thread, nothing))
    targets = add_handovers(builder)
    time, _, chain, row = (np.concatenate(column) for column in zip(*builder.nodes, strict=True))
    source, target, lag, *_ = (np.concatenate(column) for column in zip(*builder.edges, strict=True))
    assert target.tolist() == targets.tolist()
    assert (lag == time[target] - time[source]).all()
    assert (start[row[target]] == time[target]).all()
    found = zip(time[target] // US, chain[target], time[source] // US, chain[source], strict=True)
    assert [tuple(map(int, one)) for one in found] == searched(document)


def test_the_next_kernel_of_a_stream_waits_unless_it_ran_beside_the_one_before_it() -> None:
    """The second begins 5 us before the end of the first; the third is inside it; the last two are of one launch."""
    start, end = np.array([0, 95, 150, 300, 340]) * US, np.array([100, 200, 180, 400, 500]) * US
    launch = np.array([0, 1, 2, 3, 3])
    made = SimpleNamespace(gpu=Intervals(start, end), host=Intervals(np.zeros(4, np.int64), np.ones(4, np.int64)))
    work = cast("RecordedWork", SimpleNamespace(gpu=made.gpu, host=made.host, launch=launch))
    _, gap, beside = latencies(work, np.arange(4), np.arange(1, 5))
    assert beside.tolist() == [False, True, False, True, False]
    assert gap[0] == -5 * US
