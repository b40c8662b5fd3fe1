"""Launches of CUDA graphs that ran less than their graph contains.

What a graph contains is known from what all of its launches ran together: each launch may have lost other work.

If the trace names the graph of each activity, the launches of a graph are compared, node by node. Launches of a graph
with conditional nodes may differ, so they are a note.

If it does not, launches are compared that ran mostly the same activities (by name, grid and block). They are launches
of one graph, or of graphs that are alike: the layers of a model may be graphs of which the last lacks a part, and
graphs for other batch sizes differ in their grids. So launches are only compared if each activity of each of them
occurs in at least half of them all. Then launches that ran something else are a finding if three or more of them, and
at least half, ran what no other launch ran; or if none of them ran what another ran, and the trace has no other
graphs. Otherwise they are a note.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import MISSING, Finding, NotChecked
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64, Mask

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
        _named(evidence, judgement)
    _unnamed(evidence, judgement)
    return judgement


def _named(evidence: Evidence, judgement: Judgement) -> None:
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
        finding = _finding(evidence, int(rank), of_graph, f"CUDA graph {graph}")
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


def _finding(evidence: Evidence, rank: int, part: pl.DataFrame, graph: str, extra: int = 0) -> Finding:
    """The finding about launches of one graph.

    Args:
        evidence: the trace.
        rank: of the launches.
        part: launches that differ, with the columns ran, fullest, launches, start, end, device.
        graph: what the launches are of.
        extra: number of activities that launches ran in addition to those of the graph.
    """
    window = evidence.window(rank)
    touched = int((part["end"] - part["start"]).sum())
    least, most = int(part["ran"].min()), int(part["ran"].max())  # type: ignore[arg-type]
    ran = f"{least:,}" if least == most else f"{least:,} to {most:,}"
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


def _unnamed(evidence: Evidence, judgement: Judgement) -> None:
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
        _compare(evidence, judgement, number, part, activities)


def _identity() -> pl.Expr:
    return pl.struct(pl.col("name").cast(pl.String), pl.col("grid").arr.to_list(), pl.col("block").arr.to_list())


def _compare(
    evidence: Evidence, judgement: Judgement, rank: int, launches: pl.DataFrame, activities: pl.DataFrame
) -> None:
    """Compares the launches of graphs of one rank.

    Args:
        evidence: the trace.
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
        finding = _finding(evidence, rank, part, graph, extra)
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
