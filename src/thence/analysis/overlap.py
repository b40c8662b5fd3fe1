"""How much of some intervals is covered by others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]

__all__ = ["covered_lengths"]


def covered_lengths(start: Int64, end: Int64, other_start: Int64, other_end: Int64) -> Int64:
    """Time of each interval during which at least one of the others lasts, in nanoseconds.

    Args:
        start: of the intervals asked about, shape (n,), in any order.
        end: of the same, not before their start.
        other_start: of the intervals that cover, shape (m,), in any order; they may overlap.
        other_end: of the same.

    Returns:
        int64 array of shape (n,), between 0 and ``end - start``.
    """
    if len(other_start) == 0:
        return np.zeros(len(start), np.int64)
    order = np.argsort(other_start, kind="stable")
    begins = other_start[order]
    reached = np.maximum.accumulate(other_end[order])
    fresh = begins.copy()  # where each adds to what those before it cover
    np.maximum(fresh[1:], reached[:-1], out=fresh[1:])
    total = np.concatenate([[0], np.cumsum(np.maximum(reached - fresh, 0))])

    def covered_until(time: Int64) -> Int64:
        begun = np.searchsorted(begins, time, side="right")
        last = np.maximum(begun - 1, 0)
        beyond = np.where(begun > 0, np.maximum(reached[last] - time, 0), 0)
        result: Int64 = total[begun] - beyond
        return result

    return covered_until(end) - covered_until(start)
