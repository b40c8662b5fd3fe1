"""A recording of a program that nobody annotated, on a libcupti made for the tests, read again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import thence
from recorder_programs import program

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring came with Python 3.12")

SCRIPT = """\
def layer(n):
    launch("line_2")
    x = n + 1
    if n:
        launch("line_5")
    return x

def model():
    for n in range(3):
        layer(n)
    launch("line_11")

for _ in range(4):
    model()
    launch("line_15")
"""


def recorded(tmp_path: Path, options: str = "") -> thence.Trace:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    body = f"""
    import runpy
    options = thence.RecordOptions(own=("!fake_cupti",), {options})
    with thence.record(OUT, options):
        runpy.run_path({str(script)!r}, init_globals={{"launch": launch}})
    """
    program("if True:\n" + body, tmp_path / "out")
    return thence.open(tmp_path / "out")


@pytest.mark.parametrize("options", ["", "launches=True"], ids=["counted", "recorded"])
def test_every_kernel_has_its_line_and_its_callers(tmp_path: Path, options: str) -> None:
    trace = recorded(tmp_path, options)
    names = trace.tables.gpu["name"].cast(str).to_list()
    sources = trace.tables.places["source"].cast(str).to_list()
    stacks = trace.tables.places["stack"].cast(str).to_list()
    assert sorted(names) == sorted(["line_2"] * 12 + ["line_5"] * 8 + ["line_11"] * 4 + ["line_15"] * 4)
    for name, source, stack in zip(names, sources, stacks, strict=True):
        line = name.removeprefix("line_")
        assert f"train.py:{line} " in source, name
        assert ("model" in stack) == (line != "15"), name
    trace.self_check()


def test_lines_can_be_left_out(tmp_path: Path) -> None:
    trace = recorded(tmp_path, "lines=False")
    assert trace.tables.gpu.height == 28
    assert "source" not in trace.tables.places.columns or trace.tables.places["source"].null_count() == 28
