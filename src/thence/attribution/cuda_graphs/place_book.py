"""The places of several traces, with common numbers: those that `join_labels.Numbered` holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import polars as pl

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PlaceBook"]


@dataclass
class PlaceBook:
    """Rows of places, each with a number.

    Attributes:
        frames: tables of rows; the number of a row is its position in their concatenation.
    """

    frames: list[pl.DataFrame] = field(default_factory=list)
    _shared: dict[tuple[int, ...], int] = field(default_factory=dict)

    @property
    def height(self) -> int:
        """The number of rows, which is the next number."""
        return sum(frame.height for frame in self.frames)

    @property
    def frame(self) -> pl.DataFrame:
        """All rows."""
        if len(self.frames) > 1:
            self.frames = [pl.concat(self.frames)]
        return self.frames[0]

    def add(self, frame: pl.DataFrame) -> int:
        """Adds rows; returns the number of the first."""
        first = self.height
        self.frames.append(frame)
        return first

    def shared(self, numbers: NDArray[np.int64]) -> int:
        """The number of a row with the values that several places have in common, null where they differ."""
        key = tuple(sorted({int(number) for number in numbers}))
        if len(key) == 1:
            return key[0]
        if key not in self._shared:
            rows = self.frame[list(key)]
            alike = [
                pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name)
                for name in rows.columns
                if name != "collective"
            ]
            nothing = pl.lit(None, rows.schema["collective"]).alias("collective")
            self._shared[key] = self.add(rows.select(*alike, nothing).select(rows.columns))
        return self._shared[key]
