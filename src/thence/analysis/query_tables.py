"""Descriptions of the tables that SQL queries can use: every column with its type, unit and meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.model.attributed import RULE
from thence.model.phases import POSITIONS
from thence.model.places import KINDS, PLACES
from thence.model.tables import (
    COLLECTIVES,
    EVENTS,
    GPU,
    HOST,
    PROGRAMS,
    STEP_TIMES,
    STEPS,
    THREADS,
    WAITS,
    Column,
    Table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_MEANING = {kind.name: kind.meaning for kind in KINDS}
_TEXT = pl.Categorical()
_FROM_PLACES = ("program", "hlo")
"""Columns of both gpu (row numbers, or as recorded) and places (names); activities takes those of places."""
_ROW = re.compile(r"\brow in (\w+)|\bindex in ([\w.]+)")
_BYTES = ("bytes", "shared_memory")


def _places() -> Iterator[Column]:
    yield Column("launch", pl.Int32(), "row in host of the call that launched it; null where unknown")
    yield Column("step_row", pl.Int32(), "row in steps of the step in which it was launched; null outside")
    for kind in PLACES:
        yield Column(kind, _TEXT, f"{_MEANING[kind]}; null where there is none")
        yield Column(f"{kind}_rule", RULE, "code of how the place was found, or of why there is none")
    yield Column("position", pl.Enum(POSITIONS), "what the line number of the source refers to: function or line")
    yield Column("lane", _TEXT, "extra lane that a mark named; null almost everywhere")
    yield Column("metadata", _TEXT, "metadata of marks in addition to their names, as a JSON object")
    yield Column("detail", _TEXT, "sentence about a CUDA graph that could not be matched; null almost everywhere")
    yield Column(
        "separate", RULE, "why tables of XLA traces show it in a separate row: warm_up, incomplete, autotuning"
    )


PLACES_TABLE = Table("places", "where each row of gpu came from, in the order of gpu", (*_places(),))


def _activities() -> Iterator[Column]:
    for column in GPU.columns:
        if column.name == "iteration":
            yield Column("repetition", column.dtype, column.meaning)
        elif column.name not in _FROM_PLACES:
            yield column
    yield from PLACES_TABLE.columns


ACTIVITIES = Table("activities", "one device activity with its places: gpu and places side by side", (*_activities(),))
ANNOTATIONS = Table(
    "annotations",
    "one device activity with metadata from marks; in addition, one column for each metadata field",
    (
        Column("gpu", pl.Int32(), "row in gpu"),
        *(c for c in GPU.columns if c.name in ("rank", "device", "stream", "name", "start", "duration")),
        *(c for c in PLACES_TABLE.columns if c.name in ("label", "lane")),
    ),
)  # fmt: skip
DESCRIBED_TABLES = (
    GPU, PLACES_TABLE, ACTIVITIES, HOST, COLLECTIVES, PROGRAMS, THREADS, EVENTS, WAITS, STEPS, STEP_TIMES, ANNOTATIONS,
)  # fmt: skip
"""Every table that a query can name."""


def described(table: Table) -> pl.DataFrame:
    """The columns of a table: column, type, unit (``ns``, ``bytes``, ``row of host``; null for none), meaning."""
    rows = [
        (column.name, _type(column.dtype), _unit(column), " ".join(column.meaning.split())) for column in table.columns
    ]
    schema = dict.fromkeys(("column", "type", "unit", "meaning"), pl.String)
    return pl.DataFrame(rows, schema=schema, orient="row")


def _type(dtype: Any) -> str:
    """The name of a type as SQL treats it: categories and enumerations are text."""
    if isinstance(dtype, pl.Categorical | pl.Enum | pl.String):
        return "text"
    if isinstance(dtype, pl.Array):
        return f"{dtype.size} integers"
    if isinstance(dtype, pl.Boolean):
        return "boolean"
    return "integer" if dtype.is_integer() else "real"


def _unit(column: Column) -> str | None:
    """The unit of a numeric column, taken from its meaning or name."""
    if column.meaning.startswith("ns"):
        return "ns"
    if column.name in _BYTES:
        return "bytes"
    row = _ROW.search(column.meaning)
    return None if row is None or not column.dtype.is_integer() else f"row of {row[1] or row[2]}"
