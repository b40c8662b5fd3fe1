"""Whether stacks can be read is tried out, and wrong offsets are an answer, not a fault."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from thence.capture.boundaries import stacks
from thence.capture.boundaries.probe import NativeProbe, choose_probe
from thence.capture.boundaries.stacks import LAYOUTS, why_unreadable

VERSION = sys.version_info[:2]
known = pytest.mark.skipif(VERSION not in LAYOUTS, reason="the stack of this Python is not known")


@pytest.fixture
def native() -> Any:
    probe = choose_probe()
    if not isinstance(probe, NativeProbe):
        pytest.skip("the probe was not compiled")
    return probe.compiled


@known
def test_this_python_keeps_its_stack_as_its_version_does(native: Any) -> None:
    assert why_unreadable(native) is None


@known
@pytest.mark.parametrize("field", stacks.Layout._fields)
@pytest.mark.parametrize("by", [-16, -8, 8, 16, 1 << 20])
def test_wrong_offsets_are_found_out(native: Any, field: str, by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LAYOUTS[VERSION]
    wrong = right._replace(**{field: getattr(right, field) + by})
    if wrong.through < 0 and right.through < 0:
        return  # any negative number says that there is none
    monkeypatch.setitem(LAYOUTS, VERSION, wrong)
    assert "differs from the known layout" in str(why_unreadable(native))


def test_unknown_versions_and_builds_say_so(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LAYOUTS, VERSION, raising=False)
    assert "is not known" in str(why_unreadable(native))
    monkeypatch.setitem(LAYOUTS, VERSION, next(iter(LAYOUTS.values()), None))
    monkeypatch.setattr(sys, "abiflags", "t")
    assert "abiflags t" in str(why_unreadable(native))
    assert why_unreadable(None) == "the compiled probe is not in use"
    monkeypatch.setenv("THENCE_LINES", "events")
    assert "THENCE_LINES" in str(why_unreadable(native))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("use_layout", (1, 2)),
        ("use_layout", ("a",) * 6),
        ("add_code", (0, 5)),
        ("add_code", ("text", 5)),
        ("add_module", (1,)),
        ("chains_from", ("text",)),
        ("begin_stacks", (None,)),
        ("count_nodes", (-1.5,)),
        ("go_below", (1, 2, 3)),
        ("leave_engine", (())),
        ("leave_engine", ((1,),)),
        ("set_callbacks", ((1, 2),)),
        ("set_callbacks", (None,)),
        ("code_kind", ("text",)),
    ],
)
def test_what_makes_no_sense_is_refused(native: Any, name: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        getattr(native, name)(*arguments)
