"""Labels of the nodes of captured graphs, with a driver made of Python: see fake_cuda."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import thence
from fake_cuda import FakeCuda
from generated_code import fake_torch, generated_module
from thence.capture.boundaries.log import BoundaryLog
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place, Places
from thence.capture.marks.captures import Captures, patch_torch
from thence.capture.marks.generated_lines import generated
from thence.capture.marks.graph_labels import LabelledGraphs, write_whole
from thence.capture.marks.launch_facts import Part
from thence.capture.marks.watching import watch
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator


class Setting:
    """Captures over a fake driver, and the CUDAGraph class of a fake torch."""

    def __init__(self) -> None:
        self.cuda = FakeCuda()
        self.graphs = LabelledGraphs()
        self.captures = Captures(self.graphs, self.cuda, watch, lambda: self.cuda, lambda: self.cuda)
        setting = self

        class CUDAGraph:
            executable: int | None = None

            def capture_begin(self) -> None:
                setting.cuda.begin()

            def capture_end(self) -> None:
                graph = setting.cuda.capturing.pop(1)
                if "fail" in [name for _, name in setting.cuda.graphs[graph].nodes]:
                    raise RuntimeError("capture failed")
                self.executable = 100 + graph

            def instantiate(self) -> None:
                assert self.executable is not None
                self.executable += 100

            def reset(self) -> None:
                self.executable = None

            def raw_cuda_graph_exec(self) -> int:
                if self.executable is None:
                    raise RuntimeError("not instantiated")
                return self.executable

        self.graph_class = CUDAGraph
        cuda_module = type("cuda", (), {"CUDAGraph": CUDAGraph, "is_initialized": lambda: False})
        self.torch = type("torch", (), {"cuda": cuda_module})
        self.undo = patch_torch(self.torch, self.captures)

    def labels(self, graph: int = -1) -> list[tuple[str, str, str] | None]:
        """(type, path, phase) of a graph's nodes; None without a label."""
        document = self.graphs.document()
        nodes = document["graphs"][graph]["nodes"]
        found = []
        for kind, index in zip(nodes["type"], nodes["label"], strict=True):
            label = document["labels"][index]
            found.append((kind, "/".join(label["path"]), label["phase"]) if index >= 0 else (kind, "", ""))
        return found


@pytest.fixture
def setting():
    one = Setting()
    yield one
    one.undo()
    assert not watch.live, "a capture was left behind"


def test_nodes_get_the_mark_that_was_open_when_they_were_made(setting) -> None:
    graph = setting.graph_class()
    with thence.mark("before"):
        graph.capture_begin()
        setting.cuda.launch("k0")
        with thence.mark("a"):
            setting.cuda.launch("k1")
            setting.cuda.launch("copy", "memcpy")
            with thence.mark("b"):
                pass  # makes nothing
            setting.cuda.launch("k2")
        setting.cuda.launch("k3")
    setting.cuda.launch("k4")
    graph.capture_end()
    assert [path for _, path, _ in setting.labels()] == [*("before", "before/a", "before/a", "before/a", "before", "")]
    document = setting.graphs.document()
    (captured,) = document["graphs"]
    assert captured["id"] == 1
    assert captured["device"] == 3
    assert captured["executables"] == [101]
    assert captured["nodes"]["number"] == [0, 1, 2, 3, 4, 5]
    names = [document["kernels"][k]["name"] if k >= 0 else None for k in captured["nodes"]["kernel"]]
    assert names == ["k0", "k1", None, "k2", "k3", "k4"]
    assert captured["nodes"]["grid"][2] is None
    assert captured["nodes"]["grid"][3] == (3, 1, 1)
    assert captured["edges"] == [(n, n + 1) for n in range(5)]
    assert setting.graphs.count() == (1, 6, 5)  # k4 has none
    assert str(setting.graphs.count()) == "5 of 6 nodes in 1 captured graphs have a label"


