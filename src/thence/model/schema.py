"""Descriptions of tables: their columns with type and meaning, and empty or filled frames with these columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    Attributes:
        name: as in the frame.
        dtype: Polars type.
        meaning: what it holds, in which unit, and what null stands for.
    """

    name: str
    dtype: pl.DataType | type[pl.DataType]
    meaning: str


@dataclass(frozen=True, slots=True)
class Table:
    """The schema of one table.

    Attributes:
        name: attribute of `Tables` and name in SQL.
        meaning: what one row is.
        columns: in order.
        required: names of columns that are never null.
        nothing: the frame without rows, and one null of each column, made when they are first used: thousands of small
            inputs need them.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    required: tuple[str, ...] = ()
    nothing: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def schema(self) -> dict[str, Any]:
        """Polars schema: column name to type."""
        return {column.name: column.dtype for column in self.columns}

    def frame(self, columns: Mapping[str, Any]) -> pl.DataFrame:
        """A frame with this schema; columns that are not given are null.

        Args:
            columns: column name to Series, array or list, all of one length.
        """
        rows = max((len(values) for values in columns.values()), default=0)
        if not rows:
            return self.empty()
        return pl.DataFrame(
            [
                _column(name, columns[name], dtype)
                if name in columns
                else self._null(name, dtype).new_from_index(0, rows)
                for name, dtype in self.schema.items()
            ]
        )

    def _null(self, name: str, dtype: Any) -> pl.Series:
        """A column of one null."""
        if name not in self.nothing:
            self.nothing[name] = pl.Series(name, [None], dtype=dtype)
        null: pl.Series = self.nothing[name]
        return null

    def lacking(self, frame: pl.DataFrame) -> list[str]:
        """The required columns that are null in some row of a frame with this schema."""
        return [name for name in self.required if frame[name].null_count()]

    def complete(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Returns a frame with this schema, after a check that no required column holds a null.

        Raises:
            ValueError: a required column holds a null.
        """
        if lacking := self.lacking(frame):
            raise ValueError(f"rows of the table {self.name} without {', '.join(lacking)}")
        return frame

    def empty(self) -> pl.DataFrame:
        """A frame with this schema and no rows."""
        if "" not in self.nothing:
            self.nothing[""] = pl.DataFrame(schema=self.schema)
        frame: pl.DataFrame = self.nothing[""]
        return frame


def _column(name: str, values: Any, dtype: Any) -> pl.Series:
    column = values.alias(name) if isinstance(values, pl.Series) else pl.Series(name, values)
    return column if column.dtype == dtype else column.cast(dtype)
