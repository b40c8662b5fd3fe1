"""Figures of the waits of collectives: a histogram, and the wait against the message size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.wait_histogram import wait_histogram
from thence.units import format_bytes, format_count
from thence.writers.page.figures import PALETTE, new_figure, shown

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from thence.analysis.collectives.communication import Collectives

_MOST_POINTS = 1500
_US = 1e3
_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3))


def wait_histogram_figure(collectives: Collectives) -> go.Figure:
    """A histogram of the waits: the number of collectives in each range of waits."""
    rows = wait_histogram(collectives.instances)
    ranges = dict.fromkeys(_range(*row) for row in rows.select("from_ns", "to_ns").rows())
    figure = new_figure(height=380)
    for number, ((kind,), part) in enumerate(rows.group_by(["collective"], maintain_order=True)):
        figure.add_bar(
            x=list(ranges), y=part["count"].to_list(), name=shown(str(kind)),
            marker_color=PALETTE[number % len(PALETTE)], hovertemplate="%{x}<br>%{y} collectives",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.08)
    figure.update_xaxes(title_text="wait for the last to start", type="category")
    figure.update_yaxes(title_text="collectives", rangemode="tozero")
    return figure


def wait_sizes_figure(collectives: Collectives) -> go.Figure:
    """The wait of each collective against the size of its message, and a line through the means."""
    points = collectives.instances.filter(pl.col("bytes") > 0, pl.col("wait_ns").is_not_null())
    without = int((points["wait_ns"] == 0).sum())
    points = points.filter(pl.col("wait_ns") > 0)
    means = collectives.by_size.filter(pl.col("bytes") > 0, pl.col("wait_ns_mean") > 0)
    figure = new_figure(height=380)
    keys = ("collective", "group_size")
    for number, (key, rows) in enumerate(means.sort(*keys, "bytes").group_by(keys, maintain_order=True)):
        colour = PALETTE[number % len(PALETTE)]
        name = shown(f"{key[0]} of {key[1]}" if key[1] else str(key[0]))
        same = (pl.col(k).eq_missing(pl.lit(v)) for k, v in zip(keys, key, strict=True))
        chosen = points.filter(*same)
        if points.height <= _MOST_POINTS:
            figure.add_scatter(
                x=chosen["bytes"].to_list(), y=(chosen["wait_ns"] / _US).round(3).to_list(), mode="markers",
                name=name, legendgroup=name, showlegend=False, hovertext=[format_bytes(b) for b in chosen["bytes"]],
                hovertemplate="%{hovertext}<br>%{y:.4~g} us<extra></extra>",
                marker={"color": colour, "size": 5, "opacity": 0.4},
            )  # fmt: skip
        counts = rows.select("bytes", "instances").rows()
        texts = [f"{format_bytes(size)}, {format_count(n)} collectives" for size, n in counts]
        figure.add_scatter(
            x=rows["bytes"].to_list(), y=(rows["wait_ns_mean"] / _US).round(3).to_list(), mode="lines+markers",
            name=name, legendgroup=name, line={"color": colour, "width": 2}, marker={"color": colour, "size": 8},
            hovertext=texts,
            hovertemplate="%{hovertext}<br>%{y:.4~g} us, mean<extra></extra>",
        )  # fmt: skip
    left_out = f" ({format_count(without)} without any are in the means alone)" if without else ""
    figure.update_xaxes(title_text="message size, bytes", type="log")
    figure.update_yaxes(title_text=f"wait for the last to start, us{left_out}", type="log")
    return figure


def _range(first: int, end: int | None) -> str:
    """A range of waits as text, with both ends in whole units."""
    if end is None:
        return f"from {_round(first)}"
    return f"{_round(first)} to {_round(end)}" if first else f"below {_round(end)}"


def _round(ns: int) -> str:
    unit, size = next(each for each in _UNITS if ns >= each[1])
    return f"{ns // size} {unit}"
