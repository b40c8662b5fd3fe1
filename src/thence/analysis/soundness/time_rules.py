"""Rules about times: impossible and implausible ones, and times of the device that contradict those of the host.

The clocks of the device and of the host are different. Work starts after its launch began, and ends before a call that
waited for it returns. Both can be proved wrong, in opposite directions. If neither is, activities that start late for
no reason that the trace contains show that the trace lacks work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.grouping.kernel_groups import COMMUNICATION, KERNEL_PATTERNS
from thence.analysis.idle.gaps import AllGaps, LaunchTimes, held_until
from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import CLOCKS, MISSING, UNKNOWN_LAUNCHES, Finding, NotChecked
from thence.attribution.waiting import completed_waiting
from thence.model.columns import values_or
from thence.model.grouped_intervals import distinct, rows_by_number
from thence.model.intervals import NEVER, NO_ROW, covered_lengths
from thence.model.kernel_names import short_names
from thence.model.thresholds import (
    CLOCKS_NOTED_NS,
    CLOCKS_WRONG_NS,
    FASTEST_KERNEL_NS,
    MAX_LAUNCH_LATENCY_NS,
    MAX_UNEXPLAINED_SHARE,
    MIN_IDLE_STARTS,
    NO_WAIT_NS,
    OUTLASTS_NS,
    OUTLASTS_UNKNOWN_NS,
)
from thence.model.waiting import waiting_tables
from thence.units import format_ns, several

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables


_OUTLIER_RATIO = 1000
_MIN_EXECUTIONS = 10  # minimum number of executions of a kernel for which a median is used
_ALONE_RATIO = 10  # an outlier is alone if it takes this many times the second longest execution
_MIN_SHARE = 0.01  # share of the span; a shorter outlier changes no result much
_WAITING_KERNELS = r"(?i)spin|wait|sleep|delay|barrier|signal|poll|notify|dispatch|combine"
_DAY_NS = 86_400_000_000_000
_SECOND_NS = 1_000_000_000
_LATER_ACTIVITIES = 10  # this many later activities of a stream cannot all have ended while an earlier one still runs


def outlier(evidence: Evidence) -> Judgement:
    """Judges single executions that took 1,000 times the median of their kernel (name, grid and block).

    Kernels that communicate wait for other ranks, and some other kernels wait on purpose: these are left out. An
    outlier is a note if other executions take almost as long, because the work of a kernel may depend on its data,
    or if it is too short to matter.
    """
    judgement = Judgement()
    durations = evidence.tables.gpu["duration"].to_numpy()[evidence.kernels]
    if len(durations) < _MIN_EXECUTIONS or int(durations.max()) < _OUTLIER_RATIO * int(durations.min()):
        return judgement
    kernels = evidence.tables.gpu.lazy().filter(pl.col("kind") == "kernel", pl.col("duration") > _OUTLIER_RATIO)
    longest = kernels.group_by("name").agg(most=pl.col("duration").max()).collect()
    if longest.is_empty():
        return judgement
    shortest = (
        evidence.tables.gpu.lazy()
        .filter(pl.col("kind") == "kernel")
        .group_by("name")
        .agg(least=pl.col("duration").min(), n=pl.len())
        .collect()
    )
    spread = longest.join(shortest, on="name").filter(
        pl.col("most") >= _OUTLIER_RATIO * pl.col("least"), pl.col("n") >= _MIN_EXECUTIONS
    )
    suspects = [name for name in spread["name"].cast(pl.String) if not _may_wait(name)]
    if not suspects:
        return judgement
    outliers = _outliers(evidence.tables.gpu, suspects)
    short = short_names(outliers["name"].unique().to_list())
    for row in outliers.iter_rows(named=True):
        window = evidence.window(row["rank"])
        share = window.share(row["duration"])
        text = (
            f"rank {row['rank']}: one of {row['n']:,} executions of {short[row['name']]} took"
            f" {format_ns(row['duration'])}, {row['duration'] / max(row['median'], 1):,.0f} times the median,"
            f" {window.at(row['start'])}"
        )
        finding = Finding("outlier", row["rank"], row["device"], 1, row["duration"], share, text)
        alone = row["duration"] >= _ALONE_RATIO * row["second"]
        (judgement.findings if alone and share >= _MIN_SHARE else judgement.notes).append(finding)
    return judgement


def _may_wait(name: str) -> bool:
    communicates = [p for group, p in KERNEL_PATTERNS if group == COMMUNICATION]
    return any(pl.Series([name]).str.contains(p).any() for p in (*communicates, _WAITING_KERNELS))


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
        .filter(
            pl.col("n") >= _MIN_EXECUTIONS, duration >= _OUTLIER_RATIO * pl.col("median"), duration > _SECOND_NS // 1000
        )
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
    too_fast = _too_fast(evidence)
    shifted = (
        len(evidence.tables.meta.inputs) > 1
    )  # times of several inputs are shifted to the clock of the first, on which 0 has no special meaning
    suspects = {*_suspects(evidence), *gpu["rank"].to_numpy()[outlasting].tolist(), *too_fast}
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
        rank_span = evidence.window(rank).span
        name = next(iter(short_names([gpu["name"][int(rows[0])]]).values()))
        example = f"{name} starts at {int(start[bad][0]):,} ns, lasting {int(duration[bad][0]):,} ns"
        judgement.findings.append(
            Finding(
                "impossible_time",
                rank,
                int(devices[0]) if len(devices) == 1 else None,
                int(bad.sum()),
                max(0, rank_span - span),
                evidence.window(rank).share(max(0, rank_span - span)),
                f"rank {rank}: {int(bad.sum()):,} of {len(start):,} device activities have impossible times;"
                f" {example}; the others span {format_ns(span)}",
            )
        )
    return judgement


def _suspects(evidence: Evidence) -> set[int]:
    """Ranks in which times can be impossible: they are more than a day apart, or any is 0 or less."""
    gpu = evidence.tables.gpu
    negative = gpu["rank"].to_numpy()[gpu["duration"].to_numpy() < 0]
    far = {rank for rank, window in evidence.windows.items() if window.span > _DAY_NS or window.start <= 0}
    return far | set(distinct(negative).tolist())


def _too_fast(evidence: Evidence) -> dict[int, int]:
    """Ranks of whose kernels a tenth take less than any kernel can, with the duration that a tenth does not exceed.

    Profilers that round to whole microseconds write 0 for kernels of less, so their durations are not judged.
    """
    gpu, duration = evidence.tables.gpu, pl.col("duration")
    if not (gpu["duration"].to_numpy()[evidence.kernels] < FASTEST_KERNEL_NS).any():
        return {}
    frame = (
        gpu.lazy()
        .filter(pl.col("kind") == "kernel")
        .group_by("rank")
        .agg(pl.len(), tenth=duration.quantile(0.1, "lower").cast(pl.Int64), rounded=(duration % 1000 == 0).all())
        .filter(pl.col("len") >= _MIN_EXECUTIONS, pl.col("tenth") < FASTEST_KERNEL_NS, ~pl.col("rounded"))
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
    launch = values_or(gpu["correlation"], 0)[rows]
    # Bodies of conditional nodes have the id 0, and belong to the launch before them.
    before = np.maximum.accumulate(np.where(launch != 0, np.arange(len(rows)), 0))
    launch = launch[before]
    changes = np.flatnonzero((launch[1:] != launch[:-1]) | (stream[1:] != stream[:-1])) + 1
    following = np.append(changes, len(rows))[np.searchsorted(changes, covering, side="right")]
    tenth = following + _LATER_ACTIVITIES - 1
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
    single = (~launches.table["graph"] & (launches.table["work"] == 1)).to_numpy()
    eager = (row != NO_ROW) & single[row] & ~launches.ambiguous & evidence.kernels
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


_PURE_WAITS = ("device", "stream", "event")


def clocks(evidence: Evidence) -> Judgement:
    """Judges work_before_launch, late_clock and started_late."""
    judgement = Judgement()
    early = _early(evidence)
    launched = evidence.launches.of_work != NO_ROW
    words = "launched activities start before their launch"
    _contradictions(evidence, judgement, "work_before_launch", early, launched, words)
    gaps = AllGaps.of(evidence.tables)
    late = _outlasting_waits(evidence)
    known = evidence.call_of_work != NO_ROW
    if late is not None:
        words = "activities end after a call returned that had waited for them"
        _contradictions(evidence, judgement, "late_clock", late, known, words)
    ranks = evidence.tables.gpu["rank"].to_numpy()
    wrong = early > CLOCKS_WRONG_NS
    wrong |= False if late is None else late > CLOCKS_WRONG_NS
    disagreeing = set(ranks[wrong].tolist())
    judged = _slow_starts(evidence, judgement, gaps, disagreeing)
    if late is None and not judged:
        text = "no calls are recorded that wait for known device work, and few that launched work on an idle device"
        judgement.not_checked.append(NotChecked("late_clock", text, CLOCKS))
    disagreeing |= {finding.rank for finding in judgement.findings if finding.rank is not None}
    _started_late(evidence, judgement, gaps, disagreeing)
    return judgement


def _slow_starts(evidence: Evidence, judgement: Judgement, gaps: AllGaps, disagreeing: set[int]) -> bool:
    """Adds findings about ranks in which even the quickest start on an idle device was late: its clock is.

    Args:
        judgement: to which findings are added.
        gaps: of all devices.
        disagreeing: ranks whose clocks are already known to disagree.

    Returns:
        Whether there were enough launches on idle devices in any rank.
    """
    call = evidence.call_of_work[gaps.gpu]
    some = np.flatnonzero(call != NO_ROW)
    calls = evidence.calls
    some = some[calls["start"].to_numpy()[call[some]] > gaps.start[some]]
    some = some[gaps.end[some] >= calls["end"].to_numpy()[call[some]]]  # others show nothing
    lag = gaps.end[some] - calls["end"].to_numpy()[call[some]]
    ranks = gaps.devices["rank"].to_numpy()[gaps.number[some]]
    rank, place, number = np.unique(ranks, return_inverse=True, return_counts=True)
    quickest = np.full(len(rank), np.iinfo(np.int64).max)
    np.minimum.at(quickest, place, lag)
    enough = number >= MIN_IDLE_STARTS
    for which in np.flatnonzero(enough & (quickest > CLOCKS_WRONG_NS)).tolist():
        window = evidence.window(int(rank[which]))
        if int(rank[which]) not in disagreeing:
            text = (
                f"rank {rank[which]}: of {number[which]:,} activities that were launched while their device was idle,"
                f" even the quickest started {format_ns(int(quickest[which]))} after the call had returned: the clocks"
                " of host and device disagree"
            )
            judgement.findings.append(
                Finding("late_clock", int(rank[which]), window.device, int(number[which]), window.span, 1.0, text)
            )
    return bool(enough.any())


def _contradictions(
    evidence: Evidence, judgement: Judgement, code: str, excess: Int64, judged: Mask, words: str
) -> None:
    """Adds findings and notes about activities that contradict the host's times by more than 50 us, or 10 us."""
    wrong = np.flatnonzero(excess > CLOCKS_NOTED_NS)
    ranks = evidence.tables.gpu["rank"].to_numpy()
    number = np.unique(ranks[judged], return_counts=True) if len(wrong) else ()
    count = dict(zip(*number, strict=True)) if len(wrong) else {}
    for rank, rows in rows_by_number(ranks[wrong]):
        window = evidence.window(rank)
        part = evidence.tables.gpu[wrong[rows]]
        devices = part["device"].unique()
        first = int(part["start"].to_numpy().min())
        touched = int(part["start"].to_numpy().max()) - first
        most = int(excess[wrong[rows]].max())
        (judgement.findings if most > CLOCKS_WRONG_NS else judgement.notes).append(
            Finding(
                code,
                rank,
                int(devices[0]) if len(devices) == 1 else None,
                part.height,
                touched,
                window.share(touched),
                f"rank {rank}: {part.height:,} of {int(count[rank]):,} {words}, by up to {format_ns(most)}, the first"
                f" {window.at(first)}: the clocks of host and device disagree, or times are wrong",
            )
        )


