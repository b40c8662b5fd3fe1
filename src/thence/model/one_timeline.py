"""Intervals of several groups on one timeline, so that one pass over it measures all of them.

A hundred thousand devices, each with a pass of its own, take minutes; and moved apart by their spans, times may
not fit int64. Only what overlaps matters for unions and coverage, so the time in which nothing runs is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import reached_before

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]

__all__ = ["OneTimeline", "numbered"]


@dataclass(frozen=True)
class OneTimeline:
    """Intervals with their lengths and overlaps, moved so that those of different groups never meet.

    Attributes:
        start, end: of each interval in the order given; those of no length are at 0.
        begin: where each stretch without a gap begins, ascending.
        group: of each stretch.
        groups: how many groups there are.
    """

    start: Int64
    end: Int64
    begin: Int64
    group: Int64
    groups: int

    @classmethod
    def of(cls, group: Int64, start: Int64, end: Int64, groups: int) -> OneTimeline:
        """Intervals of groups.

        Args:
            group: of each interval, from 0 to ``groups`` - 1, shape (n,).
            start: first nanosecond, shape (n,), in any order.
            end: first nanosecond after. The lengths add up to less than 2^62.
            groups: how many there are.
        """
        rows = np.flatnonzero(end > start)
        rows = rows[np.lexsort((start[rows], group[rows]))]
        number, begins, ends = group[rows], start[rows], end[rows]
        first = begins > reached_before(ends, number)
        stretch = np.cumsum(first) - 1
        opening = np.flatnonzero(first)
        # One nanosecond lies between two stretches: those that touch are one.
        lengths = (
            np.maximum.reduceat(ends, opening) - begins[opening] + 1
            if len(opening)
            else np.empty(0, np.int64)
        )
        begin = np.cumsum(lengths) - lengths
        moved = (begin - begins[opening])[stretch]
        result = np.zeros((2, len(start)), np.int64)
        result[0, rows], result[1, rows] = begins + moved, ends + moved
        return cls(result[0], result[1], begin, number[opening], groups)

    def group_at(self, time: Int64) -> Int64:
        """The group at each time, which lies in a stretch."""
        found: Int64 = self.group[np.searchsorted(self.begin, time, side="right") - 1]
        return found

    def sums(self, time: Int64, values: Int64) -> Int64:
        """The sum of values for each group, given times in their stretches."""
        result = np.zeros(self.groups, np.int64)
        np.add.at(result, self.group_at(time), values)
        return result


def numbered(frame: pl.DataFrame, *columns: str) -> tuple[Int64, pl.DataFrame]:
    """For each row the number of its values in columns, and a row for each number, ascending; null comes first."""
    distinct = frame.select(columns).unique().sort(*columns)
    number = frame.select(columns).join(
        distinct.with_row_index("number"),
        on=list(columns),
        how="left",
        nulls_equal=True,
        maintain_order="left",
    )
    return number["number"].cast(pl.Int64).to_numpy(), distinct
