"""Tables that describe ranks, so small that those of all ranks of a job fit into memory.

Each is made from the trace of one rank, with the rank in its first column. Tables of several ranks are concatenated,
and answers about a job are computed from them (`thence.analysis.summary_merge`, `thence.analysis.ranks`). A store keeps
them (`thence.store.summaries`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.tables import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Frames = dict[str, pl.DataFrame]
"""A frame for each table, by name."""
RANK = Column("rank", pl.Int32(), "rank of the process in its job")


def rank_table(name: str, meaning: str, columns: tuple[Column, ...], required: tuple[str, ...]) -> Table:
    """A table that describes ranks: `RANK`, which is never null, and the given columns."""
    return Table(name, meaning, (RANK, *columns), (RANK.name, *required))


def concatenated(parts: Iterable[Mapping[str, pl.DataFrame]], tables: Mapping[str, Table]) -> Frames:
    """The frames of several ranks, concatenated table by table; without rows if there are no parts."""
    every = list(parts)
    return {name: pl.concat([table.empty(), *(part[name] for part in every)]) for name, table in tables.items()}
