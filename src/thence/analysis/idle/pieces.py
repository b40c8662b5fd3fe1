"""Pieces of idle time with their causes: collected rule by rule, then sorted into one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from thence.analysis.idle.rules import CAUSES, REASONS
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.arrays import Int64, UInt8

    Rows = npt.NDArray[np.int32] | Int64

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
        self.columns: list[tuple[Rows, Int64, Int64, UInt8, UInt8, Rows]] = []

    def add(
        self,
        gap: Int64,
        times: tuple[Int64, Int64],
        cause: UInt8 | int,
        row: Rows | int,
        reason: UInt8 | int = NO_REASON,
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

    def joined(self, gpu: Int64, wait: Int64) -> Joined:
        """The pieces in order of time; adjacent pieces with the same gap, cause, reason and row are merged.

        Args:
            gpu: the activity at the end of each gap, `NO_ROW` for none.
            wait: host row of the wait that emptied the queue before each gap, `NO_ROW` for none.
        """
        if not self.columns:
            nothing = np.empty(0, np.int64)
            codes = np.empty(0, np.uint8)
            return Joined(nothing, nothing, codes, codes, nothing, nothing, nothing)
        columns = [np.concatenate(column) for column in zip(*self.columns, strict=True)]
        self.columns.clear()
        order = np.argsort(columns[1], kind="stable")
        gap, start, end, cause, reason, row = (column[order] for column in columns)
        first = np.ones(len(start), np.bool_)
        first[1:] = start[1:] != end[:-1]
        for column in (gap, cause, reason, row):
            first[1:] |= column[1:] != column[:-1]
        last = np.append(first[1:], True)
        gap = gap[first]
        ended, emptied = gpu.astype(np.int32)[gap], wait.astype(np.int32)[gap]
        duration = end[last] - start[first]
        return Joined(start[first], duration, cause[first], reason[first], row[first], ended, emptied)


class Joined(NamedTuple):
    """The pieces of one device, as columns of `IDLE`: codes for cause and reason, `NO_ROW` for null."""

    start: Int64
    duration: Int64
    cause: UInt8
    reason: UInt8
    host: Rows
    gpu: Rows
    wait: Rows


def idle_frame(devices: Sequence[tuple[int, int]], pieces: Sequence[Joined]) -> pl.DataFrame:
    """The pieces of all devices, with the columns of `IDLE`.

    Args:
        devices: rank and number of each device.
        pieces: of each device.
    """
    if not pieces:
        return pl.DataFrame(schema=IDLE)
    columns = Joined(*(np.concatenate(column) for column in zip(*pieces, strict=True)))
    counts = [len(part.start) for part in pieces]
    rank, device = (np.repeat(np.array(of, np.int32), counts) for of in zip(*devices, strict=True))
    rows = pl.DataFrame({name: getattr(columns, name).astype(np.int32) for name in ("host", "gpu", "wait")})
    return pl.DataFrame({
        "rank": rank, "device": device, "start": columns.start, "duration": columns.duration,
        "cause": _CAUSES.gather(columns.cause), "reason": _REASONS.gather(columns.reason),
    }).hstack(rows.select(pl.when(pl.all() != NO_ROW).then(pl.all())))  # fmt: skip


_CAUSES = pl.Series(CAUSES, dtype=IDLE["cause"])
_REASONS = pl.Series([*REASONS, None], dtype=IDLE["reason"])  # the last element is for NO_REASON
