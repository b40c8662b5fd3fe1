"""Labels files: what is read, and that nothing damaged, foreign or hostile gets through."""

from __future__ import annotations

import gzip
import json
import math
import os
import pickle
import random
from contextlib import suppress
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import pytest

import thence
from graph_data import Made, layers
from thence.capture.marks.graph_labels import metadata_text
from thence.errors import DamagedInput, InputError, UnknownFormat
from thence.readers.label_files import read_labels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def small() -> Made:
    made = Made()
    first = made.node("gemm", "layer/mlp")
    made.node("gelu", None, first)
    return made


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_the_columns_of_the_file_become_labels_nodes_and_edges(tmp_path: Path) -> None:
    document = small().document(notes=["one"])
    document["labels"][0] |= {"lane": "side", "metadata": {"In msg nelems": 4}}
    labels = read_labels(written(tmp_path / "labels.json", document))
    assert (labels.process.pid, labels.process.started_ns) == (4321, 1000)
    assert labels.labels[0].path == ("layer", "mlp")
    assert (labels.labels[0].lane, labels.labels[0].metadata) == ("side", {"In msg nelems": 4})
    assert [kernel.name for kernel in labels.kernels] == ["gemm", "gelu"]
    assert labels.notes == ("one",)
    (graph,) = labels.graphs
    assert (graph.id, graph.executables, graph.device) == (1, (2,), 0)
    assert graph.nodes["number"].to_list() == [0, 1]
    assert graph.nodes["label"].to_list() == [0, None]
    assert graph.nodes["parent"].to_list() == [None, None]
    assert graph.edges is not None
    assert graph.edges.tolist() == [[0, 1]]


PLACES = [
    {"module": "layers.0", "stack": ["/me/model.py:3 forward"], "phase": "forward", "op": "aten.mm"},
    {"parts": [["a", "m.py:1 f", "aten.mm", "forward", 0.5], [None, None, "", "", 0.5]]},
]


def with_places(*places: int) -> Any:
    document = small().document(version=2, places=PLACES)
    document["graphs"][0]["nodes"]["place"] = list(places)
    return document


def test_places_of_version_2_go_with_the_marks_of_their_nodes(tmp_path: Path) -> None:
    labels = read_labels(written(tmp_path / "labels.json", with_places(0, 1)))
    (graph,) = labels.graphs
    first, second = (labels.labels[n] for n in graph.nodes["label"])
    assert first.path == ("layer", "mlp")
    assert first.place is not None
    assert (first.place.module, first.place.op) == ("layers.0", "aten.mm")
    assert first.place.stack == ("/me/model.py:3 forward",)
    assert (second.path, second.phase) == ((), None)  # this node had no mark
    assert second.place is not None
    assert [part[-1] for part in second.place.parts] == [0.5, 0.5]


def test_nodes_without_a_place_and_files_of_version_1_are_as_they_were(tmp_path: Path) -> None:
    before = read_labels(written(tmp_path / "labels.json", small().document()))
    after = read_labels(written(tmp_path / "labels.json", with_places(-1, -1)))
    assert after.labels == before.labels
    assert after.graphs[0].nodes.equals(before.graphs[0].nodes)


def with_calls(**changes: Any) -> Any:
    document = with_places(0, 1)
    places = [{"call": ["aten::mm", 0, 0, 2]}, {"call": ["aten::mm", 0, 1, 2]}]
    return document | {"version": 3, "places": places, "inputs": ['{"dims":[[2,3]]}'], **changes}


