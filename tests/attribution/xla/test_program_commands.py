"""The numbers of a graph's nodes: conditionals of any kind and depth, loops, calls and sorts, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from thence.attribution.xla.program_commands import Command, Role, TooManyNodes, planned, schedule_of, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.attribution.xla.program_commands import Schedule, Slots
    from thence.model.hlo import HloModule


def leaf(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "opcode": "add", **more}


def shown(schedule: Schedule, slots: Slots) -> list[str]:
    """Each slot as its command, in brackets where it is no kernel or copy of the command's own."""
    forms = {
        Role.LEAF: "{}", Role.CHOICE: "choose {}", Role.HOLDER: "({})", Role.CALL: "call {}",
        Role.SEVERAL: "{}*", Role.BEFORE: "before {}*", Role.MAIN: "main {}", Role.AFTER: "after {}*",
        Role.LAUNCHED: "launch {}",
    }  # fmt: skip
    return [
        forms[Role(role)].format(schedule.names[command])
        for command, role in zip(slots.command, slots.role, strict=True)
    ]


def numbered(module: HloModule) -> list[str]:
    schedule = schedule_of(module)
    return shown(schedule, slots_of(schedule, planned(schedule, schedule.bodies[0])))


def test_the_branches_of_a_predicate_are_numbered_in_reverse_after_all_nodes_of_the_level(
    hlo: Callable[..., HloModule],
) -> None:
    computations = {
        0: [
            {"name": "p", "opcode": "parameter", "result_bytes": 1},
            leaf("a"),
            {"name": "cond", "opcode": "conditional", "called": [1, 2], "operands": [0]},
            leaf("b"),
        ],
        1: [leaf("t0"), leaf("t1")],
        2: [leaf("f0")],
    }
    assert numbered(hlo(computations)) == [*("a", "choose cond", "(cond)", "(cond)", "b", "f0", "t0", "t1")]
    computations[0][0]["result_bytes"] = 4  # an index
    assert numbered(hlo(computations)) == [*("a", "choose cond", "(cond)", "(cond)", "b", "t0", "t1", "f0")]


def test_ten_branches_have_two_kernels_that_choose_and_an_empty_one_holds_nothing(
    hlo: Callable[..., HloModule],
) -> None:
    branches = {n: [leaf(f"x{n}")] if n != 3 else [] for n in range(1, 11)}
    conditional = {"name": "s", "opcode": "conditional", "called": list(branches), "operands": [0]}
    module = hlo({0: [{"name": "i", "opcode": "parameter"}, conditional], **branches})
    assert numbered(module) == [
        *("choose s", *["(s)"] * 8, "choose s", "(s)", "(s)"),
        *(f"x{n}" for n in range(1, 11) if n != 3),
    ]


def test_what_a_branch_holds_comes_before_the_next_branch(hlo: Callable[..., HloModule]) -> None:
    module = hlo(
        {
            0: [
                {"name": "i", "opcode": "parameter"},
                {"name": "outer", "opcode": "conditional", "called": [1, 2], "operands": [0]},
            ],
            1: [
                {"name": "j", "opcode": "parameter"},
                leaf("a"),
                {"name": "inner", "opcode": "conditional", "called": [3, 4], "operands": [1000]},
                leaf("b"),
            ],
            2: [leaf("c")],
            3: [leaf("d")],
            4: [leaf("e")],
        }
    )
    assert numbered(module) == [
        *("choose outer", "(outer)", "(outer)"),
        *("a", "choose inner", "(inner)", "(inner)", "b", "d", "e", "c"),
    ]
    schedule = schedule_of(module)
    levels = slots_of(schedule, planned(schedule, schedule.bodies[0])).levels
    assert [level.parent for level in levels] == [-1, 0, 0, 1, 1]


def test_a_loop_in_the_graph_decides_before_and_at_the_end_of_each_round(hlo: Callable[..., HloModule]) -> None:
    module = hlo(
        {
            # A proto names the body first.
            0: [leaf("a"), {"name": "w", "opcode": "while", "called": [1, 2]}, leaf("b")],
            1: [leaf("step")],
            2: [leaf("less")],
        }
    )
    assert numbered(module) == [*("a", "less", "choose w", "(w)", "b", "step", "less", "choose w")]


def test_calls_sorts_and_asynchronous_commands(hlo: Callable[..., HloModule]) -> None:
    module = hlo(
        {
            0: [
                {"name": "gemm", "opcode": "custom-call", "custom_call_target": "__cublas$lt$matmul"},
                {"name": "mine", "opcode": "custom-call", "custom_call_target": "my_ffi"},
                {"name": "sort", "opcode": "sort"},
                {"name": "sorts", "opcode": "fusion", "called": [1], "fusion_kind": "kInput"},
                {"name": "start", "opcode": "async-start", "called": [2]},
                {"name": "done", "opcode": "async-done"},
                {"name": "nothing", "opcode": "copy", "result_bytes": 0},
                leaf("end"),
            ],
            1: [{"name": "sort.1", "opcode": "sort", "step": None}],
            2: [{"name": "slice", "opcode": "fusion", "called": [3], "fusion_kind": "kCustom"}],
            3: [{"name": "copy.1", "opcode": "copy", "step": None}],
        }
    )
    assert numbered(module) == [
        *("(gemm)", "call mine", "sort*", "sorts*", "call slice", "end"),
        *("before gemm*", "main gemm", "after gemm*", "mine*", "slice*"),
    ]


def test_launches_that_were_counted_are_so_many_nodes(hlo: Callable[..., HloModule]) -> None:
    schedule = schedule_of(hlo({0: [leaf("a"), {"name": "c", "opcode": "custom-call"}]}))
    slots = slots_of(schedule, [Command(1, launches=2), Command(0)])
    assert shown(schedule, slots) == ["(c)", "a", "launch c", "launch c"]
    assert slots.exact


def test_computations_that_call_each_other_are_refused(hlo: Callable[..., HloModule]) -> None:
    around = [{"name": f"c{n}", "opcode": "conditional", "called": [1 - n]} for n in (0, 1)]
    schedule = schedule_of(hlo({0: [around[0]], 1: [around[1]]}))
    with pytest.raises(TooManyNodes):
        planned(schedule, schedule.bodies[0])


@pytest.mark.parametrize("opcode", ["call", "conditional", "while", "async-start"])
def test_computations_that_share_what_they_call_are_planned_once(hlo: Callable[..., HloModule], opcode: str) -> None:
    """Forty computations, each of which calls the next one twice: 2 ** 40 paths."""
    computations = {n: [{"name": f"c{n}", "opcode": opcode, "called": [n + 1, n + 1]}] for n in range(40)}
    schedule = schedule_of(hlo({**computations, 40: [leaf("a")]}))
    with pytest.raises(TooManyNodes, match="more nodes than any CUDA graph"):
        slots_of(schedule, planned(schedule, schedule.bodies[0]))
