"""Rules about launches and their device work: each launch has all of its work, each work its launch, and each once.

**Launches without work.** Even in a sound trace, these launches have no device work, so they are left out:

- launches while a stream is captured: their kernels become nodes of a graph, and run when the graph is launched;
- the last launches of a recording that ended while the device still worked, unless the host waited for the
  whole device after them: in that case their work had ended before the recording did;
- in traces without the calls that begin and end captures, launches that look captured: see
  `_probably_captured`.

Copies and memsets are not judged: one of 0 bytes has no device work. Kernels that the device itself launches, such as
the bodies of conditional graph nodes, have the correlation id 0.

**Launches of CUDA graphs that ran less than their graph contains.** What a graph contains is known from what all of its
launches ran together: each launch may have lost other work.

If the trace names the graph of each activity, the launches of a graph are compared, node by node. Launches of a graph
with conditional nodes may differ, so they are a note.

If it does not, launches are compared that ran mostly the same activities (by name, grid and block). They are launches
of one graph, or of graphs that are alike: the layers of a model may be graphs of which the last lacks a part, and
graphs for other batch sizes differ in their grids. So launches are only compared if each activity of each of them
occurs in at least half of them all. Then launches that ran something else are a finding if three or more of them, and
at least half, ran what no other launch ran; or if none of them ran what another ran, and the trace has no other graphs.
Otherwise they are a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement, called
from thence.analysis.soundness.findings import MISSING, UNKNOWN_LAUNCHES, Finding, NotChecked
from thence.model.columns import values_or
from thence.model.grouped_intervals import distinct, rows_by_number
from thence.model.intervals import NEVER, NO_ROW, union_lengths
from thence.model.kernel_names import short_names
from thence.model.launches import COUNTED
from thence.model.thresholds import LAUNCHED_AT_END_NS, LAUNCHED_AT_END_SHARE
from thence.units import format_ns, listed, several

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        for chosen, texts in ((missing & ~late, judgement.findings), (late, judgement.notes)):
            if chosen.any():
                texts.append(_missing_work(evidence, rank, part, chosen))
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
    for frame, texts, why in (
        (lost, judgement.findings, "though launches of the same kernels are"),
        (never, judgement.notes, "nor is any launch of these kernels: not every call is recorded"),
    ):
        for rank, rows in rows_by_number(frame["rank"].to_numpy()):
            if _corresponds(evidence, rank):
                texts.append(_without_launch(evidence, rank, frame[rows], why))
    return judgement


def _stray(evidence: Evidence) -> pl.DataFrame:
    """Kernels whose call is not recorded, although they were launched after the first recorded call.

    Returns:
        rank, device, name, start, duration and correlation of gpu, and ``single``: whether no other of these kernels
        has the same correlation id. Kernels of one launch of a graph have the same.
    """
    gpu = evidence.tables.gpu
    alone = (evidence.launches.of_work == NO_ROW) & evidence.kernels & (values_or(gpu["correlation"], 0) > 0)
    alone &= np.isin(gpu["rank"].to_numpy(), list(evidence.launching_ranks))
    launched = gpu[["rank", "device", "name", "start", "duration", "correlation"]][np.flatnonzero(alone)]
    if launched.is_empty():
        return launched.hstack([pl.Series("single", [], dtype=pl.Boolean)])
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


_MAX_SHAPES = 100  # launches with more different sets of activities are not compared
_MAX_ACTIVITIES = 20_000  # if a launch has more activities, launches are not compared
_MIN_LAUNCHES = 3  # of graphs without ids; of two launches either may be of another graph
_MIN_UNIQUE = 3  # launches that ran what no other did; the first and last layer of a model may be special
_LAUNCH = ["rank", "graph", "correlation"]


def partial_replay(evidence: Evidence) -> Judgement:
    """Judges launches of graphs of whose work the trace holds only a part."""
    judgement = Judgement()
    gpu = evidence.tables.gpu
    if (gpu["graph"].len() - gpu["graph"].null_count()) > 0:
        _judge_named_graphs(evidence, judgement)
    _judge_unnamed_graphs(evidence, judgement)
    return judgement


def _judge_named_graphs(evidence: Evidence, judgement: Judgement) -> None:
    """Compares the launches of each graph that the trace names."""
    activities = evidence.tables.gpu.lazy().filter(pl.col("graph").is_not_null())
    launched = activities.filter(pl.col("correlation") > 0)
    differing = evidence.differing_graphs
    if differing.is_empty():
        return
    # Without ids of nodes, activities are told apart by what they run, and of equal ones by their number.
    part = launched.join(differing.lazy(), on=["rank", "graph"], how="semi")
    nodes = pl.col("node").drop_nulls().n_unique().over("rank", "graph") > 1
    token = pl.when(nodes).then(pl.col("node").hash()).otherwise(_identity().hash())
    part = part.with_columns(nodes=nodes, token=token)
    part = part.with_columns(
        token=pl.when("nodes")
        .then("token")
        .otherwise(pl.col("token") + pl.int_range(pl.len()).over(*_LAUNCH, "token").cast(pl.UInt64))
    )
    launches = (
        part.with_columns(fullest=pl.col("token").n_unique().over("rank", "graph"))
        .group_by(_LAUNCH)
        .agg(
            ran=pl.col("token").n_unique(),
            repeated=pl.col("token").n_unique() < pl.len(),
            fullest=pl.col("fullest").first(),
            start=pl.col("start").min(),
            end=(pl.col("start") + pl.col("duration")).max(),
            device=pl.col("device").first(),
        )
        .with_columns(
            launches=pl.len().over("rank", "graph"), varies=pl.col("repeated").mean().over("rank", "graph") > 0.5
        )
        .filter(pl.col("ran") < pl.col("fullest"))
        .collect()
    )
    if launches.is_empty():
        return
    conditional = activities.filter(pl.col("correlation") == 0).select("rank", "graph").unique()
    bodies = set(conditional.collect().rows())
    cut = {rank: _cut_by_the_recording(evidence, rank) for rank in launches["rank"].unique()}
    for (rank, graph), of_graph in launches.sort(*_LAUNCH[:2], "start").group_by("rank", "graph", maintain_order=True):
        finding = _partial_finding(evidence, int(rank), of_graph, f"CUDA graph {graph}")
        at_edges = set(of_graph["correlation"]) <= cut[int(rank)]
        doubtful = (rank, graph) in bodies or bool(of_graph["varies"].any()) or at_edges
        (judgement.notes if doubtful else judgement.findings).append(finding)


def _cut_by_the_recording(evidence: Evidence, rank: int) -> set[int]:
    """Correlation ids of the first and the last work of a rank, if the recording may have begun or ended during it.

    The recording did not begin during work whose launch it holds, nor end during work that the host waited for.
    """
    work = (
        evidence.tables.gpu.lazy()
        .filter(pl.col("rank") == rank, pl.col("correlation") > 0)
        .select("correlation", "start", end=pl.col("start") + pl.col("duration"))
    )
    first, last, end = work.select(
        pl.col("correlation").get(pl.col("start").arg_min()),
        last=pl.col("correlation").get(pl.col("end").arg_max()),
        end=pl.col("end").max(),
    ).collect().row(0)  # fmt: skip
    launches = evidence.launches.table.filter(pl.col("rank") == rank)
    known = set(launches["correlation"].filter(launches["correlation"].is_in([first, last])))
    waited = evidence.waits(rank).filter(pl.col("end") >= end)
    cut = {first} - known
    return cut if waited.height else cut | {last}


def _partial_finding(evidence: Evidence, rank: int, part: pl.DataFrame, graph: str, extra: int = 0) -> Finding:
    """The finding about launches of one graph.

    Args:
        rank: of the launches.
        part: launches that differ, with the columns ran, fullest, launches, start, end, device.
        graph: what the launches are of.
        extra: number of activities that launches ran in addition to those of the graph.
    """
    window = evidence.window(rank)
    touched = int((part["end"] - part["start"]).sum())
    fewest, most = int(part["ran"].min()), int(part["ran"].max())  # type: ignore[arg-type]
    ran = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    more = f", and {extra:,} more than once" if extra else ""
    devices = part["device"].unique()
    times = part["start"].to_numpy()
    return Finding(
        "partial_replay",
        rank,
        int(devices[0]) if len(devices) == 1 else None,
        part.height,
        touched,
        window.share(touched),
        f"rank {rank}: {part.height:,} of {int(part['launches'][0]):,} launches of {graph} ran {ran} of the"
        f" {int(part['fullest'][0]):,} activities of the graph{more}, the first"
        f" {window.at(int(times.min()))}{evidence.steps_at(rank, times)}",
    )


def _judge_unnamed_graphs(evidence: Evidence, judgement: Judgement) -> None:
    """Compares launches of graphs that the trace does not name."""
    launches = evidence.launches
    of_graph = launches.table["graph"].to_numpy()
    if not of_graph.any():
        return
    row = launches.of_work
    unnamed = evidence.tables.gpu["graph"].is_null().to_numpy() & (row != NO_ROW)
    chosen = np.flatnonzero(unnamed & of_graph[row])
    if not len(chosen):
        return
    activities = evidence.tables.gpu[chosen].select(
        "rank", "device", "start", end=pl.col("start") + pl.col("duration"), what=_identity().hash()
    )
    activities = activities.with_columns(launch=pl.Series(row[chosen]))
    shapes = (
        activities.group_by("rank", "launch")
        .agg(
            ran=pl.len(),
            shape=pl.col("what").sort().implode().hash().first(),
            start=pl.col("start").min(),
            end=pl.col("end").max(),
            device=pl.col("device").first(),
        )
        .with_columns(differ=pl.col("shape").n_unique().over("rank") > 1)
        .filter("differ")
        .sort("rank", "start")
    )
    for (rank,), part in shapes.group_by("rank", maintain_order=True):
        number = int(rank)
        if part["shape"].n_unique() > _MAX_SHAPES or int(part["ran"].max()) > _MAX_ACTIVITIES:  # type: ignore[arg-type]
            text = f"rank {number}: too many different launches of CUDA graphs without ids to compare them"
            judgement.not_checked.append(NotChecked("partial_replay", text, MISSING))
            continue
        _judge_launches(evidence, judgement, number, part, activities)


def _identity() -> pl.Expr:
    return pl.struct(pl.col("name").cast(pl.String), pl.col("grid").arr.to_list(), pl.col("block").arr.to_list())


def _judge_launches(
    evidence: Evidence, judgement: Judgement, rank: int, launches: pl.DataFrame, activities: pl.DataFrame
) -> None:
    """Compares the launches of graphs of one rank.

    Args:
        judgement: to which the result is added.
        rank: of the launches.
        launches: launch, shape, ran, start, end and device, in order of time.
        activities: of all launches: launch and what they run.
    """
    shapes = launches.group_by("shape", maintain_order=True).agg(pl.len(), pl.col("launch").first())
    counted = (
        activities.join(shapes, on="launch", how="semi")
        .group_by("launch", "what")
        .len("count")
        .with_columns(what=pl.col("what").rank("dense") - 1)
    )
    order = {launch: place for place, launch in enumerate(shapes["launch"])}
    counts = np.zeros((shapes.height, int(counted["what"].max()) + 1), np.int64)  # type: ignore[arg-type]
    place = counted["launch"].replace_strict(order, return_dtype=pl.Int64).to_numpy()
    counts[place, counted["what"].to_numpy()] = counted["count"].to_numpy()
    number = shapes["len"].to_numpy().astype(np.int64)
    waited = evidence.waits(rank).filter(pl.col("end") >= evidence.window(rank).end).height > 0
    for alike, expected in _alike(counts, number):
        differ = alike[(counts[alike] != expected).any(axis=1)]
        if not len(differ):
            continue
        part = launches.filter(pl.col("shape").is_in(shapes["shape"][differ.tolist()].implode()))
        ran = pl.DataFrame(
            {"shape": shapes["shape"][differ.tolist()], "ran": np.minimum(counts[differ], expected).sum(axis=1)}
        )
        part = part.drop("ran").join(ran, on="shape", maintain_order="left").with_columns(
            fullest=pl.lit(int(expected.sum())), launches=pl.lit(int(number[alike].sum()))
        )  # fmt: skip
        extra = int((number[differ] * (counts[differ] - expected).clip(0).sum(axis=1)).sum())
        graph = "CUDA graphs with the same activities"
        finding = _partial_finding(evidence, rank, part, graph, extra)
        unique = int((number[differ] == 1).sum())
        many = unique >= _MIN_UNIQUE and 2 * unique >= part.height
        last = part.height == 1 and part["start"][0] == launches["start"].max() and not waited
        only = unique == part.height and len(alike) == shapes.height and not last
        (judgement.findings if many or only else judgement.notes).append(finding)


def _alike(counts: Int64, number: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Groups of shapes that differ little: their rows, and how often each activity occurs in at least half of them.

    Every activity of every shape of a group occurs in at least half of its launches.

    Args:
        counts: how often each activity occurs in each shape, (shapes, activities).
        number: of launches of each shape.
    """
    left = np.argsort(-number * (counts.sum() + 1) - counts.sum(axis=1), kind="stable")
    while len(left):
        leader = left[0]
        shared = np.minimum(counts[left], counts[leader]).sum(axis=1)
        larger = np.maximum(counts[left].sum(axis=1), counts[leader].sum())
        near = left[2 * shared >= larger]
        expected = _usual(counts[near], number[near])
        near = near[~((counts[near] > 0) & (expected == 0)).any(axis=1)]
        if int(number[near].sum()) >= _MIN_LAUNCHES:
            yield near, _usual(counts[near], number[near])
        done: Mask = np.isin(left, near)
        done[0] = True
        left = left[~done]


