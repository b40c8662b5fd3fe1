"""What ``thence sql --tables`` says of the tables is what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import polars.selectors as cs
import pytest

from helpers import recording, shared
from thence.analysis.sql import ANNOTATIONS, DESCRIBED_TABLES, TABLES, described

if TYPE_CHECKING:
    import thence
    from thence.model.tables import Table

NUMBERS = {"integer": cs.integer(), "real": cs.float(), "boolean": cs.boolean()}


@pytest.fixture(scope="module")
def trace() -> thence.Trace:
    return shared(recording("torch-2.12_graph_replay_rank0"))


def test_every_table_is_described() -> None:
    assert {table.name for table in DESCRIBED_TABLES} == set(TABLES)


@pytest.mark.parametrize("table", DESCRIBED_TABLES, ids=lambda table: table.name)
def test_a_table_has_the_columns_and_types_that_are_described(table: Table, trace: thence.Trace) -> None:
    frame = trace.frames(table.name)[table.name]
    assert isinstance(frame, pl.DataFrame)
    rows = described(table)
    if table is ANNOTATIONS:  # fields of the marks come behind these
        assert frame.columns[: rows.height] == rows["column"].to_list()
    else:
        assert set(frame.columns) == set(rows["column"])
        assert len(frame.columns) == rows.height
    for column, kind in rows["column", "type"].rows():
        chosen = NUMBERS.get(kind, ~cs.numeric())
        assert frame.select(column).select(chosen).width == 1, column


def test_times_sizes_and_rows_have_their_unit() -> None:
    units = {
        (table.name, column): unit
        for table in DESCRIBED_TABLES
        for column, unit in described(table)["column", "unit"].rows()
    }
    assert units["gpu", "duration"] == units["programs", "launch"] == "ns"
    assert units["gpu", "bytes"] == units["gpu", "shared_memory"] == "bytes"
    assert units["collectives", "gpu"] == "row of gpu"
    assert units["host", "parent"] is None or units["host", "parent"].startswith("row of")
    assert units["gpu", "stream"] is None
