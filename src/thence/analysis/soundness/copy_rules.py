"""Device work and launches that a trace lists more than once, so that sums count them more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.soundness.evidence import Evidence, Judgement
from thence.analysis.soundness.findings import Finding
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.row_groups import rows_by_number
from thence.units import format_ns, several

if TYPE_CHECKING:
    from thence.model.arrays import Int64

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
    copies = np.unique(np.concatenate([_equal(evidence), _of_one_launch(evidence), _of_one_node(evidence)]))
    launches = _launches(evidence)
    ranks = evidence.tables.gpu["rank"].to_numpy()[copies]
    work = dict(rows_by_number(ranks))
    calls = dict(rows_by_number(launches["rank"].to_numpy()))
    for rank in sorted({*work, *calls}):
        rows = copies[work.get(rank, copies[:0])]
        listed = calls.get(rank, copies[:0])
        judgement.findings.append(_finding(evidence, rank, rows, launches[listed]))
    return judgement


def _equal(evidence: Evidence) -> Int64:
    """Rows of gpu that are equal to an earlier row."""
    rows, stream = evidence.by_stream
    start = evidence.tables.gpu["start"].to_numpy()[rows]
    same = np.flatnonzero((start[1:] == start[:-1]) & (stream[1:] == stream[:-1]))
    suspects = np.sort(rows[np.unique(np.concatenate([same, same + 1]))])
    part = evidence.tables.gpu[suspects].select(_SAME)
    copies = part.select((~pl.struct(pl.all()).is_first_distinct()).arg_true()).to_series()
    found: Int64 = suspects[copies.to_numpy()]
    return found


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


def _launches(evidence: Evidence) -> pl.DataFrame:
    """The launches that are equal to an earlier one, but for their start: rank and start."""
    table = evidence.launches.table.filter("shared")
    same = pl.struct("rank", "process", "thread", "name", "correlation", pl.col("end") - pl.col("start"))
    return table.filter(~same.is_first_distinct()).select("rank", "start")


def _finding(evidence: Evidence, rank: int, rows: Int64, launches: pl.DataFrame) -> Finding:
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
