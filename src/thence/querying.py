"""Base class of `Trace` with the methods that answer SQL queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

    from thence.model.attributed import Attributed


class Querying(ABC):
    """Queries over the tables of a trace."""

    @property
    @abstractmethod
    def attributed(self) -> Attributed:
        """The selected part of the trace."""

    def sql(self, query: str) -> pl.DataFrame:
        """Runs an SQL query over the tables of the trace.

        The tables are gpu, host, places, activities, annotations, collectives, threads, programs, events, waits,
        steps and step_times.

        Example:
            ``trace.sql("select label, sum(duration) as ns from activities group by label order by ns desc")``

        Raises:
            UsageError: the query is not valid SQL, names a table or column that does not exist, or reads a file.
        """
        from thence.analysis.query import answer

        return answer(self.frames(query), query)

    def frames(self, query: str) -> dict[str, pl.DataFrame | pl.LazyFrame]:
        """The tables that an SQL query may need, by name; lazy frames for tables that have not been read."""
        from thence.analysis.query import named

        return {name: self._table(name) for name in named(query)}

    def _table(self, name: str) -> pl.DataFrame:
        """A table that a query can name: an attribute of `Trace`, where however ``steps`` is a method."""
        table: pl.DataFrame = self.attributed.steps if name == "steps" else getattr(self, name)
        return table
