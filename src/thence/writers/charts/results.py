"""The charts of thence's results: each function describes one result as a `Chart`, and computes nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.answer import wait_histogram, with_device_names
from thence.analysis.report.summary import IDLE_INSIDE
from thence.analysis.timelines.overview import CLASSES
from thence.units import format_count, format_ns, format_share
from thence.writers.charts.chart import Chart
from thence.writers.charts.description import COLOURS, NEUTRAL, Axis, Series

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from thence.analysis.collectives.answer import Collectives
    from thence.analysis.memory.over_time import MemoryOverTime
    from thence.analysis.programs.answer import Programs
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.report.summary import Summary
    from thence.analysis.roofline import Roofline
    from thence.analysis.streams import Streams
    from thence.analysis.timelines.overview import Overview
    from thence.model.peaks import Peaks

_MAX_POINTS = 1500
"""Points of a chart: with more collectives, a chart has the lines through their means or medians alone."""
_MAX_BARS = 24
_MAX_NAME = 200
"""Characters of the full name of a kernel that is shown while the pointer is over its mark."""
_MAX_SLICES = 1000
_MAX_CELLS, _MIN_BINS, _MAX_BINS = 4000, 50, 400
_BLUE, _ORANGE, _TEAL, _WINE, _LILAC, _RED, _BROWN, _VIOLET = COLOURS
_GROUP_COLOURS = {
    "GEMM": _BLUE,
    "attention": _LILAC,
    "communication": _ORANGE,
    "elementwise": _TEAL,
    "reduction": _WINE,
    "copy": _BROWN,
    "other": NEUTRAL,
}
_BOUND_COLOURS = {"compute": _BLUE, "memory": _ORANGE, "latency": _WINE, "cache": _TEAL, "link": _RED}
_CLASS_COLOURS = dict(zip(CLASSES, (_BLUE, _ORANGE, _TEAL), strict=True))


def by_chart(summary: Summary, top: int = 15) -> Chart:
    """The largest rows of a summary as bars, and one bar for all other rows."""
    column = "total_ns"
    rows = summary.rows.head(top)
    names = distinct(rows["short_name"])
    shown = pl.DataFrame({"name": names, column: rows[column], "note": _cut(rows["name"])})
    texts = dict(zip(names, _with_shares(rows[column], summary.sum_ns), strict=True))
    backward = shown.with_columns(rows["backward_ns"].alias(column))
    forward = shown.with_columns(rows[column] - rows["backward_ns"])
    series = [Series("forward and other", "bar", forward), Series("backward", "bar", backward, _TEAL)]
    if not rows["backward_ns"].max():
        series = [Series("GPU time", "bar", shown)]
    if rest := summary.rows.height - rows.height:
        name, total = f"{format_count(rest)} more", int(summary.rows[column].slice(top).sum())
        series.append(Series("the rest", "bar", pl.DataFrame({"name": [name], column: [total]}), NEUTRAL))
        texts[name] = f"{format_ns(total)}, {format_share(total, summary.sum_ns)}"
    if summary.idle_inside_ns is not None:
        idle = pl.DataFrame({"name": [IDLE_INSIDE], column: [summary.idle_inside_ns]})
        series.append(Series("idle", "bar", idle, NEUTRAL))
        texts[IDLE_INSIDE] = format_ns(summary.idle_inside_ns)
    title = f"GPU time by {summary.heading}"
    return Chart(title, tuple(series), Axis(column, "GPU time", "ns"), Axis("name", scale="rows"), rows=texts)


def timeline_chart(overview: Overview) -> Chart:
    """Every stream over time: exact slices if there are few, else bins in the colour of the class that ran most."""
    one_device = overview.lanes.select("rank", "device").n_unique() == 1
    names = [stream_name(*key) for key in overview.lanes.select("rank", "device", "stream").rows()]
    if one_device:
        names = [name.partition(": ")[2] for name in names]
    lanes = pl.Series(names, dtype=pl.String)
    texts = pl.Series(overview.names, dtype=pl.String)
    if 0 < overview.slices.height <= _MAX_SLICES:
        spans = overview.slices.select(
            pl.col("class"),
            stream=lanes[overview.slices["lane"]],
            start_ns="start",
            end=pl.col("start") + pl.col("duration"),
            note=texts[overview.slices["name"]],
        )
    else:
        bins = overview.coarser(min(_MAX_BINS, max(_MIN_BINS, _MAX_CELLS // max(lanes.len(), 1))))
        busy = bins.bins["busy_ns"] / bins.bin_ns
        spans = bins.bins.select(
            pl.col("class"),
            busy=busy,
            stream=lanes[bins.bins["lane"]],
            start_ns=pl.col("bin") * bins.bin_ns,
            end=(pl.col("bin") + 1) * bins.bin_ns,
            busy_ns="busy_ns",
            note=pl.format("{} % busy, most of it {}", (100 * busy).round().cast(pl.Int64), texts[bins.bins["name"]]),
        )
    series = tuple(
        Series(name, "span", spans.filter(pl.col("class") == number).drop("class"), _CLASS_COLOURS[name])
        for number, name in enumerate(CLASSES)
    )
    counts = zip(names, overview.lanes["busy_ns"], strict=True)
    rows = {name: f"{format_ns(busy_ns)} busy" for name, busy_ns in counts}
    time = Axis("start_ns", "since the first activity", "ns")
    return Chart("Streams over time", series, time, Axis("stream", scale="rows"), "\n".join(overview.notes), rows)


def roofline_chart(roofline: Roofline) -> Chart:
    """FLOP/s against arithmetic intensity, both logarithmic: a dot for each place with FLOP and bytes, and rooflines.

    A roofline rises with the memory's bandwidth up to the peak of a data type.
    """
    points = roofline.rows.filter(pl.col("intensity") > 0, pl.col("tflops") > 0).head(_MAX_POINTS)
    if points.is_empty() or not roofline.peaks:
        return Chart("Roofline", (), Axis("intensity", "FLOP / byte"), Axis("tflops", "TFLOP/s"))
    peaks = roofline.peaks[0][2]
    names = _cut(points["name"])
    with_flop = pl.col("flop_share") * pl.col("total_ns")
    data = points.select(
        "bound", "intensity", "tflops", "total_ns", "flop_share", "peak_share",
        name=names, area=with_flop / points.select(with_flop.max()).item(),
        note=pl.format(
            "{}\n{} ms of {} ms have known FLOP\n{} % of the roofline", names, (with_flop / 1e6).round(3),
            (pl.col("total_ns") / 1e6).round(3), (100 * pl.col("peak_share")).round(1),
        ),
    )  # fmt: skip
    series = [*_roofs(roofline, peaks, data["intensity"])]
    series += [
        Series(f"{bound} bound", "dot", part.drop("bound"), _BOUND_COLOURS.get(str(bound), NEUTRAL))
        for (bound,), part in data.group_by(["bound"], maintain_order=True)
    ]
    alone = roofline.rows.filter(pl.col("bytes").is_not_null(), pl.col("flop").is_null())
    share = int(alone["total_ns"].sum()) / max(int(roofline.rows["total_ns"].sum()), 1)
    caption = (
        f"A dot is the work of a {roofline.heading} with known FLOP and bytes, its size the time of that work. Lines "
        f"are what {peaks.device} allows ({peaks.source})."
    )
    if share:
        caption += f" Rows with bytes alone, {format_share(share, 1)} of the GPU time, are in the table."
    return Chart(
        "Roofline",
        tuple(series),
        Axis("intensity", "arithmetic intensity, FLOP per byte of memory traffic", "count", "log"),
        Axis("tflops", "TFLOP/s", "count", "log"),
        caption,
    )


def memory_chart(memory: MemoryOverTime) -> Chart:
    """What a device's memory held over time, by place, as stacked areas."""
    colours = iter(COLOURS)
    series = []
    for name in memory.names:
        points = memory.points.filter(pl.col("name") == name).drop("name")
        colour = NEUTRAL if name == memory.before else next(colours, NEUTRAL)
        series.append(Series(_cut(pl.Series([name]))[0], "area", points, colour))
    caption = (
        f"Memory that was handed out on {memory.where}, by {memory.by}. The bytes of all areas add up to what the "
        "allocator states."
    )
    return Chart("Memory over time", tuple(series), Axis("time", "time", "ns"), Axis("bytes", "live", "bytes"), caption)


