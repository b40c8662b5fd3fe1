"""How far a device was used in each sample, as tracks of the timeline."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from counter_samples import back_to_back
from thence.analysis.counters import over_time
from thence.analysis.counters.over_time import use_over_time

MHZ, SAMPLE = 1500, 10_000
SAMPLES = 21
RATES = {"SMs active": 0.75, "memory": 0.5, "tensor cores": 0.25}
"""Of what an H200 can do: 132 multiprocessors, 4,814 GB/s, 132 x 4,096 FLOP in each cycle of 1.83 GHz."""


def used(gap: int = 0) -> pl.DataFrame:
    """Samples that count the same, the second half a gap later, of which the last has half of the clock."""
    made = back_to_back(np.random.default_rng(1), (50_000,), (1.0,), 4)
    begin = made.start[0] + SAMPLE * np.arange(SAMPLES)
    begin[SAMPLES // 2 :] += gap
    clock = np.full(SAMPLES, 1e-3 * MHZ * SAMPLE)
    clock[-1] /= 2
    counted = {
        "sm_elapsed_cycles": clock, "sm_active_cycles": 0.75 * 132 * clock,
        "dram_read_bytes": np.full(SAMPLES, 0.4 * 4814.0 * SAMPLE),
        "dram_write_bytes": np.full(SAMPLES, 0.1 * 4814.0 * SAMPLE),
        "tensor_cycles": np.full(SAMPLES, 0.25 * 132 * 4096 * 1.83 * SAMPLE / 1024),
    }  # fmt: skip
    trace = made.trace(counted, (begin, begin + SAMPLE), ("gemm_bf16",))
    return use_over_time(trace.tables).with_columns(name=pl.col("counter").str.split(",").list.first())


def test_shares_are_those_of_the_limits() -> None:
    rows = used()
    for name, share in RATES.items():
        of_name = rows.filter(name=name)
        assert of_name.height == SAMPLES
        assert of_name["share"].to_list() == pytest.approx([share] * SAMPLES, rel=1e-3)
        assert (of_name["end"] - of_name["start"]).unique().to_list() == [SAMPLE]
    clock = rows.filter(name="clock")
    assert clock["counter"][0] == "clock, of 1,500 MHz"
    assert clock["share"].to_list() == pytest.approx([1.0] * (SAMPLES - 1) + [0.5])


def test_neighbours_become_one_value_but_not_over_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_time, "_MAX_VALUES", SAMPLES // 4)
    clock = used(gap=1_000_000).filter(name="clock")
    lengths = ((clock["end"] - clock["start"]) // SAMPLE).to_list()
    assert lengths == [5, 5, 5, 5, 1], "10 samples before the gap, 11 after it, five together"
    assert clock["share"][-1] == pytest.approx(0.5)
