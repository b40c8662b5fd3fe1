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

from thence.analysis.counters.over_time import use_over_time
from thence.analysis.idle.host_causes import REASONS
from thence.analysis.no_device_work import no_device_work
from thence.analysis.timelines.overview import clipped, clock_notes, numbered_lanes, shown_activities
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW
from thence.model.kernel_names import short_names
from thence.model.places import PLACES, STATED, STATED_XLA
from thence.model.reasons import text_of
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.analysis.collectives.clock_sync import Alignment
    from thence.model.attributed import Attributed
    from thence.units import Ns


_MAX_PARTS = 3
"""How many causes of one gap have a part of their own; the rest of the gap is one more part."""
_FIRST_WIDTH = 512  # ns: the first width that is tried
_CAUSE_COLUMNS = ("name", "place", "step", "iteration")
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
        use: what hardware counters say, by device, counter and start: rank, device, counter (what is used, and its
            limit), start, duration, used_ns (share of the limit x duration).
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
    use: pl.DataFrame
    notes: tuple[str, ...]

    def coarser(self, most_rows: int) -> ActivityTimeline:
        """The timeline with short neighbours merged, so that it has at most ``most_rows`` rows and parts of gaps each.

        Rows of different lanes or devices are never merged, so there may be more rows if there are more of these.
        """
        return _fewer_gaps(_fewer_rows(self, most_rows), most_rows)


