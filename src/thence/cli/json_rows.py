"""Tables of a JSON document with as many rows as ``--top`` says; the others are summed into one row.

The last row of a table that is shortened has the columns of the others. What adds up over rows is the sum of the rows
that are left out, in the same unit; all other columns are null. Its key ``rest`` says how many rows it stands for.
Beside each table of rows ``NAME``, ``NAME_total`` says how many rows it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REST = "rest"
"""Key of the row that sums up the others, and only of that row: how many rows it stands for."""
_SUMMED = re.compile(
    r"count|executions|instances|total_ns|share|self_ns|ns|flop|(idle|exposed|hidden|overlapped|backward|duration|busy|"
    r"modelled|roofline|headroom|communication|compile|autotuning|wait_caused|device_wait_ns_sum|wait)_ns(_sum)?|"
    r"idle_\w+_ns|\w+_ms_total"
)
"""Columns that add up over the rows of a table."""
_OF_TABLE = {
    "ranks": re.compile(r"times_last|wait_caused_ns|caused_share"),
    **dict.fromkeys(
        ("tree", "groups", "stages", "spread", "outliers", "slow_links", "runs", "places", "changes"),
        re.compile(r"(?!)"),
    ),
}
"""The same for tables of means over steps, and of rows that contain others."""


def with_most_rows(document: Any, most: int) -> Any:
    """A document whose tables have at most so many rows and one for the rest.

    Args:
        document: JSON values, in which tables are lists of objects or Polars frames; or one table.
        most: rows of a table, besides the one for the rest.
    """
    if isinstance(document, Mapping):
        made: dict[str, Any] = {}
        for key, value in document.items():
            made[key] = _shortened(key, value, most)
            if _height(value) is not None:
                made.setdefault(f"{key}_total", _height(value))
        return made
    return _shortened("", document, most)


def _height(value: Any) -> int | None:
    """The number of rows of a table; None for other values."""
    import polars as pl

    if isinstance(value, pl.DataFrame):
        return value.height
    is_table = isinstance(value, list | tuple) and bool(value) and all(isinstance(row, Mapping) for row in value)
    return len(value) if is_table else None


def _shortened(key: str, value: Any, most: int) -> Any:
    import polars as pl

    if isinstance(value, Mapping):
        return with_most_rows(value, most)
    height = _height(value)
    if height is None:
        return value
    shown, left = value[:most], value[most:]
    rows = [with_most_rows(row, most) for row in (shown.to_dicts() if isinstance(shown, pl.DataFrame) else shown)]
    return [*rows, _rest(key, left, height - most)] if height > most else rows


def _rest(table: str, left: Any, count: int) -> dict[str, Any]:
    """The row that stands for those that are left out."""
    import polars as pl

    rows = left if isinstance(left, pl.DataFrame) else None
    columns = rows.columns if rows is not None else list(dict.fromkeys(key for row in left for key in row))
    summed = _OF_TABLE.get(table, _SUMMED)
    made: dict[str, Any] = {}
    for column in columns:
        values = rows[column].to_list() if rows is not None and summed.fullmatch(column) else ()
        values = [row.get(column) for row in left] if rows is None else values
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        made[column] = sum(values) if values and numbers and summed.fullmatch(column) else None
    return made | {REST: count}
