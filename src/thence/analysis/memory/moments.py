"""Moments of allocators: when the peak was, and what was live then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.memory.places import DEVICE, HOST_DEVICE, steps_at, with_device
from thence.errors import MissingData, UsageError
from thence.model.columns import row_numbers
from thence.model.selection import parse_time

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

PEAK, OOM = "peak", "oom"
_NEVER = np.iinfo(np.int64).max


def readings(trace: Attributed) -> pl.DataFrame:
    """What the allocators of the GPUs had handed out, or those of the hosts where no GPU's are known.

    Returns:
        the columns of `thence.model.tables.MEMORY_TOTALS`, and ``row``, the row there; device is `HOST_DEVICE` for
        the host's memory.
    """
    totals = with_device(trace.memory_totals.with_row_index("row").cast({"row": pl.Int64}))
    of_gpus = totals.filter(pl.col("device") != HOST_DEVICE)
    return totals if of_gpus.is_empty() else of_gpus


def zero(trace: Attributed) -> int:
    """From when times are counted: the first device activity, or without any the first change of memory (ns)."""
    first = trace.around.gpu["start"].min()
    return int(trace.memory_totals["start"].min() if first is None else first)  # type: ignore[arg-type]


def moments(trace: Attributed, at: str) -> pl.DataFrame:
    """One moment of each allocator.

    Args:
        at: ``peak``; ``oom``, the first allocation that failed; or a time after the first device activity (without
            one, after the first change of memory), such as ``1.2s``.

    Returns:
        rank, device, allocator, row (of memory_totals), start (ns), allocated, reserved, inactive, step (name).

    Raises:
        UsageError: ``at`` is no such time, or is before every change of memory.
        MissingData: no allocation failed.
    """
    totals = readings(trace)
    if at == PEAK:
        highest = totals.filter(pl.col("allocated") == pl.col("allocated").max().over(DEVICE))
        chosen = highest.unique(DEVICE, keep="first", maintain_order=True)
    elif at == OOM:
        if trace.memory_failures.is_empty():
            raise MissingData(f"{trace.meta.named}: no allocation failed in the trace; --at peak shows the peak")
        chosen = _failed(trace, totals)
    else:
        time = parse_time(at) + zero(trace)
        before = totals.filter(pl.col("start") <= time)
        chosen = before.unique(DEVICE, keep="last", maintain_order=True)
        if chosen.is_empty():
            raise UsageError(f"--at {at}: that is before the first change of memory in the trace")
    step = steps_at(trace, chosen["rank"].to_numpy(), chosen["device"].to_numpy(), chosen["start"])
    name = trace.steps["name"].cast(pl.String).gather(pl.Series(step).replace(-1, None).cast(pl.UInt32))
    return chosen.with_columns(step=name).sort(DEVICE)


def _failed(trace: Attributed, totals: pl.DataFrame) -> pl.DataFrame:
    """The last readings before the first failure of each allocator, with what the allocator said at the failure."""
    first = with_device(trace.memory_failures).unique(DEVICE, keep="first", maintain_order=True)
    said = first.select(*DEVICE, row=pl.col("after").cast(pl.Int64), now="reserved")
    failed = totals.join(said, on=[*DEVICE, "row"], maintain_order="left")
    failed = failed.with_columns(now=pl.when(pl.col("now") >= pl.col("allocated")).then("now"))
    # The allocator returns what it can to the device before it gives up.
    return failed.with_columns(
        reserved=pl.coalesce("now", "reserved"), inactive=pl.coalesce(pl.col("now") - pl.col("allocated"), "inactive")
    ).drop("now")


def live_at(memory: pl.DataFrame, row: Int64) -> Mask:
    """Which allocations were live after a change.

    Args:
        memory: as `thence.model.tables.MEMORY`.
        row: for each allocation the row of memory_totals that is asked for.
    """
    opened = row_numbers(memory["opened"])
    closed = memory["closed"].cast(pl.Int64).fill_null(_NEVER).to_numpy()
    live: Mask = (opened <= row) & (closed > row)
    return live
