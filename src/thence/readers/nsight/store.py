"""The interface through which an Nsight Systems export is read, and helpers for its columns.

`Store` is the interface; `thence.readers.nsight.sqlite` and `thence.readers.nsight.folder` implement it.
The helpers look up names by the ids of their texts, find distinct rows, sort rows without copying
more than one column at a time, and drop or repair impossible times.

Table schemas differ between versions of nsys: tables and columns come and go, and a table without rows
is not exported at all. An absent column is therefore read as null.
Only the tables in `READABLE` are read. Other tables, such as ``TARGET_INFO_SYSTEM_ENV`` and ``ANALYSIS_*``,
hold the environment variables of the traced program, which may be secret.
Source of the names: the exporter schema reference of the Nsight Systems user guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import polars as pl

from thence.model.columns import values_or
from thence.model.names import UNNAMED
from thence.units import LATEST_NS, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt

    from thence.model.arrays import UInt32, UInt64

    Rows = npt.NDArray[np.intp]

_SLOT_BITS = 14  # tables of this size stay in the processor's cache
_HASH_ROUNDS = 8
_BLOCK_ROWS = 1 << 17  # rows whose distinct values are looked for together
_HASH_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
Part = TypeVar("Part")
READABLE = frozenset(
    {
        "CUDA_GRAPH_NODE_EVENTS",
        "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
        "DIAGNOSTIC_EVENT",
        "ENUM_CUDA_MEMCPY_OPER",
        "ENUM_CUDA_MEM_KIND",
        "GPU_METRICS",
        "NVTX_EVENTS",
        "NVTX_PAYLOAD_SCHEMA_ENTRIES",
        "PROCESSES",
        "PROFILER_OVERHEAD",
        "StringIds",
        "TARGET_INFO_CUDA_DEVICE",
        "TARGET_INFO_GPU",
        "TARGET_INFO_GPU_METRICS",
        "TARGET_INFO_SESSION_START_TIME",
        "ThreadNames",
    }
)
"""Every table that thence reads."""
PAYLOADS = {"row": pl.Int64(), "binary": pl.Binary(), "json": pl.String()}
"""Schema of payloads: row of NVTX_EVENTS (from 0), and the payload of the event as bytes, as JSON, or both."""


class Store(Protocol):
    """Tables of one export."""

    @property
    def name(self) -> str:
        """The input as the user named it."""

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table; empty if there is no such table."""

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of a table: integers as Int64, texts as Categorical; absent columns are null.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def parts(self, table: str, integers: Sequence[str], work: Callable[[pl.DataFrame], Part]) -> list[Part]:
        """Applies a function to each part of a table and returns the results in table order.

        A large SQLite table is passed in several parts, which may be processed concurrently, so that it need not be
        in memory as a whole. A table of a folder is passed as one part.

        Args:
            integers: names of integer columns, as for `frame`.
            work: pure function of the columns of some consecutive rows.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def payloads(self) -> pl.DataFrame:
        """Payloads of the NVTX events that have one, in the columns of `PAYLOADS`.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def strings(self, ids: pl.Series) -> pl.DataFrame:
        """Texts of StringIds for the given ids only: columns id (Int64) and value (Categorical).

        Raises:
            DamagedInput: the table cannot be read.
        """


