"""Command buffers: every node against what XLA and the clock say of it, and what must stay unknown."""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from helpers import DATA
from protowire import every, first
from thence.attribution.attribute import attribute
from thence.attribution.xla.command_buffers import LEVELS, contradicted, derived_instructions
from thence.attribution.xla.node_matching import LOW, Verdict, nodes_of, verdicts
from thence.attribution.xla.program_commands import Level, Role, Slots, planned, schedule_of, slots_of
from thence.model.launches import launch_correlations
from thence.readers.jax import xplane
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.attribution.xla.program_commands import Command, Schedule
    from thence.model.attributed import Attributed
    from thence.model.hlo import HloModule
    from thence.model.tables import Tables


JAX = DATA / "jax"


def read(name: str) -> Tables:
    with Source.open(str(JAX / name)) as source:
        return xplane.read(source, lambda _done: None)


def thunks(name: str) -> list[tuple[str, str]]:
    """(HLO instruction, kind) of the thunks of a program in the order of their numbers."""
    rows = []
    for thunk in every((JAX / name).read_bytes(), 1):
        fields = first(thunk)
        info = first(fields[1])
        if 3 in info:
            rows.append((info[3], info[1].decode(), fields[2].decode()))
    return [(instruction, kind) for _, instruction, kind in sorted(rows)]


def module_of(name: str) -> HloModule:
    return hlo_dump_modules(str(JAX / name))[0]


@pytest.fixture(scope="module")
def single() -> Tables:
    return read("jax_single.xplane.pb.gz")


@pytest.fixture(scope="module")
def derived(single: Tables) -> pl.DataFrame:
    """What is found for the activities of `single`."""
    return derived_instructions(single)


@pytest.fixture(scope="module")
def attributed(single: Tables) -> Attributed:
    return attribute(single)


@pytest.fixture(scope="module")
def alone() -> Tables:
    """The same program, compiled and run op by op: its profiler says which HLO op a kernel is."""
    return read("jax_single_nocb.xplane.pb.gz")


@pytest.fixture(scope="module")
def sharded() -> Tables:
    return read("jax_fsdp2.xplane.pb.gz")


# --- what XLA and the clock say -------------------------------------------------------------------


def test_every_kernel_of_the_profiler_is_the_thunk_that_ran_then(single: Tables, derived: pl.DataFrame) -> None:
    # One stream and one kernel a thunk: the i-th kernel to start is thunk i, whatever its node says.
    wanted = [name for name, _ in thunks("jax_single.thunk_metadata.pb")]
    found = single.gpu.with_columns(derived=derived["hlo"])
    kernels = found.filter(pl.col("kind") == "kernel").sort("start")
    assert kernels.height == 5 * len(wanted)
    for program in range(5):
        assert kernels.filter(pl.col("program") == program)["derived"].to_list() == wanted


def test_nodes_are_numbered_as_thunks(single: Tables, derived: pl.DataFrame) -> None:
    steps = thunks("jax_single.thunk_metadata.pb")
    calls = iter([name for name, kind in steps if kind == "kCublasLtMatmul"])
    nodes = single.gpu.with_columns(derived, number=pl.col("node") & 0xFFFFFFFF).filter(pl.col("program") == 0)
    for number, kind, name, rule in nodes.sort("number").select("number", "kind", "hlo", "rule").iter_rows():
        if number < len(steps):
            assert (name, rule) == (steps[number][0], "hlo_thunk_number")
        elif kind == "kernel":
            assert (name, rule) == (next(calls), "hlo_library_order")
    assert next(calls, None) is None


def test_library_calls_take_as_long_as_without_a_graph(single: Tables, derived: pl.DataFrame, alone: Tables) -> None:
    frames = []
    for tables, found in ((single, derived), (alone, derived_instructions(alone))):
        names = pl.coalesce(pl.col("hlo").cast(pl.String), "derived")
        ran = (
            tables.gpu.with_columns(derived=found["hlo"])
            .filter(pl.col("kind") == "kernel")
            .group_by(names.alias("name"))
            .agg(pl.col("duration").median())
        )
        frames.append(
            tables.hlo[0]
            .instructions.filter(pl.col("opcode") == "custom-call")
            .sort("step")
            .join(ran, on="name", maintain_order="left")
            .with_columns(k=pl.int_range(pl.len()).over("op_name", "result_bytes", "operand_bytes"))
        )
    key = ["op_name", "result_bytes", "operand_bytes", "k"]
    both = frames[0].join(frames[1], on=key)
    assert both.height == frames[0].height == 28
    # From 8 to 75 us; every pair within 7 %.
    assert both["duration"].max() > 8 * both["duration"].min()
    assert (both["duration"] / both["duration_right"]).is_between(0.93, 1.07).all()