def activity_timeline(trace: Attributed, pieces: pl.DataFrame, alignment: Alignment | None = None) -> ActivityTimeline:
    """The timeline of a trace, with one row for each activity.

    Args:
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
    use = _use(trace, alignment, begin, span)
    return ActivityTimeline(begin, span, lanes, rows.drop("row"), gaps, parts, causes, details, use, tuple(notes))


def _use(trace: Attributed, alignment: Alignment | None, begin: Ns, span: Ns) -> pl.DataFrame:
    """`ActivityTimeline.use`: samples that lie in its time."""
    shift = alignment.shift() if alignment else pl.lit(0)
    duration = pl.col("end") - pl.col("start")
    samples = use_over_time(trace).select(
        "rank", "device", "counter",
        start=pl.col("start") - shift - begin, duration=duration,
        used_ns=(pl.col("share") * duration).round().cast(pl.Int64),
    )  # fmt: skip
    return samples.filter(pl.col("start") >= 0, pl.col("start") + pl.col("duration") <= span)


# ---- Gaps


def _gaps(
    pieces: pl.DataFrame, begin: Ns, alignment: Alignment | None
) -> tuple[pl.DataFrame, pl.DataFrame, tuple[tuple[str, str | None, str | None], ...]]:
    """`ActivityTimeline.gaps`, parts and causes."""
    shift = alignment.shift() if alignment else pl.lit(0)
    pieces_of_causes = pieces.select(
        "rank", "device", "duration", "gpu", "name",
        start=pl.col("start") - shift - begin,
        cause=pl.col("cause").cast(pl.String),
        by=pl.when(pl.col("name").is_not_null()).then("by"),
    )  # fmt: skip
    touches = (pl.col("start") == (pl.col("start") + pl.col("duration")).shift(1)) & pl.all_horizontal(
        pl.col(key).eq_missing(pl.col(key).shift(1)) for key in ("rank", "device", "gpu")
    )  # fmt: skip
    pieces_of_causes = pieces_of_causes.with_columns(gap=(~touches.fill_null(value=False)).cum_sum() - 1)
    causes, numbered = _causes(pieces_of_causes)
    gaps = numbered.group_by("gap", maintain_order=True).agg(
        pl.col("rank", "device", "start").first(), pl.col("duration").sum(), idle_ns=pl.col("duration").sum()
    )
    parts = numbered.select("gap", "cause", ns="duration")
    return *_with_parts(gaps.drop("gap"), parts), causes


def _causes(pieces_of_causes: pl.DataFrame) -> tuple[tuple[tuple[str, str | None, str | None], ...], pl.DataFrame]:
    """The causes with their places, and the pieces with indices of causes.

    Of more than `MAX_TEXTS` causes, those with the least time are merged into one.
    """
    keys = ["cause", "by", "name"]
    totals = pieces_of_causes.group_by(keys).agg(pl.col("duration").sum())
    totals = totals.sort("duration", *keys, descending=[True, False, False, False])
    kept = totals.head(MAX_TEXTS).drop("duration").with_row_index("number")
    numbered = pieces_of_causes.join(kept, on=keys, how="left", nulls_equal=True, maintain_order="left")
    causes = [
        (cause, by, REASONS.get(name, name)[-MAX_TEXT_LENGTH:] if name else None)
        for cause, by, name in kept.select(keys).iter_rows()
    ]
    if left := totals.height - kept.height:
        causes.append(("several", "place", f"one of {left:,} others, which took less time"))
    number = numbered["number"].fill_null(kept.height).cast(pl.Int32)
    return tuple(causes), pieces_of_causes.with_columns(cause=number)


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
    large = pl.Series(number < _MAX_PARTS)
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
        **{name: pl.col(name).get(longest) for name in ("class", *_CAUSE_COLUMNS)},
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
    group, width = _neighbours(timeline.gaps, ("rank", "device"), max(most // (_MAX_PARTS + 1), 1))
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
    width = _FIRST_WIDTH
    while True:
        cell, long = start // width, duration >= width
        new = other | long
        new[1:] |= long[:-1] | (cell[1:] != cell[:-1])
        new[0] = True
        if np.count_nonzero(new) <= most or width > end:
            return pl.Series("group", np.cumsum(new) - 1), width
        width *= 2


MAX_TEXTS = 5_000
"""How many different names, places or calls are kept."""
MAX_TEXT_LENGTH = 600
"""How many characters of one text are kept."""
_SHORT = 160
_REPEATED = (
    "step",
    "iteration",
)  # numbered separately: as parts of places, they would make the places of every step different
_LONG = ("ops", "stack")
_PLACE_KINDS = tuple(
    kind for kind in PLACES if kind not in (*_REPEATED, *_LONG, "hlo")
)  # the HLO instruction is already the name


@dataclass(frozen=True)
class Details:
    """Facts about each activity, as the timeline shows them.

    Attributes:
        columns: one row per row of gpu, in its order: name (index in ``names``), place (index in ``places``), step
            and iteration (indices in ``steps``; null if none), call (index in ``calls``; null if the launch is
            unknown), lead_ns (from the start of the launch to the start of the activity; negative if clocks
            disagree) and call_ns (duration of the launch), both null without a launch.
        names: short name, and the recorded name if it differs, else None.
        kinds: kinds of the texts in ``places``, of `thence.model.places.KINDS`.
        places: for each place and kind, its text (None if there is none), and a sentence on why there is no text
            (else None).
        steps: names of steps and iterations.
        calls: the launching call and its thread, as text.
    """

    columns: pl.DataFrame
    names: tuple[tuple[str, str | None], ...]
    kinds: tuple[str, ...]
    places: tuple[tuple[tuple[str | None, str | None], ...], ...]
    steps: tuple[str, ...]
    calls: tuple[str, ...]


def activity_details(trace: Attributed) -> Details:
    """The facts about each activity of a trace.

    Args:
        trace: the attributed trace, with at least one activity.
    """
    name, names = _names(trace)
    kinds = _kinds(trace)
    place, places = _places(trace, kinds)
    steps, texts = _steps(trace)
    launches, calls = _launches(trace)
    columns = pl.DataFrame([name, place, *steps]).hstack(launches)
    return Details(columns, names, kinds, places, texts, calls)


def _numbered(trace: Attributed, keys: pl.DataFrame) -> tuple[pl.Series, pl.DataFrame, int]:
    """The number of each row's combination of values, the combinations with most time, and how many are left out.

    Rows whose values are all null have no combination; the number that they get is meaningless.
    """
    columns = keys.columns
    some = keys.with_columns(ns=trace.gpu["duration"]).filter(pl.any_horizontal(pl.col(columns).is_not_null()))
    counted = some.group_by(columns).agg(pl.col("ns").sum())
    kept = counted.sort("ns", *columns, descending=[True, *[False] * len(columns)])
    kept = kept.head(MAX_TEXTS).drop("ns").with_row_index("number")
    numbered = keys.join(kept, on=columns, how="left", nulls_equal=True, maintain_order="left")
    number = numbered["number"].fill_null(kept.height).cast(pl.Int32)
    return number, kept, counted.height - kept.height


def _names(trace: Attributed) -> tuple[pl.Series, tuple[tuple[str, str | None], ...]]:
    """Names of activities: the HLO instruction if it is known, else the recorded name."""
    keys = trace.gpu.select("name", "hlo").with_columns(pl.col("hlo", "name").cast(pl.Categorical))
    number, kept, left = _numbered(trace, keys)
    recorded = kept["name"].cast(pl.String).to_list()
    shown = kept.select(pl.coalesce(pl.col("hlo", "name").cast(pl.String))).to_series().to_list()
    short = short_names(text for text in shown if text is not None)
    names = [
        (short[text][:_SHORT], None if full == short[text] else full[:MAX_TEXT_LENGTH])
        for text, full in zip(shown, recorded, strict=True)
    ]
    return number.alias("name"), (*names, *_others(left, "names"))


def _others(left: int, what: str) -> list[tuple[str, None]]:
    return [(f"one of {left:,} other {what}, which took less time", None)] if left else []


def _kinds(trace: Attributed) -> tuple[str, ...]:
    """The kinds of places that any activity has, and the kinds whose absence is explained."""
    stated = STATED if trace.programs.is_empty() else STATED_XLA
    return tuple(
        kind for kind in _PLACE_KINDS if kind in stated or trace.places[kind].null_count() < trace.places.height
    )


def _places(
    trace: Attributed, kinds: tuple[str, ...]
) -> tuple[pl.Series, tuple[tuple[tuple[str | None, str | None], ...], ...]]:
    columns = [name for kind in kinds for name in (kind, f"{kind}_rule")]
    number, kept, left = _numbered(trace, trace.places.select(columns))
    texts = kept.select(pl.col(columns).cast(pl.String))
    places = [
        tuple(
            (row[i] and row[i][-MAX_TEXT_LENGTH:], None if row[i] else text_of(row[i + 1]))
            for i in range(0, len(columns), 2)
        )
        for row in texts.iter_rows()
    ]
    if left:
        said = f"one of {left:,} other places, which took less time"
        places.append(tuple((None, said) for _ in kinds))
    return number.alias("place"), tuple(places)


def _steps(trace: Attributed) -> tuple[list[pl.Series], tuple[str, ...]]:
    """Columns of indices for step and iteration, and the list of texts that both refer to."""
    texts: dict[str, int] = {}
    columns = []
    for kind in _REPEATED:
        column = trace.places[kind].cast(pl.String)
        for text in column.unique(maintain_order=True).drop_nulls().head(MAX_TEXTS):
            texts.setdefault(text, len(texts))
        numbers = {text: number for text, number in texts.items() if text is not None}
        columns.append(
            column.replace_strict(numbers, default=None, return_dtype=pl.Int32).alias(kind)
            if numbers
            else pl.Series(kind, [None], pl.Int32).new_from_index(0, len(column))
        )
    return columns, tuple(text[:_SHORT] for text in texts)


def _launches(trace: Attributed) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """The launch of each activity: the host's call, else the launch of its XLA program."""
    gpu, host = trace.gpu, trace.host
    row = trace.places["launch"].cast(pl.UInt32)
    call = host.select("rank", "process", "thread", "name")[row.fill_null(0)] if len(host) else None
    begin = host["start"].gather(row) if call is not None else _nothing(len(row))
    took = host["duration"].gather(row) if call is not None else _nothing(len(row))
    keys = (
        pl.DataFrame({"name": _nothing(len(row)).cast(pl.String)})
        if call is None
        else call.select(*(pl.when(row.is_not_null()).then(name).alias(name) for name in call.columns))
    )
    program = pl.Series("program", _programs_without_a_call(trace, row))
    keys = keys.with_columns(program)
    begin = begin.fill_null(trace.programs["launch"].gather(program))
    took = took.fill_null(trace.programs["launch_duration"].gather(program))
    named = trace.programs["name"].cast(pl.String).gather(program)
    number, kept, left = _numbered(trace, keys.with_columns(program=named))
    known = begin.is_not_null()
    calls = [_call(texts) for texts in _with_threads(trace, kept).iter_rows(named=True)]
    frame = pl.DataFrame({"call": number, "lead_ns": gpu["start"] - begin, "call_ns": took})
    shown = frame.select(pl.when(known).then(name).alias(name) for name in frame.columns)
    return shown, (*calls, *(text for text, _ in _others(left, "calls")))


