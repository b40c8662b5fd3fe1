"""Where Python has no events, or other tools have taken them, it is said, and nothing else happens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from launching import Watched
from thence.capture.torch.monitoring import free_id, why_not

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "launch('a')\nstep()\nlaunch('b')\n"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python has events")
def test_old_pythons_say_what_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    program = Watched(PROGRAM, tmp_path / "program.py", modules=True)
    assert len(program.launches) == 2
    assert not len(program.rows["place"])
    [warning] = program.warnings
    assert str(why_not()) in warning
    assert "Python 3.11 has no sys.monitoring" in warning
    assert "modules, lines, phases and steps are not recorded" in warning


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python has no events")
@pytest.mark.parametrize("taken", [(3,), (3, 4)])
def test_ids_that_other_tools_took(tmp_path: Path, taken: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monitoring = getattr(sys, "monitoring")  # noqa: B009 - the type checker knows Python 3.11
    for number in taken:
        monitoring.use_tool_id(number, "a debugger")
    try:
        if len(taken) == 2:
            monkeypatch.setitem(sys.modules, "torch", sys)
        program = Watched(PROGRAM, tmp_path / "program.py")
        assert [monitoring.get_tool(number) for number in taken] == ["a debugger"] * len(taken)
    finally:
        for number in taken:
            monitoring.free_tool_id(number)
    if len(taken) == 1:
        assert not program.warnings
        assert program.verdicts() == {"line": 2, "function": 0, "wrong": 0}
    else:
        [warning] = program.warnings
        assert "a debugger" in warning
        assert not len(program.rows["place"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python has no events")
def test_what_was_taken_is_given_back(tmp_path: Path) -> None:
    monitoring = getattr(sys, "monitoring")  # noqa: B009
    Watched(PROGRAM, tmp_path / "program.py")
    assert [monitoring.get_tool(number) for number in (3, 4)] == [None, None]
    assert free_id() == 3
