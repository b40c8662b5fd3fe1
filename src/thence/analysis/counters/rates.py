"""What a device did in each sample of its hardware counters, as rates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from thence.model.peaks import tensor_flop_in_cycle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.counters.devices import Sampled
    from thence.model.arrays import Float64
    from thence.model.tables import Device


def rates(sampled: Sampled, device: Device | None) -> Iterator[tuple[str, Float64, Float64]]:
    """Name of each figure that is known and, of each sample, the amount and what it is divided by.

    The mean of several samples is the sum of the amounts over the sum of the divisors. ``sm_active_share``: cycles in
    which multiprocessors held a warp, of those of their clock; ``tensor_tflops``: FLOP of 16-bit types, by time;
    ``memory_gbps``: bytes read and written, by time; ``clock_mhz``: cycles of the multiprocessors' clock, by time.
    Where only shares were sampled: ``sm_active_share``, ``tensor_share`` and ``memory_share`` by time.

    Args:
        device: as `thence.analysis.counters.devices.device_of` returns it.
    """
    amounts, ns = sampled.amounts, (sampled.end - sampled.start).astype(np.float64)
    cycles = amounts.get("sm_elapsed_cycles")
    in_cycle = tensor_flop_in_cycle(None if device is None else device.compute_capability)
    if "sm_active_cycles" in amounts and cycles is not None and device is not None and device.multiprocessors:
        yield "sm_active_share", amounts["sm_active_cycles"], cycles * device.multiprocessors
    elif "sm_active_ns" in amounts:
        yield "sm_active_share", amounts["sm_active_ns"], ns
    if "tensor_cycles" in amounts and in_cycle is not None:
        yield "tensor_tflops", amounts["tensor_cycles"] * in_cycle / 1e3, ns
    if {"dram_read_bytes", "dram_write_bytes"} <= amounts.keys():
        yield "memory_gbps", amounts["dram_read_bytes"] + amounts["dram_write_bytes"], ns
    if cycles is not None:
        yield "clock_mhz", 1e3 * cycles, ns
    for name, figure in (("tensor_active_ns", "tensor_share"), ("dram_busy_ns", "memory_share")):
        if name in amounts:
            yield figure, amounts[name], ns
