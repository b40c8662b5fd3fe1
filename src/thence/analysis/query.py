"""SQL over the tables of a trace, and over nothing else.

Polars' SQL has functions that read files (``select * from read_csv('...')``) and statements that change tables.
Both are refused: a query can only read the tables that it is given.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Literal

import polars as pl

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_MOST_CHARACTERS = 100_000
_MOST_OF_AN_ERROR = 400


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
    if len(query) > _MOST_CHARACTERS:
        raise UsageError(f"the query has over {_MOST_CHARACTERS:,} characters")
    if found := _READERS.search(query):
        raise UsageError(
            f"the query names {found[0].rstrip(' (')}; a query can read only the tables of the trace, no files"
        )
    if not _QUERIES.match(query):
        raise UsageError("the query must begin with SELECT, WITH, FROM, VALUES, EXPLAIN or SHOW")


def _explained(error: BaseException) -> str:
    """The error as one line; if a table or column does not exist, with the tables or a similar column name."""
    text = _one_line(error)
    if found := _NO_TABLE.search(text):
        return f"there is no table {found[1]}; the tables are {', '.join(TABLES)}"
    if found := _NO_COLUMN.search(str(error)):
        columns = re.findall(r'"([^"]+)"', found[2])
        like = difflib.get_close_matches(found[1], columns, 1)
        meant = f", did you mean {like[0]}" if like else ""
        return f"there is no column {found[1]}{meant}; thence sql --tables lists all columns"
    return text


def _one_line(error: BaseException) -> str:
    """The message of a Polars error on one line, without the query plan that follows it."""
    text = str(error).strip().partition("\n\nResolved plan")[0]
    return " ".join(text.split())[:_MOST_OF_AN_ERROR] or type(error).__name__
