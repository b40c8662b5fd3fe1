"""A timeline of a job of many ranks: two in full, all others as a row of their steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.ranks.folded import job_rows, opened
from thence.writers.text.ranks import reason_rows, straggler_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.ranks.job import Job
    from thence.model.timeline import Timeline
    from thence.trace import Trace

__all__ = ["folded_timeline", "has_many_ranks"]

_MOST_IN_FULL = 8
"""Ranks that are shown in full where nobody says which."""


def has_many_ranks(trace: Trace) -> bool:
    """Whether nobody chose ranks, and there are more than a viewer shows well."""
    return not trace.selection.ranks and len(trace.ranks) > _MOST_IN_FULL


def folded_timeline(trace: Trace, lanes: Sequence[str] = (), clocks: str = "aligned") -> Timeline:
    """The rank that made the others wait most and the one that it is compared with in full, all others in a row each.

    Of a store, the tables of these two ranks are read and the summaries of all.

    Args:
        trace: a job of several ranks.
        lanes: as `Trace.timeline` takes them.
        clocks: likewise; aligned are those of the whole job.

    Raises:
        MissingData: there is no device activity.
        UsageError: a lane or clock that there is not.
    """
    job = trace.late_ranks()
    slowest, middle = opened(job)
    in_full = sorted({slowest[0], middle[0]})
    part = trace.selected(replace(trace.selection, ranks=tuple(in_full)))
    every = job.clocks.alignment
    of_part = every.corrections.filter(pl.col("rank").is_in(in_full))
    shown = part.timeline(lanes, clocks, replace(every, corrections=of_part))
    moved = (
        every.corrections.drop_nulls("correction_ns") if clocks == "aligned" else of_part.clear()
    )
    rows = job_rows(
        job,
        in_full,
        _late(job),
        part.attributed.meta.epoch_ns or 0,
        dict(moved.select("rank", "correction_ns").iter_rows()),
    )
    count = job.ranks["rank"].n_unique()
    said = (
        f"{count - len(in_full):,} of {count:,} ranks are folded, a row each with a span for each step; in full: rank "
        f"{slowest[0]}, which makes the others wait most, and rank {middle[0]}, with which it is compared; "
        "--rank chooses others, --fold never shows all"
    )
    return replace(shown, job=rows, notes=(said, *shown.notes))


def _late(job: Job) -> dict[tuple[int, int], str]:
    """Of each straggler how late it is, and why."""
    found = {}
    for (row, sentence), why in zip(straggler_lines(job), job.reasons, strict=True):
        if row["straggler"]:
            causes = [
                f"{cause} {share:.0%}: {where}" if where else f"{cause} {share:.0%}"
                for cause, share, where in reason_rows(why)
                .select("cause", "share", "where")
                .iter_rows()
            ]
            found[row["rank"], row["device"]] = " ".join([sentence, *causes])
    return found
