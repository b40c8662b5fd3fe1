"""Command buffers: every node against what XLA and the clock say of it, and what must stay unknown."""

from __future__ import annotations

import dataclasses
import gzip
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import DATA
from protowire import every, first
from thence.attribution.attribute import attribute
from thence.attribution.xla.command_buffers import derived_instructions
from thence.model.hlo import COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, HloModule
from thence.model.tables import GPU, PROGRAMS, Tables
from thence.readers.jax import xplane
from thence.readers.jax.hlo_dump import hlo_dump_modules
from thence.readers.source import Source

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

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


def cupti() -> tuple[Tables, list[dict[str, Any]]]:
    """The kernels that CUPTI recorded of four steps, as the tables of a trace; and themselves."""
    kernels = json.loads(gzip.decompress((JAX / "command_buffer.kernels.json.gz").read_bytes()))
    kernels.sort(key=lambda kernel: kernel["start_ns"])
    launches = sorted({kernel["correlation"] for kernel in kernels})
    rows = len(kernels)
    gpu = GPU.frame(
        {
            "rank": [0] * rows,
            "device": [0] * rows,
            "kind": ["kernel"] * rows,
            "name": [kernel["name"] for kernel in kernels],
            "start": [kernel["start_ns"] for kernel in kernels],
            "duration": [kernel["end_ns"] - kernel["start_ns"] for kernel in kernels],
            "correlation": [kernel["correlation"] for kernel in kernels],
            "graph": [kernel["graph_id"] for kernel in kernels],
            "node": [kernel["graph_node_id"] for kernel in kernels],
            "program": [launches.index(kernel["correlation"]) for kernel in kernels],
        }
    )
    programs = PROGRAMS.frame(
        {
            "rank": [0] * len(launches),
            "device": [0] * len(launches),
            "name": ["jit_train_step"] * len(launches),
            "hlo": [0] * len(launches),
        }
    )
    return Tables(gpu=gpu, programs=programs, hlo=(module_of("command_buffer.hlo.pb.xz"),)), kernels


@pytest.fixture(scope="module")
def single() -> Tables:
    return read("jax_single.xplane.pb.gz")


@pytest.fixture(scope="module")
def sharded() -> Tables:
    return read("jax_fsdp2.xplane.pb.gz")


# --- what XLA and the clock say -------------------------------------------------------------------


def test_every_kernel_of_the_profiler_is_the_thunk_that_ran_then(single: Tables) -> None:
    # One stream and one kernel a thunk: the i-th kernel to start is thunk i, whatever its node says.
    wanted = [name for name, _ in thunks("jax_single.thunk_metadata.pb")]
    found = single.gpu.with_columns(derived=derived_instructions(single)["hlo"])
    kernels = found.filter(pl.col("kind") == "kernel").sort("start")
    assert kernels.height == 5 * len(wanted)
    for program in range(5):
        assert kernels.filter(pl.col("program") == program)["derived"].to_list() == wanted


def test_every_kernel_of_cupti_is_the_thunk_that_ran_then() -> None:
    tables, kernels = cupti()
    steps = thunks("command_buffer.thunk_metadata.pb")
    wanted = [name for name, kind in steps if kind != "kCopy"]
    found = derived_instructions(tables)["hlo"].to_list()
    launches = [kernel["correlation"] for kernel in kernels]
    for launch in set(launches):
        ran = [name for name, of in zip(found, launches, strict=True) if of == launch]
        assert ran == wanted


@pytest.mark.parametrize("recording", ["jax_single", "cupti"])
def test_nodes_are_numbered_as_thunks(recording: str, single: Tables) -> None:
    tables = single if recording == "jax_single" else cupti()[0]
    metadata = "jax_single" if recording == "jax_single" else "command_buffer"
    steps = thunks(f"{metadata}.thunk_metadata.pb")
    calls = iter([name for name, kind in steps if kind == "kCublasLtMatmul"])
    nodes = tables.gpu.with_columns(
        derived_instructions(tables), number=pl.col("node") & 0xFFFFFFFF
    ).filter(pl.col("program") == 0)
    for number, kind, name, rule in (
        nodes.sort("number").select("number", "kind", "hlo", "rule").iter_rows()
    ):
        if number < len(steps):
            assert (name, rule) == (steps[number][0], "hlo_node_order")
        elif kind == "kernel":
            assert (name, rule) == (next(calls), "hlo_library_order")
    assert next(calls, None) is None


