"""Tables as CSV that a spreadsheet shows and does not execute."""

from __future__ import annotations

import polars as pl

_FORMULA = r"^[=+\-@\t\r\x{FF1D}\x{FF0B}\x{FF0D}\x{FF20}]."
"""Starts of a text that a spreadsheet takes for a formula, also in their full-width forms; a single character is none.
Source: OWASP, "CSV Injection"."""


def csv_text(rows: pl.DataFrame) -> str:
    """A table as CSV; a text that a spreadsheet would execute as a formula begins with an apostrophe.

    Names in a trace come from elsewhere. Numbers are written as they are, also negative ones. A field of a struct has a
    column of its own, such as ``measured.flop``.
    """
    rows = _unnested(rows)
    texts = pl.col(pl.String, pl.Categorical, pl.Enum).cast(pl.String)
    guarded = pl.when(texts.str.contains(rf"(?s){_FORMULA}")).then(pl.lit("'") + texts).otherwise(texts)
    return rows.with_columns(guarded.name.keep()).write_csv()


def _unnested(rows: pl.DataFrame) -> pl.DataFrame:
    """The table with a column for each field of its structs, also inside of structs."""
    while structs := [name for name, dtype in rows.schema.items() if isinstance(dtype, pl.Struct)]:
        named = (pl.col(name).name.prefix_fields(f"{name}.") for name in structs)
        rows = rows.with_columns(named).unnest(structs)
    return rows
