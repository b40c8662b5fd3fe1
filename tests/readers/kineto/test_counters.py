"""Hardware counters of PyTorch's profilers, in files made by hand: no recording of ours has any.

Events are as libkineto's ``output_json.cpp`` (``hardware_counters``) and Cuspy's ``trace.py`` ("GPU 0 Counters") write
them. Two kernels run in turn, 50 times: one for 400 us, one for 600 us.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from polars.testing import assert_frame_equal

import thence
from helpers import kernel
from stores import stored
from thence.analysis.counters.answer import figures_as_text
from thence.analysis.counters.over_time import use_over_time
from thence.analysis.diff.hardware import hardware_of
from thence.errors import MissingData

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BEGIN, TURNS, SAMPLE = 1_000, 50, 100
"""Microseconds: the first kernel, and the length of a sample; turns of 1 ms."""
DEVICES = [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}]
TIMES = range(BEGIN, BEGIN + 1_000 * TURNS, SAMPLE)


def kernels() -> list[dict[str, Any]]:
    begins = [BEGIN + 1_000 * turn for turn in range(TURNS)]
    products = [kernel(2 * n, begin, 400, name="gemm_bf16") for n, begin in enumerate(begins)]
    return products + [kernel(2 * n + 1, begin + 400, 600, name="copy") for n, begin in enumerate(begins)]


def of_kineto(values: dict[str, tuple[float, float]], times: Iterable[int] = TIMES) -> list[dict[str, Any]]:
    """Samples with the values of each metric while the product runs, and while the copy does."""
    return [
        {"ph": "C", "cat": "hardware_counters", "name": "CUPTI PM Sampling", "pid": 0, "tid": 0, "ts": time,
         "args": {name: of_kernel[copying(time)] for name, of_kernel in values.items()}}
        for time in times
    ]  # fmt: skip


def of_cuspy(values: dict[str, tuple[float, float]], times: Iterable[int] = TIMES) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "name": name, "pid": "GPU 0 Counters", "ts": time, "args": {"": of_kernel[copying(time)]}}
        for time in times
        for name, of_kernel in values.items()
    ]


def copying(time: int) -> bool:
    return (time - BEGIN) % 1_000 >= 400


def opened(
    folder: Path, samples: Sequence[dict[str, Any]], name: str = "a.json", *, devices: Sequence[Any] = DEVICES
) -> thence.Trace:
    document = {"deviceProperties": devices, "baseTimeNanoseconds": 0, "traceEvents": [*kernels(), *samples]}
    (folder / name).write_text(json.dumps(document))
    return thence.open(folder / name)


@pytest.fixture(params=["compiled", "python"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of decoding give equal tables."""
    if request.param == "python":
        monkeypatch.setenv("THENCE_SCANNER", "python")


def measured(trace: thence.Trace) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["measured"] for row in trace.roofline(by="kernel").to_frame().to_dicts()}


@pytest.mark.usefixtures("decoder")
def test_sums_and_rates_of_kineto_are_amounts(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        of_kineto(
            {
                "sm__cycles_active.sum": (132 * 150_000, 66 * 150_000),
                "sm__cycles_elapsed.max": (150_000, 150_000),
                "dram__bytes_read.sum.per_second": (4e11, 2.4e12),
                "TPC.TriageCompute.sm__pipe_tensor_op_hmma_cycles_active_realtime.sum": (132 * 4 * 120_000, 0),
                "lts__t_sector_hit_rate.pct": (60.0, 3.0),
            }
        ),
    )
    assert trace.tables.counters.height == 10 * TURNS
    found = measured(trace)
    # 200 samples of 120,000 cycles of 132 x 4 tensor cores with 1,024 FLOP each
    assert found["gemm_bf16"]["flop"] == pytest.approx(200 * 120_000 * 132 * 4 * 1024)
    assert found["gemm_bf16"]["clock_mhz"] == pytest.approx(1500)
    assert found["copy"]["sm_active_share"] == pytest.approx(0.5)
    assert found["copy"]["dram_read_bytes"] == pytest.approx(0.03 * 2.4e12)
    counters = trace.roofline().counters
    assert counters is not None
    assert counters.interval_ns == SAMPLE * 1000
    assert [name for name, _ in counters.left_out] == ["lts__t_sector_hit_rate.pct"]


