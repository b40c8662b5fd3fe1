"""The metadata that marks and annotations carry in addition to names, as a table with a typed column for each field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.model.json_fields import decoded

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_ACTIVITY = ("rank", "device", "stream", "name", "start", "duration")
_PLACES = ("label", "lane")
ANNOTATED = ("gpu", *_ACTIVITY, *_PLACES)
"""Columns of the table that are no fields of annotations."""


def annotation_table(trace: Attributed) -> pl.DataFrame:
    """The metadata of every activity that has any.

    Returns:
        gpu (row in `gpu`), rank, device, stream, name, start (ns), duration (ns), label, lane, and a
        column for each field: Int64, Float64, Boolean or String, depending on its values; lists and
        fields of several types are JSON text. A field with the name of an earlier column is prefixed
        with ``annotated_``. Descriptions of collectives are in ``collectives``.
    """
    metadata = trace.places["metadata"].cast(pl.String)
    rows = metadata.is_not_null().arg_true()
    texts = metadata.gather(rows)
    distinct = texts.unique(maintain_order=True)
    fields: list[dict[str, Any]] = [decoded(text, dict[str, Any]) for text in distinct.to_list()]
    of_row = texts.replace_strict(
        distinct, pl.int_range(len(distinct), dtype=pl.UInt32, eager=True), return_dtype=pl.UInt32
    )
    frame = pl.DataFrame({"gpu": rows.cast(pl.Int32)}).with_columns(
        *(trace.gpu[name].gather(rows) for name in _ACTIVITY), *(trace.places[name].gather(rows) for name in _PLACES)
    )
    keys = dict.fromkeys(key for entry in fields for key in entry)
    taken = set(frame.columns)
    columns = []
    for key in keys:
        column = key
        while column in taken:
            column = f"annotated_{column}"
        taken.add(column)
        columns.append(_typed(column, [entry.get(key) for entry in fields]).gather(of_row))
    return frame.with_columns(columns)


def _typed(name: str, values: list[Any]) -> pl.Series:
    types = {type(value) for value in values if value is not None}
    dtype: Any = {
        frozenset((int,)): pl.Int64, frozenset((float,)): pl.Float64,
        frozenset((int, float)): pl.Float64, frozenset((bool,)): pl.Boolean,
    }.get(frozenset(types), pl.String)  # fmt: skip
    if dtype == pl.Int64 and any(v is not None and abs(v) >= 1 << 63 for v in values):
        dtype = pl.String
    if dtype == pl.String:
        values = [
            value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()
            for value in values
        ]
    return pl.Series(name, values, dtype)
