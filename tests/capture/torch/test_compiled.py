"""Boundaries that a recording notes while generated code runs."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from generated_code import fake_torch, generated_module
from launching import CompiledCounter
from thence.capture.boundaries.chains import Chains
from thence.capture.boundaries.log import BoundaryLog
from thence.capture.boundaries.places import LINE, MODULE, PHASE, Place, Places
from thence.capture.marks.generated import LineFacts
from thence.capture.marks.generated_lines import GeneratedLines, UnknownPlaces
from thence.capture.marks.launch_facts import Part
from thence.capture.torch.compiled import CompiledPlaces

MONITORS = sys.version_info >= (3, 12)
FRAMES = ("/me/model.py:4 forward", "/venv/site-packages/lib/ops.py:9 apply")
UP = Part("up", FRAMES, "aten.mm", "forward", 1.0)


class Around:
    """Eager code in one module, line and phase, of whose files only those in /me are shown."""

    def __init__(self, places: Places) -> None:
        self.places = {
            MODULE: places.number(Place(MODULE, 0, "block", "Block")),
            LINE: places.number(Place(LINE, 0, "main", "/me/train.py", 30)),
            PHASE: 0,
        }
        self.module: str | None = "block"

    def current_module(self) -> str | None:
        return self.module

    def current_place(self, kind: int) -> int:
        return self.places[kind]

    def is_own(self, file: str) -> bool:
        return file.startswith("/me/")


class Setting:
    """Generated code that is followed by whatever this Python has."""

    def __init__(self) -> None:
        self.places = Places()
        self.launches = 0
        self.log = BoundaryLog(lambda: self.launches)
        self.lines = GeneratedLines()
        self.around = Around(self.places)
        self.compiled = CompiledPlaces(self.places, self.log, self.around, self.lines)

    def run(self, folder: Any, kind: str, *launches: tuple[Part, ...]) -> list[tuple[Any, ...]]:
        """(module, chain of lines, phase) at each launch of a module, then after it.

        By the definition of a kernel's boundary: of each kind the last one whose counter is not above the number of
        launches before it.
        """
        code = generated_module(folder, kind, launches, f"code{self.launches}")
        self.lines.loaded(code, ())
        first = self.launches
        if MONITORS:
            assert self.compiled.begin()
        else:
            self.lines.around = self.around
            assert self.lines.trace(self.compiled.changed)
        try:
            code.call([self.launch])
        finally:
            self.compiled.end()
            self.lines.untrace(self.compiled.changed)
        rows = self.log.take()
        found = []
        for launch in range(first, self.launches + 1):
            at = {}
            for counter, number in zip(rows["counter"], rows["place"], strict=True):
                if counter <= launch:
                    at[self.places[int(number)].kind] = self.places[int(number)]
            found.append((at[MODULE].name, self.chain(at[LINE]), at[PHASE].name))
        return found

    def launch(self) -> None:
        self.launches += 1

    def chain(self, place: Place) -> list[str]:
        """The lines from the innermost outwards."""
        outer = self.chain(self.places[place.parent]) if place.parent else []
        return [f"{place.detail}:{place.line}", *outer] if place.name else outer


class StackSetting(Setting):
    """The same, where the compiled probe reads the stack at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = CompiledCounter("")
        native = self.counter.log.stack_reader
        assert native is not None
        self.log = self.counter.log
        self.chains = self.log.chains = Chains(native, self.places)
        self.compiled = CompiledPlaces(self.places, self.log, self.around, self.lines, chains=self.chains)
        self.numbers: list[int] = []

    def launch(self) -> None:
        self.numbers.append(self.counter.library.fake_launch())

    def run(self, folder: Any, kind: str, *launches: tuple[Part, ...]) -> list[tuple[Any, ...]]:
        code = generated_module(folder, kind, launches, "code")
        self.lines.loaded(code, ())
        self.chains.begin()
        self.chains.native.go_below(0, 1, self.around.places[MODULE], self.around.places[LINE])
        try:
            assert self.compiled.begin()
            self.launch()  # the thread's chain is that of eager code
            self.numbers.clear()
            code.call([self.launch])
            self.compiled.end()
            self.launch()
        finally:
            self.chains.end()
            self.counter.end()
        rows = self.log.take()
        found = []
        for number in self.numbers:
            at: dict[int, Place] = {}
            for counter, place in zip(rows["counter"], rows["place"], strict=True):
                if counter < number:
                    at[self.places[int(place)].kind] = self.places[int(place)]
            found.append((at[MODULE].name, self.chain(at[LINE]), at[PHASE].name))
        return found


MAIN = ["/me/train.py:30"]
MODEL = ["/me/model.py:4", *MAIN]