def test_operations_take_as_long_as_without_a_graph(single: Tables, attributed: Attributed, alone: Tables) -> None:
    one, other = (
        tables.gpu.hstack(found.places.select("op_name")).group_by("op_name").agg(pl.col("duration").sum())
        for tables, found in ((single, attributed), (alone, attribute(alone)))
    )
    both = one.join(other, on="op_name")
    ratio = both.select(pl.col("duration") / pl.col("duration_right"))["duration"]
    # Fusions that find their input in the L2 cache are faster in a graph; none is twice off.
    assert both["duration"].sum() > 0.98 * one["duration"].sum()
    assert ratio.is_between(0.5, 2).all()
    assert ratio.median() == pytest.approx(1, abs=0.03)


# --- how much of the time is attributed -------------------------------------------------------------


def test_all_of_the_time_has_an_instruction(sharded: Tables) -> None:
    tables = sharded
    recorded = tables.gpu["hlo"].clone()
    found = attribute(tables)
    assert found.places["hlo"].null_count() == 0
    assert tables.gpu["hlo"].equals(recorded, null_equal=True)
    rules = set(found.places["hlo_rule"].unique().cast(pl.String))
    assert {"hlo_thunk_number", "hlo_library_order"} <= rules
    assert found.shares is not None
    placed = found.shares.filter(pl.col("place").is_not_null()).join(
        tables.gpu.with_row_index("gpu").cast({"gpu": pl.Int32}), on="gpu"
    )
    share = (placed["weight"] * placed["duration"]).sum() / tables.gpu["duration"].sum()
    assert share >= 0.97


def test_each_device_and_execution_gets_the_same(sharded: Tables) -> None:
    found = sharded.gpu.with_columns(derived=derived_instructions(sharded)["hlo"], number=pl.col("node") & 0xFFFFFFFF)
    executions = found.drop_nulls("derived").group_by("program").agg(pl.col("derived").sort(), pl.len())
    assert executions.height == 10
    assert executions["derived"].n_unique() == 1
    assert executions["len"].unique().to_list() == [204]


def test_a_graph_instantiated_again_is_found_again(single: Tables, derived: pl.DataFrame) -> None:
    later = pl.col("program") >= 3
    renamed = pl.when(later).then(pl.col("graph") + 40).otherwise("graph")
    again = dataclasses.replace(single, gpu=single.gpu.with_columns(graph=renamed))
    assert derived_instructions(again).equals(derived)


# --- what stays unknown ----------------------------------------------------------------------------


def refusals(tables: Tables) -> set[str]:
    """Why nothing was found; fails where something was."""
    found = derived_instructions(tables)
    assert found["hlo"].null_count() == len(found)
    return set(found["rule"])


def with_module(tables: Tables, module: HloModule) -> Tables:
    return dataclasses.replace(tables, hlo=(module,))


def test_a_shuffled_schedule_is_refused(single: Tables) -> None:
    module = single.hlo[0]
    shuffled = module.instructions.with_columns(pl.col("step").shuffle(seed=1).over("computation"))
    changed = dataclasses.replace(module, instructions=shuffled)
    assert refusals(with_module(single, changed)) == {"command_buffer_no_fit"}


def test_the_hlo_of_another_program_is_refused(single: Tables, sharded: Tables) -> None:
    assert refusals(with_module(single, sharded.hlo[0])) == {"command_buffer_no_fit"}
    # The same program compiled again: two fusions more, other numbers.
    assert refusals(with_module(single, module_of("command_buffer.hlo.pb.xz"))) == {"command_buffer_no_fit"}


def test_an_hlo_without_a_schedule_is_refused(single: Tables) -> None:
    module = single.hlo[0]
    table = module.instructions.with_columns(step=pl.lit(None, pl.Int32))
    without = dataclasses.replace(module, instructions=table)
    assert refusals(with_module(single, without)) == {"command_buffer_no_schedule"}


