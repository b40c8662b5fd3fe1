"""SQL over the tables of a trace, and over nothing else.

Polars' SQL has functions that read files (``select * from read_csv('...')``) and statements that change tables.
Both are refused: a query can only read the tables that it is given.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from thence.errors import UsageError
from thence.model.attributed import RULE
from thence.model.phases import POSITIONS
from thence.model.places import KINDS, PLACES
from thence.model.tables import (
    COLLECTIVES,
    COUNTERS,
    EVENTS,
    GPU,
    HOST,
    MEMORY,
    MEMORY_FAILURES,
    MEMORY_TOTALS,
    PROGRAMS,
    STALLS,
    STEP_TIMES,
    STEPS,
    THREADS,
    WAITS,
    Column,
    Table,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


TABLES = (
    "gpu",
    "host",
    "places",
    "activities",
    "annotations",
    "collectives",
    "threads",
    "programs",
    "events",
    "waits",
    "steps",
    "step_times",
    "memory",
    "memory_totals",
    "memory_failures",
    "counters",
    "stalls",
)
"""The tables that a query can name."""

_READERS = re.compile(
    # Refused even in strings and comments: only Polars' parser can tell what is quoted and what is a comment.
    r"\b(?:read|scan)_(?:csv|parquet|ipc|arrow|json|ndjson|avro|delta|iceberg|excel|database|lines)"
    # Other readers that a later version of Polars may add, where they are called.
    r"|\b(?:read|scan)_\w+[\"`\]]?\s*\(",
    re.IGNORECASE,
)
_QUERIES = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*(?:select|with|from|values|explain|show|table)\b", re.IGNORECASE | re.DOTALL
)
_NO_TABLE = re.compile(r"relation '([^']{1,80})' was not found")
_NO_COLUMN = re.compile(r'unable to find column "([^"]{1,80})"; valid columns: \[(.*)\]', re.DOTALL)
_MAX_QUERY_LENGTH = 100_000
_MAX_ERROR_LENGTH = 400


def named(query: str) -> tuple[str, ...]:
    """The names in `TABLES` that occur in the query; the caller need not compute the other tables."""
    return tuple(name for name in TABLES if name in query)


def answer(frames: Mapping[str, pl.DataFrame | pl.LazyFrame], query: str) -> pl.DataFrame:
    """Runs an SQL query over frames by their names; categories behave as text.

    LazyFrames are read in batches, and only the parts that the query needs.

    Raises:
        UsageError: the query is no valid SQL, names a table or column that does not exist, reads a file, or is a
            statement other than a query.
    """
    check_query(query)
    # Categories behave as text in SQL: LIKE and comparisons with literals work.
    texts = {name: frame.lazy().with_columns(pl.col(pl.Categorical).cast(pl.String)) for name, frame in frames.items()}
    try:
        with pl.SQLContext(texts) as context:
            planned = any(isinstance(frame, pl.LazyFrame) for frame in frames.values())
            engine: Literal["streaming", "auto"] = "streaming" if planned else "auto"
            return context.execute(query, eager=False).collect(engine=engine)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError) as error:
        raise UsageError(f"the query cannot be answered: {_explained(error)}") from error


def check_query(query: str) -> None:
    """Checks a query as far as that is possible without tables.

    Raises:
        UsageError: it is too long, names a function that reads files, or is no query.
    """
    if len(query) > _MAX_QUERY_LENGTH:
        raise UsageError(f"the query has over {_MAX_QUERY_LENGTH:,} characters")
    if match := _READERS.search(query):
        raise UsageError(
            f"the query names {match[0].rstrip(' (')}; a query can read only the tables of the trace, no files"
        )
    if not _QUERIES.match(query):
        raise UsageError("the query must begin with SELECT, WITH, FROM, VALUES, EXPLAIN or SHOW")


def _explained(error: BaseException) -> str:
    """The error as one line; if a table or column does not exist, with the tables or a similar column name."""
    text = _one_line(error)
    if match := _NO_TABLE.search(text):
        return f"there is no table {match[1]}; the tables are {', '.join(TABLES)}"
    if match := _NO_COLUMN.search(str(error)):
        columns = re.findall(r'"([^"]+)"', match[2])
        like = difflib.get_close_matches(match[1], columns, 1)
        meant = f", did you mean {like[0]}" if like else ""
        return f"there is no column {match[1]}{meant}; thence sql --tables lists all columns"
    return text


def _one_line(error: BaseException) -> str:
    """The message of a Polars error on one line, without the query plan that follows it."""
    text = str(error).strip().partition("\n\nResolved plan")[0]
    return " ".join(text.split())[:_MAX_ERROR_LENGTH] or type(error).__name__


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
    GPU, PLACES_TABLE, ACTIVITIES, HOST, COLLECTIVES, PROGRAMS, THREADS, EVENTS, WAITS, STEPS, STEP_TIMES, MEMORY,
    MEMORY_TOTALS, MEMORY_FAILURES, COUNTERS, STALLS, ANNOTATIONS,
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
