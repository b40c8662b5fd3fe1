"""Samples of program counters: shares by line, their errors, what is unknown, and `thence inside`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import DATA, run_thence
from recording_data import kernel, written
from stores import stored
from thence.errors import MissingData
from thence.model.stall_reasons import STALL_REASONS

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["phases", "_Z4gemmPf", "/w/tri.py", "long_scoreboard", "selected", "of_a_new_gpu"]
PHASES, GEMM, FILE, LONG, SELECTED, NEW = range(1, 7)
TABLE = [{"number": at, "name": name, "demangled": "gemm(float*)" if at == GEMM else None}
         for at, name in enumerate(NAMES, 1)]  # fmt: skip
FIRST = [
    {"device": 0, "kernel": PHASES, "file": FILE, "line": 12, "reason": LONG, "samples": 500},
    {"device": 0, "kernel": PHASES, "file": FILE, "line": 12, "reason": SELECTED, "samples": 20},
    {"device": 0, "kernel": GEMM, "file": 0, "line": 0, "reason": NEW, "samples": 60},
]
LATER = [
    {"device": 0, "kernel": PHASES, "file": FILE, "line": 12, "reason": LONG, "samples": 100},
    {"device": 1, "kernel": PHASES, "file": FILE, "line": 19, "reason": LONG, "samples": 120},
]
ABOUT = {"period_cycles": 65_536, "samples": 1_010, "unplaced": 200, "dropped": 10, "overflows": 0, "trouble": None}


def recording(folder: Path, *parts: list[dict[str, Any]], **about: Any) -> Path:
    tables = {"names": [TABLE], "kernels": [[kernel(name=PHASES)]], **({"stalls": list(parts)} if parts else {})}
    rank = about.pop("rank", 3)
    return written(folder, tables, rank=rank, stalls=ABOUT | about)


def test_shares_and_errors_by_line_and_reason(tmp_path: Path) -> None:
    found = thence.open(recording(tmp_path / "a", FIRST, LATER)).stalls()
    # 1,000 samples that were not lost; parts and devices are added up.
    assert found.rows.select("kernel", "file", "line", "reason", "samples", "share").rows() == [
        ("phases", "/w/tri.py", 12, "long_scoreboard", 600, 0.6),
        ("phases", "/w/tri.py", 19, "long_scoreboard", 120, 0.12),
        ("gemm(float*)", None, None, "of_a_new_gpu", 60, 0.06),
        ("phases", "/w/tri.py", 12, "selected", 20, 0.02),
    ]
    assert found.rows["error"][0] == pytest.approx(math.sqrt(0.6 * 0.4 / 1000))
    assert found.rows["share"].sum() + found.unplaced / found.samples == pytest.approx(1)
    assert found.lines.select("kernel", "place", "share", "waits_for").rows() == [
        ("phases", "tri.py:12", 0.62, "data from global memory 97 %"),
        ("phases", "tri.py:19", 0.12, "data from global memory 100 %"),
        ("gemm", "-", 0.06, "of_a_new_gpu 100 %"),
    ]
    assert [note.split()[0] for note in found.remarks()] == ["200", "10"]


def test_the_documentation_has_all_codes() -> None:
    page = (DATA.parents[1] / "docs" / "inside.md").read_text()
    assert [code for code, words in STALL_REASONS.items() if f"| `{code}` | {words} |" not in page] == []


def test_one_device_is_of_its_own_samples(tmp_path: Path) -> None:
    found = thence.open(recording(tmp_path / "a", FIRST, LATER)).select(devices=[1]).stalls()
    assert found.rows.select("line", "samples", "share").rows() == [(19, 120, 1.0)]
    assert found.unplaced == 0


def test_a_recording_of_a_triton_kernel() -> None:
    """What CUPTI stated as the total is what lines, functions and code without a name add up to."""
    found = thence.open(DATA / "stalls" / "triton").stalls()
    assert int(found.rows["samples"].sum()) + 11_164 == found.samples == 16_178_351
    lines = found.rows.filter(kernel="phases")
    assert lines["file"].unique().to_list() == ["/home/user/tri.py"]
    loads, gathers = (int(lines.filter(pl.col("line").is_in(of))["samples"].sum()) for of in ([12, 13], [19]))
    assert gathers > loads > 0.3 * lines["samples"].sum()
    assert found.rows.filter(pl.col("kernel").str.starts_with("nvjet"))["file"].null_count() > 0
    assert set(found.rows["reason"]) <= set(STALL_REASONS)


def test_a_recording_without_samples_says_why(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="no rights"):
        thence.open(recording(tmp_path / "a", trouble="stalls cannot be sampled: no rights")).stalls()
    with pytest.raises(MissingData, match="thence record --stalls takes them"):
        thence.open(DATA / "counters" / "known_work").stalls()


def test_inside_shows_a_recording_beside_profiles(tmp_path: Path) -> None:
    folder, profile = recording(tmp_path / "a", FIRST, LATER), DATA / "inside" / "gpu_triton.npz"
    done = run_thence("inside", folder, profile)
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode()
    assert "1,000 samples of program counters, 20.0 % of them in code that has no name" in text
    assert "tri.py:12" in text
    document = json.loads(run_thence("inside", folder, profile, "--format", "json").stdout)
    assert len(document["kernels"]) == 1
    assert document["stalls"][0] == {
        "kernel": "phases", "file": "/w/tri.py", "line": 12, "reason": "long_scoreboard", "samples": 600, "share": 0.6,
        "error": pytest.approx(math.sqrt(0.6 * 0.4 / 1000)),
    }  # fmt: skip
    assert document["stall_samples"] == {
        "samples": 1_000, "unplaced": 200, "dropped": 10, "overflows": 0, "period_cycles": 65_536
    }  # fmt: skip
    assert run_thence("inside", folder, "--format", "csv").stdout.startswith(b"kernel,file,line,reason,samples,share,")
    refused = run_thence("inside", folder, "-o", tmp_path / "out.pftrace")
    assert (refused.returncode, b"for buffers alone" in refused.stderr) == (2, True)


def test_sql_and_several_ranks(tmp_path: Path) -> None:
    recording(tmp_path / "a", FIRST)
    recording(tmp_path / "b", LATER, rank=5, samples=230, unplaced=0)
    trace = thence.open(tmp_path / "a", tmp_path / "b")
    assert trace.sql("select sum(samples) as n from stalls").item() == 500 + 20 + 60 + 100 + 120
    assert trace.tables.stalls["rank"].unique().sort().to_list() == [3, 5]


def test_a_store_keeps_them(tmp_path: Path) -> None:
    paths = [str(recording(tmp_path / str(rank), FIRST, LATER, rank=rank)) for rank in (0, 1)]
    store = tmp_path / "store"
    stored(store, paths)
    found, read = thence.open(store).stalls(), thence.open(paths).stalls()
    assert_frame_equal(found.rows, read.rows)
    assert (found.samples, found.unplaced, found.notes) == (read.samples, read.unplaced, read.notes)
    assert b"tri.py:12" in run_thence("inside", str(store)).stdout


def test_a_flame_graph_has_lines_and_stalls_inside_of_kernels(tmp_path: Path) -> None:
    trace = thence.open(recording(tmp_path / "a", FIRST, LATER))
    plain, found = trace.flame("ops", idle="exclude"), trace.flame("ops", idle="exclude", stalls=True)
    found.self_check()
    total = plain.total_ns
    assert found.total_ns == total
    stacks = {stack[-3:]: ns for stack, ns in found.stacks()}
    # of 740 samples of the kernel: 600 and 20 of line 12, 120 of line 19
    assert set(stacks) == {
        ("phases", "tri.py:12", "data from global memory"),
        ("phases", "tri.py:12", "nothing: it issued"),
        ("phases", "tri.py:19", "data from global memory"),
    }
    assert stacks["phases", "tri.py:12", "data from global memory"] == pytest.approx(total * 600 / 740, abs=1)
    assert stacks["phases", "tri.py:19", "data from global memory"] == pytest.approx(total * 120 / 740, abs=1)
    assert sum(stacks.values()) == total
    with pytest.raises(MissingData, match="no samples of program counters"):
        thence.open(recording(tmp_path / "b")).flame("ops", stalls=True)
    with pytest.raises(thence.UsageError, match="memory has no stalls"):
        trace.flame(weight="memory", stalls=True)
