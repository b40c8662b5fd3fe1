"""Kernels of batched sends and receives: described by their ops, or by nothing where these do not say it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import thence
from batched_jobs import KERNEL, RANGE, batch, event, job

if TYPE_CHECKING:
    from pathlib import Path

EXCHANGE = [("send", 1), ("recv", 1)]
PAIR = (0, 1)


def described(folder: Path, events: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    """Kind and bytes of each described kernel of one rank."""
    trace = thence.open(*job(folder, {0: events}))
    trace.self_check()
    return trace.tables.collectives.select("collective", "bytes").rows()


def two_batches() -> list[dict[str, Any]]:
    first = batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)
    return first + batch(2, 2000.0, 2100.0, [("send", 1)], PAIR)


def op(at: float, name: str, dur: float = 1.0, **facts: Any) -> dict[str, Any]:
    facts = {"dtype": "Float", "In msg nelems": 7, "Out msg nelems": 7, **facts}
    return event("cpu_op", "record_param_comms", at, dur, **facts, **{"Collective name": name})


def test_the_bytes_of_a_batch_are_those_of_its_parts(tmp_path: Path) -> None:
    trace = thence.open(*job(tmp_path, {0: two_batches()}))
    assert trace.tables.collectives.select("collective", "bytes").rows() == [("send-recv", 8000), ("send-recv", 4000)]
    assert trace.tables.collectives.select("in_elements", "out_elements").rows() == [(1000, 1000), (1000, 0)]
    parts = trace.tables.collective_parts
    assert parts.select("gpu", "collective", "source_rank", "destination_rank").rows() == [
        (0, "send", None, 1),
        (0, "recv", 1, None),
        (1, "send", None, 1),
    ]


def test_a_size_that_is_not_known_makes_the_sum_unknown(tmp_path: Path) -> None:
    events = batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)
    del events[1]["args"]["dtype"]
    assert described(tmp_path, events) == [("send-recv", None)]


def test_elements_that_are_not_known_make_their_sum_unknown(tmp_path: Path) -> None:
    events = batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)
    (send,) = [e for e in events if e.get("args", {}).get("Collective name") == "send"]
    del send["args"]["In msg nelems"]
    trace = thence.open(*job(tmp_path, {0: events}))
    assert trace.tables.collectives.select("in_elements", "out_elements").rows() == [(None, 1000)]


def test_ops_before_another_op_belong_to_no_later_batch(tmp_path: Path) -> None:
    """A send whose own batch was lost, then a wait for it, then the next batch."""
    lost = [op(940.0, "send", **{"Dst Rank": 1}), op(945.0, "wait")]
    assert described(tmp_path, [*lost, *batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)]) == [("send-recv", 8000)]


def test_a_plain_send_whose_kernel_was_lost_is_no_part(tmp_path: Path) -> None:
    lost = [op(930.0, "send", 10.0, **{"Dst Rank": 1}), event("user_annotation", "nccl:send 0->1", 931.0, 8.0)]
    assert described(tmp_path, [*lost, *batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)]) == [("send-recv", 8000)]


def test_ops_of_another_thread_are_no_parts(tmp_path: Path) -> None:
    events = [e | {"tid": 9} if e["cat"] == "cpu_op" else e for e in two_batches()]
    assert described(tmp_path, events) == []


def test_ops_inside_the_range_are_its_parts(tmp_path: Path) -> None:
    events = batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)
    (around,) = [e for e in events if e["name"] == RANGE]
    around["ts"], around["dur"] = 945.0, 60.0
    assert described(tmp_path, events) == [("send-recv", 8000)]


@pytest.mark.parametrize("name", ["AllReduce", "Generic_1"])
def test_other_kernels_take_no_description(tmp_path: Path, name: str) -> None:
    events = two_batches()
    for e in events:
        e["name"] = e["name"].replace("SendRecv", name)
    assert described(tmp_path, events) == []


def test_two_kernels_of_one_range_have_none(tmp_path: Path) -> None:
    """Nothing says which of them moved what."""
    events = batch(1, 1000.0, 1100.0, EXCHANGE, PAIR)
    more = [e for e in batch(2, 1010.0, 1110.0, [], PAIR) if e["name"] != RANGE]
    launch = next(e for e in more if e["cat"] == "cuda_runtime")
    (around,) = [e for e in events if e["name"] == RANGE]
    launch["ts"] = around["ts"] + 6
    assert described(tmp_path, events + more) == []


def test_without_ops_the_reason_is_said(tmp_path: Path) -> None:
    events = [e for e in two_batches() if e["cat"] != "cpu_op"]
    assert described(tmp_path, events) == []
    times = thence.open(*job(tmp_path, {0: events})).collectives("keep")
    assert times.by_size.select("collective", "kernel", "count").rows() == [("send-recv", KERNEL, 2)]
    (note,) = [note for note in times.notes if "have no description" in note]
    assert "batch_isend_irecv" in note
