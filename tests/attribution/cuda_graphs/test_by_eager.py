"""Labels from an eager run: iterations that a graph repeats, names of kernels, runs without labels."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import polars as pl
import pytest

import thence
from graph_data import Made, Ran, as_eager, replay, tables_of
from helpers import TORCH, recording, shared, written
from thence.attribution.cuda_graphs.by_eager import ByKernelName
from thence.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from thence.attribution.cuda_graphs.assigned_labels import AssignedLabels
    from thence.model.tables import Tables

TIMES, KERNELS, REPLAYS = 4, 15, 4
AMBIGUOUS_NAMES = {"elementwise"}


def iteration() -> Made:
    """One call of a function: fifteen kernels on a main and a side stream, two of one name in two labels."""
    made = Made()
    names = [
        ("gemm_qkv", "qkv"), ("copy", "attention"), ("gemm_scores", "attention"), ("elementwise", "attention"),
        ("softmax", "attention"), ("gemm_context", "attention"), ("permute", "attention"), ("gemm_out", "out"),
        ("gemm_up", "mlp"), ("gelu", "mlp"), ("elementwise", "mlp"), ("gemm_down", "mlp"), ("add", "mlp"),
    ]  # fmt: skip
    last: tuple[int, ...] = ()
    for name, label in names:
        last = (made.node(name, label, *last),)
    side = made.node("norm_stats", "norm", 0)
    made.node("norm_apply", "norm", side)
    return made


def repeated(one: Made, times: int) -> Made:
    """The function called several times in a row while it is captured: the main stream goes on."""
    made = Made()
    main_end: tuple[int, ...] = ()
    for _ in range(times):
        first = len(made.kernels)
        for node, kernel in enumerate(one.kernels):
            before = tuple(first + b for b in one.before[node])
            made.node(kernel, one.labels[node], *(before if node else main_end))
        main_end = (first + 12, first + 14)  # the side stream is joined
    return made


def eager_run(one: Made, *, labelled: bool = True) -> Tables:
    """One call of it without a graph, each launch in a range (or, without labels, an operator) of its own."""
    ran = [[Ran(node, 10_000 * node, 5000, int(node > 12))] for node in range(len(one.kernels))]
    tables, of_row = tables_of(one, ran)
    run = as_eager(tables, [str(one.labels[node]) for node in of_row])
    if labelled:
        return run
    ranges = pl.col("category") == "range"
    category = pl.when(ranges).then(pl.lit("op", run.host.schema["category"]))
    return dataclasses.replace(run, host=run.host.with_columns(category=category.otherwise("category")))


def replays(made: Made, seed: int) -> tuple[Trace, list[str | None]]:
    """Replays one after the other, on streams that the driver chose, and the true label of each row."""
    chance = random.Random(seed)
    launches, at = [], 0
    for _ in range(REPLAYS):
        launches.append(replay(made, 5, chance, at, 1))
        at = max(r.start + r.duration for r in launches[-1]) + 50_000
    tables, nodes = tables_of(made, launches)
    return Trace(tables), [made.labels[node] for node in nodes]


@pytest.mark.parametrize("seed", range(2))
def test_an_eager_run_labels_every_repetition_inside_the_graph(seed: int) -> None:
    one = iteration()
    trace, truth = replays(repeated(one, TIMES), seed)
    assert trace.tables.gpu.height == TIMES * KERNELS * REPLAYS == 240
    # A name is enough for 208 of them: what names alone could do.
    single = sum(name not in AMBIGUOUS_NAMES for name in trace.tables.gpu["name"].cast(pl.String))
    assert single == 240 - 2 * TIMES * REPLAYS
    labelled = trace.label(eager=Trace(eager_run(one)))
    labelled.self_check()
    assert labelled.tables.places["label"].to_list() == truth
    assert labelled.graph_coverage.rules == {"eager_repetition": 240}
    assert any("4 times" in text for text in labelled.meta.warnings)


def test_a_kernel_that_the_eager_run_lacks_costs_the_others_nothing() -> None:
    one = iteration()
    graph = repeated(one, TIMES)
    graph.node("fill", None)
    trace, truth = replays(graph, 0)
    labelled = trace.label(eager=Trace(eager_run(one)))
    labelled.self_check()
    assert labelled.tables.places["label"].to_list() == truth
    assert labelled.graph_coverage.rules == {"eager_repetition": 240}
    foreign = labelled.tables.places.filter(pl.col("label").is_null())
    assert foreign["label_rule"].to_list() == ["graph_foreign"] * REPLAYS


def test_where_order_proves_nothing_a_name_with_one_label_is_enough_and_says_so() -> None:
    one = iteration()
    graph = repeated(one, TIMES)
    for n in range(8):  # more than a tenth of the graph
        graph.node(f"fill{n}", None)
    trace, truth = replays(graph, 0)
    labelled = trace.label(eager=Trace(eager_run(one)))
    names = trace.tables.gpu["name"].cast(pl.String).to_list()
    for name, label, right in zip(names, labelled.tables.places["label"], truth, strict=True):
        assert label == (None if name in AMBIGUOUS_NAMES else right)
    assert labelled.graph_coverage.rules == {"eager_kernel_name": 208}
    assert any("that all launches of their kernel have in common" in t for t in labelled.meta.warnings)


def test_names_say_nothing_where_most_kernels_are_of_another_program() -> None:
    one, other = iteration(), iteration()
    other.kernels[:8] = [f"other{n}" for n in range(8)]
    trace, _ = replays(repeated(other, 2), 0)
    with pytest.raises(thence.MissingData, match="no kernel like activity"):
        trace.label(eager=Trace(eager_run(one)))


def test_names_that_ran_more_often_than_their_share_say_nothing() -> None:
    one = iteration()
    graph = repeated(one, 1)
    graph.node("softmax", "elsewhere")  # the same kernel again, where the eager run has none
    trace, _ = replays(graph, 0)
    labelled = trace.label(eager=Trace(eager_run(one)))
    by_name = dict(zip(trace.tables.gpu["name"].cast(pl.String), labelled.tables.places["label"], strict=True))
    assert by_name["softmax"] is None
    assert by_name["gelu"] == "mlp"


def test_copies_of_a_graph_get_nothing_from_a_run_without_copies() -> None:
    memcpy, memset = 0, 1
    run = ByKernelName(np.array([memcpy]), np.zeros(memset + 1, np.int64), np.full(2, -1), pl.DataFrame())
    replay = SimpleNamespace(replays=SimpleNamespace(variant=np.zeros(2, np.int64)), number=np.full(2, -3))
    assert run.put(cast("AssignedLabels", replay), np.array([[0, 1]])) is None


def test_operators_are_joined_where_there_are_no_labels() -> None:
    one = iteration()
    trace, truth = replays(repeated(one, TIMES), 1)
    labelled = trace.label(eager=Trace(eager_run(one, labelled=False)))
    assert labelled.tables.places["op"].to_list() == truth
    assert labelled.tables.places["label"].null_count() == 240


def first_layer(source: Path, target: Path) -> Path:
    """The recorded eager run up to its second layer: all that began before the second ``qkv_proj``."""
    document = json.loads(gzip.decompress(source.read_bytes()))
    events: list[Any] = document["traceEvents"]
    starts = sorted(e["ts"] for e in events if e.get("cat") == "user_annotation" and e["name"] == "qkv_proj")
    calls = {e["args"]["correlation"] for e in events if e.get("cat", "").startswith("cuda_") and e["ts"] < starts[1]}
    kept = [
        e
        for e in events
        if (e["args"]["correlation"] in calls if e.get("cat") == "kernel" else e.get("ts", 0) < starts[1])
    ]
    return written(target, kept, baseTimeNanoseconds=document["baseTimeNanoseconds"])


@pytest.mark.parametrize("version", ["torch-2.11", "torch-2.12"])
def test_one_recorded_layer_labels_three_in_each_of_five_recorded_replays(version: str, tmp_path: Path) -> None:
    """The truth is what was recorded at capture: node n of the graph had the label of truth[n]."""
    eager = first_layer(TORCH / "graphs" / f"{version}_graph_eager_rank0.json.gz", tmp_path / "eager.json")
    name = "graph_replay_rank0" if version == "torch-2.11" else "torch-2.12_graph_replay_rank0"
    trace = thence.open(recording(name))
    labelled = trace.label(eager=thence.open(eager))
    truth = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    expected = shared(recording("torch-2.12_graph_replay_rank0")) if version == "torch-2.12" else None
    assert labelled.graph_coverage.labelled == 240
    assert labelled.graph_coverage.rules == {"eager_repetition": 240}
    if expected is not None:
        nodes = expected.tables.gpu["node"].cast(pl.UInt64).to_list()
        right = [truth[node & 0xFFFFFFFF]["label"] for node in nodes]
        assert labelled.tables.places["label"].to_list() == right
