"""A timeline of single activities and gaps, with details and causes, that can be made coarser to limit its size.

A lane is a stream. If a timeline may have fewer rows than there are activities, short activities near each other on
a lane are merged into one row, which holds their count; long activities keep rows of their own. The busy time of a
row is the union of its activities. Gaps are idle times of whole devices, not of single streams.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_causes import REASONS
from thence.analysis.no_device_work import no_device_work
from thence.analysis.timelines.activity_details import LONGEST_TEXT, MOST_TEXTS, activity_details
from thence.analysis.timelines.overview import clipped, clock_notes, numbered_lanes, shown_activities
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.timelines.activity_details import Details
    from thence.model.attributed import Attributed
    from thence.units import Ns

_MOST_PARTS = 3
"""How many causes of one gap have a part of their own; the rest of the gap is one more part."""
_SHORTEST_MERGED = 512  # ns: the first width that is tried
_SAID = ("name", "place", "step", "iteration")
_OF_ONE_ACTIVITY = ("call", "lead_ns", "call_ns")


@dataclass(frozen=True)
class ActivityTimeline:
    """A timeline of single activities. All times are ns after ``start_ns``.

    Attributes:
        start_ns: start of the first activity on the trace's clock, aligned if alignment was possible.
        span_ns: from start_ns to the end of the last activity, over all ranks.
        lanes: one row per stream: lane (number), rank, device, stream (null if the trace does not name it),
            count.
        rows: by lane and start: lane, start, duration, busy_ns (busy time in the row, less what an earlier row of
            the lane covers), count (number of its activities), class (index in
            `thence.analysis.timelines.overview.CLASSES`) and the columns of `Details.columns`; for several
            activities, those of the longest one, without its launch.
        gaps: by device and start: rank, device, start, duration, idle_ns (less than the duration if several gaps
            were merged), parts (number of its rows in ``parts``).
        parts: in the order of gaps: cause (index in ``causes``, the largest cause of a gap first; null for the
            rest of the gap), ns.
        causes: cause, kind of place, and name of the place (the latter two None without a place).
        details: the texts that rows refer to.
        notes: remarks to be shown with the timeline, one sentence each.
    """

    start_ns: Ns
    span_ns: Ns
    lanes: pl.DataFrame
    rows: pl.DataFrame
    gaps: pl.DataFrame
    parts: pl.DataFrame
    causes: tuple[tuple[str, str | None, str | None], ...]
    details: Details
    notes: tuple[str, ...]

    def coarser(self, most_rows: int) -> ActivityTimeline:
        """The timeline with short neighbours merged, so that it has at most ``most_rows`` rows and parts of gaps each.

        Rows of different lanes or devices are never merged, so there may be more rows if there are more of these.
        """
        return _fewer_gaps(_fewer_rows(self, most_rows), most_rows)


def activity_timeline(trace: Attributed, pieces: pl.DataFrame, alignment: Alignment | None = None) -> ActivityTimeline:
    """The timeline of a trace, with one row for each activity.

    Args:
        trace: the attributed trace.
        pieces: pieces of idle time with the places of their causes: `thence.analysis.idle.answer.IdleTime.pieces`.
        alignment: corrections that align the ranks' clocks; None leaves all times as recorded.

    Raises:
        MissingData: the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        raise no_device_work(trace)
    details = activity_details(trace)
    activities = shown_activities(trace, alignment).drop("name", "label").hstack(details.columns)
    begin = int(activities.select(pl.col("start").min()).item())
    activities = activities.with_columns(pl.col("start") - begin)
    span = int(activities.select((pl.col("start") + pl.col("duration")).max()).item())
    lanes, rows, notes = numbered_lanes(activities)
    numbered = rows.with_row_index("row")
    busy = clipped(numbered).select("row", busy_ns="duration")
    rows = numbered.join(busy, on="row", how="left", maintain_order="left").with_columns(
        pl.col("busy_ns").fill_null(0), count=pl.lit(1, pl.Int64)
    )
    gaps, parts, causes = _gaps(pieces, begin, alignment)
    notes += clock_notes(trace, alignment)
    return ActivityTimeline(begin, span, lanes, rows.drop("row"), gaps, parts, causes, details, tuple(notes))


# ---- Gaps


def _gaps(
    pieces: pl.DataFrame, begin: Ns, alignment: Alignment | None
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[tuple[str, str | None, str | None], ...]]:
    """`ActivityTimeline.gaps`, parts and causes."""
    shift = alignment.shift() if alignment else pl.lit(0)
    said = pieces.select(
        "rank", "device", "duration", "gpu", "name",
        start=pl.col("start") - shift - begin,
        cause=pl.col("cause").cast(pl.String),
        by=pl.when(pl.col("name").is_not_null()).then("by"),
    )  # fmt: skip
    touches = (pl.col("start") == (pl.col("start") + pl.col("duration")).shift(1)) & pl.all_horizontal(
        pl.col(key).eq_missing(pl.col(key).shift(1)) for key in ("rank", "device", "gpu")
    )  # fmt: skip
    said = said.with_columns(gap=(~touches.fill_null(value=False)).cum_sum() - 1)
    causes, numbered = _causes(said)
    gaps = numbered.group_by("gap", maintain_order=True).agg(
        pl.col("rank", "device", "start").first(), pl.col("duration").sum(), idle_ns=pl.col("duration").sum()
    )
    parts = numbered.select("gap", "cause", ns="duration")
    return *_with_parts(gaps.drop("gap"), parts), causes


