"""Launches of CUDA graphs that ran fewer kernels than other launches of the same graph.

If the trace names the graph of each activity, the launches of a graph are compared with the launch of that graph that
ran the most activities. Launches of a graph with conditional nodes may differ, so they are a note.

If it does not, the launches of all graphs are compared with the most frequent set of activities (by name, grid and
block). A launch that ran a part of this set may be of another graph. So it is a finding only if all other launches ran
this set or a part of it, and no two launches ran the same part; otherwise it is a note.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement, Launches
from thence.analysis.soundness.findings import Finding
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from thence.analysis.soundness.evidence import Mask

__all__ = ["partial_replay"]

_MOST_SHAPES = 100  # launches with more different sets of activities are not compared
_LARGEST = 20_000  # if a launch has more activities, launches are not compared


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
    suspects = _of_different_sizes(launched)
    if suspects.is_empty():
        return
    launches = (
        launched.join(suspects.lazy(), on=["rank", "graph"], how="semi")
        .group_by("rank", "graph", "correlation")
        .agg(
            pl.len().alias("size"),
            nodes=pl.col("node").n_unique(),
            unknown=(pl.col("node").null_count() > 0) | (pl.col("node").n_unique() == 1),
            start=pl.col("start").min(),
            end=(pl.col("start") + pl.col("duration")).max(),
            ns=pl.col("duration").sum(),
            device=pl.col("device").first(),
        )
        .with_columns(
            ran=pl.when("unknown").then("size").otherwise("nodes"),
            repeated=~pl.col("unknown") & (pl.col("nodes") < pl.col("size")),
        )
        .with_columns(
            fullest=pl.col("ran").max().over("rank", "graph"),
            launches=pl.len().over("rank", "graph"),
            varies=pl.col("repeated").any().over("rank", "graph"),
        )
        .filter(pl.col("ran") < pl.col("fullest"))
        .collect()
    )
    if launches.is_empty():
        return
    conditional = activities.filter(pl.col("correlation") == 0).select("rank", "graph").unique()
    bodies = set(conditional.collect().rows())
    cut = {rank: _cut_by_the_recording(evidence, rank) for rank in launches["rank"].unique()}
    for (rank, graph), part in launches.sort("rank", "graph", "start").group_by(
        "rank", "graph", maintain_order=True
    ):
        finding = _finding(evidence, int(rank), part, f"CUDA graph {graph}")
        at_edges = set(part["correlation"]) <= cut[int(rank)]
        doubtful = (rank, graph) in bodies or bool(part["varies"].any()) or at_edges
        (judgement.notes if doubtful else judgement.findings).append(finding)


def _of_different_sizes(launched: pl.LazyFrame) -> pl.DataFrame:
    """Rank and id of the graphs whose launches ran different numbers of activities."""
    sizes = launched.group_by("rank", "graph", "correlation").len()
    graphs = sizes.group_by("rank", "graph").agg(pl.col("len").n_unique())
    return graphs.filter(pl.col("len") > 1).select("rank", "graph").collect()


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


def _finding(evidence: Evidence, rank: int, part: pl.DataFrame, graph: str) -> Finding:
    """The finding about launches of one graph; ``part`` has the columns ran, fullest, launches, start, end, device."""
    window = evidence.window(rank)
    touched = int((part["end"] - part["start"]).sum())
    least, most = int(part["ran"].min()), int(part["ran"].max())  # type: ignore[arg-type]
    ran = f"{least:,}" if least == most else f"{least:,} to {most:,}"
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
        f" {int(part['fullest'][0]):,} activities of its fullest launch, the first"
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
    shapes = _shapes(evidence, launches, chosen)
    for (rank,), part in shapes.group_by("rank", maintain_order=True):
        _compare(evidence, judgement, int(rank), part, chosen)


def _shapes(evidence: Evidence, launches: Launches, chosen: Any) -> pl.DataFrame:
    """Per launch: rank, launch, shape (hash of its activities), ran (their number), start, end, device."""
    gpu: pl.DataFrame = evidence.tables.gpu[chosen]
    return (
        gpu.lazy()
        .select(
            *("rank", "device", "start"),
            launch=pl.Series(launches.of_work[chosen]),
            end=pl.col("start") + pl.col("duration"),
            what=_identity().hash(),
        )
        .group_by("rank", "launch")
        .agg(
            ran=pl.len(),
            shape=pl.col("what").sort().implode().hash().first(),
            start=pl.col("start").min(),
            end=pl.col("end").max(),
            device=pl.col("device").first(),
        )
        .sort("rank", "start")
        .collect()
    )


def _identity() -> pl.Expr:
    return pl.struct(
        pl.col("name").cast(pl.String), pl.col("grid").arr.to_list(), pl.col("block").arr.to_list()
    )


def _compare(
    evidence: Evidence, judgement: Judgement, rank: int, part: pl.DataFrame, chosen: Any
) -> None:
    shapes = (
        part.group_by("shape")
        .agg(pl.len(), pl.col("ran").first(), pl.col("launch").first())
        .sort("len", "ran", descending=True)
    )
    if not 2 <= shapes.height <= _MOST_SHAPES or int(part["ran"].max()) > _LARGEST:  # type: ignore[arg-type]
        return
    full = shapes.row(0, named=True)
    if full["len"] < 2:
        return
    whole = _activities(evidence, chosen, full["launch"])
    within = [
        row["shape"]
        for row in shapes[1:].iter_rows(named=True)
        if row["ran"] < full["ran"] and _activities(evidence, chosen, row["launch"]) <= whole
    ]
    if not within:
        return
    partial = part.filter(pl.col("shape").is_in(within)).with_columns(
        fullest=pl.lit(full["ran"]), launches=pl.lit(part.height)
    )
    finding = _finding(evidence, rank, partial, "CUDA graphs with the same activities")
    alone = len(within) == shapes.height - 1 and partial.height == len(within)
    waited = evidence.waits(rank).filter(pl.col("end") >= evidence.window(rank).end).height > 0
    last = partial.height == 1 and partial["start"][0] == part["start"].max() and not waited
    (judgement.findings if alone and not last else judgement.notes).append(finding)


def _activities(evidence: Evidence, chosen: Any, launch: int) -> Counter[Any]:
    """How often each name, grid and block occurs among the activities of a launch."""
    of: Mask = evidence.launches.of_work[chosen] == launch
    gpu = evidence.tables.gpu[chosen[of]]
    return Counter(
        (name, tuple(grid or ()), tuple(block or ()))
        for name, grid, block in zip(
            gpu["name"].cast(pl.String).to_list(),
            gpu["grid"].arr.to_list().to_list(),
            gpu["block"].arr.to_list().to_list(),
            strict=True,
        )
    )