def test_places_of_version_3_have_the_call_of_the_operator(tmp_path: Path) -> None:
    labels = read_labels(written(tmp_path / "labels.json", with_calls()))
    calls = [labels.labels[n].place.call for n in labels.graphs[0].nodes["label"]]  # type: ignore[union-attr]
    assert [(c.name, c.inputs, c.node, c.nodes) for c in calls if c is not None] == [
        ("aten::mm", '{"dims":[[2,3]]}', 0, 2), ("aten::mm", '{"dims":[[2,3]]}', 1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "call", [["aten::mm", 1, 0, 1], ["aten::mm", 0, 2, 2], ["aten::mm", -1, 0, 1], ["aten::mm", 0]]
)
def test_calls_that_cannot_be_are_refused(tmp_path: Path, call: list[Any]) -> None:
    document = with_calls(places=[{"call": call}, {}])
    with pytest.raises(DamagedInput):
        read_labels(written(tmp_path / "labels.json", document))


def test_a_place_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for places in ((0, 2), (0, -2), (0,)):
        with pytest.raises(DamagedInput, match="place"):
            read_labels(written(tmp_path / "labels.json", with_places(*places)))


def test_a_lane_that_an_older_thence_wrote_as_a_number_is_a_lane(tmp_path: Path) -> None:
    document = small().document()
    document["labels"][0] |= {"lane": 62}
    assert read_labels(written(tmp_path / "labels.json", document)).labels[0].lane == "62"


def test_gzipped_labels_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "labels.json.gz"
    path.write_bytes(gzip.compress(json.dumps(small().document()).encode()))
    assert len(read_labels(path).graphs) == 1


def test_a_half_written_file_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    text = json.dumps(layers(2).document())
    path = tmp_path / "labels.json"
    for cut in range(0, len(text) - 1, 7):
        path.write_text(text[:cut])
        with pytest.raises(InputError, match=r"labels\.json"):
            read_labels(path)


def change(*keys: Any, to: Any) -> Callable[[Any], None]:
    def apply(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = to

    return apply


WRONG = {
    "a label index too high": change("graphs", 0, "nodes", "label", 0, to=1),
    "a kernel index too low": change("graphs", 0, "nodes", "kernel", 0, to=-2),
    "a number twice": change("graphs", 0, "nodes", "number", 1, to=0),
    "a negative number": change("graphs", 0, "nodes", "number", 1, to=-5),
    "a number of 64 bits": change("graphs", 0, "nodes", "number", 1, to=1 << 40),
    "columns of two lengths": change("graphs", 0, "nodes", "type", to=["kernel"]),
    "an edge to nowhere": change("graphs", 0, "edges", 0, to=[0, 7]),
    "an edge of three": change("graphs", 0, "edges", 0, to=[0, 1, 1]),
    "a parent that is not there": change("graphs", 0, "nodes", "parent", 1, to=9),
    "a path that is a text": change("labels", 0, "path", to="layer/mlp"),
    "metadata that is a list": change("labels", 0, "metadata", to=[]),
    "a grid of floats": change("graphs", 0, "nodes", "grid", 0, to=[1.5, 1, 1]),
    "a negative grid": change("graphs", 0, "nodes", "grid", 0, to=[-1, 1, 1]),
    "a grid too large": change("graphs", 0, "nodes", "grid", 0, to=[1 << 40, 1, 1]),
    "a number too large for any column": change("graphs", 0, "nodes", "number", 0, to=1 << 70),
    "graphs that are an object": change("graphs", to={}),
    "a process id that is a text": change("process", "pid", to="1"),
    "an executable that is negative": change("graphs", 0, "executables", to=[-1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_in_a_file_is_refused(tmp_path: Path, wrong: Callable[[Any], None]) -> None:
    document = small().document()
    wrong(document)
    with pytest.raises(DamagedInput, match=r"does not hold labels as thence writes them|out of range"):
        read_labels(written(tmp_path / "labels.json", document))


def test_other_versions_and_formats_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "labels.json"
    for version in (0, 4):
        with pytest.raises(UnknownFormat, match=rf"version {version}.*update thence"):
            read_labels(written(path, small().document(version=version)))
    with pytest.raises(UnknownFormat, match="another format"):
        read_labels(written(path, small().document(format="other")))
    for content in ("[]", "null", "{}", '"text"', "", "PK\x03\x04", "\x80\x04"):
        path.write_text(content, encoding="latin-1")
        with pytest.raises(InputError):
            read_labels(path)


def test_bytes_changed_at_random_never_escape_as_another_error(tmp_path: Path) -> None:
    chance = random.Random(5)
    text = bytearray(json.dumps(small().document()).encode())
    path = tmp_path / "labels.json"
    for _ in range(500):
        changed = bytearray(text)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        path.write_bytes(changed)
        with suppress(thence.InputError):
            read_labels(path)


NODE = (7 << 32) + 3
TORCH_FORMS = {
    "str of 2.12": {NODE: [{"str": "attention"}]},
    "name of 2.13": {NODE: [{"name": "attention", "extra": 3}]},
    "text": {NODE: ["attention"]},
    "one dict": {NODE: {"name": "attention"}},
    "inner wins": {NODE: [{"name": "layer"}, {"name": "attention"}]},
}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("annotations", TORCH_FORMS.values(), ids=TORCH_FORMS.keys())
def test_annotation_files_of_torch(tmp_path: Path, annotations: Any, protocol: int) -> None:
    path = tmp_path / "annotations.pkl"
    path.write_bytes(pickle.dumps(annotations, protocol))
    labels = read_labels(path)
    (graph,) = labels.graphs
    assert (graph.id, graph.nodes["number"].to_list()) == (7, [3])
    assert labels.labels[graph.nodes["label"][0]].path == ("attention",)


def test_the_phase_and_lane_of_torch_annotations(tmp_path: Path) -> None:
    path = tmp_path / "annotations.pkl"
    node = {"name": "a", "autograd_phase": "backward", "stream": 61, "In msg nelems": 5}
    group = {"name": "b", "stream": 62, "Process Group Description": "tp"}
    path.write_bytes(pickle.dumps({1 << 32: [node], 2 << 32: [group]}))
    labels = read_labels(path)
    first, second = labels.labels
    assert (first.phase, first.lane, first.metadata) == ("backward", "61", {"In msg nelems": 5})
    assert second.lane == "tp"
    assert [graph.id for graph in labels.graphs] == [1, 2]


class Runs:
    """Unpickling it would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_code_runs_nothing(tmp_path: Path, protocol: int) -> None:
    path, target = tmp_path / "annotations.pkl", tmp_path / "made"
    path.write_bytes(pickle.dumps({1: [{"name": Runs(target)}]}, protocol))
    with pytest.raises(InputError):
        read_labels(path)
    assert not target.exists()
    pickle.loads(path.read_bytes())  # it was able to
    assert target.exists()


def self_containing() -> bytes:
    one: list[Any] = []
    one.append(one)
    return pickle.dumps({1: one})


def nested(depth: int) -> bytes:
    return b"\x80\x04}K\x01" + b"]" * depth + b"a" * (depth - 1) + b"s."


def doubling() -> bytes:
    """Lists of twice the one before, by reference: 2 ** 60 values if counted out."""
    return b"\x80\x04}K\x01]\x94" + b"".join(b"]\x94(h%ch%ce" % (i, i) for i in range(60)) + b"s."


HOSTILE = {
    "contains itself": self_containing(),
    "nested deep": nested(100_000),
    "doubling": doubling(),
    "a class": pickle.dumps({1: [Fraction(1, 2)]}),
    "a global by hand": b"\x80\x02cos\nsystem\n.",
    "a stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"\x80\x02}K\x01Pid\ns.",
    "a memo beyond memory": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a text of 4 GB": b"\x80\x04\x8d\xff\xff\xff\xff\x00\x00\x00\x00.",
    "bytes beyond memory": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a frame of nothing": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "an integer beyond measure": b"\x80\x02\x8b" + (10_000).to_bytes(4, "little") + b"\x7f" * 10_000 + b".",
    "cut": pickle.dumps({1: [{"name": "x"}]})[:-4],
    "no dict": pickle.dumps([1, 2]),
    "keys of text": pickle.dumps({"a": [{"name": "x"}]}),
    "a negative key": pickle.dumps({-1: [{"name": "x"}]}),
    "a key of 65 bits": pickle.dumps({1 << 64: [{"name": "x"}]}),
    "annotations that are numbers": pickle.dumps({1: [5]}),
    "a stack too short": b"\x80\x02s.",
    "nothing": b"\x80\x04",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "annotations.pkl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"annotations\.pkl"):
        read_labels(path)


def test_metadata_that_json_cannot_say_become_text_and_spare_the_others() -> None:
    circle: list[object] = []
    circle.append(circle)
    said = metadata_text({"loss": math.nan, "layer": 3, "sizes": [1, 2], "self": circle})
    assert json.loads(said) == {"loss": "nan", "layer": 3, "sizes": [1, 2], "self": str(circle)}


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all integers in a document, but those of the user's metadata."""
    if type(value) is int:
        return [path]
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    inside = ((key, inner) for key, inner in items if key != "metadata")
    return [found for key, inner in inside for found in numbers_in(inner, (*path, key))]


def test_no_number_of_a_label_file_may_be_larger_than_a_column(tmp_path: Path) -> None:
    """Such as rank 2 ** 64 - 1, which was accepted, and was an error that should not happen with --edges."""
    document = with_places(0, 1)
    document["process"] = {"pid": 5, "rank": 3, "boot": "x", "started_ns": 7}
    document["graphs"][0]["nodes"] |= {
        "grid": [[1, 1, 1], None], "block": [None, [2, 2, 2]], "shared_memory": [4, None], "parent": [-1, 0],
    }  # fmt: skip
    assert read_labels(written(tmp_path / "labels.json", document)).process.rank == 3
    places = numbers_in(document)
    assert len(places) == 26
    for *around, last in places:
        for wrong in (1 << 64, (1 << 64) - 1, -2):
            changed = json.loads(json.dumps(document))
            inside = changed
            for key in around:
                inside = inside[key]
            inside[last] = wrong
            with pytest.raises(InputError, match=r"labels\.json: (does not hold|is cut|has version)"):
                read_labels(written(tmp_path / "labels.json", changed))
