"""Buffers that device code wrote on an H200: what they hold, against CUPTI and plain arithmetic."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from helpers import DATA
from thence import inside
from thence.inside.decoding import decode
from thence.inside.files import load

INSIDE = DATA / "inside"

# CUPTI's duration of the same launch (ORIGIN.md there), blocks, traces of a block, ranges of a trace
KERNELS = {
    "cupy": (2112, 16, 8, ["load", "compute", "store"]),
    "triton": (5120, 64, 1, ["load", "compute", "store"]),
    "pallas": (2688, 32, 1, ["Init", "load", "compute", "store"]),
    "mosaic": (1984, 16, 8, ["Init", "load", "compute", "store"]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_every_range_of_every_trace_is_there(name: str) -> None:
    _, blocks, per_block, names = KERNELS[name]
    profile = inside.open(INSIDE / f"gpu_{name}.npz")
    assert profile.traces.height == blocks * per_block
    assert profile.traces["dropped"].sum() == 0
    assert profile.warnings == ()
    order = profile.ranges.group_by("trace", maintain_order=True).agg(pl.col("name").cast(pl.String))
    assert order["name"].to_list() == [names] * profile.traces.height
    assert profile.ranges["closed"].all()


@pytest.mark.parametrize("name", KERNELS)
def test_first_start_to_last_end_is_what_cupti_says(name: str) -> None:
    cupti_ns = KERNELS[name][0]
    # JAX's layout has no clock rate; other kernels of the session ran at 1.98 GHz.
    ranges = inside.open(INSIDE / f"gpu_{name}.npz", 1.98 if name == "pallas" else None).ranges
    first = ranges["start_ns"].min()
    last = (ranges["start_ns"] + ranges["duration_ns"]).max()
    assert cupti_ns - 2000 <= last - first <= cupti_ns


def test_the_rate_at_which_ranges_fill_their_kernel_is_as_uncertain_as_it_says() -> None:
    """The rate of buffers that measured it is known; without it, it follows from CUPTI's duration of the kernel."""
    for name in ("cupy", "triton", "mosaic"):
        decoded = decode(*load(INSIDE / f"gpu_{name}.npz"))
        found = decoded.rate_in_slice(KERNELS[name][0])
        assert found is not None
        ghz, uncertainty = found
        known = decoded.traces["clock_ghz"].median()
        assert abs(ghz - known) <= 2 * uncertainty * known, (name, ghz, uncertainty, known)
    assert decoded.rate_in_slice(500) is None  # shorter than what runs around the ranges


@pytest.mark.parametrize("name", ["cupy", "triton", "mosaic"])
def test_headers_hold_both_clocks(name: str) -> None:
    words, description = load(INSIDE / f"gpu_{name}.npz")
    records = words.reshape(description.traces, -1)
    assert (records[:, 0] == 0x7E4CE001).all()
    header = records[:, :16].astype(np.int64)
    index = np.arange(description.traces)
    np.testing.assert_array_equal(header[:, 3], index // description.traces_per_block)
    np.testing.assert_array_equal(header[:, 4], index % description.traces_per_block)
    assert header[:, 2].max() < 132  # SMs of an H200
    start, end, start_clock, end_clock = (header[:, at] + (header[:, at + 1] << 32) for at in (8, 10, 12, 14))
    # The timer counts ns in steps of 32 from the same epoch as the system clock (2026).
    assert (start % 32 == 0).all()
    assert 1_767_225_600 * 10**9 < start.min() < end.max() < 1_830_297_600 * 10**9
    rates = (end_clock - start_clock) / (end - start)
    assert (np.abs(rates - 1.95) < 0.12).all()


@pytest.mark.parametrize("name", ["cupy", "triton", "mosaic"])
def test_durations_are_the_distances_of_the_clock(name: str) -> None:
    words, description = load(INSIDE / f"gpu_{name}.npz")
    records = words.reshape(description.traces, -1)
    count = int(records[0, 5])
    clocks = records[:, 17 : 16 + 2 * count : 2]
    cycles = (clocks[:, 1::2] - clocks[:, ::2]).astype(np.int64).reshape(-1)
    durations = inside.open(INSIDE / f"gpu_{name}.npz").ranges["duration_ns"].to_numpy()
    # an SM runs at 1.83 to 2.07 cycles in a ns as sampled; a ns on either side from rounding
    assert (durations >= cycles / 2.07 - 1).all()
    assert (durations <= cycles / 1.83 + 1).all()


def test_what_found_no_room_is_counted_and_the_rest_is_right() -> None:
    profile = inside.open(INSIDE / "gpu_overflow.npz")
    warps = np.arange(8)
    ranges = np.where(warps == 3, 0, warps + 1)
    by_block = profile.traces.sort("trace")["dropped"].to_numpy().reshape(6, 8)
    np.testing.assert_array_equal(by_block, np.tile(np.maximum(2 * ranges - 2, 0), (6, 1)))
    assert profile.ranges.height == 6 * 7
    assert any("300" in warning for warning in profile.warnings)
