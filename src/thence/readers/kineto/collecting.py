"""Columns of the pieces of a Kineto file, joined as they are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["collected"]

_FIRST_ROWS = 1 << 14
Array = np.ndarray[Any, Any]
Arrays = dict[str, Any]


def collected(pieces: Iterable[Arrays], tick: Callable[[], None]) -> Arrays:
    """The pieces' columns as one set of columns, with names and lanes numbered alike."""
    names: dict[str, int] = {}
    lanes: dict[Any, int] = {}
    categories: set[str] = set()
    said: dict[str, int] = {}
    counts = dict.fromkeys(("events", "damaged", "timeless", "unpaired"), 0)
    # Rows of the table before this piece.
    rows = {"collective.gpu": 0, "collective.host": 0, "joined.gpu": 0}
    columns: dict[str, _GrowingArray | list[Any]] = {}
    for piece in pieces:
        renamed = _numbered(piece["names"], names)
        moved = _numbered([tuple(pair) for pair in piece["lanes"]], lanes)
        categories.update(piece["categories"])
        annotated = np.append(_numbered(piece["annotations"], said), np.int32(-1))
        for key in counts:
            counts[key] += piece[key]
        for key, values in piece.items():
            if key.endswith(".lane"):
                columns.setdefault(key, _GrowingArray()).extend(moved[values])
            elif key in ("gpu.name", "host.name"):
                columns.setdefault(key, _GrowingArray()).extend(renamed[values])
            elif key in ("host.kernel", "host.metadata"):  # -1 is the last
                texts = np.append(renamed, np.int32(-1))
                columns.setdefault(key, _GrowingArray()).extend(texts[values])
            elif key == "gpu.annotation":  # -1 is the last
                columns.setdefault(key, _GrowingArray()).extend(annotated[values])
            elif key in rows:
                columns.setdefault(key, _GrowingArray()).extend(
                    np.where(values < 0, NO_ROW, values + rows[key])
                )
            elif "." in key:
                columns.setdefault(
                    key, _GrowingArray() if isinstance(values, np.ndarray) else []
                ).extend(values)
        rows["collective.gpu"] += len(piece["gpu.start"])
        rows["joined.gpu"] += len(piece["gpu.start"])
        rows["collective.host"] += len(piece["host.start"])
        tick()
    joined = {key: c.array if isinstance(c, _GrowingArray) else c for key, c in columns.items()}
    seen = {"names": list(names), "lanes": list(lanes), "said": list(said)}
    return joined | counts | seen | {"categories": categories}


def _numbered(values: Iterable[Any], numbers: dict[Any, int]) -> Array:
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int32)


class _GrowingArray:
    """An array that grows at its end, piece by piece, without keeping the pieces.

    Capacity that is not used yet is never written to, so the operating system does not allocate pages
    for it.
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
