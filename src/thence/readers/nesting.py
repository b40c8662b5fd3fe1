"""How host rows are ordered and nested: one rule for what every reader reads.

A row lies in another one of its thread that begins no later and ends no earlier; of rows of equal length
the outer category, by `thence.model.tables.HOST_CATEGORIES`, contains the inner one. API calls count as the
moment at which they begin: mostly another clock than that of the ranges says when they end, so that a launch
may seem to outlast the range that it was made in. So nothing lies in an API call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, enclosing
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]
    Column = npt.NDArray[np.generic]
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
__all__ = ["IS_API_CALL", "host_order", "host_parents", "in_order", "parent_column"]

IS_API_CALL = np.array([category in API_CALLS for category in HOST_CATEGORIES])
"""Whether a category is one of `API_CALLS`, by its index in HOST_CATEGORIES."""


def host_order(
    track: Column, category: Column, start: Int64, duration: Int64
) -> npt.NDArray[np.intp]:
    """Row numbers by thread, then start; what contains another comes first, equal rows stay in order.

    Args:
        track: number of each row's thread, in the order that is wanted, shape (n,).
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """

    def ties(rows: npt.NDArray[np.intp]) -> list[Column]:
        return [-_lengths(category[rows], duration[rows]), category[rows]]

    return in_order(track, start, ties)


def _lengths(category: Column, duration: Int64) -> Int64:
    """How long each row counts when rows are nested, in ns."""
    lengths = np.maximum(duration, 1)
    lengths[IS_API_CALL[category]] = 1
    return lengths


def host_parents(track: Column, category: Column, start: Int64, duration: Int64) -> Int64:
    """The row of the innermost range around each, `NO_ROW` for the outermost, shape (n,).

    Args:
        track: number of each row's thread, shape (n,). Rows must be in the order of `host_order`.
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """
    return enclosing(track, start, start + _lengths(category, duration))


def parent_column(parent: Int64) -> pl.Series:
    """Parents as `HOST` holds them: Int32, null for the outermost."""
    column = pl.Series("parent", parent.astype(np.int32))
    return column.set(column == NO_ROW, None)


def in_order(
    track: npt.NDArray[np.generic],
    start: npt.NDArray[np.int64],
    ties: Callable[[npt.NDArray[np.intp]], Sequence[npt.NDArray[np.generic]]],
) -> npt.NDArray[np.intp]:
    """Row numbers by track, start, and then the other columns; equal rows stay in order.

    Producers write nearly in order of time, and stable sorting is quick about what is sorted. Few rows
    begin together on one track: those alone are compared by the other columns.

    Args:
        track: shape (n,). Small types are sorted faster: uint16 is best.
        start: shape (n,).
        ties: given row numbers, what else counts of those rows: the most important column first.
    """
    order = np.argsort(start, kind="stable")
    order = order[np.argsort(track[order], kind="stable")]
    begin, on = start[order], track[order]
    together = np.zeros(len(order) + 1, np.bool_)
    together[1:-1] = (begin[1:] == begin[:-1]) & (on[1:] == on[:-1])
    positions = np.flatnonzero(together[1:] | together[:-1])
    rows = order[positions]
    order[positions] = rows[np.lexsort((*reversed(ties(rows)), start[rows], track[rows]))]
    return order
