"""Launches without device work, and device work without its launch.

Even in a sound trace, these launches have no device work, so they are left out:

- launches while a stream is captured: their kernels become nodes of a graph, and run when the graph is launched;
- the last launches of a recording that ended while the device still worked, unless the host waited for the
  whole device after them: in that case their work had ended before the recording did;
- in traces without the calls that begin and end captures, launches that look captured: see
  `_probably_captured`.

Copies and sets are not judged: a copy or set of 0 bytes has no device work. Kernels that the device itself
launches, such as the bodies of conditional graph nodes, have the correlation id 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement, called
from thence.analysis.soundness.findings import MISSING, UNKNOWN_LAUNCHES, Finding, NotChecked
from thence.model.intervals import NEVER, NO_ROW, union_lengths
from thence.model.launches import COUNTED
from thence.model.row_groups import rows_by_number
from thence.model.thresholds import LAUNCHED_AT_END_NS, LAUNCHED_AT_END_SHARE
from thence.units import listed

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask

_BEGIN, _END = r"StreamBeginCapture", r"StreamEndCapture"
_ONLY_LAUNCHES = r"Launch|Memcpy|Memset|Synchronize|StreamWaitEvent"
_LAST_PART = 0.25


def launch_without_work(evidence: Evidence) -> Judgement:
    """Judges launches of kernels and CUDA graphs that have no device work."""
    judgement = Judgement(not_checked=_unknown_launches(evidence))
    table = evidence.launches.table
    without = (table["work"] == 0).to_numpy() & ~_captured(evidence)
    maybe_captured = 0
    for rank, rows in rows_by_number(table["rank"].to_numpy()):
        if not _corresponds(evidence, rank):
            text = f"rank {rank}: {evidence.without_launches([rank])}"
            judgement.not_checked.append(NotChecked("launch_without_work", text, MISSING))
            continue
        missing = without[rows]
        if not missing.any():
            continue
        part = table[rows]
        looks = _probably_captured(evidence, part, missing)
        maybe_captured += int(looks.sum())
        missing &= ~looks
        late = missing & _after_the_end(evidence, rank, part)
        queued = _queued_at_the_end(evidence, rank, part)
        if not (missing & ~late & ~queued).any():
            late = missing
        for chosen, into in ((missing & ~late, judgement.findings), (late, judgement.notes)):
            if chosen.any():
                into.append(_missing_work(evidence, rank, part, chosen))
    if maybe_captured:
        judgement.not_checked.append(
            NotChecked(
                "launch_without_work",
                f"{maybe_captured:,} launches without device work were most likely captured into CUDA graphs that"
                " are launched later; the trace has no calls that begin or end a capture",
            )
        )
    return judgement


def _unknown_launches(evidence: Evidence) -> list[NotChecked]:
    ranks = sorted(set(evidence.windows) - set(evidence.launching_ranks))
    if not ranks:
        return _unknown_kernel_launches(evidence)
    reason = evidence.without_launches(ranks)
    whose = "" if len(ranks) == len(evidence.windows) else f"ranks {listed(ranks)}: "
    text = f"{whose}{reason}, so missing device work cannot be detected"
    jumps = [_jump(evidence, rank) for rank in ranks[:1]]
    text = "; ".join([text, *(jump for jump in jumps if jump)])
    return [NotChecked("launch_without_work", text, MISSING), NotChecked("work_without_launch", text, UNKNOWN_LAUNCHES)]


def _unknown_kernel_launches(evidence: Evidence) -> list[NotChecked]:
    """The rule is not checked if only launches of graphs are recorded as calls; empty if other launches are, too."""
    table = evidence.launches.table
    if table.is_empty() or not table["graph"].all() or evidence.tables.gpu.is_empty():
        return []
    eager = int((evidence.launches.of_work == NO_ROW).sum())
    if not eager or not evidence.calls.filter(pl.col("category") == "driver").height:
        return []
    return [
        NotChecked(
            "launch_without_work",
            "only launches of CUDA graphs are recorded as calls, so other missing work cannot be detected",
            MISSING,
        )
    ]


def _jump(evidence: Evidence, rank: int) -> str | None:
    """A text on the largest jump of the correlation ids of device work, for a rank without recorded launches.

    None if the ids tell nothing, or all steps between them are equal.
    """
    if evidence.calls["name"].cast(pl.String).is_in(COUNTED).any():
        return None  # the boundaries of such a recording took ids as well
    work = evidence.tables.gpu.filter(pl.col("rank") == rank, pl.col("correlation") > 0)
    ids = work.group_by("correlation").agg(pl.col("start").min()).sort("correlation")
    if ids.height < 3:
        return None
    steps = np.diff(ids["correlation"].to_numpy())
    most = int(steps.argmax())
    usual = int(np.median(steps))
    if int(steps[most]) == usual:
        return None
    when = evidence.window(rank).at(int(ids["start"][most + 1]))
    return (
        f"the correlation ids of rank {rank} advance by {usual} from launch to launch, and once by "
        f"{int(steps[most]):,}, {when}"
    )


def _corresponds(evidence: Evidence, rank: int) -> bool:
    """Whether any launch has the correlation id of device work; a producer may number the two differently."""
    return evidence.launching_ranks[rank][1] > 0 or rank not in evidence.kernel_ranks


def _captured(evidence: Evidence) -> Mask:
    """Mask of the launches during which any stream of their process was being captured."""
    table = evidence.launches.table
    captured = np.zeros(table.height, np.bool_)
    marks = called(evidence.calls, f"{_BEGIN}|{_END}")
    if marks.is_empty():
        return captured
    begins = set(called(marks, _BEGIN)["name"].cast(pl.String))
    change = np.where(marks["name"].cast(pl.String).is_in(begins).to_numpy(), 1, -1)
    processes = marks.select("rank", "process").unique().rows()
    for rank, process in processes:
        here = (marks["rank"] == rank) & (marks["process"] == process)
        order = np.argsort(marks["start"].filter(here).to_numpy(), kind="stable")
        times = marks["start"].filter(here).to_numpy()[order]
        depth = np.concatenate([[0], np.cumsum(change[here.to_numpy()][order])])
        depth -= min(0, int(depth.min()))  # captures that began before the recording
        rows = np.flatnonzero(((table["rank"] == rank) & (table["process"] == process)).to_numpy())
        captured[rows] = depth[np.searchsorted(times, table["start"].to_numpy()[rows], "right")] > 0
    return captured


def only_captured(evidence: Evidence) -> dict[int, int]:
    """Ranks whose launches were all captured into CUDA graphs that were not launched, with the number of launches."""
    table = evidence.launches.table
    if table.is_empty():
        return {}
    captured = table.select("rank", only=pl.Series(_captured(evidence)) & ~pl.col("graph"))
    ranks = captured.group_by("rank").agg(pl.len(), pl.col("only").all())
    only = ranks.filter("only", ~pl.col("rank").is_in(list(evidence.windows)))
    return dict(only.select("rank", "len").sort("rank").rows())


def _hides_captures(evidence: Evidence) -> bool:
    """Whether the recorder kept only calls that launch or wait, so that captures cannot be seen."""
    names = evidence.calls["name"].unique().cast(pl.String)
    return len(names) > 0 and bool(names.str.contains(_ONLY_LAUNCHES).all())


def _probably_captured(evidence: Evidence, part: pl.DataFrame, missing: Mask) -> Mask:
    """Mask of launches without work that were probably captured, in traces without the calls that capture.

    jax.profiler names launches by their kernels, and records the creation of graphs: there, any launch of a rank that
    uses graphs may have been captured.

    Recorders that keep only calls that launch or wait hide captures, too. There, these were probably captured: runs
    of launches without work on one thread whose length fits a graph. XLA captures library calls just before it
    launches the graph that contains them: such a run is followed by a launch of a graph with at least as many
    activities. torch captures a whole graph: such a run has exactly as many launches as some graph has activities, and
    the graph is launched at another time.
    """
    result = np.zeros(part.height, np.bool_)
    graph = part["graph"].to_numpy()
    eager = missing & ~graph
    if not eager.any():
        return result
    if graph.any() and part["name"].is_in(evidence.kernel_names.implode()).any():
        result[eager] = True
        return result
    sizes = part.filter(pl.col("graph") & (pl.col("work") > 0))["work"].to_numpy()
    if not len(sizes) or not _hides_captures(evidence):
        return result
    track = part.select(pl.struct("process", "thread").rank("dense")).to_series().to_numpy()
    change = np.flatnonzero((eager[1:] != eager[:-1]) | (track[1:] != track[:-1])) + 1
    begins = np.concatenate([[0], change])
    ends = np.concatenate([change, [part.height]])
    runs = eager[begins]
    begins, ends = begins[runs], ends[runs]
    lengths = ends - begins
    following = np.minimum(ends, part.height - 1)
    work = part["work"].to_numpy()[following]
    room = np.where(work > 0, work, sizes.max())
    before_graph = (ends < part.height) & graph[following] & (track[following] == track[begins])
    chosen = before_graph & (lengths <= room) | np.isin(lengths, sizes[sizes > 1])
    result[np.repeat(begins[chosen], lengths[chosen]) + _within(lengths[chosen])] = True
    return result


def _within(lengths: Int64) -> Int64:
    """0, 1, 2 ... within each of several runs."""
    total = int(lengths.sum())
    return np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _after_the_end(evidence: Evidence, rank: int, part: pl.DataFrame) -> Mask:
    """Mask of launches whose work may have run after the recording ended: see the module's docstring."""
    start = part["start"].to_numpy()
    window = evidence.windows.get(rank)
    with_work = part["start"].filter(part["work"] > 0)
    if window is None or with_work.is_empty():
        return np.zeros(part.height, np.bool_)
    waits = evidence.waits(rank)["start"].to_numpy()
    earliest = max(int(with_work.to_numpy().max()), int(waits.max(initial=NEVER)))
    return (start > earliest) & _no_later_than(evidence, rank, start)


