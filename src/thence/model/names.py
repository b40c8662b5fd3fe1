"""Names of ranges and kernels: columns with many rows and few distinct names."""

from __future__ import annotations

import polars as pl

UNNAMED = "(unnamed)"
"""Name of activities and host ranges for which the producer gave none: every row has a name."""


def matching(names: pl.Series, pattern: str) -> pl.Series:
    """Which names contain a match of a regular expression; every distinct name is searched once.

    Args:
        names: Categorical; a null matches nothing.
        pattern: as Polars takes it.
    """
    distinct = names.unique().drop_nulls().cast(pl.String)
    found = distinct.filter(distinct.str.contains(pattern)).cast(pl.Categorical())
    return names.is_in(found.implode()).fill_null(value=False)
