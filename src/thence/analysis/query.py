"""SQL over frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["answer"]


def answer(frames: Mapping[str, pl.DataFrame], query: str) -> pl.DataFrame:
    """Runs an SQL query over frames by their names; categories behave as text.

    Raises:
        UsageError: the query is no valid SQL, or names something that there is not.
    """
    # Categories behave as text in SQL: LIKE and comparisons with literals work.
    texts = {
        name: frame.lazy().with_columns(pl.col(pl.Categorical).cast(pl.String))
        for name, frame in frames.items()
    }
    try:
        with pl.SQLContext(texts) as context:
            return context.execute(query, eager=True)
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"the query cannot be answered: {error}") from error
