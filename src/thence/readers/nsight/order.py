"""Rows in the order of the tables of a trace, large tables made so that little is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.readers.nsight.distinct import distinct_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

__all__ = ["gathered", "in_order", "numbered"]


def numbered(*columns: pl.Series) -> npt.NDArray[np.generic]:
    """For each row how many smaller combinations of the columns there are, null being the smallest.

    Args:
        columns: Int64, at least one; there are few combinations.

    Returns:
        uint16 array of shape (n,), int64 where there are too many.
    """
    first, of = distinct_values(*columns)
    few = pl.DataFrame([column.gather(first).alias(str(n)) for n, column in enumerate(columns)])
    known = few.unique().sort(few.columns, nulls_last=False).with_row_index("number")
    joined = few.join(known, on=few.columns, how="left", nulls_equal=True, maintain_order="left")
    number = joined["number"].to_numpy()
    # Small numbers are sorted faster.
    result: npt.NDArray[np.generic] = number.astype(
        np.uint16 if len(known) <= 1 << 16 else np.int64
    )
    return result[of]


def in_order(
    track: npt.NDArray[np.generic],
    start: npt.NDArray[np.int64],
    ties: Callable[[pl.Series], Sequence[pl.Series]],
) -> npt.NDArray[np.intp]:
    """Row numbers by track, start, and then the other columns; equal rows stay in order.

    Exports are nearly in order of time, and stable sorting is quick about what is sorted. Few rows
    begin together on one track: those alone are compared by the other columns.

    Args:
        track: shape (n,).
        start: shape (n,).
        ties: given row numbers, what else counts of those rows: numbers without null, the most
            important first.
    """
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(track[order], kind="stable")]
    begin, on = start[order], track[order]
    together = np.zeros(len(order) + 1, np.bool_)
    together[1:-1] = (begin[1:] == begin[:-1]) & (on[1:] == on[:-1])
    at = np.flatnonzero(together[1:] | together[:-1])
    rows = order[at]
    keys = [tie.to_numpy() for tie in reversed(ties(pl.Series(rows)))]
    order[at] = rows[np.lexsort((*keys, start[rows], track[rows]))]
    return order


def gathered(columns: dict[str, pl.Series], order: npt.NDArray[np.intp]) -> None:
    """Puts every column into an order, in place and one by one: each is large."""
    rows = pl.Series(order.astype(np.uint32))
    for name in list(columns):
        # Gathering from many pieces takes four times as long.
        columns[name] = columns[name].rechunk().gather(rows)
