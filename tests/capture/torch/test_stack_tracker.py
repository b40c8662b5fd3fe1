"""Modules and lines that are read of the stack: at launches, where autograd nodes are made, and in captures."""

from __future__ import annotations

import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from launching import CompiledCounter, Watched
from launching_program import EVERYTHING
from thence.capture.boundaries.log import READ
from thence.capture.boundaries.places import LINE, MODULE
from thence.capture.boundaries.stacks import LAYOUTS
from thence.capture.torch.stack_tracker import StackTracker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.version_info[:2] not in LAYOUTS, reason="the stack of this Python is not known")


@pytest.fixture(autouse=True)
def by_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "by_stack", True)


def watched(body: str, tmp_path: Path, **options: Any) -> Watched:
    program = Watched(textwrap.dedent(body), tmp_path / "program.py", **options)
    assert isinstance(program.hooks._tracker, StackTracker)
    assert program.hooks.forward_method() == {"by": "stack", "trouble": None}
    assert not program.warnings
    return program


def test_every_launch_has_its_line_however_late_it_comes(tmp_path: Path) -> None:
    late = """
    def late(i):
        x = 1
        i < 400 or launch("late")
        return x

    for i in range(500):
        late(i); launch("always")
        late(i + 1) and (
            launch("two")
        )
    """
    program = watched(EVERYTHING + "round()\n" + textwrap.dedent(late), tmp_path)
    assert program.verdicts() == {"line": len(program.launches), "function": 0, "wrong": 0}
    assert sum(one.name == "late" for one in program.launches) == 100 + 101
    # Only changes are kept: two launches of one line after another are one row.
    assert len(program.rows["place"]) < 2 * len(program.launches)
    assert (program.rows["flags"] & READ).any()


def test_an_observer_is_told_of_a_line_before_it_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As during the capture of a CUDA graph, whose nodes have no launch of their own."""
    latest: dict[int, int] = {}
    seen: list[tuple[int, str, int]] = []
    launched = CompiledCounter.launched

    def noted(self: CompiledCounter, name: object, frame: Any) -> None:
        launched(self, name, frame)
        last = self.launches[-1]
        seen.append((latest.get(last.thread, 0), *last.stack[-1]))

    def told(place: int) -> None:
        latest[threading.get_native_id()] = place

    monkeypatch.setattr(CompiledCounter, "launched", noted)
    body = "log = again[0]\nlog.observer = told\n" + EVERYTHING + "round()\nlog.observer = None\n"
    program = Watched(
        body, tmp_path / "program.py", variables={"told": told}, between=True,
        packages=["!test_stack_tracker"],
    )  # fmt: skip
    known = [(program.known[number], name, line) for number, name, line in seen]
    assert not [one for one in known if (one[0].name, one[0].line) != one[1:]][:3]
    assert len(seen) > 100


TORCH = """
import torch
from torch import nn

def halves(x):
    first = x[..., :2]
    second = x[..., 2:]
    return [first * 2, second.expand(3, 2, 2)[0]]

def items(x):
    for i in range(2):
        y = x.transpose(0, 1)
        x = yield y[i:]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.Tanh()
        self.flat = nn.Flatten(0)

    def forward(self, x):
        a, b = halves(x)
        c = halves(x)[1].t()
        try:
            self.fails(a)
        except ValueError:
            d = a.view(-1)
        made = items(x)
        e = next(made)
        f = made.send(e.t())[:1]
        g = self.flat(x)
        h = self.act(
            x.unsqueeze(0)
        ).squeeze(0)
        return a, b, c, d, e, f, g, h

    def fails(self, x):
        y = x.view(-1)
        raise ValueError(y)