def test_a_graph_with_neither_creation_nor_thunk_has_no_instruction(single: Tables) -> None:
    assert refusals(dataclasses.replace(single, host=single.host.clear())) == {"command_buffer_no_origin"}


def renamed(tables: Tables, name: str, other: str) -> Tables:
    """The tables with another name for one kernel."""
    names = pl.col("name").cast(pl.String)
    changed = pl.when(names == name).then(pl.lit(other)).otherwise(names)
    return dataclasses.replace(tables, gpu=tables.gpu.with_columns(name=changed.cast(pl.Categorical())))


def test_a_kernel_with_a_foreign_name_costs_its_node_alone(single: Tables, derived: pl.DataFrame) -> None:
    tables = single
    name = tables.gpu["name"].cast(pl.String)[20]
    found = derived_instructions(renamed(tables, name, "my_triton_kernel"))
    of_it = tables.gpu["name"].cast(pl.String) == name
    assert 0 < of_it.sum() < 60
    assert set(found.filter(of_it)["rule"]) == {"command_buffer_foreign"}
    assert found.filter(of_it)["hlo"].null_count() == of_it.sum()
    assert found.filter(~of_it).equals(derived.filter(~of_it))


def test_a_kernel_of_another_command_costs_its_node_alone(single: Tables, derived: pl.DataFrame) -> None:
    found = derived_instructions(renamed(single, "loop_add_fusion_3", "loop_add_fusion_4"))
    of_it = single.gpu["name"].cast(pl.String) == "loop_add_fusion_3"
    assert of_it.any()
    assert set(found.filter(of_it)["rule"]) == {"command_buffer_contradicted"}
    assert found.filter(~of_it).equals(derived.filter(~of_it))


def test_library_calls_in_another_order_are_unknown(single: Tables, derived: pl.DataFrame) -> None:
    """Any two neighbours changed over would have one start before what it reads."""
    first_child = 193
    number = pl.col("node") & 0xFFFFFFFF
    children = single.gpu.filter(number >= first_child, kind="kernel")
    numbers = sorted(set(children.select(number)["node"].to_list()))
    assert len(numbers) == 28
    inside = single.gpu.select(number >= first_child).to_series()
    for one, other in list(pairwise(numbers))[::14]:
        high = pl.col("node") - number
        node = (
            pl.when(number == one).then(high + other).when(number == other).then(high + one)
            .otherwise("node")
        )  # fmt: skip
        found = derived_instructions(dataclasses.replace(single, gpu=single.gpu.with_columns(node=node)))
        calls = found.filter(inside)
        assert set(calls.filter(pl.col("hlo").is_null())["rule"]) == {"command_buffer_too_early"}
        wrong = (found["hlo"] != derived["hlo"]).fill_null(value=False)
        assert not wrong.any()


# --- loops and branches -------------------------------------------------------------------------------


def inside(tables: Tables) -> pl.DataFrame:
    """Activities of graphs with what was found for them."""
    return tables.gpu.with_columns(
        *derived_instructions(tables).rename({"hlo": "derived"}).get_columns(),
        pl.col("name").cast(pl.String),
        number=pl.col("node") & 0xFFFFFFFF,
    ).filter(pl.col("graph").is_not_null())


@pytest.fixture(scope="module")
def of_loops(loops: Tables) -> pl.DataFrame:
    return inside(loops)


def without_creation(tables: Tables) -> Tables:
    """The tables as if recording had begun after the graphs were created."""
    name = pl.col("name").cast(pl.String)
    thunk = name.str.starts_with("Thunk:#") & ~name.str.contains("hlo_op=(?:command_buffer|while)")
    later = tables.host.with_columns(name=pl.when(thunk).then(pl.lit("Thunk")).otherwise(name).cast(pl.Categorical()))
    return dataclasses.replace(tables, host=later)


def test_all_nodes_of_a_program_with_loops_and_branches_are_found(of_loops: pl.DataFrame) -> None:
    found = of_loops
    assert found["derived"].null_count() == 0
    assert set(found["rule"]) == {"hlo_creation"}
    assert found.select("graph", "number").n_unique() == 346
    assert found["program"].null_count() == 0