def _usual(counts: Int64, number: Int64) -> Int64:
    """How often each activity occurs in at least half of the launches."""
    if not len(number):
        return np.zeros(counts.shape[1], np.int64)
    order = np.argsort(-counts, axis=0, kind="stable")
    enough = 2 * np.cumsum(number[order], axis=0) >= number.sum()
    usual: Int64 = np.take_along_axis(counts, order, axis=0)[enough.argmax(axis=0), np.arange(counts.shape[1])]
    return usual


_SAME = ("rank", "device", "stream", "start", "kind", "name", "duration", "correlation", "node")


def listed_twice(evidence: Evidence) -> Judgement:
    """Judges device work and launches that are listed more than once.

    - Two activities with equal stream, start, duration, name and ids: a stream runs one activity at a time.
    - Two kernels of one device, name and duration with the correlation id of one launch of a kernel, which runs one.
    - Two activities of one node of a CUDA graph in one launch, if the node ran once in most launches of the graph.
      Nodes of loops run several times in all launches.
    - Two launches of one thread with equal name, duration and correlation id.
    """
    judgement = Judgement()
    copies = distinct(np.concatenate([_equal_rows(evidence), _of_one_launch(evidence), _of_one_node(evidence)]))
    launches = _equal_launches(evidence)
    ranks = evidence.tables.gpu["rank"].to_numpy()[copies]
    work = dict(rows_by_number(ranks))
    calls = dict(rows_by_number(launches["rank"].to_numpy()))
    for rank in sorted({*work, *calls}):
        rows = copies[work.get(rank, copies[:0])]
        listed = calls.get(rank, copies[:0])
        judgement.findings.append(_copies_finding(evidence, rank, rows, launches[listed]))
    return judgement


