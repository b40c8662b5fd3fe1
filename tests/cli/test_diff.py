"""``thence diff``: sides, exit codes, refusals, gates and every output, with planted differences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from diff_runs import GPU, STEP, changed, trace_file
from helpers import DATA, run_thence
from thence.cli import main

if TYPE_CHECKING:
    from pathlib import Path

SLOW = changed(STEP, "sm90_gemm_64x64_nn", us=560)
"""60 us more in forward/mlp: 4.6 % of the step, 12 % of the label."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of a program, three of a slower one, and one on another GPU."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "base").mkdir()
    for seed in range(3):
        trace_file(folder / "base" / f"{seed}.json", seed, steps=6)
        trace_file(folder / f"slow{seed}.json", 10 + seed, SLOW, steps=6)
    trace_file(folder / "other.json", 30, steps=6, deviceProperties=[{**GPU, "name": "NVIDIA A100"}])
    return folder


def thence(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *map(str, arguments)])
    return int(ended.value.code or 0)


def sides(folder: Path) -> list[str | Path]:
    before = sorted((folder / "base").iterdir())
    after = sorted(folder.glob("slow*.json"))
    return ["--before", *before, "--after", *after]


def document(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    thence(*arguments, "--format", "json")
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_holds_what_it_promises(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, *sides(folder))
    same = document(capsys, "--baseline", folder / "base", *sorted(folder.glob("slow*.json")))
    assert (same["rows"], same["total"]) == (found["rows"], found["total"]), "a folder of runs is a baseline"
    assert found["comparable"] is True
    assert found["refusals"] == []
    assert found["total"]["verdict"] == "slower"
    assert found["noise"] == "between runs"
    keys = {"by", "name", "before_ns", "after_ns", "low_ns", "high_ns", "verdict"}
    assert all(keys <= row.keys() for row in found["rows"])
    mlp = next(row for row in found["rows"] if (row["by"], row["name"]) == ("label", "forward/mlp"))
    assert mlp["verdict"] == "slower"
    assert mlp["low_ns"] < mlp["after_ns"] - mlp["before_ns"] < mlp["high_ns"]
    assert {row["verdict"] for row in found["rows"]} <= {"slower", "faster", "same", "unknown", "new", "gone"}
    assert [run["steps"] for run in found["runs"]["before"]] == [6, 6, 6]
    assert "label forward/mlp +" in found["explanation"][0]


def test_gates_decide_the_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (folder / "base" / "0.json", folder / "slow0.json", "--within-run", "--top", "1")

    def code(*bounds: str) -> int:
        return thence(*pair, *(x for bound in bounds for x in ("--fail-on", bound)))

    assert code("total>50%", "label:forward/mlp>0.2ms") == 0
    assert code("total>50%", "label:forward/mlp>5%") == 1
    assert "label:forward/mlp>5%: exceeded" in capsys.readouterr().out
    assert code("label:nothing>5%") == 2
    assert "neither side has the label nothing" in capsys.readouterr().err
    assert code("label:forward/mlp>12%") == 0
    assert thence(*pair, "--fail-on", "label:forward/mlp>12%", "--strict") == 1


def test_one_run_a_side_judges_only_where_that_is_wanted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (folder / "base" / "0.json", folder / "slow0.json")
    assert thence(*pair, "--fail-on", "label:forward/mlp>5%") == 2
    assert "--within-run" in capsys.readouterr().err
    assert thence(*pair, "--fail-on", "label:forward/mlp>5%", "--within-run") == 1
    assert "label:forward/mlp>5%: exceeded between these two runs: " in capsys.readouterr().out
    assert thence(*pair) == 0
    assert capsys.readouterr().out.startswith("one run per side: step ")


def test_other_gpus_are_refused_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (folder / "base" / "0.json", folder / "other.json")
    assert thence(*pair) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "not comparable (gpu): different GPUs: NVIDIA H100" in shown.err
    found = document(capsys, *pair)
    assert (found["comparable"], found["rows"], found["total"]) == (False, [], {})
    assert [refusal["code"] for refusal in found["refusals"]] == ["gpu"]
    assert thence(*pair, "--anyway") == 0
    assert capsys.readouterr().out.startswith("not comparable (gpu), compared anyway")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([__file__], "two runs"),
        ([__file__] * 3, "two runs"),
        (["--before", "a"], "no run is given for the side 'after'"),
        ([__file__, "--before", "a", "--after", "b"], "must follow one of them"),
        (["--before", "a", "--baseline", "."], "both name the first side"),
        (["missing1.json", "missing2.json"], "no such file"),
        ([__file__, __file__, "--fail-on", "speed>5%"], "cannot judge"),
    ],
)
def test_what_are_not_two_sides_is_said_before_anything_is_read(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert thence(*arguments) == 2
    assert words in capsys.readouterr().err


def test_every_output_is_written(folder: Path, tmp_path: Path) -> None:
    pair = (folder / "base" / "0.json", folder / "slow0.json")
    for ending in ("json", "csv", "md", "html", "pftrace"):
        target = tmp_path / f"out.{ending}"
        assert thence(*pair, "-o", target) == 0
        assert target.stat().st_size > 1000
        assert thence(*pair, "-o", target) == 2  # exists already


def test_kinds_are_chosen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, folder / "base" / "0.json", folder / "slow0.json", "--by", "op")
    assert {row["by"] for row in found["rows"]} == {"busy", "idle", "op"}


def test_traces_without_steps_are_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    recording = DATA / "recording" / "two_ranks"
    found = document(capsys, recording, recording)
    assert found["runs"]["before"][0]["steps_are"] == "the whole trace"
    assert found["total"]["low_ns"] is None
    assert found["total"]["verdict"] == "unknown"
    # Nothing is known of the noise, so no number of runs can be promised or denied.
    assert {row["more_runs"] for row in (found["total"], *found["rows"])} == {None}


def test_a_narrow_terminal_shows_what_changed_and_whether_it_is_noise(folder: Path) -> None:
    lines = run_thence("diff", *sides(folder), COLUMNS="80").stdout.decode().splitlines()
    (heading,) = (line.split() for line in lines if line.startswith("by "))
    assert [name for name in heading if name in ("by", "name", "change", "verdict")] == [
        "by", "name", "change", "verdict",
    ]  # fmt: skip
    row = next(line for line in lines if "forward/mlp" in line and "slower" in line)
    assert " +" in row
    assert max(map(len, lines)) <= 80