def process_of(global_id: pl.Expr) -> pl.Expr:
    """Process id in a serialised GlobalId: bits 24 to 47 (user guide, "Common SQLite Examples")."""
    return (global_id // (1 << 24)) % (1 << 24)


def thread_of(global_id: pl.Expr) -> pl.Expr:
    """Thread id in a serialised GlobalId: the low 24 bits."""
    return global_id % (1 << 24)


def names(store: Store, *ids: pl.Series) -> pl.Series:
    """Name of each row (Categorical): the text of the first of its ids that has a text, or `UNNAMED`.

    Args:
        ids: columns of ids in StringIds, Int64; at least one column.

    Raises:
        DamagedInput: the texts cannot be read.
    """
    first, number_of_row = distinct_values(*ids)
    ids_of_firsts = [column.gather(first) for column in ids]
    texts = store.strings(pl.concat(ids_of_firsts))
    named = [
        column.to_frame("id").join(texts, on="id", how="left", maintain_order="left")["value"]
        for column in ids_of_firsts
    ]
    unnamed = pl.lit(UNNAMED).cast(pl.Categorical())
    return pl.select(pl.coalesce(*named, unnamed)).to_series().gather(number_of_row).alias("name")


def distinct_values(*columns: pl.Series) -> tuple[Rows, UInt32]:
    """Distinct rows, as `distinct` returns them, of integer columns; null equals null.

    Args:
        columns: Int64, at least one.
    """
    words = []
    for column in columns:
        words.append(values_or(column, 0).view(np.uint64))
        if column.null_count():
            words.append(column.is_null().to_numpy().astype(np.uint64))
    return distinct(words)


def distinct(words: Sequence[UInt64]) -> tuple[Rows, UInt32]:
    """Row numbers of the distinct rows, and for every row the index of its distinct row.

    Rows are compared without sorting, which is fast if few of many rows are distinct. If more
    than a quarter of the rows are distinct, some of the returned rows may be equal.

    Args:
        words: columns of the rows, at least one array of shape (n,).

    Returns:
        Row numbers, shape (m,), and for each row an index from 0 to m - 1, shape (n,).
    """
    rows = len(words[0])
    if rows <= _BLOCK_ROWS:
        return _distinct_in_block(words)
    numbers_of_rows = np.empty(rows, np.uint32)
    first_rows: list[Rows] = []
    count = 0
    for start in range(0, rows, _BLOCK_ROWS):
        part = slice(start, start + _BLOCK_ROWS)
        first, numbers = _distinct_in_block([word[part] for word in words])
        numbers_of_rows[part] = numbers + count
        first_rows.append(first + start)
        count += len(first)
    first = np.concatenate(first_rows)
    if count > rows // 4:
        return first, numbers_of_rows
    chosen, numbers = distinct([word[first] for word in words])
    return first[chosen], np.take(numbers, numbers_of_rows)


def _distinct_in_block(words: Sequence[UInt64]) -> tuple[Rows, UInt32]:
    """Distinct rows, as `distinct` returns them, of at most `_BLOCK_ROWS` rows.

    Rows are put into slots by a hash. One row represents each slot; rows that differ from it are hashed
    again with other multipliers. Rows left after `_HASH_ROUNDS` rounds count as distinct.
    """
    numbers_of_rows = np.zeros(len(words[0]), np.uint32)
    first_rows: list[Rows] = []
    count = 0
    rows: Rows = np.arange(len(numbers_of_rows))
    parts = list(words)
    for number in range(_HASH_ROUNDS):
        slot = _hash_slots(parts, number)
        taken = np.full(1 << _SLOT_BITS, -1, np.intp)
        taken[slot] = np.arange(len(slot))
        used = np.flatnonzero(taken >= 0)
        chosen = taken[used]
        taken[used] = np.arange(len(used))
        candidate = np.take(taken, slot)
        first_rows.append(rows[chosen])
        differs = np.zeros(len(slot), np.bool_)
        for part in parts:
            differs |= np.take(part[chosen], candidate) != part
        numbers_of_rows[rows] = candidate + count
        count += len(chosen)
        if not differs.any():
            break
        rows = rows[differs]
        parts = [part[differs] for part in parts]
    else:
        numbers_of_rows[rows] = count + np.arange(len(rows))
        first_rows.append(rows)
    return np.concatenate(first_rows), numbers_of_rows


def _hash_slots(words: Sequence[UInt64], number: int) -> Rows:
    mixed = words[0] * np.uint64(_HASH_MULTIPLIERS[number % len(_HASH_MULTIPLIERS)] + 2 * number)
    for word in words[1:]:
        mixed ^= mixed >> np.uint64(29)
        mixed += word
        mixed *= np.uint64(_HASH_MULTIPLIERS[(number + 1) % len(_HASH_MULTIPLIERS)] + 2 * number)
    mixed >>= np.uint64(64 - _SLOT_BITS)  # the high bits of a product depend on all bits of its factors
    return mixed.view(np.int64)


def numbered(*columns: pl.Series) -> npt.NDArray[np.generic]:
    """Dense rank, from 0, of each row's combination of column values; null sorts first.

    Args:
        columns: Int64, at least one; few distinct combinations are expected.

    Returns:
        uint16 array of shape (n,); int64 if there are over 65,536 combinations.
    """
    first, number_of_row = distinct_values(*columns)
    distinct_rows = pl.DataFrame([column.gather(first).alias(str(n)) for n, column in enumerate(columns)])
    combinations = distinct_rows.unique().sort(distinct_rows.columns, nulls_last=False).with_row_index("number")
    joined = distinct_rows.join(
        combinations, on=distinct_rows.columns, how="left", nulls_equal=True, maintain_order="left"
    )
    number = joined["number"].to_numpy()
    # Small numbers are sorted faster.
    result: npt.NDArray[np.generic] = number.astype(np.uint16 if len(combinations) <= 1 << 16 else np.int64)
    return result[number_of_row]


def gathered(columns: dict[str, pl.Series], order: npt.NDArray[np.intp]) -> None:
    """Reorders every column in place, one after the other, so that only one large copy exists."""
    rows = pl.Series(order.astype(np.uint32))
    for name in list(columns):
        # Gathering from many chunks takes four times as long.
        columns[name] = columns[name].rechunk().gather(rows)


@dataclass(frozen=True)
class Timed:
    """Rows with a duration.

    Attributes:
        frame: the rows with a possible start; duration (ns) instead of end.
        lost: number of rows left out because they had no start, or an impossible start.
        unusable: number of rows with duration 0 because their end was missing, impossible or before their start.
    """

    frame: pl.DataFrame
    lost: int
    unusable: int

    def problems(self, what: str) -> Iterator[tuple[str, int, str]]:
        """Code of `thence.model.losses.LOSSES`, number of rows, and a sentence, for rows lost and unusable.

        Args:
            what: noun for a row, in the singular.
        """
        if self.lost:
            missing = "without a start time, or with an impossible one"
            yield "no_times", self.lost, f"left out: {several(self.lost, what)} {missing}"
        if self.unusable:
            wrong = "without an end, or with an end before the start; duration counted as 0"
            yield "repaired", self.unusable, f"{several(self.unusable, what)} {wrong}"


def lasting(frame: pl.DataFrame, what: str) -> tuple[pl.DataFrame, list[str]]:
    """The rows that have a possible start, with duration (ns) instead of end; and warnings.

    Args:
        frame: columns start and end, ns.
        what: noun for a row, in the singular, used in the warnings.
    """
    timed = with_durations(frame)
    return timed.frame, left_out([timed], what)


def with_durations(frame: pl.DataFrame) -> Timed:
    """The rows that have a possible start, with duration (ns) instead of end, and counts of lost and repaired rows.

    Args:
        frame: columns start and end, ns.
    """
    begins = frame.select(pl.col("start").is_between(-LATEST_NS, LATEST_NS)).to_series()
    timed = frame if begins.all(ignore_nulls=False) else frame.filter(begins)
    ended = pl.col("end").is_between(pl.col("start"), LATEST_NS)
    unusable = timed.height - int(timed.select(ended.sum()).item() or 0)
    length = pl.col("end") - pl.col("start")
    duration = pl.when(ended).then(length).otherwise(0) if unusable else length
    return Timed(timed.with_columns(duration.alias("duration")).drop("end"), frame.height - timed.height, unusable)


def left_out(parts: Sequence[Timed], what: str) -> list[str]:
    """Warnings about rows that `with_durations` dropped or gave the duration 0."""
    lost, unusable = sum(part.lost for part in parts), sum(part.unusable for part in parts)
    return [text for _, _, text in Timed(pl.DataFrame(), lost, unusable).problems(what)]


def bounded(column: str, bits: int) -> pl.Expr:
    """The column, with null for values that are negative or do not fit in ``bits`` bits."""
    return pl.when(pl.col(column).is_between(0, (1 << bits) - 1)).then(pl.col(column)).alias(column)
