"""Parquet and CSV bytes from an archive to frames, with every failure turned into DamagedInput."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import polars as pl
from polars.exceptions import PanicException, PolarsError

from thence.errors import DamagedInput
from thence.readers.probe import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["as_int64", "csv_frame", "parquet_frame", "renamed"]

_DAMAGE = (PolarsError, PanicException, OSError, ValueError, UnicodeError, MemoryError)


def parquet_frame(data: bytes, path: str) -> pl.DataFrame:
    """The frame in a Parquet file.

    Raises:
        DamagedInput: it is none, is damaged, or claims more than `MAX_ROWS` rows.
    """
    try:
        rows = pl.scan_parquet(io.BytesIO(data)).select(pl.len()).collect().item()
        if rows > MAX_ROWS:
            raise DamagedInput(path, f"claims {rows:,} rows; at most {MAX_ROWS:,} are accepted")
        return pl.read_parquet(io.BytesIO(data))
    except _DAMAGE as error:
        raise DamagedInput(
            path, f"is no Parquet file that can be read ({_first_line(error)})"
        ) from error


def csv_frame(data: bytes, path: str) -> pl.DataFrame:
    """The frame in a CSV file with a header.

    Raises:
        DamagedInput: it is none.
    """
    try:
        return pl.read_csv(data, infer_schema_length=10_000, truncate_ragged_lines=False)
    except _DAMAGE as error:
        raise DamagedInput(
            path, f"is no CSV table that can be read ({_first_line(error)})"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def renamed(frame: pl.DataFrame, names: Mapping[str, Sequence[str]], path: str) -> pl.DataFrame:
    """The wanted columns under the names used here; the first spelling that exists is taken.

    Args:
        frame: as the producer wrote it.
        names: name here to its possible spellings there; an empty spelling makes it optional.
        path: for messages.

    Raises:
        DamagedInput: a column that is needed is missing.
    """
    chosen = []
    for name, spellings in names.items():
        there = next((s for s in spellings if s in frame.columns), None)
        if there is None and "" not in spellings:
            raise DamagedInput(
                path, f"has no column {spellings[0]!r}; its columns: {frame.columns}"
            )
        chosen.append(pl.lit(None).alias(name) if there is None else pl.col(there).alias(name))
    return frame.select(chosen)


def as_int64(frame: pl.DataFrame, columns: Sequence[str], path: str) -> pl.DataFrame:
    """The columns as int64, whatever number type pandas gave them; NaN becomes null.

    Raises:
        DamagedInput: a column holds no whole numbers.
    """
    try:
        floats = [c for c in columns if frame.schema[c].is_float()]
        return frame.with_columns(pl.col(floats).fill_nan(None)).with_columns(
            pl.col(*columns).cast(pl.Int64)
        )
    except PolarsError as error:
        raise DamagedInput(path, f"holds no whole numbers ({_first_line(error)})") from error
