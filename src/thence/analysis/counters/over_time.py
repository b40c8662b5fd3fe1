"""How far each device was used in each sample of its hardware counters, as shares of what it can do at most.

- SMs active: cycles in which multiprocessors held a warp / (cycles of their clock x multiprocessors)
- tensor cores: FLOP of 16-bit types that they executed / what the peak allows in the time
- memory: bytes read and written / what the bandwidth allows in the time
- clock: that of the multiprocessors / the highest one that was sampled
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.counters.devices import sampled_devices
from thence.model.peaks import peaks_of, tensor_flop_in_cycle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.counters.devices import Sampled
    from thence.model.arrays import Float64, Int64
    from thence.model.attributed import Attributed
    from thence.model.tables import Device

USE = {
    "rank": pl.Int32(), "device": pl.Int32(), "counter": pl.String(), "start": pl.Int64(), "end": pl.Int64(),
    "share": pl.Float64(),
}  # fmt: skip
"""Columns of `use_over_time`; counter: what is used, and its limit."""
_MOST_VALUES = 20_000
"""Most values of one counter of a device; with more, neighbours in a window become one."""


def use_over_time(trace: Attributed) -> pl.DataFrame:
    """The shares, in the columns of `USE`, by device, counter and time; what is not known has no rows.

    Args:
        trace: attributed, perhaps a part of a trace: its devices are shown, all of the time.
    """
    whole = trace.part_of[0] if trace.part_of else trace
    chosen = set(trace.counters.select("rank", "device").unique().rows())
    devices = {(device.rank, device.device): device for device in trace.meta.devices}
    frames = [pl.DataFrame(schema=USE)]
    for sampled in sampled_devices(whole):
        key = sampled.rank, sampled.device
        if key not in chosen or key not in devices:
            continue
        first = _first_of_values(sampled)
        start, end = sampled.start[first], sampled.end[np.append(first[1:], len(sampled.end)) - 1]
        for counter, amount, limit in _used(sampled, devices[key]):
            share = np.add.reduceat(amount, first) / np.maximum(np.add.reduceat(limit, first), 1e-9)
            columns = {"counter": counter, "start": start, "end": end, "share": share}
            frames.append(pl.DataFrame({"rank": key[0], "device": key[1], **columns}, schema=USE))
    return pl.concat(frames)


def _first_of_values(sampled: Sampled) -> Int64:
    """The positions of the samples at which a value begins; no value reaches over the end of a window."""
    in_windows = sampled.windows()["samples"].to_numpy()
    each = -(-len(sampled.start) // _MOST_VALUES)
    number = np.arange(len(sampled.start)) - np.repeat(np.cumsum(in_windows) - in_windows, in_windows)
    return np.flatnonzero(number % each == 0)


def _used(sampled: Sampled, device: Device) -> Iterator[tuple[str, Float64, Float64]]:
    """What is used, and of each sample how much and how much it can be."""
    amounts, ns = sampled.amounts, (sampled.end - sampled.start).astype(np.float64)
    peaks = None if device.name is None else peaks_of(device.name)
    in_cycle = tensor_flop_in_cycle(device.compute_capability)
    if {"sm_active_cycles", "sm_elapsed_cycles"} <= amounts.keys() and device.multiprocessors:
        yield "SMs active", amounts["sm_active_cycles"], amounts["sm_elapsed_cycles"] * device.multiprocessors
    if "tensor_cycles" in amounts and in_cycle is not None and peaks is not None:
        tflops = peaks.tflops["bfloat16"]
        yield f"tensor cores, of {tflops:,.0f} TFLOP/s", amounts["tensor_cycles"] * in_cycle, 1e3 * tflops * ns
    if {"dram_read_bytes", "dram_write_bytes"} <= amounts.keys() and peaks is not None and peaks.gbps is not None:
        moved = amounts["dram_read_bytes"] + amounts["dram_write_bytes"]
        yield f"memory, of {peaks.gbps:,.0f} GB/s", moved, peaks.gbps * ns
    if "sm_elapsed_cycles" in amounts:
        highest = float((amounts["sm_elapsed_cycles"] / ns).max())
        yield f"clock, of {1e3 * highest:,.0f} MHz", amounts["sm_elapsed_cycles"], highest * ns
