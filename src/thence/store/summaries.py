"""What a store knows of each rank without reading its tables: small frames, written once, joined for all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.ranks.summary import summarise_ranks
from thence.analysis.ranks.summary_tables import SUMMARY
from thence.analysis.select import select
from thence.analysis.summary import summarize
from thence.analysis.summary_merge import TABLES, summary_tables
from thence.model.selection import Selection
from thence.store.facts import Facts, encode_facts

if TYPE_CHECKING:
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

__all__ = [
    "FACTS_TABLE",
    "LATENESS",
    "REPORT",
    "SUMMARISED_BY",
    "TYPES",
    "WINDOWS",
    "Frames",
    "summaries_of",
]

Frames = dict[str, pl.DataFrame]

SUMMARISED_BY = ("kernel", "rank")
"""Kinds of place by which `report` answers from summaries alone; by others it reads rank by rank."""
WINDOWS = "windows"
"""rank, device, start and end (ns on the rank's clock), epoch_ns (of that clock): when a device was busy."""
FACTS_TABLE = "facts"
"""rank, and its facts as JSON."""
REPORT = {table.name: f"report_{table.name}" for table in TABLES}
"""Names of the tables of `thence.analysis.summary_merge`, which here have a column ``rank`` too."""
LATENESS = {name: f"ranks_{name}" for name in SUMMARY}
"""Names of the tables of `thence.analysis.ranks.summary`, by which late ranks are found."""
TYPES: dict[str, dict[str, Any]] = {
    WINDOWS: {
        "rank": pl.Int32(),
        "device": pl.Int32(),
        "start": pl.Int64(),
        "end": pl.Int64(),
        "epoch_ns": pl.Int64(),
    },
    FACTS_TABLE: {"rank": pl.Int32(), "facts": pl.String()},
    **{REPORT[table.name]: {"rank": pl.Int32(), **table.schema} for table in TABLES},
    **{LATENESS[name]: dict(table.schema) for name, table in SUMMARY.items()},
}
"""Columns of every summary."""


def summaries_of(trace: Attributed, soundness: Soundness) -> Frames:
    """All summaries of one part, each with a column ``rank``.

    Args:
        trace: whole, of one input.
        soundness: of it.
    """
    facts = encode_facts(Facts(trace.meta, soundness, trace.own, trace.installed))
    lowest = min(trace.ranks, default=0)
    frames = {
        WINDOWS: _windows(trace),
        FACTS_TABLE: pl.DataFrame(
            {"rank": [lowest], "facts": [facts.decode()]}, TYPES[FACTS_TABLE]
        ),
    }
    frames |= {LATENESS[name]: frame for name, frame in summarise_ranks(trace).items()}
    by_rank = [_report(trace, rank) for rank in trace.gpu["rank"].unique().sort()]
    for name in REPORT.values() if by_rank else ():
        frames[name] = pl.concat([report[name] for report in by_rank])
    return frames


def _windows(trace: Attributed) -> pl.DataFrame:
    epoch = pl.lit(trace.meta.epoch_ns, pl.Int64())
    return (
        trace.gpu.group_by("rank", "device")
        .agg(pl.col("start").min(), end=(pl.col("start") + pl.col("duration")).max())
        .with_columns(epoch_ns=epoch)
        .sort("rank", "device")
    )


def _report(trace: Attributed, rank: int) -> Frames:
    """The report of one rank as `Trace.summary` gives it."""
    alone = trace.gpu["rank"].n_unique() == 1
    part = select(trace, Selection() if alone else Selection(ranks=(rank,)))
    tables = summary_tables(
        [summarize(part, by) for by in SUMMARISED_BY],
        labels_joined=part.labels_joined,
        xla=not part.programs.is_empty(),
    )
    numbered = pl.lit(rank, pl.Int32()).alias("rank")
    return {REPORT[name]: frame.select(numbered, pl.all()) for name, frame in tables.items()}
