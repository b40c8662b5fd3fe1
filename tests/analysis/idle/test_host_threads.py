"""What threads are in over time, against asking at every nanosecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.analysis.idle.host_threads import NEVER_IN_A_ROW, InnermostRows, innermost_rows, merged, thread_numbers
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


def innermost_of(host: pl.DataFrame) -> list[InnermostRows]:
    return innermost_rows(host, np.zeros(host.height, np.bool_), thread_numbers(host))


def at_each_ns(of: InnermostRows) -> list[int]:
    pieces = of.within(Intervals(np.arange(SPAN), np.arange(SPAN) + 1))
    assert len(pieces.row) == SPAN
    return [int(row) for row in pieces.row]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(nested().filter(bool), min_size=1, max_size=4), st.data())
def test_leaves_and_what_any_thread_is_in(threads: list[Nested], data: st.DataObject) -> None:
    host = host_of(threads)
    found = innermost_of(host)
    by_hand = [innermost(host, number) for number in range(len(threads))]
    assert [at_each_ns(of) for of in found] == by_hand
    wanted = np.array(data.draw(st.lists(st.booleans(), min_size=host.height, max_size=host.height)))
    cuts = sorted(data.draw(st.sets(st.integers(0, SPAN), min_size=2, max_size=8)))
    near = np.array(cuts[: len(cuts) // 2 * 2]).reshape(-1, 2).T
    asked = [t for low, high in near.T.tolist() for t in range(low, high)]
    together = at_each_ns(merged([of.near(Intervals(near[0], near[1]), wanted) for of in found]))
    for t in asked:
        rows = [row[t] for row in by_hand if row[t] != NO_ROW and wanted[row[t]]]
        assert (together[t] in rows) if rows else together[t] == NO_ROW
    for of, rows in zip(found, by_hand, strict=True):
        chosen = of.chosen(wanted, (0, SPAN))
        start, end, row = chosen.start, chosen.end, chosen.row
        silent = {t for t, at in enumerate(rows) if at == NO_ROW and of is not NEVER_IN_A_ROW}
        begun = {t for a, b, r in zip(start, end, row, strict=True) if r != NO_ROW for t in range(a, b)}
        assert begun == {t for t, at in enumerate(rows) if at != NO_ROW and wanted[at]}
        quiet = {t for a, b, r in zip(start, end, row, strict=True) if r == NO_ROW for t in range(a, b)}
        assert quiet <= silent


@pytest.mark.parametrize(("low", "high"), [(0, 60), (7, 8), (10, 41)])
def test_pieces_tile_what_is_asked(low: int, high: int) -> None:
    found = innermost_of(host_of([[(5, 50, None), (10, 20, 0), (30, 40, 0)]]))[0]
    pieces = found.within(Intervals(np.array([low]), np.array([high])))
    assert pieces.start[0] == low
    assert pieces.end[-1] == high
    assert (pieces.end[:-1] == pieces.start[1:]).all()


def test_a_call_ends_where_the_next_row_begins_and_the_one_around_ends() -> None:
    host = host_of([[(0, 30, None), (5, 40, 0), (20, 25, 0)]])
    of = innermost_rows(host, np.array([False, True, False]), thread_numbers(host))[0]
    assert at_each_ns(of)[:31] == [0] * 5 + [1] * 15 + [2] * 5 + [0] * 5 + [NO_ROW]
