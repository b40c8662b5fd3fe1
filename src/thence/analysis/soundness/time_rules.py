"""Rules about impossible and implausible times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import COMMUNICATION, KERNEL_PATTERNS
from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import UNKNOWN_LAUNCHES, Finding, NotChecked
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.row_groups import rows_by_number
from thence.model.thresholds import FASTEST_KERNEL_NS, OUTLASTS_NS, OUTLASTS_UNKNOWN_NS
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask

_TIMES_THE_MEDIAN = 1000
_FEWEST = 10  # minimum number of executions of a kernel for which a median is used
_ALONE = 10  # an outlier is alone if it takes this many times the second longest execution
_LEAST_SHARE = 0.01  # share of the span; a shorter outlier changes no result much
_WAITING = r"(?i)spin|wait|sleep|delay|barrier|signal|poll|notify|dispatch|combine"
_DAY_NS = 86_400_000_000_000
_SECOND_NS = 1_000_000_000
_LATER = 10  # this many later activities of a stream cannot all have ended while an earlier one still runs


def outlier(evidence: Evidence) -> Judgement:
    """Judges single executions that took 1,000 times the median of their kernel (name, grid and block).

    Kernels that communicate wait for other ranks, and some other kernels wait on purpose: these are left out. An
    outlier is a note if other executions take almost as long, because the work of a kernel may depend on its data,
    or if it is too short to matter.
    """
    judgement = Judgement()
    kernels = evidence.tables.gpu.lazy().filter(pl.col("kind") == "kernel", pl.col("duration") > _TIMES_THE_MEDIAN)
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
        .filter(pl.col("kind") == "kernel", pl.col("name").is_in(pl.Series(names, dtype=pl.Categorical()).implode()))
        .select(
            *("rank", "device", "start", "duration"),
            name=pl.col("name").cast(pl.String),
            grid=pl.col("grid").arr.to_list(),
            block=pl.col("block").arr.to_list(),
        )
        .with_columns(
            n=pl.len().over(same), median=duration.median().over(same), second=duration.top_k(2).min().over(same)
        )
        .filter(pl.col("n") >= _FEWEST, duration >= _TIMES_THE_MEDIAN * pl.col("median"), duration > _SECOND_NS // 1000)
        .sort("duration", descending=True)
        .collect()
    )


def impossible_time(evidence: Evidence) -> Judgement:
    """Judges device work with impossible times.

    These are work that starts or ends far from all other work, starts before time 0 of the clock, has a negative
    duration, or ends after ten later activities of its stream have ended; and all work of a rank whose kernels are
    faster than any GPU runs one.
    """
    judgement = Judgement()
    gpu = evidence.tables.gpu
    outlasting = _outlasting(evidence)
    too_fast = _too_fast(gpu)
    shifted = (
        len(evidence.tables.meta.inputs) > 1
    )  # times of several inputs are shifted to the clock of the first, on which 0 has no special meaning
    suspects = {*_suspects(gpu), *gpu["rank"].to_numpy()[outlasting].tolist(), *too_fast}
    for rank, of_rank in rows_by_number(gpu["rank"].to_numpy()) if suspects else ():
        if rank not in suspects:
            continue
        start, duration = gpu["start"].to_numpy()[of_rank], gpu["duration"].to_numpy()[of_rank]
        bad = _impossible(start, duration) | (_before_the_clock(start) & (not shifted))
        bad |= outlasting[of_rank]
        if rank in too_fast:
            judgement.findings.append(_fast_kernels(evidence, rank, too_fast[rank], len(of_rank)))
        if not bad.any():
            continue
        rows = of_rank[bad]
        devices = np.unique(gpu["device"].to_numpy()[rows])
        kept = ~bad
        span = int((start + duration)[kept].max() - start[kept].min()) if kept.any() else 0
        whole = evidence.window(rank).span
        name = next(iter(short_names([gpu["name"][int(rows[0])]]).values()))
        example = f"{name} starts at {int(start[bad][0]):,} ns, lasting {int(duration[bad][0]):,} ns"
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


def _suspects(gpu: pl.DataFrame) -> set[int]:
    """Ranks in which times can be impossible: they are more than a day apart, or any is 0 or less."""
    start, duration = pl.col("start"), pl.col("duration")
    end = (start + duration).max().cast(pl.Float64)
    frame = gpu.lazy().group_by("rank").agg(
        apart=end - start.min().cast(pl.Float64), first=start.min(), shortest=duration.min()
    )  # fmt: skip
    wrong = (pl.col("apart") > _DAY_NS) | (pl.col("first") <= 0) | (pl.col("shortest") < 0)
    return set(frame.filter(wrong).collect()["rank"].to_list())


def _too_fast(gpu: pl.DataFrame) -> dict[int, int]:
    """Ranks of whose kernels a tenth take less than any kernel can, with the duration that a tenth does not exceed.

    Profilers that round to whole microseconds write 0 for kernels of less, so their durations are not judged.
    """
    duration = pl.col("duration")
    frame = (
        gpu.lazy()
        .filter(pl.col("kind") == "kernel")
        .group_by("rank")
        .agg(pl.len(), tenth=duration.quantile(0.1, "lower").cast(pl.Int64), rounded=(duration % 1000 == 0).all())
        .filter(pl.col("len") >= _FEWEST, pl.col("tenth") < FASTEST_KERNEL_NS, ~pl.col("rounded"))
        .collect()
    )
    return dict(frame.select("rank", "tenth").rows())


def _fast_kernels(evidence: Evidence, rank: int, tenth: int, count: int) -> Finding:
    window = evidence.window(rank)
    return Finding(
        "impossible_time",
        rank,
        window.device,
        count,
        window.span,
        1.0,
        f"rank {rank}: a tenth of the kernels take {tenth:,} ns or less, and no GPU runs a kernel in less than"
        f" {FASTEST_KERNEL_NS:,} ns: the unit of the times is not what the trace states, or the clock is wrong",
    )


def _impossible(start: Int64, duration: Int64) -> Mask:
    """Activities that start or end a day plus ten interquartile ranges from the median start, or last less than 0."""
    low, middle, high = np.quantile(start, (0.25, 0.5, 0.75), method="nearest")
    reach = min(_DAY_NS + 10 * (int(high) - int(low)), np.iinfo(np.int64).max - max(int(middle), 0))
    result: Mask = (np.abs(start - middle) > reach) | (duration < 0) | (start + duration > middle + reach)
    return result


def _outlasting(evidence: Evidence) -> Mask:
    """Activities that end after ten activities of later launches of their stream have ended.

    A stream runs its launches in order, but a kernel may begin before the previous kernel ends (programmatic dependent
    launch). Nodes of one launch of a CUDA graph may run concurrently, and on other streams than that of the launch, so
    they are only compared with later launches of graphs. Where no calls are recorded, a stream may be several streams
    of as many processes, so there, the activity must end a millisecond later.
    """
    gpu = evidence.tables.gpu
    result = np.zeros(gpu.height, np.bool_)
    rows, stream = evidence.by_stream
    end = (gpu["start"].to_numpy() + gpu["duration"].to_numpy())[rows]
    covering = np.flatnonzero((end[:-1] > end[1:]) & (stream[:-1] == stream[1:]))
    covering = covering[(gpu["kind"] != "thunk").to_numpy()[rows[covering]]]
    if not len(covering):
        return result
    launch = gpu["correlation"].fill_null(0).to_numpy()[rows]
    # Bodies of conditional nodes have the id 0, and belong to the launch before them.
    before = np.maximum.accumulate(np.where(launch != 0, np.arange(len(rows)), 0))
    launch = launch[before]
    changes = np.flatnonzero((launch[1:] != launch[:-1]) | (stream[1:] != stream[:-1])) + 1
    following = np.append(changes, len(rows))[np.searchsorted(changes, covering, side="right")]
    tenth = following + _LATER - 1
    inside = np.minimum(tenth, len(rows) - 1)
    in_graph = evidence.in_graph[rows]
    known = evidence.call_of_work[rows[covering]] != NO_ROW
    margin = np.where(known, OUTLASTS_NS, OUTLASTS_UNKNOWN_NS)
    later = (tenth < len(rows)) & (stream[inside] == stream[covering])
    later &= in_graph[inside] | ~in_graph[covering]
    result[rows[covering[later & (end[covering] - end[inside] >= margin)]]] = True
    return result


def _before_the_clock(start: Int64) -> Mask:
    """Starts below 0, and starts of exactly 0 if all others are more than a second later."""
    positive = start[start > 0]
    lonely = len(positive) > 0 and int(positive.min()) > _SECOND_NS
    result: Mask = (start < 0) | ((start == 0) & lonely)
    return result


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
        text = f"{evidence.without_launches()}, so the order in which work was launched is unknown"
        judgement.not_checked.append(NotChecked("broken_order", text, UNKNOWN_LAUNCHES))
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
    late = kernels.with_columns(by=pl.col("start").cum_max().over(same) - pl.col("start")).filter(pl.col("by") > 0)
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
