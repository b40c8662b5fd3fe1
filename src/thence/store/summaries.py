"""Summaries of each rank: small frames that are written once, joined for all ranks, and read without its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.rank_tables import concatenated, rank_table
from thence.analysis.ranks.summary import SUMMARY, summarise_ranks
from thence.analysis.report.summary import summarize
from thence.analysis.selection.select import select
from thence.analysis.summary_merge import REPORT_TABLES, summary_tables
from thence.model.selection import Selection
from thence.model.tables import Column
from thence.store.facts import Facts, encode_facts

if TYPE_CHECKING:
    from thence.analysis.rank_tables import Frames
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

SUMMARISED_BY = ("kernel", "rank")
"""Kinds of place for which a report needs the summaries alone; for other kinds, the tables are read rank by rank."""
WINDOWS = "windows"
FACTS_TABLE = "facts"
REPORT = {name: f"report_{name}" for name in REPORT_TABLES}
"""Names in a store of the tables of `thence.analysis.summary_merge`."""
LATENESS = {name: f"ranks_{name}" for name in SUMMARY}
"""Names in a store of the tables of `thence.analysis.ranks.summary`, from which late ranks are found."""
TABLES = {
    WINDOWS: rank_table(
        WINDOWS,
        "one device: the span of its activities",
        (
            Column("device", pl.Int32(), "device index within the process"),
            Column("start", pl.Int64(), "ns on the rank's clock: start of its first activity"),
            Column("end", pl.Int64(), "ns on the same clock: end of its last activity"),
            Column("epoch_ns", pl.Int64(), "Unix time (ns) at which that clock reads 0; null: unknown"),
        ),
        required=("device", "start", "end"),
    ),
    FACTS_TABLE: rank_table(
        FACTS_TABLE,
        "one input",
        (Column("facts", pl.String(), "`thence.store.facts.Facts` as JSON"),),
        required=("facts",),
    ),
    **{REPORT[name]: table for name, table in REPORT_TABLES.items()},
    **{LATENESS[name]: table for name, table in SUMMARY.items()},
}
"""The table of every summary."""


def summaries_of(trace: Attributed, soundness: Soundness) -> Frames:
    """All summaries of one part, each with a column ``rank``."""
    facts = encode_facts(Facts(trace.meta, soundness, trace.own, trace.installed))
    lowest = min(trace.ranks, default=0)
    frames = {
        WINDOWS: _windows(trace),
        FACTS_TABLE: pl.DataFrame({"rank": [lowest], "facts": [facts.decode()]}, TABLES[FACTS_TABLE].schema),
    }
    frames |= {LATENESS[name]: frame for name, frame in summarise_ranks(trace).items()}
    reports = [_report(trace, rank) for rank in trace.gpu["rank"].unique().sort()]
    if reports:
        frames |= {REPORT[name]: frame for name, frame in concatenated(reports, REPORT_TABLES).items()}
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
    """The report of one rank as `Trace.report` returns it, as tables."""
    alone = trace.gpu["rank"].n_unique() == 1
    part = select(trace, Selection() if alone else Selection(ranks=(rank,)))
    summaries = [summarize(part, by) for by in SUMMARISED_BY]
    return summary_tables(summaries, rank, labels_joined=part.labels_joined, xla=not part.programs.is_empty())
