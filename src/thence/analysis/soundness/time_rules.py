"""Rules about impossible and implausible times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import COMMUNICATION, KERNEL_PATTERNS
from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import Finding, NotChecked
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.row_groups import rows_by_number
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.analysis.soundness.evidence import Int64, Mask

__all__ = ["broken_order", "impossible_time", "outlier", "work_before_launch"]

_TIMES_THE_MEDIAN = 1000
_FEWEST = 10  # minimum number of executions of a kernel for which a median is used
_ALONE = 10  # an outlier is alone if it takes this many times the second longest execution
_LEAST_SHARE = 0.01  # share of the span; a shorter outlier changes no result much
_WAITING = r"(?i)spin|wait|sleep|delay|barrier|signal|poll|notify|dispatch|combine"
_DAY_NS = 86_400_000_000_000
_SECOND_NS = 1_000_000_000
_LATER = 10  # this many later activities of a stream cannot all have ended while an earlier one still runs
_OUTLASTS_NS = 1_000_000
_CLOCKS_NS = 10_000  # clocks of host and device that differ by more are reported as a note
_MOST_APART_NS = 50_000  # clocks of host and device that differ by more are reported as a finding


def outlier(evidence: Evidence) -> Judgement:
    """Judges single executions that took 1,000 times the median of their kernel (name, grid and block).

    Kernels that communicate wait for other ranks, and some other kernels wait on purpose: these are left out. An
    outlier is a note if other executions take almost as long, because the work of a kernel may depend on its data,
    or if it is too short to matter.
    """
    judgement = Judgement()
    kernels = evidence.tables.gpu.lazy().filter(
        pl.col("kind") == "kernel", pl.col("duration") > _TIMES_THE_MEDIAN
    )
    longest = kernels.group_by("name").agg(most=pl.col("duration").max()).collect()
    if longest.is_empty():
        return judgement
    least = (
        evidence.tables.gpu.lazy()
        .filter(pl.col("kind") == "kernel")
        .group_by("name")
        .agg(least=pl.col("duration").min(), n=pl.len())
        .collect()
    )
    spread = longest.join(least, on="name").filter(
        pl.col("most") >= _TIMES_THE_MEDIAN * pl.col("least"), pl.col("n") >= _FEWEST
    )
    suspects = [name for name in spread["name"].cast(pl.String) if not _waits(name)]
    if not suspects:
        return judgement
    found = _outliers(evidence.tables.gpu, suspects)
    short = short_names(found["name"].unique().to_list())
    for row in found.iter_rows(named=True):
        window = evidence.window(row["rank"])
        share = window.share(row["duration"])
        text = (
            f"rank {row['rank']}: one of {row['n']:,} executions of {short[row['name']]} took"
            f" {format_ns(row['duration'])}, {row['duration'] / max(row['median'], 1):,.0f} times the median,"
            f" {window.at(row['start'])}"
        )
        finding = Finding("outlier", row["rank"], row["device"], 1, row["duration"], share, text)
        alone = row["duration"] >= _ALONE * row["second"]
        (judgement.findings if alone and share >= _LEAST_SHARE else judgement.notes).append(finding)
    return judgement


def _waits(name: str) -> bool:
    communicates = [p for group, p in KERNEL_PATTERNS if group == COMMUNICATION]
    return any(pl.Series([name]).str.contains(p).any() for p in (*communicates, _WAITING))


def _outliers(gpu: pl.DataFrame, names: list[str]) -> pl.DataFrame:
    same = ("rank", "name", "grid", "block")
    duration = pl.col("duration")
    return (
        gpu.lazy()
        .filter(
            pl.col("kind") == "kernel",
            pl.col("name").is_in(pl.Series(names, dtype=pl.Categorical()).implode()),
        )
        .select(
            *("rank", "device", "start", "duration"),
            name=pl.col("name").cast(pl.String),
            grid=pl.col("grid").arr.to_list(),
            block=pl.col("block").arr.to_list(),
        )
        .with_columns(
            n=pl.len().over(same),
            median=duration.median().over(same),
            second=duration.top_k(2).min().over(same),
        )
        .filter(
            pl.col("n") >= _FEWEST,
            duration >= _TIMES_THE_MEDIAN * pl.col("median"),
            duration > _SECOND_NS // 1000,
        )
        .sort("duration", descending=True)
        .collect()
    )


def impossible_time(evidence: Evidence) -> Judgement:
    """Judges device work with impossible times.

    These are work that starts or ends far from all other work, starts before time 0 of the clock, has a negative
    duration, or ends long after ten later activities of its stream have ended.
    """
    judgement = Judgement()
    gpu = evidence.tables.gpu
    outlasting = _outlasting(gpu)
    shifted = (
        len(evidence.tables.meta.inputs) > 1
    )  # times of several inputs are shifted to the clock of the first, on which 0 has no special meaning
    for rank, of_rank in rows_by_number(gpu["rank"].to_numpy()):
        start, duration = gpu["start"].to_numpy()[of_rank], gpu["duration"].to_numpy()[of_rank]
        bad = _impossible(start, duration) | (_before_the_clock(start) & (not shifted))
        bad |= outlasting[of_rank]
        if not bad.any():
            continue
        rows = of_rank[bad]
        devices = np.unique(gpu["device"].to_numpy()[rows])
        kept = ~bad
        span = int((start + duration)[kept].max() - start[kept].min()) if kept.any() else 0
        whole = evidence.window(rank).span
        name = next(iter(short_names([gpu["name"][int(rows[0])]]).values()))
        example = (
            f"{name} starts at {int(start[bad][0]):,} ns, lasting {int(duration[bad][0]):,} ns"
        )
        judgement.findings.append(
            Finding(
                "impossible_time",
                rank,
                int(devices[0]) if len(devices) == 1 else None,
                int(bad.sum()),
                max(0, whole - span),
                evidence.window(rank).share(max(0, whole - span)),
                f"rank {rank}: {int(bad.sum()):,} of {len(start):,} device activities have impossible times;"
                f" {example}; the others span {format_ns(span)}",
            )
        )
    return judgement


def _impossible(start: Int64, duration: Int64) -> Mask:
    """Activities that start or end a day plus ten interquartile ranges from the median start, or last less than 0."""
    low, middle, high = np.quantile(start, (0.25, 0.5, 0.75), method="nearest")
    reach = min(_DAY_NS + 10 * (int(high) - int(low)), np.iinfo(np.int64).max - max(int(middle), 0))
    result: Mask = (
        (np.abs(start - middle) > reach) | (duration < 0) | (start + duration > middle + reach)
    )
    return result


def _outlasting(gpu: pl.DataFrame) -> Mask:
    """Activities that end a millisecond or more after the tenth later activity of their stream has ended.

    A stream runs its work in order, but a kernel may begin before the previous kernel ends (programmatic dependent
    launch). Only activities that are their launch's only work are tested: nodes of a CUDA graph may run concurrently.
    """
    result = np.zeros(gpu.height, np.bool_)
    stream = ["rank", "device", "stream"]
    alone = gpu.lazy().with_row_index("row").filter(
        pl.col("graph").is_null(), pl.col("correlation") > 0
    )  # fmt: skip
    long = alone.filter(pl.col("duration") >= _OUTLASTS_NS).select(stream).unique()
    found = (
        alone.join(long, on=stream, how="semi")
        .filter(pl.len().over("rank", "correlation") == 1)
        .sort(*stream, "start")
        .with_columns(end=pl.col("start") + pl.col("duration"))
        .filter(pl.col("end") - pl.col("end").shift(-_LATER).over(stream) >= _OUTLASTS_NS)
        .select("row")
        .collect()["row"]
    )
    result[found.to_numpy()] = True
    return result


def _before_the_clock(start: Int64) -> Mask:
    """Starts below 0, and starts of exactly 0 if all others are more than a second later."""
    positive = start[start > 0]
    lonely = len(positive) > 0 and int(positive.min()) > _SECOND_NS
    result: Mask = (start < 0) | ((start == 0) & lonely)
    return result


def work_before_launch(evidence: Evidence) -> Judgement:
    """Judges device work that starts more than 50 us before the call that launched it; more than 10 us is a note."""
    judgement = Judgement()
    launches = evidence.launches
    row = launches.of_work
    known = np.flatnonzero((row != NO_ROW) & ~launches.ambiguous)
    if not len(known):
        return judgement
    start = evidence.tables.gpu["start"].to_numpy()[known]
    before = launches.table["start"].to_numpy()[row[known]] - start
    early = before > _CLOCKS_NS
    if not early.any():
        return judgement
    gpu = evidence.tables.gpu[known[early]].select("rank", "device", "start")
    gpu = gpu.with_columns(before=pl.Series(before[early]))
    of_rank = dict(
        zip(
            *np.unique(evidence.tables.gpu["rank"].to_numpy()[known], return_counts=True),
            strict=True,
        )
    )
    for (rank,), part in gpu.group_by("rank", maintain_order=True):
        number = int(rank)
        window = evidence.window(number)
        devices = part["device"].unique()
        touched = int(part["start"].max() - part["start"].min())
        most = int(part["before"].max())
        (judgement.findings if most > _MOST_APART_NS else judgement.notes).append(
            Finding(
                "work_before_launch",
                number,
                int(devices[0]) if len(devices) == 1 else None,
                part.height,
                touched,
                window.share(touched),
                f"rank {number}: {part.height:,} of {int(of_rank[number]):,} launched activities start before their"
                f" launch, by up to {format_ns(most)}, the first"
                f" {window.at(int(part['start'].min()))}: the clocks of host and device disagree,"
                " or times are wrong",
            )
        )
    return judgement


def broken_order(evidence: Evidence) -> Judgement:
    """Judges kernels that start before a kernel that the same thread launched earlier on the same stream.

    Successive kernels of a stream may overlap (programmatic dependent launch), but start in order. Nodes of CUDA
    graphs are left out, because they run on streams of the driver in any order, and copies, because the host stages
    copies from pageable memory.
    """
    judgement = Judgement()
    launches, gpu = evidence.launches, evidence.tables.gpu
    row = launches.of_work
    if not (row != NO_ROW).any():
        text = "no launches are recorded, so the order in which work was launched is unknown"
        judgement.not_checked.append(NotChecked("broken_order", text))
        return judgement
    single = launches.table.select(~pl.col("graph") & (pl.col("work") == 1)).to_series().to_numpy()
    eager = (row != NO_ROW) & single[row] & ~launches.ambiguous
    eager &= (gpu["kind"] == "kernel").to_numpy()
    rows = np.flatnonzero(eager)
    if bool(np.all(np.diff(row[rows]) >= 0)):
        return judgement
    kernels = gpu.select("rank", "device", "stream", "start", "duration")[rows].with_columns(
        launch=pl.Series(row[rows])  # in order of process, thread and time
    )
    same = ("rank", "device", "stream", "thread")
    track = launches.table.select(pl.struct("rank", "process", "thread").rank("dense")).to_series()
    kernels = kernels.with_columns(thread=track.gather(pl.Series(row[rows])))
    in_order = pl.col("launch").diff().over(same) >= 0
    if kernels.select(in_order.all(ignore_nulls=True)).item():
        return judgement
    kernels = kernels.sort(*same, "launch")
    late = kernels.with_columns(by=pl.col("start").cum_max().over(same) - pl.col("start")).filter(
        pl.col("by") > 0
    )
    for (rank,), part in late.group_by("rank", maintain_order=True):
        number = int(rank)
        window = evidence.window(number)
        devices = part["device"].unique()
        most = int(part["by"].max())  # type: ignore[arg-type]
        where = ", ".join(map(str, part["stream"].unique().sort()[:4]))
        judgement.findings.append(
            Finding(
                "broken_order",
                number,
                int(devices[0]) if len(devices) == 1 else None,
                part.height,
                most,
                window.share(most),
                f"rank {number}: on stream {where}, {part.height:,} of {kernels.height:,} kernels started up to"
                f" {format_ns(most)} before a kernel that was launched earlier",
            )
        )
    return judgement
