"""Hardware counters of recordings: their times, what a sample does not hold, what is said, stores and timelines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import run_thence
from recording_data import BEGAN, kernel, written
from stores import stored

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [{"number": 1, "name": "g", "demangled": None}]
DEVICES = [{"device": 1, "name": "NVIDIA H200", "multiprocessors": 132, "compute_capability": "9.0"}]
WINDOW = {"device": 1, "start": BEGAN, "end": BEGAN + 20_000, "samples": 2, "overflow": False}
ABOUT = {"interval_ns": 10_000, "metrics": {"tensor_cycles": "hmma"}, "windows": [WINDOW], "trouble": None,
         "left_out": {"nvlink_receive_bytes": "this device has no NVLink"}}  # fmt: skip
SAMPLES = [
    {"device": 1, "start": BEGAN, "end": BEGAN + 10_000, "tensor_cycles": 100.0, "dram_read_bytes": 7.0},
    {"device": 1, "start": BEGAN + 10_000, "end": BEGAN + 20_000, "tensor_cycles": 50.0, "dram_read_bytes": 0.5},
]
ENERGY = [{"device": 1, "start": BEGAN - 1_000, "end": BEGAN + 250_000_000, "energy_joules": 12.25}]


def recording(folder: Path, **about: Any) -> Path:
    rows = [kernel(device=1, start=BEGAN + 2_000, end=BEGAN + 18_000)]
    tables = {"names": [NAMES], "kernels": [rows], "counters": [SAMPLES, ENERGY]}
    return written(folder, tables, **({"counters": ABOUT, "devices": DEVICES} | about))


def test_samples_are_on_the_trace_s_clock_and_what_a_row_does_not_hold_is_null(tmp_path: Path) -> None:
    counters = thence.open(recording(tmp_path / "a")).tables.counters
    assert counters.select("rank", "device").unique().rows() == [(3, 1)]
    assert counters["start"].to_list() == [-1_000, 0, 10_000]
    assert counters["end"].to_list() == [250_000_000, 10_000, 20_000]
    assert counters["tensor_cycles"].to_list() == [None, 100, 50]
    assert counters["energy_joules"].to_list() == [12.25, None, None]
    assert counters["fp64_cycles"].null_count() == 3


def test_the_roofline_says_what_was_counted_and_what_was_not(tmp_path: Path) -> None:
    folder = recording(tmp_path / "a")
    done = run_thence("roofline", folder, "--by", "kernel", "--format", "json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["rows"]
    assert row["measured"]["flop"] == 1024 * 150, "it is alone in all samples"
    assert row["measured"]["error"]["flop"] == pytest.approx(0, abs=1e-9)
    assert row["measured"]["sampled_share"] == 1
    assert row["measured"]["dram_read_bytes"] == 7.5
    assert row["measured"]["l2_bytes"] is None
    counters = document["counters"]
    assert counters["interval_ns"] == 10_000
    assert counters["left_out"] == [{"counter": "nvlink_receive_bytes", "text": "this device has no NVLink"}]
    assert [(w["device"], w["samples"]) for w in counters["windows"]] == [(1, 2)]
    (energy,) = counters["energy"]
    assert energy == {
        "rank": 3, "device": 1, "joules": 12.25, "total_ns": 250_001_000, "steps": 0, "joules_per_step": None
    }  # fmt: skip
    text = run_thence("roofline", folder, "--by", "kernel").stdout.decode()
    assert "counted by the hardware during 16" in text
    assert "49.0 W" not in text
    assert "used 12.2 J in 250" in text
    assert "this device has no NVLink" in text


def test_a_step_has_its_energy_where_steps_follow_each_other(tmp_path: Path) -> None:
    second = 1_000_000_000
    energy = [
        {"device": 1, "start": BEGAN, "end": BEGAN + 10 * second, "energy_joules": 1_000.0},
        {"device": 1, "start": BEGAN + 10 * second, "end": BEGAN + 20 * second, "energy_joules": 3_000.0},
    ]
    tables = {"names": [NAMES], "kernels": [[kernel(device=1, start=BEGAN, end=BEGAN + 20 * second)]]}
    recorded = thence.open(written(tmp_path / "a", tables | {"counters": [energy]}, devices=DEVICES)).recorded
    for duration, joules in ((second, 200), (second // 2, None)):  # from 5 s to 15 s: half of each reading
        steps = {
            "rank": [3] * 11, "number": range(11), "start": [(4 + n) * second for n in range(11)],
            "duration": [duration] * 11, "recorded": [True] * 11, "counted": [True] * 11,
        }  # fmt: skip
        steps["start"][0] = -second  # not in the time in which energy was read
        times = recorded.step_times.clear().vstack(pl.DataFrame(steps).cast(recorded.step_times.schema))
        found = thence.Trace(replace(recorded, step_times=times)).roofline("kernel").counters
        assert found is not None
        assert found.energy.select("steps", "joules_per_step").row(0) == (10, joules)


def test_why_there_are_none_is_said(tmp_path: Path) -> None:
    trouble = "hardware counters of device 1 cannot be sampled: no rights"
    lost = {**ABOUT, "windows": [{**WINDOW, "overflow": True}], "trouble": trouble}
    tables = {"names": [NAMES], "kernels": [[kernel(device=1)]]}
    found = thence.open(written(tmp_path / "a", tables, counters=lost, devices=DEVICES)).roofline("kernel")
    assert found.counters is not None
    told = "\n".join(found.remarks())
    assert trouble in told
    assert "1 window held more than the hardware's buffer" in told
    assert found.document()["rows"].to_dicts()[0]["measured"] is None


def test_impossible_counts_are_unknown(tmp_path: Path) -> None:
    wrong = [{**SAMPLES[0], "tensor_cycles": float("inf"), "dram_read_bytes": -1.0, "l2_bytes": 1e300}]
    backwards = {**SAMPLES[1], "end": BEGAN + 9_000}
    tables = {"names": [NAMES], "kernels": [[kernel(device=1, end=BEGAN + 20_000)]],
              "counters": [[*wrong, SAMPLES[1], backwards]]}  # fmt: skip
    trace = thence.open(written(tmp_path / "a", tables, devices=DEVICES))
    assert trace.tables.counters["tensor_cycles"].to_list() == [None, 50]
    assert trace.tables.counters["dram_read_bytes"].to_list() == [None, 0.5]
    assert trace.tables.counters["l2_bytes"].null_count() == 2
    trace.roofline("kernel")


def test_a_device_that_is_none_has_no_counters_no_stalls_and_no_memory(tmp_path: Path) -> None:
    stall = {"device": 1, "kernel": 1, "file": 1, "line": 1, "reason": 1, "samples": 4}
    allocation = {"operation": 1, "memory": 3, "correlation": 1, "address": 64, "bytes": 64, "time": BEGAN,
                  "device": 1, "source": 0}  # fmt: skip
    tables = {"names": [NAMES], "kernels": [[kernel(device=1)]], "counters": [[{**SAMPLES[0], "device": 1 << 40}]],
              "stalls": [[{**stall, "device": 1 << 40}, stall]],
              "steps": [[{"number": 0, "start": BEGAN, "duration": 5, "recorded": 1, "counted": 1}]],
              "allocations": [[allocation, {**allocation, "device": 1 << 40}]]}  # fmt: skip
    damaged = {"since_ns": "stream 7", "trouble": None}
    found = thence.open(written(tmp_path / "a", tables, devices=DEVICES, plain_steps=damaged)).tables
    assert not found.counters.height
    assert found.memory.select("device", "bytes").rows() == [(1, 64)]
    assert found.step_times["counted"].to_list() == [True]
    assert found.stalls.select("device", "samples").rows() == [(1, 4)]


def test_a_store_keeps_them(tmp_path: Path) -> None:
    folder = recording(tmp_path / "a")
    stored(tmp_path / "store", [folder])
    kept, read = thence.open(tmp_path / "store"), thence.open(folder)
    for trace in (kept, kept.select(ranks=[3])):
        assert trace.roofline("kernel").measured.equals(read.roofline("kernel").measured)
    assert kept.roofline("kernel").document()["counters"]["left_out"]
    assert kept.sql("select sum(tensor_cycles) as s from counters")["s"].to_list() == [150]


def test_timelines_have_rates_and_nothing_where_nothing_was_sampled(tmp_path: Path) -> None:
    tracks = thence.open(recording(tmp_path / "a")).timeline().counters
    read = tracks.filter(pl.col("counter") == "counted dram read").select("time", "value").rows()
    assert read == [(0, 7e-4), (10_000, 0.5e-4), (20_000, 0)]
    power = tracks.filter(pl.col("counter") == "counted power")["value"].to_list()
    assert power == [pytest.approx(12.25 / 0.250001), 0]
    thence.open(recording(tmp_path / "b")).convert(tmp_path / "out.pftrace")
    content = (tmp_path / "out.pftrace").read_bytes()
    assert b"counted tensor" in content
    assert b"GB/s" in content