net = Net()
x = torch.randn(2, 4, requires_grad=True)
"""
ENDS = {  # of what node each result is, by the function and the text of the line that made it
    0: ("halves", "return ["),
    1: ("halves", "return ["),
    2: ("Net.forward", "c = "),
    3: ("Net.forward", "d = "),
    4: ("items", "x = yield"),
    5: ("Net.forward", "f = "),
    6: (None, "flat"),
    7: ("Net.forward", ".squeeze(0)"),
}


def test_nodes_that_launch_nothing_have_the_line_that_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("THENCE_BACKWARD", "hooks")  # which need the forward's nodes in Python
    nodes: list[Any] = []
    body = TORCH + (
        "for _ in range(3): results = net(x)\n"
        "launch('end')\n"
        "nodes.append([one.grad_fn for one in results])\n"
        "results[0].sum().backward()\n"
    )
    program = Watched(
        body, tmp_path / "program.py", modules=True,
        variables={"nodes": nodes},
    )  # fmt: skip
    common: Any = program.hooks._tracker.common
    [log] = common.makers
    lines = body.split("\n")

    def place_of(node: Any) -> tuple[str | None, str, str | None]:
        at = int(np.searchsorted(log.starts, node._sequence_nr(), "right")) - 1
        line = program.known[log.lines[at]]
        module = program.known[log.modules[at]]
        return line.name, lines[line.line - 1].strip(), module.name

    for at, (function, part) in ENDS.items():
        name, line, module = place_of(nodes[0][at])
        assert part in line, (at, line)
        if function is not None:
            assert name == function, at
        assert module == ("flat" if at == 6 else "Net"), at
    first = nodes[0][0].next_functions[0][0]  # of `first`, which launches nothing in its line
    assert place_of(first)[1].startswith("first = ")
    second = nodes[0][1].next_functions[0][0]
    assert place_of(second.next_functions[0][0])[1].startswith("second = ")


INFERENCE = """
import torch
from torch import nn

class Block(nn.Module):
    def forward(self, x):
        y = x + 1
        launch("block")
        return y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        launch("net")
        return x

net = Net()
x = torch.randn(2)
with torch.no_grad():
    for _ in range(4): net(x)
events(Net.forward.__code__)
x.requires_grad_()
net(x).sum()
events(Net.forward.__code__)
net(x).sum().backward()
launch("outside")
"""


def test_lines_need_no_events_before_the_first_autograd_node(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monitoring = getattr(sys, "monitoring")  # noqa: B009 - the type checker knows Python 3.11
    seen: list[int] = []

    def events(code: Any) -> None:
        seen.append(sum(monitoring.get_local_events(tool, code) for tool in (3, 4)
                        if monitoring.get_tool(tool) == "thence"))  # fmt: skip

    program = watched(INFERENCE, tmp_path, modules=True, variables={"events": events})
    assert seen[0] == 0
    assert seen[1] != 0
    assert program.verdicts() == {"line": len(program.launches), "function": 0, "wrong": 0}
    paths = {one.name: set() for one in program.launches}
    for one in program.launches:
        place = program.place(one, MODULE)
        paths[one.name].add(place.name if place else None)
    assert paths == {"block": {"blocks.0", "blocks.1", "blocks.2"}, "net": {"Net"}, "outside": {None}}
    assert monitoring.get_tool(3) is monitoring.get_tool(4) is None


def test_nothing_stays_set_after_a_recording(tmp_path: Path) -> None:
    monitoring = getattr(sys, "monitoring")  # noqa: B009
    kept: list[Any] = []
    watched("def f(): launch()\nf()\nkept.append(f.__code__)\n", tmp_path, variables={"kept": kept})
    monitoring.use_tool_id(3, "a test")
    try:
        assert monitoring.get_local_events(3, kept[0]) == 0
    finally:
        monitoring.free_tool_id(3)


def test_modules_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = watched(INFERENCE.replace("events(Net.forward.__code__)", ""), tmp_path, modules=True, lines=False)
    assert not [one for one in program.known.values() if one.kind == LINE and one.name]
    assert {program.place(one, MODULE).name for one in program.launches if one.name == "block"} == {
        "blocks.0", "blocks.1", "blocks.2",
    }  # fmt: skip


def test_a_recording_after_another_one_knows_the_same(tmp_path: Path) -> None:
    """Functions that did not run between the two, and had no events in the first."""
    pytest.importorskip("torch")
    body = INFERENCE.partition("events(")[0] + (
        "hooks.stop()\nhooks.__init__(*again)\nhooks.start()\nwith torch.no_grad():\n    for _ in range(4): net(x)\n"
    )
    program = Watched(body, tmp_path / "program.py", modules=True, between=True)
    later = program.launches[16:]
    assert len(later) == 16
    assert {program.verdict(one) for one in later} == {"line"}


def test_errors_of_an_observer_do_not_reach_the_program(tmp_path: Path) -> None:
    def told(_place: int) -> None:
        raise ValueError

    program = Watched(
        "log = again[0]\nlog.observer = told\ndef f():\n    launch()\nf()\nlog.observer = None\n",
        tmp_path / "program.py", variables={"told": told}, between=True,
    )  # fmt: skip
    assert program.verdicts() == {"line": 1, "function": 0, "wrong": 0}
