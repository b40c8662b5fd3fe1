"""Labels joined to replays of CUDA graphs: by node id, by alignment, from an eager run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from graph_data import PID, Made, Ran, layers, replay, tables_of, truth_document

import thence
from helpers import DATA, event, kernel, opened, recording, unzipped
from thence.attribution.graphs.join import join_labels, with_places
from thence.errors import InputError, MissingData, UsageError
from thence.model.tables import Tables
from thence.readers.graph_labels import read_labels
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from thence.model.graph_labels import GraphLabels

GRAPHS = DATA / "graphs"
TRUTH = GRAPHS / "graph_truth_rank0.json"
WITH_IDS, WITHOUT_IDS = recording("torch-2.12_graph_replay_rank0"), recording("graph_replay_rank0")
EAGER = {
    WITH_IDS: GRAPHS / "torch-2.12_graph_eager_rank0.json.gz",
    WITHOUT_IDS: GRAPHS / "torch-2.11_graph_eager_rank0.json.gz",
}
SIDE, APART = "side_norm", "out_proj"


@cache
def truth() -> list[str]:
    """Label of each node, in the order of their creation."""
    nodes = json.loads(TRUTH.read_text())["nodes"]
    assert [node["id"] & 0xFFFFFFFF for node in nodes] == list(range(48))
    return [node["label"] for node in nodes]


def expected(gpu: pl.DataFrame) -> list[str]:
    """The true label of each kernel, worked out without alignment.

    With ids the low half says the node. Without: by its duration and kernel, each layer's out_proj alone
    ran on another stream (the driver chose so), and stream 7 ran all other nodes one after the other. In
    the order of their creation the layer norm is where the captured side stream had it.
    """
    if gpu["node"].null_count() == 0:
        return [truth()[number] for number in (gpu["node"] & 0xFFFFFFFF).to_list()]
    main = [label for label in truth() if label != APART]
    result = [""] * gpu.height
    for launch in gpu.with_row_index("row").sort("start").partition_by("correlation"):
        on_main = launch.filter(pl.col("stream") == 7)
        assert on_main.height == len(main) == 45
        for row, name, label in zip(on_main["row"], on_main["name"], main, strict=True):
            assert ("layer_norm" in name) == (label == SIDE)
            assert ("softmax" in name.lower()) <= (label == "attention")
            assert ("GeluCUDA" in name) <= (label == "mlp")
            result[row] = label
        for row, name in launch.filter(pl.col("stream") != 7).select("row", "name").rows():
            assert "gemm" in name
            result[row] = APART
    return result


@pytest.fixture
def labels(tmp_path: Path) -> Callable[[Path], Path]:
    def write(trace: Path) -> Path:
        (pid,) = {
            e["pid"]
            for e in json.loads(unzipped(trace))["traceEvents"]
            if e.get("cat") == "cuda_runtime"
        }
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        path = folder / "labels.json"
        path.write_text(json.dumps(truth_document(TRUTH, WITH_IDS, pid)))
        return path

    return write


def read(made: Made, folder: Path, **changes: Any) -> GraphLabels:
    path = folder / "labels.json"
    path.write_text(json.dumps(made.document(**changes)))
    return read_labels(path)


@pytest.mark.parametrize(
    ("trace", "rule"),
    [
        (WITH_IDS, "node id of the CUDA graph"),
        (WITHOUT_IDS, "alignment to the captured CUDA graph"),
    ],
    ids=["2.12 by id", "2.11 by alignment"],
)
def test_every_replayed_kernel_has_the_label_of_its_node(
    labels: Callable[[Path], Path], trace: Path, rule: str
) -> None:
    labelled = thence.open(trace).label(labels(trace))
    labelled.self_check()
    assert labelled.places["label"].to_list() == expected(labelled.gpu)
    assert labelled.places["label_rule"].unique().to_list() == [rule]
    assert labelled.gpu.height == labelled.graph_coverage.labelled == 240
    assert labelled.graph_coverage.share == 1


@pytest.mark.parametrize("trace", EAGER, ids=["2.12", "2.11"])
def test_every_replayed_kernel_gets_label_and_op_of_the_eager_run(trace: Path) -> None:
    eager = thence.open(EAGER[trace])
    labelled = thence.open(trace).label(eager=eager)
    labelled.self_check()
    assert labelled.places["label"].to_list() == expected(labelled.gpu)
    assert labelled.places["label_rule"].unique().to_list() == ["alignment to an eager run"]
    assert labelled.tables.graph_places["confidence"].unique().to_list() == [1.0]
    ops = {(SIDE, "aten::native_layer_norm"), ("qkv_proj", "aten::mm"), ("out_proj", "aten::mm")}
    assert ops <= set(labelled.places.select(pl.col("label", "op").cast(pl.String)).rows())


def test_nsight_systems_ids_join_as_well(tmp_path: Path) -> None:
    trace = thence.open(DATA.parent / "nsight" / "torch_graph.sqlite.gz")
    document = truth_document(TRUTH, WITH_IDS, 0)
    document["process"] = {}  # another run of the same program: only its node numbers are used
    (tmp_path / "labels.json").write_text(json.dumps(document))
    labelled = trace.label(tmp_path / "labels.json")
    inside = labelled.activities.filter(pl.col("graph").is_not_null())
    assert inside.height == 8 * 48  # three replays before the profiled five
    numbers = (inside["node"] & 0xFFFFFFFF).to_list()
    assert inside["label"].to_list() == [truth()[number] for number in numbers]


def test_a_training_step_of_an_h200_is_labelled_and_two_sources_agree() -> None:
    """Forward and backward on two streams, driver 13.0: marks at capture, and ranges of an eager run."""
    recorded = json.loads((GRAPHS / "block_labels.json").read_text())
    (graph,) = recorded["graphs"]
    captured = Counter("/".join(recorded["labels"][i]["path"]) for i in graph["nodes"]["label"])
    trace = thence.open(GRAPHS / "block_replay.json.gz")  # its labels lie beside
    trace.self_check()
    assert trace.graph_coverage.share == 1
    assert trace.graph_coverage.rules == {"alignment to the captured CUDA graph": trace.gpu.height}
    assert Counter(trace.places["label"].to_list()) == {x: 5 * n for x, n in captured.items()}
    plain = Trace(dataclasses.replace(trace.tables, graph_places=trace.tables.graph_places.clear()))
    by_eager = plain.label(eager=thence.open(GRAPHS / "block_eager.json.gz"))
    by_eager.self_check()
    both = pl.DataFrame(
        {
            **{name: trace.places[name].cast(pl.String) for name in ("label", "phase")},
            **{
                f"eager_{name}": by_eager.places[name].cast(pl.String)
                for name in ("label", "phase")
            },
        }
    ).drop_nulls()
    assert both.height > 0.8 * trace.gpu.height  # the eager run has no edges between streams
    assert (both["label"] == both["eager_label"]).all()
    assert (both["phase"] == both["eager_phase"]).all()
    assert {"forward", "backward"} == set(both["phase"])


@pytest.mark.parametrize("by", ["labels", "eager"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_may_be_shuffled(labels: Callable[[Path], Path], by: str, seed: int) -> None:
    trace = thence.open(WITHOUT_IDS)
    chance = random.Random(seed)
    streams = [s if s == 7 else chance.choice((143, 144, 145, 146, 7)) for s in trace.gpu["stream"]]
    gpu = trace.gpu.with_columns(stream=pl.Series(streams))
    shuffled = Trace(dataclasses.replace(trace.tables, gpu=gpu))
    labelled = (
        shuffled.label(labels(WITHOUT_IDS))
        if by == "labels"
        else shuffled.label(eager=thence.open(EAGER[WITHOUT_IDS]))
    )
    assert labelled.places["label"].to_list() == expected(trace.gpu)


@pytest.mark.parametrize("dropped", [0, 5, 47, 100, 150, 239])
@pytest.mark.parametrize("by", ["labels", "eager"])
def test_after_dropping_a_kernel_its_replay_is_refused_and_no_other(
    labels: Callable[[Path], Path], by: str, dropped: int
) -> None:
    trace = thence.open(WITHOUT_IDS)
    right = expected(trace.gpu)
    kept = [row for row in range(240) if row != dropped]
    fewer = Trace(dataclasses.replace(trace.tables, gpu=trace.gpu[kept]))
    labelled = (
        fewer.label(labels(WITHOUT_IDS))
        if by == "labels"
        else fewer.label(eager=thence.open(EAGER[WITHOUT_IDS]))
    )
    labelled.self_check()
    of_launch = trace.gpu["correlation"][dropped]
    for row, label in zip(kept, labelled.places["label"].to_list(), strict=True):
        assert label == (None if trace.gpu["correlation"][row] == of_launch else right[row])
    (note,) = [text for text in labelled.meta.warnings if str(of_launch) in text]
    assert "differ" in note
    reasons = labelled.places.filter(pl.col("label").is_null())["label_rule"].unique().to_list()
    assert len(reasons) == 1
    assert reasons[0].startswith("inside a CUDA graph: ")


def test_the_first_difference_is_the_dropped_kernel(tmp_path: Path) -> None:
    made = layers(3)
    ran = replay(made, 3, random.Random(0))
    (dropped,) = [
        r
        for r in ran
        if made.labels[r.node] == "layer1/attention" and made.kernels[r.node] == "softmax"
    ]
    tables, _ = tables_of(made, [[r for r in ran if r is not dropped]])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    (note,) = joined.notes
    assert f"node {dropped.node} (`softmax`) was due" in note
    assert "17 activities where captured graph 1 has 18 nodes" in note


def test_an_additional_kernel_is_refused_too(tmp_path: Path) -> None:
    made = layers(2)
    ran = replay(made, 2, random.Random(0))
    more = Ran(0, ran[-1].start + 10**6, 5, 0)
    tables, _ = tables_of(made, [[*ran, more]])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    assert "after the last node: activity 12 is `gemm`" in joined.notes[0]


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


def symmetric() -> Made:
    made = Made()
    first = made.node("embed", "embed")
    branches = [made.node("gemm", name, first) for name in ("q", "k", "v")]
    made.node("attention", "attention", *branches)
    return made


def test_what_cannot_be_told_apart_gets_no_label_but_the_reason(tmp_path: Path) -> None:
    made = symmetric()
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0), 0, 5000)])
    trace = Trace(with_places(tables, join_labels(tables, [read(made, tmp_path)])))
    trace.self_check()
    for node, label in zip(nodes, trace.places["label"].to_list(), strict=True):
        assert label == (None if made.kernels[node] == "gemm" else made.labels[node])
    reasons = trace.places.filter(pl.col("label").is_null())["label_rule"].to_list()
    assert set(reasons) == {"inside a CUDA graph: nodes with different labels fit it equally well"}
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
    assert joined.places["label"].to_list() == [
        None if n == last else made.labels[n] for n in nodes
    ]


def test_edges_in_a_circle_are_refused(tmp_path: Path) -> None:
    made = layers(2)
    document = made.document()
    document["graphs"][0]["edges"].append([11, 0])
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, _ = tables_of(made, [replay(made, 2, random.Random(1), 0, 1)])
    joined = join_labels(tables, [read_labels(tmp_path / "labels.json")])
    assert joined.labelled == 0
    assert "go round in circles" in joined.notes[0]


def test_an_order_that_contradicts_the_edges_is_refused(tmp_path: Path) -> None:
    made = Made()
    first = made.node("gemm", "a")
    made.node("gelu", "b", first)
    tables, _ = tables_of(made, [[Ran(1, 0, 5000, 0), Ran(0, 10_000, 5000, 0)]])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    assert "node 1 (`gelu`) began before node 0 (`gemm`)" in joined.notes[0]


def test_kernels_that_overlap_those_they_wait_for_are_aligned_by_their_starts(
    tmp_path: Path,
) -> None:
    made = layers(3)
    ran = replay(made, 1, random.Random(2), 0, 5000)
    ran = [dataclasses.replace(r, duration=r.duration + 2500) for r in ran]
    tables, nodes = tables_of(made, [ran])
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]


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
    assert joined.places["rule"].unique().to_list() == ["node id of the CUDA graph"]


def test_a_graph_instantiated_anew_is_known_by_its_numbers_and_kernels(tmp_path: Path) -> None:
    made = symmetric()
    tables, nodes = tables_of(made, [replay(made, 3, random.Random(0))], ids=True, executable=9)
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.places["label"].to_list() == [made.labels[n] for n in nodes]
    assert "instantiated anew" in joined.places["rule"][0]


def test_a_small_unknown_graph_is_not_taken_for_the_beginning_of_a_captured_one(
    tmp_path: Path,
) -> None:
    made = layers(2)
    part = Made(made.kernels[:3], made.labels[:3], made.before[:3])
    tables, _ = tables_of(part, [replay(part, 2, random.Random(0))], ids=True, executable=9)
    joined = join_labels(tables, [read(made, tmp_path)])
    assert joined.labelled == 0
    assert "3 activities where captured graph 1 has 12 nodes" in joined.notes[0]


def test_what_could_not_be_labelled_at_capture_is_told(tmp_path: Path) -> None:
    made = layers(1)
    tables, _ = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    joined = join_labels(
        tables, [read(made, tmp_path, notes=["conditional bodies have no labels"])]
    )
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
    nodes |= {
        "grid": [[1, 1, 1]] * count,
        "block": [[32, 1, 1]] * count,
        "shared_memory": [0] * count,
    }
    (tmp_path / "labels.json").write_text(json.dumps(document))
    names = [kernel["name"] for kernel in document["kernels"]]
    inside = [
        (names[k], label) for label, ks in (("first", [0, 1, 0]), ("second", [2, 0])) for k in ks
    ]
    run = Made(
        made.kernels + [k for k, _ in inside],
        made.labels + [x for _, x in inside],
        made.before + [()] * 5,
    )
    numbers = [*range(6), *range(9, 14)]  # the executable graph counts on, and left one number out
    ran = [Ran(i, i * 10_000, 5000, 7) for i in range(11)]
    tables, rows = tables_of(run, [ran], ids=True)
    node = pl.Series([(2 << 32) + numbers[row] for row in rows], dtype=pl.UInt64)
    tables = dataclasses.replace(tables, gpu=tables.gpu.with_columns(node=node))
    joined = join_labels(tables, [read_labels(tmp_path / "labels.json")])
    assert joined.places["label"].to_list() == [run.labels[row] for row in rows]
    assert "order of the nodes inside a child graph" in joined.places["rule"].to_list()


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
    assert trace.gpu["node"].to_list() == [0, 1, None]
    assert trace.gpu["graph"].to_list() == [2, 2, None]


# Labels of another process or program


def test_labels_of_another_process_are_refused(labels: Callable[[Path], Path]) -> None:
    path = labels(WITH_IDS)
    document = json.loads(path.read_text())
    document["process"]["pid"] += 1
    path.write_text(json.dumps(document))
    for trace in (WITH_IDS, WITHOUT_IDS):
        with pytest.raises(
            InputError, match=r"process \d+ captured these graphs, but the trace is of process"
        ):
            thence.open(trace).label(path)


def test_a_trace_from_before_the_process_began_is_refused(tmp_path: Path) -> None:
    made = layers(1)
    process = {"pid": PID, "started_ns": 2 * 10**18}
    tables, _ = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(made.document(process=process)))
    with pytest.raises(
        InputError, match=r"began at 2033-05-18 03:33:20.*, but the trace at 2001-09-09"
    ):
        Trace(tables).label(labels)
    process["started_ns"] = 10**18 - 1
    labels.write_text(json.dumps(made.document(process=process)))
    assert Trace(tables).label(labels).graph_coverage.share == 1


def test_other_kernels_at_the_same_nodes_are_refused_with_the_first_of_them(tmp_path: Path) -> None:
    made = layers(1)
    tables, _ = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    other = layers(1)
    other.kernels[3] = "cumsum"
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(other.document()))
    with pytest.raises(InputError, match="node 3 ran `softmax`, but `cumsum` was captured there"):
        Trace(tables).label(labels)


@pytest.mark.parametrize("pids", [(10, 11), (7, 7)], ids=["one machine", "containers"])
def test_labels_of_each_rank_go_to_that_rank(tmp_path: Path, pids: tuple[int, int]) -> None:
    made = layers(1)
    parts, files, right = [], [], []
    for rank in range(2):
        one = Made(made.kernels, [f"rank{rank}/{label}" for label in made.labels], made.before)
        tables, nodes = tables_of(
            one, [replay(one, 2, random.Random(rank), 0, 1)], ids=True, pid=pids[rank]
        )
        gpu, host = (t.with_columns(rank=pl.lit(rank, pl.Int32)) for t in (tables.gpu, tables.host))
        parts.append(dataclasses.replace(tables, gpu=gpu, host=host))
        path = tmp_path / f"labels{rank}.json"
        path.write_text(json.dumps(one.document(process={"pid": pids[rank], "rank": rank})))
        files.append(path)
        right += [one.labels[node] for node in nodes]
    from thence.model.tables import concat

    labelled = Trace(concat(parts)).label(files)
    assert labelled.places["label"].to_list() == right
    assert labelled.meta.warnings == ()


def test_labels_stay_with_their_activities_when_traces_are_put_together(
    labels: Callable[[Path], Path],
) -> None:
    from thence.model.tables import concat

    parts = [thence.open(trace).label(labels(trace)) for trace in (WITH_IDS, WITHOUT_IDS)]
    whole = Trace(concat([part.tables for part in parts]))
    whole.self_check()
    assert whole.places["label"].to_list() == [x for part in parts for x in expected(part.gpu)]
    read_only = dataclasses.replace(parts[0].tables, graph_labels=(read_labels(labels(WITH_IDS)),))
    both = concat([parts[1].tables, read_only])  # rank 0 is taken: the second becomes 1
    assert [one.process.rank for one in both.graph_labels] == [1]


# Automatically


def test_labels_beside_the_trace_are_joined_and_said_so(
    tmp_path: Path, labels: Callable[[Path], Path]
) -> None:
    (tmp_path / "trace.json.gz").write_bytes(WITHOUT_IDS.read_bytes())
    (tmp_path / "my_labels.json").write_bytes(labels(WITHOUT_IDS).read_bytes())
    for inputs in (
        [tmp_path / "trace.json.gz"],
        [tmp_path / "trace.json.gz", tmp_path / "my_labels.json"],
    ):
        trace = thence.open(*inputs)
        assert trace.places["label"].to_list() == expected(trace.gpu)
        assert any(
            "240 of 240 activities" in text and "my_labels.json" in text
            for text in trace.meta.warnings
        )


@pytest.mark.parametrize(
    "content", ["{", '{"format": "thence.graph-labels", "ver'], ids=["no", "cut"]
)
def test_labels_beside_that_do_not_fit_are_a_warning_only(
    tmp_path: Path, labels: Callable[[Path], Path], content: str
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "trace.json.gz").write_bytes(WITHOUT_IDS.read_bytes())
    (folder / "labels.json").write_text(content)
    for given in (folder, folder / "trace.json.gz"):
        trace = thence.open(given)
        assert trace.gpu.height == 240
        assert trace.tables.graph_places.is_empty()
        if "format" in content:
            assert any("labels.json" in text for text in trace.meta.warnings)
    document = json.loads(labels(WITHOUT_IDS).read_text())
    document["process"]["pid"] += 1
    (folder / "labels.json").write_text(json.dumps(document))
    trace = thence.open(folder / "trace.json.gz")
    assert trace.tables.graph_places.is_empty()
    assert any("captured these graphs" in text for text in trace.meta.warnings)


# What labels bring


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
    assert trace.places["label"].to_list() == [f"decode/{made.labels[n]}" for n in nodes]
    assert trace.flame("label").nodes["name"].to_list()[:2] == ["GPU time", "decode"]


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
    rows = trace.collectives
    assert rows["gpu"].to_list() == [0, 1, 2]
    assert rows["bytes"].to_list() == [2000] * 3  # 1000 elements of 2 bytes
    assert rows["group_description"].to_list() == ["tp"] * 3
    assert rows["sequence"].to_list() == [3] * 3
    times = trace.collective_times("keep").rows
    assert times["instance"].n_unique() == 3 if "instance" in times.columns else times.height == 3
    assert trace.timeline(("lane", "process-group")).lanes["lane"].unique().to_list() == ["0 (tp)"]
    (tmp_path / "out").mkdir()  # where no labels lie beside
    trace.write(tmp_path / "out" / "out.json")
    again = thence.open(tmp_path / "out" / "out.json")
    again.self_check()
    assert again.collectives["bytes"].to_list() == [2000] * 3
    assert again.places["label"].to_list() == ["all_reduce"] * 3
    assert again.tables.graph_places["metadata"].to_list() == ['{"bucket":"gradients"}'] * 3


def test_replays_of_a_collective_are_told_apart_on_all_ranks() -> None:
    from thence.analysis.alignment import instances
    from thence.model.tables import COLLECTIVES, GPU, GRAPH_PLACES

    gpu = GPU.frame(
        {"rank": [0, 0, 1, 1], "device": [0] * 4, "kind": ["kernel"] * 4, "name": ["nccl"] * 4,
         "start": [0, 100, 7, 107], "duration": [50] * 4, "correlation": [1, 2, 8, 9]}
    )  # fmt: skip
    described = COLLECTIVES.frame(
        {
            "gpu": range(4),
            "collective": ["all_reduce"] * 4,
            "group_size": [2] * 4,
            "sequence": [3] * 4,
        }
    )
    eager = Tables(gpu, collectives=described)
    assert instances(eager)["instance"].n_unique() == 1  # parts of one collective
    graphed = dataclasses.replace(eager, graph_places=GRAPH_PLACES.frame({"gpu": range(4)}))
    first, second, third, fourth = instances(graphed)["instance"].to_list()
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


# Eager runs


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
def test_the_iteration_is_found_among_others_and_extra_kernels_reported(iterations: int) -> None:
    made = layers(4)
    made.node("softmax_loss", "loss", len(made.kernels) - 1)
    eager = eager_tables(made, iterations, extra=2)
    tables, nodes = tables_of(
        made, [replay(made, 3, random.Random(i), 10**9 * i, 1) for i in range(3)]
    )
    labelled = Trace(tables).label(eager=Trace(eager))
    labelled.self_check()
    assert labelled.places["label"].to_list() == [made.labels[n] for n in nodes]


def test_other_kernels_in_the_eager_run_are_refused() -> None:
    made = layers(2)
    other = layers(2)
    other.kernels[3] = "triton_poi_fused_softmax"
    tables, _ = tables_of(made, [replay(made, 3, random.Random(0), 0, 1)])
    with pytest.raises(MissingData, match=r"first differ at activity|no kernel like activity"):
        Trace(tables).label(eager=Trace(eager_tables(other, 1)))
