"""Which launches of generated code are told, to whom, and with which module instance."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from generated_code import fake_torch, generated_module
from thence.capture.boundaries.places import LINE, MODULE
from thence.capture.marks.generated_lines import GeneratedLines
from thence.capture.marks.launch_facts import Part, comment_of

MONITORS = sys.version_info >= (3, 12)
UP = Part("up", ("/me/model.py:1 forward",), "aten.mm", "forward", 1.0)
DOWN = UP._replace(module="down")
BACK = UP._replace(phase="backward")


class Around:
    """The module and line that eager code is in, as a test sets them."""

    def __init__(self) -> None:
        self.module: str | None = None
        self.places = {LINE: 0, MODULE: 0}

    def current_module(self) -> str | None:
        return self.module

    def current_place(self, kind: int) -> int:
        return self.places.get(kind, 0)

    def is_own(self, file: str) -> bool:
        return bool(file)


class Told:
    """A follower: what it is told, as (path, operator), None for the end of a function."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, run, facts) -> None:
        if facts is None:
            self.events.append(None)
        else:
            part = facts.parts[0] if facts.parts else None
            self.events.append(part and (run.path(part.module), run.line, run.phase))


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", ModuleType("codecache"))
    found = GeneratedLines()
    found.around = Around()
    return found


def follow(lines: GeneratedLines, told: Told) -> Any:
    """Follow, in the way that this Python has."""
    assert lines.follow(told) if MONITORS else lines.trace(told)
    return lambda: lines.unfollow(told) if MONITORS else lines.untrace(told)


def torch_is(monkeypatch, **what: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(**what))


def test_each_launch_is_told_before_it_and_the_end_after_all(lines, tmp_path) -> None:
    code = generated_module(tmp_path, "inference", [(UP,), (DOWN,), ()])
    told = Told()
    lines.loaded(code, ())
    stop = follow(lines, told)
    for _ in range(2):
        code.call([lambda: told.events.append("launch")])
    stop()
    once = [("up", 0, ""), "launch", ("down", 0, ""), "launch", None, "launch", None]
    assert told.events == once * 2
    code.call([lambda: None])
    assert len(told.events) == 2 * len(once)
    assert sys.gettrace() is None


def test_launches_are_told_once_each_where_functions_have_many_names(lines, tmp_path) -> None:
    """As long functions have: their instructions take more than one byte for an operand."""
    launches = [(UP._replace(op=f"op{n}"),) for n in range(400)]
    module = generated_module(tmp_path, "inference", launches)
    text = "".join(f"    # {comment_of(parts)}\n    name{n} = launch()\n" for n, parts in enumerate(launches))
    head = "# AOT ID: ['0_inference']\ndef call(args):\n    launch, = args\n"
    names = "".join(f"    name{n}\n" for n in range(400))
    text = (
        head
        + text
        + "".join(
            f"    # {comment_of(parts)}\n    name{399 - n}.bit_length()\n    launch()\n"
            for n, parts in enumerate(launches)
        )
        + names
        + "    return ()\n"
    )
    path = tmp_path / "long.py"
    path.write_text(text)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    told: list[str | None] = []
    now: list[str] = []

    def changed(_run, facts) -> None:
        now[:] = [facts.parts[0].op] if facts is not None else []

    def launch() -> int:
        told.append(now[0] if now else None)
        return 1

    lines.loaded(module, ())
    stop = follow(lines, changed)
    module.call([launch])
    stop()
    assert told == [f"op{n}" for n in range(400)] * 2


def test_code_that_is_loaded_while_somebody_follows_is_followed(lines, tmp_path) -> None:
    told = Told()
    stop = follow(lines, told)
    code = generated_module(tmp_path, "inference", [(UP,)])
    lines.loaded(code, ())
    code.call([lambda: None])
    stop()
    assert told.events == [("up", 0, ""), None]


