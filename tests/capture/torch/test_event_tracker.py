"""Every launch of a program has its line, or its function alone: never another's."""

from __future__ import annotations

import sys
import textwrap
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import pytest

from launching import Watched
from launching_program import EVERYTHING
from thence.capture.torch import event_tracker
from thence.capture.torch.event_tracker import successors

if TYPE_CHECKING:
    from pathlib import Path

needs_events = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")


def watched(body: str, tmp_path: Path, **options: object) -> Watched:
    return Watched(textwrap.dedent(body), tmp_path / "program.py", **options)  # type: ignore[arg-type]


@needs_events
@pytest.mark.parametrize("own", [0, 1], ids=["counter alone", "boundaries count"])
def test_every_line_that_launches_is_known(tmp_path: Path, own: int) -> None:
    program = watched(EVERYTHING + "for _ in range(3): round()\n", tmp_path, own=own)
    assert len(program.launches) > 500
    counts = program.verdicts()
    wrong = [(one, program.chain(one)) for one in program.launches if program.verdict(one) == "wrong"]
    assert not wrong[:3]
    assert counts["function"] == 0


@needs_events
@pytest.mark.usefixtures("method")
def test_many_rounds_stay_right_while_silent_lines_are_switched_off(tmp_path: Path) -> None:
    program = watched(EVERYTHING + "for _ in range(40): round()\n", tmp_path)
    wrong = [(one, program.chain(one)) for one in program.launches if program.verdict(one) == "wrong"]
    assert not wrong[:3]
    assert program.verdicts()["line"] > 0.9 * len(program.launches)


LATE = """
def late(i, at):
    x = 1
    launch("first")
    y = 2
    if i >= at:
        launch("late")
    z = 3
    i >= at and launch("later")
    w = 4
    w = 5
    launch("last")

def helper(i):
    a = 1
    return a if i < 100 else launch("helper")

def silent(i):
    a = 1
    b = 2; i < 100 or launch("silent")
    c = 3

def calls(i):
    launch("call")
    helper(i)
    q = 7
    silent(i); r = 8
    silent(i)
    s = 9
    for k in range(2):
        t = 1
        i < 100 or launch("loop")
        u = 2
    try:
        v = 1
        if i >= 100: raise KeyError
        v = 2
    except KeyError:
        launch("handled")
    launch("end")
"""


def wrong(program: Watched) -> list[object]:
    return [(one, program.chain(one)) for one in program.launches if program.verdict(one) == "wrong"]


@needs_events
def test_lines_that_launch_from_their_100th_run_on(tmp_path: Path) -> None:
    """Without a step they were switched off by then: their function is known, and no line is wrong."""
    program = watched(LATE + "for i in range(300): late(i, 100); calls(i)\n", tmp_path)
    assert not wrong(program)[:3]
    of = {name: set() for name in ("first", "last", "call", "end", "late", "silent", "loop", "helper")}
    for one in program.launches:
        of.get(str(one.name), set()).add(program.verdict(one))
    # These launch from the first run on, and a line that is watched follows each.
    assert of["first"] == of["last"] == of["call"] == of["end"] == {"line"}
    assert "function" in of["late"] | of["loop"] | of["silent"]


