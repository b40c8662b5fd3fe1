"""What marks said beside their names, put together: one JSON object, inner marks winning over outer ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import polars as pl

from thence.attribution.paths import numbered_paths

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

__all__ = ["merged_metadata", "within"]


def merged_metadata(
    parent: npt.NDArray[np.int64],
    metadata: pl.Series,
    rows: npt.NDArray[np.int64],
    told: npt.NDArray[np.bool_],
) -> pl.Series:
    """The metadata of all marks around each of the rows.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        metadata: Categorical JSON object of every host row, null where there is none.
        rows: innermost host row with metadata of each activity, `NO_ROW` for none.
        told: which host rows have metadata.

    Returns:
        Categorical Series of JSON objects, one value per row, null where nothing was said.
    """
    paths, number = numbered_paths(parent, metadata, rows, told)
    texts = [_merged(path) for path in paths]
    return pl.Series("metadata", texts, dtype=pl.String).cast(pl.Categorical()).gather(number)


def within(outer: pl.Series, inner: pl.Series) -> pl.Series:
    """The metadata of one place inside another, row by row; columns as `merged_metadata` takes and returns."""
    pairs = pl.DataFrame({"outer": outer, "inner": inner})
    distinct = pairs.unique(maintain_order=True)
    texts = [
        _merged(text for text in pair if text is not None)
        for pair in distinct.cast(pl.String).iter_rows()
    ]
    known = distinct.with_columns(metadata=pl.Series(texts, dtype=pl.String).cast(pl.Categorical()))
    both = ["outer", "inner"]
    return pairs.join(known, on=both, how="left", maintain_order="left", nulls_equal=True)[
        "metadata"
    ]


def _merged(texts: Iterable[str]) -> str | None:
    """One object of several, the outermost first."""
    members: dict[str, msgspec.Raw] = {}
    for text in texts:
        members |= msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(members).decode() if members else None
