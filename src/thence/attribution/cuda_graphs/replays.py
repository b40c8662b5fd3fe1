"""Finds the replays of CUDA graphs in a trace: the activities of each graph launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.signatures import Variants
from thence.attribution.host_rows import launch_rows
from thence.model.intervals import NO_ROW
from thence.model.names import matching

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables

_NODE = np.uint64((1 << 32) - 1)  # bits of a node id that are its number


def in_cuda_graph(tables: Tables, launch: Int64 | None = None) -> Mask:
    """Which rows of gpu ran as part of a CUDA graph.

    These are the activities whose graph is recorded, those launched by a call that launches a whole graph, and those
    whose launch was not recorded and that share their correlation id with others.

    Args:
        launch: host row that launched each activity, `NO_ROW` where unknown; None looks it up.
    """
    gpu = tables.gpu
    inside = gpu["graph"].is_not_null().to_numpy()
    if inside.all():
        return inside
    rows = launch_rows(tables) if launch is None else launch
    of_graph = matching(tables.host["name"], "GraphLaunch").to_numpy()
    has_launch = rows != NO_ROW
    mask: Mask = inside.copy()
    mask[has_launch] |= of_graph[rows[has_launch]]
    if not has_launch.all():
        key = gpu.select("rank", "correlation").filter(pl.Series(~has_launch))
        shared = key.select((pl.len().over("rank", "correlation") > 1) & pl.col("correlation").is_not_null())
        mask[~has_launch] |= shared.to_series().to_numpy()
    return mask


@dataclass(frozen=True)
class Group:
    """Launches with equal multisets of activities, possibly in different orders.

    Attributes:
        rows: int64 (launches, activities): rows of gpu, ascending by start.
    """

    rows: Int64


@dataclass(frozen=True)
class OrderedLaunches:
    """Launches whose activities are in the same order.

    Attributes:
        launch: index of each launch among those that were divided by order.
        rows: int64 (launches, activities): rows of gpu, in order.
        numbered: whether the order is that of the node numbers, and so of the capture; else it is that of the starts.
        one_stream: whether all activities of a launch ran on one stream.
    """

    launch: Int64
    rows: Int64
    numbered: bool
    one_stream: bool


@dataclass(frozen=True)
class Replays:
    """All activities of CUDA graphs in a trace.

    Attributes:
        tables: of the trace.
        rows: rows of gpu that ran in a graph, XLA's command buffers not included.
        kinds: their distinct kernels, memcpys and memsets.
        variant: number in ``kinds`` of every row of gpu, -1 outside of graphs.
    """

    tables: Tables
    rows: Int64
    kinds: Variants
    variant: Int64

    @classmethod
    def of(cls, tables: Tables) -> Replays:
        """The replays of a trace, without XLA's command buffers, which are attributed by their HLO."""
        inside = in_cuda_graph(tables) & tables.gpu["program"].is_null().to_numpy()
        rows = np.flatnonzero(inside)
        kinds = Variants.of(tables.gpu[rows])
        variant = np.full(tables.gpu.height, -1, np.int64)
        variant[rows] = kinds.of_row
        return cls(tables, rows, kinds, variant)

    def groups(self, rows: Int64) -> Iterator[Group]:
        """Groups the launches of some rows by their multiset of kernels, in the order of the trace.

        Two launches are equal if their sums of random 64-bit numbers, one per kernel variant, are
        equal: a hash that does not depend on the order of the activities.
        """
        gpu = self.tables.gpu
        keyed = gpu.select("rank", "correlation", "graph", "start")[rows].with_columns(
            row=pl.Series(rows), variant=pl.Series(self.variant[rows])
        )
        keyed = keyed.filter(pl.col("correlation").is_not_null())
        if keyed.is_empty():
            return
        ordered = keyed.sort("rank", "correlation", "graph", "start", maintain_order=True)
        change = ordered.select(pl.struct("rank", "correlation", "graph").rle_id().alias("launch")).to_series()
        cuts = np.flatnonzero(np.diff(change.to_numpy(), prepend=-1))
        sizes = np.diff(cuts, append=len(ordered))
        # Launches with the same kernels, in whatever order, have the same sum of the kernels' random numbers.
        random = np.random.default_rng(0).integers(0, 1 << 64, self.kinds.frame.height, np.uint64)
        sums = np.add.reduceat(random[ordered["variant"].to_numpy()], cuts)
        all_rows, start = ordered["row"].to_numpy(), ordered["start"].to_numpy()
        alike = pl.DataFrame({"size": sizes, "sum": sums, "cut": cuts, "start": start[cuts]})
        for _, same in alike.sort("start").group_by("size", "sum", maintain_order=True):
            size = int(same["size"][0])
            yield Group(all_rows[same["cut"].to_numpy()[:, None] + np.arange(size)])

    def named(self, rows: Int64) -> str:
        """Equal launches, of shape (launches, activities), for messages."""
        correlation = self.tables.gpu["correlation"][int(rows[0, 0])]
        more = f", and {len(rows) - 1} like it" if len(rows) > 1 else ""
        return f"the graph launch with correlation id {correlation}{more}"

    def sequences(self, rows: Int64) -> list[OrderedLaunches]:
        """Groups launches by the order of their activities.

        Nodes are numbered as they are created, so numbers give the order of the capture.

        Args:
            rows: of gpu, (launches, activities): launches with equal multisets of activities.
        """
        gpu = self.tables.gpu
        flat = pl.Series(rows.reshape(-1))
        node = gpu["node"].gather(flat)
        numbered = bool(node.null_count() == 0 and len(node))
        if numbered:
            number = (node.to_numpy() & _NODE).reshape(rows.shape)
            rows = np.take_along_axis(rows, np.argsort(number, axis=1, kind="stable"), axis=1)
        stream = gpu["stream"].gather(flat).to_numpy().reshape(rows.shape)
        one_stream = (stream == stream[:, :1]).all(axis=1)
        alike: dict[tuple[bytes, bool], list[int]] = {}
        for launch, key in enumerate(self.variant[rows]):
            alike.setdefault((key.tobytes(), bool(one_stream[launch])), []).append(launch)
        return [
            OrderedLaunches(np.array(launches), rows[launches], numbered, same_stream)
            for (_, same_stream), launches in alike.items()
        ]