def test_creation_and_thunk_numbers_agree_on_every_node(loops: Tables, of_loops: pl.DataFrame) -> None:
    by_creation, by_thunk = of_loops, inside(without_creation(loops))
    assert set(by_thunk["rule"]) == {"hlo_thunk_number"}
    assert by_thunk["derived"].to_list() == by_creation["derived"].to_list()


def test_names_and_sizes_are_those_of_the_instructions(loops: Tables, of_loops: pl.DataFrame) -> None:
    table = loops.hlo[0].instructions.select(*("name", "opcode", "result_bytes", "operand_bytes", "called"))
    nodes = of_loops.unique(["graph", "number"]).join(
        table, left_on="derived", right_on="name", how="left", maintain_order="left"
    )
    copies = nodes.filter(pl.col("bytes").is_not_null())
    assert copies.height > 80
    assert (copies["bytes"] == copies["result_bytes"]).all()
    choosing = nodes.filter(pl.col("name") == "set_case_condition")
    assert set(choosing["opcode"]) == {"conditional"}
    assert nodes.filter(pl.col("opcode") == "conditional").height == choosing.height > 0
    own = nodes.filter((pl.col("opcode") == "fusion") & ~pl.col("name").str.contains("(?i)^mem"))
    named = own.filter(pl.col("derived").str.replace_all(r"\W", "_") == pl.col("name"))
    # The others run the kernel of a fusion of the same kind: input_reduce_fusion.6 that of .7.
    kind = r"(?:[._]\d+)+$"
    assert own.select((pl.col("derived").str.replace(kind, "") == pl.col("name").str.replace(kind, "")).all()).item()
    assert named.height > 0.7 * own.height > 30


def test_branches_of_one_conditional_never_run_in_one_launch(loops: Tables, of_loops: pl.DataFrame) -> None:
    table = loops.hlo[0].instructions
    body_of = dict(table.select("name", "computation").iter_rows())
    branches = table.filter(pl.col("opcode") == "conditional")["called"].to_list()
    ran: dict[tuple[int, int], set[int]] = {}
    launch = launch_correlations(loops.gpu).filter(loops.gpu["graph"].is_not_null())
    found = of_loops.with_columns(launch)
    for graph, correlation, name in found.select("graph", "correlation", "derived").iter_rows():
        ran.setdefault((graph, correlation), set()).add(body_of[name])
    assert len(ran) > 400
    assert not any(len(bodies & set(called)) > 1 for bodies in ran.values() for called in branches)


def test_one_foreign_kernel_in_a_branch_costs_its_node_alone(loops: Tables, of_loops: pl.DataFrame) -> None:
    name = "loop_select_fusion_2"
    assert name in set(of_loops["name"])
    # Its creation says what the node is, whatever the kernel is called.
    assert inside(renamed(loops, name, "mine"))["derived"].equals(of_loops["derived"])
    found = inside(without_creation(renamed(loops, name, "mine")))
    of_it = of_loops["name"] == name
    assert set(found.filter(of_it)["rule"]) == {"command_buffer_foreign"}
    assert found.filter(~of_it)["derived"].equals(of_loops.filter(~of_it)["derived"])


def test_flags_that_reorder_commands_leave_creation_alone(loops: Tables) -> None:
    flags = {"xla_flags": "--xla_gpu_command_buffer_scheduling_mode=CONCURRENT_REGIONS"}

    def with_flags(tables: Tables) -> Tables:
        return dataclasses.replace(tables, meta=dataclasses.replace(tables.meta, facts=(flags,)))

    assert set(inside(with_flags(loops))["rule"]) == {"hlo_creation"}
    found = inside(with_flags(without_creation(loops)))
    assert set(found["rule"]) == {"command_buffer_reordered"}
    assert found["derived"].null_count() == len(found)


def test_graphs_created_again_are_found(loops: Tables, of_loops: pl.DataFrame) -> None:
    """As if every graph of the second half were a new one, whose creation was not recorded."""
    middle = loops.gpu["start"].median()
    graph = pl.when(pl.col("start") > middle).then(pl.col("graph") + 1000).otherwise("graph")
    again = dataclasses.replace(loops, gpu=loops.gpu.with_columns(graph=graph))
    found = inside(again)
    assert found["derived"].equals(of_loops["derived"])
    assert set(found["rule"]) == {"hlo_creation", "hlo_thunk_number"}