def _roofs(roofline: Roofline, peaks: Peaks, intensity: pl.Series) -> Iterator[Series]:
    """A line for each data type with FLOP: bandwidth x intensity, at most its peak."""
    known = [(dtype, peaks.tflops[dtype]) for dtype in roofline.dtypes if dtype in peaks.tflops]
    if peaks.gbps is None or not known:
        return
    ridges = [1e3 * tflops / peaks.gbps for _, tflops in known]
    low = min(float(intensity.min()), min(ridges) / 10)  # type: ignore[arg-type] # numbers
    high = max(float(intensity.max()), 3 * max(ridges))  # type: ignore[arg-type]
    for number, ((dtype, tflops), ridge) in enumerate(zip(known, ridges, strict=True)):
        corners = [low, ridge, high]
        line = pl.DataFrame({"intensity": corners, "tflops": [low * peaks.gbps / 1e3, tflops, tflops]})
        yield Series(f"{dtype}: {tflops:,.0f} TFLOP/s", "line", line, (NEUTRAL, _BROWN, _VIOLET, _LILAC)[number % 4])


def groups_chart(streams: Streams) -> Chart:
    """Time of each stream by group of kernels."""
    lanes = streams.streams.sort("busy_ns", descending=True).head(_MAX_BARS)
    kept = lanes.select("rank", "device", "stream").sort("rank", "device", "stream")
    rows = streams.rows.join(kept, on=["rank", "device", "stream"], how="semi", nulls_equal=True)
    data = pl.DataFrame(
        {
            "stream": [stream_name(*key) for key in rows.select("rank", "device", "stream").rows()],
            "group": rows["group"].cast(pl.String),
            "total_ns": rows["total_ns"],
        }
    )
    series = tuple(
        Series(group, "bar", data.filter(group=group).drop("group"), _GROUP_COLOURS.get(group, _colour(number)))
        for number, group in enumerate(data["group"].unique(maintain_order=True))
    )
    totals = data.group_by("stream").agg(pl.col("total_ns").sum())
    sums = dict(totals.rows())
    names = [stream_name(*key) for key in kept.rows()]
    texts = {name: format_ns(sums.get(name, 0)) for name in names}
    time = Axis("total_ns", "sum of durations", "ns")
    return Chart("Time of each stream by group of kernels", series, time, Axis("stream", scale="rows"), rows=texts)