def _queued_at_the_end(evidence: Evidence, rank: int, part: pl.DataFrame) -> Mask:
    """Mask of launches that may still have waited in a stream's queue when the recording ended.

    These were launched at most twice the longest launch latency of the rank (from a launch to the start of its
    work) before the end, and in the last quarter of the recording. Later launches to other streams may have run.
    """
    start = part["start"].to_numpy()
    window = evidence.windows.get(rank)
    lags = part.select((pl.col("first") - pl.col("start")).drop_nulls()).to_series().to_numpy()
    if window is None or not len(lags):
        return np.zeros(part.height, np.bool_)
    reach = min(2 * int(lags.max()), int(window.span * _LAST_PART))
    waits = evidence.waits(rank)["start"].to_numpy()
    result: Mask = start > max(window.end - reach, int(waits.max(initial=NEVER)))
    return result & _no_later_than(evidence, rank, start)


def _no_later_than(evidence: Evidence, rank: int, start: Int64) -> Mask:
    """Mask of launches at most 10 ms, or 5 % of the window if that is longer, after the last recorded work."""
    window = evidence.window(rank)
    result: Mask = start <= window.end + max(LAUNCHED_AT_END_NS, int(window.span * LAUNCHED_AT_END_SHARE))
    return result


def _missing_work(evidence: Evidence, rank: int, part: pl.DataFrame, missing: Mask) -> Finding:
    """The finding about launches of a rank that have no device work."""
    window = evidence.window(rank)
    start = part["start"].to_numpy()
    waits = evidence.waits(rank)["end"].to_numpy()
    touched = _touched(part, missing, int(waits.max(initial=NEVER)))
    graph = part["graph"].to_numpy()
    counted = [
        f"{int((missing & kind).sum()):,} of {int(kind.sum()):,} launches of {what}"
        for kind, what in ((graph, "CUDA graphs"), (~graph, "kernels"))
        if (missing & kind).any()
    ]
    times = start[missing]
    when = f"; launched {window.at(int(times.min()), int(times.max()))}" if rank in evidence.windows else ""
    return Finding(
        "launch_without_work",
        rank,
        window.device,
        int(missing.sum()),
        touched,
        window.share(touched),
        f"rank {rank}: {' and '.join(counted)} have no device work{when}{evidence.steps_at(rank, times)}",
    )


