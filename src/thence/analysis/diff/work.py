"""Whether GPU time changed because there was more work, or because the GPU was used worse.

Of work with a known roofline (`thence.analysis.activity_rooflines`), time = roofline + headroom. The change of the
roofline is that of the work: more FLOP or bytes, or a wider data type. The change of the headroom is that of the use:
the same work, nearer to what the device allows or farther from it. Both add up to the change of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.activity_rooflines import rooflines_of_known_devices
from thence.analysis.grouping.time_by_place import time_by_place
from thence.analysis.roofline import shared_among_places
from thence.model.intervals import NO_ROW
from thence.units import format_ns, signed_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.attributed import Attributed

KINDS = ("module", "op", "hlo")
ALL = "all"
WORK = {
    "by": pl.String(), "name": pl.String(), "ns": pl.Float64(), "roofline_ns": pl.Float64(), "flop": pl.Float64(),
    "bytes": pl.Float64(),
}  # fmt: skip
"""Columns of `work_of`: ns of work with a roofline, its roofline, FLOP and bytes, per step and device."""
_MIN_SHARE = 0.01
"""A change of the time with a roofline that is a smaller share of it has no sentence."""


def work_of(trace: Attributed, step: pl.Series, shared_by: int) -> pl.DataFrame:
    """Work and roofline of a run, in the columns of `WORK`; empty if nothing of it is known.

    Args:
        step: of each activity the number of its counted step, `NO_ROW` for none.
        shared_by: number of counted steps times number of devices.
    """
    activities = rooflines_of_known_devices(trace)
    if activities["roofline_ns"].null_count() == activities.height:
        return pl.DataFrame(schema=WORK)
    frames = []
    for kind in (None, *KINDS):
        parts = time_by_place(trace, kind or "kind")
        placed = shared_among_places(parts, activities).with_columns(step=step.gather(parts["gpu"].cast(pl.UInt32)))
        name = pl.lit(ALL) if kind is None else pl.col("place").cast(pl.String)
        frames.append(
            placed.filter(pl.col("step") != NO_ROW, pl.col("roofline_ns").is_not_null())
            .rechunk()
            .group_by(name=name, maintain_order=True)  # threads would add floats in an order of their own
            .agg(ns=pl.col("part").sum() / shared_by, **{n: pl.col(n).sum() / shared_by for n in list(WORK)[3:]})
            .select(by=pl.lit(kind or ALL), **{n: pl.col(n) for n in list(WORK)[1:]})
            .drop_nulls("name")
            .cast(pl.Schema(WORK))
        )
    return pl.concat(frames)


def work_change(before: Sequence[pl.DataFrame], after: Sequence[pl.DataFrame]) -> pl.DataFrame | None:
    """How the time of each place with a known roofline changed, and by which part of it.

    Args:
        before: `work_of` of each run of the side.
        after: the same.

    Returns:
        columns by, name, before_ns, after_ns, difference_ns, work_ns and use_ns (which add up to the difference),
        before_flop, after_flop, before_bytes, after_bytes; means over the runs, per step and device, the largest
        difference first. None if of one side nothing is known.
    """
    sides = []
    for side, frames in (("before", before), ("after", after)):
        if not frames or any(frame.is_empty() for frame in frames):
            return None
        names = {name: f"{side}_{name}" for name in list(WORK)[2:]}
        whole = (
            pl.concat(frames)
            .group_by("by", "name", maintain_order=True)
            .agg(pl.col(list(names)).sum() / len(frames))
            .rename(names)
        )
        sides.append(whole)
    joined = sides[0].join(sides[1], on=["by", "name"], how="full", coalesce=True).fill_null(0.0)
    difference = pl.col("after_ns") - pl.col("before_ns")
    work = pl.col("after_roofline_ns") - pl.col("before_roofline_ns")
    columns = ("before_flop", "after_flop", "before_bytes", "after_bytes")
    return joined.select(
        "by", "name", "before_ns", "after_ns", difference_ns=difference, work_ns=work, use_ns=difference - work,
        **{name: pl.col(name) for name in columns},
    ).sort(pl.col("difference_ns").abs(), "by", "name", descending=[True, False, False])  # fmt: skip


def work_text(change: pl.DataFrame | None) -> str | None:
    """A sentence on the whole; None if nothing is known, or too little changed."""
    if change is None:
        return None
    row = change.filter(pl.col("by") == ALL).row(0, named=True)
    if abs(row["difference_ns"]) < _MIN_SHARE * row["before_ns"]:
        return None

    def signed(ns: float) -> str:
        return f"{'+' if ns >= 0 else '-'}{format_ns(abs(ns))}"

    parts = [
        f"{name} {signed_share(row[f'after_{key}'] / row[f'before_{key}'] - 1)}"
        for name, key in (("FLOP", "flop"), ("bytes", "bytes"))
        if row[f"before_{key}"]
    ]
    return (
        f"GPU time with a known roofline {signed(row['difference_ns'])}: {signed(row['work_ns'])} by the work "
        f"({', '.join(parts)}), {signed(row['use_ns'])} by its use of the GPU"
    )
