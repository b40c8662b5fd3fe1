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
from thence.analysis.counters.devices import device_of, sampled_devices
from thence.analysis.counters.rates import rates
from thence.model.counter_names import ENERGY
from thence.units import signed_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Float64
    from thence.model.attributed import Attributed

HARDWARE = {"figure": pl.String(), "value": pl.Float64(), "error": pl.Float64()}
"""Columns of `hardware_of`: figure (one of `FIGURES`), its mean, and its standard error, null for one window."""
FIGURES = {
    "clock_mhz": ("clock", ",.0f", " MHz"),
    "sm_active_share": ("multiprocessors active", ".1%", ""),
    "tensor_tflops": ("tensor cores", ",.1f", " TFLOP/s"),
    "tensor_share": ("tensor cores active", ".1%", ""),
    "memory_gbps": ("memory", ",.0f", " GB/s"),
    "memory_share": ("memory", ".1%", " of its peak"),
    "joules_per_step": ("energy", ",.4g", " J a step"),
}
"""What is compared: its name in a sentence, its format and its unit. Rates are means over the time of the samples, in
which other times than those of kernels are, too; tensor_tflops of 16-bit types; over all devices."""
_NORMAL_95 = 1.96  # quantile of the normal distribution with 5 % in both tails
_MIN_SHARE = 0.01
"""A change by a smaller share has no sentence."""


def hardware_of(trace: Attributed) -> pl.DataFrame:
    """The rates of a run, in the columns of `HARDWARE`; empty without counters.

    Args:
        trace: attributed; counters are those of all of its time.
    """
    whole = trace.around
    amounts: dict[str, list[Float64]] = {}
    joules = []
    for sampled in sampled_devices(whole):
        if ENERGY in sampled.amounts:
            joules.append(energy_of_steps(whole, sampled)[1])
            continue
        for figure, amount, over in rates(sampled, device_of(whole, sampled)):
            of_windows = np.add.reduceat(np.stack([amount, over]), sampled.window_starts, axis=1)
            amounts.setdefault(figure, []).append(of_windows)
    rows: list[tuple[str, float, float | None]] = []
    for figure in (figure for figure in FIGURES if figure in amounts):
        amount, over = np.concatenate(amounts[figure], axis=1)
        values, weights = amount / over, over / over.mean()
        mean = float((values * weights).mean())
        spread = float(np.sqrt((weights**2 * (values - mean) ** 2).sum() / max(len(values) - 1, 1) / len(values)))
        rows.append((figure, mean, spread if len(values) > 1 else None))
    known = [value for value in joules if value is not None]
    if known and len(known) == len(joules):
        rows.append(("joules_per_step", sum(known), None))
    return pl.DataFrame(rows, schema=HARDWARE, orient="row")


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
        if certain and share is not None and abs(share) >= _MIN_SHARE:
            name, form, unit = FIGURES[row["figure"]]
            parts.append(f"{name} {row['before']:{form}} -> {row['after']:{form}}{unit} ({signed_share(share)})")
    return f"the hardware's counters: {', '.join(parts)}" if parts else None
