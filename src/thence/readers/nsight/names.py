"""Names of many rows by the ids of their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.readers.nsight.distinct import distinct_values

if TYPE_CHECKING:
    from thence.readers.nsight.store import Store

__all__ = ["UNNAMED", "names"]

UNNAMED = "(unnamed)"
"""What has no name is called."""


def names(store: Store, *ids: pl.Series) -> pl.Series:
    """Name of each row (Categorical): the text of the first of its ids that has one, or `UNNAMED`.

    Args:
        store: the export.
        ids: rows of StringIds, Int64, at least one column.

    Raises:
        DamagedInput: the texts cannot be read.
    """
    first, of = distinct_values(*ids)
    few = [column.gather(first) for column in ids]
    texts = store.strings(pl.concat(few))
    found = [
        column.to_frame("id").join(texts, on="id", how="left", maintain_order="left")["value"]
        for column in few
    ]
    unnamed = pl.lit(UNNAMED).cast(pl.Categorical())
    return pl.select(pl.coalesce(*found, unnamed)).to_series().gather(of).alias("name")
