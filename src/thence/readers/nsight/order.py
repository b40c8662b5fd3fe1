"""Numbers for combinations of columns, and rows put into an order so that little is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.readers.nsight.distinct import distinct_values

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["gathered", "numbered"]


def numbered(*columns: pl.Series) -> npt.NDArray[np.generic]:
    """For each row how many smaller combinations of the columns there are, null being the smallest.

    Args:
        columns: Int64, at least one; there are few combinations.

    Returns:
        uint16 array of shape (n,), int64 where there are too many.
    """
    first, of = distinct_values(*columns)
    few = pl.DataFrame([column.gather(first).alias(str(n)) for n, column in enumerate(columns)])
    known = few.unique().sort(few.columns, nulls_last=False).with_row_index("number")
    joined = few.join(known, on=few.columns, how="left", nulls_equal=True, maintain_order="left")
    number = joined["number"].to_numpy()
    # Small numbers are sorted faster.
    result: npt.NDArray[np.generic] = number.astype(
        np.uint16 if len(known) <= 1 << 16 else np.int64
    )
    return result[of]


def gathered(columns: dict[str, pl.Series], order: npt.NDArray[np.intp]) -> None:
    """Puts every column into an order, in place and one by one: each is large."""
    rows = pl.Series(order.astype(np.uint32))
    for name in list(columns):
        # Gathering from many pieces takes four times as long.
        columns[name] = columns[name].rechunk().gather(rows)