def _equal_rows(evidence: Evidence) -> Int64:
    """Rows of gpu that are equal to an earlier row."""
    rows, stream = evidence.by_stream
    start = evidence.tables.gpu["start"].to_numpy()[rows]
    same = np.flatnonzero((start[1:] == start[:-1]) & (stream[1:] == stream[:-1]))
    if not len(same):
        return same
    suspects = np.sort(rows[distinct(np.concatenate([same, same + 1]))])
    part = evidence.tables.gpu[suspects].select(_SAME)
    copies = part.select((~pl.struct(pl.all()).is_first_distinct()).arg_true()).to_series()
    rows_of_copies: Int64 = suspects[copies.to_numpy()]
    return rows_of_copies


def _of_one_launch(evidence: Evidence) -> Int64:
    """Rows of gpu with kernels like another kernel of the same launch of a kernel."""
    launches = evidence.launches
    several_ran = (launches.table["work"] > 1) & ~launches.table["graph"] & ~launches.table["shared"]
    if not several_ran.any():
        return np.empty(0, np.int64)
    row = launches.of_work
    rows = np.flatnonzero((row != NO_ROW) & several_ran.to_numpy()[row])
    part = evidence.tables.gpu[rows].with_columns(row=pl.Series(rows), launch=pl.Series(row[rows]))
    copies = part.filter(pl.col("kind") == "kernel").filter(
        ~pl.struct("launch", "device", "name", "duration").is_first_distinct()
    )
    return copies["row"].to_numpy()


