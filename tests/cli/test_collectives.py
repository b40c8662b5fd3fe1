"""``thence collectives`` as it prints: the last arrivals first, both tables in CSV, everything in JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import TYPE_CHECKING

from collective_jobs import Job, joint
from helpers import FSDP, run_thence

if TYPE_CHECKING:
    from pathlib import Path


def test_last_arrivals_come_first_without_a_verdict_of_their_own() -> None:
    lines = run_thence("collectives", *FSDP).stdout.decode().splitlines()
    assert lines[0].startswith("last arrivals")
    shown = [line.split("  ")[0] for line in lines[1 : lines.index("")]]
    document = json.loads(run_thence("collectives", *FSDP, "--format", "json").stdout)
    rows = [row for row in document["last_arrivals"] if row["waited_ns"]]
    devices = [f"rank {row['rank']} GPU {row['device']}" for row in rows if row["code"] is None]
    assert shown == [
        *devices, "no rank: hosts had launched ahead", "no rank: before the median rank",
    ]  # fmt: skip
    assert sorted(devices) == ["rank 1 GPU 1", "rank 3 GPU 3"]
    sizes = lines[lines.index("") + 1]
    assert sizes.startswith("collective")
    assert re.search(r"mean longest wait +longest ", sizes)
    assert "best bus GB/s" in sizes
    assert "whole kernel GB/s" in sizes
    assert any(line.endswith("none is shifted") for line in lines)


def test_csv_holds_the_last_arrivals_and_the_sizes(tmp_path: Path) -> None:
    run_thence("collectives", *FSDP, "-o", tmp_path / "out.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    document = json.loads(run_thence("collectives", *FSDP, "--format", "json").stdout)
    for table, key in (("last_arrivals", "last_arrivals"), ("sizes", "rows")):
        found = [row for row in rows if row["table"] == table]
        assert len(found) == len(document[key]) > 0
        for row, expected in zip(found, document[key], strict=True):
            assert {name: row[name] != "" for name in expected} == {
                name: value is not None for name, value in expected.items()
            }
    last = [row for row in rows if row["table"] == "last_arrivals"]
    assert {row["device"] for row in last} == {"0", "1", "2", "3", ""}


def test_undescribed_kernels_are_no_failure_and_named(tmp_path: Path) -> None:
    calls = [joint([0, 0], 100_000), joint([200_000, 200_000], 100_000, described=False)]
    done = run_thence("collectives", *Job(calls).write(tmp_path))
    assert done.returncode == 0
    text = done.stdout.decode()
    assert "all-reduce (no description) ncclDevKernel_AllReduce_Sum_f32_RING_LL " in text
    assert "2 of 4 kernels that communicate, 50.0 % of their time, have no description" in text


def test_without_communication_it_says_so(tmp_path: Path) -> None:
    paths = Job([joint([0], 1000)], compute=[(0, 0, 5000)], lost={(0, 0)}).write(tmp_path)
    done = run_thence("collectives", *paths)
    assert done.returncode == 2
    assert b"describes no collectives, because it is of a single GPU" in done.stderr