def test_library_calls_take_as_long_as_without_a_graph(single: Tables) -> None:
    # The same program, compiled and run op by op: its profiler says which HLO op a kernel is.
    alone = read("jax_single_nocb.xplane.pb.gz")
    frames = []
    for tables in (single, alone):
        names = pl.coalesce(pl.col("hlo").cast(pl.String), "derived")
        ran = (
            tables.gpu.with_columns(derived=derived_instructions(tables)["hlo"])
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


def test_operations_take_as_long_as_without_a_graph(single: Tables) -> None:
    alone = read("jax_single_nocb.xplane.pb.gz")
    one, other = (
        tables.gpu.hstack(attribute(tables).places.select("op_name"))
        .group_by("op_name")
        .agg(pl.col("duration").sum())
        for tables in (single, alone)
    )
    both = one.join(other, on="op_name")
    ratio = both.select(pl.col("duration") / pl.col("duration_right"))["duration"]
    # Fusions that find their input in the L2 cache are faster in a graph; none is twice off.
    assert both["duration"].sum() > 0.98 * one["duration"].sum()
    assert ratio.is_between(0.5, 2).all()
    assert ratio.median() == pytest.approx(1, abs=0.03)


# --- how much of the time is attributed -------------------------------------------------------------


@pytest.mark.parametrize("name", ["single", "sharded"])
def test_all_of_the_time_has_an_instruction(name: str, request: pytest.FixtureRequest) -> None:
    tables: Tables = request.getfixturevalue(name)
    recorded = tables.gpu["hlo"].clone()
    found = attribute(tables)
    assert found.places["hlo"].null_count() == 0
    assert tables.gpu["hlo"].equals(recorded, null_equal=True)
    rules = set(found.places["hlo_rule"].unique().cast(pl.String))
    assert {"hlo_node_order", "hlo_library_order"} <= rules
    assert found.shares is not None
    placed = found.shares.filter(pl.col("place").is_not_null()).join(
        tables.gpu.with_row_index("gpu").cast({"gpu": pl.Int32}), on="gpu"
    )
    share = (placed["weight"] * placed["duration"]).sum() / tables.gpu["duration"].sum()
    assert share >= 0.97


def test_each_device_and_execution_gets_the_same(sharded: Tables) -> None:
    found = sharded.gpu.with_columns(
        derived=derived_instructions(sharded)["hlo"], number=pl.col("node") & 0xFFFFFFFF
    )
    executions = (
        found.drop_nulls("derived").group_by("program").agg(pl.col("derived").sort(), pl.len())
    )
    assert executions.height == 10
    assert executions["derived"].n_unique() == 1
    assert executions["len"].unique().to_list() == [204]


def test_a_graph_instantiated_again_is_found_again(single: Tables) -> None:
    later = pl.col("program") >= 3
    renamed = pl.when(later).then(pl.col("graph") + 40).otherwise("graph")
    again = dataclasses.replace(single, gpu=single.gpu.with_columns(graph=renamed))
    assert derived_instructions(again).equals(derived_instructions(single))


# --- what stays unknown ----------------------------------------------------------------------------


def refusals(tables: Tables) -> set[tuple[str, str | None]]:
    """Why nothing was found, code and sentence; fails where something was."""
    found = derived_instructions(tables)
    assert found["hlo"].null_count() == len(found)
    return set(found.select("rule", "detail").iter_rows())


def with_module(tables: Tables, module: HloModule) -> Tables:
    return dataclasses.replace(tables, hlo=(module,))


@pytest.mark.parametrize("seed", range(3))
def test_a_shuffled_schedule_is_refused(single: Tables, seed: int) -> None:
    module = single.hlo[0]
    shuffled = module.instructions.with_columns(
        pl.col("step").shuffle(seed=seed).over("computation")
    )
    changed = dataclasses.replace(module, instructions=shuffled)
    ((reason, detail),) = refusals(with_module(single, changed))
    assert reason == "command_buffer_no_fit"
    assert "of the graph's 165 own kernels fit the HLO schedule" in (detail or "")


def test_the_hlo_of_another_program_is_refused(single: Tables, sharded: Tables) -> None:
    ((reason, detail),) = refusals(with_module(single, sharded.hlo[0]))
    assert reason == "command_buffer_no_fit"
    assert "kernels fit the HLO schedule" in (detail or "")
    # The same program compiled again: two fusions more, other numbers.
    ((reason, detail),) = refusals(with_module(single, module_of("command_buffer.hlo.pb.xz")))
    assert reason == "command_buffer_no_fit"
    assert "kernels fit the HLO schedule" in (detail or "")


def test_an_hlo_without_a_schedule_is_refused(single: Tables) -> None:
    module = single.hlo[0]
    table = module.instructions.with_columns(step=pl.lit(None, pl.Int32))
    (reason,) = refusals(with_module(single, dataclasses.replace(module, instructions=table)))
    assert reason == ("command_buffer_no_schedule", None)


def test_one_kernel_that_does_not_fit_refuses_its_graph(single: Tables) -> None:
    names = pl.col("name").cast(pl.String)
    other = pl.when(names == "loop_add_fusion_3").then(pl.lit("loop_add_fusion_4")).otherwise(names)
    gpu = single.gpu.with_columns(name=other.cast(pl.Categorical()))
    ((reason, detail),) = refusals(dataclasses.replace(single, gpu=gpu))
    assert reason == "command_buffer_no_fit"
    assert "at most 164 of the graph's 165 own kernels" in (detail or "")


def test_library_calls_in_another_order_are_refused(single: Tables) -> None:
    """Any two neighbours changed over would have one start before what it reads."""
    first_child = 193
    number = pl.col("node") & 0xFFFFFFFF
    children = single.gpu.filter(number >= first_child, kind="kernel")
    numbers = sorted(set(children.select(number)["node"].to_list()))
    assert len(numbers) == 28
    for one, other in pairwise(numbers):
        high = pl.col("node") - number
        node = (
            pl.when(number == one).then(high + other).when(number == other).then(high + one)
            .otherwise("node")
        )  # fmt: skip
        (reason,) = refusals(dataclasses.replace(single, gpu=single.gpu.with_columns(node=node)))
        assert reason == ("command_buffer_too_early", None)


# --- repeated identical fusions ----------------------------------------------------------------------


def program_of(classes: Sequence[int]) -> HloModule:
    """Command i of class c: below 5 a fusion that all of its class share, 5 a library call, 6 a barrier."""
    rows: list[dict[str, Any]] = []
    opcodes = {5: "custom-call", 6: "all-gather-done"}
    for i, kind in enumerate(classes):
        row = {
            "computation": 0,
            "id": i,
            "step": i,
            "name": f"op.{i}",
            "called": [],
            "operands": [],
        }
        row |= {"opcode": opcodes.get(kind, "fusion"), "result_bytes": 4, "operand_bytes": 4}
        if kind == 5:
            row["custom_call_target"] = "__cublas$lt$matmul"
        if kind < 5:
            row |= {"called": [100 + i], "fusion_kind": "kLoop", "name": f"fusion.{i}"}
            inner = {"computation": 100 + i, "id": 1000 + i, "name": f"add.{i}", "opcode": "add"}
            rows.append(inner | {"called": [], "operands": [], "result_bytes": kind})
        rows.append(row)
    return HloModule(
        "jit_f", 1, None, 0, None, None,
        instructions=pl.DataFrame(rows, schema=INSTRUCTIONS, orient="row"),
        computations=pl.DataFrame(schema=COMPUTATIONS),
        loops=pl.DataFrame(schema=LOOPS),
        frames=pl.DataFrame(schema=FRAMES),
    )  # fmt: skip


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


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 5, 6]), min_size=1, max_size=16),
    st.sets(st.integers(0, 15), max_size=4),
    st.randoms(use_true_random=False),
)
def test_never_a_wrong_instruction(
    classes: list[int], cuts: set[int], chance: random.Random
) -> None:
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
    found = derived_instructions(
        dataclasses.replace(tables, gpu=tables.gpu.filter(pl.col("graph") != 2))
    )
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
