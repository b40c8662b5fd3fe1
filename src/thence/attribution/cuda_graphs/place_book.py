"""The places of several traces, with common numbers: those that `join_labels.Numbered` holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.places import GRAPH_LABELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FACT = "collective."
"""Begin of the names of columns that hold the facts of collectives one by one."""


@dataclass
class PlaceBook:
    """Rows of places, each with a number.

    Attributes:
        frames: tables of rows; the number of a row is its position in their concatenation.
    """

    frames: list[pl.DataFrame] = field(default_factory=list)

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

    def shared(self, group: NDArray[np.int64], number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Adds what several places have in common, for groups of places.

        Args:
            group: ascending, for each place of a group the group.
            number: the number of the place.

        Returns:
            for each group in ascending order the number of the row with the values that all its places have, null
            where they differ; -1 if they have nothing in common.
        """
        chosen = self.frame[number]
        facts = [field.name for field in chosen.schema["collective"].fields]  # type: ignore[attr-defined]
        # A fact of a collective is one of the values: sizes may differ where the process group does not.
        of_collective = pl.col("collective").struct
        rows = chosen.select(
            pl.exclude("collective"),
            *(of_collective.field(name).alias(f"{_FACT}{name}") for name in facts),
            group=pl.Series(group),
        )
        alike = [
            pl.when(pl.col(name).n_unique() == 1).then(pl.col(name).first()).alias(name)
            for name in rows.columns
            if name != "group"
        ]
        common = rows.group_by("group", maintain_order=True).agg(alike).drop("group")
        described = pl.struct(pl.col(f"{_FACT}{name}").alias(name) for name in facts)
        named = pl.col(f"{_FACT}collective").is_not_null()
        common = common.with_columns(pl.when(named).then(described).alias("collective"))
        said = pl.any_horizontal(pl.col(*GRAPH_LABELS, "collective").is_not_null())
        says = common.select(said).to_series()
        first = self.add(common.select(self.frame.columns))
        return np.where(says.to_numpy(), first + np.arange(common.height), -1)
