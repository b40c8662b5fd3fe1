"""Timelines of jobs of many ranks: two ranks in full, and a row of steps for every other rank."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.ranks import timeline_rows
from thence.analysis.ranks.answer import reason_rows, straggler_lines
from thence.analysis.ranks.timeline_rows import job_rows, opened
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.ranks.answer import Job
    from thence.model.timeline import Timeline
    from thence.trace import Trace


def has_many_ranks(trace: Trace) -> bool:
    """Whether no ranks are selected and the trace holds more of them than a viewer shows well."""
    return not trace.selection.ranks and len(trace.rank_numbers) > timeline_rows.MAX_IN_FULL


def folded_timeline(trace: Trace, lanes: Sequence[str] = (), clocks: str = "aligned") -> Timeline:
    """A timeline with two ranks in full, and one row for every other rank.

    The two are the rank that made the others wait most, and the rank that it is compared with. Of a store, only the
    tables of these two ranks are read, and the summaries of all ranks.

    Args:
        trace: a job of several ranks.
        lanes: as `Trace.timeline` takes them.
        clocks: as `Trace.timeline` takes them; ``aligned`` applies the alignment of the whole job.

    Raises:
        MissingData: there is no device activity.
        UsageError: there is no such lane, or ``clocks`` has another value.
    """
    job = trace.ranks()
    slowest, middle = opened(job)
    in_full = sorted({slowest[0], middle[0]})
    part = trace.selected(replace(trace.selection, ranks=tuple(in_full)))
    every = job.clocks.alignment
    of_part = every.corrections.filter(pl.col("rank").is_in(in_full))
    shown = part.timeline(lanes, clocks, replace(every, corrections=of_part))
    moved = every.corrections.drop_nulls("correction_ns") if clocks == "aligned" else of_part.clear()
    rows = job_rows(
        job,
        in_full,
        _late(job),
        part.tables.meta.epoch_ns or 0,
        dict(moved.select("rank", "correction_ns").iter_rows()),
    )
    count = job.ranks["rank"].n_unique()
    said = (
        f"{count - len(in_full):,} of {count:,} ranks are folded: one row per rank, with a span for each step; "
        f"shown in full: rank {slowest[0]}, which makes the others wait most, and rank {middle[0]}, with which it "
        "is compared; --rank selects others, --fold never shows all in full"
    )
    return replace(shown, job=rows, notes=(said, *shown.notes))


def _late(job: Job) -> dict[tuple[int, int], str]:
    """For each straggler, by rank and device, a text that says how late it is, and why."""
    late = {}
    for (row, sentence), why in zip(straggler_lines(job), job.reasons, strict=True):
        if row["straggler"]:
            causes = [
                f"{cause} {share:.0%}: {where}" if where else f"{cause} {share:.0%}"
                for cause, share, where in reason_rows(why).select("cause", "share", "where").iter_rows()
            ]
            late[row["rank"], row["device"]] = printable(" ".join([sentence, *causes]))
    return late
