"""The steps of a program on every device, in order of time, and which of them are typical.

A step begins on a device when the host has begun it and the device has finished the work of earlier steps, whichever is
later. It ends when the host has ended it and the device has finished its work, whichever is later, but not after the
next step begins. Steps of one device therefore never overlap. If the host's steps follow each other without a break, as
those of torch.profiler do, the steps of a device do so as well. On a device that runs behind the host, the window of a
step is the time of its work; on a device that waits for the host, it is the host's step.

    begin = max(end of all earlier work, min(begin on the host, first start of its own activities))
    end   = max(end of its own and all earlier work, min(end on the host, begin of the next))

Work belongs to the step in which it was launched. Work that was launched outside of every step counts as earlier work
of the steps whose own work begins after it. The times of a step are those of all work in its window, including work
that another step launched:

    busy     = union of the activities in the window
    exposed  = part of busy in which communication ran and nothing computed (`thence.analysis.collectives.exposure`)
    idle     = duration - busy

`thence.attribution.steps` finds the steps themselves: their times on the host, and which work each of them launched.

**Typical steps.** Every typical figure is of the steps that no rule leaves out: the headline of ``report``, the spread
of ``steps``, the steps that ``--steps typical`` selects, the times of ``whatif``, and comparisons. ``ranks`` keeps
outliers, because a late rank makes them.

first      the first step of the run, and of each device, if there are others: recording begins in it or right before
           it, with an empty queue and, in short runs, with work that later steps do not have
last       the last step if nothing marks its end (`thence.model.tables.ENDLESS`), or if it computed for less than half
           of the median: recording or the loop ended in it. It is left out if at least 3 other steps remain
warm_up    consecutive steps at the beginning that take longer than any ordinary step; at most half of the steps, and
           only in runs of 4 or more steps
outlier    other steps that take longer or shorter than any ordinary step; only in runs of 8 or more steps, because
           fewer steps do not show what is ordinary

The length of an ordinary step differs from the median of the second half of the steps (for outliers, of all steps) by
at most 8 scaled median absolute deviations or 10 % of the median, whichever is more. A scaled deviation estimates the
standard deviation of a normal distribution and is robust against outliers (Rousseeuw and Croux, 1993).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.grouping.kernel_groups import communicates, computes
from thence.errors import MissingData
from thence.model.attributed import once_per_trace
from thence.model.columns import row_numbers
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import NEVER, NO_ROW, Intervals, covered_lengths, reached_before
from thence.model.tables import ENDLESS, NO_STEPS, STEP_KINDS
from thence.model.thresholds import (
    MIN_STEPS_BESIDE_LAST,
    MIN_STEPS_FOR_OUTLIERS,
    MIN_STEPS_FOR_WARM_UP,
    OUTLIER_DEVIATIONS,
    OUTLIER_SHARE,
    REST_OF_STEP_SHARE,
    STANDARD_DEVIATIONS_PER_MAD,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from thence.model.arrays import Float64, Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.selection import StepChoice


FIRST, LAST, WARM_UP, OUTLIER = "first", "last", "warm_up", "outlier"
RULES = {
    FIRST: "the first: recording begins in it or right before it",
    WARM_UP: "warm-up: longer than ordinary steps, at the beginning",
    OUTLIER: "outliers: far from ordinary steps",
    LAST: "the last: nothing marks its end, or it has less than half of the work of the others",
}
"""Why a step is left out."""


def left_out(total: Float64, last: Mask, *, outliers: bool = False) -> list[str | None]:
    """For each step of a run, the key of `RULES` by which it is left out; None if it counts.

    Args:
        total: length of each step in ns, in order of time.
        last: whether a step has no next step.
        outliers: whether outliers count.
    """
    codes: list[str | None] = [None] * len(total)
    counted = np.ones(len(total), np.bool_)
    if (~last).sum() >= MIN_STEPS_BESIDE_LAST:
        _leave_out(codes, counted, np.flatnonzero(last), LAST)
    rows = np.flatnonzero(counted)
    if len(rows) >= MIN_STEPS_FOR_WARM_UP:
        _, high = _ordinary(total[rows[len(rows) // 2 :]])
        long = total[rows] > high
        leading = int(np.argmin(long)) if not long.all() else 0
        _leave_out(codes, counted, rows[: min(leading, len(rows) // 2)], WARM_UP)
    rows = np.flatnonzero(counted)
    if len(rows) >= MIN_STEPS_FOR_OUTLIERS and not outliers:
        low, high = _ordinary(total[rows])
        _leave_out(codes, counted, rows[(total[rows] < low) | (total[rows] > high)], OUTLIER)
    if counted[1:].any() and counted[0]:
        codes[0] = FIRST
    return codes


def without_end(compute: Float64, *, endless: bool) -> Mask:
    """Whether each step of a run is the last one and has no end of its own.

    Args:
        compute: time in which each step computed, in order of time.
        endless: whether nothing marks the ends of the steps.
    """
    last = np.zeros(len(compute), np.bool_)
    if len(compute):
        last[-1] = endless or bool(compute[-1] < REST_OF_STEP_SHARE * np.median(compute))
    return last


def left_out_of_windows(frame: pl.DataFrame, *, endless: bool) -> pl.Series:
    """For each window of a step on a device, the key of `RULES` by which it is left out; null if it is typical.

    A step of several devices is left out on all of them, by the medians over the devices.

    Args:
        frame: rank, device, step, start, duration, busy_ns, exposed_ns and first, as `thence.analysis.steps.windows`
            has them, in its order.
        endless: whether nothing marks the ends of the steps.
    """
    keys = ("step", "occurrence")
    device = ("rank", "device")
    windows = frame.with_columns(occurrence=pl.int_range(pl.len()).over(*device, "step"))
    order = (
        windows.group_by(keys)
        .agg(
            pl.col("start").min(),
            pl.col("duration").median(),
            compute=(pl.col("busy_ns") - pl.col("exposed_ns")).median(),
        )
        .sort("start", *keys)
    )
    last = without_end(order["compute"].to_numpy(), endless=endless)
    codes = left_out(order["duration"].to_numpy(), last)
    of_step = order.select(keys).with_columns(code=pl.Series(codes, dtype=pl.String))
    first = pl.when(pl.col("first") & (pl.len().over(device) > 1)).then(pl.lit(FIRST))
    return windows.join(of_step, on=keys, how="left", maintain_order="left").select(
        left_out=pl.coalesce("code", first)
    )["left_out"]


def _leave_out(codes: list[str | None], counted: Mask, rows: npt.NDArray[np.int64], code: str) -> None:
    counted[rows] = False
    for row in rows:
        codes[row] = code


def _ordinary(total: Float64) -> tuple[float, float]:
    """The shortest and the longest ordinary step."""
    if not len(total):
        return 0.0, float("inf")
    median = float(np.median(total))
    deviation = STANDARD_DEVIATIONS_PER_MAD * float(np.median(np.abs(total - median)))
    away = max(OUTLIER_DEVIATIONS * deviation, OUTLIER_SHARE * median)
    return median - away, median + away


STEP = {
    "rank": pl.Int32(),
    "device": pl.Int32(),
    "step": pl.String(),
    "number": pl.Int64(),
    "start": pl.Int64(),
    "duration": pl.Int64(),
    "busy_ns": pl.Int64(),
    "idle_ns": pl.Int64(),
    "communication_ns": pl.Int64(),
    "exposed_ns": pl.Int64(),
    "host_start": pl.Int64(),
    "host_ns": pl.Int64(),
    "activities": pl.Int64(),
    "first": pl.Boolean(),
    "left_out": pl.String(),
    "row": pl.Int64(),
}
"""Columns of `Steps.frame`."""
_NUMBER_AND_REST = r"[\W_]*\d+\D*$"
_WORDS = {"step": "marked {}", "range": "ranges named {}", "program": "executions of {}", "module": "calls of {}"}
"""What steps are, by their kind, if their names have a common stem."""
_LEFT_OUT_WORDS = {"first": "the first", "warm_up": "{} of warm-up", "outlier": "{} outlying", "last": "the last"}


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        frame: one row per rank, device and step that launched work on the device, sorted by rank, device and
            start; columns as in `STEP`. step: its name. number: as in `thence.model.tables.STEPS`. start (ns on the
            trace's clock) and duration (ns): of its window on the device, see the module's docstring. busy_ns,
            idle_ns, communication_ns, exposed_ns: in that window; busy_ns + idle_ns = duration. host_start,
            host_ns: start and duration on the host. activities: number of activities that it launched. first:
            whether it is the first on its device. left_out: the rule of `thence.analysis.steps.windows.RULES` by
            which it is not typical; null if it is. row: its row in ``Attributed.steps``.
        kind: how they were found: a key of `thence.model.tables.STEP_KINDS`.
    """

    frame: pl.DataFrame
    kind: str

    @property
    def what(self) -> str:
        """What the steps are, in words: ``executions of jit_train_step``."""
        return words_of(self.kind, self.frame["step"])

    @property
    def typical(self) -> pl.DataFrame:
        """The rows of `frame` that no rule leaves out; all rows if the rules leave out all of them."""
        kept = self.frame.filter(pl.col("left_out").is_null())
        return self.frame if kept.is_empty() else kept

    @property
    def left_out(self) -> dict[str, int]:
        """Number of steps that are not typical, by the rule of `RULES`: that of the device with most of them."""
        left = self.frame.filter(pl.col("left_out").is_not_null())
        of_device = left.group_by("rank", "device", "left_out").len()
        counts = dict(of_device.group_by("left_out").agg(pl.col("len").max()).rows())
        return {rule: counts[rule] for rule in RULES if rule in counts}

    @property
    def basis(self) -> str:
        """What the steps are, and which of them are not typical, in words."""
        return basis_of(self.what, self.left_out)

    def to_json(self) -> dict[str, Any]:
        """The steps as JSON values."""
        times = {"start": "start_ns", "duration": "duration_ns", "host_start": "host_start_ns"}
        return {"kind": self.kind, "steps": self.frame.drop("row").rename(times).to_dicts()}


