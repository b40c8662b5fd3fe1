"""Sort order and nesting of host rows, for all readers.

A row is nested in another row of its thread that begins no later and ends no earlier. Of rows with equal
times, the one whose category comes first in `thence.model.tables.HOST_CATEGORIES` contains the other. An
API call counts as an instant at its start, and nothing nests in it: its end is usually measured by another
clock than the ends of ranges, so a launch may seem to outlast the range in which it was made.

Profilers write rows nearly sorted by time, which `in_order` makes use of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, enclosing
from thence.model.tables import API_CALLS, HOST_CATEGORIES

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Int64

    Column = npt.NDArray[np.generic]
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

IS_API_CALL = np.array([category in API_CALLS for category in HOST_CATEGORIES])
"""Whether a category is one of `API_CALLS`, by its index in HOST_CATEGORIES."""


def host_order(track: Column, category: Column, start: Int64, duration: Int64) -> npt.NDArray[np.intp]:
    """Row numbers sorted by thread, then start, outer rows before inner ones; the sort is stable.

    Args:
        track: number of each row's thread, ascending in the desired order of threads, shape (n,).
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """

    def ties(rows: npt.NDArray[np.intp]) -> list[Column]:
        return [-_lengths(category[rows], duration[rows]), category[rows]]

    return in_order(track, start, ties)


def _lengths(category: Column, duration: Int64) -> Int64:
    """Length of each row for nesting, in ns: at least 1, and 1 for API calls."""
    lengths = np.maximum(duration, 1)
    lengths[IS_API_CALL[category]] = 1
    return lengths


def host_parents(track: Column, category: Column, start: Int64, duration: Int64) -> Int64:
    """The row of the innermost range around each row, `NO_ROW` for outermost rows, shape (n,).

    Args:
        track: number of each row's thread, shape (n,). Rows must be in the order of `host_order`.
        category: index in HOST_CATEGORIES, shape (n,).
        start: ns, shape (n,).
        duration: ns, shape (n,).
    """
    return enclosing(track, start, start + _lengths(category, duration))


def parent_column(parent: Int64) -> pl.Series:
    """Column ``parent`` of `HOST`: Int32, null for outermost rows."""
    column = pl.Series("parent", parent.astype(np.int32))
    return column.set(column == NO_ROW, None)


def in_order(
    track: npt.NDArray[np.generic],
    start: npt.NDArray[np.int64],
    ties: Callable[[npt.NDArray[np.intp]], Sequence[npt.NDArray[np.generic]]],
) -> npt.NDArray[np.intp]:
    """Row numbers sorted by track, start and then the tie-breaking columns; the sort is stable.

    Profilers write rows nearly in order of time, and a stable sort is fast on nearly sorted data. Few
    rows of one track have equal starts: the tie-breaking columns are compared for those rows only.

    Args:
        track: shape (n,). Small types are sorted faster: uint16 is best.
        start: shape (n,).
        ties: function of row numbers that returns the tie-breaking columns of those rows, the most
            significant first.
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