@pytest.fixture
def setting(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", ModuleType("codecache"))
    return Setting()


@pytest.mark.parametrize("kind", [Setting, StackSetting])
def test_launches_have_the_places_of_their_main_part_and_what_follows_those_around(setting, tmp_path, kind) -> None:
    setting = kind()
    softmax = Part(None, FRAMES[:1], "aten.softmax", "forward", 0.75)
    found = setting.run(tmp_path, "forward", (UP,), (UP._replace(module="down", share=0.25), softmax))
    assert found == [("block.up", MODEL, "forward"), ("block", MODEL, "forward"), ("block", MAIN, None)]


def test_python_of_the_users_inside_of_generated_code_has_its_own_lines(setting, tmp_path) -> None:
    setting = StackSetting()
    space: dict[str, Any] = {"launch": setting.launch}
    exec(compile("def op():\n    x = 1\n    launch()\n", "/me/op.py", "exec"), space)
    setting.chains.begin = lambda: None
    setting.chains.native.begin_stacks(0)
    setting.chains.own(space["op"].__code__)
    launch = setting.launch
    setting.launch = lambda: space["op"]() if len(setting.numbers) == 1 else launch()
    found = setting.run(tmp_path, "forward", (UP,), (UP._replace(op="mylib.op"),), (UP._replace(module="down"),))
    assert found == [
        ("block.up", MODEL, "forward"),
        ("block.up", ["/me/op.py:3", *MODEL], "forward"),
        ("block.down", MODEL, "forward"),
        ("block", MAIN, None),
    ]


def test_what_the_code_does_not_say_is_as_around_it(setting, tmp_path) -> None:
    phase = setting.places.number(Place(PHASE, 0, "optimizer"))
    setting.around.places[PHASE] = phase
    library = UP._replace(stack=FRAMES[1:])
    found = setting.run(tmp_path, "inference", (library,))
    assert found[0] == ("block.up", MAIN, "optimizer")


def test_a_module_that_cannot_be_told_says_why(setting, tmp_path) -> None:
    setting.run(tmp_path, "inference", (), (Part(None, (), "prims.fma", "forward", 1.0),))
    reasons = {place.detail for _, place in setting.places.take() if place.name is None}
    assert reasons == {"made_by_compiler", None}
    run = SimpleNamespace(module=SimpleNamespace(kind="backward"), prefix="", line=0, instance=0, phase="")
    before = LineFacts((Part(None, FRAMES, "aten.mm", "backward", 1.0),), before=True)
    setting.compiled.changed(run, before)
    rows = setting.log.take()
    noted = [setting.places[int(number)] for number in rows["place"]]
    assert [place.detail for place in noted if place.kind == MODULE] == ["compiled_before"]
    assert [place.name for place in noted if place.kind == PHASE] == ["backward"]


def test_sums_of_gradients_have_a_phase_and_no_module(setting, tmp_path, monkeypatch) -> None:
    node = SimpleNamespace(_sequence_nr=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", fake_torch(node=node))
    summed = Part(None, FRAMES, "aten.add", "gradient", 1.0)
    ((module, _, phase), _) = setting.run(tmp_path, "backward", (summed,))
    assert (module, phase) == (None, "gradient")


def test_equal_places_are_noted_once_but_after_operators_that_may_run_python(setting, tmp_path) -> None:
    setting.run(tmp_path, "forward", (UP,), (UP,), (UP._replace(op="aten.gelu"),))
    before = setting.launches
    setting.run(tmp_path, "forward", (UP._replace(op="mylib.op"),), (UP,))
    assert before == 3

    def boundaries(*launches: tuple[Part, ...]) -> int:
        code = generated_module(tmp_path, "forward", launches, "counted")
        setting.lines.loaded(code, ())
        setting.lines.around = setting.around
        (setting.lines.follow if MONITORS else setting.lines.trace)(setting.compiled.changed)
        code.call([setting.launch])
        setting.compiled.end()
        setting.lines.untrace(setting.compiled.changed)
        return len(setting.log.take()["place"])

    entering_and_leaving = boundaries((UP,))
    assert entering_and_leaving == 6  # three kinds
    assert boundaries((UP,), (UP,), (UP,)) == entering_and_leaving
    assert boundaries((UP._replace(op="mylib.op"),), (UP,)) == entering_and_leaving + 3


def test_without_events_it_says_what_is_lost(setting, monkeypatch) -> None:
    monkeypatch.setattr(setting.lines, "_begin", lambda: False)
    assert not setting.compiled.begin()
    assert any("Python 3.12" in note for note in setting.compiled.notes)
    setting.compiled.end()
    assert isinstance(setting.lines.around, UnknownPlaces)
