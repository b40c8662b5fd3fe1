"""Replays of graphs made by hand, aligned with what was captured, or with an eager run."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import TYPE_CHECKING

import polars as pl
import pytest

from graph_data import Made, Ran, layers, read, replay, symmetric, tables_of
from thence.attribution.cuda_graphs.assigned_labels import with_places
from thence.attribution.cuda_graphs.join_labels import join_labels
from thence.errors import MissingData
from thence.readers.label_files import read_labels
from thence.trace import Trace

if TYPE_CHECKING:
    from pathlib import Path

    from thence.model.tables import Tables


def test_a_lost_kernel_leaves_open_only_what_has_its_name(tmp_path: Path) -> None:
    made = layers(3)
    ran = replay(made, 3, random.Random(0))
    (dropped,) = [r for r in ran if made.labels[r.node] == "layer1/attention" and made.kernels[r.node] == "softmax"]
    tables, nodes = tables_of(made, [[r for r in ran if r is not dropped]])
    joined = join_labels(tables, [read(made, tmp_path)])
    right = [None if made.kernels[n] == "softmax" else made.labels[n] for n in nodes]
    assert joined.places["label"].to_list() == right
    assert right.count(None) == 2
    (note,) = joined.notes
    assert "2 of its 17 activities and 3 nodes of captured graph 1 have no counterpart" in note


def test_an_additional_kernel_leaves_open_only_what_has_its_name(tmp_path: Path) -> None:
    made = layers(2)
    ran = replay(made, 2, random.Random(0))
    more = Ran(0, ran[-1].start + 10**6, 5, 0)
    tables, nodes = tables_of(made, [[*ran, more]])
    joined = join_labels(tables, [read(made, tmp_path)])
    right = [None if made.kernels[n] == "gemm" else made.labels[n] for n in nodes]
    assert joined.places["label"].to_list() == right
    assert right.count(None) == 5


def test_of_too_many_differences_the_first_is_reported(tmp_path: Path) -> None:
    made = layers(3)
    ran = [r for r in replay(made, 3, random.Random(0)) if r.node not in (3, 9)]
    tables, _ = tables_of(made, [ran])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    (note,) = joined.notes
    assert "node 3 (`softmax`) was due" in note
    assert "16 activities where captured graph 1 has 18 nodes" in note


def test_several_replays_behind_one_launch_are_taken_apart(tmp_path: Path) -> None:
    made = layers(4)
    chance = random.Random(3)
    parts = [replay(made, 3, chance, 10**9 * i, 1) for i in range(5)]
    tables, nodes = tables_of(made, [[r for part in parts for r in part]])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]


def test_copies_and_sets_are_aligned_like_kernels(tmp_path: Path) -> None:
    made = layers(2)
    document = made.document()
    document["graphs"][0]["nodes"]["type"][3] = "memset"
    document["graphs"][0]["nodes"]["kernel"][3] = -1
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, nodes = tables_of(made, [replay(made, 2, random.Random(1), 0, 1)])
    kinds = ["memset" if node == 3 else "kernel" for node in nodes]
    gpu = tables.gpu.with_columns(kind=pl.Series(kinds, dtype=tables.gpu.schema["kind"]))
    labels = read_labels(tmp_path / "labels.json")
    joined = join_labels(dataclasses.replace(tables, gpu=gpu), [labels])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]
    # A producer may leave sets out: the kernels are labelled all the same.
    only = [row for row, kind in enumerate(kinds) if kind == "kernel"]
    joined = join_labels(dataclasses.replace(tables, gpu=gpu[only]), [labels])
    assert joined.places["label"].to_list() == [made.labels[nodes[row]] for row in only]


def test_what_cannot_be_told_apart_gets_no_label_but_the_reason(tmp_path: Path) -> None:
    made = symmetric()
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0), 0, 5000)])
    trace = Trace(with_places(tables, join_labels(tables, [read(made, tmp_path)])))
    trace.self_check()
    for node, label in zip(nodes, trace.tables.places["label"].to_list(), strict=True):
        assert label == (None if made.kernels[node] == "gemm" else made.labels[node])
    reasons = trace.tables.places.filter(pl.col("label").is_null())["label_rule"].to_list()
    assert set(reasons) == {"graph_ambiguous"}
    assert trace.graph_coverage.confidence == pytest.approx(2 / 5)


def test_branches_are_told_apart_by_what_comes_after_them(tmp_path: Path) -> None:
    made = Made()
    root = made.node("embed", "embed")
    a, b = made.node("gemm", "a", root), made.node("gemm", "b", root)
    made.node("relu", "a", a)
    made.node("tanh", "b", b)
    # The second gemm ends after relu began: it cannot be the one that relu waited for.
    times = [(0, 5000), (6000, 5000), (7000, 50_000), (12_000, 5000), (60_000, 5000)]
    ran = [Ran(node, *when, node) for node, when in enumerate(times)]
    tables, nodes = tables_of(made, [ran])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]


def test_of_two_graphs_with_equal_kernels_only_what_both_say_is_taken(tmp_path: Path) -> None:
    made = layers(2)
    document = made.document()
    other = json.loads(json.dumps(document["graphs"][0]))
    other |= {"id": 5, "executables": [6]}
    other["nodes"]["label"][-1] = 0
    document["graphs"].append(other)
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, nodes = tables_of(made, [replay(made, 2, random.Random(1), 0, 1)])
    joined = join_labels(tables, [read_labels(tmp_path / "labels.json")])
    last = len(made.labels) - 1
    assert joined.places["label"].to_list() == [None if n == last else made.labels[n] for n in nodes]


def test_edges_in_a_circle_are_refused(tmp_path: Path) -> None:
    made = layers(2)
    document = made.document()
    document["graphs"][0]["edges"].append([11, 0])
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, _ = tables_of(made, [replay(made, 2, random.Random(1), 0, 1)])
    joined = join_labels(tables, [read_labels(tmp_path / "labels.json")])
    assert joined.labelled == 0
    assert "contain a cycle" in joined.notes[0]


def test_an_order_that_contradicts_the_edges_is_refused(tmp_path: Path) -> None:
    made = Made()
    first = made.node("gemm", "a")
    made.node("gelu", "b", first)
    tables, _ = tables_of(made, [[Ran(1, 0, 5000, 0), Ran(0, 10_000, 5000, 0)]])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    assert "node 1 (`gelu`) began before node 0 (`gemm`)" in joined.notes[0]


def test_kernels_that_overlap_those_they_wait_for_are_aligned_by_their_starts(tmp_path: Path) -> None:
    made = layers(3)
    ran = replay(made, 1, random.Random(2), 0, 5000)
    ran = [dataclasses.replace(r, duration=r.duration + 2500) for r in ran]
    tables, nodes = tables_of(made, [ran])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]


def eager_tables(made: Made, iterations: int, extra: int = 0) -> Tables:
    """An eager run: everything launched in order, the side work on a stream of its own."""
    launches: list[list[Ran]] = []
    at = 0
    for _ in range(iterations):
        for node in range(len(made.kernels)):
            launches.append([Ran(node, at, 5000, 20 if "side" in str(made.labels[node]) else 7)])
            at += 10_000
        for _ in range(extra):
            launches.append([Ran(len(made.kernels), at, 5000, 7)])
            at += 10_000
    run = Made([*made.kernels, "optimizer"], [*made.labels, None], [*made.before, ()])
    tables, _ = tables_of(run, launches)
    host = tables.host.with_columns(name=pl.lit("cudaLaunchKernel").cast(pl.Categorical()))
    ranges = host.with_columns(
        category=pl.lit("range", host.schema["category"]),
        name=pl.Series([run.labels[ran[0].node] or "optimizer" for ran in launches], dtype=pl.Categorical()),
        start=pl.col("start") - 1, duration=pl.lit(5, pl.Int64), correlation=pl.lit(None, pl.Int64),
    )  # fmt: skip
    both = pl.concat([ranges, host]).with_row_index("old").sort("start", maintain_order=True)
    parent = [None if i % 2 == 0 else i - 1 for i in range(both.height)]
    host = both.drop("old").with_columns(parent=pl.Series(parent, dtype=pl.Int32))
    return dataclasses.replace(tables, host=host)


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_iteration_is_found_among_others_and_kernels_of_its_own(iterations: int) -> None:
    made = layers(4)
    made.node("softmax_loss", "loss", len(made.kernels) - 1)
    eager = eager_tables(made, iterations, extra=2)
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(i), 10**9 * i, 1) for i in range(3)])
    labelled = Trace(tables).label(eager=Trace(eager))
    labelled.self_check()
    assert labelled.tables.places["label"].to_list() == [made.labels[n] for n in nodes]


def test_another_kernel_in_the_eager_run_leaves_only_its_counterpart_open() -> None:
    made = layers(2)
    other = layers(2)
    other.kernels[3] = "triton_poi_fused_softmax"
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0), 0, 1)])
    labelled = Trace(tables).label(eager=Trace(eager_tables(other, 1)))
    right = [None if made.kernels[n] == "softmax" else made.labels[n] for n in nodes]
    assert labelled.tables.places["label"].to_list() == right
    other.kernels[5] = "triton_poi_fused_add"
    with pytest.raises(MissingData, match="at most 10 of its 12 activities can be matched in order"):
        Trace(tables).label(eager=Trace(eager_tables(other, 1)))
