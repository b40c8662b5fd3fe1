"""How the rates that hardware counters show changed: clock, multiprocessors, tensor cores, memory, energy.

Counters are sampled in windows, so that a rate is the mean of windows, and its noise is how they differ. A change is
told if it is more than that noise: a slower clock is a cause of longer kernels, a lower rate of memory or of tensor
cores is a use of the GPU that became worse, and energy is what a step costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.counters.answer import energy_of_steps
from thence.analysis.counters.devices import sampled_devices
from thence.model.counter_names import ENERGY
from thence.model.peaks import tensor_flop_in_cycle
from thence.units import signed_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.analysis.counters.devices import Sampled
    from thence.model.arrays import Float64
    from thence.model.attributed import Attributed
    from thence.model.tables import Device

HARDWARE = {"figure": pl.String(), "value": pl.Float64(), "error": pl.Float64()}
"""Columns of `hardware_of`: figure (one of `FIGURES`), its mean, and its standard error, null for one window."""
FIGURES = {
    "clock_mhz": ("clock", ",.0f", " MHz"),
    "sm_active_share": ("multiprocessors active", ".1%", ""),
    "tensor_tflops": ("tensor cores", ",.1f", " TFLOP/s"),
    "memory_gbps": ("memory", ",.0f", " GB/s"),
    "joules_per_step": ("energy", ",.4g", " J a step"),
}
"""What is compared: its name in a sentence, its format and its unit. Rates are means over the time of the samples, in
which other times than those of kernels are, too; tensor_tflops of 16-bit types; over all devices."""
_NORMAL_95 = 1.96
_LEAST_SHARE = 0.01
"""A change by a smaller share has no sentence."""


def hardware_of(trace: Attributed) -> pl.DataFrame:
    """The rates of a run, in the columns of `HARDWARE`; empty without counters.

    Args:
        trace: attributed; counters are those of all of its time.
    """
    whole = trace.around
    devices = {(device.rank, device.device): device for device in whole.meta.devices}
    amounts: dict[str, list[Float64]] = {}
    joules = []
    for sampled in sampled_devices(whole):
        if ENERGY in sampled.amounts:
            joules.append(energy_of_steps(whole, sampled)[1])
            continue
        for figure, amount, over in _of_windows(sampled, devices.get((sampled.rank, sampled.device))):
            amounts.setdefault(figure, []).append(np.stack([amount, over]))
    rows: list[tuple[str, float, float | None]] = []
    for figure, of_devices in amounts.items():
        amount, over = np.concatenate(of_devices, axis=1)
        rates, weights = amount / over, over / over.mean()
        mean = float((rates * weights).mean())
        spread = float(np.sqrt((weights**2 * (rates - mean) ** 2).sum() / max(len(rates) - 1, 1) / len(rates)))
        rows.append((figure, mean, spread if len(rates) > 1 else None))
    if joules and None not in joules:
        rows.append(("joules_per_step", float(np.sum([value for value in joules if value is not None])), None))
    return pl.DataFrame(rows, schema=HARDWARE, orient="row")


def _of_windows(sampled: Sampled, device: Device | None) -> Iterator[tuple[str, Float64, Float64]]:
    """Figures of a device: of each window an amount, and what it is divided by."""
    lengths = sampled.windows()["samples"].to_numpy()
    first = np.cumsum(lengths) - lengths

    def summed(values: Float64) -> Float64:
        return np.add.reduceat(values, first)

    amounts, ns = sampled.amounts, summed((sampled.end - sampled.start).astype(np.float64))
    in_cycle = tensor_flop_in_cycle(None if device is None else device.compute_capability)
    if "sm_elapsed_cycles" in amounts:
        cycles = summed(amounts["sm_elapsed_cycles"])
        yield "clock_mhz", 1e3 * cycles, ns
        if "sm_active_cycles" in amounts and device is not None and device.multiprocessors:
            yield "sm_active_share", summed(amounts["sm_active_cycles"]), cycles * device.multiprocessors
    if "tensor_cycles" in amounts and in_cycle is not None:
        yield "tensor_tflops", summed(amounts["tensor_cycles"]) * in_cycle / 1e3, ns
    if {"dram_read_bytes", "dram_write_bytes"} <= amounts.keys():
        yield "memory_gbps", summed(amounts["dram_read_bytes"] + amounts["dram_write_bytes"]), ns


def hardware_change(before: Sequence[pl.DataFrame], after: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
    """How each figure changed.

    Args:
        before: `hardware_of` of each run of the side.
        after: the same.

    Returns:
        columns figure, before, after (means over the runs), low and high: 95 % interval of the difference; null if the
        noise of one side is unknown. None if of one side nothing is known.
    """
    sides = []
    for runs in (before, after):
        if not runs or any(run.is_empty() for run in runs):
            return None
        between = pl.col("value").std() / len(runs) ** 0.5
        within = (pl.col("error") ** 2).mean().sqrt() / len(runs) ** 0.5
        every = pl.concat(runs).group_by("figure", maintain_order=True)
        known = pl.col("error").null_count() == 0
        noise = pl.max_horizontal(between, pl.when(known).then(within)) if len(runs) > 1 else pl.col("error").first()
        sides.append(every.agg(value=pl.col("value").sum() / len(runs), error=noise, runs=pl.len()))
    both = sides[0].join(sides[1], on="figure", how="inner", suffix="_after", maintain_order="left")
    half = _NORMAL_95 * (pl.col("error") ** 2 + pl.col("error_after") ** 2).sqrt()
    difference = pl.col("value_after") - pl.col("value")
    return both.filter(pl.col("runs") == len(before), pl.col("runs_after") == len(after)).select(
        "figure", before="value", after="value_after", low=difference - half, high=difference + half
    )


def hardware_text(change: pl.DataFrame | None) -> str | None:
    """A sentence on the figures that changed by more than their noise; None if there is none."""
    if change is None:
        return None
    parts = []
    for row in change.drop_nulls().iter_rows(named=True):
        certain = not row["low"] <= 0 <= row["high"]
        share = (row["after"] - row["before"]) / row["before"] if row["before"] else None
        if certain and share is not None and abs(share) >= _LEAST_SHARE:
            name, form, unit = FIGURES[row["figure"]]
            parts.append(f"{name} {row['before']:{form}} -> {row['after']:{form}}{unit} ({signed_share(share)})")
    return f"the hardware's counters: {', '.join(parts)}" if parts else None