def test_instructions_that_the_producer_recorded_of_some_nodes_must_agree(
    loops: Tables, of_loops: pl.DataFrame
) -> None:
    one = (pl.col("graph") == 5) & (pl.col("node") & 0xFFFFFFFF == 0)

    def recorded(name: str) -> pl.DataFrame:
        told = pl.when(one).then(pl.lit(name)).otherwise(pl.col("hlo").cast(pl.String))
        gpu = loops.gpu.with_columns(hlo=told.cast(pl.Categorical()))
        return inside(dataclasses.replace(loops, gpu=gpu))

    others = of_loops.select((pl.col("graph") == 5) & (pl.col("number") > 0)).to_series()
    assert recorded("copy.813").filter(others)["derived"].equals(of_loops.filter(others)["derived"])
    doubtful = recorded("copy.804")
    assert set(doubtful.filter(others)["rule"]) == {"command_buffer_contradicted"}
    assert doubtful.filter(others)["derived"].drop_nulls().is_empty()
    rest = doubtful["graph"] != 5
    assert doubtful.filter(rest)["derived"].equals(of_loops.filter(rest)["derived"])


# ---- Checks against the launches


TREE = pl.DataFrame([(7, 0, -1, -1, False), (7, 1, 0, 2, False), (7, 2, 0, 2, False)], LEVELS, orient="row")
"""A graph that is one conditional, command 2, with two branches."""


def ran(*launches: Sequence[tuple[int, int, int]]) -> pl.DataFrame:
    """Activities of launches: number of the node, level and command; counted, one after the other."""
    rows = [
        (0, 7, launch, number, time, command, level, True)
        for launch, activities in enumerate(launches)
        for time, (number, level, command) in enumerate(activities, 100 * launch)
    ]
    names = ("program", "graph", "correlation", "number", "start", "command", "level", "counted")
    types = {"graph": pl.UInt64, "counted": pl.Boolean}
    return pl.DataFrame(rows, {n: types.get(n, pl.Int64) for n in names}, orient="row")


@pytest.fixture
def schedule(hlo: Callable[..., HloModule]) -> Schedule:
    """Commands 0 and 1, 1 reading the result of 0, and six more."""
    operands: dict[int, list[int]] = {1: [0]}
    return schedule_of(
        hlo({0: [{"name": f"a{n}", "opcode": "add", "operands": operands.get(n, [])} for n in range(8)]})
    )


def refused(rows: pl.DataFrame, schedule: Schedule) -> dict[int, str]:
    found = contradicted(rows, TREE, schedule)
    return dict(found.select("command", "reason").iter_rows())


FIRST = [(0, 0, 2), (3, 1, 4), (4, 1, 5)]
SECOND = [(0, 0, 2), (5, 2, 6)]


def test_one_branch_a_launch_is_in_order(schedule: Schedule) -> None:
    assert refused(ran(*[FIRST, SECOND] * 5), schedule) == {}


def test_a_branch_that_runs_in_part_is_unknown(schedule: Schedule) -> None:
    found = refused(ran(*[FIRST, SECOND] * 5, *[FIRST[:2]] * 2), schedule)
    assert found == {4: "command_buffer_branch", 5: "command_buffer_branch"}
    # One launch can be the last before the recording ended.
    assert refused(ran(*[FIRST, SECOND] * 5, FIRST[:2]), schedule) == {}


def test_two_branches_in_one_launch_are_unknown_but_in_a_loop(schedule: Schedule) -> None:
    both = [*FIRST, *SECOND[1:]]
    assert set(refused(ran(*[both] * 2, FIRST, SECOND), schedule)) == {4, 5, 6}
    assert refused(ran(*[[*FIRST, *SECOND]] * 2, FIRST, SECOND), schedule) == {}


def test_a_branch_without_its_conditional_is_unknown(schedule: Schedule) -> None:
    assert set(refused(ran(FIRST, SECOND, SECOND[1:], SECOND[1:]), schedule)) == {6}


def test_a_reader_before_its_writer_is_unknown_with_it(schedule: Schedule) -> None:
    right = [(0, 0, 0), (1, 0, 1), (2, 0, 3)]
    assert refused(ran(right), schedule) == {}
    wrong = refused(ran([(1, 0, 1), (0, 0, 0), (2, 0, 3)]), schedule)
    assert wrong == {0: "command_buffer_too_early", 1: "command_buffer_too_early"}
    # One that was assigned by the order of calls makes all of these doubtful.
    rows = ran([(1, 0, 1), (0, 0, 0), (2, 0, 3)]).with_columns(counted=pl.col("command") == 0)
    assert set(refused(rows, schedule)) == {0, 1, 3}