def _touched(part: pl.DataFrame, missing: Mask, waited: int) -> int:
    """Time in which the missing work would have run, as a union (ns).

    It begins with the missing launch, or with the end of the work of earlier launches if that is later. It ends with
    the start of the work of the next launch; without one, with the end of the host's last wait for the device, or with
    the last missing launch if that is later.

    Args:
        part: launches of a rank.
        missing: which of these have no work.
        waited: end of the host's last wait for the device (ns).
    """
    working = part.filter(pl.col("work") > 0).sort("start")
    start = part["start"].to_numpy()[missing]
    position = np.searchsorted(working["start"].to_numpy(), start, "right")
    ended = np.maximum.accumulate(working["last"].to_numpy())
    begin = np.maximum(start, np.concatenate([[NEVER], ended])[position])
    until = np.append(working["first"].to_numpy(), max(start.max(), waited))[position]
    return int(union_lengths(np.zeros(len(begin), np.int64), begin, until, 1)[0])


def work_without_launch(evidence: Evidence) -> Judgement:
    """Judges kernels whose launch is not recorded, although other launches of the same kernel are.

    Kernels that were launched before the first recorded call are left out. Kernels of which no launch is recorded
    are a note, because some producers do not record every kind of call.
    """
    judgement = Judgement()
    stray = _stray(evidence)
    if stray.is_empty():
        return judgement
    launches = evidence.launches
    alone = launches.table["work"] == 1
    elsewhere = (
        evidence.tables.gpu.select("rank", "name")
        .filter(pl.Series(launches.of_work != NO_ROW))
        .with_columns(single=alone.gather(launches.of_work[launches.of_work != NO_ROW]))
        .unique()
    )
    lost = stray.join(elsewhere, on=["rank", "name", "single"], how="semi")
    never = stray.join(elsewhere, on=["rank", "name", "single"], how="anti")
    for frame, into, why in (
        (lost, judgement.findings, "though launches of the same kernels are"),
        (never, judgement.notes, "nor is any launch of these kernels: not every call is recorded"),
    ):
        for rank, rows in rows_by_number(frame["rank"].to_numpy()):
            if _corresponds(evidence, rank):
                into.append(_without_launch(evidence, rank, frame[rows], why))
    return judgement