def concurrency_chart(streams: Streams) -> Chart:
    """How long exactly one, two, three or more streams of each device were busy."""
    devices = [device for device in streams.concurrency if device.busy_streams_ns][:_MAX_BARS]
    names = [f"rank {device.rank} GPU {device.device}" for device in devices]
    counted = [(*device.busy_streams_ns, 0, 0, 0) for device in devices]
    parts: tuple[tuple[str, Iterable[int], str], ...] = (
        ("1 stream", (c[0] for c in counted), _TEAL),
        ("2 streams", (c[1] for c in counted), _BLUE),
        ("3 or more", (sum(c[2:]) for c in counted), _LILAC),
    )
    series = tuple(
        Series(name, "bar", pl.DataFrame({"device": names, "total_ns": list(values)}, _NAMED), colour)
        for name, values, colour in parts
    )
    time = Axis("total_ns", "time in which so many streams were busy", "ns")
    return Chart("Streams busy at once", series, time, Axis("device", scale="rows"))


_NAMED = {"device": pl.String, "total_ns": pl.Int64}


def bandwidth_chart(collectives: Collectives) -> Chart:
    """Bus bandwidth against message size: a dot for each transfer, and lines through the medians.

    If no transfer is known, the dots are whole kernels and the lines go through their means. The caption states which
    it is.
    """
    transfers = collectives.instances["transfer_bus_gbps"].count() > 0
    column, middle = ("transfer_bus_gbps", "transfer_bus_gbps_median") if transfers else ("bus_gbps", "bus_gbps_mean")
    dots = collectives.instances if transfers else collectives.rows.filter("described")
    points = dots.filter(pl.col("bytes") > 0, pl.col(column) > 0).with_columns(pl.col(column).round(3))
    sizes = collectives.by_size.filter(pl.col("bytes") > 0, pl.col(middle) > 0)
    count, what = ("transfers", "transfers") if transfers else ("count", "kernels")
    lines = sizes.select(
        *_KEYS, "bytes", pl.col(middle).round(3).alias(column), count, note=pl.format(f"{{}} {what}", count)
    )
    caption = (
        "Bus bandwidth: a dot is the transfer of one collective, a line goes through the medians of the dots."
        if transfers
        else "Bus bandwidth: no transfer is known here; a dot is one whole kernel, which contains its wait for other "
        "ranks, and a line goes through the means of the dots."
    )
    of_what = "of transfers" if transfers else "of whole kernels, with waits"
    return Chart(
        "Bus bandwidth against message size",
        _dots_and_lines(points, lines, column),
        Axis("bytes", "message size", "bytes", "log"),
        Axis(column, f"bus bandwidth {of_what}, GB/s", "GB/s"),
        caption,
    )


