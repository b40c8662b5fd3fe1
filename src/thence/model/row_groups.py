"""Rows grouped by a number: by rank, thread or process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


def rows_by_number(numbers: npt.NDArray[np.integer[Any]]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """The rows of each number, with one sort for all of them; numbers and rows are ascending."""
    order = np.argsort(numbers, kind="stable")
    found, first = np.unique(numbers[order], return_index=True)
    return list(zip(found.tolist(), np.split(order, first[1:]), strict=True)) if len(found) else []
