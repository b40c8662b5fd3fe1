"""Bins of waits against a count one by one."""

from __future__ import annotations

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from thence.analysis.collectives.answer import wait_histogram

SCHEMA = {"collective": pl.String, "wait_ns": pl.Int64}
WAITS = st.one_of(st.none(), st.integers(0, 10**13), st.sampled_from([0, 999, 1000, 1999, 2000, 5000]))


@given(st.lists(st.tuples(st.sampled_from(["all-reduce", "send", None]), WAITS), max_size=30))
def test_every_wait_is_in_the_bin_around_it(rows: list[tuple[str | None, int | None]]) -> None:
    found = wait_histogram(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    counted = {}
    for kind, first, end, count in found.iter_rows():
        inside = [
            wait
            for name, wait in rows
            if name == kind and wait is not None and first <= wait and (end is None or wait < end)
        ]
        assert count == len(inside)
        counted[kind] = counted.get(kind, 0) + count
    assert sum(counted.values()) == sum(wait is not None for _, wait in rows)
    bins = found.select("from_ns", "to_ns").unique(maintain_order=True).rows()
    assert [first for first, _ in bins[1:]] == [end for _, end in bins[:-1]]  # without a hole
    assert found.height == len(bins) * len(counted)


def test_bins_are_round() -> None:
    found = wait_histogram(pl.DataFrame({"collective": ["a", "a"], "wait_ns": [999, 5000]}))
    assert found.select("from_ns", "to_ns", "count").rows() == [
        (0, 1000, 1), (1000, 2000, 0), (2000, 5000, 0), (5000, 10_000, 1),
    ]  # fmt: skip
