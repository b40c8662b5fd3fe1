"""Arrows and sequence numbers between forward and backward ops, and arrows that name no op for certain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from helpers import event, kernel, launch, opened
from thence.model.intervals import NO_ROW
from thence.readers.kineto.tables import forward_rows

if TYPE_CHECKING:
    from pathlib import Path


def ops(*starts: int, **changed: list[int]) -> dict[str, Any]:
    """Forward ops on thread 0 that begin at these times, one host row each, numbered from 0.

    Their sequence numbers all differ, so that nothing but an arrow can tie two of them.
    """
    count = len(starts)
    columns = {
        "row": list(range(count)), "rank": [0] * count, "track": [0] * count, "start": list(starts),
        "sequence": list(range(100, 100 + count)), "forward_thread": [0] * count, **changed,
    }  # fmt: skip
    return {name: np.array(values, np.int64) for name, values in columns.items()}


def arrows(*ends: tuple[int, int, bool], rank: list[int] | None = None) -> dict[str, Any]:
    """Ends of arrows on thread 0: (id, time, whether it is the beginning)."""
    identity, time, is_start = zip(*ends, strict=True)
    return {
        "id": np.array(identity, np.int64),
        "rank": np.array(rank or [0] * len(ends), np.int64),
        "track": np.zeros(len(ends), np.int64),
        "time": np.array(time, np.int64),
        "is_start": np.array(is_start, np.bool_),
    }


def tops(count: int) -> np.ndarray[Any, Any]:
    """Parents of host rows that nothing contains."""
    return np.full(count, NO_ROW, np.int64)


def test_an_arrow_ties_the_op_at_its_end_to_the_op_at_its_beginning() -> None:
    # Rows 0 and 1 are forward ops; row 3 belongs to row 1, row 2 to row 0.
    flows = arrows((7, 10, True), (8, 20, True), (7, 30, False), (8, 40, False))
    assert forward_rows(ops(10, 20, 30, 40), flows, tops(4)).tolist() == [NO_ROW, NO_ROW, 0, 1]


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([(7, 10, True), (7, 20, True), (7, 30, False)], id="two beginnings"),
        pytest.param([(7, 10, True), (7, 30, False), (7, 40, False)], id="two ends"),
        pytest.param([(7, 10, True), (7, 20, True), (7, 30, False), (7, 40, False)], id="two of both"),
        pytest.param([(7, 10, True), (7, 10, True), (7, 30, False)], id="the same beginning twice"),
    ],
)
def test_an_id_that_names_several_arrows_ties_nothing(ends: list[tuple[int, int, bool]]) -> None:
    # A second arrow, the one with id 8, is not affected: row 4 belongs to row 1.
    flows = arrows(*ends, (8, 20, True), (8, 50, False))
    assert forward_rows(ops(10, 20, 30, 40, 50), flows, tops(5)).tolist() == [NO_ROW] * 4 + [1]


def test_equal_ids_of_two_ranks_are_two_arrows() -> None:
    both = ops(10, 20, 30, 40, track=[0, 0, 1, 1], rank=[0, 0, 1, 1])
    flows = arrows((7, 10, True), (7, 20, False), (7, 30, True), (7, 40, False), rank=[0, 0, 1, 1])
    flows["track"] = np.array([0, 0, 1, 1])
    assert forward_rows(both, flows, tops(4)).tolist() == [NO_ROW, 0, NO_ROW, 2]


def test_where_the_arrow_is_ambiguous_the_sequence_number_decides(tmp_path: Path) -> None:
    def op(name: str, start: int, number: int, thread: int, **rest: Any) -> dict[str, Any]:
        args = {"Sequence number": number, "Fwd thread id": thread}
        return event("cpu_op", name, start, 5, args=args, **rest)

    def end(phase: str, at: int, tid: int) -> dict[str, Any]:
        return {
            "ph": phase, "bp": "e", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 1, "tid": tid, "ts": at,
        }  # fmt: skip

    events = [
        event("user_annotation", "wrong", 0, 50), op("aten::mul", 10, 1, 0), op("aten::add", 20, 2, 0),
        event("user_annotation", "right", 60, 50), op("aten::mm", 70, 3, 0),
        op("MmBackward0", 200, 3, 9, tid=4), launch(5, 201, tid=4), kernel(5, 300),
        # Two arrows with one id begin at ops under another label and end at the backward op of aten::mm.
        end("s", 10, 2), end("s", 20, 2), end("f", 200, 4),
    ]  # fmt: skip
    rows = opened(tmp_path, events).activities.select("label", "label_rule", "phase")
    assert rows.select(pl.all().cast(pl.String)).rows() == [("right", "forward_op", "backward")]
