"""What an activity says of the command at its node: names, sizes, libraries, and kernels that choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl
import pytest

from thence.attribution.xla.node_kernels import Nodes, Verdict, nodes_of, verdicts
from thence.attribution.xla.node_numbers import Level, Role, Slots
from thence.attribution.xla.schedules import schedule_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.hlo import HloModule

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