def test_other_modules_are_not_read(lines, tmp_path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text("# thence: []\n")
    module = ModuleType("kernel")
    module.__file__ = str(path)
    lines.loaded(module, ())
    module.__file__ = str(tmp_path / "missing.py")
    lines.loaded(module, ())
    assert len(lines.notes) == 1  # of the one that cannot be read


def test_instances_that_share_code_are_told_apart_by_the_module_that_runs(lines, tmp_path, monkeypatch) -> None:
    forward = generated_module(tmp_path, "forward", [(UP,)], "forward")
    backward = generated_module(tmp_path, "backward", [(BACK,)], "backward")
    told = Told()
    for code in (forward, backward):
        lines.loaded(code, ())
    stop = follow(lines, told)
    for number in range(3):
        lines.around.module = f"layers.{number}"
        lines.around.places[LINE] = 70 + number
        # autograd gave its number just before the code began
        torch_is(monkeypatch, sequence=10 * number + 1)
        forward.call([lambda: None])
    lines.around.module = None
    for number in (2, 1, 0):
        torch_is(monkeypatch, node=SimpleNamespace(_sequence_nr=lambda n=number: 10 * n))
        backward.call([lambda: None])
    torch_is(monkeypatch, node=SimpleNamespace(_sequence_nr=lambda: 5))
    backward.call([lambda: None])
    stop()
    launches = [event for event in told.events if event]
    assert launches == [
        *(("layers.0.up", 70, ""), ("layers.1.up", 71, ""), ("layers.2.up", 72, "")),
        *(("layers.2.up", 72, ""), ("layers.1.up", 71, ""), ("layers.0.up", 70, "")),
        ("up", 0, ""),  # a forward that nobody saw
    ]


def test_a_forward_inside_an_autograd_node_is_computed_anew(lines, tmp_path, monkeypatch) -> None:
    code = generated_module(tmp_path, "forward", [(UP,)])
    lines.loaded(code, ())
    told = Told()
    stop = follow(lines, told)
    torch_is(monkeypatch, node=SimpleNamespace(_sequence_nr=lambda: 1))
    code.call([lambda: None])
    stop()
    assert told.events[0] == ("up", 0, "recompute")


def test_equal_numbers_of_two_threads_tell_nothing(lines, tmp_path, monkeypatch) -> None:
    forward = generated_module(tmp_path, "forward", [(UP,)], "forward")
    backward = generated_module(tmp_path, "backward", [(BACK,)], "backward")
    for code in (forward, backward):
        lines.loaded(code, ())
    told = Told()
    lines.around.module = "a"
    stop = follow(lines, told)
    forward.call([lambda: None])
    if not MONITORS:  # sys.settrace is of one thread
        stop()
        return
    lines.around.module = "b"
    other = threading.Thread(target=forward.call, args=([lambda: None],))
    other.start()
    other.join()
    torch_is(monkeypatch, node=SimpleNamespace(_sequence_nr=lambda: 0))
    backward.call([lambda: None])
    stop()
    assert [event for event in told.events if event][-1] == ("up", 0, "")


def test_an_exception_does_not_leave_a_stale_instance(lines, tmp_path) -> None:
    code = generated_module(tmp_path, "inference", [(UP,)])
    lines.loaded(code, ())
    told = Told()

    def fail() -> None:
        raise KeyError

    stop = follow(lines, told)
    lines.around.module = "a"
    with pytest.raises(KeyError):
        code.call([fail])
    lines.around.module = "b"
    code.call([lambda: None])
    stop()
    assert [event for event in told.events if event] == [("a.up", 0, ""), ("b.up", 0, "")]


def test_what_a_follower_raises_stays_out_of_the_program(lines, tmp_path) -> None:
    code = generated_module(tmp_path, "inference", [(UP,)])
    lines.loaded(code, ())

    def bad(_run: object, _facts: object) -> None:
        raise KeyError("ours")

    stop = follow(lines, bad)
    assert code.call([lambda: None]) == ()
    stop()
    assert any("ours" in note for note in lines.notes)


def test_a_debugger_is_not_disturbed(lines) -> None:
    before = sys.gettrace()

    def tracer(*_args: object) -> None:
        return None

    sys.settrace(tracer)
    try:
        assert not lines.trace(Told())
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)


@pytest.mark.skipif(not MONITORS, reason="sys.monitoring came with Python 3.12")
def test_ids_that_others_took_are_left_to_them_and_ours_is_given_back(lines, tmp_path) -> None:
    monitoring = sys.monitoring
    for number in (3, 4):
        monitoring.use_tool_id(number, "other")
    try:
        assert not lines.follow(Told())
        assert any("sys.monitoring" in note for note in lines.notes)
        monitoring.free_tool_id(3)
        lines.loaded(generated_module(tmp_path, "inference", [(UP,)]), ())
        told = Told()
        stop = follow(lines, told)
        assert str(monitoring.get_tool(3)).startswith("thence")
        stop()
        assert monitoring.get_tool(3) is None
    finally:
        for number in (3, 4):
            if monitoring.get_tool(number) == "other":
                monitoring.free_tool_id(number)