CREATED = {
    2: ("copy.804", 30),
    5: ("copy.813", 41),
    8: ("copy.810", 49),
    21: ("copy.774", 29),
    48: ("loop_add_fusion.8", 13),
    75: ("copy.686", 19),
}
"""The first command of each graph, and how many it holds: read by eye from the ranges at their creation."""

# --- the power of the checks: wrong rules for the numbers must fail them ------------------------------


def numbered(plan: Sequence[Command], rule: str, *, reverse: bool) -> Slots:
    """The slots of a graph by some rule: depth first, breadth first, or bodies in line."""
    rows: list[tuple[int, int, int]] = []
    levels = [Level(-1, -1)]
    waiting: deque[tuple[Sequence[Command], int]] = deque([(plan, 0)])

    def bodies(command: Command, level: int) -> list[tuple[Sequence[Command], int]]:
        result = []
        # `planned` has turned round the branches of predicates.
        for body in command.bodies if reverse else command.bodies[::-1]:
            levels.append(Level(level, command.number))
            result.append((body, len(levels) - 1))
        return result

    def add(commands: Sequence[Command], level: int) -> None:
        inside = []
        for command in commands:
            rows.append((command.number, Role.CHOICE if command.branches else Role.LEAF, level))
            rows.extend([(command.number, Role.HOLDER, level)] * command.branches)
            if rule == "in line":
                for body in bodies(command, level):
                    add(*body)
            else:
                inside += bodies(command, level)
        if rule == "depth first":
            for body in inside:
                add(*body)
        waiting.extend(inside if rule == "breadth first" else [])

    while waiting:
        add(*waiting.popleft())
    table = np.array(rows, np.int64)
    return Slots(table[:, 0], table[:, 1], table[:, 2], tuple(levels))


def against(loops: Tables, rule: str, *, reverse: bool) -> tuple[int, int]:
    """How many nodes, and nodes of levels, are contradicted if the numbers go by a rule."""
    schedule = schedule_of(loops.hlo[0])
    rows = loops.gpu.with_columns(
        pl.col("name", "kind").cast(pl.String),
        launch_correlations(loops.gpu).alias("launch"),
        number=pl.col("node") & LOW,
    ).filter(pl.col("graph").is_not_null())
    nodes_wrong = launches_wrong = 0
    for nodes in nodes_of(rows):
        first, count = CREATED[nodes.graph]
        number = schedule.number_of[first]
        body = schedule.bodies[schedule.body_of[number]]
        place = schedule.place_of[number]
        plan = planned(schedule, body[place : place + count])
        assert numbered(plan, "depth first", reverse=True).command.tolist() == (
            slots_of(schedule, plan).command.tolist()
        )
        slots = numbered(plan, rule, reverse=reverse)
        table, of_entry = verdicts(schedule, slots, nodes)
        verdict = table[of_entry, nodes.number]
        nodes_wrong += int(np.sum(verdict == Verdict.CONTRADICTS))
        of = rows.filter(pl.col("graph") == nodes.graph)
        numbers = of["number"].to_numpy()
        given = of.select(
            *("program", "graph", "number", "start"),
            correlation="launch",
            command=pl.Series(slots.command[numbers]),
            level=pl.Series(slots.level[numbers]),
            counted=pl.lit(value=True),
        )
        levels = [
            (nodes.graph, n, level.parent, level.conditional, level.loops) for n, level in enumerate(slots.levels)
        ]
        launches_wrong += contradicted(given, pl.DataFrame(levels, LEVELS, orient="row"), schedule).height
    return nodes_wrong, launches_wrong


def test_the_rule_for_numbers_is_not_contradicted(loops: Tables) -> None:
    assert against(loops, "depth first", reverse=True) == (0, 0)


@pytest.mark.parametrize(("rule", "reverse"), [("depth first", False), ("breadth first", True), ("in line", False)])
def test_wrong_rules_for_numbers_are_contradicted(loops: Tables, rule: str, reverse: Any) -> None:
    nodes, launches = against(loops, rule, reverse=reverse)
    assert nodes > 10
    assert launches > 10
