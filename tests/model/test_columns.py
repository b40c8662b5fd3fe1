"""Columns as arrays: null is the number that is asked for, also where nothing or everything is null."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from thence.model.columns import mask_of, name_codes, row_numbers, values_or


@pytest.mark.parametrize("dtype", [pl.Int32, pl.UInt32, pl.Int64])
@pytest.mark.parametrize("values", [[3, 0, 7], [3, None, 7], [None, None], []])
def test_null_is_no_row(values: list[int | None], dtype: type[pl.DataType]) -> None:
    found = row_numbers(pl.Series(values, dtype=dtype))
    assert found.dtype == np.int64
    assert found.tolist() == [-1 if value is None else value for value in values]


def test_values_and_masks_keep_their_type() -> None:
    assert values_or(pl.Series([1.5, None]), 0).tolist() == [1.5, 0.0]
    assert values_or(pl.Series([1, None], dtype=pl.Int32), 9).tolist() == [1, 9]
    for values in ([True, None, False], [True, False]):
        found = mask_of(pl.Series(values, dtype=pl.Boolean))
        assert found.dtype == np.bool_
        assert found.tolist() == [value is True for value in values]


def test_equal_names_have_equal_codes_and_null_has_0() -> None:
    first, null, again, other = name_codes(pl.Series(["a", None, "a", "b"], dtype=pl.Categorical()))
    assert (null, first) == (0, again)
    assert len({0, first, other}) == 3
    assert name_codes(pl.Series([None], dtype=pl.Categorical())).tolist() == [0]
