"""Which lines can run right after which: compared with what Python's own tracing sees."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

from launching_program import EVERYTHING
from thence.capture.torch.successors import successors


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
