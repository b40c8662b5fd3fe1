"""The tables of an Nsight Systems export, wherever they are kept: what the reader asks for.

Schemas differ from version to version: tables and columns come and go, and a table without rows is
not exported at all. So nothing is taken for granted: a column that is absent reads as null.
Only the tables in `READABLE` can be asked for. The others, ``TARGET_INFO_SYSTEM_ENV`` and
``ANALYSIS_*`` among them, hold the environment of the program that was traced: its secrets.
Source of the names: the exporter schema reference of the Nsight Systems user guide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import polars as pl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Part = TypeVar("Part")

__all__ = ["PAYLOADS", "READABLE", "Part", "Store", "process_of", "thread_of"]

READABLE = frozenset(
    {
        "CUDA_GRAPH_NODE_EVENTS",
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "CUPTI_ACTIVITY_KIND_MEMSET",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "ENUM_CUDA_MEMCPY_OPER",
        "ENUM_CUDA_MEM_KIND",
        "NVTX_EVENTS",
        "NVTX_PAYLOAD_SCHEMA_ENTRIES",
        "PROCESSES",
        "PROFILER_OVERHEAD",
        "StringIds",
        "TARGET_INFO_GPU",
        "TARGET_INFO_SESSION_START_TIME",
        "ThreadNames",
    }
)
"""Every table that thence ever reads."""


PAYLOADS = {"row": pl.Int64(), "binary": pl.Binary(), "json": pl.String()}
"""Schema of payloads: row of NVTX_EVENTS, from 0, and its payload as bytes or as JSON, or both."""


class Store(Protocol):
    """Tables of one export."""

    @property
    def name(self) -> str:
        """The input as the user named it."""

    def columns(self, table: str) -> frozenset[str]:
        """Names of the columns of a table; none where there is no such table."""

    def frame(self, table: str, integers: Sequence[str], texts: Sequence[str] = ()) -> pl.DataFrame:
        """Columns of a table: integers as Int64, texts as Categorical; absent ones are null.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def parts(
        self, table: str, integers: Sequence[str], work: Callable[[pl.DataFrame], Part]
    ) -> list[Part]:
        """What the work makes of each part of a table, in order.

        So that a large table need not be there whole. Parts may be worked on at the same time.

        Args:
            table: its name.
            integers: columns, as for `frame`.
            work: given the columns of some rows; a pure function.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def payloads(self) -> pl.DataFrame:
        """Payloads of the NVTX events that have one, in the columns of `PAYLOADS`.

        Raises:
            DamagedInput: the table cannot be read.
        """

    def strings(self, ids: pl.Series) -> pl.DataFrame:
        """Texts of StringIds, those asked for only: columns id (Int64) and value (Categorical).

        Raises:
            DamagedInput: the table cannot be read.
        """


def process_of(global_id: pl.Expr) -> pl.Expr:
    """Process id in a serialised GlobalId: bits 24 to 47 (user guide, "Common SQLite Examples")."""
    return (global_id // (1 << 24)) % (1 << 24)


def thread_of(global_id: pl.Expr) -> pl.Expr:
    """Thread id in a serialised GlobalId: the low 24 bits."""
    return global_id % (1 << 24)
