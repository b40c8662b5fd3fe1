"""``thence history`` on traces with a planted slowdown: forms, the file of summaries, gates, damage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from diff_runs import STEP, changed, trace_file
from helpers import run_thence

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

DAY_NS = 86_400_000_000_000
SLOW = changed(STEP, "sm90_gemm_64x64_nn", us=600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten runs, named in another order than they were recorded; the last five are slower."""
    made = tmp_path_factory.mktemp("runs")
    for number in range(10):
        name, began = f"{(number * 3) % 10}.json", 1_790_000_000_000_000_000 + number * DAY_NS
        trace_file(made / name, number, SLOW if number >= 5 else STEP, steps=4, baseTimeNanoseconds=began)
    (made / "README.md").write_text("notes are no run")
    return made


def run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run_thence(*map(str, arguments))


def document(*arguments: object) -> tuple[int, dict]:
    result = run("history", *arguments, "--format", "json")
    return result.returncode, json.loads(result.stdout)


def test_a_folder_of_runs_its_summaries_and_a_gate(folder: Path, tmp_path: Path) -> None:
    keep = tmp_path / "history.jsonl"
    code, found = document(folder, "--keep", keep)
    assert code == 0
    assert [row["name"] for row in found["runs"]] == [f"{(number * 3) % 10}.json" for number in range(10)]
    assert {row["started_from"] for row in found["runs"]} == {"recording"}
    change = found["changes"][0]
    assert (change["by"], change["run"], change["since"]) == ("step", 6, "5.json")
    assert "label forward/mlp" in found["explanation"][0]
    # The traces are not needed again, and a new run joins those in the file.
    new = trace_file(tmp_path / "new.json", 99, SLOW, steps=4, baseTimeNanoseconds=1_800_000_000_000_000_000)
    code, again = document("--new", new, "--keep", keep, "--fail-on", "total>3%")
    assert code == 1
    assert again["runs"][:10] == found["runs"]
    assert again["runs"][10]["name"] == str(new)
    assert again["gates"][0]["verdict"] == "exceeded"
    assert len(keep.read_text().splitlines()) == 11
    assert document("--keep", keep, "--fail-on", "total>30%")[0] == 0
    page = tmp_path / "history.html"
    assert run("history", "--keep", keep, "-o", page).returncode == 0
    text = page.read_text("utf-8")
    assert text.count("<svg") == len(again["places"])
    assert "<script" not in text
    table = run("history", "--keep", keep, "--format", "csv").stdout.decode()
    assert table.startswith("run,run_name,started_ns,by,name,ns\n1,0.json,")
    # A damaged line costs one run.
    lines = keep.read_text().splitlines()
    keep.write_text("\n".join([lines[0][:-40], *lines[1:]]))
    result = run("history", "--keep", keep)
    assert result.returncode == 0
    assert "line 1 is no run that thence wrote" in result.stderr.decode()
    keep.write_text('{"format": "thence.run"}\n')
    assert run("history", "--keep", keep).returncode == 2


def test_what_is_no_run_is_told_and_the_others_are_shown(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"traceEvents": [')
    paths = [folder / name for name in ("0.json", "3.json")]
    code, found = document(*paths, broken)
    assert code == 1
    assert [entry["code"] for entry in found["left_out"]] == ["unreadable"]
    assert len(found["runs"]) == 2
    assert run("history", broken).returncode == 2
    assert "reads files and folders" in run("history", "-").stderr.decode()
    assert run("history").returncode == 2
