"""The steps of a run for a comparison: their times, and the step of each activity.

Steps are those of `thence.analysis.steps.windows`. On each device, a step is a window of time, and activities that
begin in the window belong to it. A trace without steps is one step, from its first activity to its last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.steps.answer import step_table
from thence.analysis.steps.windows import selected_steps
from thence.errors import MissingData
from thence.model.grouped_intervals import numbered
from thence.model.intervals import NO_ROW, last_begun, union_lengths

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


WHOLE_TRACE = "the whole trace"
"""`RunSteps.what` of a trace without steps."""
IDLE_CAUSE = r"^idle_(.+)_ns$"
"""Pattern of the columns of `RunSteps.times` with idle time by cause."""
_WINDOW = ("rank", "device", "start", "duration", "row")
_TIMES = ("busy_ns", "idle_ns", "communication_ns", "exposed_ns")


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run.

    Attributes:
        what: what the steps are, in words.
        times: one row per step, in order of time: name, start_ns (on the first device to begin it), and means over the
            devices that have the step of total_ns, busy_ns, idle_ns, communication_ns, exposed_ns, and
            ``idle_<cause>_ns`` of each cause that occurs; and left_out, why it is not typical (a key of
            `thence.analysis.steps.windows.RULES`), null if it is.
        of_activity: row in ``times`` of the step of each row of gpu, `NO_ROW` for none.
        windows: rank, device, start, duration and row (in ``times``) of the window of each step on each device.
    """

    what: str
    times: pl.DataFrame
    of_activity: Int64
    windows: pl.DataFrame


def run_steps(trace: Attributed, *, causes: bool = True) -> RunSteps:
    """The steps of a trace, and the step of every activity.

    Args:
        trace: attributed.
        causes: whether to divide idle time by cause, which takes most of the time.
    """
    try:
        found = selected_steps(trace)
    except MissingData:
        return _one_step(trace)
    keys = ("step", "occurrence")
    divided = step_table(trace).frame if causes else found.frame
    frame = divided.with_columns(occurrence=pl.int_range(pl.len()).over("rank", "device", "step"), total_ns="duration")
    by_cause = [name for name in frame.columns if name.startswith("idle_") and name != "idle_ns"]
    times = (
        frame.group_by(keys, maintain_order=True)
        .agg(
            pl.col("start").min().alias("start_ns"),
            pl.col("total_ns", *_TIMES, *by_cause).cast(pl.Float64).mean(),
            left_out=pl.when(pl.col("left_out").null_count() == 0).then(pl.col("left_out").first()),
        )
        .sort("start_ns", maintain_order=True)
    )
    numbers = times.select(keys).with_row_index("row")  # `number` is the step's own
    windows = frame.drop("row").join(numbers, on=keys, how="left", maintain_order="left")
    return RunSteps(
        "steps" if found.kind == "step" else f"steps ({found.what})",
        times.rename({"step": "name"}).drop("occurrence"),
        _in_windows(trace, windows),
        windows.select(_WINDOW),
    )


def _in_windows(trace: Attributed, windows: pl.DataFrame) -> Int64:
    """For each activity, the step in whose window on the activity's device it begins; `NO_ROW` for none."""
    of_activity = np.full(trace.gpu.height, NO_ROW, np.int64)
    number, devices = numbered(
        pl.concat([table.select("rank", "device") for table in (windows, trace.gpu)]), "rank", "device"
    )
    of_window, device = number[: windows.height], number[windows.height :]
    ours = np.argsort(device, kind="stable")
    edges = np.searchsorted(device[ours], np.arange(devices.height + 1))
    theirs = np.argsort(of_window, kind="stable")
    window_edges = np.searchsorted(of_window[theirs], np.arange(devices.height + 1))
    start, row = trace.gpu["start"].to_numpy(), windows["row"].to_numpy().astype(np.int64)
    begin = windows["start"].to_numpy()
    end = begin + windows["duration"].to_numpy()
    for place in np.unique(of_window):
        rows = ours[edges[place] : edges[place + 1]]
        ones = theirs[window_edges[place] : window_edges[place + 1]]
        window = last_begun(begin[ones], start[rows])
        inside = (window != NO_ROW) & (start[rows] < end[ones][window])
        of_activity[rows] = np.where(inside, row[ones][window], NO_ROW)
    return of_activity


def _one_step(trace: Attributed) -> RunSteps:
    """The whole trace as one step, whose idle time is not divided by cause."""
    gpu = trace.gpu.select("rank", "device", "start", end=pl.col("start") + pl.col("duration"))
    device = gpu.select(pl.struct("rank", "device").rank("dense").cast(pl.Int64) - 1).to_series()
    spans = gpu.group_by("rank", "device", maintain_order=True).agg(
        pl.col("start").min(), duration=pl.col("end").max() - pl.col("start").min()
    )
    start, end = gpu["start"].to_numpy(), gpu["end"].to_numpy()
    total = float(spans["duration"].mean() or 0)  # type: ignore[arg-type]
    busy = float(union_lengths(device.to_numpy(), start, end, max(1, spans.height)).mean())
    talking = exposure(trace).devices
    per_device = {
        name: float(talking[name].sum()) / max(1, spans.height) for name in ("communication_ns", "exposed_ns")
    }
    times = pl.DataFrame(
        {"name": ["all"], "start_ns": [gpu["start"].min()], "total_ns": [total], "busy_ns": [busy]}
    ).with_columns(
        idle_ns=pl.lit(total - busy), **{k: pl.lit(v) for k, v in per_device.items()}, left_out=pl.lit(None, pl.String)
    )
    windows = spans.with_columns(row=pl.lit(0, pl.UInt32)).select(_WINDOW)
    return RunSteps(WHOLE_TRACE, times, np.zeros(trace.gpu.height, np.int64), windows)