@pytest.mark.usefixtures("decoder")
@pytest.mark.parametrize("named", [True, False], ids=["cuspy", "kineto"])
def test_shares_of_a_peak_are_time(tmp_path: Path, named: bool) -> None:
    if named:
        values = {"SM Active (%)": (100.0, 50.0), "DRAM BW (%)": (15.0, 90.0), "Power (W)": (600.0, 400.0)}
        trace = opened(tmp_path, of_cuspy(values))
    else:
        roll_up = "avg.pct_of_peak_sustained_elapsed"
        values = {f"sm__cycles_active.{roll_up}": (100.0, 50.0), f"gpu__dram_throughput.{roll_up}": (15.0, 90.0)}
        trace = opened(tmp_path, of_kineto(values))
    found = measured(trace)
    assert found["gemm_bf16"]["sm_active_share"] == pytest.approx(1.0)
    assert found["copy"]["sm_active_share"] == pytest.approx(0.5)
    assert found["copy"]["dram_busy_ns"] == pytest.approx(0.9 * 30e6)  # of 30 ms
    assert found["copy"]["sampled_ns"] == 30_000_000
    nothing = ("clock_mhz", "flop", "dram_read_bytes", "sm_active_cycles", "joules")
    assert {found["copy"].get(name) for name in nothing} == {None}, "the file states none of these"
    roofline = trace.roofline()
    assert roofline.counters is not None
    assert roofline.counters.left_out == ()
    total = roofline.counters.totals.filter(counter="dram_busy_ns").row(0, named=True)
    assert (total["unit"], total["total"]) == ("ns", pytest.approx(0.15 * 20e6 + 0.9 * 30e6))
    text, headings = figures_as_text(trace.roofline(by="kernel").measured)
    assert headings["dram_busy_ns"] == "memory busy"
    assert {value.partition(" ±")[0] for value in text["dram_busy_ns"]} == {"15.0 %", "90.0 %"}


def test_what_was_counted_is_said_of_a_device_without_known_peaks(tmp_path: Path) -> None:
    trace = opened(tmp_path, of_kineto({"dram__bytes_read.sum.per_second": (4e11, 2.4e12)}), devices=())
    assert measured(trace)["copy"]["dram_read_bytes"] == pytest.approx(0.03 * 2.4e12)
    found = trace.roofline()
    assert (found.peaks, found.totals["headroom_ns"], found.wide_share) == ((), 0, 0)
    assert any("peaks of these devices are not known; --peak" in text for text in found.remarks())
    with pytest.raises(MissingData, match="a device without a name are not known; --peak"):
        opened(tmp_path, [], devices=()).roofline()


def test_tracks_and_stores_have_the_same(tmp_path: Path) -> None:
    values = {"SM Active (%)": (100.0, 50.0), "DRAM BW (%)": (15.0, 90.0), "NVLink TX (%)": (0.0, 25.0)}
    trace = opened(tmp_path, of_cuspy(values), "rank0.json")
    trace.convert(tmp_path / "a.pftrace")
    assert b"counted nvlink transmit" in (tmp_path / "a.pftrace").read_bytes()
    use = use_over_time(trace.tables)
    assert use.filter(counter="memory, of its peak")["share"].head(5).to_list() == pytest.approx([0.15] * 4 + [0.9])
    # 40 % of the time at 100 %, 60 % at 50 %; 40 % at 15 %, 60 % at 90 %
    mean = dict(hardware_of(trace.tables).select("figure", "value").rows())
    assert mean == {"sm_active_share": pytest.approx(0.7), "memory_share": pytest.approx(0.6)}
    stored(tmp_path / "a.store", [tmp_path / "rank0.json"])
    assert_frame_equal(thence.open(tmp_path / "a.store").tables.counters, trace.tables.counters)


def test_a_gap_begins_a_window(tmp_path: Path) -> None:
    times = [BEGIN, BEGIN + 100, BEGIN + 200, BEGIN + 5_000, BEGIN + 5_100]
    found = opened(tmp_path, of_cuspy({"PCIe (%)": (10.0, 10.0)}, times)).tables.counters
    assert found["start"].to_list() == [time * 1000 for time in times]
    assert found["end"].to_list() == [time * 1000 + 100_000 for time in times], "the last one as long as most"
    assert found["pcie_busy_ns"].to_list() == [pytest.approx(10_000)] * 5


@pytest.mark.usefixtures("decoder")
def test_damaged_samples_have_no_row(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {"args": {"SM Active (%)": "a lot"}}, {"args": {"": float("nan")}}, {"args": {"": 10**400}},
        {"args": {"": -3.0}}, {"args": {"": 400.0}}, {"args": []}, {"ts": None}, {"name": 7},
        {"pid": "GPU 99999999999 Counters"}, {"pid": "GPU -1 Counters"}, {"pid": 0},
    ]  # fmt: skip
    samples = of_cuspy({"SM Active (%)": (100.0, 50.0)})
    damaged = [20 * number for number in range(1, len(changes) + 1)]
    for place, change in zip(damaged, changes, strict=True):
        samples[place] |= change
    trace = opened(tmp_path, samples)
    times = [time * 1000 for place, time in enumerate(TIMES) if place not in damaged]
    assert trace.tables.counters["start"].to_list() == times
    assert trace.tables.gpu.height == 2 * TURNS


def test_readings_of_the_state_and_counters_of_others_are_no_counters(tmp_path: Path) -> None:
    others = [{"ph": "C", "name": "SM Active (%)", "pid": "python", "ts": time, "args": {"": 1.0}} for time in TIMES]
    trace = opened(tmp_path, [*of_cuspy({"Power (W)": (600.0, 400.0)}), *others])
    assert trace.tables.counters.is_empty()
    assert trace.roofline().counters is None
    assert trace.meta.warnings == ()