def test_a_scope_holds_for_streams_that_join_later(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.stream = 2  # not captured yet
    with thence.mark("side"):
        setting.cuda.capturing[2] = setting.cuda.capturing[1]
        setting.cuda.launch("k0")
    setting.cuda.stream = 1
    setting.cuda.launch("k1")
    del setting.cuda.capturing[2]
    graph.capture_end()
    assert setting.labels() == [("kernel", "side", "forward"), ("kernel", "", "")]


def test_other_threads_have_no_say_unless_their_stream_is_captured(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()

    def work(stream: int, name: str) -> None:
        setting.cuda.stream = stream
        with thence.mark(name):
            setting.cuda.launch(name, stream=1)

    with thence.mark("mine"):
        for stream, name in ((7, "loader"), (1, "helper")):
            thread = threading.Thread(target=work, args=(stream, name))
            thread.start()
            thread.join()
        setting.cuda.stream = 1
    graph.capture_end()
    assert [path for _, path, _ in setting.labels()] == ["mine", "helper"]


def test_several_graphs_and_several_executables(setting) -> None:
    first, second = setting.graph_class(), setting.graph_class()
    for graph, name in ((first, "one"), (second, "two")):
        graph.capture_begin()
        with thence.mark(name):
            setting.cuda.launch("same")
        graph.capture_end()
    first.instantiate()
    first.instantiate()
    document = setting.graphs.document()
    assert [g["executables"] for g in document["graphs"]] == [[101, 201, 301], [102]]
    assert [setting.labels(i)[0][1] for i in (0, 1)] == ["one", "two"]
    assert len(document["kernels"]) == 1


def test_a_graph_made_executable_unseen_is_asked_for_when_saving(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("k")
    graph.capture_end()
    graph.executable = 777  # a first replay() does that in C++
    setting.captures.complete()
    assert setting.graphs.document()["graphs"][0]["executables"] == [101, 777]
    graph.reset()
    graph.executable = 888  # another capture's
    setting.captures.complete()
    assert setting.graphs.document()["graphs"][0]["executables"] == [101, 777]


def test_a_capture_that_fails_at_its_end_leaves_nothing_and_raises_its_own_error(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("fail")
    with pytest.raises(RuntimeError, match="capture failed"):
        graph.capture_end()
    with pytest.raises(thence.MissingData, match="failed at its end"):
        setting.graphs.document()


def test_a_capture_that_is_over_unexpectedly_is_not_touched_again(setting) -> None:
    graph = setting.graph_class()
    with thence.mark("a"):
        graph.capture_begin()
        lost = setting.cuda.capturing.pop(1)  # invalidated: its handle may dangle
        del setting.cuda.graphs[lost]
        with thence.mark("b"):
            pass
    setting.captures.ending()
    with pytest.raises(thence.MissingData, match="A capture failed"):
        setting.graphs.document()


def test_a_capture_that_ended_unseen_does_not_hide_the_next_on_its_stream(setting) -> None:
    first, second = setting.graph_class(), setting.graph_class()
    first.capture_begin()
    setting.cuda.launch("lost")
    setting.cuda.capturing.clear()  # somebody called cudaStreamEndCapture
    second.capture_begin()
    with thence.mark("a"):
        setting.cuda.launch("k")
    second.capture_end()
    assert setting.labels() == [("kernel", "a", "forward")]
    assert any("ended without" in note for note in setting.graphs.notes)


def test_a_capture_that_began_unseen_is_seen_from_the_first_mark_on(setting) -> None:
    setting.cuda.begin()
    setting.cuda.launch("k0")
    setting.captures.begun()
    with thence.mark("a"):
        setting.cuda.launch("k1")
    graph = setting.graph_class()
    graph.capture_end()
    assert [path for _, path, _ in setting.labels()] == ["", "a"]


def test_an_empty_graph_is_left_out(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    graph.capture_end()
    assert len(setting.graphs) == 0


def test_nodes_of_child_graphs_are_numbered_after_all_others(setting) -> None:
    # As instantiation numbers them (measured with driver 580): level by level inside each child.
    cuda = setting.cuda
    deepest = cuda.begin(50)
    deepest.nodes = [("kernel", "deep")]
    child = cuda.begin(51)
    child.nodes = [("kernel", "c0"), ("graph", deepest.id), ("kernel", "c1")]
    child.edges = [(0, 1), (1, 2)]
    cuda.capturing.clear()
    graph = setting.graph_class()
    graph.capture_begin()
    cuda.launch("k0")
    with thence.mark("library"):
        cuda.add_child(child)
    cuda.launch("k1")
    cuda.add_child(child)
    graph.capture_end()
    document = setting.graphs.document()
    nodes = document["graphs"][0]["nodes"]
    names = [document["kernels"][k]["name"] if k >= 0 else "graph" for k in nodes["kernel"]]
    assert list(zip(nodes["number"], names, nodes["parent"], strict=True)) == [
        *((0, "k0", -1), (1, "graph", -1), (2, "k1", -1), (3, "graph", -1)),
        *((4, "c0", 1), (5, "graph", 1), (6, "c1", 1), (7, "deep", 5)),
        *((8, "c0", 3), (9, "graph", 3), (10, "c1", 3), (11, "deep", 9)),
    ]
    paths = [path for _, path, _ in setting.labels()]
    assert paths == ["", "library", "", "", *("library",) * 4, "", "", "", ""]
    assert (4, 5) in document["graphs"][0]["edges"]


def test_a_kernel_without_a_name_and_conditional_nodes_are_told(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("?")
    setting.cuda.launch("while", "conditional")
    graph.capture_end()
    document = setting.graphs.document()
    assert document["graphs"][0]["nodes"]["kernel"] == [-1, -1]
    assert any("conditional" in note for note in document["notes"])


def test_without_a_driver_the_program_runs_and_the_reason_is_kept() -> None:
    def missing():
        raise MissingRequirement("there is no NVIDIA driver here")

    graphs = LabelledGraphs()
    captures = Captures(graphs, FakeCuda(), watch, missing, missing)
    captures.begun()
    assert captures.ending() is None
    with pytest.raises(thence.MissingData, match="there is no NVIDIA driver here"):
        graphs.document()


def test_undoing_leaves_the_class_as_it_was(setting) -> None:
    patched = setting.graph_class.capture_begin
    setting.undo()
    assert setting.graph_class.capture_begin is not patched
    assert not hasattr(setting.graph_class.capture_begin, "__wrapped__")


def test_the_file_is_whole_and_says_whose_it_is(setting, tmp_path) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    with thence.mark("ä", lane="side", x=1.5, y=["z"], odd=object):
        setting.cuda.launch("_Z3fooi")
    graph.capture_end()
    target = tmp_path / "labels.json"
    target.write_text("old")
    write_whole(target, setting.graphs.document())
    document = json.loads(target.read_text())
    assert (document["format"], document["version"]) == ("thence.graph-labels", 3)
    process = document["process"]
    assert process["pid"] == os.getpid()
    assert process["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert 0 < process["started_ns"] < process["saved_ns"] <= time.time_ns()
    assert document["kernels"] == [{"name": "_Z3fooi", "demangled": "foo(int)"}]
    (label,) = document["labels"]
    assert label["path"] == ["ä"]
    assert label["lane"] == "side"
    assert label["metadata"]["x"] == 1.5
    assert isinstance(label["metadata"]["odd"], str)
    assert list(tmp_path.iterdir()) == [target]


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path) -> None:
    with pytest.raises(thence.UsageError, match="cannot be written"):
        write_whole(tmp_path / "missing" / "labels.json", {})
    with pytest.raises(TypeError):
        write_whole(tmp_path / "labels.json", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_marks_in_a_capture_ask_the_driver_once_each(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    before = setting.cuda.asked
    for i in range(1000):
        with thence.mark(f"m{i}"):
            setting.cuda.launch("k")
    assert setting.cuda.asked - before == 2000
    graph.capture_end()
    assert [path for _, path, _ in setting.labels()] == [f"m{i}" for i in range(1000)]


def placed(document: Any, graph: int = -1) -> list[dict[str, Any] | None]:
    """The place of each node of a graph; None without one."""
    places = document["graphs"][graph]["nodes"]["place"]
    return [document["places"][n] if n >= 0 else None for n in places]


class Around:
    """What hooks of eager code would know."""

    def __init__(self, places: Places) -> None:
        self.now = {LINE: places.number(Place(LINE, 0, "main", "/me/train.py", 3))}

    def current_module(self) -> str | None:
        return "block"

    def current_place(self, kind: int) -> int:
        return self.now.get(kind, 0)

    def is_own(self, file: str) -> bool:
        return bool(file)


@pytest.fixture
def recorded(setting, monkeypatch) -> Iterator[tuple[BoundaryLog, Places]]:
    """Boundaries of a recording that captures listen to."""
    log, places = BoundaryLog(lambda: 0), Places()
    setting.captures.follow_boundaries((log, places))
    monkeypatch.setattr(generated, "around", Around(places))
    yield log, places
    assert log.observer is None


def test_nodes_get_the_places_of_the_boundaries_before_them(setting, recorded) -> None:
    log, places = recorded
    module = places.number(Place(MODULE, 0, "layers.0", "Block"))
    line = places.number(Place(LINE, places.number(Place(LINE, 0, "main", "/me/train.py", 3)), "f", "/me/m.py", 0))
    log.note(module)  # before: only what holds at its beginning counts, and the hooks know that
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("k0")
    log.note(module)
    log.note(places.number(Place(PHASE, 0, "forward")))
    setting.cuda.launch("k1")
    with thence.mark("mine"):
        log.note(line)
        setting.cuda.launch("k2")
    log.note(places.nothing(MODULE))
    log.note(places.nothing(PHASE))
    setting.cuda.launch("k3")
    elsewhere = threading.Thread(target=log.note, args=(module,))
    setting.cuda.stream = 5  # not captured
    elsewhere.start()
    elsewhere.join()
    setting.cuda.stream = 1
    setting.cuda.launch("k4")
    graph.capture_end()
    document = json.loads(json.dumps(setting.graphs.document()))
    main = ["/me/train.py:3 main"]
    assert [place and (place["module"], place["stack"], place["phase"]) for place in placed(document)] == [
        (None, main, None),
        ("layers.0", main, "forward"),
        ("layers.0", [*main, "/me/m.py:0 f"], "forward"),
        (None, [*main, "/me/m.py:0 f"], None),
        (None, [*main, "/me/m.py:0 f"], None),
    ]
    assert [path for _, path, _ in setting.labels()] == ["", "", "mine", "", ""]


def test_a_capture_without_a_recording_has_no_places(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("k0")
    graph.capture_end()
    assert placed(setting.graphs.document()) == [None]


@pytest.mark.usefixtures("recorded")
def test_launches_of_generated_code_have_the_places_in_its_comments(setting, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", ModuleType("codecache"))
    frames = ("/me/model.py:9 forward",)
    linear = Part("up", frames, "aten.linear", "forward", 0.75, ("mlp",))
    gelu = Part("act", frames, "aten.gelu", "forward", 0.25, ("act",))
    code = generated_module(tmp_path, "forward", [(linear,), (linear, gelu), ()])
    generated.loaded(code, ())
    graph = setting.graph_class()
    graph.capture_begin()
    setting.cuda.launch("k0")
    code.call([lambda: setting.cuda.launch("k")])
    setting.cuda.launch("k4")
    graph.capture_end()
    document = setting.graphs.document()
    first, fused, *_ = placed(document)[1:]
    main = "/me/train.py:3 main"
    assert first is not None
    assert first["module"] == "block.up"
    assert (first["stack"], first["op"]) == ((main, *frames), "aten.linear")
    assert first["parts"] == ()
    assert fused is not None
    assert fused["module"] == "block.up"
    assert [(part[0], part[2], part[-1]) for part in fused["parts"]] == [
        ("block.up", "aten.linear", 0.75),
        ("block.act", "aten.gelu", 0.25),
    ]
    assert [place and place["module"] for place in placed(document)] == [*(None, "block.up", "block.up", None, None)]
    assert [path for _, path, _ in setting.labels()] == ["", "mlp", "mlp", "", ""]
    code.call([lambda: None])  # nobody follows any more
    assert sys.gettrace() is None


def test_nodes_name_the_open_mark_that_states_their_work(setting) -> None:
    graph = setting.graph_class()
    graph.capture_begin()
    for _ in range(2):
        with thence.mark("outer", flop=100):
            setting.cuda.launch("a")
            with thence.mark("inner", layer=1):
                setting.cuda.launch("b")
            with thence.mark("stated", bytes=8):
                setting.cuda.launch("c")
    graph.capture_end()
    document = setting.graphs.document()
    nodes = document["graphs"][0]["nodes"]["label"]
    of = [document["labels"][label]["metadata"].get("work_of") for label in nodes]
    assert of[0] == of[1] != of[3] == of[4], "each time that the mark is open"
    assert len({of[0], of[2], of[3], of[5]}) == 4
    metadata = [document["labels"][label]["metadata"] for label in nodes[:3]]
    assert [m.get("flop") for m in metadata] == [100, 100, None], "what the outer mark states is not about this alone"
    assert metadata[2]["bytes"] == 8
