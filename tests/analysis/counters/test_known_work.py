"""Shares of counters of an H200, beside kernels whose work is known, back to back in random order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl
import pytest

from known_counters import DATA, LAUNCHES, figures, inside, opened
from thence.model.thresholds import COUNTER_ERROR_SHARE

if TYPE_CHECKING:
    from pathlib import Path

FILES = sorted(DATA.glob("*.npz"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_of_20_us_are_within_1_percent_and_intervals_hold(path: Path) -> None:
    trace, data = opened(path)
    rows = figures(trace, data, LAUNCHES)
    long = pl.col("work").is_in([2, 3, 4, 8, 9])
    tensor = rows.filter(long, pl.col("counter").is_in(["tensor_cycles", "dram_read_bytes", "fma_instructions"]))
    assert tensor["error"].abs().max() < 0.01
    assert tensor["stated"].max() < 0.02
    short = rows.filter(pl.col("work").is_in([0, 1, 5, 6, 7]))
    assert short["error"].abs().max() < 0.06
    held = shown = 0
    for launches in (LAUNCHES, LAUNCHES // 6, LAUNCHES // 36):
        _, precise, inside_of = inside(figures(trace, data, launches), COUNTER_ERROR_SHARE)
        shown, held = shown + precise, held + inside_of
    assert shown > 800
    assert held / shown >= 0.92, "95 % over both files"


def test_a_single_short_launch_has_no_figure() -> None:
    trace, data = opened(FILES[0])
    rows = figures(trace, data, 1).filter(pl.col("launches") == 1)
    shortest = rows.filter(pl.col("work") == 5, pl.col("counter") == "dram_read_bytes")
    assert (shortest["stated"] > COUNTER_ERROR_SHARE).mean() > 0.9
    longest = rows.filter(pl.col("work") == 4, pl.col("counter") == "tensor_cycles")
    assert (longest["stated"] < COUNTER_ERROR_SHARE).mean() > 0.9
