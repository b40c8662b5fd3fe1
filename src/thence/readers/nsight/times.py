"""Times and numbers of an export, as far as they can be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Timed", "bounded", "lasting", "left_out", "with_durations"]

_LATEST_NS = 1 << 62


def lasting(frame: pl.DataFrame, what: str) -> tuple[pl.DataFrame, list[str]]:
    """The rows with a start, with a duration (ns) instead of an end, and what that took.

    Args:
        frame: columns start and end, ns.
        what: plural, for the warnings.
    """
    timed = with_durations(frame)
    return timed.frame, left_out([timed], what)


@dataclass(frozen=True)
class Timed:
    """Rows with a duration.

    Attributes:
        frame: the rows with a start; duration (ns) instead of an end.
        lost: how many had no start.
        unusable: how many had no end, or one before their start: they have the duration 0.
    """

    frame: pl.DataFrame
    lost: int
    unusable: int


def with_durations(frame: pl.DataFrame) -> Timed:
    """See `lasting`."""
    begins = frame.select(pl.col("start").is_between(-_LATEST_NS, _LATEST_NS)).to_series()
    timed = frame if begins.all(ignore_nulls=False) else frame.filter(begins)
    ended = pl.col("end").is_between(pl.col("start"), _LATEST_NS)
    unusable = timed.height - int(timed.select(ended.sum()).item() or 0)
    length = pl.col("end") - pl.col("start")
    duration = pl.when(ended).then(length).otherwise(0) if unusable else length
    return Timed(
        timed.with_columns(duration.alias("duration")).drop("end"),
        frame.height - timed.height,
        unusable,
    )


def left_out(parts: Sequence[Timed], what: str) -> list[str]:
    """Warnings of what `with_durations` left out or assumed."""
    warnings = []
    if lost := sum(part.lost for part in parts):
        warnings.append(f"{lost:,} {what} do not say when they began and are left out")
    if unusable := sum(part.unusable for part in parts):
        warnings.append(f"{unusable:,} {what} have no end, or one before they began; counted as 0")
    return warnings


def bounded(column: str, bits: int) -> pl.Expr:
    """The column, null where it is negative or does not fit the bits."""
    return pl.when(pl.col(column).is_between(0, (1 << bits) - 1)).then(pl.col(column)).alias(column)
