"""A timeline of limited size: every stream of every device in a bounded number of bins.

In this module, a lane is one stream. If activities of one stream overlap, the time belongs to the activity
that started first, so the busy time of a lane's bins adds up to the busy time of the stream (interval
union). All times are relative to the first activity, on one clock if the ranks' clocks could be aligned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.grouping.kernel_groups import COMMUNICATION, Patterns, kernel_groups
from thence.analysis.no_device_work import no_device_work
from thence.model.intervals import reached_before
from thence.model.kernel_names import short_names
from thence.model.tables import copies_or_sets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.model.attributed import Attributed
    from thence.units import Ns


CLASSES = ("computation", "communication", "memcpys and memsets")
"""Classes of slices and bins; a bin has the class of the activity that took most of it."""

MAX_SLICES = 12_000
"""Traces with at most this many activities keep each activity as a slice."""
MAX_BINS = 2_000
"""Maximum number of bins per lane."""
_MAX_CELLS = 32_000  # bins of all lanes together, as long as each has the least number
_MIN_BINS = 200
_MAX_LANES = 160
_MAX_NAME_LENGTH = 160
_LANE = ("rank", "device", "stream")
_SHOWN = ("class", "name", "label")
_NO_PATTERNS = Patterns()

_STATED = 16  # ranks whose offset a note states


@dataclass(frozen=True)
class Overview:
    """A timeline of limited size. All times are ns after ``start_ns``.

    Attributes:
        start_ns: start of the first activity on the trace's clock, aligned if alignment was possible.
        span_ns: from start_ns to the end of the last activity, over all ranks.
        bin_ns: width of a bin.
        bin_count: number of bins of each lane.
        lanes: one row per stream: lane (number), rank, device, stream (null if the trace does not name
            it), count, busy_ns.
        bins: one row per bin in which anything ran: lane, bin, busy_ns (at most bin_ns), and of the
            activity that took most of it: class (index in `CLASSES`), name and label (indices in
            ``names``; label is null if there is none).
        slices: one row per activity: lane, start, duration, class, name, label; empty if there are more
            than `MAX_SLICES`.
        names: texts, shortened.
        notes: remarks to be shown with the timeline, one sentence each.
    """

    start_ns: Ns
    span_ns: Ns
    bin_ns: Ns
    bin_count: int
    lanes: pl.DataFrame
    bins: pl.DataFrame
    slices: pl.DataFrame
    names: tuple[str, ...]
    notes: tuple[str, ...]

    def coarser(self, most_bins: int) -> Overview:
        """Merges bins until each lane has at most ``most_bins``; each is named after its largest part."""
        factor = -(-self.bin_count // max(most_bins, 1))
        if factor <= 1:
            return self
        bins = (
            self.bins.with_columns(pl.col("bin") // factor)
            .sort("lane", "bin", "busy_ns", maintain_order=True)
            .group_by("lane", "bin", maintain_order=True)
            .agg(pl.col("busy_ns").sum(), *(pl.col(c).last() for c in _SHOWN))
        )
        count = -(-self.bin_count // factor)
        return dataclasses.replace(self, bin_ns=self.bin_ns * factor, bin_count=count, bins=bins)


def overview(trace: Attributed, alignment: Alignment | None = None) -> Overview:
    """Computes the overview of a trace.

    Args:
        alignment: corrections that align the ranks' clocks; None leaves all times as recorded.

    Raises:
        MissingData: the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        raise no_device_work(trace)
    activities = shown_activities(trace, alignment)
    start = int(activities.select(pl.col("start").min()).item())
    activities = activities.with_columns(pl.col("start") - start)
    span = int(activities.select((pl.col("start") + pl.col("duration")).max()).item())
    lanes, rows, notes = numbered_lanes(activities)
    count = min(MAX_BINS, max(_MIN_BINS, _MAX_CELLS // max(lanes.height, 1)))
    width = max(1, -(-span // count))
    count = max(1, -(-span // width))
    pieces = clipped(rows)
    busy = pieces.group_by("lane").agg(busy_ns=pl.col("duration").sum())
    few = rows.height <= MAX_SLICES
    if not few:
        notes.append(
            f"{rows.height:,} activities are shown in bins of {width:,} ns; each bin has the colour and "
            "name of the activity that took most of it"
        )
    bins, slices, names = _named(_bins(pieces, width), rows if few else rows.clear())
    lanes = lanes.join(busy, on="lane", how="left", maintain_order="left").with_columns(pl.col("busy_ns").fill_null(0))
    notes += clock_notes(trace, alignment)
    return Overview(start, span, width, count, lanes, bins, slices, names, tuple(notes))


def clock_notes(trace: Attributed, alignment: Alignment | None) -> list[str]:
    """A note on the ranks' clocks, as a list of one sentence or none."""
    if alignment is not None and alignment.applied:
        return [f"{alignment.statement}; shifted: {_offsets(alignment)}"]
    if alignment is not None:
        return [alignment.statement]
    if len(trace.ranks) > 1:
        return ["the ranks share no collectives, so their clocks are shown as recorded"]
    return []


def _offsets(alignment: Alignment) -> str:
    """A text on how much each rank was moved; of many ranks, the first ones."""
    moved = alignment.corrections.drop_nulls("correction_ns").select("rank", "correction_ns")
    parts = [f"rank {rank} by {-ns:+,} ns" for rank, ns in moved.head(_STATED).iter_rows()]
    if moved.height > _STATED:
        parts.append(f"and {moved.height - _STATED:,} more, which thence convert lists")
    return ", ".join(parts)


def shown_activities(trace: Attributed, alignment: Alignment | None) -> pl.DataFrame:
    """One row per row of gpu, in its order: rank, device, stream, start, duration, class, name and label.

    The stream is null if the trace does not name it; times are on the aligned clock.
    """
    group = kernel_groups(trace, _NO_PATTERNS)
    communication = group.cast(pl.String) == COMMUNICATION
    copies = copies_or_sets(trace.gpu)
    shift = alignment.shift() if alignment else pl.lit(0)
    recorded_stream = pl.when(pl.col("kind") != "thunk").then("stream")
    return trace.gpu.select(
        "rank",
        "device",
        recorded_stream.alias("stream"),
        (pl.col("start") - shift).alias("start"),
        "duration",
        pl.when(copies).then(2).when(communication).then(1).otherwise(0).alias("class"),
        pl.coalesce(pl.col("hlo").cast(pl.String), pl.col("name").cast(pl.String)).cast(pl.Categorical()).alias("name"),
    ).with_columns(trace.places["label"].cast(pl.Categorical()).alias("label"))


def numbered_lanes(activities: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, list[str]]:
    """The numbered lanes, the activities in them by lane and start, and notes on omitted streams."""
    counted = activities.group_by(_LANE).agg(count=pl.len().cast(pl.Int64), total=pl.col("duration").sum())
    notes = []
    if counted.height > _MAX_LANES:
        left = counted.height - _MAX_LANES
        whole = int(counted["total"].sum())
        counted = counted.sort("total", *_LANE, descending=[True, False, False, False])
        counted = counted.head(_MAX_LANES)
        share = 1 - int(counted["total"].sum()) / max(whole, 1)
        notes.append(
            f"{left:,} of {left + _MAX_LANES:,} streams, those with the least time ({100 * share:.2g} % "
            "of it), are not drawn"
        )
    lanes = counted.sort(_LANE).drop("total").with_row_index("lane")
    rows = activities.join(lanes.select("lane", *_LANE), on=_LANE, how="inner", nulls_equal=True).drop(_LANE)
    return lanes, rows.sort("lane", "start", maintain_order=True), notes


def clipped(rows: pl.DataFrame) -> pl.DataFrame:
    """Clips activities so that none overlaps an earlier one on its lane; drops empty ones."""
    start = rows["start"].to_numpy()
    end = start + rows["duration"].to_numpy()
    fresh = np.maximum(start, reached_before(end, rows["lane"].cast(pl.Int64).to_numpy()))
    return rows.with_columns(start=pl.Series(fresh), duration=pl.Series(end - fresh)).filter(pl.col("duration") > 0)


def _bins(pieces: pl.DataFrame, width: Ns) -> pl.DataFrame:
    """Busy time of each bin, and the class, name and label of the activity that took most of it."""
    start = pieces["start"].to_numpy()
    end = start + pieces["duration"].to_numpy()
    first, last = start // width, (end - 1) // width
    # The pieces of a lane do not overlap, so there are fewer parts than pieces and bins combined.
    parts = (last - first + 1).astype(np.int64)
    row = np.repeat(np.arange(len(start)), parts)
    number = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts) + first[row]
    inside = np.minimum(end[row], (number + 1) * width) - np.maximum(start[row], number * width)
    spread = pieces.select("lane", "class", "name", "label")[row].with_columns(
        bin=pl.Series(number, dtype=pl.Int64), ns=pl.Series(inside, dtype=pl.Int64)
    )
    by_name = spread.group_by("lane", "bin", "class", "name").agg(
        pl.col("ns").sum(), label=pl.col("label").sort_by("ns").last()
    )
    largest = by_name.filter(pl.col("ns") == pl.col("ns").max().over("lane", "bin"))
    busy = by_name.group_by("lane", "bin").agg(busy_ns=pl.col("ns").sum())
    return (
        largest.sort("lane", "bin", pl.col("name").cast(pl.String))  # the name decides between ties
        .unique(("lane", "bin"), keep="first", maintain_order=True)
        .join(busy, on=["lane", "bin"], how="left", maintain_order="left")
        .select("lane", "bin", "busy_ns", *_SHOWN)
    )


def _named(bins: pl.DataFrame, slices: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, tuple[str, ...]]:
    """Replaces names and labels by indices into a list of shortened texts."""
    kernels = _texts(bins, slices, "name")
    labels = _texts(bins, slices, "label")
    short: Mapping[str, str] = short_names(kernels)
    texts = dict.fromkeys([*(short[k][:_MAX_NAME_LENGTH] for k in kernels), *_cut(labels)])
    number = {text: i for i, text in enumerate(texts)}
    of_kernel = {k: number[short[k][:_MAX_NAME_LENGTH]] for k in kernels}
    of_label = dict(zip(labels, (number[text] for text in _cut(labels)), strict=True))

    def numbered(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns(
            pl.col("name").cast(pl.String).replace_strict(of_kernel, return_dtype=pl.Int64),
            pl.col("label").cast(pl.String).replace_strict(of_label, default=None, return_dtype=pl.Int64),
        )

    return numbered(bins), numbered(slices), tuple(texts)


def _texts(bins: pl.DataFrame, slices: pl.DataFrame, column: str) -> list[str]:
    both = pl.concat([bins[column].unique().cast(pl.String), slices[column].unique().cast(pl.String)])
    return both.drop_nulls().unique().sort().to_list()


def _cut(labels: list[str]) -> list[str]:
    return [label[-_MAX_NAME_LENGTH:] for label in labels]
