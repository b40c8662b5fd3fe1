"""``thence explain`` on the command line: its forms, its commands, and the slices that it draws."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from helpers import output
from loops import Loop, parts
from perfetto_reading import decoded


def test_its_commands_work_and_its_findings_are_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Loop(parts(7, us=(100, 300)), loader_us=2_000).write(tmp_path / "a trace.json")
    drawn = tmp_path / "found.pftrace"
    text, _ = output(capsys, "explain", path, "--format", "json", "--max-chars", "100000", "--annotate", drawn)
    document = json.loads(text)
    assert document["dropped"] == document["dropped_not_answered"] == 0
    commands = {c for f in document["findings"] for c in (f["next"], f["evidence"]["command"])}
    assert len(commands) >= 8
    for command in sorted(commands):
        words = [str(path) if word == "INPUT" else word for word in shlex.split(command)[1:]]
        assert str(path) in words
        output(capsys, *words)
    trace = decoded(drawn.read_bytes())
    slices = [s for s in trace.slices if trace.title(s.track).startswith("finding: ")]
    shown = {f["id"]: f["at"]["duration_ns"] for f in document["findings"] if f["at"] is not None}
    assert {s.name.split(" ", 1)[0]: s.end - s.start for s in slices} == shown != {}


@pytest.mark.parametrize("name", ["jax_single.xplane.pb.gz", "remat.xplane.pb.gz", "streams_default.xplane.pb"])
def test_it_proposes_no_change_that_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "data" / "jax" / name
    text, _ = output(capsys, "explain", path, "--format", "json", "--max-chars", "100000")
    commands = {finding["next"] for finding in json.loads(text)["findings"] if " whatif " in finding["next"]}
    assert bool(commands) == (name != "jax_single.xplane.pb.gz"), "all of it is inside a graph without edges"
    for command in sorted(commands):
        words = [str(path) if word == "INPUT" else word for word in shlex.split(command)[1:]]
        told, _ = output(capsys, *words, "--format", "json")
        assert not {row["verdict"] for row in json.loads(told)["rows"]} & {"refused", "absent"}, command


def test_other_endings_of_annotated_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Loop(parts(7, us=(100, 300))).write(tmp_path / "trace.json")
    _, said = output(capsys, "explain", path, "--annotate", tmp_path / "found.txt", code=2)
    assert "must end in .pftrace" in said