@needs_events
def test_at_a_later_step_such_lines_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_tracker, "CHANCE_SECONDS", 0)
    body = LATE + "for i in range(300):\n    late(i, 100); calls(i)\n    if i % 10 == 0: step()\n"
    program = watched(body, tmp_path)
    assert not wrong(program)[:3]
    after = [one for one in program.launches if one.counter > program.launches[-1].counter // 2]
    assert len(after) > 500
    assert {program.verdict(one) for one in after} == {"line"}


@needs_events
@pytest.mark.usefixtures("method")
def test_a_silent_line_costs_nothing_once_it_is_switched_off(tmp_path: Path) -> None:
    program = watched("def f():\n    for i in range(100_000):\n        x = i\n        y = x\nf()\n", tmp_path)
    assert len(program.rows["place"]) < 10 * event_tracker.QUIET_RUNS


@needs_events
@pytest.mark.usefixtures("method")
def test_a_silent_function_costs_nothing_in_the_end(tmp_path: Path) -> None:
    program = watched("def f(): pass\nfor i in range(100_000): f()\nlaunch()\n", tmp_path)
    assert len(program.rows["place"]) < 4 * event_tracker.QUIET_CALLS
    assert program.verdicts()["wrong"] == 0


@needs_events
@pytest.mark.usefixtures("method")
def test_a_function_that_launches_now_and_then_stays_known(tmp_path: Path) -> None:
    """In one of a hundred calls: more quiet calls in all than those after which a silent function is left alone."""
    body = """
    def f(i):
        if i % 100 == 0:
            launch("rare")

    for i in range(25_000):
        f(i)
    """
    program = watched(body, tmp_path)
    late = [one for one in program.launches if one.name == "rare"][-100:]
    assert len(late) == 100
    assert {program.verdict(one) for one in late} <= {"line", "function"}


@needs_events
@pytest.mark.usefixtures("method")
def test_threads_have_lines_of_their_own(tmp_path: Path) -> None:
    program = watched(
        """
        import threading, concurrent.futures

        def work(n):
            for i in range(n):
                launch("work")
                inner(i)
            launch("done")

        def inner(i):
            if i % 3 == 0:
                launch("inner")

        threads = [threading.Thread(target=work, args=(50,)) for _ in range(4)]
        for one in threads: one.start()
        launch("main")
        for one in threads: one.join()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(work, [10] * 6))
        launch("over")
        """,
        tmp_path,
    )
    assert len({one.thread for one in program.launches}) >= 6
    assert not wrong(program)[:3]
    assert program.verdicts()["function"] < 0.02 * len(program.launches)


@needs_events
@pytest.mark.usefixtures("method")
def test_functions_that_run_already_when_recording_begins(tmp_path: Path) -> None:
    program = watched(
        """
        def outer():
            generator = inner()
            next(generator)
            hooks.stop()
            hooks.__init__(*again)
            hooks.start()
            launch("outer")
            next(generator)
            launch("outer again")
            return middle()

        def inner():
            yield 1
            launch("inner")
            yield 2

        def middle():
            launch("middle")

        outer(); launch("module")
        """,
        tmp_path,
        between=True,
    )
    assert [program.chain(one) for one in program.launches] == [list(one.stack) for one in program.launches]


@needs_events
@pytest.mark.usefixtures("method")
def test_code_of_packages_counts_where_it_is_asked_for(tmp_path: Path) -> None:
    body = """
        exec(compile("def forward(f):\\n    f()\\n", "/lib/site-packages/transformers/llama.py", "exec"))
        def go(): forward(launch)
        go()
    """
    [launch] = (program := watched(body, tmp_path)).launches
    assert program.chain(launch) == [("<module>", 4), ("go", 3)]
    [launch] = (program := watched(body, tmp_path, packages=["transformers"])).launches
    place = program.place(launch, 2)
    assert place is not None
    assert (place.name, place.line) == ("forward", 2)
    above = program.known[place.parent]
    assert (above.name, above.line) == ("go", 3)


@needs_events
def test_without_a_counter_lines_are_followed_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every launch is recorded, nothing says which line launched: none is switched off soon."""
    monkeypatch.setattr("launching.Counter.read", lambda _self: 0)
    body = "def f(i):\n    launch(i)\n    x = 1\nfor i in range(500): f(i)\n"
    program = watched(body, tmp_path)
    places = [program.known[int(n)] for n in program.rows["place"] if n]
    assert sum(place.line == 2 for place in places) == 500
    body = "def f():\n    for i in range(300_000):\n        x = i\nf()\n"
    program = watched(body, tmp_path)
    assert len(program.rows["place"]) < 3 * event_tracker.BLIND_RUNS


# Which lines can run right after which: compared with what Python's own tracing sees.


def codes(code: CodeType) -> list[CodeType]:
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [code, *(deep for one in inner for deep in codes(one))]


def test_every_line_that_followed_another_was_expected() -> None:
    """sys.settrace tells of the lines of every frame as they come."""
    seen: set[tuple[CodeType, int, int]] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename != "everything.py":
            return None
        if event == "line":
            if frame in last and last[frame] != frame.f_lineno:
                seen.add((frame.f_code, last[frame], frame.f_lineno))
            last[frame] = frame.f_lineno
        return trace

    before = sys.gettrace()
    code = compile(EVERYTHING + "round()\nround()\n", "everything.py", "exec")
    sys.settrace(trace)
    try:
        exec(code, {"launch": lambda _name=None: None, "__name__": "everything"})
    finally:
        sys.settrace(before)
    assert len(seen) > 150
    unexpected = [(c.co_name, a, b) for c, a, b in seen if b not in successors(c).get(a, frozenset())]
    assert not unexpected


def test_straight_lines_have_one_successor() -> None:
    code = compile("a = 1\nb = 2\nif a:\n    b = 3\nelse:\n    b = 4\nc = 5\n", "x.py", "exec")
    after = successors(code)
    assert after[1] == {2}
    assert after[2] == {3}
    assert after[3] == {4, 6}
    assert after[4] == after[6] == {7}
    assert after[7] == frozenset()


def test_an_exception_leads_to_its_handlers() -> None:
    source = "try:\n    f()\n    g()\nexcept KeyError:\n    h()\nfinally:\n    i()\n"
    after = successors(compile(source, "x.py", "exec"))
    assert {3, 4} <= after[2]
    assert after[3] >= {4, 7}
    assert after[5] >= {7}