def waits_chart(collectives: Collectives) -> Chart:
    """How long each kind of collective waited for its last device to start: quartiles and extremes."""
    waits = collectives.instances.filter(pl.col("wait_ns").is_not_null())
    columns = {"low": 0, "q1": 0.25, "median": 0.5, "q3": 0.75, "high": 1}
    groups = waits.group_by("collective").agg(
        pl.len().alias("count"),
        *(pl.col("wait_ns").quantile(part, "linear").alias(name) for name, part in columns.items()),
    )
    groups = groups.sort("collective").with_columns(pl.col("collective").cast(pl.String))
    counts = groups.select("collective", "count").rows()
    series = tuple(
        Series(str(name), "box", groups.filter(collective=name), _colour(number))
        for number, (name, _) in enumerate(counts)
    )
    return Chart(
        "Wait for the last device",
        series,
        Axis("wait_ns", "wait for the last to start", "ns"),
        Axis("collective", scale="rows"),
        "A box is from the lower to the upper quartile, with a line at the median; a line reaches from the least to "
        "the largest wait.",
        {str(name): f"{format_count(count)} collectives" for name, count in counts},
    )


def wait_histogram_chart(collectives: Collectives) -> Chart:
    """A histogram of the waits: the number of collectives in each range of waits."""
    rows = wait_histogram(collectives.instances)
    series = tuple(
        Series(str(kind), "column", part.select(from_ns="from_ns", end="to_ns", count="count"), _colour(number))
        for number, ((kind,), part) in enumerate(rows.group_by(["collective"], maintain_order=True))
    )
    waits = Axis("from_ns", "wait for the last to start", "ns", "log")
    caption = "The first column has all waits below its end." if not rows.is_empty() and rows["from_ns"][0] == 0 else ""
    return Chart("How many waited for how long", series, waits, Axis("count", "collectives", "count"), caption)


def wait_sizes_chart(collectives: Collectives) -> Chart:
    """The wait of each collective against the size of its message, and a line through the means."""
    points = collectives.instances.filter(pl.col("bytes") > 0, pl.col("wait_ns").is_not_null())
    without = int((points["wait_ns"] == 0).sum())
    means = collectives.by_size.filter(pl.col("bytes") > 0, pl.col("wait_ns_mean") > 0).sort(*_KEYS, "bytes")
    lines = means.select(
        *_KEYS,
        "bytes",
        pl.col("wait_ns_mean").alias("wait_ns"),
        "instances",
        note=pl.format("mean of {} collectives", "instances"),
    )
    caption = "A dot is one collective, a line goes through the means."
    if without:
        caption += f" {format_count(without)} collectives without any wait are in the means alone."
    return Chart(
        "Wait against message size",
        _dots_and_lines(points.filter(pl.col("wait_ns") > 0), lines, "wait_ns"),
        Axis("bytes", "message size", "bytes", "log"),
        Axis("wait_ns", "wait for the last to start", "ns", "log"),
        caption,
    )


def last_arrivals_chart(collectives: Collectives) -> Chart:
    """For each device, how long the others waited when it arrived last; and the waits that no device caused."""
    rows = with_device_names(collectives.last_arrivals.head(_MAX_BARS))
    notes = [
        f"{format_count(last)} collectives" if all_ is None else f"arrived last in {last} of {all_} collectives"
        for last, all_ in rows.select("last", "instances").rows()
    ]
    data = rows.select("who", "waited_ns", "last", "instances").with_columns(note=pl.Series(notes, dtype=pl.String))
    time = Axis("waited_ns", "time that the others waited", "ns")
    return Chart("Last arrivals", (Series("waited", "bar", data, _ORANGE),), time, Axis("who", scale="rows"))


