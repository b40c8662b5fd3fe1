"""``thence ranks`` as it prints: the late rank and why on the first screen, JSON, CSV and the page."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING

import pytest

from helpers import FSDP, TORCH, output, run_thence
from late_ranks import SleepyJob
from stores import stored

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    SleepyJob().write(folder)
    return folder


def test_the_first_screen_says_who_since_when_and_why(job: Path) -> None:
    lines = run_thence("ranks", job, COLUMNS="80").stdout.decode().splitlines()
    assert max(map(len, lines)) <= 80
    screen = " ".join(" ".join(lines[:24]).split())
    assert lines[0] == "1 straggler among 3 devices, 5 steps: rank 1 GPU 0 (66.6 % of a step)"
    assert "rank 1 GPU 0 makes others wait 199.9 ms per step" in screen
    assert "since ProfilerStep#1" in screen
    assert "idle: python" in screen
    for word in ("train.py:40", "Mlp_3", "backward"):
        assert word in screen


def test_the_share_is_of_the_steps_since_the_rank_is_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = SleepyJob(steps=20, since=10)
    files = job.write(tmp_path)
    steps = [e for e in json.loads(files[0].read_text())["traceEvents"] if e.get("name") == "ProfilerStep#15"]
    printed = " ".join(output(capsys, "ranks", tmp_path)[0].split())
    said = re.search(r"per step \(([0-9.]+) % of a step\) since ProfilerStep#10", printed)
    assert said is not None
    assert float(said[1]) == pytest.approx(100 * job.sleep / steps[0]["dur"], abs=1)


def test_what_was_not_read_stands_above_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three copies of one rank in a folder: one is read, and said before anything else, also of a store of them."""
    one = TORCH / "waits" / "group_rank0.json.gz"
    for number in range(3):
        (tmp_path / "job").mkdir(exist_ok=True)
        (tmp_path / "job" / f"rank0_{number}.json.gz").write_bytes(one.read_bytes())
    printed = output(capsys, "ranks", tmp_path / "job")[0]
    assert "only the newest, 1 of 3 files, is read; left out: rank0_0.json.gz" in " ".join(printed.split())[:400]
    stored(tmp_path / "job.store", [tmp_path / "job"])
    for verb in ("ranks", "report"):
        printed = " ".join(output(capsys, verb, tmp_path / "job.store")[0].split())
        assert 0 <= printed.find("which the newer input") < printed.find("late rank")


def test_json_holds_what_is_checked_from_outside(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output(capsys, "ranks", job, "--format", "json")[0])
    assert document["stragglers"] == [{"rank": 1, "device": 0}]
    row = document["ranks"][0]
    assert (row["rank"], row["device"], row["times_last"]) == (1, 0, 5)  # the first of six steps does not count
    assert row["since_step"] == "ProfilerStep#1"
    assert row["wait_caused_ns"] == pytest.approx(5 * 200_000_000, rel=0.001)
    assert {"cause", "by", "name", "total_ns"} <= set(row["reasons"][0])
    assert all(other["reasons"] == [] for other in document["ranks"][1:])
    assert document["clocks"]["ranks"][2]["offset_ns"] == 3_000_000
    assert document["soundness"] == []


def test_csv_is_the_table_of_ranks(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(output(capsys, "ranks", job, "--format", "csv")[0])))
    assert [row["rank"] for row in rows] == ["1", "0", "2"]


def test_without_a_straggler_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    printed, _ = output(capsys, "ranks", *FSDP, "--clocks")
    assert printed.startswith("no late rank is named: 1 step counts, which is too few")
    # Rank 3 comes last to every collective (tests/analysis/ranks/test_answer.py counts by hand).
    assert "rank 3 GPU 3 arrived last in 14 of 14 collectives" in " ".join(printed.split())
    assert re.search(r"no rank: hosts had launched ahead +\d", printed)
    assert "clock offset" in printed


def test_the_step_without_the_delay_is_replayed(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output(capsys, "ranks", job, "--what-if", "--format", "json")[0])
    (row,) = document["without_delay"]
    assert row["rank"] == 1
    assert row["before_ns"] == pytest.approx(300_300_000, rel=0.01)
    assert row["after_ns"] == pytest.approx(100_300_000, rel=0.01)


def test_a_page_is_that_of_the_report(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = output(capsys, "ranks", job, "-o", tmp_path / "ranks.html", code=2)[1]
    assert "thence report INPUT -o OUT.html" in told
    output(capsys, "report", job, "-o", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "1 straggler among 3 devices" in page


def test_ranks_without_a_collective_do_not_say_that_nobody_is_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SleepyJob().write(tmp_path)
    for path in tmp_path.iterdir():
        document = json.loads(path.read_text())
        document["traceEvents"] = [e for e in document["traceEvents"] if not e.get("name", "").startswith("nccl")]
        path.write_text(json.dumps(document))
    printed, _ = output(capsys, "ranks", tmp_path)
    assert printed.startswith("no late rank is named: the traces hold no collective")
