"""Joins the columns of the pieces of a Kineto file while the pieces are being decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from thence.model.arrays import Array

_FIRST_ROWS = 1 << 14
_MIN_GROWTH, _MAX_GROWTH = 2, 300
_SPARE = 1.1
"""Factor of extra capacity, for later pieces that hold more rows than the pieces so far."""
Arrays = dict[str, Any]


def collected(pieces: Iterable[Arrays], tick: Callable[[], None], expected: float = 0) -> Arrays:
    """The columns of all pieces as one set of columns, with common numbers for names, lanes and annotations.

    Args:
        pieces: columns of each piece, from `thence.readers.kineto.decoding.decoded`.
        expected: estimated number of pieces, 0 if unknown.
    """
    names: dict[str, int] = {}
    lanes: dict[Any, int] = {}
    categories: set[str] = set()
    said: dict[str, int] = {}
    counts = dict.fromkeys(("events", "damaged", "timeless", "unpaired"), 0)
    # Rows of the gpu or host table in the pieces so far, by the column whose row numbers they shift.
    rows = {"collective.gpu": 0, "collective.host": 0, "joined.gpu": 0}
    texts: dict[str, list[Any]] = {}
    arrays: dict[str, _GrowingArray] = {}
    for number, piece in enumerate(pieces, 1):
        categories.update(piece["categories"])
        for key in counts:
            counts[key] += piece[key]
        for key, values in _renumbered(piece, names, lanes, said).items():
            if isinstance(values, list):
                texts.setdefault(key, []).extend(values)
                continue
            joined = np.where(values < 0, NO_ROW, values + rows[key]) if key in rows else values
            arrays.setdefault(key, _GrowingArray()).extend(joined, expected / number)
        rows["collective.gpu"] += len(piece["gpu.start"])
        rows["joined.gpu"] += len(piece["gpu.start"])
        rows["collective.host"] += len(piece["host.start"])
        tick()
    columns = texts | {key: array.rows for key, array in arrays.items()}
    seen = {"names": list(names), "lanes": list(lanes), "said": list(said)}
    return columns | counts | seen | {"categories": categories}


def _renumbered(piece: Arrays, names: dict[str, int], lanes: dict[Any, int], said: dict[str, int]) -> Arrays:
    """The columns of a piece, with its numbers of names, lanes and annotations replaced by numbers for the file."""
    name = _numbered(piece["names"], names)
    lane = _numbered([tuple(pair) for pair in piece["lanes"]], lanes)
    annotation = _numbered(piece["annotations"], said)
    columns = {key: values for key, values in piece.items() if "." in key}
    for key, values in columns.items():
        if key.endswith(".lane") and isinstance(values, np.ndarray):
            columns[key] = lane.take(values)
        elif key in ("gpu.name", "host.name", "host.kernel", "host.metadata", "host.inputs", "counter.name"):
            columns[key] = name.take(values)
        elif key == "gpu.annotation":
            columns[key] = annotation.take(values)
    return columns


def _numbered(values: Iterable[Any], numbers: dict[Any, int]) -> Array:
    """The file's number for each number of the piece; -1, as an index the last one, stays -1."""
    return np.array([*(numbers.setdefault(value, len(numbers)) for value in values), -1], np.int32)


class _GrowingArray:
    """An array that grows at its end, piece by piece, without keeping the pieces after the first.

    Capacity that is not used yet is never written to, so the operating system does not allocate pages
    for it. Most files are one piece, whose array is taken as it is.
    """

    def __init__(self) -> None:
        self._room: Array | None = None
        self._used = 0

    def extend(self, values: Array, share: float) -> None:
        """Adds rows of the same dtype and row shape as before.

        Args:
            share: estimated final number of rows, as a multiple of the rows so far (including ``values``).
        """
        if self._room is None:
            self._room, self._used = values, len(values)
            return
        needed = self._used + len(values)
        if needed > len(self._room):
            growth = min(max(_SPARE * share, _MIN_GROWTH), _MAX_GROWTH)
            larger = np.empty((max(int(needed * growth), _FIRST_ROWS), *values.shape[1:]), values.dtype)
            larger[: self._used] = self.rows
            self._room = larger
        self._room[self._used : needed] = values
        self._used = needed

    @property
    def rows(self) -> Array:
        """The rows so far, shape (rows, ...)."""
        return np.empty(0) if self._room is None else self._room[: self._used]