def _nothing(rows: int) -> pl.Series:
    return pl.Series([None], dtype=pl.Int64).new_from_index(0, rows)


def _programs_without_a_call(trace: Attributed, launch: pl.Series) -> pl.Series:
    """The row in programs of each activity whose own launch is unknown; null for other activities."""
    program = row_numbers(trace.gpu["program"])
    return pl.Series(np.where(launch.is_null().to_numpy(), program, NO_ROW)).replace(NO_ROW, None)


def _with_threads(trace: Attributed, kept: pl.DataFrame) -> pl.DataFrame:
    if "thread" not in kept.columns:
        return kept.with_columns(thread=None, thread_name=None, process=None)
    keys = ["rank", "process", "thread"]
    names = trace.threads.select(*keys, thread_name="name").unique(keys, keep="first")
    return kept.join(names, on=keys, how="left", maintain_order="left")


def _call(row: dict[str, object]) -> str:
    """The launching call and its thread, as text."""
    if row["name"] is None:
        return f"the launch of {row['program']}"[:MAX_TEXT_LENGTH]
    thread = f"thread {row['thread']}"
    name = str(row["thread_name"] or "")
    if name:  # some producers name a thread by its number
        thread = name if thread in name else f"{thread} ({name})"
    return f"{str(row['name'])[:_SHORT]} on {thread}"[:MAX_TEXT_LENGTH]
