"""The order of rows on tracks, found quickly where they are nearly in order of time already."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

__all__ = ["in_order"]


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
    at = np.flatnonzero(together[1:] | together[:-1])
    rows = order[at]
    order[at] = rows[np.lexsort((*reversed(ties(rows)), start[rows], track[rows]))]
    return order
