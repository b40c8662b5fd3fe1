"""Marks in PyTorch, on the CPU: backward passes, torch.profiler, and code that torch.compile traces."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import thence  # noqa: E402
from fake_cuda import FakeCuda  # noqa: E402
from marks_notes import Notes  # noqa: E402
from recorder_programs import Copies  # noqa: E402
from thence.capture.marks import frames, listen, unlisten  # noqa: E402
from thence.capture.marks.backward import BackwardMarks, patch_autograd  # noqa: E402
from thence.capture.marks.captures import Captures  # noqa: E402
from thence.capture.marks.graph_labels import LabelledGraphs  # noqa: E402
from thence.capture.marks.watching import watch  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def notes():
    listener = Notes()
    listen(listener)
    yield listener
    unlisten(listener)
    assert frames.top.get() is None


@pytest.fixture
def capturing():
    """A fake driver, graphs and captures, with backward passes followed for them alone."""
    cuda, graphs = FakeCuda(), LabelledGraphs()
    captures = Captures(graphs, cuda, watch, lambda: cuda, lambda: cuda)
    backward = BackwardMarks(torch, watch, captures)
    captures.in_backward = backward.current
    followed = torch.autograd.graph._engine_run_backward
    for owner in (torch.autograd.graph, torch.autograd):
        owner._engine_run_backward = followed.__wrapped__
    undo = patch_autograd(torch, backward)
    yield cuda, graphs, captures
    undo()
    for owner in (torch.autograd.graph, torch.autograd):
        owner._engine_run_backward = followed
    assert frames.top.get() is None
    assert not watch.live


def backward_of(notes: Notes) -> list[tuple[str | None, str]]:
    """(mark around the forward, autograd node) of every node that ran."""
    found = [e for e in notes.events if e[0] == "backward"]
    return [(notes.names.get(number) if number else None, str(name)) for _, number, name in found]


def test_backward_nodes_belong_to_the_mark_of_their_forward(notes) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    w = torch.randn(4, 4, requires_grad=True)
    with thence.mark("step"):
        with thence.mark("a"):
            y = (x @ w).relu()
        z = y * 2
        with thence.mark("b"):
            z = z.sin() + y
    loss = z.sum()
    loss.backward()
    assert sorted(backward_of(notes), key=str) == sorted(
        [
            (None, "SumBackward0"),
            ("b", "AddBackward0"),
            ("b", "SinBackward0"),
            ("step", "MulBackward0"),
            ("a", "ReluBackward0"),
            ("a", "MmBackward0"),
        ],
        key=str,
    )
    # Every node that began is over before the next one begins.
    order = [e[0] for e in notes.events if str(e[0]).startswith("backward")]
    assert order == ["backward", "backward over"] * 6


def test_gradients_are_what_they_are_without_marks(notes) -> None:
    def gradient() -> object:
        torch.manual_seed(0)
        x = torch.randn(8, 8, requires_grad=True)
        with thence.mark("a"):
            y = torch.softmax(x @ x, -1)
        (y * y).sum().backward()
        return x.grad

    watched = gradient()
    unlisten(notes)
    assert torch.equal(watched, gradient())
    listen(notes)


def test_a_second_backward_through_a_kept_graph_is_hooked_once(notes) -> None:
    x = torch.randn(3, requires_grad=True)
    with thence.mark("a"):
        y = (x * 2).sum()
    for _ in range(2):
        notes.events.clear()
        y.backward(retain_graph=True)
        assert backward_of(notes) == [("a", "SumBackward0"), ("a", "MulBackward0")]


def test_gradients_of_gradients(notes) -> None:
    x = torch.randn(3, requires_grad=True)
    with thence.mark("forward"):
        y = (x**3).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    with thence.mark("penalty"):
        penalty = (gradient * gradient).sum()
    notes.events.clear()
    penalty.backward()
    found = {name: mark for mark, name in backward_of(notes)}
    assert found["SumBackward0"] == "penalty"
    # Nodes that the first backward made are nobody's, whatever numbers they have; those of the
    # forward that the second comes through are still the forward's.
    assert {mark for mark, name in backward_of(notes)} <= {"penalty", "forward", None}
    assert ("penalty", "PowBackward0") not in backward_of(notes)
    assert found["PowBackward0"] in {None, "forward"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_the_forward_again_under_its_marks(notes, reentrant) -> None:
    from torch.utils.checkpoint import checkpoint

    w = torch.randn(4, 4, requires_grad=True)
    paths: list[object] = []

    def segment(x):
        for name in ("attention", "mlp"):
            with thence.mark(name):
                known = frames.thread.state.log.paths()
                paths.append(frames.label_of(frames.top.get(), known))
                x = (x @ w).sin()
        return x

    x = torch.randn(4, 4, requires_grad=True)
    with thence.mark("layer0"):
        y = checkpoint(segment, x, use_reentrant=reentrant)
    y.sum().backward()
    assert [label.path for label in paths] == [("layer0", "attention"), ("layer0", "mlp")] * 2
    assert [label.phase for label in paths] == ["forward"] * 2 + ["backward"] * 2
    marks = [mark for mark, name in backward_of(notes) if name in {"SinBackward0", "MmBackward0"}]
    assert marks == ["mlp", "mlp", "attention", "attention"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_context, x):
        return x * 2

    @staticmethod
    def backward(_context, gradient):
        with thence.mark("inside"):
            return gradient * 2


class Fails(Double):
    @staticmethod
    def backward(_context, _gradient):
        raise ValueError("it fails")


def test_a_custom_function_and_marks_in_its_backward(notes) -> None:
    x = torch.randn(3, requires_grad=True)
    with thence.mark("custom"):
        y = Double.apply(x)
    y.sum().backward()
    assert ("custom", "DoubleBackward") in backward_of(notes)
    kinds = [e[0] if e[0] != "backward" else e[2] for e in notes.events]
    at = kinds.index("DoubleBackward")
    assert kinds[at : at + 4] == ["DoubleBackward", "+", "-", "backward over"]


def test_after_a_backward_that_fails_the_next_one_is_right(notes) -> None:
    x = torch.randn(3, requires_grad=True)
    with thence.mark("bad"):
        y = Fails.apply(x).sum()
    with pytest.raises(ValueError, match="it fails"):
        y.backward()
    assert notes.events[-1] == ("backward over",)
    notes.events.clear()
    with thence.mark("good"):
        y = Double.apply(x).sum()
    y.backward()
    assert {mark for mark, _ in backward_of(notes)} == {"good"}


def test_a_graph_of_another_thread_gets_no_mark_of_this_one(notes) -> None:
    x = torch.randn(3, requires_grad=True)
    made: list[object] = []

    def work() -> None:
        y = x
        for _ in range(1000 + torch.autograd._get_sequence_nr()):  # numbers beyond this thread's
            y = y * 1.0
        made.append(y.sum())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    with thence.mark("mine"):
        (x * 2).sum()
    notes.events.clear()
    made[0].backward()  # type: ignore[attr-defined]
    assert backward_of(notes)[0] == (None, "SumBackward0")


def test_backward_through_a_capture_labels_what_its_nodes_make(capturing) -> None:
    cuda, graphs, captures = capturing

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            cuda.launch("forward")
            return x * 1

        @staticmethod
        def backward(_context, gradient):
            cuda.launch("backward")
            return gradient

    x = torch.randn(3, requires_grad=True)
    cuda.begin()
    captures.begun()
    with thence.mark("step"):
        y = Launches.apply(x)
        for name in ("layer0", "layer1"):
            with thence.mark(name):
                y = Launches.apply(y)
        loss = y.sum()
        with thence.mark("call"):
            loss.backward()
        cuda.launch("after")
    captures.ending()
    document = graphs.document()
    nodes = document["graphs"][0]["nodes"]
    found = [
        ("/".join(document["labels"][label]["path"]), document["labels"][label]["phase"]) for label in nodes["label"]
    ]
    assert found == [
        *(("step", "forward"), ("step/layer0", "forward"), ("step/layer1", "forward")),
        *(("step/layer1", "backward"), ("step/layer0", "backward"), ("step", "backward")),
        ("step", "forward"),
    ]


def test_a_capture_that_begins_inside_a_node_has_its_label(capturing) -> None:
    """As the graph trees of torch.compile do it: nobody watched when the backward began."""
    cuda, graphs, captures = capturing

    class Compiled(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            return x * 1

        @staticmethod
        def backward(_context, gradient):
            cuda.begin()
            captures.begun()
            cuda.launch("k")
            captures.ending()
            return gradient

    x = torch.randn(3, requires_grad=True)
    with thence.mark("block"):
        y = Compiled.apply(x)
    y.sum().backward()
    (label,) = graphs.document()["labels"]
    assert (label["path"], label["phase"]) == (("block",), "backward")


def test_torch_profiler_shows_marks_while_it_runs() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler, thence.mark("shown"):
        torch.ones(2).sum()
    names = [event.key for event in profiler.key_averages()]
    assert "shown" in names


def compiled(function, *arguments):
    """Compiles without breaks; the graphs that the backend was given."""
    graphs: list[object] = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    (graph,) = graphs
    return result, graph


def test_marks_leave_compiled_graphs_whole_and_name_their_nodes() -> None:
    @thence.mark("decorated")
    def inner(x):
        return x.cos()

    def function(x):
        with thence.mark("outer", layer=3):
            x = x.sin()
            with thence.mark("inner"):
                x = torch.softmax(x, -1)
        return inner(x)

    x = torch.randn(2, 4)
    result, graph = compiled(function, x)
    assert torch.equal(result, function(x))
    calls = [n for n in graph.graph.nodes if n.op.startswith("call")]
    paths = [n.meta["custom"]["thence"] for n in calls]
    assert paths == [["outer"], ["outer", "inner"], ["decorated"]]
    assert len(calls) == 3, "a mark adds no operation"
    assert frames.top.get() is None


def test_a_mark_around_a_graph_break_still_works() -> None:
    def function(x):
        with thence.mark("broken"):
            x = x.sin()
            torch._dynamo.graph_break()
            return x.cos()

    torch._dynamo.reset()
    x = torch.randn(4)
    assert torch.allclose(torch.compile(function, backend="eager")(x), function(x))
    assert torch.fx.traceback.current_meta == {}
    # What was given up leaves nothing behind for the next.
    test_marks_leave_compiled_graphs_whole_and_name_their_nodes()


def test_inductor_writes_marks_beside_its_kernels_and_captures_read_them() -> None:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    from thence.capture.marks.generated_lines import generated
    from thence.capture.marks.launch_facts import parts_of_text

    v, w = (torch.randn(64, 64, requires_grad=True) for _ in range(2))

    def function(x):  # library calls alone, so that no compiler is needed
        with thence.mark("first"):
            x = x @ v
        with thence.mark("second"):
            return x @ w

    def train():
        torch.compile(function, fullgraph=True)(torch.randn(32, 64)).backward(torch.ones(32, 64))

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        _, (forward, backward) = run_and_get_code(train)
    for code, expected in ((forward, ["first", "second"]), (backward, ["second", "first"])):
        launches = [parts for line in code.splitlines() if (parts := parts_of_text(line))]
        assert list(dict.fromkeys(part.marks[0] for (part,) in launches)) == expected
        assert {part.op for (part,) in launches} == {"aten.mm"}

    torch._dynamo.reset()
    told: list[object] = []

    def changed(_run, facts) -> None:
        told.append(facts and [part.marks for part in facts.parts])

    fast = torch.compile(function, fullgraph=True)
    x = torch.randn(32, 64)
    with torch.no_grad(), config.patch(force_disable_caches=True):
        fast(x)
        assert generated.follow(changed) or generated.trace(changed)
        fast(x)
        generated.unfollow(changed)
        generated.untrace(changed)
    assert told == [[("first",)], [("second",)], None]


TRACED = """
import thence
def backend(graph, _):
    print([n.meta["custom"]["thence"] for n in graph.graph.nodes if n.op == "call_method"])
    return graph
