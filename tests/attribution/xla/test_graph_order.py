"""Graphs placed by the names of their kernels and their order: repeated fusions, and what stays unknown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import examples
from hlo_building import module_of
from thence.attribution.xla.command_buffers import derived_instructions
from thence.model.tables import GPU, PROGRAMS, Tables

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from thence.model.hlo import HloModule


def program_of(classes: Sequence[int]) -> HloModule:
    """Command i of class c: below 5 a fusion that all of its class share, 5 a library call, 6 a barrier."""
    rows: list[dict[str, Any]] = []
    opcodes = {5: "custom-call", 6: "all-gather-done"}
    for i, kind in enumerate(classes):
        row = {"computation": 0, "id": i, "step": i, "name": f"op.{i}", "called": [], "operands": []}
        row |= {"opcode": opcodes.get(kind, "fusion"), "result_bytes": 4, "operand_bytes": 4}
        if kind == 5:
            row["custom_call_target"] = "__cublas$lt$matmul"
        if kind < 5:
            row |= {"called": [100 + i], "fusion_kind": "kLoop", "name": f"fusion.{i}"}
            inner = {"computation": 100 + i, "id": 1000 + i, "name": f"add.{i}", "opcode": "add"}
            rows.append(inner | {"called": [], "operands": [], "result_bytes": kind})
        rows.append(row)
    return module_of(rows)


def ran(classes: Sequence[int], cuts: Sequence[int]) -> tuple[Tables, list[str]]:
    """One execution of it, in one graph between every two cuts and barriers; and the truth."""
    rows: list[tuple[str, int | None, int | None, str | None]] = []
    truth: list[str] = []
    shared = {kind: f"fusion_{classes.index(kind)}" for kind in classes}
    runs: list[list[int]] = [[]]
    for i, kind in enumerate(classes):
        if (i in cuts or kind == 6) and runs[-1]:
            runs.append([])
        if kind != 6:
            runs[-1].append(i)
    for graph, run in enumerate(filter(None, runs)):
        child = len(run)
        for number, i in enumerate(run):
            library = classes[i] == 5
            node = child if library else number
            child += library
            rows.append(("nvjet_x" if library else shared[classes[i]], graph + 1, node, None))
            truth.append(f"op.{i}" if library else f"fusion.{i}")
    count = len(rows)
    gpu = GPU.frame(
        {
            "rank": [0] * count,
            "device": [0] * count,
            "kind": ["kernel"] * count,
            "name": [row[0] for row in rows],
            "graph": [row[1] for row in rows],
            "node": [row[2] for row in rows],
            "start": range(count),
            "duration": [1] * count,
            "program": [0] * count,
        }
    )
    programs = PROGRAMS.frame({"rank": [0], "device": [0], "name": ["jit_f"], "hlo": [0]})
    return Tables(gpu=gpu, programs=programs, hlo=(program_of(classes),)), truth


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 5, 6]), min_size=1, max_size=16),
    st.sets(st.integers(0, 15), max_size=4),
    st.randoms(use_true_random=False),
)
def test_never_a_wrong_instruction(classes: list[int], cuts: set[int], chance: random.Random) -> None:
    tables, truth = ran(classes, sorted(cuts))
    if not truth:
        return
    # A trace may lack whole graphs: what is left must not move.
    kept = [graph for graph in tables.gpu["graph"].unique().sort() if chance.random() < 0.8]
    some = tables.gpu["graph"].is_in(kept)
    tables = dataclasses.replace(tables, gpu=tables.gpu.filter(some))
    found = derived_instructions(tables)
    wanted = pl.Series(truth).filter(some)
    right = found["hlo"].is_null() | (found["hlo"] == wanted)
    assert right.all(), (found, wanted)
    assert found["rule"].null_count() == 0


def test_repeated_fusions_are_told_apart_by_the_order_of_the_graphs() -> None:
    layer = [0, 1, 5]
    tables, truth = ran([*layer, 6, *layer, 6, *layer], [])
    assert derived_instructions(tables)["hlo"].to_list() == truth
    # Two of three equal graphs: each may be one of two.
    found = derived_instructions(dataclasses.replace(tables, gpu=tables.gpu.filter(pl.col("graph") != 2)))
    assert found["hlo"].null_count() == len(found)
    assert set(found.select("rule", "detail").iter_rows()) == {
        ("command_buffer_several", "the graph's kernels fit the HLO schedule at 3 places")
    }


def test_kernels_of_an_unknown_library_stay_unknown() -> None:
    tables, truth = ran([0, 5, 1, 5, 2], [])
    names = pl.col("name").cast(pl.String)
    other = pl.when(names == "nvjet_x").then(pl.lit("mine")).otherwise(names)
    gpu = tables.gpu.with_columns(name=other.cast(pl.Categorical()))
    found = derived_instructions(dataclasses.replace(tables, gpu=gpu))
    wanted = [None if name.startswith("op") else name for name in truth]
    assert found["hlo"].to_list() == wanted
    assert set(found.filter(pl.col("hlo").is_null())["rule"]) == {"command_buffer_library"}


def test_a_lost_kernel_moves_no_other() -> None:
    """The records of one node are missing in every execution."""
    tables, truth = ran([0, 5, 1, 5, 0, 2, 5, 3], [])
    for lost in range(tables.gpu.height):
        kept = pl.int_range(pl.len()) != lost
        found = derived_instructions(dataclasses.replace(tables, gpu=tables.gpu.filter(kept)))
        wanted = pl.Series(truth).filter(pl.Series(range(len(truth))) != lost)
        assert (found["hlo"].is_null() | (found["hlo"] == wanted)).all()
