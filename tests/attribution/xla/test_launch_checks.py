"""What launches say against a numbering: levels run in part, two branches, readers before writers."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

from thence.attribution.xla.launch_checks import LEVELS, contradicted
from thence.attribution.xla.node_kernels import LOW, Verdict, nodes_of, verdicts
from thence.attribution.xla.node_numbers import Level, Role, Slots, planned, slots_of
from thence.attribution.xla.schedules import schedule_of
from thence.model.launches import launch_correlations

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from thence.attribution.xla.node_numbers import Command
    from thence.attribution.xla.schedules import Schedule
    from thence.model.hlo import HloModule
    from thence.model.tables import Tables

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


@pytest.mark.parametrize(
    ("rule", "reverse"),
    [("depth first", False), ("breadth first", True), ("breadth first", False), ("in line", True), ("in line", False)],
)
def test_wrong_rules_for_numbers_are_contradicted(loops: Tables, rule: str, reverse: Any) -> None:
    nodes, launches = against(loops, rule, reverse=reverse)
    assert nodes > 10
    assert launches > 10
