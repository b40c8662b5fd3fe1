"""Rules about what was recorded: ranks and steps without work, ranks recorded at other times, reports of profilers.

Profilers and readers report their own overhead, lost records, and damaged and repaired input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.missing import ranks_of_job
from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import (
    COPIED_RANKS,
    MISSING,
    MISSING_RANKS,
    OVERHEAD,
    WINDOWS,
    Finding,
    NotChecked,
)
from thence.analysis.soundness.launch_rules import only_captured
from thence.model.formats import THENCE_RECORDING
from thence.model.grouped_intervals import GroupedTimes, numbered_together, rows_by_number
from thence.model.intervals import NO_ROW, gaps, shared_length, union
from thence.units import format_count, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.analysis.collectives.missing import JobRanks
    from thence.model.arrays import Int64, Mask
    from thence.model.losses import Loss


_MAX_OVERHEAD = 0.5  # share of the span in which the device was idle while the profiler worked
_LISTED = 4
"""Most ranks that are listed as copies of each other."""
_DAMAGE = ("cut", "unreadable", "no_times", "repaired")
_LOST = ("dropped", "recorder_error")


def profiler_overhead(evidence: Evidence) -> Judgement:
    """Judges the time of the profiler itself in which the device was idle; less than half of the span is a note."""
    judgement = Judgement()
    overhead = evidence.host_rows("overhead")
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
        too_much = shared >= _MAX_OVERHEAD * span
        (judgement.findings if too_much else judgement.notes).append(finding)
    return judgement


def _longest(overhead: pl.DataFrame) -> Iterable[str]:
    """Names of the up to three kinds of overhead that take most time."""
    by_name = overhead.group_by("name").agg(pl.col("duration").sum())
    return by_name.sort("duration", descending=True)["name"].cast(pl.String)[:3]


def damaged_input(evidence: Evidence) -> Judgement:
    """Judges inputs that are truncated, hold records that cannot be read, or had to be repaired."""
    return Judgement(findings=_findings_of_losses(evidence, "damaged_input", _DAMAGE))


def lost_records(evidence: Evidence) -> Judgement:
    """Judges losses that the recorder reports."""
    return Judgement(findings=_findings_of_losses(evidence, "lost_records", _LOST))


def _findings_of_losses(evidence: Evidence, code: str, losses: tuple[str, ...]) -> list[Finding]:
    chosen: list[Loss] = [x for x in evidence.tables.meta.losses if x.code in losses]
    ranks = evidence.tables.ranks
    rank = ranks[0] if len(ranks) == 1 else None  # a loss is of an input, which may hold several ranks
    return [Finding(code, rank, None, loss.count, 0, 0.0, loss.text) for loss in chosen]


_WORKING_CATEGORIES = ("step", "module", "op", "runtime", "driver")
_COMPARABLE_SHARE = 0.5  # share of the median number of host ranges of the steps with device work


def no_device_work(evidence: Evidence) -> Judgement:
    """Judges ranks that ran operators or launched something, and have no device work at all."""
    judgement = Judgement()
    host = evidence.tables.host
    silent = [rank for rank in host["rank"].unique() if rank not in evidence.windows]
    working = pl.col("rank").is_in(silent) & pl.col("category").is_in(_WORKING_CATEGORIES)
    counted = host.filter(working).group_by("rank").len().sort("rank").rows() if silent else []
    captured = only_captured(evidence) if silent else {}
    for rank, ranges in counted:
        launches = evidence.launching_ranks.get(rank, (0, 0))[0]
        if rank in captured:
            text = (
                f"rank {rank} has no device work: it is the trace of a capture, whose {launches:,} launches were"
                " captured into CUDA graphs, and no graph was launched"
            )
        else:
            text = (
                f"rank {rank} has no device work, though it has {ranges:,} operators and API calls"
                f"{f', {launches:,} launches among them' if launches else ''}"
            )
        judgement.findings.append(Finding("no_device_work", rank, None, launches or ranges, 0, 1.0, text))
    if not evidence.windows and not judgement.findings:
        text = "the trace has no device work"
        judgement.findings.append(Finding("no_device_work", None, None, 0, 0, 1.0, text))
    return judgement


def windows_apart(evidence: Evidence) -> Judgement:
    """Judges ranks whose device work does not overlap in time with that of the largest group of ranks."""
    judgement = Judgement()
    windows = evidence.windows
    if len(windows) < 2:
        text = "the trace has device work of only one rank" if windows else "no device work"
        judgement.not_checked.append(NotChecked("windows_apart", text))
        return judgement
    unknown = [x for x in evidence.tables.meta.losses if x.code == "no_common_clock"]
    if unknown:
        judgement.not_checked.append(NotChecked("windows_apart", unknown[0].text, WINDOWS))
        return judgement
    groups: list[tuple[int, list[int]]] = []  # latest end and ranks
    for rank in sorted(windows, key=lambda rank: windows[rank].start):
        if groups and windows[rank].start <= groups[-1][0]:
            end, ranks = groups[-1]
            groups[-1] = (max(end, windows[rank].end), [*ranks, rank])
        else:
            groups.append((windows[rank].end, [rank]))
    if len(groups) == 1:
        return judgement
    most = max((ranks for _, ranks in groups), key=lambda ranks: (len(ranks), -min(ranks)))
    begin, end = min(windows[r].start for r in most), max(windows[r].end for r in most)
    span = max(w.end for w in windows.values()) - min(w.start for w in windows.values())
    for rank in sorted(set(windows) - set(most)):
        window = windows[rank]
        distance = begin - window.end if window.end < begin else window.start - end
        others = f"rank {most[0]}" if len(most) == 1 else f"{len(most)} other ranks"
        text = (
            f"rank {rank} and {others} were not recorded at the same time: {format_ns(distance)} lie between"
            " their device work"
        )
        judgement.findings.append(
            Finding("windows_apart", rank, window.device, 1, distance, distance / max(span, 1), text)
        )
    return judgement


def copied_ranks(evidence: Evidence) -> Judgement:
    """Notes ranks whose device work begins, ends and lasts the same to the nanosecond: copies of one recording."""
    if len(evidence.windows) < 2:
        return Judgement()
    same = (
        evidence.tables.gpu.lazy()
        .group_by("rank")
        .agg(
            pl.col("start").min(),
            pl.col("duration").sum(),
            end=(pl.col("start") + pl.col("duration")).max(),
            count=pl.len(),
        )
        .group_by("start", "end", "duration", "count")
        .agg(ranks=pl.col("rank").sort())
        .filter(pl.col("ranks").list.len() > 1)
        .collect()
    )
    copies = sorted(same["ranks"].to_list())
    if not copies:
        return Judgement()
    count = sum(len(ranks) - 1 for ranks in copies)
    first = ", ".join(map(str, copies[0][:_LISTED])) + (" ..." if len(copies[0]) > _LISTED else "")
    text = (
        f"{format_count(count)} of the ranks {'is a copy' if count == 1 else 'are copies'} of another one, to the "
        f"nanosecond (ranks {first}): sums over ranks count the same work several times"
    )
    return Judgement(notes=[Finding(COPIED_RANKS, None, None, count, 0, 0.0, text)])


def missing_ranks(evidence: Evidence) -> Judgement:
    """Notes which ranks of the job the trace lacks, and what is unknown because of that."""
    return missing_ranks_note(ranks_of_job(evidence.tables))


def missing_ranks_note(job: JobRanks) -> Judgement:
    """The note of `missing_ranks`, none if no rank is missing."""
    if not job.missing or not job.shown:
        return Judgement()
    text = (
        f"the trace shows {job.statement}: transfers of the collectives with them are unknown, and nobody is named for "
        "a wait that may be for them"
    )
    return Judgement(notes=[Finding(MISSING_RANKS, None, None, len(job.missing_ranks), 0, 0.0, text)])


def empty_steps(evidence: Evidence) -> Judgement:
    """Judges profiler steps that launched no device work, although the host did as much as in other steps.

    In recordings, which count what they lose, a rank's last step may be what comes after the last iteration: it counts
    only if it launched something.
    """
    judgement = Judgement()
    steps = evidence.steps
    if steps.is_empty():
        judgement.not_checked.append(NotChecked("empty_steps", "the trace has no profiler steps"))
        return judgement
    ordered = steps.sort("rank", "start")
    empty = _empty(evidence, ordered)
    unknown: list[int] = []
    for rank, rows in rows_by_number(ordered["rank"].to_numpy()):
        if not evidence.launching_ranks.get(rank, (0, 0))[1]:
            unknown.append(rank)  # without launches, the step of device work is unknown
        elif empty[rows].any() and not empty[rows].all():
            judgement.findings.append(_empty_steps_finding(evidence, rank, ordered[rows], empty[rows]))
    if unknown:
        text = f"{evidence.without_launches(unknown)}, so the steps of device work are unknown"
        judgement.not_checked.append(NotChecked("empty_steps", text, MISSING))
    return judgement


def _empty(evidence: Evidence, steps: pl.DataFrame) -> Mask:
    """Mask of the steps, sorted by rank and start, that launched no work, although the host did as much as in others.

    In recordings, the last step of a rank is none of these if the rank launched nothing after its start.
    """
    ranges = evidence.tables.host.lazy().filter(pl.col("category") != "step").select("rank", "start").collect()
    usual = pl.col("busy").filter("works").median().over("rank")
    idle = ~pl.col("works") & (pl.col("busy") >= _COMPARABLE_SHARE * usual).fill_null(value=False)
    if set(evidence.tables.meta.formats) == {THENCE_RECORDING}:
        launches = evidence.launches.table.group_by("rank").agg(launched=pl.col("start").max().clip(lower_bound=0))
        steps = steps.join(launches, on="rank", how="left", maintain_order="left")
        last = pl.int_range(pl.len()).over("rank") == pl.len().over("rank") - 1
        idle &= ~last | (pl.col("launched").fill_null(0) >= pl.col("start"))
    counted = steps.with_columns(
        works=pl.Series(_counted(_times_of_work(evidence), steps) > 0), busy=pl.Series(_counted(ranges, steps))
    )
    return counted.select(idle).to_series().to_numpy()


def _times_of_work(evidence: Evidence) -> pl.DataFrame:
    """Rank and start of the launches that have device work, and of device work without a launch."""
    launches = evidence.launches.table.filter(pl.col("work") > 0).select("rank", "start")
    alone = evidence.tables.gpu.select("rank", "start").filter(pl.Series(evidence.launches.of_work == NO_ROW))
    return pl.concat([launches, alone])


def _counted(times: pl.DataFrame, steps: pl.DataFrame) -> Int64:
    """The number of times (rank, start) in each step of their rank."""
    rank, rank_of_time, ranks = numbered_together(steps, times, "rank")
    found = GroupedTimes.of(rank_of_time, times["start"].to_numpy(), ranks)
    begin = steps["start"].to_numpy()
    end = begin + steps["duration"].to_numpy()
    return found.search(rank, end, "left") - found.search(rank, begin, "left")


def _empty_steps_finding(evidence: Evidence, rank: int, steps: pl.DataFrame, empty: Mask) -> Finding:
    window = evidence.window(rank)
    names = steps["name"].cast(pl.String).filter(pl.Series(empty))
    begin = steps["start"].to_numpy()[empty]
    end = begin + steps["duration"].to_numpy()[empty]
    touched = int((np.minimum(end, window.end) - np.maximum(begin, window.start)).clip(0).sum())
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Finding(
        "empty_steps",
        rank,
        window.device,
        len(names),
        touched,
        window.share(touched),
        f"rank {rank}: {len(names):,} of {steps.height:,} steps have no device work, though the host worked in"
        f" them: {shown}",
    )
