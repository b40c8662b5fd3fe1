"""How far each device was used in each sample of its hardware counters, as shares of what it can do at most.

- SMs active: cycles in which multiprocessors held a warp / (cycles of their clock x multiprocessors)
- tensor cores: FLOP of 16-bit types that they executed / what the peak allows in the time
- memory: bytes read and written / what the bandwidth allows in the time
- clock: that of the multiprocessors / the highest one that was sampled
- where the producer states shares alone, these
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.counters.devices import device_of, sampled_devices
from thence.analysis.counters.rates import rates
from thence.model.peaks import peaks_of

if TYPE_CHECKING:
    from thence.analysis.counters.devices import Sampled
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.model.peaks import Peaks

USE = {
    "rank": pl.Int32(), "device": pl.Int32(), "counter": pl.String(), "start": pl.Int64(), "end": pl.Int64(),
    "share": pl.Float64(),
}  # fmt: skip
"""Columns of `use_over_time`; counter: what is used, and its limit."""
_SHARES = {
    "sm_active_share": "SMs active", "tensor_share": "tensor cores active", "memory_share": "memory, of its peak",
}  # fmt: skip
"""Figures that are shares already."""
_MAX_VALUES = 20_000
"""Most values of one counter of a device; with more, neighbours in a window become one."""


def use_over_time(trace: Attributed) -> pl.DataFrame:
    """The shares, in the columns of `USE`, by device, counter and time; what is not known has no rows.

    Args:
        trace: attributed, perhaps a part of a trace: its devices are shown, all of the time.
    """
    whole = trace.part_of[0] if trace.part_of else trace
    chosen = set(trace.counters.select("rank", "device").unique().rows())
    frames = [pl.DataFrame(schema=USE)]
    for sampled in sampled_devices(whole):
        device = device_of(trace, sampled)
        if device is None or (sampled.rank, sampled.device) not in chosen:
            continue
        first = _first_of_values(sampled)
        start, end = sampled.start[first], sampled.end[np.append(first[1:], len(sampled.end)) - 1]
        peaks = None if device.name is None else peaks_of(device.name)
        for figure, amount, over in rates(sampled, device):
            counter, limit = _limit(figure, peaks, float((amount / over).max()))
            if limit is not None:
                share = np.add.reduceat(amount, first) / np.maximum(limit * np.add.reduceat(over, first), 1e-9)
                columns = {"counter": counter, "start": start, "end": end, "share": share}
                row = {"rank": sampled.rank, "device": sampled.device, **columns}
                frames.append(pl.DataFrame(row, schema=USE))
    return pl.concat(frames)


def _first_of_values(sampled: Sampled) -> Int64:
    """The positions of the samples at which a value begins; no value reaches over the end of a window."""
    samples, starts = len(sampled.start), sampled.window_starts
    number = np.arange(samples) - np.repeat(starts, np.diff(starts, append=samples))
    return np.flatnonzero(number % -(-samples // _MAX_VALUES) == 0)


def _limit(figure: str, peaks: Peaks | None, highest: float) -> tuple[str, float | None]:
    """What is used, and how much of it there can be; None if that is not known.

    Args:
        figure: as `rates` names it.
        peaks: of the device.
        highest: of the figure, in any sample.
    """
    if figure in _SHARES:
        return _SHARES[figure], 1.0
    if figure == "clock_mhz":
        return f"clock, of {highest:,.0f} MHz", highest
    if figure == "tensor_tflops":
        tflops = None if peaks is None else peaks.tflops["bfloat16"]
        return f"tensor cores, of {tflops or 0:,.0f} TFLOP/s", tflops
    gbps = None if peaks is None else peaks.gbps
    return f"memory, of {gbps or 0:,.0f} GB/s", gbps
