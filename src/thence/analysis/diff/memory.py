"""How the peak of memory changed, and at which places."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.answer import result_or_reason
from thence.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed

KINDS = ("module", "source", "op", "kind")
ALL, BEFORE = "all", "before the trace"
MEMORY = {"by": pl.String(), "name": pl.String(), "bytes": pl.Float64()}
"""Columns of `memory_of`: bytes at the peak of the device (else of the XLA program) with the highest one. The row by
`ALL` is the peak, that by `BEFORE` the part of it from before the trace; the rows of each of `KINDS` are the rest."""
_MIN_SHARE = 0.01
"""A change of the peak that is a smaller share of it has no sentence."""


def memory_of(trace: Attributed) -> pl.DataFrame:
    """What was live at the highest peak of a run, in the columns of `MEMORY`; empty if nothing of it is known."""
    whole = trace.around
    if whole.memory_totals.is_empty() and all(module.buffers.is_empty() for module in whole.hlo):
        return pl.DataFrame(schema=MEMORY)
    from thence.analysis.memory.answer import memory  # few runs hold memory

    first = result_or_reason(lambda: memory(whole, KINDS[0])).result
    if first is None:
        return pl.DataFrame(schema=MEMORY)
    device = first.most
    rows = [(ALL, ALL, device["peak_bytes"]), (BEFORE, BEFORE, device["before_bytes"])]
    for kind in KINDS:
        answer = first if kind == KINDS[0] else memory(whole, kind)
        here = [pl.col(name).eq_missing(pl.lit(device[name])) for name in ("rank", "device", "program")]
        rows += [(kind, name, size) for name, size in answer.rows.filter(*here).select("name", "bytes").iter_rows()]
    return pl.DataFrame(rows, schema=MEMORY, orient="row", strict=False)


def memory_change(before: Sequence[pl.DataFrame], after: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
    """How the peak changed, and each place's part of it.

    Args:
        before: `memory_of` of each run of the side.
        after: the same.

    Returns:
        columns by, name (null: no place), before_bytes, after_bytes and difference_bytes: means over the runs, the
        largest difference first; the rows of a kind and what was allocated before the trace add up to the peak. None
        if of one side nothing is known.
    """
    sides = []
    for runs in (before, after):
        if not runs or any(run.is_empty() for run in runs):
            return None
        every = pl.concat(runs).group_by("by", "name").agg(bytes=pl.col("bytes").sort().sum() / len(runs))
        sides.append(every)
    both = sides[0].join(sides[1], on=["by", "name"], how="full", coalesce=True, nulls_equal=True, suffix="_after")
    return (
        both.select(
            "by",
            "name",
            before_bytes=pl.col("bytes").fill_null(0.0).round().cast(pl.Int64),
            after_bytes=pl.col("bytes_after").fill_null(0.0).round().cast(pl.Int64),
        )
        .with_columns(difference_bytes=pl.col("after_bytes") - pl.col("before_bytes"))
        .sort(pl.col("difference_bytes").abs(), "by", "name", descending=[True, False, False], nulls_last=True)
    )


def memory_text(change: pl.DataFrame | None) -> str | None:
    """A sentence on the change of the peak, and the place with the largest part of it; None for a small change."""
    if change is None:
        return None
    peak = change.filter(pl.col("by") == ALL).row(0, named=True)
    difference = peak["difference_bytes"]
    if abs(difference) < _MIN_SHARE * max(peak["before_bytes"], 1):
        return None
    what = "rose" if difference > 0 else "fell"
    text = (
        f"the peak of memory {what} by {format_bytes(abs(difference))}, from {format_bytes(peak['before_bytes'])} to "
        f"{format_bytes(peak['after_bytes'])}"
    )
    for kind in KINDS[:3]:
        rows = change.filter(pl.col("by") == kind, pl.col("name").is_not_null(), pl.col("difference_bytes") != 0)
        alike = rows.filter((pl.col("difference_bytes") > 0) == (difference > 0))
        if alike.height:
            place = alike.row(0, named=True)
            return f"{text}; most of it at {place['name']}: {format_bytes(abs(place['difference_bytes']))}"
    return text