@torch.compile(backend=backend, fullgraph=True)
def function(x):
    with thence.mark("first"):
        return x.sin()
function(torch.ones(2))
"""
"""Ends the line of imports of a program."""


@pytest.fixture(scope="module")
def after_torch(tmp_path_factory) -> Iterator[Copies]:
    """Runs programs in which torch and its compiler were imported before thence."""
    with Copies("import torch._dynamo", tmp_path_factory.mktemp("copies")) as programs:
        yield programs


def test_a_mark_may_be_traced_before_any_mark_has_run(after_torch, tmp_path: Path) -> None:
    assert "[['first']]" in after_torch.program("import torch" + TRACED, tmp_path).splitlines()


def test_a_mark_may_be_traced_that_was_imported_before_torch() -> None:
    code = "from thence import mark; import torch" + TRACED
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[['first']]"


def test_looking_for_torch_while_cuda_initialises_does_not_wait_for_itself(after_torch, tmp_path: Path) -> None:
    """The recorder begins within torch.cuda._lazy_init, which holds a lock that is not reentrant."""
    program = """
        import signal, torch
        signal.alarm(120)
        with torch.cuda._initialization_lock:
            with thence.mark('x'): pass
        print('through')
    """
    assert after_torch.program(program, tmp_path).endswith("through\n")
