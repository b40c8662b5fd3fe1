"""What threads are in over time, against asking at every nanosecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.idle.host_threads import InnermostRows, innermost_rows, merged, thread_numbers
from thence.model.intervals import NO_ROW, Intervals
from thence.model.tables import HOST

if TYPE_CHECKING:
    import polars as pl

SPAN = 60
Nested = list[tuple[int, int, int | None]]
"""Start, end and parent of the rows of a thread, in order."""


@st.composite
def nested(draw: st.DrawFn) -> Nested:
    """Rows inside each other, some of them empty."""
    rows: Nested = []

    def inside(low: int, high: int, parent: int | None, depth: int) -> None:
        time = low
        while time < high and len(rows) < 12 and draw(st.booleans()):
            start = draw(st.integers(time, high))
            end = draw(st.integers(start, high))
            rows.append((start, end, parent))
            if depth:
                inside(start, end, len(rows) - 1, depth - 1)
            time = end

    inside(0, SPAN, None, 2)
    return rows


def host_of(threads: list[Nested]) -> pl.DataFrame:
    columns: dict[str, list[int | None]] = {
        name: [] for name in ("rank", "process", "thread", "start", "duration", "parent")
    }
    for number, rows in enumerate(threads):
        first = len(columns["start"])
        for start, end, parent in rows:
            values = (0, 1, number, start, end - start, None if parent is None else first + parent)
            for name, value in zip(columns, values, strict=True):
                columns[name].append(value)
    names = ["f"] * len(columns["start"])
    return HOST.frame({**columns, "name": names, "category": ["python"] * len(names)})


def innermost(host: pl.DataFrame, thread: int) -> list[int]:
    """The row of a thread at each ns: of those that last then the one that comes last."""
    result = [NO_ROW] * SPAN
    for row, (of, start, duration) in enumerate(host.select("thread", "start", "duration").rows()):
        if of == thread:
            result[start : start + duration] = [row] * duration
    return result


def innermost_of(host: pl.DataFrame) -> InnermostRows:
    return innermost_rows(host, np.zeros(host.height, np.bool_), thread_numbers(host))


def at_each_ns(of: InnermostRows, threads: int) -> list[list[int]]:
    times = np.tile(np.arange(SPAN), threads)
    pieces = of.within(np.repeat(np.arange(threads), SPAN), Intervals(times, times + 1))
    assert len(pieces.row) == SPAN * threads
    return [rows.tolist() for rows in pieces.row.reshape(threads, SPAN)]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(nested().filter(bool), min_size=1, max_size=4), st.data())
def test_leaves_and_what_any_thread_of_a_group_is_in(threads: list[Nested], data: st.DataObject) -> None:
    """The first thread is a group of its own, the others are another."""
    host = host_of(threads)
    found = innermost_of(host)
    by_hand = [innermost(host, number) for number in range(len(threads))]
    assert at_each_ns(found, len(threads)) == by_hand
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=host.height, max_size=host.height)))
    cuts = sorted(data.draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=8)))
    low, high = np.array(cuts[: len(cuts) // 2 * 2]).reshape(-1, 2).T
    every = np.arange(len(threads))
    asked = Intervals(np.tile(low, len(every)), np.tile(high, len(every)))
    near = found.near(np.repeat(every, len(low)), asked)
    near = near[(found.row[near] != NO_ROW) & wanted[found.row[near]]]
    group = np.minimum(found.pieces.group(near), 1)
    together = at_each_ns(merged(group, found.times_of(near), 2), 2)
    for t in (t for begin, end in zip(low, high, strict=True) for t in range(begin, end)):
        for ours, row in zip((by_hand[:1], by_hand[1:]), together, strict=True):
            rows = [of[t] for of in ours if of[t] != NO_ROW and wanted[of[t]]]
            assert (row[t] in rows) if rows else row[t] == NO_ROW


@settings(deadline=None, max_examples=examples(30))
@given(st.lists(nested().filter(bool), min_size=1, max_size=3), st.data())
def test_times_in_wanted_rows_and_in_the_program(threads: list[Nested], data: st.DataObject) -> None:
    """The first thread runs the program from 0 to `SPAN`."""
    host = host_of(threads)
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=host.height, max_size=host.height)))
    thread, chosen = innermost_of(host).chosen(wanted, {0: (0, SPAN)})
    found = [set[int](), set[int](), set[int]()]
    quiet = set[int]()
    for number, a, b, row in zip(thread, chosen.start, chosen.end, chosen.row, strict=True):
        (quiet if row == NO_ROW else found[number]).update(range(a, b))
        assert row != NO_ROW or number == 0
    for number in range(len(threads)):
        rows = innermost(host, number)
        assert found[number] == {t for t, at in enumerate(rows) if at != NO_ROW and wanted[at]}
    begun = {t for start, end, _ in threads[0] if end > start for t in (start, end)}
    silent = {t for t, at in enumerate(innermost(host, 0)) if at == NO_ROW}
    assert quiet == {t for t in silent if begun and min(begun) <= t < max(begun)}


@pytest.mark.parametrize(("low", "high"), [(0, 60), (7, 8), (10, 41)])
def test_pieces_tile_what_is_asked(low: int, high: int) -> None:
    found = innermost_of(host_of([[(5, 50, None), (10, 20, 0), (30, 40, 0)]]))
    pieces = found.within(np.array([0]), Intervals(np.array([low]), np.array([high])))
    assert pieces.start[0] == low
    assert pieces.end[-1] == high
    assert (pieces.end[:-1] == pieces.start[1:]).all()


def test_a_call_ends_where_the_next_row_begins_and_the_one_around_ends() -> None:
    host = host_of([[(0, 30, None), (5, 40, 0), (20, 25, 0)]])
    of = innermost_rows(host, np.array([False, True, False]), thread_numbers(host))
    assert at_each_ns(of, 1)[0][:31] == [0] * 5 + [1] * 15 + [2] * 5 + [0] * 5 + [NO_ROW]
