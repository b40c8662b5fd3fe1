"""Rules about what profilers and readers report of themselves: overhead, lost records, damaged and repaired input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import OVERHEAD, Finding, NotChecked
from thence.model.intervals import gaps, shared_length, union
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.losses import Loss

_MOST_OVERHEAD = 0.5  # share of the span in which the device was idle while the profiler worked
_DAMAGE = ("cut", "unreadable", "no_times", "repaired")
_LOST = ("dropped", "recorder_error")


def profiler_overhead(evidence: Evidence) -> Judgement:
    """Judges the time of the profiler itself in which the device was idle; less than half of the span is a note."""
    judgement = Judgement()
    overhead = evidence.tables.host.filter(pl.col("category") == "overhead")
    if overhead.is_empty():
        text = "the trace does not record the time of the profiler itself"
        judgement.not_checked.append(NotChecked("profiler_overhead", text, OVERHEAD))
        return judgement
    for (rank, device), work in evidence.tables.gpu.group_by("rank", "device", maintain_order=True):
        start = work["start"].to_numpy()
        idle = gaps(start, start + work["duration"].to_numpy())
        part = overhead.filter(pl.col("rank") == rank)
        begin = part["start"].to_numpy()
        mine = union(begin, begin + part["duration"].to_numpy())
        shared = shared_length(idle, mine)
        if not shared:
            continue
        span = int((start + work["duration"].to_numpy()).max() - start.min())
        wasted = int((idle[1] - idle[0]).sum())
        names = ", ".join(_longest(part))
        text = (
            f"rank {rank} GPU {device}: {format_ns(shared)} of its {format_ns(wasted)} idle time"
            f" is time in which the profiler worked: {names}"
        )
        finding = Finding("profiler_overhead", int(rank), int(device), part.height, shared, shared / max(span, 1), text)
        much = shared >= _MOST_OVERHEAD * span
        (judgement.findings if much else judgement.notes).append(finding)
    return judgement


def _longest(overhead: pl.DataFrame) -> Iterable[str]:
    """Names of the up to three kinds of overhead that take most time."""
    by_name = overhead.group_by("name").agg(pl.col("duration").sum())
    return by_name.sort("duration", descending=True)["name"].cast(pl.String)[:3]


def damaged_input(evidence: Evidence) -> Judgement:
    """Judges inputs that are truncated, hold records that cannot be read, or had to be repaired."""
    return Judgement(findings=_of(evidence, "damaged_input", _DAMAGE))


def lost_records(evidence: Evidence) -> Judgement:
    """Judges losses that the recorder reports."""
    return Judgement(findings=_of(evidence, "lost_records", _LOST))


def _of(evidence: Evidence, code: str, losses: tuple[str, ...]) -> list[Finding]:
    found: list[Loss] = [x for x in evidence.tables.meta.losses if x.code in losses]
    ranks = evidence.tables.ranks
    rank = ranks[0] if len(ranks) == 1 else None  # a loss is of an input, which may hold several ranks
    return [Finding(code, rank, None, loss.count, 0, 0.0, loss.text) for loss in found]