def _early(evidence: Evidence) -> Int64:
    """By how much each activity starts before its launch began, ns; less than 0 if it starts later or if unknown."""
    launches = evidence.launches
    known = np.flatnonzero((launches.of_work != NO_ROW) & ~launches.ambiguous)
    start = evidence.tables.gpu["start"].to_numpy()
    result = np.full(len(start), -1)
    launched = launches.table["start"].to_numpy()[launches.of_work[known]]
    result[known] = launched - start[known]
    return result


def _outlasting_waits(evidence: Evidence) -> Int64 | None:
    """By how much each activity ends after the first return of a call that had waited for it, ns.

    Less than 0 if it ends before, or if unknown. Only work whose launch had returned before the call began, or before
    the event was recorded, is judged, because other threads may launch meanwhile. None if the trace has no call of
    which it states what it waits for: the rank's only device, a stream, or an event whose record is in the trace.
    """
    events, waits = evidence.tables.events, evidence.tables.waits
    if events.is_empty() and waits.is_empty():
        events, waits = waiting_tables(evidence.tables.host)
    waits = _scopes(evidence, waits, events)
    if waits.is_empty():
        return None
    gpu, call = evidence.tables.gpu, evidence.call_of_work
    rows = np.flatnonzero(call != NO_ROW)
    launched = evidence.calls["end"].to_numpy()[call[rows]]
    end = (gpu["start"].to_numpy() + gpu["duration"].to_numpy())[rows]
    begin, returned = waits["begin"].to_numpy(), waits["returned"].to_numpy()
    earliest = np.minimum.accumulate(returned[::-1])[::-1]  # of the calls that began no earlier
    following = np.searchsorted(begin, launched)
    some = following < len(begin)
    some[some] = earliest[following[some]] < end[some]  # whatever the call waits for: few are left
    work = gpu[rows[some]].select("rank", "device", "stream").with_columns(
        row=pl.Series(rows[some]), launched=pl.Series(launched[some]), end=pl.Series(end[some])
    )  # fmt: skip
    result = np.full(gpu.height, -1)
    for scope in (["rank", "device"], ["rank", "device", "stream"]):
        of_scope = waits.filter(pl.col("stream").is_null() == (len(scope) == 2))
        first = pl.col("returned").reverse().cum_min().reverse().over(scope)
        late = work.sort("launched").join_asof(
            of_scope.select(*scope, "begin", first=first),
            left_on="launched", right_on="begin", by=scope, strategy="forward", check_sortedness=False,
        ).drop_nulls("first")  # fmt: skip
        np.maximum.at(result, late["row"].to_numpy(), (late["end"] - late["first"]).to_numpy())
    return result


