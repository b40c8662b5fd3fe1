"""The time in which the idle time of a selected part of a trace counts.

Nothing that the selection leaves out makes a device idle: idle is only the time in which none of the device's work
ran, selected or not. It counts in these windows of time on each device:

whole trace     from the first start to the last end of the device's work, without the time of steps that the recorder
                left out: there, from the first start to the last end between two such times
ranks, devices  the same
steps           the windows of the selected steps (`thence.analysis.steps.windows`)
program         the selected executions, each from the start of its first activity to the end of its last one
window          from the start of the first selected activity to the end of the last one; with steps or a program, the
                parts of their windows in between

If only names are selected, or warm-up is left out, nothing says which of the remaining time belongs to the selection,
so idle time is unknown (`Selection.idle_unknown`), unless steps or programs are selected in addition.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.steps.windows import selected_windows, steps
from thence.model.attributed import once_per_trace
from thence.model.columns import at_once
from thence.model.grouped_intervals import GroupedIntervals, GroupedTimes, in_order, numbered, numbered_together
from thence.model.intervals import NEVER, NO_ROW, covered_lengths, unions

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.units import Ns


_PAUSES = {"rank": pl.Int32(), "start": pl.Int64(), "end": pl.Int64(), "steps": pl.get_index_type()}


@once_per_trace
def windows_of_selection(trace: Attributed) -> pl.DataFrame:
    """The windows in which idle time counts; empty if idle time is unknown.

    Returns:
        rank, device, start and duration (ns) of windows that do not overlap, sorted by these columns.
    """
    selection = trace.selection
    if selection.idle_unknown:
        return _windows(trace).clear()
    if selection.steps is not None:
        windows = selected_windows(steps(trace).frame, selection.steps)
    elif selection.program is not None:
        windows = _executions(trace)
    else:
        return _windows(trace)
    windows = windows[["rank", "device", "start", "duration"]]
    if selection.window_ns is None:
        return windows
    _, row, start, end = cut_to_windows(_windows(trace), windows)
    return windows.select("rank", "device")[row].with_columns(start=pl.Series(start), duration=pl.Series(end - start))


def covers_only_part(trace: Attributed) -> bool:
    """Whether idle time counts in less than the whole time from the first start to the last end of each device."""
    return trace.unselected is not None or not trace.step_times["recorded"].all()


def _windows(trace: Attributed) -> pl.DataFrame:
    """From the first start to the last end of each device, in each part of the recording."""
    end = (pl.col("start") + pl.col("duration")).max()
    start = pl.col("start").min()
    device = ("rank", "device")
    pauses = unrecorded_times(trace)
    if pauses.is_empty():
        windows = trace.gpu.lazy().group_by(device)
    else:
        pauses = pauses.with_columns(part=pl.int_range(1, pl.len() + 1))
        numbered_work = trace.gpu.lazy().select(*device, "start", "duration").sort("start")
        windows = numbered_work.join_asof(
            pauses.lazy().sort("start").select("rank", "part", "start"), on="start", by="rank",
            check_sortedness=False,
        ).group_by(*device, "part")  # fmt: skip
    merged = windows.agg(start=start, duration=end - start).sort(*device, "start")
    # Work that was launched before a time that is left out may end after it.
    before = (pl.col("start") + pl.col("duration")).cum_max().shift(1).over(device)
    begin = pl.max_horizontal("start", before)
    duration = (pl.col("start") + pl.col("duration") - begin).clip(0)
    return merged.select(*device, start=begin, duration=duration).pipe(at_once)


def unrecorded_times(trace: Attributed) -> pl.DataFrame:
    """The times in which the recorder left out steps: rank, start and end (ns) and steps (their number)."""
    if trace.step_times["recorded"].all():
        return pl.DataFrame(schema=_PAUSES)
    times = trace.step_times.sort("rank", "start")
    turns = pl.col("recorded") != pl.col("recorded").shift(1).over("rank")
    following = pl.col("start").shift(-1).over("rank").fill_null(pl.col("start") + pl.col("duration"))
    runs = times.with_columns(run=turns.fill_null(value=True).cum_sum().over("rank"), end=following).filter(
        ~pl.col("recorded")
    )
    return (
        runs.group_by("rank", "run")
        .agg(pl.col("start").min(), pl.col("end").max(), steps=pl.len())
        .sort("rank", "start")
        .drop("run")
    )


def _executions(trace: Attributed) -> pl.DataFrame:
    """The executions of programs that have selected work; those of a device that overlap are one window."""
    ran = trace.gpu["program"].drop_nulls().unique().cast(pl.UInt32)
    rows = trace.programs.with_row_index("row").filter(pl.col("row").is_in(ran.implode()))
    number, devices = numbered(rows, "rank", "device")
    start = rows["start"].to_numpy()
    group, begin, end = unions(number, start, start + rows["duration"].to_numpy())
    return devices[group].with_columns(start=pl.Series(begin), duration=pl.Series(end - begin))


def span_and_busy(trace: Attributed) -> tuple[Ns, Ns]:
    """The length of the selection's windows, and how long any work ran in them, ns, summed over devices."""
    windows = windows_of_selection(trace)
    return int(windows["duration"].sum()), int(busy_in_windows(windows, trace.around.gpu).sum())


