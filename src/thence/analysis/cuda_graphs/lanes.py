"""Activities of CUDA graphs, totalled per recorded stream and per labelled lane.

The driver assigns the kernels of a replay to arbitrary streams, so streams of replays mean little. A lane is
the lane that a mark named, else the process group of a collective, else the label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.model.answer import Answer, TableView
from thence.units import several

if TYPE_CHECKING:
    from thence.model.timeline import Timeline

NO_LANE = "(no label)"


@dataclass(frozen=True)
class GraphLanes(Answer):
    """Totals of the activities in CUDA graphs; sums of durations, so rows add up.

    Attributes:
        streams: columns stream (text; includes rank and device if there is more than one device), count
            (activities), kernels (how many of the activities are kernels) and total_ns.
        lanes: columns lane, count, kernels and total_ns, the largest total_ns first.
    """

    streams: pl.DataFrame
    lanes: pl.DataFrame

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return "CUDA graphs by lane", f"on {several(self.streams.height, 'stream')}"

    def views(self) -> tuple[TableView, ...]:
        """The lanes."""
        headings = {"lane": "lane", "count": "activities", "kernels": "kernels", "total_ns": "total"}
        return (TableView(self.lanes, headings, bar="total_ns"),)


def graph_lanes(timeline: Timeline) -> GraphLanes:
    """Totals the activities of CUDA graphs by stream and by lane.

    Args:
        timeline: a timeline whose ``lanes`` has the column ``lane``.
    """
    gpu = timeline.trace.gpu
    rows = np.flatnonzero(in_cuda_graph(timeline.trace) & gpu["program"].is_null().to_numpy())
    frame = gpu.select(
        "rank", "device", "stream", "duration", kernel=pl.col("kind") == "kernel",
        lane=timeline.lanes["lane"].cast(pl.String),
        label=timeline.trace.places["label"].cast(pl.String),
    )[rows].with_columns(lane=pl.coalesce("lane", "label", pl.lit(NO_LANE)))  # fmt: skip
    totals = (
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("kernel").sum().cast(pl.Int64).alias("kernels"),
        pl.col("duration").sum().alias("total_ns"),
    )
    where = ("rank", "device", "stream")
    streams = frame.group_by(where).agg(totals).sort(where)
    single_device = streams.select("rank", "device").unique().height <= 1
    name = pl.col("stream").cast(pl.String)
    if not single_device:
        name = pl.format("rank {}, device {}: {}", *where)
    lanes = frame.group_by("lane").agg(totals).sort("total_ns", "lane", descending=[True, False])
    return GraphLanes(streams.select(name.alias("stream"), "count", "kernels", "total_ns"), lanes)
