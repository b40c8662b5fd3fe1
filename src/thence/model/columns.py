"""Columns of Polars as arrays of NumPy, with a number in the place of null, and arrays as columns.

Most columns have no null, or nothing else: neither needs a query, which costs more than all of a small column.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from thence.model.arrays import Array, Int64, Mask


def at_once(query: pl.LazyFrame) -> pl.DataFrame:
    """The result of a query; to start the streaming engine, the default, takes longer than a query of a small trace."""
    return query.collect(engine="in-memory")


def values_or(values: pl.Series, value: float) -> Array:
    """A column of numbers as an array of its type, with ``value`` for null."""
    return (values.fill_null(value) if values.null_count() else values).to_numpy()


def mask_of(values: pl.Series) -> Mask:
    """Truth values as an array, False for null."""
    return (values.fill_null(value=False) if values.null_count() else values).to_numpy()


def not_null(values: pl.Series) -> Mask:
    """Which values are not null."""
    missing = values.null_count()
    if missing in (0, len(values)):
        return np.full(len(values), not missing)
    return values.is_not_null().to_numpy()


def nullable(values: Array, missing: Mask) -> pl.Series:
    """An array as a column of its type, with null where ``missing`` is true."""
    count = np.count_nonzero(missing)
    if not count:
        return pl.Series(values)
    nulls = _null(values.dtype).new_from_index(0, len(values))
    return nulls if count == len(values) else nulls.zip_with(pl.Series(missing), pl.Series(values))


@cache
def _null(dtype: np.dtype[Any]) -> pl.Series:
    """A column of one null, of the type of an array."""
    return pl.Series(np.zeros(1, dtype)).clear(1)


def row_numbers(references: pl.Series) -> Int64:
    """Row numbers as an array, `NO_ROW` for null."""
    if references.null_count() == len(references):
        return np.full(len(references), NO_ROW, np.int64)
    return values_or(references.cast(pl.Int64), NO_ROW)


def name_codes(names: pl.Series) -> Int64:
    """The number of each Categorical or Enum, from 1 on; 0 for null."""
    if names.null_count() == len(names):
        return np.zeros(len(names), np.int64)
    codes: Int64 = row_numbers(names.to_physical()) + 1
    return codes


def group_sums(group: Int64, values: Int64, groups: int) -> Int64:
    """The sum of the values of each group."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)  # bincount would add as float64, which rounds beyond 2^53
    return sums
