"""Flame graphs: numbers by eye on traces made by hand, and totals that equal the summary's on recordings."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import thence
from helpers import DATA, FSDP, STACK, event, kernel, launch, opened, recording
from programs_data import trace as programs_trace
from thence.analysis.flame.answer import IDLE, Flame, Idle, Split, flame
from thence.analysis.flame.prefix_tree import PHASE_SUMS, Groups, build_tree, keep_largest
from thence.analysis.grouping.time_by_place import default_kind
from thence.analysis.idle.gaps import program_gaps
from thence.analysis.idle.host_causes import CAUSES
from thence.analysis.programs.answer import programs
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.attribute import attribute
from thence.errors import MissingData, UsageError
from thence.model.intervals import gaps
from thence.model.places import FLAME_KINDS, FLAMES
from thence.model.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from thence.analysis.report.summary import Summary

JAX = DATA / "jax"
SOURCES = {
    "stack": (STACK,),
    "compile": (recording("torch_compile_rank0"),),
    "replay": (recording("graph_replay_rank0"),),
    "fsdp": FSDP[:2],
    "jax": (JAX / "jax_single_nocb.xplane.pb.gz",),
    "streams": (JAX / "streams_moved.xplane.pb",),
}

# 5 us of idle before the second kernel, 10 us before the third; names hold what separates paths.
EVENTS = [
    event("user_annotation", "train", 0, 90),
    event("user_annotation", "a/b;c", 1, 20),
    event("cpu_op", "aten::mm", 2, 10),
    launch(1, 3),
    launch(2, 30),
    launch(3, 95),
    kernel(1, 100, 5, name="gemm"),
    kernel(2, 110, 10, name="gemm"),
    kernel(3, 130, 1, name="ncclDevKernel_AllReduce"),
]


@functools.cache
def trace_of(name: str) -> thence.Trace:
    return thence.open(*SOURCES[name])


@functools.cache
def summary_of(name: str) -> Summary:
    return trace_of(name).report()


def paths(graph: Flame) -> dict[tuple[str, ...], int]:
    found = list(graph.stacks())
    assert len(dict(found)) == len(found)
    return dict(found)


def row(graph: Flame, name: str) -> dict[str, Any]:
    return graph.nodes.row(by_predicate=pl.col("name") == name, named=True)


def test_frames_are_the_ranges_even_where_names_hold_separators(tmp_path: Path) -> None:
    graph = opened(tmp_path, EVENTS).flame("label")
    outside = "[launched outside every named range]"
    assert paths(graph) == {
        ("train", "gemm"): 10_000,
        ("train", "a/b;c", "gemm"): 5_000,
        (outside, "ncclDevKernel_AllReduce"): 1_000,
        # Both kernels were launched before their gaps began: 5 us of a gap are the queue's, the rest is unknown.
        (IDLE, "queued", "train"): 5_000,
        (IDLE, "queued", "cudaLaunchKernel"): 5_000,
        (IDLE, "unknown", "cudaLaunchKernel"): 5_000,
    }
    assert graph.total_ns == graph.span_ns == 31_000
    work = pl.col("name") == "train", ~pl.col("idle")
    train = graph.nodes.row(by_predicate=pl.all_horizontal(work), named=True)
    assert train == {
        "node": train["node"], "parent": 0, "depth": 1, "name": "train",
        "full_name": None, "kind": "frame", "self_ns": 0, "total_ns": 15_000, "count": 2,
        **dict.fromkeys(PHASE_SUMS, 0), "other_ns": 5_000, "idle": False,
    }  # fmt: skip
    assert row(graph, outside)["kind"] == "unattributed"
    assert row(graph, "ncclDevKernel_AllReduce")["kind"] == "communication"
    assert row(graph, IDLE)["count"] == 3  # pieces of gaps
    assert row(graph, "GPU and idle time")["count"] == 3  # activities


def test_operators_are_frames(tmp_path: Path) -> None:
    graph = opened(tmp_path, EVENTS).flame("ops")
    assert paths(graph)["aten::mm", "gemm"] == 5_000


def test_without_idle_the_root_is_the_sum(tmp_path: Path) -> None:
    trace = opened(tmp_path, EVENTS)
    graph = flame(trace.tables, "label", idle=Idle.EXCLUDE)
    assert graph.total_ns == graph.sum_ns == 16_000
    assert not graph.nodes["idle"].any()


def test_parallel_streams_count_in_full_and_it_is_said(tmp_path: Path) -> None:
    trace = opened(tmp_path, [launch(1, 1), launch(2, 2), kernel(1, 10, 10), kernel(2, 15, 10, args={"stream": 8})])
    graph = trace.flame()
    assert (graph.span_ns, graph.busy_ns, graph.sum_ns) == (15_000, 15_000, 20_000)
    assert graph.total_ns == 20_000
    assert any("parallel streams" in note for note in graph.notes)


@pytest.mark.parametrize(
    ("name", "by"), [*((name, "module") for name in SOURCES), *(("stack", by) for by in FLAMES if by != "module")]
)
def test_totals_equal_the_summary(name: str, by: str) -> None:
    trace = trace_of(name)
    summary = summary_of(name)
    for split, idle in ((Split.NONE, Idle.EXCLUDE), (Split.PHASE, Idle.INCLUDE)):
        nodes = flame(trace.tables, by, split, idle).nodes
        total = summary.sum_ns + (summary.idle_ns if idle is Idle.INCLUDE else 0)
        assert nodes["total_ns"][0] == nodes["self_ns"].sum() == total
        assert nodes["count"][0] == trace.tables.gpu.height
        check_tree(nodes)


def check_tree(nodes: pl.DataFrame) -> None:
    """Every total is the frame's own time and that of the frames in it."""
    assert nodes["node"].to_list() == list(range(nodes.height))
    assert (nodes["parent"].drop_nulls() < nodes["node"][1:]).all()
    total = nodes["self_ns"].to_list()
    for node, parent in reversed(list(nodes.select("node", "parent").iter_rows())):
        if parent is not None:
            total[parent] += total[node]
    assert total == nodes["total_ns"].to_list()
    assert (nodes["forward_ns"] + nodes["backward_ns"] <= nodes["total_ns"]).all()


