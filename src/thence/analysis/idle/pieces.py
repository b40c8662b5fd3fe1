"""Pieces of idle time with their causes: collected rule by rule, then sorted into one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.rules import CAUSES, REASONS
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]
    Rows = npt.NDArray[np.int32] | Int64
    Codes = npt.NDArray[np.uint8]

__all__ = ["IDLE", "NO_REASON", "IdlePieces"]

IDLE = {
    "rank": pl.Int32(),
    "device": pl.Int32(),
    "start": pl.Int64(),
    "duration": pl.Int64(),
    "cause": pl.Enum(CAUSES),
    "reason": pl.Enum(tuple(REASONS)),
    "host": pl.Int32(),
    "gpu": pl.Int32(),
    "wait": pl.Int32(),
}
"""Columns of `thence.analysis.idle.causes.idle_causes`."""

NO_REASON = len(REASONS)
"""Code in the arrays of pieces for no reason."""


class IdlePieces:
    """Collects the pieces of one device's gaps.

    Attributes:
        columns: one tuple for each `add`: gap (number), start, end (ns), cause, reason (codes) and row (of host).
    """

    def __init__(self) -> None:
        self.columns: list[tuple[Rows, Int64, Int64, Codes, Codes, Rows]] = []

    def add(
        self,
        gap: Int64,
        times: tuple[Int64, Int64],
        cause: Codes | int,
        row: Rows | int,
        reason: Codes | int = NO_REASON,
    ) -> None:
        """Adds the intervals (starts, ends) that are not empty; cause, row and reason: one for all, or one for each."""
        start, end = times
        lasting = np.flatnonzero(end > start)
        if not len(lasting):
            return
        given = (
            (gap, np.int32), (start, np.int64), (end, np.int64), (cause, np.uint8), (reason, np.uint8),
            (row, np.int32),
        )  # fmt: skip
        columns = (
            (values if len(lasting) == len(start) else values[lasting]).astype(kind, copy=False)
            if isinstance(values, np.ndarray)
            else np.full(len(lasting), values, kind)
            for values, kind in given
        )
        self.columns.append(tuple(columns))  # type: ignore[arg-type]

    def joined(self) -> tuple[Rows, Int64, Int64, Codes, Codes, Rows]:
        """The columns in order of time; adjacent pieces with the same gap, cause, reason and row are merged."""
        columns = [np.concatenate(column) for column in zip(*self.columns, strict=True)]
        self.columns.clear()
        order = np.argsort(columns[1], kind="stable")
        gap, start, end, cause, reason, row = (column[order] for column in columns)
        first = np.ones(len(start), np.bool_)
        first[1:] = start[1:] != end[:-1]
        for column in (gap, cause, reason, row):
            first[1:] |= column[1:] != column[:-1]
        if first.all():
            return gap, start, end, cause, reason, row
        last = np.append(first[1:], True)
        return gap[first], start[first], end[last], cause[first], reason[first], row[first]

    def frame(self, device: tuple[int, int], gpu: Int64, wait: Int64) -> pl.DataFrame:
        """The pieces in order of time, with the columns of `IDLE`.

        Args:
            device: rank and number of the device.
            gpu: the activity at the end of each gap, `NO_ROW` for none.
            wait: host row of the wait that emptied the queue before each gap, `NO_ROW` for none.
        """
        if not self.columns:
            return pl.DataFrame(schema=IDLE)
        gap, start, end, cause, reason, row = self.joined()
        rank, number = (pl.lit(value, pl.Int32()) for value in device)
        rows = pl.DataFrame({
            "host": row, "gpu": gpu.astype(np.int32)[gap], "wait": wait.astype(np.int32)[gap],
        })  # fmt: skip
        return pl.DataFrame({
            "start": start, "duration": end - start, "cause": _CAUSES.gather(cause), "reason": _REASONS.gather(reason),
        }).select(
            rank.alias("rank"), number.alias("device"), "start", "duration", "cause", "reason",
        ).hstack(rows.select(pl.when(pl.all() != NO_ROW).then(pl.all())))  # fmt: skip


_CAUSES = pl.Series(CAUSES, dtype=IDLE["cause"])
_REASONS = pl.Series([*REASONS, None], dtype=IDLE["reason"])  # the last element is for NO_REASON
