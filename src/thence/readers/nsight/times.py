"""Times and numbers of an export, as far as they can be true."""

from __future__ import annotations

import polars as pl

__all__ = ["bounded", "lasting"]

_LATEST_NS = 1 << 62


def lasting(frame: pl.DataFrame, what: str) -> tuple[pl.DataFrame, list[str]]:
    """The rows with a start, with a duration (ns) instead of an end, and what that took.

    Args:
        frame: columns start and end, ns.
        what: plural, for the warnings.
    """
    timed = frame.filter(pl.col("start").is_between(-_LATEST_NS, _LATEST_NS))
    warnings = []
    if lost := frame.height - timed.height:
        warnings.append(f"{lost:,} {what} do not say when they began and are left out")
    ended = pl.col("end").is_between(pl.col("start"), _LATEST_NS)
    unusable = timed.height - int(timed.select(ended.sum()).item() or 0)
    if unusable:
        warnings.append(f"{unusable:,} {what} have no end, or one before they began; counted as 0")
    duration = pl.when(ended).then(pl.col("end") - pl.col("start")).otherwise(0)
    return timed.with_columns(duration.alias("duration")).drop("end"), warnings


def bounded(column: str, bits: int) -> pl.Expr:
    """The column, null where it is negative or does not fit the bits."""
    return pl.when(pl.col(column).is_between(0, (1 << bits) - 1)).then(pl.col(column)).alias(column)
