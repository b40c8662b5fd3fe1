"""Histories with a planted slowdown, made of one recorded step with noise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from run_histories import DAY_NS, FIRST_NS, longest_module, recorded, runs
from thence.analysis.diff.gate import parse_bound
from thence.analysis.history.answer import History, LeftOut, history
from thence.errors import MissingData, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.history.run_summary import RunSummary

SLOWER = 1.6


@cache
def planted() -> list[RunSummary]:
    """44 runs, of which the longest module takes longer since the 30th."""
    return runs(1, slower=SLOWER)


@cache
def answer() -> History:
    return history(planted())


def in_order(order: Sequence[int]) -> list[RunSummary]:
    return [
        replace(planted()[at], name=f"run{place + 1:02}", started_ns=FIRST_NS + place * DAY_NS)
        for place, at in enumerate(order)
    ]


def test_the_planted_slowdown_is_found_where_it_was_planted_and_named() -> None:
    found = answer()
    of_step = found.changes.filter(by="step")
    assert of_step.select("run", "since", "verdict").rows() == [(30, "run30", "slower")]
    assert found.explanation[0].startswith("slower since run 30 (run30, ")
    assert f"module {longest_module()} " in found.explanation[0]
    rows, idle = recorded()
    module = rows.filter(module=longest_module())["duration"].sum()
    truth = (SLOWER - 1) * module
    row = of_step.row(0, named=True)
    assert row["low_ns"] < truth < row["high_ns"]
    assert row["before_ns"] == pytest.approx(rows["duration"].sum() + idle, rel=0.03)
    place = found.places.filter(by="module", name=longest_module()).row(0, named=True)
    assert place["change_share"] == pytest.approx(SLOWER - 1, abs=0.05)
    assert place["since_run"] == 30
    assert len(place["ns"]) == 44
    found.self_check()


def test_shuffled_histories_name_it_and_hardly_ever_an_earlier_one() -> None:
    random = np.random.default_rng(3)
    early = when = 0
    for _ in range(5):
        found = history(in_order([*random.permutation(29), *(29 + random.permutation(15))]))
        early += bool((found.changes["run"] < 30).any())
        when += bool({30, 31} & {*found.changes.filter(by="step")["run"]})
    assert early == 0
    assert when >= 4


def test_a_gate_fails_as_long_as_the_newest_level_is_slower_and_says_by_how_much() -> None:
    bounds = [parse_bound(text) for text in ("total>2%", "total>20%", f"module:{longest_module()}>30%")]
    assert [gate.verdict for gate in answer().judged(bounds).gates] == ["exceeded", "within", "exceeded"]
    before = history(planted()[:29]).judged(bounds[:1]).gates[0]
    assert before.verdict != "exceeded"
    first_slow = history(planted()[:30]).judged(bounds[2:]).gates[0]
    assert first_slow.verdict == "exceeded"  # the first slow run, although one run is no level yet
    with pytest.raises(UsageError, match="give three runs or more"):
        history(planted()[:2]).judged(bounds)


def test_runs_are_in_the_order_of_their_start_and_those_that_cannot_be_compared_are_told() -> None:
    other = replace(planted()[0], name="elsewhere", conditions=replace(planted()[0].conditions, gpus=("A100",)))
    twice = replace(planted()[3], name="copied", started_ns=FIRST_NS)
    found = history([*planted()[::-1], other, twice], [LeftOut("broken", "unreadable", "broken: is cut")])
    assert found.runs["name"].to_list() == answer().runs["name"].to_list()
    assert {(entry.name, entry.code) for entry in found.left_out} == {
        ("broken", "unreadable"), ("elsewhere", "gpu"), ("copied", "duplicate"),
    }  # fmt: skip
    assert history([*planted(), other], anyway=True).runs.height == 45
    with pytest.raises(MissingData, match="no run that can be read: broken: is cut"):
        history([], found.left_out[:1])


def test_few_runs_name_no_change() -> None:
    found = history(planted()[25:34])  # five runs before, four after
    assert found.changes.is_empty()
    assert found.explanation[0].startswith("9 runs, which are too few to tell a change from noise")


def test_every_run_of_every_place_is_a_row_of_the_table() -> None:
    table = answer().to_frame()
    assert table.height == 44 * answer().places.height
    step = table.filter(by="step")["ns"]
    assert step.to_list() == answer().runs["step_ns"].to_list()
    kept = answer().by(["op"]).places["by"].unique().to_list()
    assert set(kept) == {"step", "busy", "idle", "op"}
    assert pl.Series(kept).null_count() == 0
