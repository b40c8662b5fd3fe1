"""An array that grows at its end."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Growing"]

_FIRST_ROWS = 1 << 14


class Growing:
    """Rows appended piece by piece, without keeping the pieces.

    Room that is not used yet is never touched, so the system does not have to provide memory for it.
    """

    def __init__(self) -> None:
        self._room: np.ndarray[Any, Any] | None = None
        self._used = 0

    def extend(self, values: np.ndarray[Any, Any]) -> None:
        """Adds rows of the same dtype and row shape as before."""
        if self._room is None:
            self._room = np.empty((_FIRST_ROWS, *values.shape[1:]), values.dtype)
        needed = self._used + len(values)
        if needed > len(self._room):
            larger = np.empty((2 * needed, *values.shape[1:]), values.dtype)
            larger[: self._used] = self._room[: self._used]
            self._room = larger
        self._room[self._used : needed] = values
        self._used = needed

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The rows so far, shape (rows, ...)."""
        return np.empty(0) if self._room is None else self._room[: self._used]
