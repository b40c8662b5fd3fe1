"""Iterations of a program's outermost loop, from the ranges around its thunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.attribute import attribute
from thence.attribution.xla.iterations import iterations
from thence.model.intervals import NO_ROW
from thence.model.tables import GPU, HOST, PROGRAMS, Tables

if TYPE_CHECKING:
    from collections.abc import Sequence

CONDITION = "Thunk:#hlo_op=command_buffer_3#"
BODY = "Thunk:#name=jit(f)/while/body/add,hlo_op=add.1,unique_hlo_op_id=7#"
LOOP = "Thunk:#hlo_op=while.5,unique_hlo_op_id=9#"
INNER = "Thunk:#hlo_op=while.7,unique_hlo_op_id=8#"


def names(
    ranges: Sequence[tuple[str, int | None]], launched_by: Sequence[int], program: int | None = 0
) -> list[str | None]:
    """The iteration of activities that host rows (name and parent) launched."""
    count = len(ranges)
    host = HOST.frame(
        {
            "rank": [0] * count,
            "category": ["framework"] * count,
            "name": [name for name, _ in ranges],
            "parent": [parent for _, parent in ranges],
            "start": range(count),
            "duration": [1] * count,
        }
    )
    rows = len(launched_by)
    gpu = GPU.frame({"rank": [0] * rows, "start": range(rows), "program": [program] * rows})
    programs = PROGRAMS.frame({"rank": [0], "name": ["jit_f"], "execution": [2]})
    found = iterations(Tables(gpu=gpu, host=host, programs=programs), np.array(launched_by), host["name"].unique())
    return [None] * rows if found is None else found.cast(pl.String).to_list()


def test_a_round_begins_when_its_first_thunk_comes_again() -> None:
    ranges = [
        ("XlaModule:#hlo_module=jit_f,program_id=1#", None),
        (BODY, 0),
        (LOOP, 0),  # 2
        *((CONDITION, 2), (BODY, 2), (INNER, 2), (BODY, 5), (BODY, 5)),
        *((CONDITION, 2), (BODY, 2), (INNER, 2), (BODY, 10)),
        (CONDITION, 2),  # 12: the loop ends
        (BODY, 0),
    ]
    found = names(ranges, [1, 2, 3, 4, 6, 7, 8, 11, 12, 13, NO_ROW])
    first, second = "jit_f(2)/while.5(0)", "jit_f(2)/while.5(1)"
    assert found == [None, first, first, first, first, first, second, second, second, None, None]


def test_a_loop_without_a_condition_or_a_program() -> None:
    assert names([(LOOP, None), (BODY, 0), (BODY, 0)], [1, 2], None) == ["while.5(0)", "while.5(1)"]


def test_without_loops_there_are_no_iterations() -> None:
    assert names([(BODY, None), ("while_waiting", None)], [0, 1]) == [None, None]


def test_iterations_of_a_recording(loops: Tables) -> None:
    """Each begins with the graph of its first thunk, which is launched once in it."""
    found = attribute(loops)
    name = pl.col("iteration").cast(pl.String)
    inside = found.gpu.with_columns(found.places["iteration"], found.places["iteration_rule"])
    launched = inside.filter(pl.col("graph") == 5).select(name, "correlation").unique()
    # The recording was cut in the 18th, which therefore counts to the one before.
    assert launched.height == 18
    assert set(launched["iteration"]) == {f"jit__fori_collect_loop(0)/while.212({n})" for n in range(17)}
    outside = inside.filter(pl.col("iteration").is_null())
    assert set(outside["iteration_rule"]) == {"outside_loops"}
    assert outside.filter(pl.col("graph") != 2).is_empty()
