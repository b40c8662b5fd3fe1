"""Which step each device activity belongs to, and how long the steps are on the devices.

A step is what the trace calls one: a profiler's step around the launch. A trace of XLA programs without steps is
divided into the executions of the program that takes most time, by time. Any other trace is one step.

On a device a step lasts from the start of its first activity to the start of the next step's first one, so that
steps add up to the span; a step without a next one ends with the last activity. Times of the host would say
little: it runs ahead of the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW, last_begun, union

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Float = npt.NDArray[np.float64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["DeviceSteps", "Steps", "device_steps", "find_steps"]

_NUMBER = re.compile(r"(\d{1,18})\D*$")
_FEWEST_EXECUTIONS = 3


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        what: what they are: steps, executions of a program, or the whole trace.
        names: of each step, in order of time.
        last: which steps have no next one in the trace, shape (steps,).
        of_activity: step of each row of gpu, `NO_ROW` for none.
    """

    what: str
    names: tuple[str, ...]
    last: Mask
    of_activity: Int64


@dataclass(frozen=True)
class DeviceSteps:
    """The steps of a trace on its devices: means over the devices, in ns, shape (steps,) each.

    Attributes:
        total: length.
        busy: in which at least one activity ran on the device, of whatever step.
    """

    total: Float
    busy: Float


def find_steps(trace: Attributed) -> Steps:
    """The steps of a trace, and the step of every activity."""
    if trace.places["step"].null_count() < trace.gpu.height:
        return _profiler_steps(trace)
    if not trace.programs.is_empty():
        found = _executions(trace)
        if found is not None:
            return found
    return Steps(
        "the whole trace",
        ("all",),
        np.ones(1, np.bool_),
        np.zeros(trace.gpu.height, np.int64),
    )


def _profiler_steps(trace: Attributed) -> Steps:
    """By the step around each launch; several of one name are numbered by their order."""
    ranges = (
        trace.host.lazy()
        .select("rank", "process", "category", "name", "start")
        .filter(pl.col("category") == "step")
        .sort("start")
        .with_columns(occurrence=pl.int_range(pl.len()).over("rank", "process", "name"))
        .collect()
    )
    keys = ranges.group_by("name", "occurrence", maintain_order=True).agg(pl.col("start").min())
    keys = keys.sort("start", maintain_order=True).with_row_index("step")
    numbered = ranges.join(keys.drop("start"), on=["name", "occurrence"], maintain_order="left")
    of_activity = np.full(trace.gpu.height, NO_ROW, np.int64)
    launch = trace.places["launch"].cast(pl.Int64).fill_null(0).to_numpy()
    inside = trace.places["step"].is_not_null().to_numpy()
    moment = trace.host["start"].to_numpy()[launch]
    rank, process = (trace.host[name].to_numpy()[launch] for name in ("rank", "process"))
    for (of_rank, of_process), rows in numbered.group_by("rank", "process"):
        ours = np.flatnonzero(inside & (rank == of_rank) & (process == of_process))
        begun = last_begun(rows["start"].to_numpy(), moment[ours])
        of_activity[ours] = np.where(begun == NO_ROW, NO_ROW, rows["step"].to_numpy()[begun])
    used, of_used = np.unique(of_activity[of_activity != NO_ROW], return_inverse=True)
    of_activity[of_activity != NO_ROW] = of_used
    names = keys["name"].cast(pl.String).gather(used).to_list()
    return Steps("steps", tuple(names), _without_next(names), of_activity)


def _without_next(names: list[str]) -> Mask:
    """Which steps are followed by no step, or by one whose number is not the next."""
    numbers = [int(found[1]) if (found := _NUMBER.search(name)) else None for name in names]
    following = [*numbers[1:], None]
    jumps = [
        one is not None and other is not None and other > one + 1
        for one, other in zip(numbers, following, strict=True)
    ]
    jumps[-1] = True
    return np.array(jumps, np.bool_)


def _executions(trace: Attributed) -> Steps | None:
    """By the executions of the program with most time; None where it ran too rarely."""
    programs = trace.programs.filter(pl.col("program").is_not_null())
    if programs.is_empty():
        return None
    name = pl.col("name").cast(pl.String)
    main = programs.group_by(name).agg(pl.col("duration").sum()).sort("duration", "name").row(-1)[0]
    chosen = programs.filter(name == main).sort("start")
    of_activity = np.full(trace.gpu.height, NO_ROW, np.int64)
    start = trace.gpu["start"].to_numpy()
    rank, device = (trace.gpu[column].to_numpy() for column in ("rank", "device"))
    most = 0
    for (of_rank, of_device), rows in chosen.group_by("rank", "device"):
        ours = np.flatnonzero((rank == of_rank) & (device == of_device))
        of_activity[ours] = last_begun(rows["start"].to_numpy(), start[ours])
        most = max(most, rows.height)
    if most < _FEWEST_EXECUTIONS:
        return None
    last = np.zeros(most, np.bool_)
    last[-1] = True
    names = tuple(f"{main} {number}" for number in range(most))
    return Steps(f"executions of {main}", names, last, of_activity)


def device_steps(trace: Attributed, steps: Steps) -> DeviceSteps:
    """How long the steps are, and how long the devices were busy in them; means over the devices."""
    count = len(steps.names)
    sums = np.zeros((2, count))
    seen = np.zeros(count)
    frame = trace.gpu.select("rank", "device", "start", "duration").with_columns(
        step=pl.Series(steps.of_activity)
    )
    for _, rows in frame.group_by("rank", "device", maintain_order=True):
        start, step = rows["start"].to_numpy(), rows["step"].to_numpy()
        end = start + rows["duration"].to_numpy()
        inside = step != NO_ROW
        if not inside.any():
            continue
        begin, until, present = _bounds(start[inside], end[inside], step[inside], steps.last)
        begins, ends = union(start, end)
        covered = np.concatenate([[0], np.cumsum(ends - begins)])
        busy = _covered(begins, ends, covered, until) - _covered(begins, ends, covered, begin)
        sums[0] += np.where(present, until - begin, 0)
        sums[1] += np.where(present, busy, 0)
        seen += present
    means = sums / np.maximum(seen, 1)
    return DeviceSteps(means[0], means[1])


def _bounds(start: Int64, end: Int64, step: Int64, last: Mask) -> tuple[Int64, Int64, Mask]:
    """Start and end of every step on one device, and whether it has any activity there."""
    count = len(last)
    far = np.iinfo(np.int64)
    first, until = np.full(count, far.max), np.full(count, far.min)
    np.minimum.at(first, step, start)
    np.maximum.at(until, step, end)
    present = first < far.max
    # What is launched for a later step may start earlier on another stream: steps never begin in disorder.
    begin = np.maximum.accumulate(np.where(present, first, far.min))
    following = np.minimum.accumulate(np.where(present, begin, far.max)[::-1])[::-1]
    following = np.append(following[1:], far.max)
    stop = np.where(last | (following == far.max), np.maximum(until, begin), following)
    return np.where(present, begin, 0), np.where(present, stop, 0), present


def _covered(begins: Int64, ends: Int64, covered: Int64, time: Int64) -> Int64:
    """How much of the time before some moments a union of intervals covers."""
    begun = np.searchsorted(begins, time, side="right")
    beyond = np.where(begun > 0, np.maximum(ends[np.maximum(begun - 1, 0)] - time, 0), 0)
    result: Int64 = covered[begun] - beyond
    return result
