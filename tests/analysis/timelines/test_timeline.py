"""What a timeline does to times: each rank is moved as a whole by one stated offset, or not at all."""

from __future__ import annotations

import polars as pl
import pytest

import thence
from collective_jobs import skewed


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> thence.Trace:
    """Two ranks, the clock of one 5 ms ahead."""
    return thence.open(*skewed(tmp_path_factory.mktemp("skewed")))


@pytest.mark.parametrize("table", ["gpu", "host"])
def test_durations_never_change_and_a_rank_moves_as_a_whole(ranks: thence.Trace, table: str) -> None:
    recorded: pl.DataFrame = getattr(ranks.tables, table)
    shown = ranks.timeline()
    moved: pl.DataFrame = getattr(shown.trace, table)
    assert moved["duration"].equals(recorded["duration"])
    offsets = pl.DataFrame({"rank": recorded["rank"], "by": moved["start"] - recorded["start"]})
    by_rank = dict(offsets.unique().sort("rank").iter_rows())
    assert offsets.unique().height == 2  # one offset each
    assert by_rank == {rank: -shown.corrections.get(rank, 0) for rank in range(2)}
    assert by_rank[0] - by_rank[1] == pytest.approx(5_000_000, abs=2_000)
    for rank, offset in by_rank.items():
        assert any(f"rank {rank}: all times shifted by {offset:+,} ns" in note for note in shown.notes)
    assert "durations are as recorded; --clocks recorded keeps all times as recorded" in shown.notes


@pytest.mark.parametrize("table", ["gpu", "host"])
def test_recorded_clocks_move_no_rank(ranks: thence.Trace, table: str) -> None:
    shown = ranks.timeline(clocks="recorded")
    assert getattr(shown.trace, table).equals(getattr(ranks.tables, table))
    assert (dict(shown.corrections), tuple(shown.notes)) == ({}, ())


def test_the_tables_of_a_trace_are_as_recorded_whatever_timelines_show(ranks: thence.Trace) -> None:
    before = ranks.tables.gpu["start"].clone()
    ranks.timeline()
    ranks.overview()
    assert ranks.tables.gpu["start"].equals(before)
