"""A flame graph as a chart, for notebooks, documents and images. The root is the top row."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import values_or
from thence.units import format_count, format_ns, format_share
from thence.writers.charts.chart import Chart
from thence.writers.charts.description import Axis, Series

if TYPE_CHECKING:
    from thence.analysis.flame.answer import Flame
    from thence.model.arrays import Float64

IMAGE_WIDTH = 1200
"""Width in px of the image of a whole flame graph."""
_MIN_WIDTH = 0.25 / IMAGE_WIDTH
"""Frames that are narrower, as a part of the root, are not drawn."""
_MAX_ROWS = 256  # levels of the tree that the image shows, each 18 px high
_COLOURS = {
    "frame": "#efe6d2",
    "compute": "#a5c0dc",
    "communication": "#e9b595",
    "copy": "#98d7c2",
    "idle": "#dfe0e3",
    "unattributed": "#d9ccdf",
    "smaller": "#cacbce",
}
"""The colours of the HTML page's light theme."""


def flame_chart(flame: Flame) -> Chart:
    """The chart of a flame graph. Frames that are too narrow or too deep are left out; the caption counts them."""
    frames = _placed(flame)
    whole = max(flame.total_ns, 1)
    notes = [
        f"{full or name}\n{format_share(ns, whole)}, {format_count(count)}"
        for full, name, ns, count in frames.select("full_name", "name", "total_ns", "count").iter_rows()
    ]
    # Of a path, the folder is only in the note.
    shown = frames["name"].str.replace(r"^.*/", "") if flame.of_files else frames["name"]
    data = frames.select(
        "kind", start_ns="start", end=pl.col("start") + pl.col("total_ns"), depth="depth"
    ).with_columns(name=shown, note=pl.Series(notes, dtype=pl.String))
    series = tuple(
        Series(str(kind), "frame", part.drop("kind"), _COLOURS.get(str(kind), _COLOURS["frame"]))
        for (kind,), part in data.group_by(["kind"], maintain_order=True)
    )
    omitted = flame.nodes.height - frames.height
    facts = f": span {format_ns(flame.span_ns)}, busy {format_share(flame.busy_ns, flame.span_ns)}"
    caption = [f"{', '.join(flame.meta.inputs)}{'' if flame.weight.unit == 'bytes' else facts}", *flame.notes]
    if omitted:
        caption.append(
            f"{format_count(omitted)} of {format_count(flame.nodes.height)} frames are too narrow or too deep to be "
            "drawn here."
        )
    return Chart(flame.title, series, Axis("start_ns", unit=flame.weight.unit), Axis("depth"), "\n".join(caption))


def _placed(flame: Flame) -> pl.DataFrame:
    """The frames that are drawn, with the column start: ns from the left.

    Among siblings larger frames come first and idle ones last, as in `Flame.stacks`.
    """
    nodes = flame.nodes.select("node", "parent", "depth", "name", "full_name", "kind", "total_ns", "count", "idle")
    # Cut before layout: a frame is never wider than the one around it.
    kept = nodes.filter(
        (pl.col("total_ns") >= _MIN_WIDTH * flame.total_ns) | pl.col("parent").is_null(), pl.col("depth") < _MAX_ROWS
    )
    ordered = kept.sort("idle", "total_ns", "node", descending=[False, True, False])
    ordered = ordered.with_columns(offset=(pl.col("total_ns").cum_sum() - pl.col("total_ns")).over("parent")).sort(
        "depth", maintain_order=True
    )
    return ordered.with_columns(start=_starts(ordered, flame.nodes.height))


def _starts(ordered: pl.DataFrame, nodes: int) -> Float64:
    """Start of each frame in ns from the left: the sum of its offset among siblings and its parent's start.

    Args:
        ordered: the frames that are drawn, ordered by depth, with all their parents.
        nodes: number of nodes of the whole flame graph.
    """
    start = np.zeros(nodes, np.float64)
    node = ordered["node"].to_numpy()
    parent = values_or(ordered["parent"], 0)
    offset = ordered["offset"].to_numpy()
    depth = ordered["depth"].to_numpy()
    edges = np.searchsorted(depth, np.arange(1, depth.max() + 2))
    for first, last in itertools.pairwise(edges):  # one level at a time
        start[node[first:last]] = start[parent[first:last]] + offset[first:last]
    placed: Float64 = start[node]
    return placed