def _of_one_node(evidence: Evidence) -> Int64:
    """Rows of gpu with activities of a node of a CUDA graph that had run before in the same launch, exceptionally."""
    differing = evidence.differing_graphs
    if differing.is_empty():  # what is so in all launches is not the exception
        return np.empty(0, np.int64)
    of_graphs = (
        evidence.tables.gpu.lazy()
        .with_row_index("row")
        .join(differing.lazy(), on=["rank", "graph"], how="semi", maintain_order="left")
        .filter(pl.col("node").is_not_null(), pl.col("correlation") > 0)
    )
    repeated = of_graphs.filter(~pl.struct("rank", "graph", "correlation", "node").is_first_distinct())
    copies = repeated.select("row", "rank", "graph", "correlation", "node").collect()
    if copies.is_empty():
        return np.empty(0, np.int64)
    node = ["rank", "graph", "node"]
    launches = (
        of_graphs.join(copies.lazy().select(node).unique(), on=node, how="semi")
        .group_by(node)
        .agg(launches=pl.col("correlation").n_unique())
        .collect()
    )
    again = copies.group_by(node).agg(again=pl.col("correlation").n_unique())
    rare = launches.join(again, on=node).filter(2 * pl.col("again") <= pl.col("launches"))
    return copies.join(rare, on=node, how="semi")["row"].to_numpy().astype(np.int64)


