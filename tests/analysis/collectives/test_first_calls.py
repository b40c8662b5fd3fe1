"""First calls of communicators: left out with evidence, and with what they took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import thence
from collective_jobs import Job, joint

if TYPE_CHECKING:
    from pathlib import Path

    from thence.analysis.collectives.answer import Collectives


def times(folder: Path, first: int, warm_up: str = "heuristic", **more: Any) -> Collectives:
    """Twelve all-reduces of two ranks; in the first, rank 1 arrives so many ns after rank 0.

    The host op of the first takes ``making`` ns, those of the others 80 us; ``sequence`` is the first number.
    """
    calls = []
    for number in range(12):
        now = 500_000_000 * number + 1000 * number * number
        apart = first if number == 0 else 10_000
        numbered = {"sequence": number + more["sequence"]} if "sequence" in more else {}
        host = more.get("making", 80_000) if number == 0 else 80_000
        calls.append(joint([now, now + apart], 50_000, host_ns=host, **numbered))
    return thence.open(*Job(calls).write(folder)).collectives(warm_up)


def test_number_one_is_the_first(tmp_path: Path) -> None:
    found = times(tmp_path, 30_000_000, sequence=1)
    assert found.by_size["count"].to_list() == [22]
    assert found.by_size["wait_ns_max"].to_list() == [10_000]
    taken = 30_050_000 + 50_000
    assert found.left_out == {"count": 2, "duration_ns": taken, "exposed_ns": taken}
    assert found.statement == (
        "left out as warm-up: the first call of 1 communicator, 2 kernels that took 30.10 ms in all; "
        "--warm-up keep counts them"
    )
    assert found.to_json()["statement"] == found.statement


def test_they_are_kept_on_request(tmp_path: Path) -> None:
    found = times(tmp_path, 30_000_000, "keep", sequence=1)
    assert found.by_size["count"].to_list() == [24]
    assert found.by_size["wait_ns_max"].to_list() == [30_000_000]


@pytest.mark.parametrize(("making", "counted"), [(11_000_000, 22), (9_000_000, 24)])
def test_without_numbers_the_op_that_made_the_communicator_is_evidence(
    tmp_path: Path, making: int, counted: int
) -> None:
    assert times(tmp_path, 300_000, making=making).by_size["count"].to_list() == [counted]


def test_a_long_wait_in_the_first_call_is_no_evidence(tmp_path: Path) -> None:
    found = times(tmp_path, 30_000_000)
    assert found.by_size["count"].to_list() == [24]
    assert found.by_size["wait_ns_max"].to_list() == [30_000_000]


def test_a_trace_that_begins_later_loses_nothing(tmp_path: Path) -> None:
    found = times(tmp_path, 300_000, sequence=2)
    assert found.by_size["count"].to_list() == [24]
    assert found.left_out["count"] == 0


def test_an_only_call_is_counted(tmp_path: Path) -> None:
    job = Job([joint([0, 5_000], 50_000, sequence=1)])
    assert thence.open(*job.write(tmp_path)).collectives().by_size["count"].to_list() == [2]
