"""Backward passes of a real PyTorch that are followed by the numbers of nodes."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from launching import Watched  # noqa: E402
from thence.capture.boundaries.node_places import NodePlaces  # noqa: E402
from thence.capture.boundaries.places import MODULE, PHASE  # noqa: E402
from thence.capture.boundaries.stacks import LAYOUTS  # noqa: E402
from thence.capture.torch.running_nodes import RunningNodes  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.version_info[:2] not in LAYOUTS, reason="the stack of this Python is not known")

KERNEL = """
import threading
import torch
from torch import nn

class Launch(torch.autograd.Function):
    @staticmethod
    def forward(context, x, name):
        context.name = name
        launch(name)
        return x * 1

    @staticmethod
    def backward(context, gradient):
        return Launch.apply(gradient, context.name + "'"), None

class Part(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, x):
        return Launch.apply(x.sin(), self.name).exp()

class Net(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.first, self.second = Part(name + "1"), Part(name + "2")

    def forward(self, x):
        return self.second(self.first(x))

nets = {name: Net(name) for name in "ab"}
"""


@pytest.fixture(autouse=True)
def by_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "by_stack", True)


def watched(body: str, tmp_path: Path) -> Watched:
    first = "Net('x')(torch.ones(3, requires_grad=True)).sum().backward()\n"
    return Watched(KERNEL + first + body, tmp_path / "program.py", modules=True)


def modules(program: Watched) -> dict[str, set[tuple[str | None, str | None]]]:
    """Module and phase of the launches by name."""
    found: dict[str, set[tuple[str | None, str | None]]] = {}
    for one in program.launches:
        module, phase = program.place(one, MODULE), program.place(one, PHASE)
        names = module.name if module else None, phase.name if phase else None
        found.setdefault(str(one.name), set()).add(names)
    return found


def test_a_second_backward_pass_finds_the_forward_of_the_first(tmp_path: Path) -> None:
    body = """
x = torch.ones(3, requires_grad=True)
for _ in range(2):
    (gradient,) = torch.autograd.grad(nets["a"](x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
"""
    program = watched(body, tmp_path)
    assert program.hooks.backward_method() == {"by": "numbers", "trouble": None}
    found = modules(program)
    for part, name in (("a1", "first"), ("a2", "second")):
        [(path, phase)] = found[part]
        assert phase == "forward"
        assert str(path).endswith(name)
        assert found[part + "'"] == {(path, "backward")}
        assert found[part + "''"] == {(path, "backward")}


def test_threads_that_train_at_once_are_told_apart(tmp_path: Path) -> None:
    body = """
barrier = threading.Barrier(2)
def train(net):
    for _ in range(20):
        out = net(torch.ones(3, requires_grad=True)).sum()
        barrier.wait()
        out.backward()
threads = [threading.Thread(target=train, args=(net,)) for net in nets.values()]
for one in threads: one.start()
for one in threads: one.join()
"""
    program = watched(body, tmp_path)
    found = modules(program)
    paths = set()
    for part in ("a1", "a2", "b1", "b2"):
        [(path, phase)] = found[part]
        assert phase == "forward"
        assert path is not None
        assert found[part + "'"] == {(path, "backward")}
        paths.add(path)
    assert len(paths) == 4


def test_hooks_can_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THENCE_BACKWARD", "hooks")
    method = watched("", tmp_path).hooks.backward_method()
    assert method["by"] == "hooks"
    assert "THENCE_BACKWARD" in str(method["trouble"])


class Native:
    """Stands for a probe that finds something else than Python."""

    def __init__(self, agrees: bool | None) -> None:
        self.agrees = agrees

    def nodes_known(self) -> bool:
        return False

    def look_for_nodes(self, *addresses: int) -> int:
        assert all(addresses)
        return 1

    def maker(self) -> int:
        return 1

    def try_node(self, *_known: int) -> bool | None:
        return self.agrees

    def use_nodes(self) -> bool:
        return bool(self.agrees)


@pytest.mark.parametrize("agrees", [True, False, None])
def test_hooks_stay_until_nodes_agree(agrees: bool | None) -> None:
    native: Any = Native(agrees)
    nodes = RunningNodes(torch, native, NodePlaces(0))
    nodes._size = type(torch.ones(1, requires_grad=True).sin().grad_fn).__basicsize__
    nodes.called()
    tensor = torch.ones(3, requires_grad=True)
    for _ in range(5):
        tensor = tensor.sin()
        tensor.grad_fn.register_prehook(lambda _gradients: nodes.look())
        if agrees:
            assert nodes.trouble is not None
    tensor.sum().backward()
    assert (nodes.trouble is None) == bool(agrees)
    if agrees is False:
        assert "differently" in str(nodes.trouble)


def test_a_library_without_these_functions_keeps_hooks(tmp_path: Path) -> None:
    native: Any = Native(True)
    core = SimpleNamespace(_current_autograd_node=lambda: None)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"")
    other = SimpleNamespace(_C=core, __file__=str(tmp_path / "__init__.py"))
    assert "cannot be read" in str(RunningNodes(other, native, NodePlaces(0)).trouble)


def test_whoever_observes_is_told_of_the_places_of_the_backward_pass(tmp_path: Path) -> None:
    """As during a capture, where nodes have hooks therefore."""
    body = """
def observe(on):
    again[0].observer = told.append if on else None
def backward():
    out = nets["a"](torch.ones(3, requires_grad=True)).sum()
    observe(True)
    out.backward()
    observe(False)
Net('x')(torch.ones(3, requires_grad=True)).sum().backward()
backward()
"""
    told: list[int] = []
    program = Watched(
        KERNEL + body, tmp_path / "program.py", modules=True, between=True,
        variables={"told": told},
    )  # fmt: skip
    known = [program.known[number] for number in told if number]
    paths = [place.name for place in known if place.kind == MODULE]
    parts = [part for part, _ in itertools.groupby(str(path).rpartition(".")[2] for path in paths)]
    assert [part for part in parts if part in ("first", "second")] == ["second", "first"]
    found = modules(program)
    assert {path for path, _ in found["a1'"]} == {path for path, _ in found["a1"]}
