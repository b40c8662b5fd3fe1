"""Figures of places through `Trace.roofline`: sums, parts of traces, what is not known, and energy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest

import thence
from counter_samples import START, Kernels, back_to_back
from thence.analysis.counters import devices
from thence.model.tables import COUNTERS
from work_traces import Work

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("gemm_bf16_a", "gemm_bf16_b", "copy_kernel", "gemm_fp8")
DURATIONS = (40_000, 90_000, 30_000, 50_000)
CYCLES, READ = (30.0, 60.0, 0.0, 45.0), (500.0, 200.0, 4000.0, 100.0)
MHZ = 1500


def planted(launches: int = 40) -> tuple[Kernels, thence.Trace]:
    made = back_to_back(np.random.default_rng(1), DURATIONS, CYCLES, launches)
    reads = replace(made, work=np.array(READ)[made.kind] * (made.end - made.start))
    start, end, cycles = made.samples(10_000)
    elapsed = np.full(len(start), 1e-3 * MHZ * 10_000)
    counted = {
        "tensor_cycles": cycles, "dram_read_bytes": reads.samples(10_000)[2], "sm_elapsed_cycles": elapsed,
        "sm_active_cycles": 0.75 * 132 * elapsed, "warps": 12 * 132 * elapsed,
    }  # fmt: skip
    return made, made.trace(counted, (start, end), NAMES)


def measured(trace: Any, by: str = "kernel") -> dict[str, dict[str, Any]]:
    document = trace.roofline(by).document()
    return {row["name"]: row["measured"] for row in document["rows"].to_dicts()}


def test_places_have_what_was_planted() -> None:
    made, trace = planted()
    rows = measured(trace)
    for kind, name in enumerate(NAMES):
        truth = made.work[made.kind == kind].sum()
        row = rows[name]
        assert row["sampled_share"] == 1
        assert row["clock_mhz"] == pytest.approx(MHZ)
        assert row["dram_read_bytes"] == pytest.approx(READ[kind] * row["sampled_ns"], rel=0.02)
        if truth:
            assert row["tensor_cycles"] == pytest.approx(truth, rel=row["error"]["tensor_cycles"] + 1e-9)
    for kind in (0, 1):
        assert rows[NAMES[kind]]["flop"] == 1024 * rows[NAMES[kind]]["tensor_cycles"]
        assert rows[NAMES[kind]]["sm_active_share"] == pytest.approx(0.75, rel=0.02)
        assert rows[NAMES[kind]]["warps_per_sm"] == pytest.approx(12, rel=0.02)
    assert rows["gemm_fp8"]["flop"] is None, "a cycle of another type is another number of FLOP"
    assert rows["copy_kernel"]["energy_joules"] is None


def test_rows_and_idle_add_up_to_the_totals() -> None:
    _, trace = planted()
    found = trace.roofline("kernel")
    assert found.counters is not None
    totals = {row["counter"]: row for row in found.counters.totals.to_dicts()}
    for name in ("dram_read_bytes", "sm_active_cycles"):
        rows = found.measured[name]
        assert not rows.null_count()
        assert rows.sum() + totals[name]["idle"] == pytest.approx(totals[name]["total"], rel=1e-9)
    assert trace.tables.counters["dram_read_bytes"].sum() == totals["dram_read_bytes"]["total"]
    (window,) = found.counters.windows.to_dicts()
    assert window["samples"] == trace.tables.counters.height
    assert window["start_ns"] < START


def test_a_part_of_a_trace_has_its_part_of_the_whole() -> None:
    """Other work in the same samples is not counted for the part, and nothing changes for what is kept."""
    _, trace = planted()
    part = measured(trace.select(only="bf16_a"))
    assert list(part) == ["gemm_bf16_a"]
    assert part["gemm_bf16_a"]["tensor_cycles"] == pytest.approx(measured(trace)["gemm_bf16_a"]["tensor_cycles"])
    half = trace.select(window="0ms:4ms")
    rows, whole = measured(half), measured(trace)
    assert 0 < sum(row["sampled_ns"] for row in rows.values()) < sum(row["sampled_ns"] for row in whole.values())


def test_time_outside_of_windows_is_not_counted_and_not_scaled() -> None:
    made, trace = planted()
    counters = trace.recorded.counters
    until = int(made.start[len(made.start) // 2])
    half = thence.Trace(replace(trace.recorded, counters=counters.filter(pl.col("end") <= until)))
    rows, whole = measured(half), measured(trace)
    for name in NAMES:
        assert rows[name]["sampled_share"] == pytest.approx(0.5, abs=0.2)
    sampled = sum(row["dram_read_bytes"] for row in rows.values())
    assert sampled == pytest.approx(counters.filter(pl.col("end") <= until)["dram_read_bytes"].sum())
    assert sampled < 0.7 * sum(row["dram_read_bytes"] for row in whole.values())


def test_samples_with_too_many_activities_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, trace = planted()
    height = trace.recorded.counters.height
    monkeypatch.setattr(devices, "_MAX_PAIRS", height // 2)
    found = trace.roofline("kernel")
    assert found.counters is not None
    (window,) = found.counters.windows.to_dicts()
    assert height // 4 < window["samples"] < height // 2
    (text,) = found.counters.trouble
    assert text.startswith(f"{height - window['samples']} samples of rank 0 GPU 0 are not shared")


def test_counters_of_another_time_than_all_work_are_idle() -> None:
    _, trace = planted(launches=2)
    later = trace.recorded.counters.with_columns(pl.col("start", "end") + 10**9)
    found = thence.Trace(replace(trace.recorded, counters=later)).roofline("kernel")
    assert found.counters is not None
    shares = {row["counter"]: row["idle_share"] for row in found.counters.totals.to_dicts()}
    assert shares["tensor_cycles"] == 1
    assert found.measured["sampled_ns"].sum() == 0
    assert found.measured["tensor_cycles"].null_count() == len(NAMES), "nothing is not zero"


def test_a_trace_without_counters_says_nothing() -> None:
    _, trace = planted()
    without = thence.Trace(replace(trace.recorded, counters=COUNTERS.empty()))
    document = without.roofline("kernel").document()
    assert document["counters"] is None
    assert {row["measured"] for row in document["rows"].to_dicts()} == {None}


def test_other_chips_have_cycles_and_no_flop() -> None:
    _, trace = planted()
    (device,) = trace.meta.devices
    ampere = replace(device, name="NVIDIA A100-SXM4-80GB", compute_capability="8.0", multiprocessors=None)
    moved = thence.Trace(replace(trace.recorded, meta=replace(trace.meta, devices=(ampere,))))
    row = measured(moved)["gemm_bf16_b"]
    assert row["flop"] is None
    assert row["sm_active_share"] is None
    assert row["tensor_cycles"] > 0


def test_padding_is_what_was_executed_over_what_was_asked(tmp_path: Path) -> None:
    """Products of 2000^3 whose tensor cores do 4 % more."""
    made = Work(device="NVIDIA H200")
    for _ in range(6):
        made.call("aten::mm", [[2000, 2000], [2000, 2000]], ("gemm_bf16_tiles", 50.0))
    recorded = made.opened(tmp_path).recorded
    gpu = recorded.gpu
    start, lasting = gpu["start"].to_numpy(), gpu["duration"].to_numpy()
    flop = 2 * 2000**3
    kernels = Kernels(start, start + lasting, np.zeros(6, np.int64), np.full(6, 1.04 * flop / 1024))
    begin, end, cycles = kernels.samples(10_000)
    zero = np.zeros(len(begin), np.int32)
    counters = COUNTERS.frame({"rank": zero, "device": zero, "start": begin, "end": end, "tensor_cycles": cycles})
    devices = tuple(replace(d, compute_capability="9.0") for d in recorded.meta.devices)
    trace = thence.Trace(replace(recorded, counters=counters, meta=replace(recorded.meta, devices=devices)))
    row = measured(trace, "op")["aten::mm"]
    assert row["padding"] == pytest.approx(1.04, rel=1e-3)
    assert row["flop"] == pytest.approx(6 * 1.04 * flop, rel=1e-6)
    (use,) = (finding for finding in trace.explain().findings if finding.kind == "use")
    assert "; the hardware counted " in use.claim
    assert "tensor cores did 4.0 % more than asked for in `" in use.claim


def test_energy_is_known_of_steps_that_are_long_against_its_samples_and_of_no_kernel() -> None:
    """Two phases of 20 s: 300 W and 600 W, read every 0.25 s."""
    second = 1_000_000_000
    start = START + np.arange(4000) * (second // 100)
    kind = np.where(np.arange(4000) < 2000, 0, 1)
    made = Kernels(start, start + second // 100, kind, np.array([300.0, 600.0])[kind] / 100)
    begin, end, joules = made.samples(second // 4, before=0, after=0)
    names = ("slow_kernel", "fast_kernel")
    trace = made.trace({"energy_joules": joules}, (begin, end), names)
    rows = measured(trace)
    for name, watts in zip(names, (300, 600), strict=True):
        assert rows[name]["watts"] == pytest.approx(watts, rel=0.02)
        assert rows[name]["energy_joules"] == pytest.approx(20 * watts, rel=0.02)
        assert 0 < rows[name]["error"]["energy_joules"] < 0.05
    mixed = replace(made, kind=np.arange(4000) % 2)
    rows = measured(mixed.trace({"energy_joules": joules}, (begin, end), names))
    assert {rows[name]["energy_joules"] for name in names} == {None}
    assert all(rows[name]["error"]["energy_joules"] > 0.1 for name in names), "the error says why"
    found = trace.roofline("kernel").counters
    assert found is not None
    (energy,) = found.energy.to_dicts()
    assert energy["joules"] == pytest.approx(20 * 900, rel=0.02)