def basis_of(what: str, left_out: Mapping[str, int]) -> str:
    """What steps are, and how many of them figures leave out, in words.

    Args:
        what: what they are.
        left_out: number of steps that are left out, by the rule of `RULES`.
    """
    left = [_LEFT_OUT_WORDS[rule].format(count) for rule, count in left_out.items()]
    return f"{what}; without {', '.join(left)}" if left else what


def words_of(kind: str, names: pl.Series) -> str:
    """What steps are, in words.

    Args:
        kind: a key of `STEP_KINDS`.
        names: their names. What several names have in common without their numbers is named.
    """
    stems = names.str.replace(_NUMBER_AND_REST, "").unique().drop_nulls().sort()
    stem = stems[0] if len(stems) == 1 else ""
    return _WORDS[kind].format(stem) if stem and kind in _WORDS else STEP_KINDS[kind]


def steps(attributed: Attributed) -> Steps:
    """The steps of every device, in order of time.

    Args:
        attributed: the whole trace, or a part of it: then the steps are those of all work of the same ranks and
            devices.

    Raises:
        MissingData: the trace has no steps, or nothing ran in them.
    """
    return _steps(attributed.around)


@once_per_trace
def _steps(trace: Attributed) -> Steps:
    step = row_numbers(trace.places["step_row"])
    if not (step != NO_ROW).any():
        raise MissingData(f"{trace.meta.named}: holds no steps: {NO_STEPS}")
    device, devices = numbered(trace.gpu, "rank", "device")
    of_device, windows = _windows(trace, step, device)
    kind = str(trace.steps["kind"].gather(windows["row"]).mode().sort()[0])
    frame = pl.concat([devices[of_device], windows], how="horizontal")
    frame = frame.with_columns(left_out_of_windows(frame, endless=kind in ENDLESS))
    return Steps(frame.select(list(STEP)).cast(STEP), kind)  # type: ignore[arg-type]


