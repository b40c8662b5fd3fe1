"""Labels joined to replays of CUDA graphs in recordings: by node id, by alignment, from an eager run."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from graph_data import PID, Made, layers, replay, tables_of, truth_document
from helpers import DATA, TORCH, recording, unzipped
from thence.errors import InputError
from thence.readers.label_files import read_labels
from thence.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


GRAPHS = TORCH / "graphs"
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
        (pid,) = {e["pid"] for e in json.loads(unzipped(trace))["traceEvents"] if e.get("cat") == "cuda_runtime"}
        folder = tmp_path / "elsewhere"
        folder.mkdir(exist_ok=True)
        path = folder / "labels.json"
        path.write_text(json.dumps(truth_document(TRUTH, WITH_IDS, pid)))
        return path

    return write


@pytest.mark.parametrize(
    ("trace", "rule"),
    [(WITH_IDS, "graph_node"), (WITHOUT_IDS, "graph_alignment")],
    ids=["2.12 by id", "2.11 by alignment"],
)
def test_every_replayed_kernel_has_the_label_of_its_node(
    labels: Callable[[Path], Path], trace: Path, rule: str
) -> None:
    labelled = thence.open(trace).label(labels(trace))
    labelled.self_check()
    assert labelled.tables.places["label"].to_list() == expected(labelled.tables.gpu)
    assert labelled.tables.places["label_rule"].unique().to_list() == [rule]
    assert labelled.tables.gpu.height == labelled.graph_coverage.labelled == 240
    assert labelled.graph_coverage.share == 1


@pytest.mark.parametrize("trace", EAGER, ids=["2.12", "2.11"])
def test_every_replayed_kernel_gets_label_and_op_of_the_eager_run(trace: Path) -> None:
    eager = thence.open(EAGER[trace])
    labelled = thence.open(trace).label(eager=eager)
    labelled.self_check()
    assert labelled.tables.places["label"].to_list() == expected(labelled.tables.gpu)
    assert labelled.tables.places["label_rule"].unique().to_list() == ["eager_alignment"]
    assert labelled.recorded.graph_places["confidence"].unique().to_list() == [1.0]
    # Neither eager run was recorded with with_stack=True: it holds no modules and no lines, and is why there are none.
    for kind in ("module", "source"):
        assert labelled.tables.places[f"{kind}_rule"].unique().to_list() == ["graph_no_place"]
    ops = {(SIDE, "aten::native_layer_norm"), ("qkv_proj", "aten::mm"), ("out_proj", "aten::mm")}
    assert ops <= set(labelled.tables.places.select(pl.col("label", "op").cast(pl.String)).rows())


def test_nsight_systems_ids_join_as_well(tmp_path: Path) -> None:
    trace = thence.open(DATA / "nsight" / "torch_graph.sqlite.gz")
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
    assert trace.graph_coverage.rules == {"graph_alignment": trace.tables.gpu.height}
    assert Counter(trace.tables.places["label"].to_list()) == {x: 5 * n for x, n in captured.items()}
    plain = Trace(dataclasses.replace(trace.recorded, graph_places=trace.recorded.graph_places.clear()))
    by_eager = plain.label(eager=thence.open(GRAPHS / "block_eager.json.gz"))
    by_eager.self_check()
    both = pl.DataFrame(
        {
            **{name: trace.tables.places[name].cast(pl.String) for name in ("label", "phase")},
            **{f"eager_{name}": by_eager.tables.places[name].cast(pl.String) for name in ("label", "phase")},
        }
    ).drop_nulls()
    assert both.height > 0.8 * trace.tables.gpu.height  # the eager run has no edges between streams
    assert (both["label"] == both["eager_label"]).all()
    assert {"forward", "backward"} == set(both["phase"])
    # Labels taken at capture tell the backward pass from all other work, which they call forward.
    backward = both.select(pl.col("phase", "eager_phase") == "backward")
    assert backward["phase"].equals(backward["eager_phase"].alias("phase"))


@pytest.mark.parametrize("by", ["labels", "eager"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_may_be_shuffled(labels: Callable[[Path], Path], by: str, seed: int) -> None:
    trace = thence.open(WITHOUT_IDS)
    chance = random.Random(seed)
    streams = [s if s == 7 else chance.choice((143, 144, 145, 146, 7)) for s in trace.tables.gpu["stream"]]
    gpu = trace.tables.gpu.with_columns(stream=pl.Series(streams))
    shuffled = Trace(dataclasses.replace(trace.recorded, gpu=gpu))
    labelled = (
        shuffled.label(labels(WITHOUT_IDS)) if by == "labels" else shuffled.label(eager=thence.open(EAGER[WITHOUT_IDS]))
    )
    assert labelled.tables.places["label"].to_list() == expected(trace.tables.gpu)


@pytest.mark.parametrize(("by", "dropped"), [("labels", 0), ("labels", 150), ("eager", 47)])
def test_after_dropping_a_kernel_only_equal_kernels_of_its_replay_are_open(
    labels: Callable[[Path], Path], by: str, dropped: int
) -> None:
    trace = thence.open(WITHOUT_IDS)
    right = expected(trace.tables.gpu)
    kept = [row for row in range(240) if row != dropped]
    fewer = Trace(dataclasses.replace(trace.recorded, gpu=trace.tables.gpu[kept]))
    labelled = (
        fewer.label(labels(WITHOUT_IDS)) if by == "labels" else fewer.label(eager=thence.open(EAGER[WITHOUT_IDS]))
    )
    labelled.self_check()
    same = ("correlation", "name", "grid", "block")
    equal = [trace.tables.gpu.select(same).row(row) == trace.tables.gpu.select(same).row(dropped) for row in kept]
    places = labelled.tables.places["label"].to_list()
    assert places == [None if e else right[row] for e, row in zip(equal, kept, strict=True)]
    assert any(equal)
    reasons = labelled.tables.places.filter(pl.col("label").is_null())["label_rule"]
    assert reasons.unique().to_list() == ["graph_ambiguous"]
    (note,) = labelled.meta.warnings
    assert str(trace.tables.gpu["correlation"][dropped]) in note
    assert f"{sum(equal)} of its 47 activities" in note


# Labels of another process or program


def test_labels_of_another_process_are_refused(labels: Callable[[Path], Path]) -> None:
    path = labels(WITH_IDS)
    document = json.loads(path.read_text())
    document["process"]["pid"] += 1
    path.write_text(json.dumps(document))
    for trace in (WITH_IDS, WITHOUT_IDS):
        with pytest.raises(InputError, match=r"process \d+ captured these graphs, but the trace is of process"):
            thence.open(trace).label(path)


def test_a_trace_from_before_the_process_began_is_refused(tmp_path: Path) -> None:
    made = layers(1)
    process = {"pid": PID, "started_ns": 2 * 10**18}
    tables, _ = tables_of(made, [replay(made, 1, random.Random(0))], ids=True)
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps(made.document(process=process)))
    with pytest.raises(InputError, match=r"began at 2033-05-18 03:33:20.*, but the trace at 2001-09-09"):
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
        tables, nodes = tables_of(one, [replay(one, 2, random.Random(rank), 0, 1)], ids=True, pid=pids[rank])
        gpu, host = (t.with_columns(rank=pl.lit(rank, pl.Int32)) for t in (tables.gpu, tables.host))
        parts.append(dataclasses.replace(tables, gpu=gpu, host=host))
        path = tmp_path / f"labels{rank}.json"
        path.write_text(json.dumps(one.document(process={"pid": pids[rank], "rank": rank})))
        files.append(path)
        right += [one.labels[node] for node in nodes]
    from thence.model.concat_tables import concat

    labelled = Trace(concat(parts)).label(files)
    assert labelled.tables.places["label"].to_list() == right
    assert labelled.meta.warnings == ()


def test_labels_stay_with_their_activities_when_traces_are_put_together(labels: Callable[[Path], Path]) -> None:
    from thence.model.concat_tables import concat

    parts = [thence.open(trace).label(labels(trace)) for trace in (WITH_IDS, WITHOUT_IDS)]
    whole = Trace(concat([part.recorded for part in parts]))
    whole.self_check()
    assert whole.tables.places["label"].to_list() == [x for part in parts for x in expected(part.tables.gpu)]
    read_only = dataclasses.replace(parts[0].recorded, graph_labels=(read_labels(labels(WITH_IDS)),))
    both = concat([parts[1].recorded, read_only])  # rank 0 is taken: the second becomes 1
    assert [one.process.rank for one in both.graph_labels] == [0, 1]


# Automatically


def test_labels_beside_the_trace_are_joined_and_said_so(tmp_path: Path, labels: Callable[[Path], Path]) -> None:
    (tmp_path / "trace.json.gz").write_bytes(WITHOUT_IDS.read_bytes())
    (tmp_path / "my_labels.json").write_bytes(labels(WITHOUT_IDS).read_bytes())
    for inputs in ([tmp_path / "trace.json.gz"], [tmp_path / "trace.json.gz", tmp_path / "my_labels.json"]):
        trace = thence.open(*inputs)
        assert trace.tables.places["label"].to_list() == expected(trace.tables.gpu)
        assert any("240 of 240 activities" in text and "my_labels.json" in text for text in trace.meta.notes)
        assert trace.meta.warnings == ()


@pytest.mark.parametrize("content", ["{", '{"format": "thence.graph-labels", "ver'], ids=["no", "cut"])
def test_labels_beside_that_do_not_fit_are_a_warning_only(
    tmp_path: Path, labels: Callable[[Path], Path], content: str
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "trace.json.gz").write_bytes(WITHOUT_IDS.read_bytes())
    (folder / "labels.json").write_text(content)
    for given in (folder, folder / "trace.json.gz"):
        trace = thence.open(given)
        assert trace.tables.gpu.height == 240
        assert trace.recorded.graph_places.is_empty()
        if "format" in content:
            assert any("labels.json" in text for text in trace.meta.warnings)
    document = json.loads(labels(WITHOUT_IDS).read_text())
    document["process"]["pid"] += 1
    (folder / "labels.json").write_text(json.dumps(document))
    trace = thence.open(folder / "trace.json.gz")
    assert trace.recorded.graph_places.is_empty()
    assert any("captured these graphs" in text for text in trace.meta.warnings)


# Places in the program, beside the marks


def with_places(made: Made, places: list[dict[str, object]], of_node: list[int]) -> dict[str, Any]:
    document = made.document(version=2, places=places)
    document["graphs"][0]["nodes"]["place"] = of_node
    return document


MADE_IN = [
    {
        "module": "layers.0.mlp",
        "stack": ["/me/train.py:3 main", "/v/site-packages/lib/a.py:7 f"],
        "phase": "recompute",
        "op": "aten.mm",
    },
    {
        "module": None,
        "stack": ["/v/site-packages/lib/a.py:8 g"],
        "parts": [["a", "m.py:1 f", "aten.mul", "forward", 0.75], [None, None, "", "", 0.25]],
    },
    {"module": "layers.1", "stack": ["/me/train.py:0 main"]},
]


def test_a_kernel_has_the_place_of_its_node(tmp_path: Path) -> None:
    made = Made()
    node = made.node("gemm", "mine")
    node = made.node("gelu", None, node)
    node = made.node("norm", None, node)
    made.node("add", "mine", node)
    (tmp_path / "labels.json").write_text(json.dumps(with_places(made, MADE_IN, [0, 1, 2, -1])))
    tables, nodes = tables_of(made, [replay(made, 1, random.Random(1))], ids=True)
    trace = Trace(tables).label(tmp_path / "labels.json")
    assert nodes == [0, 1, 2, 3]
    rules = {"label", "module", "op", "source", "phase", "stack"}
    found = trace.tables.places.select(*sorted(rules), "position", "metadata").cast(pl.String)
    first, second, third, last = found.to_dicts()
    assert first == {
        "label": "mine",
        "module": "layers.0.mlp",
        "op": "aten.mm",
        "phase": "recompute",  # the marks alone would say forward
        "source": "/me/train.py:3 main",  # the innermost line of the user's
        "position": "line",
        "stack": "/me/train.py:3 main;/v/site-packages/lib/a.py:7 f",
        "metadata": None,
    }
    assert (second["label"], second["module"]) == (None, None)
    assert second["source"] == "/v/site-packages/lib/a.py:8 g"  # there is none of the user's
    parts = json.loads(second["metadata"])["estimated_parts"]
    assert [(part["module"], part["share"]) for part in parts] == [("a", 0.75), (None, 0.25)]
    assert (third["source"], third["position"]) == ("/me/train.py main", "function")
    assert [last[kind] for kind in ("label", "module", "source")] == ["mine", None, None]
    rule = trace.tables.places["module_rule"].cast(pl.String).to_list()
    assert rule == ["graph_node", "graph_no_place", "graph_node", "graph_no_place"]


def test_what_counts_as_own_code_decides_the_source_of_a_graphed_kernel(tmp_path: Path) -> None:
    made = Made()
    made.node("gemm", None)
    (tmp_path / "labels.json").write_text(json.dumps(with_places(made, MADE_IN, [0])))
    tables, _ = tables_of(made, [replay(made, 1, random.Random(1))], ids=True)
    labelled = Trace(tables).label(tmp_path / "labels.json")
    own = Trace(labelled.recorded, own=("lib",))
    assert own.tables.places["source"].to_list() == ["/v/site-packages/lib/a.py:7 f"]


def test_nodes_that_differ_in_their_places_alone_keep_the_label_that_they_share(tmp_path: Path) -> None:
    """Without ids, equal kernels side by side cannot be told apart: their module cannot, their label can."""
    made = Made()
    first = made.node("embed", "embed")
    branches = [made.node("gemm", "projections", first) for _ in range(2)]
    made.node("attention", "attention", *branches)
    document = with_places(made, MADE_IN, [-1, 0, 2, -1])
    (tmp_path / "labels.json").write_text(json.dumps(document))
    tables, nodes = tables_of(made, [replay(made, 2, random.Random(3), shortest=10)])
    trace = Trace(tables).label(tmp_path / "labels.json")
    labels = dict(zip(nodes, trace.tables.places["label"].to_list(), strict=True))
    assert labels == {0: "embed", 1: "projections", 2: "projections", 3: "attention"}
    assert trace.tables.places["module"].to_list() == [None] * 4
    assert "graph_alignment" in trace.tables.places["label_rule"].to_list()


def test_the_operator_around_the_launch_of_a_graph_is_not_that_of_its_kernels() -> None:
    """Kernels of a compiled step whose graphs are launched within the operator "Torch-Compiled Region: 0/0"."""
    path = TORCH / "graphs" / "compiled_replay.json.gz"
    events = json.loads(unzipped(path))["traceEvents"]
    launched = {e["args"]["correlation"] for e in events if e["name"] == "cudaGraphLaunch"}
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    graphed = sum(e["args"]["correlation"] in launched for e in work)
    assert 0 < graphed < len(work)
    assert any(e["name"].startswith("Torch-Compiled Region") and e["cat"] == "cpu_op" for e in events if "cat" in e)
    ops = thence.open(path).tables.places["op"].cast(pl.String)
    assert ops.null_count() == graphed
    assert not ops.drop_nulls().str.contains("Torch-Compiled Region").any()