def programs_chart(programs: Programs) -> Chart:
    """Busy and idle time of each large program, and the idle time before its executions; one bar for the rest."""
    count = min(programs.large, _MAX_BARS)
    rows, rest = programs.programs.head(count), programs.programs.slice(count)
    names = distinct(rows["name"])
    if not rest.is_empty():
        names = [*names, f"{format_count(rest.height)} more"]
    parts = (
        ("busy", "busy_ns_total", _BLUE),
        ("idle inside", "idle_inside_ns", _ORANGE),
        ("idle between", "idle_between_ns", NEUTRAL),
    )
    series = tuple(
        Series(
            name,
            "bar",
            pl.DataFrame(
                {"program": names, "total_ns": [*rows[column].fill_null(0), int(rest[column].sum())][: len(names)]}
            ),
            colour,
        )
        for name, column, colour in parts
    )
    time = Axis("total_ns", "time of all executions", "ns")
    return Chart("Busy and idle time of each program", series, time, Axis("program", scale="rows"))


def compile_chart(compilation: Compilation) -> Chart:
    """Compile time by phase."""
    rows = compilation.phases.head(_MAX_BARS)
    names = distinct(rows["name"])
    data = pl.DataFrame({"phase": names, "self_ns": rows["self_ns"]})
    texts = dict(zip(names, _with_shares(rows["self_ns"], compilation.wall_ns), strict=True))
    time = Axis("self_ns", "wall time", "ns")
    series = (Series("wall time", "bar", data, _LILAC),)
    return Chart("Compile time by phase", series, time, Axis("phase", scale="rows"), rows=texts)


def spread_chart(spread: pl.DataFrame) -> Chart:
    """Relative spread against mean duration of each computation that ran more than once."""
    rows = spread.filter(pl.col("count") > 1, pl.col("spread").is_not_null(), pl.col("mean_ns") > 0)
    rows = rows.with_columns(total=pl.col("mean_ns") * pl.col("count")).sort("total", descending=True)
    data = rows.head(_MAX_POINTS).select(
        "operation",
        "count",
        "mean_ns",
        "spread",
        area=pl.col("total") / pl.col("total").max(),
        note=pl.format("{}\n{} times", _cut(rows["operation"].head(_MAX_POINTS)), "count"),
    )
    return Chart(
        "Spread of durations of the same computation",
        (Series("computation", "dot", data),),
        Axis("mean_ns", "mean duration", "ns", "log"),
        Axis("spread", "standard deviation, part of the mean", "share"),
        "The area of a point is the total time of the computation.",
    )


def stream_name(rank: int, device: int, stream: int | None) -> str:
    """The name of a stream; ``stream`` is None if the trace does not record streams."""
    return f"rank {rank} GPU {device}: " + ("all streams" if stream is None else f"stream {stream}")


def distinct(names: Iterable[str]) -> list[str]:
    """Names of rows, each different, because equal names would share a bar."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return result


_KEYS = ("collective", "group_size")


def _dots_and_lines(points: pl.DataFrame, lines: pl.DataFrame, column: str) -> tuple[Series, ...]:
    """For each collective and size of its group the dots, unless there are too many, and a line."""
    series = []
    for number, (key, rows) in enumerate(lines.group_by(_KEYS, maintain_order=True)):
        name = f"{key[0]} of {key[1]}" if key[1] else str(key[0])
        if points.height <= _MAX_POINTS:
            same = pl.all_horizontal(pl.col(k).eq_missing(pl.lit(v)) for k, v in zip(_KEYS, key, strict=True))
            series.append(Series(name, "dot", points.filter(same).select("bytes", column), _colour(number)))
        series.append(Series(name, "line", rows.drop(_KEYS), _colour(number)))
    return tuple(series)


def _cut(names: pl.Series) -> pl.Series:
    return names.cast(pl.String).str.slice(0, _MAX_NAME)


def _with_shares(times: pl.Series, whole: int) -> list[str]:
    return [f"{format_ns(ns)}, {format_share(ns, whole)}" for ns in times]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