def selected_steps(trace: Attributed) -> Steps:
    """The steps in which selected work was launched: all steps, if nothing but ranks and devices is selected.

    Raises:
        MissingData: the trace has no steps, or none of the selected ones.
    """
    every = steps(trace)
    if trace.unselected is None:
        return every
    launched = trace.gpu.select("rank", "device", row=trace.places["step_row"].cast(pl.Int64)).unique()
    frame = every.frame
    if trace.selection.steps is not None:
        frame = selected_windows(frame, trace.selection.steps)
    else:
        frame = frame.join(launched, on=["rank", "device", "row"], how="semi", maintain_order="left")
    if frame.is_empty():
        raise MissingData(f"{trace.meta.named}: holds none of the selected steps")
    return replace(every, frame=frame)


def selected_windows(frame: pl.DataFrame, chosen: StepChoice) -> pl.DataFrame:
    """The rows of `Steps.frame` of the chosen steps."""
    if isinstance(chosen, str):  # TYPICAL
        return frame.filter(pl.col("left_out").is_null())
    first, last = chosen
    number = pl.col("number")
    return frame.filter(
        pl.lit(value=True) if first is None else number >= first, pl.lit(value=True) if last is None else number < last
    )


def _windows(trace: Attributed, step_of_work: Int64, device: Int64) -> tuple[Int64, pl.DataFrame]:
    """The window of each step on each device where it launched work, with busy and idle time.

    Args:
        step_of_work: the step in which each activity was launched, `NO_ROW` for none.
        device: number of each activity's device.

    Returns:
        The number of each window's device, ascending; and the columns of `STEP` from step on, in order of time on
        each device.
    """
    start = trace.gpu["start"].to_numpy()
    finish = start + trace.gpu["duration"].to_numpy()
    host_start = trace.steps["start"].to_numpy()
    host_ns = trace.steps["duration"].to_numpy()
    inside = np.flatnonzero(step_of_work != NO_ROW)
    keys, window, count = np.unique(
        device[inside] * len(host_start) + step_of_work[inside], return_inverse=True, return_counts=True
    )
    place, step = np.divmod(keys, len(host_start))
    first = np.full(len(step), np.iinfo(np.int64).max)
    last = np.full(len(step), NEVER)
    np.minimum.at(first, window, start[inside])
    np.maximum.at(last, window, finish[inside])
    before = (trace.places["step_rule"] == "outside_steps").to_numpy()
    outside = _ended_before(_OnDevices(start[before], finish[before], device[before]), place, first)
    worked = np.maximum(last, outside)
    earlier = reached_before(worked, place)
    begin = np.maximum(np.maximum(earlier, outside), np.minimum(host_start[step], first))
    worked = np.maximum(worked, earlier)
    following = np.append(begin[1:], 0)
    following[np.append(place[1:] != place[:-1], np.True_)] = np.iinfo(np.int64).max
    host_end = host_start[step] + host_ns[step]
    end = np.maximum(np.maximum(worked, begin), np.minimum(host_end, following))
    busy, talking, exposed = _ran(trace, _OnDevices(begin, end, place), _OnDevices(start, finish, device))
    windows = pl.DataFrame(
        {
            "step": trace.steps["name"].gather(step).cast(pl.String),
            "number": trace.steps["number"].gather(step),
            "start": begin,
            "duration": end - begin,
            "busy_ns": busy,
            "idle_ns": end - begin - busy,
            "communication_ns": talking,
            "exposed_ns": exposed,
            "host_start": host_start[step],
            "host_ns": host_ns[step],
            "activities": count,
            "first": np.diff(place, prepend=-1) != 0,
            "row": step,
        }
    )
    return place, windows