@pytest.mark.parametrize(
    ("name", "by"),
    [("stack", "module"), ("fsdp", "label"), ("stack", "ops"), ("fsdp", "ops"), ("stack", "stack"), ("jax", "stack")],
)
def test_every_place_of_the_report_is_a_path(name: str, by: str) -> None:
    trace = trace_of(name)
    expected = {
        row["name"]: row["total_ns"] for row in trace.report(by).rows.iter_rows(named=True) if row["attributed"]
    }
    found: dict[str, int] = {}
    for frames, self_ns in flame(trace.tables, by, idle=Idle.EXCLUDE).stacks():
        separator = ";" if by == "stack" and name == "jax" else "/"
        path = separator.join(frames[:-1])
        if not path.startswith("["):
            found[path] = found.get(path, 0) + self_ns
    assert found == expected


def test_the_innermost_line_is_the_source_of_the_report() -> None:
    trace = trace_of("stack")
    found: dict[str, int] = {}
    for frames, self_ns in flame(trace.tables, "source", idle=Idle.EXCLUDE).stacks():  # fmt: skip
        found[frames[-2]] = found.get(frames[-2], 0) + self_ns
    assert any(len(frames) > 3 for frames, _ in trace.flame("source").stacks())
    assert found == dict(trace.report("source").rows.select("name", "total_ns").iter_rows())


def test_a_fusion_is_divided_among_its_source_stacks() -> None:
    trace = trace_of("jax")
    graph = flame(trace.tables, "source", idle=Idle.EXCLUDE)
    found: dict[str, int] = {}
    for frames, self_ns in graph.stacks():
        found[frames[-2]] = found.get(frames[-2], 0) + self_ns
    expected = dict(trace.report("source").rows.select("name", "total_ns").iter_rows())
    assert found.keys() == expected.keys()
    for name, total in expected.items():  # rounding is per stack here, per line there
        assert found[name] == pytest.approx(total, abs=trace.tables.gpu.height)
    assert any("fusion" in note for note in graph.notes)


@pytest.mark.parametrize("name", ["jax", "streams"])
def test_idle_is_what_the_programs_analysis_finds(name: str) -> None:
    trace = trace_of(name)
    found = programs(trace.tables, WarmUp.KEEP).programs
    graph = trace.select(warm_up="keep").flame("op_name")
    for program, inside, before in found.select("name", "idle_inside_ns", "idle_between_ns").iter_rows():
        assert row(graph, f"inside {program}")["total_ns"] == inside
        assert row(graph, f"before {program}")["total_ns"] == before
    assert row(graph, IDLE)["total_ns"] == trace.report().idle_ns
    assert graph.nodes.filter(pl.col("kind") == "idle")["idle"].all()


def test_idle_inside_between_and_after_programs_by_eye() -> None:
    found = program_gaps(attribute(programs_trace())).select("start", "duration", "where", "program").rows()
    assert found == [
        (130, 10, "inside", "step"),
        (150, 10, "before", "init"),
        (170, 30, "before", "step"),
        (210, 10, "inside", "step"),
        (230, 20, "before", "step"),
        (290, 110, "after", None),  # up to the autotuner's trial, which is no program
    ]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1))
def test_gaps_are_the_nanoseconds_that_nothing_covers(intervals: Sequence[tuple[int, int]]) -> None:
    start = np.array([at for at, _ in intervals])
    end = start + np.array([length for _, length in intervals])
    covered = {ns for at, length in intervals for ns in range(at, at + length)}
    begin, until = gaps(start, end)
    found = [ns for at, to in zip(begin, until, strict=True) for ns in range(at, to)]
    assert found == sorted(set(range(start.min(), end.max())) - covered)
    assert (until > begin).all()


