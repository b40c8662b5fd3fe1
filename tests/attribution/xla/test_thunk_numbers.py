"""Graphs by the number of their first thunk: how XLA counts, and what may shift the count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from thence.attribution.xla.node_matching import Nodes
from thence.attribution.xla.schedules import schedule_of
from thence.attribution.xla.thunk_numbers import possible_slots, thunk_numbers
from thence.model.intervals import NO_ROW
from thence.model.tables import HOST, Tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.attribution.xla.schedules import Schedule
    from thence.model.hlo import HloModule


def kernels(*names: str) -> Nodes:
    count = len(names)
    return Nodes(7, np.arange(count), list(names), ["kernel"] * count, np.full(count, -1), np.full(count, True))


def first_commands(schedule: Schedule, number: int, nodes: Nodes) -> set[str]:
    slots = possible_slots(schedule, number, set(), nodes)
    return {schedule.names[int(found.command[0])] for found in slots}


@pytest.fixture
def nested(hlo: Callable[..., HloModule]) -> HloModule:
    """A while whose body has a conditional: numbers as XLA gives them in the comments."""
    return hlo(
        {
            0: [
                {"name": "p", "opcode": "parameter", "result_bytes": 1},
                {"name": "a", "opcode": "add"},  # 1
                {"name": "w", "opcode": "while", "called": [1, 2]},  # 2
                {"name": "b", "opcode": "add"},  # 9
            ],
            1: [
                {"name": "s", "opcode": "add"},  # 4
                {"name": "c", "opcode": "conditional", "called": [3, 4], "operands": [0]},  # 7
                {"name": "u", "opcode": "add"},  # 8
            ],
            2: [{"name": "less", "opcode": "add"}],  # 3
            3: [{"name": "t", "opcode": "add"}],  # 5
            4: [{"name": "f", "opcode": "add"}],  # 6
        }
    )


@pytest.mark.parametrize(("number", "name"), [(1, "a"), (3, "less"), (4, "s"), (5, "t"), (6, "f"), (8, "u"), (9, "b")])
def test_thunks_are_counted_as_xla_does(nested: HloModule, number: int, name: str) -> None:
    assert first_commands(schedule_of(nested), number, kernels(name)) == {name}


def test_a_number_that_no_command_has_finds_nothing(nested: HloModule) -> None:
    assert first_commands(schedule_of(nested), 30, kernels("a")) == set()


def test_behind_a_sort_a_number_is_at_least_the_count(hlo: Callable[..., HloModule]) -> None:
    ops: list[dict[str, Any]] = [{"name": f"x{n}", "opcode": "add"} for n in range(6)]
    schedule = schedule_of(hlo({0: ops}))
    assert first_commands(schedule, 5, kernels("x4")) == {"x4"}
    ops[1]["opcode"] = "sort"
    schedule = schedule_of(hlo({0: ops}))
    # The sort took three numbers: x2, the third command, has the number 5.
    assert "x2" in first_commands(schedule, 5, kernels("x2"))
    assert first_commands(schedule, 1, kernels("x0")) == {"x0"}


def test_a_graph_ends_before_what_ran_outside_and_holds_no_more_than_ran(hlo: Callable[..., HloModule]) -> None:
    schedule = schedule_of(hlo({0: [{"name": f"x{n}", "opcode": "add"} for n in range(5)]}))
    nodes = kernels("x0", "x1")
    lengths = [len(slots.command) for slots in possible_slots(schedule, 1, set(), nodes)]
    assert lengths == [2]
    assert list(possible_slots(schedule, 1, {1}, nodes)) == []


def test_the_number_is_in_the_name_of_the_range_around_the_launch() -> None:
    names = [
        "Thunk:#hlo_op=command_buffer_12#", "cuGraphLaunch",
        "command_buffer_3", "cuGraphLaunch",
        "Thunk:#hlo_op=command_buffer#", "cuGraphLaunch",
    ]  # fmt: skip
    host = HOST.frame(
        {
            "rank": [0] * 6, "name": names, "parent": [None, 0, None, 2, None, 4],
            "start": range(6), "duration": [1] * 6,
        }
    )  # fmt: skip
    launches = pl.DataFrame({"rank": 0, "device": 0, "graph": [1, 2, 3, 4], "launch": [1, 3, 5, NO_ROW]})
    found = thunk_numbers(Tables(host=host), launches)
    assert found.select("thunk", "first").rows() == [(0, 12), (2, 3), (None, None), (None, None)]