@dataclass(frozen=True)
class _OnDevices(Intervals):
    """Intervals (ns) of windows or activities, with the number of the device of each."""

    device: Int64


def _ran(trace: Attributed, windows: _OnDevices, work: _OnDevices) -> tuple[Int64, Int64, Int64]:
    """Busy time, communication time and exposed communication time of each window; ``work`` is all of ``trace.gpu``."""
    device = np.concatenate([windows.device, work.device])
    start, end = np.concatenate([windows.start, work.start]), np.concatenate([windows.end, work.end])
    timeline = GroupedIntervals.of(device, start, end, int(device.max()) + 1)
    count = len(windows.start)
    begins, ends = timeline.start[:count], timeline.end[:count]
    starts, finishes = timeline.start[count:], timeline.end[count:]
    talks = communicates(trace)
    works = computes(trace, talks)
    talking, computing = talks.to_numpy(), works.to_numpy()

    def covered(mask: Mask) -> Int64:
        return covered_lengths(begins, ends, starts[mask], finishes[mask])

    exposed = covered(computing | talking) - covered(computing)
    return covered(np.ones(len(starts), np.bool_)), covered(talking), exposed


def _ended_before(work: _OnDevices, place: Int64, first: Int64) -> Int64:
    """For each step, the latest end of the activities outside of steps that start before the step's own work.

    It is at most the start of the step's own work; `NEVER` without such activities.

    Args:
        work: activities outside of steps.
        place: device of each step.
        first: start of each step's own work.
    """
    device, start, finish = work.device, work.start, work.end
    if not len(start):
        return np.full(len(first), NEVER)
    order = np.lexsort((start, device))
    device, finish = device[order], finish[order]
    latest = np.append(np.maximum(reached_before(finish, device), finish), NEVER)
    # Sort steps among the activities by time; of equal times, the step comes first.
    together = np.lexsort(
        (
            np.repeat([0, 1], [len(first), len(start)]),
            np.concatenate([first, start[order]]),
            np.concatenate([place, device]),
        )
    )
    before = np.empty(len(together), np.int64)
    before[together] = np.cumsum(together >= len(first))
    before = before[: len(first)] - 1
    before[(before < 0) | (device[before] != place)] = len(finish)
    result: Int64 = np.minimum(latest[before], first)
    return result
