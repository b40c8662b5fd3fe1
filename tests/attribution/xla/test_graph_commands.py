"""Graphs by XLA's ranges around their creation: at the first execution, inside a thunk, with captured calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from thence.attribution.xla.command_buffers import derived_instructions
from thence.attribution.xla.graph_commands import creations, possible_slots, thunk_numbers
from thence.attribution.xla.node_matching import Nodes
from thence.attribution.xla.program_commands import Command, schedule_of
from thence.model.intervals import NO_ROW
from thence.model.tables import GPU, HOST, PROGRAMS, Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.attribution.xla.program_commands import Schedule
    from thence.model.hlo import HloModule


# ---- XLA's ranges at the creation of a graph


CALL = "cuLaunchKernelEx"


def host(*ranges: Any) -> pl.DataFrame:
    """Ranges in ranges: a name, or a name with what is inside; ``name@7`` is a call with a correlation id."""
    rows: list[tuple[str, int | None, int, int, int | None]] = []

    def add(nested: Sequence[Any], parent: int | None) -> None:
        for entry in nested:
            text, inside = (entry, ()) if isinstance(entry, str) else entry
            name, _, correlation = text.partition("@")
            row = len(rows)
            rows.append((name, parent, 10 * row, 0, int(correlation) if correlation else None))
            add(inside, row)
            rows[row] = (*rows[row][:3], 10 * len(rows) - 10 * row - 1, rows[row][4])

    add(ranges, None)
    columns = dict(zip(("name", "parent", "start", "duration", "correlation"), zip(*rows, strict=True), strict=True))
    category = ["driver" if name.startswith("cu") else "framework" for name in columns["name"]]
    return HOST.frame({"rank": [0] * len(rows), "category": category, **columns})


def thunk(op: str, *inside: Any) -> tuple[str, tuple[Any, ...]]:
    return f"Thunk:#name=jit(f)/{op},hlo_op={op},unique_hlo_op_id=1#", inside


def program(*inside: Any) -> tuple[str, tuple[Any, ...]]:
    return "XlaModule:#hlo_module=jit_f,program_id=3#", inside


def straight(hlo: Callable[..., HloModule], *more: dict[str, Any]) -> HloModule:
    return hlo({0: [*({"name": f"add.{n}", "opcode": "add"} for n in range(6)), *more]})


def test_blocks_end_where_commands_are_no_neighbours(hlo: Callable[..., HloModule]) -> None:
    table = host(
        program(
            *(thunk(f"add.{n}") for n in (0, 1, 3, 4, 2)), thunk("command_buffer_1", "cuGraphLaunch@9"), thunk("add.5")
        )
    )
    launch = np.flatnonzero((table["correlation"] == 9).fill_null(value=False).to_numpy())
    (creation,) = creations(Tables(host=table), launch, np.array([0])).values()
    blocks = creation.blocks(schedule_of(straight(hlo)))
    # What follows the launch, add.5, created nothing; going back in the schedule begins a graph too.
    assert blocks == [(Command(0), Command(1)), (Command(3), Command(4)), (Command(2),)]


def test_calls_that_instantiate_a_graph_end_its_block(hlo: Callable[..., HloModule]) -> None:
    table = host(
        program(
            thunk("add.0", "cuGraphAddKernelNode_v2"),
            thunk("add.1"),
            "cuGraphInstantiateWithFlags",
            thunk("add.2"),
            "cuGraphInstantiateWithFlags",
            thunk("command_buffer_1", "cuGraphLaunch@9"),
        )
    )
    launch = np.flatnonzero((table["correlation"] == 9).fill_null(value=False).to_numpy())
    (creation,) = creations(Tables(host=table), launch, np.array([0])).values()
    blocks = creation.blocks(schedule_of(straight(hlo)))
    assert blocks == [(Command(0), Command(1)), (Command(2),)]


def test_calls_inside_a_range_were_captured_and_branches_are_told_by_their_computation(
    hlo: Callable[..., HloModule],
) -> None:
    module = hlo(
        {
            0: [
                {"name": "p", "opcode": "parameter", "result_bytes": 1},
                {"name": "mine", "opcode": "custom-call", "custom_call_target": "x"},
                {"name": "cond", "opcode": "conditional", "called": [1, 2], "operands": [0]},
            ],
            1: [{"name": "yes", "opcode": "add"}],
            2: [{"name": "no.0", "opcode": "add"}, {"name": "no.1", "opcode": "add"}],
        }
    )
    table = host(
        program(
            thunk("mine", f"{CALL}@4", "cuMemsetD8Async@5", "cuStreamEndCapture"),
            thunk("cond", thunk("no.0"), thunk("no.1"), thunk("yes")),
            thunk("command_buffer_1", "cuGraphLaunch@9"),
        )
    )
    launch = np.flatnonzero((table["correlation"] == 9).fill_null(value=False).to_numpy())
    (creation,) = creations(Tables(host=table), launch, np.array([0])).values()
    schedule = schedule_of(module)
    at = schedule.number_of
    ((call, conditional),) = creation.blocks(schedule)
    assert call == Command(at["mine"], launches=2)
    assert conditional == Command(at["cond"], ((Command(at["no.0"]), Command(at["no.1"])), (Command(at["yes"]),)), 2)


def test_calls_in_ranges_of_a_foreign_function_are_those_of_its_thunk(hlo: Callable[..., HloModule]) -> None:
    module = straight(hlo, {"name": "mine", "opcode": "custom-call", "custom_call_target": "x"})
    own = ("program.py(3): called", (CALL, ("inner", (CALL,))))
    table = host(program(thunk("mine", own), thunk("command_buffer_1", "cuGraphLaunch@9")))
    launch = np.flatnonzero((table["correlation"] == 9).fill_null(value=False).to_numpy())
    (creation,) = creations(Tables(host=table), launch, np.array([0])).values()
    schedule = schedule_of(module)
    assert creation.blocks(schedule) == [(Command(schedule.number_of["mine"], launches=2),)]


def launched(hlo: HloModule, table: pl.DataFrame, *kernels: tuple[int, int, int, str]) -> Tables:
    """A trace of one execution: graph, correlation, node and name of each kernel."""
    rows = len(kernels)
    graph, correlation, number, name = zip(*kernels, strict=True)
    gpu = GPU.frame(
        {
            "rank": [0] * rows,
            "device": [0] * rows,
            "kind": ["kernel"] * rows,
            "start": range(rows),
            "duration": [1] * rows,
            "graph": graph,
            "correlation": correlation,
            "node": number,
            "name": name,
            "program": [0] * rows,
        }
    )
    programs = PROGRAMS.frame({"rank": [0], "device": [0], "name": ["jit_f"], "hlo": [0]})
    return Tables(gpu=gpu, host=table, programs=programs, hlo=(hlo,))


def test_a_graph_created_in_its_thunk_is_found_and_updates_of_another_are_not_its_creation(
    hlo: Callable[..., HloModule],
) -> None:
    module = straight(hlo, {"name": "mine", "opcode": "custom-call", "custom_call_target": "x"})
    both = [thunk("add.4"), thunk("add.5"), thunk("mine", CALL, CALL)]
    table = host(
        program(thunk("add.0"), thunk("command_buffer_1", "cuGraphLaunch@1")),
        # Buffers moved: a part is recorded anew.
        program(thunk("command_buffer_1", thunk("add.0"), "cuGraphLaunch@2")),
        # All graphs were thrown away.
        program(thunk("command_buffer_5", *both, "cuGraphLaunch@3")),
    )
    graphs = [(7, 1, 0, "add_0"), (7, 2, 0, "add_0")]
    graphs += [(8, 3, 0, "add_4"), (8, 3, 1, "add_5"), (8, 3, 3, "k1"), (8, 3, 4, "k2")]
    found = derived_instructions(launched(module, table, *graphs))
    assert found["hlo"].to_list() == ["add.0", "add.0", "add.4", "add.5", "mine", "mine"]
    assert set(found["rule"]) == {"hlo_creation"}
    # One node more than was recorded: these ranges are not all of it.
    more = [*graphs, (8, 3, 5, "k3")]
    rules = derived_instructions(launched(module, table, *more))["rule"].to_list()
    assert rules[:2] == ["hlo_creation"] * 2
    assert "hlo_creation" not in rules[2:]


def test_copies_of_a_thunk_that_is_initialised_come_before_graphs_are_created(hlo: Callable[..., HloModule]) -> None:
    module = hlo(
        {
            0: [
                {"name": "add.0", "opcode": "add"},
                {"name": "slice-start", "opcode": "async-start", "called": [1]},
                {"name": "add.1", "opcode": "add"},
                {"name": "slice-done", "opcode": "async-done"},
                {"name": "add.2", "opcode": "add"},
            ],
            1: [{"name": "slice", "opcode": "dynamic-slice"}],
        }
    )
    made = [thunk("add.0"), thunk("slice"), thunk("add.1"), thunk("add.2")]
    launching = thunk("command_buffer_1", "cuGraphLaunch@9")
    found = []
    for first in ("cuMemcpyHtoDAsync@5", thunk("add.3", "cuMemcpyHtoDAsync@5")):
        table = host(program(first, *made, launching))
        ran = table["correlation"].is_in([5, 9]).fill_null(value=False).to_numpy()
        created = creations(Tables(host=table), np.flatnonzero(ran), np.array([0]))
        found.append([one.blocks(schedule_of(module)) for one in created.values()])
    at = schedule_of(module).number_of
    block = tuple(Command(at[name]) for name in ("add.0", "slice", "add.1", "add.2"))
    # Once a thunk has launched something, ranges are updates of graphs that there are.
    assert found == [[[block]], []]


# ---- The number of the first thunk


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