def _equal_launches(evidence: Evidence) -> pl.DataFrame:
    """The launches that are equal to an earlier one, but for their start: rank and start."""
    table = evidence.launches.table
    if not table["shared"].any():
        return table[["rank", "start"]].clear()
    table = table.filter("shared")
    same = pl.struct("rank", "process", "thread", "name", "correlation", pl.col("end") - pl.col("start"))
    return table.filter(~same.is_first_distinct()).select("rank", "start")


def _copies_finding(evidence: Evidence, rank: int, rows: Int64, launches: pl.DataFrame) -> Finding:
    window = evidence.window(rank)
    copies = evidence.tables.gpu[rows]
    ns = int(copies["duration"].sum())
    devices = copies["device"].unique()
    counted = []
    if copies.height:
        name = next(iter(short_names([copies["name"][0]]).values()))
        counted.append(
            f"{several(copies.height, 'device activity', 'device activities')}, {format_ns(ns)} in sum (such as {name})"
        )
    if launches.height:
        counted.append(several(launches.height, "launch", "launches"))
    times = copies["start"].to_numpy() if copies.height else launches["start"].to_numpy()
    return Finding(
        "listed_twice",
        rank,
        int(devices[0]) if len(devices) == 1 else None,
        copies.height or launches.height,
        ns,
        window.share(ns),
        f"rank {rank}: {' and '.join(counted)}, {'are' if len(rows) + launches.height > 1 else 'is'} listed more than"
        f" once, the first {window.at(int(times.min()))}{evidence.steps_at(rank, times)}",
    )
