"""Rates of hardware counters before and after: means over windows, their noise, and what is said."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from counter_samples import back_to_back
from thence.analysis.diff.hardware import HARDWARE, hardware_change, hardware_of, hardware_text

SAMPLE = 10_000


def run(mhz: list[float], gbps: float = 1000.0) -> pl.DataFrame:
    """A run with a window of five samples for each clock."""
    made = back_to_back(np.random.default_rng(1), (50_000,), (1.0,), 4)
    window = np.repeat(np.arange(len(mhz)), 5)
    begin = made.start[0] + SAMPLE * np.arange(len(window)) + 1_000_000 * window
    clock = np.array(mhz)[window] * SAMPLE / 1e3
    counted = {
        "sm_elapsed_cycles": clock, "sm_active_cycles": 0.5 * 132 * clock,
        "dram_read_bytes": np.full(len(window), 0.75 * gbps * SAMPLE),
        "dram_write_bytes": np.full(len(window), 0.25 * gbps * SAMPLE),
    }  # fmt: skip
    return hardware_of(made.trace(counted, (begin, begin + SAMPLE), ("gemm",)).tables)


def test_a_run_has_the_mean_of_its_windows_and_their_noise() -> None:
    rows = {row["figure"]: row for row in run([1500, 1600, 1700]).to_dicts()}
    assert rows.keys() == {"clock_mhz", "sm_active_share", "memory_gbps"}
    assert rows["clock_mhz"]["value"] == pytest.approx(1600)
    assert rows["clock_mhz"]["error"] == pytest.approx(100 / 3**0.5), "standard deviation of the windows is 100"
    assert rows["sm_active_share"]["value"] == pytest.approx(0.5)
    assert rows["memory_gbps"]["value"] == pytest.approx(1000)
    assert run([1500])["error"].to_list() == [None] * 3


def test_what_changed_by_more_than_its_noise_is_told() -> None:
    change = hardware_change([run([1980, 1970, 1990])], [run([1780, 1770, 1790], 900)])
    assert hardware_text(change) == (
        "the hardware's counters: clock 1,980 -> 1,780 MHz (-10.1 %), memory 1,000 -> 900 GB/s (-10.0 %)"
    )
    assert hardware_text(hardware_change([run([1980, 1400])], [run([1780, 1200])])) is None, "the windows differ more"
    assert hardware_text(hardware_change([run([1980])], [run([1780])])) is None, "one window does not show the noise"


def test_several_runs_differ_by_what_lies_between_them() -> None:
    change = hardware_change([run([1900, 1900]), run([2000, 2000])], [run([1700, 1700]), run([1600, 1600])])
    assert change is not None
    clock = change.filter(figure="clock_mhz").row(0, named=True)
    assert (clock["before"], clock["after"]) == pytest.approx((1950, 1650))
    half = 1.96 * (2 * 50**2) ** 0.5  # each side: 100 / sqrt(2) MHz between its runs, over sqrt(2) runs
    assert (clock["low"], clock["high"]) == pytest.approx((-300 - half, -300 + half))


def test_a_side_without_counters_has_no_comparison() -> None:
    assert hardware_change([run([1980])], [pl.DataFrame(schema=HARDWARE)]) is None
    assert hardware_text(None) is None