def test_phases_stand_apart_when_asked() -> None:
    trace = trace_of("stack")
    graph = flame(trace.tables, "module", Split.PHASE, Idle.EXCLUDE)
    outermost = graph.nodes.filter(pl.col("depth") == 1)
    expected = trace.report("phase").rows
    assert dict(outermost.select("name", "total_ns").iter_rows()) == dict(
        expected.select("name", "total_ns").iter_rows()
    )
    backward = row(graph, "backward")
    assert backward["backward_ns"] == backward["total_ns"]
    assert row(graph, "forward")["forward_ns"] == row(graph, "forward")["total_ns"]


def test_ranks_are_merged_or_one_of_them_is_chosen() -> None:
    trace = trace_of("fsdp")
    merged = trace.flame("ops")
    single = [trace.select(ranks=[rank]).flame("ops") for rank in (0, 1)]
    assert [graph.total_ns for graph in single] == [thence.open(path).flame("ops").total_ns for path in SOURCES["fsdp"]]
    assert merged.total_ns == sum(graph.total_ns for graph in single)
    assert merged.ranks == (0, 1)
    assert row(merged, IDLE)["total_ns"] == sum(row(graph, IDLE)["total_ns"] for graph in single)
    with pytest.raises(UsageError, match="no rank 7: the inputs hold rank 0, 1"):
        trace.select(ranks=[7]).flame("ops")


@pytest.mark.parametrize("name", SOURCES)
def test_idle_frames_are_the_causes_and_places_of_the_idle_table(name: str) -> None:
    trace = trace_of(name)
    expected: Counter[tuple[str, ...]] = Counter()
    for cause, place, total in trace.idle().shown_rows["cause", "name", "total_ns"].iter_rows():
        expected[(cause,) if place is None else (cause, place)] += total
    found: Counter[tuple[str, ...]] = Counter()
    for frames, self_ns in trace.flame("label", idle="include").stacks():
        if frames[0] == IDLE:
            around = next(at for at, frame in enumerate(frames) if frame in CAUSES)
            found[frames[around:]] += self_ns
    assert found == expected
    assert found.total() == trace.report().idle_ns


def test_gaps_that_a_selection_makes_are_not_idle_time() -> None:
    """Work that was left out may have run in them."""
    trace = trace_of("stack")
    part = trace.select(only="attention").flame("ops", idle="include")
    assert not part.nodes["idle"].any()
    assert any("it is unknown: other work ran" in note for note in part.notes)
    kept = trace.select(warm_up="keep").flame("ops", idle="include")  # leaves nothing out
    assert paths(kept) == paths(trace.flame("ops", idle="include"))


def test_a_kind_that_there_is_not_and_a_trace_without_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match=f"choose one of {', '.join(FLAMES)}"):
        trace_of("stack").flame("weather")
    with pytest.raises(MissingData):
        flame(attribute(Tables()), "ops")


@pytest.mark.parametrize(("name", "kind"), [("jax", "op_name"), ("stack", "module"), ("compile", "label")])
def test_the_kind_that_says_most_is_chosen(name: str, kind: str) -> None:
    trace = trace_of(name)
    assert default_kind(trace.tables, FLAME_KINDS, "ops") == kind


def test_a_kernel_and_a_frame_of_one_name_stay_apart() -> None:
    sums = pl.DataFrame({name: [1, 2] for name in ("self_ns", "count", *PHASE_SUMS)})
    groups = Groups.of_paths([[("x", "frame", None), ("y", "compute", None)], [("x", "compute", None)]], sums)
    nodes = build_tree(groups, "all")
    assert sorted(nodes.filter(pl.col("name") == "x")["total_ns"]) == [1, 2]


def test_small_frames_are_put_together_and_no_time_is_lost() -> None:
    trace = trace_of("stack")
    graph = trace.flame("module")
    shown = graph.largest(30)
    assert shown.nodes.height <= 30 + 30 + 1
    check_tree(shown.nodes)
    assert shown.total_ns == graph.total_ns
    assert shown.nodes["count"][0] == graph.nodes["count"][0]
    hidden = graph.nodes.height - shown.nodes.filter(pl.col("kind") != "smaller").height
    assert f"{hidden} of {graph.nodes.height} frames were too small" in shown.notes[-1]
    assert graph.largest(graph.nodes.height) is graph
    least = keep_largest(graph.nodes, 1)[0]
    assert least["kind"].to_list() == ["root", "idle", "smaller", "smaller"]
    idle = least.filter("idle").sort("depth")  # all of it, and its causes as one frame
    assert idle["total_ns"].to_list() == [row(graph, IDLE)["total_ns"]] * 2


def test_long_kernel_names_are_short_with_the_whole_beside_them() -> None:
    nodes = trace_of("stack").flame("module").nodes
    long = nodes.filter(pl.col("full_name").is_not_null())
    names = set(trace_of("stack").tables.gpu["name"].cast(pl.String))
    assert long.height > 10
    assert set(long["full_name"]) <= names
    assert (long["name"].str.len_chars() < long["full_name"].str.len_chars()).all()