def _scopes(evidence: Evidence, waits: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """What calls wait for, where the trace states it, sorted by begin.

    Returns:
        rank, device, stream (null: all streams of the device), begin and returned (ns). The call waits for work that
        had been launched before begin: its own begin, or that of the call that recorded the event. Calls that wait for
        a device that the trace does not name wait for the only one of their rank, if they took time.
    """
    waits = waits.filter((pl.col("known") == "recorded").fill_null(value=False), pl.col("kind").is_in(_PURE_WAITS))
    if waits.is_empty():
        return waits
    host = evidence.tables.host.select("start", end=pl.col("start") + pl.col("duration"))
    only = [(rank, window.device) for rank, window in evidence.windows.items() if window.device is not None]
    devices = pl.DataFrame(only, {"rank": pl.Int32, "only": pl.Int32}, orient="row")
    made = events.with_row_index("made").select(
        "made", on="device", of="stream", at=host["start"].gather(events["host"].cast(pl.UInt32))
    )
    row = waits["host"].cast(pl.UInt32)
    waits = waits.with_columns(begin=host["start"].gather(row), returned=host["end"].gather(row))
    waited = pl.col("returned") - pl.col("begin") >= NO_WAIT_NS
    return (
        waits.join(devices, on="rank", how="left")
        .join(made, left_on=pl.col("record").cast(pl.UInt32), right_on="made", how="left")
        .select(
            *("rank", "kind", "returned"),
            begin=pl.coalesce("at", "begin"),
            device=pl.coalesce("on", "device", pl.when(waited).then("only")),
            stream=pl.coalesce("of", "stream"),
        )
        .filter(pl.col("device").is_not_null(), (pl.col("kind") == "device") | pl.col("stream").is_not_null())
        .sort("begin")
    )


@dataclass(frozen=True)
class _Late:
    """Idle time that nothing explains, by piece.

    Attributes:
        gaps: of all devices.
        row: the gap that each piece is the last part of.
        start, duration: ns; the profiler did not work in so much of the piece.
    """

    gaps: AllGaps
    row: Int64
    start: Int64
    duration: Int64

    def of_much_idle_devices(self) -> _Late:
        """The pieces of devices of whose span they are more than `MAX_UNEXPLAINED_SHARE`."""
        number = self.gaps.number[self.row]
        total = np.bincount(number, self.duration, minlength=len(self.gaps.span))
        chosen = (total > MAX_UNEXPLAINED_SHARE * self.gaps.span)[number]
        return replace(self, row=self.row[chosen], start=self.start[chosen], duration=self.duration[chosen])


def _started_late(evidence: Evidence, judgement: Judgement, gaps: AllGaps, disagreeing: set[int]) -> None:
    """Judges how long devices were idle although work had been launched and nothing in the trace held it.

    `thence.analysis.idle.gaps` defines which idle time is unexplained. Of it, pieces of more than 100 us count
    in which the profiler did not work, except before the first launch of a CUDA graph, which may have to be uploaded.
    If they are more than 5 % of a device's span, its idle time is an upper bound.

    Args:
        judgement: to which the result is added.
        gaps: of all devices.
        disagreeing: ranks in which the clocks of host and device disagree, so that starts only seem late.
    """
    call = evidence.call_of_work
    if (call == NO_ROW).all():
        text = f"{evidence.without_launches()}, so when device work could have started is unknown"
        judgement.not_checked.append(NotChecked("started_late", text, MISSING))
        return
    gaps = gaps.chosen(gaps.end - gaps.start > MAX_LAUNCH_LATENCY_NS)  # no other can hold a piece of that length
    late = _late(evidence, gaps, np.full(evidence.tables.gpu.height, NEVER))
    if len(late.row):  # what waits for events is explained; finding that takes time
        launch = np.where(call == NO_ROW, NO_ROW, evidence.calls["host"].to_numpy().astype(np.int64)[call])
        events, waits = completed_waiting(evidence.tables, launch)
        tables = replace(evidence.tables, events=events, waits=waits)
        late = _late(evidence, gaps, held_until(tables, launch))
        elsewhere = _may_wait_for_other_devices(evidence, events)
    by_rank = rows_by_number(gaps.devices["rank"].to_numpy()[gaps.number[late.row]])
    for rank, rows in by_rank:
        if rank in disagreeing:
            reason = "the clocks of host and device disagree"
        elif rank in elsewhere:
            reason = "its streams waited for events, perhaps of another device, that the trace does not state"
        else:
            for device, places in rows_by_number(gaps.number[late.row[rows]]):
                judgement.findings.append(_late_finding(evidence, late, device, rows[places]))
            continue
        judgement.not_checked.append(NotChecked("started_late", f"rank {rank}: {reason}", MISSING))


def _late(evidence: Evidence, gaps: AllGaps, held: Int64) -> _Late:
    """The pieces of unexplained idle time of the devices that have much of it.

    Args:
        gaps: of all devices.
        held: as `held_until` returns it, or `NEVER` for all activities.
    """
    row = np.arange(len(gaps.start))
    late = _Late(gaps, row, gaps.start, gaps.end - gaps.start).of_much_idle_devices()
    if not len(late.row):  # even if all of the idle time were unexplained
        return late
    gpu, call = evidence.tables.gpu, evidence.call_of_work
    launched, returned = (
        np.where(call == NO_ROW, -1, evidence.calls[name].to_numpy()[call]) for name in ("start", "end")
    )
    starts = LaunchTimes.of(gpu["start"].to_numpy(), call, launched, returned, held)
    since = starts.parts(gaps).held_end
    row = np.flatnonzero(gaps.end - since > MAX_LAUNCH_LATENCY_NS)
    late = _Late(gaps, row, since[row], (gaps.end - since)[row]).of_much_idle_devices()
    row = late.row[~_uploading(gpu, gaps.gpu[late.row])]
    begin, end = since[row], gaps.end[row]
    rank = gaps.devices["rank"].to_numpy()[gaps.number[row]]
    duration = end - begin - _profiling(evidence.tables, rank, begin, end)
    return _Late(gaps, row, begin, duration).of_much_idle_devices()


def _uploading(gpu: pl.DataFrame, rows: Int64) -> Mask:
    """Mask of the activities that are the first of a CUDA graph in the trace."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    first = (
        gpu.lazy()
        .filter(pl.col("graph").is_not_null())
        .group_by("rank", "graph")
        .agg(pl.col("start").min(), first=pl.lit(value=True))
    )
    part = gpu[rows].lazy().select("rank", "graph", "start")
    joined = part.join(first, on=["rank", "graph", "start"], how="left", maintain_order="left")
    mask: Mask = joined.select(pl.col("first").is_not_null()).collect()["first"].to_numpy()
    return mask


def _profiling(tables: Tables, rank: Int64, begin: Int64, end: Int64) -> Int64:
    """How long the profiler itself worked in each interval of a rank, ns."""
    result = np.zeros(len(begin), np.int64)
    overhead = tables.host.filter(pl.col("category") == "overhead")
    of_rank = dict(rows_by_number(overhead["rank"].to_numpy()))
    start = overhead["start"].to_numpy()
    stop = start + overhead["duration"].to_numpy()
    for number, rows in rows_by_number(rank):
        own = of_rank.get(number, rows[:0])
        result[rows] = covered_lengths(begin[rows], end[rows], start[own], stop[own])
    return result


def _may_wait_for_other_devices(evidence: Evidence, events: pl.DataFrame) -> set[int]:
    """Ranks with several devices in which the trace does not state for which events streams wait."""
    several = [rank for rank, window in evidence.windows.items() if len(window.devices) > 1]
    unsure = events.filter(
        pl.col("kind") == "wait", pl.col("rank").is_in(several), ~pl.col("known").is_in(("recorded", "never_recorded"))
    )
    return set(unsure["rank"].to_list())


def _late_finding(evidence: Evidence, late: _Late, number: int, pieces: Int64) -> Finding:
    """The finding about a device.

    Args:
        late: all pieces.
        pieces: numbers of the device's pieces.
    """
    gaps = late.gaps
    rank, device = gaps.devices.row(number)
    duration = late.duration[pieces]
    longest = int(duration.argmax())
    total, most = int(duration.sum()), format_ns(int(duration[longest]))
    when = evidence.window(rank).at(int(late.start[pieces[longest]]))
    return Finding(
        "started_late",
        rank,
        device,
        len(pieces),
        total,
        total / max(int(gaps.span[number]), 1),
        f"rank {rank} GPU {device}: for {format_ns(total)} the GPU was idle although work had been launched and nothing"
        f" in the trace held it ({several(len(pieces), 'time')}, for {most} at most, {when}):"
        " the GPU did something that the trace does not contain, or the clocks of host and device disagree",
    )
