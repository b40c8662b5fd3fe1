"""What ran at the same time in each step, on traces whose figures follow from how they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

import thence
from helpers import FSDP
from moved_runs import trace_file

if TYPE_CHECKING:
    from pathlib import Path


def test_times_of_sets_are_the_busy_time_of_every_step(tmp_path: Path) -> None:
    work = (("a", 7, 0, 46), ("side", 9, 10, 34), ("b", 7, 47, 87))
    sample = thence.open(trace_file(tmp_path / "t.json", work, 87)).sample()
    assert sample.streams is not None
    busy = sample.streams.sets.group_by("step").agg(pl.col("ns").sum()).sort("step")["ns"]
    whole = sample.rows.filter(pl.col("by") == "busy", pl.col("name") == "all").sort("step")["ns"]
    assert busy.to_list() == pytest.approx(whole.to_list())
    # a alone 22 us, a and side 24, b alone 40, in each step
    assert sample.streams.sets.filter(pl.col("step") == 2)["ns"].sort().to_list() == [22_000, 24_000, 40_000]


def test_the_rows_of_each_set_are_those_that_ran_then(tmp_path: Path) -> None:
    work = (("a", 7, 0, 30), ("b", 9, 10, 20), ("c", 11, 15, 30), ("a", 9, 20, 30))
    streams = thence.open(trace_file(tmp_path / "t.json", work, 40)).sample().streams
    assert streams is not None
    names = streams.rows["name"]
    sets = streams.sets.filter(pl.col("step") == 1).join(streams.members, on="set")
    found = sets.group_by("set").agg(pl.col("ns").first(), pl.col("row"))
    by_set = {frozenset(names[row] for row in rows): ns for _, ns, rows in found.iter_rows()}
    # a alone 0 to 10; a and b 10 to 15; all three 15 to 20; a and c 20 to 30, where a runs twice
    assert by_set == {frozenset("a"): 10_000, frozenset("ab"): 5_000, frozenset("abc"): 5_000, frozenset("ac"): 10_000}


def test_sets_of_real_steps_add_up_to_their_busy_time() -> None:
    sample = thence.open(FSDP[0]).sample()
    assert sample.streams is not None
    times = sample.streams.sets.group_by("step").agg(pl.col("ns").sum()).sort("step")["ns"]
    whole = sample.rows.filter(pl.col("by") == "busy", pl.col("name") == "all").sort("step")["ns"]
    assert np.allclose(times.to_numpy(), whole.to_numpy(), atol=1)