def _causes(said: pl.DataFrame) -> tuple[tuple[tuple[str, str | None, str | None], ...], pl.DataFrame]:
    """The causes with their places, and the pieces with indices of causes.

    Of more than `MOST_TEXTS` causes, those with the least time are merged into one.
    """
    keys = ["cause", "by", "name"]
    found = said.group_by(keys).agg(pl.col("duration").sum())
    found = found.sort("duration", *keys, descending=[True, False, False, False])
    kept = found.head(MOST_TEXTS).drop("duration").with_row_index("number")
    numbered = said.join(kept, on=keys, how="left", nulls_equal=True, maintain_order="left")
    causes = [
        (cause, by, REASONS.get(name, name)[-LONGEST_TEXT:] if name else None)
        for cause, by, name in kept.select(keys).iter_rows()
    ]
    if left := found.height - kept.height:
        causes.append(("several", "place", f"one of {left:,} others, which took less time"))
    number = numbered["number"].fill_null(kept.height).cast(pl.Int32)
    return tuple(causes), said.with_columns(cause=number)


def _with_parts(gaps: pl.DataFrame, parts: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The gaps with the number of their parts, and the largest parts of each; the rest of a gap has no cause.

    Args:
        gaps: gaps in order.
        parts: gap (row in ``gaps``), cause, ns.
    """
    summed = parts.group_by("gap", "cause").agg(pl.col("ns").sum())
    summed = summed.sort("gap", "ns", "cause", descending=[False, True, False], nulls_last=True)
    counts = np.bincount(summed["gap"].to_numpy(), minlength=gaps.height)
    number = np.arange(summed.height) - np.repeat(np.cumsum(counts) - counts, counts)
    large = pl.Series(number < _MOST_PARTS)
    rest = summed.filter(~large).group_by("gap").agg(pl.col("ns").sum())
    rest = rest.select("gap", cause=pl.lit(None, summed["cause"].dtype), ns="ns")
    told = pl.concat([summed.filter(large), rest]).sort("gap", maintain_order=True)
    kept = np.bincount(told["gap"].to_numpy(), minlength=gaps.height)
    return gaps.with_columns(parts=pl.Series(kept, dtype=pl.Int64)), told.select("cause", "ns")


# ---- Fewer rows


def _fewer_rows(timeline: ActivityTimeline, most: int) -> ActivityTimeline:
    if timeline.rows.height <= most:
        return timeline
    group, width = _neighbours(timeline.rows, ("lane",), most)
    longest = pl.col("duration").arg_max()
    end = pl.col("start") + pl.col("duration")
    rows = timeline.rows.group_by(group, maintain_order=True).agg(
        pl.col("lane", "start").first(),
        duration=end.max() - pl.col("start").first(),
        busy_ns=pl.col("busy_ns").sum(),
        count=pl.col("count").sum(),
        **{name: pl.col(name).get(longest) for name in ("class", *_SAID)},
        **{name: pl.when(pl.len() == 1).then(pl.col(name).first()) for name in _OF_ONE_ACTIVITY},
    )
    groups = rows.filter(pl.col("count") > 1)
    note = (
        f"{int(groups['count'].sum()):,} of {int(rows['count'].sum()):,} activities, all shorter than "
        f"{format_ns(width)}, are merged with their neighbours; the others are shown one by one"
    )
    return dataclasses.replace(timeline, rows=rows.select(timeline.rows.columns), notes=(*timeline.notes, note))


def _fewer_gaps(timeline: ActivityTimeline, most: int) -> ActivityTimeline:
    if timeline.parts.height <= most:
        return timeline
    group, width = _neighbours(timeline.gaps, ("rank", "device"), max(most // (_MOST_PARTS + 1), 1))
    end = pl.col("start") + pl.col("duration")
    gaps = timeline.gaps.group_by(group, maintain_order=True).agg(
        pl.col("rank", "device", "start").first(),
        duration=end.max() - pl.col("start").first(),
        idle_ns=pl.col("idle_ns").sum(),
    )
    of_part = np.repeat(group.to_numpy(), timeline.gaps["parts"].to_numpy())
    gaps, parts = _with_parts(gaps, timeline.parts.with_columns(gap=pl.Series(of_part)))
    note = f"gaps shorter than {format_ns(width)} that are near each other are shown as one"
    return dataclasses.replace(
        timeline, gaps=gaps.select(timeline.gaps.columns), parts=parts, notes=(*timeline.notes, note)
    )


def _neighbours(rows: pl.DataFrame, keys: tuple[str, ...], most: int) -> tuple[pl.Series, Ns]:
    """Group numbers, equal for short neighbours to be merged, and the duration from which a row is not merged.

    Args:
        rows: rows sorted by keys and start.
        keys: columns in which rows of one group are equal.
        most: maximum number of groups, unless there are more combinations of keys.
    """
    start, duration = rows["start"].to_numpy(), rows["duration"].to_numpy()
    other = np.zeros(len(start), np.bool_)
    for key in keys:
        column = rows[key].to_numpy()
        other[1:] |= column[1:] != column[:-1]
    end = int((start + duration).max())
    width = _SHORTEST_MERGED
    while True:
        cell, long = start // width, duration >= width
        new = other | long
        new[1:] |= long[:-1] | (cell[1:] != cell[:-1])
        new[0] = True
        if np.count_nonzero(new) <= most or width > end:
            return pl.Series("group", np.cumsum(new) - 1), width
        width *= 2
