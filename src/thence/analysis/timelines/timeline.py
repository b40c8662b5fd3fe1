"""Prepares a trace for timeline viewers: aligns the ranks' clocks, computes counters, assigns lanes.

The writers of timelines only encode the result.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.answer import collectives
from thence.analysis.counters import tracks as counter_tracks
from thence.analysis.programs.warmup import WarmUp
from thence.attribution.work.activity_work import activity_work
from thence.model.collective_kinds import kind_of
from thence.model.columns import values_or
from thence.model.intervals import levels, unions
from thence.model.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.model.attributed import Attributed

COUNTERS = {
    "busy streams": "streams",
    "bytes in flight": "bytes",
    "collective bus bandwidth": "GB/s",
    "FLOP rate": "TFLOP/s",
    "memory traffic": "GB/s",
    "allocated memory": "bytes",
    "reserved memory": "bytes",
    **counter_tracks.UNITS,
}
"""Counters of each device, with their units. Busy streams: number of streams that run something. Bytes in
flight: bytes of the running memcpys and memsets, and message sizes of the running collectives. Bus bandwidth: sum of
the mean bus bandwidths of the running collectives (see `thence.analysis.collectives.answer`). FLOP rate and
memory traffic: sums of the mean rates of the running kernels whose FLOP and bytes are known
(`thence.attribution.work`). Allocated and reserved memory: what the allocator had handed out, and what it held of the
device. Counted ...: rates of hardware counters (`thence.analysis.counters.tracks`)."""

_KEY = ("rank", "device")
_MAX_NAMES = 3  # maximum number of mark names after the number of a lane
_COUNTERS_SCHEMA = {"rank": pl.Int32, "device": pl.Int32, "counter": pl.String, "time": pl.Int64, "value": pl.Float64}


def timeline(
    trace: Attributed, lanes: Sequence[str] = (), alignment: Alignment | None = None, spans: pl.DataFrame | None = None
) -> Timeline:
    """The timeline of a trace.

    Args:
        lanes: kinds of `thence.model.places.LANES` by which activities are shown again in extra rows.
        alignment: corrections that align the ranks' clocks; None leaves all times as recorded.
        spans: additional tracks, as in `Timeline.spans`, on the clocks of the trace.
    """
    moved, corrections, notes = _on_one_clock(trace, alignment)
    return Timeline(
        moved,
        counters(moved),
        {kind: _lane_names(kind, moved) for kind in lanes},
        corrections,
        notes,
        spans=_spans(spans, alignment if corrections else None),
    )


def _spans(spans: pl.DataFrame | None, alignment: Alignment | None) -> pl.DataFrame | None:
    """Spans on the clock of the timeline."""
    if spans is None or alignment is None:
        return spans
    return spans.with_columns(start=pl.col("start") - alignment.shift())


def _on_one_clock(trace: Attributed, alignment: Alignment | None) -> tuple[Attributed, dict[int, int], tuple[str, ...]]:
    """The trace with each rank's correction subtracted from all its times; durations do not change.

    Returns:
        The trace, the corrections in ns by rank, and notes on the ranks that were shifted and on those that
        could not be aligned.
    """
    if alignment is None:
        return trace, {}, ()
    aligned = alignment.corrections.drop_nulls("correction_ns")
    corrections = {rank: ns for rank, ns in aligned.select("rank", "correction_ns").rows() if ns}
    notes = [
        f"rank {rank}: all times shifted by {-ns:+,} ns, so that the ends of shared collectives agree"
        for rank, ns in aligned.select("rank", "correction_ns").rows()
        if corrections
    ]
    if corrections:
        notes.append("durations are as recorded; --clocks recorded keeps all times as recorded")
    unknown = alignment.corrections.filter(pl.col("correction_ns").is_null())["rank"].to_list()
    if unknown:
        ranks = ", ".join(map(str, unknown))
        notes.append(f"rank {ranks}: no collective shared with another rank; times as recorded")
    if aligned["cluster"].n_unique() > 1:
        notes.append("the ranks form groups that share no collective: clocks are aligned only within each group")
    if not corrections:
        return trace, {}, tuple(notes)
    shift = alignment.shift()

    def moved(frame: pl.DataFrame) -> pl.DataFrame:
        times = [column for column in ("start", "launch", "end") if column in frame.columns]
        return frame.with_columns(pl.col(times) - shift)

    on_one = dataclasses.replace(
        trace,
        gpu=moved(trace.gpu),
        host=moved(trace.host),
        programs=moved(trace.programs),
        memory=moved(trace.memory),
        memory_totals=moved(trace.memory_totals),
        memory_failures=moved(trace.memory_failures),
        counters=moved(trace.counters),
    )
    return on_one, corrections, tuple(notes)


def _lane_names(kind: str, trace: Attributed) -> pl.Series:
    """The name of the viewer row ("lane") of each row of gpu; null if it has none."""
    if kind in trace.places.columns and kind != "lane":
        return trace.places[kind]
    group = pl.coalesce(
        pl.concat_str(
            pl.col("group_name").cast(pl.String), pl.lit(" ("), pl.col("group_description").cast(pl.String), pl.lit(")")
        ),
        pl.col("group_name", "group_description", "group_ranks").cast(pl.String),
    )
    name = kind_of(pl.col("collective")) if kind == "collective" else group
    described = trace.collectives.select("gpu", name=name).unique("gpu", keep="first")
    rows = pl.DataFrame({"gpu": pl.int_range(trace.gpu.height, dtype=pl.Int32, eager=True)})
    joined = rows.join(described, on="gpu", how="left", maintain_order="left")
    if kind != "lane":
        return joined["name"].cast(pl.Categorical())
    named = _named_by_marks(trace.places["lane"], trace.places["label"])
    marked = joined.with_columns(lane=named)
    return marked.select(pl.coalesce("lane", "name")).to_series().cast(pl.Categorical())


def _named_by_marks(lanes: pl.Series, labels: pl.Series) -> pl.Series:
    """Lanes as text; a lane that is only a number is followed by the labels on it: ``62 (attention)``."""
    lane, label = pl.col("lane"), pl.col("label")
    pairs = pl.DataFrame({"lane": lanes, "label": labels}).unique(maintain_order=True)
    innermost = label.cast(pl.String).str.split("/").list.last()
    names = (
        pairs.select(lane.cast(pl.String), innermost)
        .filter(lane.str.contains(r"^\d+$"), label.is_not_null())
        .unique(maintain_order=True)
        .group_by("lane", maintain_order=True)
        .agg(label.head(_MAX_NAMES).str.join(", "), more=pl.len() > _MAX_NAMES)
        .with_columns(
            name=pl.format("{} ({}{})", lane, label, pl.when("more").then(pl.lit(", ...")).otherwise(pl.lit("")))
        )
    )
    return lanes.cast(pl.String).replace(names["lane"], names["name"])


def counters(trace: Attributed) -> pl.DataFrame:
    """The counters of every device.

    Returns:
        rank, device, counter, time (ns), value (Float64): one row for each change of a value, sorted by the other
        columns.
    """
    gpu = trace.gpu.select(*_KEY, "stream", "start", "bytes", end=pl.col("start") + pl.col("duration"))
    sizes = trace.collectives.select("gpu", size="bytes").drop_nulls()
    moved = np.array(values_or(gpu["bytes"], 0))
    np.add.at(moved, sizes["gpu"].to_numpy(), sizes["size"].to_numpy())
    frames = [
        _steps("busy streams", _busy(gpu)),
        _steps("bytes in flight", gpu.with_columns(value=moved).filter(pl.col("value") > 0)),
    ]
    if trace.collectives.height:
        rows = collectives(trace, WarmUp.KEEP).rows.drop_nulls("bus_gbps")
        running = rows.select(*_KEY, "start", end=pl.col("start") + pl.col("duration_ns"), value="bus_gbps")
        frames.append(_steps("collective bus bandwidth", running))
    work = activity_work(trace).select("flop", traffic="bytes")
    for counter, column, unit in (("FLOP rate", "flop", 1e3), ("memory traffic", "traffic", 1.0)):
        rate = work[column] / trace.gpu["duration"] / unit  # per ns: 10^9 per s
        ran = pl.col("bytes").is_null() & (pl.col("end") > pl.col("start"))
        known = gpu.with_columns(value=rate).filter(ran, pl.col("value") > 0)
        frames.append(_steps(counter, known))
    frames += [_memory(trace, name) for name in ("allocated", "reserved")]
    frames.append(counter_tracks.counter_tracks(trace))
    return pl.concat(frames).sort(*_KEY, "counter", "time")


def _memory(trace: Attributed, column: str) -> pl.DataFrame:
    """What the allocators of devices stated; of several changes at one time the last."""
    known = trace.memory_totals.drop_nulls(["device", column])
    stated = known.unique([*_KEY, "start"], keep="last", maintain_order=True)
    values = stated.select(
        *_KEY, counter=pl.lit(f"{column} memory"), time="start", value=pl.col(column).cast(pl.Float64)
    )
    key = pl.struct(*_KEY)
    changes = ((pl.col("value") != pl.col("value").shift()) | (key != key.shift())).fill_null(value=True)
    return values.filter(changes)


def _busy(gpu: pl.DataFrame) -> pl.DataFrame:
    """Busy intervals of each stream: overlapping and touching activities merged (interval union)."""
    lane = (*_KEY, "stream")
    ordered = gpu.sort(*lane)
    number = ordered.select(pl.struct(*lane).rle_id().cast(pl.Int64)).to_series().to_numpy()
    lane_number, start, end = unions(number, ordered["start"].to_numpy(), ordered["end"].to_numpy())
    lanes = ordered.select(*lane).unique(maintain_order=True)
    return lanes.select(*_KEY)[lane_number].with_columns(start=pl.Series(start), end=pl.Series(end), value=pl.lit(1))


def _steps(counter: str, intervals: pl.DataFrame) -> pl.DataFrame:
    """A step function: the sum of the values of all open intervals, one row per change."""
    parts = [pl.DataFrame(schema=_COUNTERS_SCHEMA)]
    for (rank, device), device_rows in intervals.group_by(*_KEY, maintain_order=True):
        start, end = device_rows["start"].to_numpy(), device_rows["end"].to_numpy()
        time, _, value = levels(start, end, device_rows["value"].cast(pl.Float64).to_numpy())
        _, _, lasting = levels(start, end, np.ones(device_rows.height, np.int64))
        # Float sums may not return to exactly 0 by themselves; set 0 where no interval is open.
        value = np.append(np.where(lasting > 0, value, 0.0), 0.0)
        changed = np.ones(len(value), np.bool_)
        changed[1:] = value[1:] != value[:-1]
        steps = pl.DataFrame({"time": np.append(time, end.max())[changed], "value": value[changed]})
        parts.append(
            steps.select(
                pl.lit(rank, pl.Int32).alias("rank"),
                pl.lit(device, pl.Int32).alias("device"),
                pl.lit(counter).alias("counter"),
                "time",
                "value",
            )
        )
    return pl.concat(parts)