def busy_in_windows(windows: pl.DataFrame, work: pl.DataFrame) -> Int64:
    """How long any of the work of its device ran in each window, ns.

    Args:
        windows: rank, device, start and duration (ns), in any order.
        work: the same; intervals may overlap.
    """
    columns = ["rank", "device", "start", "duration"]
    both = pl.concat([windows[columns], work[columns]], how="vertical_relaxed")
    group, devices = numbered(both, "rank", "device")
    start, end = _ends(both)
    timeline = GroupedIntervals.of(group, start, end, devices.height)
    count = windows.height
    return covered_lengths(timeline.start[:count], timeline.end[:count], timeline.start[count:], timeline.end[count:])


def windows_at(rows: pl.DataFrame, windows: pl.DataFrame) -> Int64:
    """The window of its device in which each row begins, as its row in ``windows``; `NO_ROW` for none.

    Args:
        rows: rank, device and start (ns), in any order.
        windows: rank, device, start and duration (ns), in any order; of several, the last that has begun counts.
    """
    of_window, device, devices = numbered_together(windows, rows, "rank", "device")
    begin, end = _ends(windows)
    order = in_order(of_window, begin, devices)
    start = rows["start"].to_numpy()
    last = GroupedTimes.of(of_window[order], begin[order], devices).last(device, start)
    window = np.append(order, NO_ROW)[last]
    return np.where(start < np.append(end, NEVER)[window], window, NO_ROW)


def cut_to_windows(intervals: pl.DataFrame, windows: pl.DataFrame) -> tuple[Int64, Int64, Int64, Int64]:
    """The parts of intervals that are in windows.

    Args:
        intervals: rank, device, start and duration (ns), sorted by rank, device and start.
        windows: the same; the windows of a device do not overlap.

    Returns:
        For each part the row of its interval, the row of its window, and its start and end (ns).
    """
    of_window, device, devices = numbered_together(windows, intervals, "rank", "device")
    (begin, end), (start, finish) = _ends(windows), _ends(intervals)
    # The first window that ends after an interval begins, and the first that begins at its end.
    first = GroupedTimes.of(of_window, end, devices).search(device, start, "right")
    last = GroupedTimes.of(of_window, begin, devices).search(device, finish, "left")
    count = np.maximum(last - first, 0)
    interval = np.repeat(np.arange(len(count)), count)
    window = np.arange(len(interval)) - np.repeat(np.cumsum(count) - count - first, count)
    starts, ends = np.maximum(start[interval], begin[window]), np.minimum(finish[interval], end[window])
    lasting = np.flatnonzero(ends > starts)
    return interval[lasting], window[lasting], starts[lasting], ends[lasting]


def _ends(frame: pl.DataFrame) -> tuple[Int64, Int64]:
    start = frame["start"].to_numpy().astype(np.int64)
    return start, start + frame["duration"].to_numpy()
