"""FLOP and bytes that marks state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from recorder_programs import program
from thence.attribution.work.activity_work import activity_work
from thence.attribution.work.said import said_work

if TYPE_CHECKING:
    from pathlib import Path


def trace(metadata: list[str | None], parent: list[int | None], launch: list[int | None], graph: Any = None) -> Any:
    """Host ranges, activities with their launches, and labels of CUDA graphs: gpu, label and metadata."""
    places = graph or {"gpu": [], "label": [], "metadata": []}
    count = len(launch)
    return SimpleNamespace(
        host=pl.DataFrame({"metadata": metadata, "parent": parent}, schema={"metadata": pl.String, "parent": pl.Int32}),
        places=pl.DataFrame({"launch": launch}, schema={"launch": pl.Int32}),
        gpu=pl.DataFrame({"rank": [0] * count, "correlation": [5] * count, "graph": [1] * count}),
        graph_places=pl.DataFrame(places, schema={"gpu": pl.Int32, "label": pl.String, "metadata": pl.String}),
    )


def test_the_innermost_mark_that_states_something_counts_once_each_time() -> None:
    outer, inner, silent = '{"flop":100}', '{"flop":10,"bytes":4}', '{"layer":3}'
    found = said_work(trace([outer, inner, silent, inner], [None, 0, 1, 0], [0, 1, 2, 3, None]))
    rows = {row["index"]: row for row in found.iter_rows(named=True)}
    assert [rows[n]["flop"] for n in range(4)] == [100, 10, 10, 10]
    assert [rows[n]["traffic"] for n in range(4)] == [None, 4, 4, 4]
    assert rows[1]["call"] == rows[2]["call"] != rows[3]["call"], "the mark was opened twice"
    assert 4 not in rows


def test_numbers_that_are_no_counts_are_unknown() -> None:
    marks = ['{"flop":-1}', '{"flop":"many"}', '{"flop":1e99,"bytes":8}', "{"]
    found = said_work(trace([*marks], [None] * 4, [0, 1, 2, 3]))
    assert found["flop"].drop_nulls().is_empty()
    assert found["traffic"].drop_nulls().to_list() == [8]


def test_a_mark_states_the_data_type_that_no_name_tells() -> None:
    marks = ['{"flop":8,"dtype":"bf16"}', '{"flop":8,"dtype":"float8"}', '{"flop":8,"dtype":"fp3"}', '{"flop":8}']
    assert said_work(trace([*marks], [None] * 4, [0, 1, 2, 3])).sort("index")["type"].to_list() == [
        "bfloat16", "float8", None, None,
    ]  # fmt: skip


def test_in_a_graph_a_mark_counts_once_a_launch() -> None:
    stated = ['{"flop":64,"work_of":3}', '{"flop":64,"work_of":3,"x":1}', '{"flop":64,"work_of":9}', '{"flop":64}']
    found = said_work(
        trace([], [], [None] * 4, {"gpu": [0, 1, 2, 3], "label": ["a", "a/b", "a", "a"], "metadata": stated})
    )
    calls = dict(found.select("index", "call").iter_rows())
    assert calls[0] == calls[1] != calls[2]
    assert found["flop"].to_list() == [64] * 3
    assert 3 not in calls, "of the backward pass"


def test_without_statements_there_is_nothing() -> None:
    assert said_work(trace(['{"layer":3}'], [None], [0])).is_empty()


@pytest.mark.parametrize("options", [
    "launches=True",
    "",  # launches are counted
    "sampling=thence.Sampling(every=4, ring=3, budget=0, slow_steps=False)",
])  # fmt: skip
def test_recordings_of_every_kind_keep_what_marks_state(tmp_path: Path, options: str) -> None:
    """Two kernels of 5 ns share what is stated of both; the third is outside of the mark."""
    program(
        f"""
        with thence.record(OUT, thence.RecordOptions({options})) as recording:
            for _ in range(6):
                if {"sampling" in options}:
                    recording.step()
                with thence.mark("attention", flop=3000, bytes=40, dtype="bf16"):
                    launch("first")
                    launch("second")
                launch("third")
        """,
        tmp_path,
    )
    tables = thence.open(tmp_path).tables
    work = tables.gpu.select(pl.col("name").cast(pl.String)).hstack(activity_work(tables))
    assert set(work.select("name", "flop", "bytes", pl.col("dtype", "work_rule").cast(pl.String)).rows()) == {
        ("first", 1500, 20, "bfloat16", "said"),
        ("second", 1500, 20, "bfloat16", "said"),
        ("third", None, None, None, None),
    }
