"""Nodes known by their ids, and what their labels bring: paths, lanes, collectives."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from graph_data import Made, Ran, layers, read, replay, symmetric, tables_of
from helpers import event, kernel, opened
from thence.attribution.cuda_graphs.assigned_labels import with_places
from thence.attribution.cuda_graphs.join_labels import join_labels
from thence.errors import MissingData, UsageError
from thence.model.tables import Tables
from thence.readers.label_files import read_labels
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


IDS: dict[str, Callable[[Tables], Tables]] = {
    "full ids": lambda tables: tables,
    "numbers alone": lambda tables: dataclasses.replace(
        tables, gpu=tables.gpu.with_columns(node=pl.col("node") & 0xFFFFFFFF)
    ),
    "no graph id": lambda tables: dataclasses.replace(
        tables, gpu=tables.gpu.with_columns(graph=pl.lit(None, pl.UInt64))
    ),
}


@pytest.mark.parametrize("change", IDS.values(), ids=IDS.keys())
def test_ids_join_however_wide_they_are(tmp_path: Path, change: Callable[[Tables], Tables]) -> None:
    made = symmetric()  # which alignment could not tell apart
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0))], ids=True)
    joined = join_labels(change(tables), [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]
    assert joined.places["rule"].unique().to_list() == ["graph_node"]


def test_a_graph_instantiated_anew_is_known_by_its_numbers_and_kernels(tmp_path: Path) -> None:
    made = symmetric()
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0))], ids=True, executable=9)
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]
    assert joined.places["rule"][0] == "graph_number"


def test_a_small_unknown_graph_is_not_taken_for_the_beginning_of_a_captured_one(tmp_path: Path) -> None:
    made = layers(2)
    part = Made(made.kernels[:3], made.labels[:3], made.before[:3])
    tables, _ = tables_of(part, [replay(part, 2, random.Random(0))], ids=True, executable=9)
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    assert "3 activities where captured graph 1 has 12 nodes" in joined.notes[0]


def test_what_could_not_be_labelled_at_capture_is_told(tmp_path: Path) -> None:
    made = layers(1)
    tables, _ = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    joined = join_labels(tables, [read(made, tmp_path, notes=["conditional bodies have no labels"])])
    assert joined.notes == (f"{tmp_path}/labels.json: conditional bodies have no labels",)


def test_nodes_of_child_graphs_are_numbered_behind_all_others(tmp_path: Path) -> None:
    made = layers(1)
    document = made.document()
    nodes = document["graphs"][0]["nodes"]
    # Two nodes more hold child graphs of three and two kernels; labels count on.
    for parent, label, kernels in ((6, "first", [0, 1, 0]), (7, "second", [2, 0])):
        document["labels"].append({"path": [label], "phase": None, "lane": None, "metadata": {}})
        nodes["number"].append(parent)
        nodes["type"].append("graph")
        nodes["parent"].append(-1)
        nodes["label"].append(-1)
        nodes["kernel"].append(-1)
        for number, of_kernel in enumerate(kernels):
            nodes["number"].append(len(document["labels"]) * 100 + number)
            nodes["type"].append("kernel")
            nodes["parent"].append(parent)
            nodes["label"].append(len(document["labels"]) - 1)
            nodes["kernel"].append(of_kernel)
    count = len(nodes["number"])
    nodes |= {"grid": [[1, 1, 1]] * count, "block": [[32, 1, 1]] * count, "shared_memory": [0] * count}
    (tmp_path / "labels.json").write_text(json.dumps(document))
    names = [kernel["name"] for kernel in document["kernels"]]
    inside = [(names[k], label) for label, ks in (("first", [0, 1, 0]), ("second", [2, 0])) for k in ks]
    run = Made(made.kernels + [k for k, _ in inside], made.labels + [x for _, x in inside], made.before + [()] * 5)
    numbers = [*range(6), *range(9, 14)]  # the executable graph counts on, and left one number out
    ran = [Ran(i, i * 10_000, 5000, 7) for i in range(11)]
    tables, rows = tables_of(run, [ran], ids=True)
    node = pl.Series([(2 << 32) + numbers[row] for row in rows], dtype=pl.UInt64)
    tables = dataclasses.replace(tables, gpu=tables.gpu.with_columns(node=node))
    joined = join_labels(tables, [read_labels(tmp_path / "labels.json")])
    assert joined.places["label"].to_list() == [run.labels[row] for row in rows]
    assert "graph_child" in joined.places["rule"].to_list()


def test_torch_annotations_join_by_exact_id(tmp_path: Path) -> None:
    made = symmetric()
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0))], ids=True, executable=7)
    annotations = {(7 << 32) + n: [{"name": label}] for n, label in enumerate(made.labels)}
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps(annotations))
    joined = join_labels(tables, [read_labels(path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]
    other, _ = tables_of(made, [replay(made, 3, random.Random(0))], ids=True, executable=8)
    assert join_labels(other, [read_labels(path)]).labelled == 0


def test_an_exporter_that_writes_numbers_alone_writes_0_for_the_first_node(tmp_path: Path) -> None:
    arguments = [{"graph id": 2, "graph node id": n} for n in range(2)]
    events = [kernel(1, 10 + 10 * n, args=args) for n, args in enumerate(arguments)]
    trace = opened(tmp_path, [*events, kernel(3, 50, args={"graph id": 0, "graph node id": 0})])
    assert trace.tables.gpu["node"].to_list() == [0, 1, None]
    assert trace.tables.gpu["graph"].to_list() == [2, 2, None]


def test_a_label_stands_below_the_range_around_the_launch(tmp_path: Path) -> None:
    made = layers(1)
    tables, nodes = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    around = tables.host.with_columns(
        category=pl.lit("range", tables.host.schema["category"]), name=pl.lit("decode").cast(pl.Categorical()),
        start=pl.col("start") - 5, duration=pl.lit(50, pl.Int64), correlation=pl.lit(None, pl.Int64),
    )  # fmt: skip
    host = pl.concat([around, tables.host.with_columns(parent=pl.lit(0, pl.Int32))])
    tables = dataclasses.replace(tables, host=host)
    joined = join_labels(tables, [read(made, tmp_path)])
    trace = Trace(with_places(tables, joined))
    assert trace.tables.places["label"].to_list() == [f"decode/{made.labels[n]}" for n in nodes]
    assert trace.flame("label").nodes["name"].to_list()[:2] == ["GPU and idle time", "decode"]


def collective_document(made: Made) -> dict[str, Any]:
    document = made.document()
    document["labels"][0]["metadata"] = {
        "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "Group size": 2,
        "dtype": "BFloat16", "Process Group Name": "0", "Process Group Description": "tp",
        "Process Group Ranks": [0, 1], "Seq": 3, "bucket": "gradients",
    }  # fmt: skip
    return document


def test_a_graphed_collective_reads_like_an_eager_one(tmp_path: Path) -> None:
    made = Made()
    made.node("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce")
    (tmp_path / "labels.json").write_text(json.dumps(collective_document(made)))
    launches = [replay(made, 1, random.Random(0), 10**6 * i, 5000) for i in range(3)]
    tables, _ = tables_of(made, launches)
    trace = Trace(tables).label(tmp_path / "labels.json")
    trace.self_check()
    rows = trace.tables.collectives
    assert rows["gpu"].to_list() == [0, 1, 2]
    assert rows["bytes"].to_list() == [2000] * 3  # 1000 elements of 2 bytes
    assert rows["group_description"].to_list() == ["tp"] * 3
    assert rows["sequence"].to_list() == [3] * 3
    times = trace.collectives("keep").rows
    assert times["instance"].n_unique() == 3 if "instance" in times.columns else times.height == 3
    assert trace.timeline(("lane", "process-group")).lanes["lane"].unique().to_list() == ["0 (tp)"]
    (tmp_path / "out").mkdir()  # where no labels lie beside
    trace.convert(tmp_path / "out" / "out.json")
    again = thence.open(tmp_path / "out" / "out.json")
    again.self_check()
    assert again.tables.collectives["bytes"].to_list() == [2000] * 3
    assert again.tables.places["label"].to_list() == ["all_reduce"] * 3
    assert again.recorded.graph_places["metadata"].to_list() == ['{"bucket":"gradients"}'] * 3


def test_replays_of_a_collective_are_told_apart_on_all_ranks() -> None:
    from thence.analysis.collectives.instances import collective_instances
    from thence.attribution.attribute import attribute
    from thence.model.tables import COLLECTIVES, GPU, GRAPH_PLACES

    gpu = GPU.frame(
        {"rank": [0, 0, 1, 1], "device": [0] * 4, "kind": ["kernel"] * 4, "name": ["nccl"] * 4,
         "start": [0, 100, 7, 107], "duration": [50] * 4, "correlation": [1, 2, 8, 9]}
    )  # fmt: skip
    described = COLLECTIVES.frame(
        {"gpu": range(4), "collective": ["all_reduce"] * 4, "group_size": [2] * 4, "sequence": [3] * 4}
    )
    eager = Tables(gpu, collectives=described)
    assert collective_instances(attribute(eager)).rows["instance"].n_unique() == 1  # parts of one collective
    graphed = dataclasses.replace(eager, graph_places=GRAPH_PLACES.frame({"gpu": range(4)}))
    found = collective_instances(attribute(graphed)).rows
    first, second, third, fourth = found["instance"].to_list()
    assert (first, second) == (third, fourth)
    assert first != second


def test_a_lane_named_by_a_mark_is_shown(tmp_path: Path) -> None:
    made = layers(1)
    document = made.document()
    for label in document["labels"]:
        label["lane"] = "side work" if label["path"][-1] == "side" else None
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, nodes = tables_of(made, [replay(made, 2, random.Random(0))], ids=True)
    trace = Trace(tables).label(tmp_path / "labels.json")
    lanes = trace.timeline(("lane",)).lanes["lane"].to_list()
    assert lanes == ["side work" if "side" in str(made.labels[n]) else None for n in nodes]
    shown = dict(trace.graph_lanes().lanes.select("lane", "count").rows())
    assert shown == {"side work": 2, "layer0/attention": 2, "layer0/qkv": 1, "layer0/mlp": 1}


def test_label_needs_one_source_and_a_graph(tmp_path: Path) -> None:
    trace = opened(tmp_path, [event("cpu_op", "aten::mm", 1, 2), kernel(1, 5)])
    for arguments in ({}, {"labels": "x.json", "eager": trace}):
        with pytest.raises(UsageError):
            trace.label(**arguments)  # type: ignore[arg-type]
    with pytest.raises(MissingData, match="nothing in it ran in a CUDA graph"):
        trace.label(eager=trace)
