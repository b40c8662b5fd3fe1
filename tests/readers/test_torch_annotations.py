"""PyTorch's annotation files: whose they are, where they are found, and which forms they have."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import TORCH, recording, unzipped
from thence.errors import DamagedInput
from thence.readers import plain_pickle
from thence.readers.label_files import read_labels
from thence.readers.plain_pickle import PickleRefused, load_plain

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REPLAY = recording("torch-2.12_graph_replay_rank0")
EXECUTABLE = 2  # graph id of the recording


def annotations(prefix: str) -> dict[int, list[dict[str, Any]]]:
    """What `mark_kernels` would have recorded: the labels of the recorded truth, different for each rank."""
    nodes = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    return {EXECUTABLE << 32 | node["id"] & 0xFFFFFFFF: [{"name": prefix + node["label"]}] for node in nodes}


def pickled(path: Path, prefix: str) -> Path:
    path.write_bytes(pickle.dumps(annotations(prefix)))
    return path


def as_json(path: Path, prefix: str) -> Path:
    path.write_text(json.dumps(annotations(prefix)))
    return path


def trace_of(path: Path) -> Path:
    """A trace of the rank that its name says: the recording names none."""
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(unzipped(REPLAY))
    return path


def labels(trace: thence.Trace) -> dict[int, Counter[str]]:
    rows = trace.tables.gpu.select("rank", label=trace.tables.places["label"].cast(pl.String)).rows()
    ranks = {rank for rank, _ in rows}
    return {rank: Counter(label for of, label in rows if of == rank) for rank in ranks}


def expected(prefix: str) -> Counter[str]:
    named = Counter(value[0]["name"] for value in annotations(prefix).values())
    return Counter({name: 5 * count for name, count in named.items()})


@pytest.mark.parametrize("write", [pickled, as_json])
def test_each_rank_gets_the_labels_of_its_own_file(write: Callable[[Path, str], Path], tmp_path: Path) -> None:
    traces = [trace_of(tmp_path / f"trace_rank{rank}.json") for rank in range(2)]
    ending = "pkl" if write is pickled else "json"
    files = [write(tmp_path / f"kernel_annotations_rank{rank}_fwd.{ending}", f"r{rank}_") for rank in range(2)]
    right = {rank: expected(f"r{rank}_") for rank in range(2)}
    assert labels(thence.open(*traces)) == right  # found
    if write is as_json:  # how they are found and named is one for all forms
        return
    assert labels(thence.open(tmp_path)) == right
    (tmp_path / "away").mkdir()
    moved = [file.rename(tmp_path / "away" / file.name) for file in files]
    assert labels(thence.open(*traces).label(moved)) == right  # named
    assert labels(thence.open(*traces).label(moved[1:2]))[0] == Counter({None: 240})


def test_one_file_never_labels_several_ranks(tmp_path: Path) -> None:
    traces = [trace_of(tmp_path / f"trace_rank{rank}.json") for rank in range(2)]
    file = pickled(tmp_path / "annotations.pkl", "")
    with pytest.raises(thence.InputError, match="does not say which rank captured these graphs"):
        thence.open(*traces).label(file)
    assert labels(thence.open(traces[0]).label(file)) == {0: expected("")}  # there is only one it can be of


def test_a_file_of_another_rank_is_not_taken(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace_rank1.json")
    file = pickled(tmp_path / "kernel_annotations_rank0_fwd.pkl", "")
    assert labels(thence.open(trace)) == {1: Counter({None: 240})}
    with pytest.raises(thence.InputError, match="rank 0 captured these graphs, but the trace is of rank 1"):
        thence.open(trace).label(file)


def test_runs_opened_together_keep_their_own_files(tmp_path: Path) -> None:
    """Both are rank 0, of which the second is shown as rank 1."""
    for run in ("a", "b"):
        trace_of(tmp_path / run / "trace.json")
        pickled(tmp_path / run / "kernel_annotations_rank0_fwd.pkl", f"{run}_")
    both = thence.open(tmp_path / "a", tmp_path / "b")
    assert labels(both) == {0: expected("a_"), 1: expected("b_")}


@pytest.mark.parametrize(
    ("trace", "file"),
    [
        ("traces/trace.json", "traces/kernel_annotations_rank0_fwd_bwd.pkl"),
        ("traces/step_14/trace.json", "traces/kernel_annotations_rank0_fwd_bwd.pkl"),
        ("traces/step_14/000003.1764.pt.trace.json", "traces/kernel_annotations_rank3_fwd.pkl"),
        ("traces/step_14/rank3_trace.json", "traces/kernel_annotations_rank3.pkl"),
    ],
)
def test_files_are_found_where_pytorchs_tools_put_them(trace: str, file: str, tmp_path: Path) -> None:
    path = trace_of(tmp_path / trace)
    pickled(tmp_path / file, "")
    rows = thence.open(path).report("label").rows
    assert dict(rows.select(pl.col("name").cast(pl.String), "count").iter_rows()) == expected("")


def test_nodes_that_nobody_annotated_say_so(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "trace.json")
    some = {node: said for node, said in annotations("").items() if said[0]["name"] == "mlp"}
    (tmp_path / "kernel_annotations_rank0_x.pkl").write_bytes(pickle.dumps(some))
    trace = thence.open(path)
    rules = trace.tables.places.group_by(pl.col("label_rule").cast(pl.String)).len()
    assert dict(rules.rows()) == {"graph_node": 75, "graph_no_label": 165}


def test_a_damaged_file_beside_costs_only_itself(tmp_path: Path) -> None:
    path = trace_of(tmp_path / "trace.json")
    pickled(tmp_path / "kernel_annotations_rank0_a.pkl", "")
    (tmp_path / "kernel_annotations_rank0_b.pkl").write_bytes(b"\x80\x04cut")
    trace = thence.open(path)
    assert labels(trace) == {0: expected("")}
    assert any("rank0_b.pkl" in text and "its labels are not used" in text for text in trace.meta.warnings)


def test_fields_keep_their_types_and_collectives_are_told_by_their_sizes(tmp_path: Path) -> None:
    collective = {
        "name": "all_reduce", "In msg nelems": 8, "Out msg nelems": 8, "Group size": 2, "dtype": "bfloat16",
        "Process Group Name": "0", "Process Group Description": "tp", "Process Group Ranks": [0, 1], "stream": 60,
    }  # fmt: skip
    other = {"name": "mlp", "stream": 61, "layer": 3, "ratio": 0.5, "In msg nelems": 8}
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps({1: [collective], 2: [other]}))
    first, second = read_labels(path).labels
    assert (first.lane, second.lane) == ("0 (tp)", "61")
    assert first.collective is not None
    assert (first.collective.collective, first.collective.in_elements) == ("all_reduce", 8)
    assert (first.collective.group_size, first.collective.group_ranks) == (2, "[0, 1]")
    assert second.collective is None
    assert second.metadata == {"layer": 3, "ratio": 0.5, "In msg nelems": 8}


@pytest.mark.parametrize(
    "content", [b'{"12": ', b'{"12": 3}', b'{"12": [{"name": "a"}], "x": []}', b'{"99999999999999999999": []}']
)
def test_damaged_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernel_annotations_rank0_x.json"
    path.write_bytes(content)
    with pytest.raises(thence.DamagedInput, match="rank0_x"):
        read_labels(path)


def test_pickles_made_to_collide_or_to_fill_the_memory_are_refused() -> None:
    tuples = {(a, b): 1 for a in (-1, -2) for b in (-1, -2)}  # all of one hash
    assert len({hash(key) for key in tuples}) == 1
    for value in (tuples, {frozenset([1]): 1}, {(1, 2)}):
        with pytest.raises(PickleRefused, match="neither strings nor numbers"):
            load_plain(pickle.dumps(value, protocol=4))
    with pytest.raises(PickleRefused, match="too large"):
        load_plain(pickle.dumps({i * ((1 << 61) - 1): 1 for i in range(1, 50)}, protocol=4))
    with pytest.raises(PickleRefused, match="so many objects for its size"):
        load_plain(b"\x80\x04](" + b"}" * 2_000_000 + b"e.")
    with pytest.raises(PickleRefused, match="memo"):
        load_plain(b"\x80\x04Nr\xff\xff\xff\x03.")
    shared = [{"name": "a"}]
    sound = {1: shared, 2: [{"name": "b", "x": (1, 2.5, b"y"), "s": {3}}], 3: shared}
    assert load_plain(pickle.dumps(sound, protocol=4)) == sound


# Several files of one rank, stacks, and other forms


def written(path: Path, nodes: dict[int, list[dict[str, Any]]]) -> Path:
    path.write_text(json.dumps(nodes))
    return path


def test_files_of_one_graph_are_merged_by_node(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace_rank0.json")
    nodes = list(annotations("").items())
    written(tmp_path / "kernel_annotations_rank0_bwd.json", dict(nodes[:20]))
    written(tmp_path / "kernel_annotations_rank0_fwd.json", dict(nodes[20:]))
    more = {node: [{"layer": place // 16}] for place, (node, _) in enumerate(nodes)}
    written(tmp_path / "kernel_annotations_rank0_more.json", more)
    opened = thence.open(trace)
    assert labels(opened) == {0: expected("")}
    layer = opened.tables.places.select(pl.col("metadata").cast(pl.String)).to_series()
    assert layer.value_counts(sort=True)["count"].to_list() == [80, 80, 80]
    (note,) = [text for text in opened.meta.notes if "labels of CUDA graphs" in text]
    for file, count in (("bwd", 100), ("fwd", 140), ("more", 240)):
        assert f"kernel_annotations_rank0_{file}.json ({count} activities)" in note


def test_contradicting_files_are_named_and_neither_wins(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace_rank0.json")
    nodes = annotations("")
    wrong = {node: [{"name": "stale"}] for node in list(nodes)[:12]}
    written(tmp_path / "kernel_annotations_rank0_new.json", nodes)
    written(tmp_path / "kernel_annotations_rank0_old.json", wrong)
    opened = thence.open(trace)
    number = opened.tables.gpu["node"] & 0xFFFFFFFF
    right = [None if n < 12 else nodes[EXECUTABLE << 32 | n][0]["name"] for n in number.to_list()]
    assert opened.tables.places["label"].to_list() == right
    absent = opened.tables.places.filter(pl.col("label").is_null())["label_rule"]
    assert absent.unique().to_list() == ["graph_labels_differ"]
    (text,) = [text for text in opened.meta.warnings if "contradict each other" in text]
    first = nodes[EXECUTABLE << 32][0]["name"]
    assert "kernel_annotations_rank0_new.json and " in text
    assert f"about 12 nodes of executable graph 2: node 0 is `{first}` in one and `stale`" in text


def test_a_path_and_its_innermost_name_are_no_contradiction(tmp_path: Path) -> None:
    """thence's marks keep the outer names, PyTorch's annotations do not."""
    nodes = annotations("")
    document = {
        "format": "thence.graph-labels", "version": 1,
        "labels": [{"path": ["block", value[0]["name"]]} for value in nodes.values()],
        "graphs": [{"id": 1, "executables": [EXECUTABLE],
                    "nodes": {"number": [*range(48)], "type": ["kernel"] * 48, "label": [*range(48)]}}],
    }  # fmt: skip
    (tmp_path / "labels.json").write_text(json.dumps(document))
    files = [tmp_path / "labels.json", pickled(tmp_path / "annotations.pkl", "")]
    assert labels(thence.open(REPLAY).label(files)) == {0: expected("block/")}


ANNOTATED = TORCH / "graphs" / "annotated"
STACKS = ANNOTATED / "py_stacks_torch-2.15.json.gz"


def test_launch_stacks_of_torch_2_15_are_stacks_and_lines_and_no_labels() -> None:
    labelled = thence.open(REPLAY).label(STACKS)
    labelled.self_check()
    assert labelled.tables.places["label"].null_count() == 240
    model = "/home/user/project/model.py"
    for node, source, stack in zip(
        (labelled.tables.gpu["node"] & 0xFFFFFFFF).to_list(),
        labelled.tables.places["source"].to_list(),
        labelled.tables.places["stack"].to_list(),
        strict=True,
    ):
        inside, line = ("attention", 13) if node % 16 < 8 else ("mlp", 14)
        launched = {"attention": 9, "mlp": 11}[inside]
        assert source == f"{model}:6 launch"
        assert stack == ";".join(
            [f"{model}:15 <module>", f"{model}:{line} block", f"{model}:{launched} {inside}", source]
        )


def test_stacks_add_to_the_labels_of_other_files() -> None:
    files = [ANNOTATED / "kernel_annotations_rank0_block.pkl", STACKS]
    alone = thence.open(REPLAY).label(files[0])
    both = thence.open(REPLAY).label(files)
    assert both.tables.places["label"].to_list() == alone.tables.places["label"].to_list()
    assert both.tables.places["source"].null_count() == 0


def test_a_stack_in_an_annotated_trace_is_a_stack(tmp_path: Path) -> None:
    document = json.loads(unzipped(REPLAY))
    stack = "/me/train.py:7:step\n/me/train.py:30:<module>"
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["args"]["name"] = stack
    (tmp_path / "trace.json").write_text(json.dumps(document))
    trace = thence.open(tmp_path / "trace.json")
    assert trace.tables.places["label"].null_count() == 240
    assert trace.tables.places["source"].unique().to_list() == ["/me/train.py:7 step"]
    assert trace.tables.places["stack"].unique().to_list() == ["/me/train.py:30 <module>;/me/train.py:7 step"]


@pytest.mark.parametrize("name", ["layer:3:attention", "a.py:0:f", "x.py:3:f\nattention", "x.py"])
def test_a_name_that_is_no_stack_stays_a_label(tmp_path: Path, name: str) -> None:
    file = written(tmp_path / "kernel_annotations_rank0.json", {EXECUTABLE << 32: [{"name": name}]})
    assert [label.path for label in read_labels(file).labels] == [(name,)]


def test_the_defaultdict_that_torch_2_13_returns_is_read_as_the_dict_that_it_is() -> None:
    labelled = thence.open(REPLAY).label(ANNOTATED / "defaultdict_torch-2.13.pkl")
    assert labels(labelled) == {0: expected("")}


def test_a_pickled_view_of_torch_2_15_holds_nothing_and_says_how_to_save_it() -> None:
    with pytest.raises(thence.UnknownFormat, match=r"pickle\.dump\(dict\(get_kernel_annotations"):
        read_labels(ANNOTATED / "view_torch-2.15.pkl")


def test_ids_of_captured_graphs_are_joined_where_another_file_names_the_executable_graph(tmp_path: Path) -> None:
    captured = {node - (1 << 32): value for node, value in annotations("").items()}
    file = written(tmp_path / "kernel_annotations_rank0.json", captured)
    with pytest.raises(thence.MissingData, match='key_by="source"'):
        thence.open(REPLAY).label(file)
    document = {
        "format": "thence.graph-labels", "version": 1,
        "graphs": [{"id": 1, "executables": [EXECUTABLE],
                    "nodes": {"number": [*range(48)], "type": ["kernel"] * 48, "label": [-1] * 48}}],
    }  # fmt: skip
    (tmp_path / "labels.json").write_text(json.dumps(document))
    labelled = thence.open(REPLAY).label([file, tmp_path / "labels.json"])
    assert labels(labelled) == {0: expected("")}


def laughs(*widths: int) -> bytes:
    """An empty list, a list of so many references to it, a list of references to that one, and so on."""
    content = b"\x80\x02]q\x00"
    for number, width in enumerate(widths):
        content += b"](" + b"h%c" % number * width + b"eq%c" % (number + 1)
    return content


def test_a_pickle_that_refers_to_its_objects_many_times_is_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """28 kB describe 49 million elements: three lists are visited, and hardly any memory is taken."""
    visited: list[object] = []
    begun = plain_pickle._Level.__init__

    def counted(level: Any, container: object) -> None:
        visited.append(container)
        begun(level, container)

    monkeypatch.setattr(plain_pickle._Level, "__init__", counted)
    content = laughs(7000, 7000) + b"."
    tracemalloc.start()
    try:
        value = load_plain(content)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    assert isinstance(value, list)
    assert [len(value), len(value[0]), len(value[0][0])] == [7000, 7000, 0]
    assert len(visited) == 4  # one of them holds the value
    with pytest.raises(PickleRefused, match="repeats its values too often"):
        load_plain(laughs(2000, 2000, 2000) + b".")


def test_annotations_that_refer_to_large_objects_are_compared_without_writing_them_out(tmp_path: Path) -> None:
    """20,000 nodes have one list of 2,000 ranks: 40 million elements, if it were written for each of them."""
    ranks = list(range(2000))
    shared = {node: [{"name": f"layer {node % 3}", "ranks": ranks}] for node in range(20_000)}
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps(shared))
    labels = read_labels(path)
    assert [label.path for label in labels.labels] == [("layer 0",), ("layer 1",), ("layer 2",)]
    assert labels.labels[0].metadata == {"ranks": ranks}
    assert sum(graph.nodes.height for graph in labels.graphs) == 20_000
    different = {node: [{"name": "a", "node": node, "x": ranks}] for node in range(20_000)}
    path.write_bytes(pickle.dumps(different))
    with pytest.raises(thence.DamagedInput, match="repeats its values so often"):
        read_labels(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_dicts_of_other_classes_are_read_as_dicts(protocol: int, tmp_path: Path) -> None:
    """``pickle.dump(get_kernel_annotations())`` writes a defaultdict."""
    inside = OrderedDict(name="mlp", layer=3)
    made = defaultdict(list, {EXECUTABLE << 32 | 1: [inside]})
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps(made, protocol))
    (label,) = read_labels(path).labels
    assert (label.path, label.metadata) == (("mlp",), {"layer": 3})
    assert load_plain(pickle.dumps(defaultdict(None, {1: 2}), protocol)) == {1: 2}


@pytest.mark.parametrize(
    "value",
    [{1: defaultdict}, [list], defaultdict(Counter), Counter("ab"), defaultdict(print)],
    ids=["a class as value", "a class", "a factory", "another dict", "a function"],
)
def test_no_other_class_is_accepted(value: object) -> None:
    with pytest.raises(PickleRefused, match=r"class|import"):
        load_plain(pickle.dumps(value))


def test_calls_are_refused_unless_they_make_an_empty_dict() -> None:
    named = b"\x80\x04\x8c\x0bcollections\x8c\x0bOrderedDict\x93"
    assert load_plain(named + b")R.") == {}
    for arguments in (b"]\x85R", b"K\x01\x85R", b"\x8c\x01a\x85R", b"]R"):
        with pytest.raises(PickleRefused):
            load_plain(named + arguments + b".")
    with pytest.raises(PickleRefused, match=r"wants to call builtins\.list"):
        load_plain(b"\x80\x04\x8c\x08builtins\x8c\x04list\x93)R.")


GRAPH_DATA = ANNOTATED / "graph_data_torch-2.15.pkl"


def test_the_graph_that_torch_2_15_exports_has_its_nodes_and_edges() -> None:
    stored = pickle.loads(GRAPH_DATA.read_bytes())
    labels = read_labels(GRAPH_DATA)
    (graph,) = labels.graphs
    assert (graph.id, graph.executables, labels.labels) == (EXECUTABLE, (EXECUTABLE,), ())
    truth = json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())
    assert graph.edges is not None
    assert sorted(graph.edges.tolist()) == sorted([a & 0xFFFFFFFF, b & 0xFFFFFFFF] for a, b in truth["edges"])
    for node, made in zip(graph.nodes.iter_rows(named=True), stored["nodes"], strict=True):
        assert (node["number"], node["type"]) == (made["node_id"], made["node_type"])
        assert (tuple(node["grid"]), tuple(node["block"])) == (made["grid_dim"], made["block_dim"])
        assert labels.kernels[node["kernel"]].name == made["kernel_name"]


def test_edges_and_annotations_of_pytorch_add_up() -> None:
    annotated = ANNOTATED / "kernel_annotations_rank0_block.pkl"
    alone, both = (thence.open(REPLAY).label(files) for files in ([annotated], [annotated, GRAPH_DATA]))
    assert both.tables.places["label"].to_list() == alone.tables.places["label"].to_list()
    labelled = {n["number"]: n["label"] for n in both.replayed_graph().to_json()["nodes"]}
    assert labelled == {
        node["id"] & 0xFFFFFFFF: None if node["label"] == "side_norm" else node["label"]
        for node in json.loads((TORCH / "graphs" / "graph_truth_rank0.json").read_text())["nodes"]
    }


@pytest.mark.parametrize(
    "change",
    [
        {"edges": [{"from": 0, "to": 48}]},
        {"edges": [{"from": -1, "to": 0}]},
        {"edges": [{"from": 0}]},
        {"edges": None},
        {"nodes": [{"node_id": 1, "node_type": "kernel"}] * 2},
        {"nodes": [{"node_id": "1", "node_type": "kernel"}]},
        {"nodes": [{"node_id": 1, "node_type": "kernel", "grid_dim": (1, 2)}]},
        {"exec_graph_id": 1 << 40},
    ],
)
def test_damaged_graphs_of_torch_2_15_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    stored = pickle.loads(GRAPH_DATA.read_bytes())
    path = tmp_path / "graph.pkl"
    path.write_bytes(pickle.dumps({**stored, "edges": [], **change}))
    with pytest.raises(DamagedInput):
        read_labels(path)