def _stray(evidence: Evidence) -> pl.DataFrame:
    """Kernels whose call is not recorded, although they were launched after the first recorded call.

    Returns:
        rank, device, name, start, duration and correlation of gpu, and ``single``: whether no other of these kernels
        has the same correlation id. Kernels of one launch of a graph have the same.
    """
    launched = evidence.tables.gpu.filter(
        pl.Series(evidence.launches.of_work == NO_ROW),
        pl.col("kind") == "kernel",
        pl.col("correlation") > 0,
        pl.col("rank").is_in(list(evidence.launching_ranks)),
    ).select("rank", "device", "name", "start", "duration", "correlation")
    if launched.is_empty():
        return launched.with_columns(single=pl.lit(value=True))
    ids = evidence.calls.lazy().filter(pl.col("correlation") > 0)
    first = ids.group_by("rank").agg(low=pl.col("correlation").min())
    return (
        launched.lazy()
        .with_columns(single=pl.len().over("rank", "correlation") == 1)
        .join(ids.select("rank", "correlation"), on=["rank", "correlation"], how="anti")
        .join(first, on="rank")
        .filter(pl.col("correlation") > pl.col("low"))
        .drop("low")
        .collect()
    )


def _without_launch(evidence: Evidence, rank: int, stray: pl.DataFrame, why: str) -> Finding:
    window = evidence.window(rank)
    devices = stray["device"].unique()
    ns = int(stray["duration"].sum())
    times = stray["start"].to_numpy()
    return Finding(
        "work_without_launch",
        rank,
        int(devices[0]) if len(devices) == 1 else None,
        stray.height,
        ns,
        window.share(ns),
        f"rank {rank}: the launches of {stray.height:,} kernel{'s' if stray.height > 1 else ''} are not recorded,"
        f" {why}; the first ran"
        f" {window.at(int(times.min()))}{evidence.steps_at(rank, times)}",
    )
