"""The timeline overview as a Plotly figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.timelines.overview import CLASSES
from thence.units import format_ns
from thence.writers.page.figures import PALETTE, ROW_PX, new_figure, shown, stream_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from thence.analysis.timelines.overview import Overview

CLASS_COLOURS = dict(zip(CLASSES, PALETTE, strict=False))
CLASS_SCALE = [
    [(number + part) / len(CLASSES), "rgba({}, {}, {}, {})".format(*bytes.fromhex(colour[1:]), alpha)]
    for number, colour in enumerate(CLASS_COLOURS.values())
    for part, alpha in ((0, 0.3), (1, 1))
]
"""Colour scale of class and busy share as one number: 1.5 is a bin of class 1 that is busy half of its time."""

_FIGURE_BINS = 400
_MOST_SLICES = 1000
_MS = 1e6


def timeline_figure(overview: Overview) -> go.Figure:
    """Every stream over time: exact slices if there are few, else bins in the colour of the class that ran most."""
    lanes = lane_names(overview)
    figure = timeline_frame(overview)
    if 0 < overview.slices.height <= _MOST_SLICES:
        _add_slices(figure, overview, lanes)
    else:
        _add_bins(figure, overview.coarser(_FIGURE_BINS), lanes)
    return figure


def timeline_frame(overview: Overview) -> go.Figure:
    """The axes and the legend of a timeline, without data."""
    lanes = lane_names(overview)
    figure = new_figure(height=96 + ROW_PX * max(overview.lanes.height, 3))
    for name in CLASSES:  # the legend has all classes, even those that do not occur
        marker = {"color": CLASS_COLOURS[name], "symbol": "square", "size": 10}
        figure.add_scatter(x=[None], y=[lanes[0]], mode="markers", name=name, marker=marker, hoverinfo="skip")
    figure.update_layout(
        barmode="overlay", bargap=0, showlegend=True, legend_itemclick=False, legend_itemdoubleclick=False
    )
    figure.update_xaxes(title_text="ms since the first activity", range=[0, overview.span_ns / _MS])
    figure.update_yaxes(
        type="category", fixedrange=True, categoryorder="array", categoryarray=lanes,
        range=[len(lanes) - 0.5, -0.5], showgrid=False,
    )  # fmt: skip
    return figure


def lane_names(overview: Overview) -> list[str]:
    """The axis labels of the lanes."""
    one_device = overview.lanes.select("rank", "device").n_unique() == 1
    keys = overview.lanes.select("rank", "device", "stream").rows()
    names = [stream_name(*key) for key in keys]
    return [name.partition(": ")[2] for name in names] if one_device else names


def _add_slices(figure: go.Figure, overview: Overview, lanes: Sequence[str]) -> None:
    names = [shown(name, 90) for name in overview.names]
    for number, name in enumerate(CLASSES):
        part = overview.slices.filter(pl.col("class") == number)
        texts = [
            f"<b>{names[kernel]}</b><br>{format_ns(ns)}" + (f"<br>{names[label]}" if label is not None else "")
            for kernel, label, ns in part.select("name", "label", "duration").iter_rows()
        ]
        figure.add_bar(
            orientation="h", name=name, base=(part["start"] / _MS).to_list(),
            x=(part["duration"] / _MS).to_list(), y=[lanes[lane] for lane in part["lane"]], width=0.82,
            marker={"color": CLASS_COLOURS[name], "line": {"width": 0}}, hovertext=texts,
            hovertemplate="%{hovertext}<extra></extra>", showlegend=False,
        )  # fmt: skip


def _add_bins(figure: go.Figure, overview: Overview, lanes: Sequence[str]) -> None:
    names = [shown(name, 40) for name in overview.names]
    count = overview.bin_count
    values: list[list[float | None]] = [[None] * count for _ in lanes]
    texts = [[""] * count for _ in lanes]
    for lane, number, busy, kind, name in overview.bins.select("lane", "bin", "busy_ns", "class", "name").iter_rows():
        share = busy / overview.bin_ns
        values[lane][number] = round(kind + 0.02 + 0.96 * share, 3)
        texts[lane][number] = f"{100 * share:.0f} % busy, most of it<br>{names[name]}"
    figure.add_heatmap(
        x0=overview.bin_ns / _MS / 2, dx=overview.bin_ns / _MS, y=lanes, z=values, text=texts, ygap=3,
        zmin=0, zmax=len(CLASSES), showscale=False, colorscale=CLASS_SCALE, hoverongaps=False,
        hovertemplate="%{x:.5~g} ms: %{text}<extra></extra>",
    )  # fmt: skip
