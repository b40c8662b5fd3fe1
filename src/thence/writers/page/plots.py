"""Results as Plotly figures, for notebooks and for the HTML report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.summary import IDLE_INSIDE
from thence.units import format_bytes, format_count, format_ns, format_share
from thence.writers.page.figures import PALETTE, ROW_PX, distinct, new_figure, shown, stream_name
from thence.writers.text.ranks import with_device_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import plotly.graph_objects as go

    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.flame.flame import Flame
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.programs.programs import Programs
    from thence.analysis.streams import Streams
    from thence.analysis.summary import Summary

_MOST_POINTS = 1500
_MOST_BARS = 24
_US = 1e3
_MS = 1e6
_REST = "#a9b2bc"
_FRAME = "#ddd3c3"
_FRAME_COLOURS = {
    "compute": "#a9c3de", "communication": "#e8b18a", "copy": "#a5cdbf", "idle": "#dfe2e6",
    "unattributed": "#d8cfe0", "smaller": "#c9ced4",
}  # fmt: skip
_MOST_FRAMES = 300
_GROUP_COLOURS = {
    "GEMM": PALETTE[0], "attention": PALETTE[4], "communication": PALETTE[1], "elementwise": PALETTE[7],
    "reduction": PALETTE[3], "copy": PALETTE[2], "other": PALETTE[6],
}  # fmt: skip


def by_figure(summary: Summary, top: int = 15) -> go.Figure:
    """The largest rows of a summary as bars, and one bar for all other rows."""
    rows = summary.rows.head(top)
    names = distinct(rows["short_name"])
    texts = [f"{format_ns(ns)}  {format_share(ns, summary.sum_ns)}" for ns in rows["total_ns"]]
    figure = new_figure(height=70 + ROW_PX * (rows.height + 1))
    parts = [("GPU time", rows["total_ns"] - rows["backward_ns"], PALETTE[0])]
    if rows["backward_ns"].max():
        parts = [("forward and other", parts[0][1], PALETTE[0]), ("backward", rows["backward_ns"], PALETTE[7])]
    for number, (name, values, colour) in enumerate(parts):
        figure.add_bar(
            orientation="h", name=name, y=names, x=(values / _MS).to_list(), marker_color=colour,
            text=texts if number == len(parts) - 1 else None, textposition="outside", cliponaxis=False,
            hovertemplate="%{y}<br>%{x:.4~g} ms<extra></extra>",
        )  # fmt: skip
    left = summary.rows.height - rows.height
    if left > 0:
        rest = int(summary.rows["total_ns"].slice(top).sum())
        figure.add_bar(
            orientation="h", name="the rest", y=[f"{format_count(left)} more"], x=[rest / _MS],
            marker_color=_REST, text=[f"{format_ns(rest)}  {format_share(rest, summary.sum_ns)}"],
            textposition="outside", cliponaxis=False, hovertemplate="%{y}<br>%{x:.4~g} ms<extra></extra>",
        )  # fmt: skip
    if summary.idle_inside_ns is not None:
        figure.add_bar(
            orientation="h", name="idle", y=[IDLE_INSIDE], x=[summary.idle_inside_ns / _MS],
            marker_color=_FRAME_COLOURS["idle"], text=[format_ns(summary.idle_inside_ns)],
            textposition="outside", cliponaxis=False, hovertemplate="%{y}<br>%{x:.4~g} ms<extra></extra>",
        )  # fmt: skip
    widest = max([*rows["total_ns"], summary.idle_inside_ns or 0, 1]) / _MS
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text=f"ms of GPU time by {summary.by}", range=[0, widest * 1.22])
    figure.update_yaxes(type="category", autorange="reversed", automargin=True)
    return figure


def flame_figure(flame: Flame) -> go.Figure:
    """A flame graph as icicles; a click on a frame zooms. The smallest frames are merged."""
    nodes = flame.largest(_MOST_FRAMES).nodes
    whole = max(flame.total_ns, 1)
    figure = new_figure(height=420)
    figure.add_icicle(
        ids=[str(node) for node in nodes["node"]],
        labels=[shown(name, 60) for name in nodes["name"]],
        parents=["" if parent is None else str(parent) for parent in nodes["parent"]],
        values=nodes["total_ns"].to_list(),
        text=[f"{format_ns(ns)}, {format_share(ns, whole)}" for ns in nodes["total_ns"]],
        branchvalues="total",
        tiling={"orientation": "v"},
        textinfo="label",
        hovertemplate="<b>%{label}</b><br>%{text}<extra></extra>",
        marker={"colors": [_FRAME_COLOURS.get(kind, _FRAME) for kind in nodes["kind"]]},
    )
    figure.update_layout(margin={"l": 4, "r": 4, "t": 8, "b": 8})
    return figure


def bandwidth_says(collectives: Collectives) -> str:
    """One sentence that explains the dots and lines of `bandwidth_figure`."""
    if _transfers_known(collectives):
        return "Bus bandwidth: a dot is the transfer of one collective, a line goes through the medians of the dots."
    return (
        "Bus bandwidth: no transfer is known here; a dot is one whole kernel, which contains its wait for other "
        "ranks, and a line goes through the means of the dots."
    )


def _transfers_known(collectives: Collectives) -> bool:
    return collectives.instances["transfer_bus_gbps"].count() > 0


def bandwidth_figure(collectives: Collectives) -> go.Figure:
    """Bus bandwidth against message size: a dot for each transfer, and lines through the medians.

    If no transfer is known, the dots are whole kernels and the lines go through their means. The title of
    the axis states which it is.
    """
    transfers = _transfers_known(collectives)
    column, middle = ("transfer_bus_gbps", "transfer_bus_gbps_median") if transfers else ("bus_gbps", "bus_gbps_mean")
    dots = collectives.instances if transfers else collectives.rows.filter("described")
    figure = new_figure(height=380)
    points = dots.filter(pl.col("bytes") > 0, pl.col(column) > 0)
    sizes = collectives.by_size.filter(pl.col("bytes") > 0, pl.col(middle) > 0)
    keys = ("collective", "group_size")
    for number, (key, rows) in enumerate(sizes.group_by(keys, maintain_order=True)):
        colour = PALETTE[number % len(PALETTE)]
        name = shown(f"{key[0]} of {key[1]}" if key[1] else str(key[0]))
        same = pl.all_horizontal(pl.col(k).eq_missing(pl.lit(v)) for k, v in zip(keys, key, strict=True))
        chosen = points.filter(same)
        if points.height <= _MOST_POINTS:
            figure.add_scatter(
                x=chosen["bytes"].to_list(), y=chosen[column].round(3).to_list(), mode="markers",
                name=name, legendgroup=name, showlegend=False, hovertext=[format_bytes(b) for b in chosen["bytes"]],
                hovertemplate="%{hovertext}<br>%{y:.4~g} GB/s<extra></extra>",
                marker={"color": colour, "size": 5, "opacity": 0.4},
            )  # fmt: skip
        texts = [
            f"{format_bytes(b)}, {format_count(n)} {'transfers' if transfers else 'kernels'}"
            for b, n in rows.select("bytes", "transfers" if transfers else "count").rows()
        ]
        figure.add_scatter(
            x=rows["bytes"].to_list(), y=rows[middle].round(3).to_list(), mode="lines+markers",
            name=name, legendgroup=name, line={"color": colour, "width": 2}, marker={"color": colour, "size": 8},
            hovertext=texts,
            hovertemplate="%{hovertext}<br>%{y:.4~g} GB/s, " + ("median" if transfers else "mean") + "<extra></extra>",
        )  # fmt: skip
    of = "of transfers" if transfers else "of whole kernels, waits included"
    figure.update_xaxes(title_text="message size, bytes", type="log")
    figure.update_yaxes(title_text=f"bus bandwidth {of}, GB/s", rangemode="tozero")
    return figure


def waits_figure(collectives: Collectives) -> go.Figure:
    """How long each kind of collective waited for its last device to start: quartiles and extremes."""
    figure = new_figure(height=380)
    waits = collectives.instances.filter(pl.col("wait_ns").is_not_null())
    largest = int(waits.select(pl.col("wait_ns").max()).item() or 0)
    unit, unit_name = (_MS, "ms") if largest >= _MS else (_US, "us")
    groups = waits.group_by("collective").agg(
        pl.len().alias("count"),
        *(pl.col("wait_ns").quantile(q, "linear").alias(f"q{int(100 * q)}") / unit for q in (0, 0.25, 0.5, 0.75, 1)),
    )  # fmt: skip
    for number, row in enumerate(groups.sort("collective").iter_rows(named=True)):
        figure.add_box(
            x=[f"{shown(str(row['collective']))} ({format_count(row['count'])})"],
            q1=[row["q25"]], median=[row["q50"]], q3=[row["q75"]], lowerfence=[row["q0"]],
            upperfence=[row["q100"]], marker_color=PALETTE[number % len(PALETTE)], showlegend=False,
            width=0.45, name="",
        )  # fmt: skip
    figure.update_xaxes(type="category")
    figure.update_yaxes(title_text=f"wait for the last to start, {unit_name}", rangemode="tozero")
    return figure


def last_arrivals_figure(collectives: Collectives) -> go.Figure:
    """For each device, how long the others waited when it arrived last; and the waits that no device caused."""
    rows = with_device_names(collectives.last_arrivals.head(_MOST_BARS))
    figure = new_figure(height=380)
    figure.add_bar(
        x=rows["who"].to_list(),
        y=(rows["waited_ns"] / _MS).to_list(),
        marker_color=PALETTE[1],
        hovertext=[
            f"{format_count(last)} collectives" if all_ is None else f"arrived last in {last} of {all_} collectives"
            for last, all_ in rows.select("last", "instances").rows()
        ],
        hovertemplate="%{x}<br>%{y:.4~g} ms<br>%{hovertext}<extra></extra>",
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(title_text="the others waited, ms", rangemode="tozero")
    return figure


def spread_figure(spread: pl.DataFrame, title: str = "") -> go.Figure:
    """Relative spread against mean duration of each computation that ran more than once."""
    rows = spread.filter(pl.col("count") > 1, pl.col("spread").is_not_null(), pl.col("mean_ns") > 0)
    rows = rows.with_columns(total=pl.col("mean_ns") * pl.col("count"))
    rows = rows.sort("total", descending=True).head(_MOST_POINTS)
    largest = max([*rows["total"].head(1), 1.0])
    texts = [
        f"<b>{shown(name, 80)}</b><br>{format_count(n)} times" for name, n in rows.select("operation", "count").rows()
    ]
    figure = new_figure(height=380)
    figure.add_scatter(
        x=(rows["mean_ns"] / _US).round(3).to_list(), y=(100 * rows["spread"]).round(3).to_list(),
        mode="markers", showlegend=False,
        marker={"color": PALETTE[0], "opacity": 0.65, "line": {"width": 0},
                "size": [5 + 19 * (total / largest) ** 0.5 for total in rows["total"]]},
        hovertext=texts,
        hovertemplate="%{hovertext}<br>mean %{x:.4~g} us, spread %{y:.3~g} %<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="mean duration, us (area: total time)", type="log")
    figure.update_yaxes(title_text="standard deviation, % of the mean", rangemode="tozero")
    if title:
        figure.update_layout(title_text=shown(title, 120))
    return figure


def compile_figure(compilation: Compilation) -> go.Figure:
    """Compile time by phase."""
    rows = compilation.phases.head(_MOST_BARS)
    figure = new_figure(height=70 + ROW_PX * rows.height)
    figure.add_bar(
        orientation="h", y=distinct(rows["name"]), x=(rows["self_ns"] / _MS).to_list(),
        marker_color=PALETTE[4], cliponaxis=False, textposition="outside",
        text=[f"{format_ns(ns)}  {format_share(ns, compilation.wall_ns)}" for ns in rows["self_ns"]],
        hovertemplate="%{y}<br>%{x:.4~g} ms<extra></extra>",
    )  # fmt: skip
    widest = max([*rows["self_ns"], 1.0]) / _MS
    figure.update_xaxes(title_text="ms of wall time by phase", range=[0, widest * 1.25])
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def programs_figure(programs: Programs) -> go.Figure:
    """Busy and idle time of each large program, and the idle time before its executions; one bar for the rest."""
    shown_rows = min(programs.large, _MOST_BARS)
    rows, rest = programs.programs.head(shown_rows), programs.programs.slice(shown_rows)
    names = distinct(rows["name"])
    if not rest.is_empty():
        names = [*names, f"{format_count(rest.height)} more"]
    figure = new_figure(height=96 + 30 * len(names))
    parts = (
        ("busy", "busy_ns_total", PALETTE[0]),
        ("idle inside", "idle_inside_ns", PALETTE[5]),
        ("idle between", "idle_between_ns", _REST),
    )
    for name, column, colour in parts:
        values = [*rows[column].fill_null(0), int(rest[column].sum())][: len(names)]
        figure.add_bar(
            orientation="h", name=name, y=names, x=[ns / _MS for ns in values],
            marker_color=colour, hovertemplate="%{y}<br>%{x:.4~g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="ms over all executions")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def groups_figure(streams: Streams) -> go.Figure:
    """Time of each stream by group of kernels."""
    lanes = streams.streams.sort("busy_ns", descending=True).head(_MOST_BARS)
    kept = lanes.select("rank", "device", "stream").sort("rank", "device", "stream")
    rows = streams.rows.join(kept, on=["rank", "device", "stream"], how="semi", nulls_equal=True)
    names = {key: stream_name(*key) for key in kept.rows()}
    figure = new_figure(height=96 + ROW_PX * kept.height)
    for number, group in enumerate(rows["group"].cast(pl.String).unique(maintain_order=True)):
        group_rows = rows.filter(pl.col("group").cast(pl.String) == group)
        figure.add_bar(
            orientation="h",
            name=shown(group),
            y=[names[key] for key in group_rows.select("rank", "device", "stream").rows()],
            x=(group_rows["total_ns"] / _MS).to_list(),
            marker_color=_GROUP_COLOURS.get(group, PALETTE[number % len(PALETTE)]),
            hovertemplate="%{y}<br>%{x:.4~g} ms<extra>" + shown(group).replace("%{", "% {") + "</extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="ms by group of kernels, sum of durations")
    figure.update_yaxes(
        type="category", autorange="reversed", categoryorder="array", categoryarray=list(names.values())
    )
    return figure


def concurrency_figure(streams: Streams) -> go.Figure:
    """How long exactly one, two, three or more streams of each device were busy."""
    devices = [device for device in streams.concurrency if device.busy_streams_ns][:_MOST_BARS]
    figure = new_figure(height=96 + ROW_PX * len(devices))
    names = [f"rank {device.rank} GPU {device.device}" for device in devices]
    counted = [(*device.busy_streams_ns, 0, 0, 0) for device in devices]
    parts: Sequence[tuple[str, Iterable[int], str]] = (
        ("1 stream", [c[0] for c in counted], PALETTE[7]),
        ("2 streams", [c[1] for c in counted], PALETTE[0]),
        ("3 or more", [sum(c[2:]) for c in counted], PALETTE[4]),
    )
    for name, values, colour in parts:
        figure.add_bar(
            orientation="h", name=name, y=names, x=[value / _MS for value in values], marker_color=colour,
            hovertemplate="%{y}<br>%{x:.4~g} ms<extra>" + name + "</extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="ms in which so many streams were busy")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure
