"""Nodes against slots: what fits, what is certain, and what one wrong activity costs."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from thence.attribution.xla.node_matching import Nodes, Verdict, match, nodes_of, verdicts
from thence.attribution.xla.program_commands import Level, Role, Slots, planned, schedule_of, slots_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.attribution.xla.node_matching import Match
    from thence.attribution.xla.program_commands import Schedule
    from thence.model.hlo import HloModule


GEMM = "__cublas$lt$matmul"


def nodes(seen: dict[int, str], begun: bool = True) -> Nodes:
    """The nodes of a graph: kernel names by number, copies as ``copy:BYTES``."""
    numbers = sorted(seen)
    copies = [seen[number].startswith("copy:") for number in numbers]
    return Nodes(
        7,
        np.array(numbers, np.int64),
        ["Memcpy DtoD" if copy else seen[n] for n, copy in zip(numbers, copies, strict=True)],
        ["memcpy" if copy else "kernel" for copy in copies],
        np.array([int(seen[n][5:]) if copy else -1 for n, copy in zip(numbers, copies, strict=True)]),
        np.full(len(numbers), begun),
    )


def plan(hlo: Callable[..., HloModule], *instructions: dict[str, Any]) -> tuple[Schedule, Slots]:
    schedule = schedule_of(hlo({0: list(instructions)}))
    return schedule, slots_of(schedule, planned(schedule, schedule.bodies[0]))


def leaves(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"name": f"add.{n}", "opcode": "add"} for n in range(first, first + count)]


def commands(schedule: Schedule, found: Match | None) -> list[str | None]:
    assert found is not None
    return [None if c < 0 else schedule.names[c] for c in found.command.tolist()]


def test_each_slot_is_a_node(hlo: Callable[..., HloModule]) -> None:
    copy = {"name": "copy.1", "opcode": "copy", "result_bytes": 64}
    schedule, slots = plan(hlo, *leaves(2), copy)
    found = match(schedule, slots, nodes({0: "add_0", 1: "add_1", 2: "copy:64"}))
    assert commands(schedule, found) == ["add.0", "add.1", "copy.1"]
    assert found is not None
    assert found.verdict.tolist() == [Verdict.NAMED, Verdict.NAMED, Verdict.SIZED]
    assert found.proofs == 3


@pytest.mark.parametrize(
    "seen",
    [
        {0: "add_0", 1: "add_1", 2: "add_2", 3: "add_3"},  # more nodes than commands
        {0: "add_0", 1: "add_1"},  # the last did not run
        {0: "add_0", 1: "add_2", 2: "add_1"},  # two in a row are of others
        {0: "add_0", 1: "copy:4", 2: "add_2"},  # an addition is no copy, and two proofs are few
    ],
)
def test_what_contradicts_the_commands_does_not_fit(hlo: Callable[..., HloModule], seen: dict[int, str]) -> None:
    schedule, slots = plan(hlo, *leaves(3))
    assert match(schedule, slots, nodes(seen)) is None


@pytest.mark.parametrize("call", [False, True])
def test_one_contradiction_among_many_proofs_costs_its_node(hlo: Callable[..., HloModule], call: bool) -> None:
    gemm = {"name": "gemm", "opcode": "custom-call", "custom_call_target": GEMM}
    schedule, slots = plan(hlo, *leaves(12), *[gemm] * call)
    seen = {n: f"add_{n}" for n in range(12)} | ({13: "nvjet_x"} if call else {})
    found = match(schedule, slots, nodes(seen | {5: "add_6"}))
    assert found is not None
    assert found.contradicting == 1
    assert found.verdict[5] == Verdict.CONTRADICTS
    assert match(schedule, slots, nodes(seen | {5: "add_6", 6: "add_5"})) is None
    assert match(schedule, slots, nodes(seen | {5: "add_6", 8: "add_5"})) is None


def test_what_the_device_began_itself_is_in_a_branch(hlo: Callable[..., HloModule]) -> None:
    schedule, slots = plan(hlo, *leaves(2))
    seen = {0: "add_0", 1: "add_1"}
    assert match(schedule, slots, nodes(seen)) is not None
    assert match(schedule, slots, nodes(seen, begun=False)) is None


def test_calls_of_unknown_length_are_certain_where_only_one_way_fits(hlo: Callable[..., HloModule]) -> None:
    gemms = [{"name": f"gemm.{n}", "opcode": "custom-call", "custom_call_target": GEMM} for n in (0, 1)]
    schedule, slots = plan(hlo, gemms[0], *leaves(1), gemms[1])
    # Nodes 0 and 2 hold calls. A set begins a call, a reduction of parts ends one.
    seen = {1: "add_0", 3: "copy:4", 4: "nvjet_x", 5: "cublasLt::splitKreduce_kernel", 6: "copy:4", 7: "nvjet_y"}
    found = match(schedule, slots, nodes(seen))
    assert commands(schedule, found)[1:] == [*("add.0", "gemm.1", "gemm.0", "gemm.0", "gemm.0", "gemm.1", "gemm.1")]
    assert found is not None
    assert not found.counted[3:].any()
    assert found.counted[:3].all()
    # Two calls of which nothing is known: what is between the first and the last kernel is of either.
    ffi = [{"name": f"ffi.{n}", "opcode": "custom-call", "custom_call_target": "x"} for n in (0, 1)]
    schedule, slots = plan(hlo, *ffi)
    found = match(schedule, slots, nodes({2: "k1", 3: "k2", 4: "k3"}))
    assert commands(schedule, found) == ["ffi.0", "ffi.1", None, None, None]


def test_a_call_whose_own_node_has_a_kernel_holds_nothing(hlo: Callable[..., HloModule]) -> None:
    calls = [{"name": f"x.{n}", "opcode": "custom-call", "custom_call_target": "x"} for n in (0, 1)]
    schedule, slots = plan(hlo, *calls)
    found = match(schedule, slots, nodes({0: "my_pallas_kernel", 2: "k1", 3: "k2"}))
    assert commands(schedule, found) == ["x.0", "x.1", "x.1", "x.1"]
    assert commands(schedule, match(schedule, slots, nodes({2: "k1", 3: "k2"})))[2:] == [None] * 2


@settings(max_examples=examples(80), deadline=None)
@given(
    st.lists(st.sampled_from(["leaf", "call", "sort"]), min_size=1, max_size=4),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.data(),
)
def test_a_node_is_certain_if_all_ways_agree(kinds: list[str], lengths: list[int], data: st.DataObject) -> None:
    """Against all ways to put the nodes on the slots, one by one."""
    forms = {"leaf": ("add", None), "call": ("custom-call", "x"), "sort": ("sort", None)}
    instructions = [
        {"name": f"{kind}.{n}", "opcode": forms[kind][0], "custom_call_target": forms[kind][1]}
        for n, kind in enumerate(kinds)
    ]
    schedule, slots = plan(_module, *instructions)
    several = slots.role == Role.SEVERAL
    extent = [lengths[i % 4] if several[i] else 1 for i in range(len(several))]
    names: list[str | None] = []
    unseen: dict[int, bool] = {}
    for slot in np.flatnonzero(slots.role == Role.CALL).tolist():
        unseen[int(slots.command[slot])] = data.draw(st.booleans())
    # A node with a kernel of its own holds no others.
    extent = [
        0 if slots.role[i] == Role.SEVERAL and unseen.get(int(slots.command[i])) is False else length
        for i, length in enumerate(extent)
    ]
    for slot, length in enumerate(extent):
        command = schedule.names[slots.command[slot]]
        kernel = command.replace(".", "_") if command.startswith("leaf") else "k"
        holder = slots.role[slot] == Role.CALL and unseen[int(slots.command[slot])]
        names += [None if holder else kernel] * length
    seen = {n: name for n, name in enumerate(names) if name is not None}
    if not seen:
        return
    found = match(schedule, slots, nodes(seen))
    count = max(seen) + 1
    ways = []
    for ends in product(range(count + 1), repeat=int(several.sum())):
        every = iter(ends)
        way = [slots.command[i] for i in range(len(several)) for _ in range(next(every) if several[i] else 1)]
        if len(way) >= count and _possible(schedule, slots, ends, seen, count):
            ways.append(way[:count])
    assert found is not None
    wanted = [way[0] if len(set(way)) == 1 else -1 for way in zip(*ways, strict=True)]
    assert found.command.tolist() == wanted
    truth = np.repeat(slots.command, extent)[:count]
    assert all(c in (-1, t) for c, t in zip(found.command.tolist(), truth.tolist(), strict=True))


def _module(computations: dict[int, list[dict[str, Any]]]) -> HloModule:
    import polars as pl

    from thence.model.hlo import COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, HloModule

    rows = [
        {"computation": 0, "id": n, "step": n, "called": [], "operands": [], "result_bytes": 4, "operand_bytes": 4}
        | row
        for n, row in enumerate(computations[0])
    ]
    return HloModule(
        "jit_f", 1, None, 0, None, None, pl.DataFrame(rows, schema=INSTRUCTIONS, orient="row"),
        *(pl.DataFrame(schema=schema) for schema in (COMPUTATIONS, LOOPS, FRAMES)),
    )  # fmt: skip


def _possible(schedule: Schedule, slots: Slots, ends: tuple[int, ...], seen: dict[int, str], count: int) -> bool:
    """Whether nothing contradicts one way: several nodes for each slot that may have several."""
    every = iter(ends)
    number = 0
    fixed = int(np.isin(slots.role, [Role.SEVERAL]).argmax())
    plain = {int(slots.command[i]) for i in range(fixed) if slots.role[i] == Role.CALL and i in seen}
    holding = zip(slots.command[slots.role == Role.SEVERAL].tolist(), ends, strict=True)
    if any(length and command in plain for command, length in holding):
        return False
    for role, command in zip(slots.role.tolist(), slots.command.tolist(), strict=True):
        for _ in range(next(every) if role == Role.SEVERAL else 1):
            kernel = seen.get(number)
            own = schedule.names[command].replace(".", "_")
            leaf = role == Role.LEAF
            if number < count:
                if leaf and kernel != own:
                    return False
                if not leaf and kernel is not None and kernel.startswith("leaf"):
                    return False
            elif leaf:
                return False
            number += 1
    return True


# ---- Whether an activity can belong to a command


COMMANDS = {
    "add": {"opcode": "add"},
    "other": {"opcode": "multiply"},
    "copy": {"opcode": "copy", "result_bytes": 64},
    "gemm": {"opcode": "custom-call", "custom_call_target": "__cublas$lt$matmul"},
    "mine": {"opcode": "custom-call", "custom_call_target": "x"},
    "sort": {"opcode": "sort"},
}


@pytest.mark.parametrize(
    ("command", "role", "activity", "size", "wanted"),
    [
        ("add", Role.LEAF, "add", -1, Verdict.NAMED),
        ("add", Role.LEAF, "other", -1, Verdict.CONTRADICTS),
        ("add", Role.LEAF, "triton_kernel", -1, Verdict.FOREIGN),
        ("add", Role.LEAF, "Memcpy DtoD", 4, Verdict.CONTRADICTS),
        ("add", Role.LEAF, "set_case_condition", -1, Verdict.CONTRADICTS),
        ("copy", Role.LEAF, "Memcpy DtoD", 64, Verdict.SIZED),
        ("copy", Role.LEAF, "Memcpy DtoD", 32, Verdict.CONTRADICTS),
        ("copy", Role.LEAF, "memcpy32_post", -1, Verdict.POSSIBLE),
        ("copy", Role.LEAF, "copy", -1, Verdict.NAMED),
        ("add", Role.CHOICE, "set_case_condition", -1, Verdict.NAMED),
        ("add", Role.CHOICE, "set_while_condition", -1, Verdict.NAMED),
        ("add", Role.CHOICE, "add", -1, Verdict.CONTRADICTS),
        ("add", Role.HOLDER, "add", -1, Verdict.CONTRADICTS),
        ("add", Role.HOLDER, "Memcpy DtoD", 4, Verdict.CONTRADICTS),
        ("mine", Role.CALL, "my_pallas_kernel", -1, Verdict.POSSIBLE),
        ("mine", Role.LEAF, "my_pallas_kernel", -1, Verdict.POSSIBLE),
        ("mine", Role.CALL, "add", -1, Verdict.CONTRADICTS),
        ("mine", Role.LAUNCHED, "nvjet_x", -1, Verdict.POSSIBLE),
        ("gemm", Role.BEFORE, "Memset", 4, Verdict.POSSIBLE),
        ("gemm", Role.BEFORE, "nvjet_x", -1, Verdict.CONTRADICTS),
        ("gemm", Role.MAIN, "nvjet_x", -1, Verdict.POSSIBLE),
        ("gemm", Role.MAIN, "unknown", -1, Verdict.FOREIGN),
        ("gemm", Role.MAIN, "cublasLt::splitKreduce_kernel", -1, Verdict.CONTRADICTS),
        ("gemm", Role.AFTER, "cublasLt::splitKreduce_kernel", -1, Verdict.POSSIBLE),
        ("gemm", Role.AFTER, "nvjet_x", -1, Verdict.CONTRADICTS),
        ("sort", Role.SEVERAL, "sort_16_1", -1, Verdict.POSSIBLE),
        ("sort", Role.SEVERAL, "Memcpy DtoD", 4, Verdict.POSSIBLE),
        ("sort", Role.SEVERAL, "add", -1, Verdict.CONTRADICTS),
    ],
)
def test_what_an_activity_says(
    hlo: Callable[..., HloModule], command: str, role: Role, activity: str, size: int, wanted: Verdict
) -> None:
    schedule = schedule_of(hlo({0: [{"name": name, **facts} for name, facts in COMMANDS.items()]}))
    one = np.array([schedule.number_of[command]])
    slots = Slots(one, np.array([role]), np.array([0]), (Level(-1, -1),))
    kind = "memcpy" if activity.startswith("Mem") else "kernel"
    nodes = Nodes(7, np.array([0]), [activity], [kind], np.array([size]), np.array([True]))
    table, of_entry = verdicts(schedule, slots, nodes)
    assert table[of_entry].tolist() == [[wanted]]


def test_nodes_are_gathered_from_all_launches() -> None:
    rows = pl.DataFrame(
        [
            (7, 1, "Memcpy", "memcpy", 64, 3),
            (7, 1, "Memcpy", "memcpy", 64, 4),
            (7, 2, "Memcpy", "memcpy", 64, 3),
            (7, 2, "Memcpy", "memcpy", 32, 4),  # of different sizes: it says nothing
            (7, 0, "add", "kernel", None, 0),
            (7, None, "add", "kernel", None, 3),
            (8, 0, "add", "kernel", None, None),
        ],
        schema={
            "graph": pl.UInt64, "number": pl.UInt64, "name": pl.String, "kind": pl.String,
            "bytes": pl.Int64, "correlation": pl.Int64,
        },
        orient="row",
    )  # fmt: skip
    first, second = nodes_of(rows)
    assert (first.graph, first.number.tolist(), first.last) == (7, [0, 1, 2], 2)
    assert first.bytes.tolist() == [-1, 64, -1]
    assert first.begun.tolist() == [False, True, True]
    assert (second.graph, second.begun.tolist()) == (8, [True])
