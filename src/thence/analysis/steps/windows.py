"""The steps of a program on every device, in order of time.

A step begins on a device when the host has begun it and the device has finished the work of earlier steps,
whichever is later. It ends when the host has ended it and the device has finished its work, whichever is later,
but not after the next step begins. Steps of one device therefore never overlap. If the host's steps follow each
other without a break, as those of torch.profiler do, the steps of a device do so as well. On a device that runs
behind the host, the window of a step is the time of its work; on a device that waits for the host, it is the
host's step.

    begin = max(end of all earlier work, min(begin on the host, first start of its own activities))
    end   = max(end of its own and all earlier work, min(end on the host, begin of the next))

Work belongs to the step in which it was launched. Work that was launched outside of every step counts as earlier
work of the steps whose own work begins after it. The times of a step are those of all work in its window, including
work that another step launched:

    busy     = union of the activities in the window
    exposed  = part of busy in which communication ran and nothing computed (`thence.analysis.collectives.exposure`)
    idle     = duration - busy

If the trace holds no steps, executions of an XLA program are the steps, each from its launch to the next launch. Of
the programs that ran more than once, it is the one that took most of the device's time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import communicates, computes
from thence.errors import MissingData
from thence.model.intervals import (
    NEVER,
    NO_ROW,
    covered_lengths,
    last_begun,
    reached_before,
)
from thence.model.one_timeline import OneTimeline, numbered

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["STEP", "Steps", "steps"]

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
}
"""Columns of `Steps.frame`."""
_NUMBER = r"(\d{1,18})\D*$"


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        frame: one row per rank, device and step that launched work on the device, sorted by rank, device and
            start; columns as in `STEP`. step: its name. number: the number at the end of the name; null if there
            is none. start (ns on the trace's clock) and duration (ns): of its window on the device, see the
            module's docstring. busy_ns, idle_ns, communication_ns, exposed_ns: in that window; busy_ns + idle_ns =
            duration. host_start, host_ns: start and duration of its range on the host. activities: number of
            activities that it launched. first: whether it is the first on its device, which may contain warm-up.
        kind: "step": steps that the profiler or the program marked; "program": executions of an XLA program.
    """

    frame: pl.DataFrame
    kind: Literal["step", "program"]

    def to_json(self) -> dict[str, Any]:
        """The steps as JSON values."""
        times = {"start": "start_ns", "duration": "duration_ns", "host_start": "host_start_ns"}
        return {"kind": self.kind, "steps": self.frame.rename(times).to_dicts()}


@dataclass(frozen=True)
class _Ranges:
    """Steps on the host: those of each rank, or, if they are executions of programs, those of each device.

    Attributes:
        name, begin, end: name, start (ns) and end (ns) of each step; the steps of one rank or device are contiguous
            and in order of time.
        of: step in which each activity was launched, shape (activities,); `NO_ROW` for none.
        outside: mask of the activities that are known to have been launched outside of every step.
    """

    name: pl.Series
    begin: Int64
    end: Int64
    of: Int64
    outside: Mask


def steps(attributed: Attributed) -> Steps:
    """The steps of every device, in order of time.

    Args:
        attributed: the whole trace, or some of its ranks and devices. If it is limited in time, or to activities
            that a search selected, busy time is that of the part.

    Raises:
        MissingData: the trace holds no steps and no executions of XLA programs, or nothing ran in them.
    """
    host = attributed.host.filter(pl.col("category") == "step")
    kind: Literal["step", "program"] = "program" if host.is_empty() else "step"
    device, devices = numbered(attributed.gpu, "rank", "device")
    of_host = kind == "step"
    ranges = _of_host(attributed, host) if of_host else _of_programs(attributed, device, devices)
    if not (ranges.of != NO_ROW).any():
        raise MissingData(
            f"{attributed.meta.named}: holds no steps; torch.profiler's step(), thence.step() and "
            "jax.profiler.StepTraceAnnotation record them"
        )
    of_device, windows = _windows(attributed, ranges, device)
    frame = pl.concat([devices[of_device], windows], how="horizontal")
    return Steps(frame.select(list(STEP)).cast(STEP), kind)  # type: ignore[arg-type]


def _of_host(trace: Attributed, host: pl.DataFrame) -> _Ranges:
    """The step that was open on the host when each activity was launched.

    Args:
        trace: the attributed trace.
        host: the host rows that are steps.
    """
    host = host.sort("rank", "start", maintain_order=True)
    begin = host["start"].to_numpy()
    end = begin + host["duration"].to_numpy()
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    launched = trace.host["start"].to_numpy()[np.maximum(launch, 0)]
    of_rank, rank = host["rank"].to_numpy(), trace.gpu["rank"].to_numpy()
    last = np.full(len(launch), NO_ROW)
    for number in np.unique(of_rank):
        ours = np.flatnonzero(rank == number)
        low, high = np.searchsorted(of_rank, [number, number + 1])
        found = last_begun(begin[low:high], launched[ours])
        last[ours] = np.where(found == NO_ROW, NO_ROW, found + low)
    known = (launch != NO_ROW) & np.isin(rank, of_rank)
    inside = known & (last != NO_ROW) & (launched < end[last])
    of = np.where(inside, last, NO_ROW)
    return _Ranges(host["name"].cast(pl.String), begin, end, of, known & ~inside)


def _of_programs(trace: Attributed, device: Int64, devices: pl.DataFrame) -> _Ranges:
    """Executions of the program that took most of each device's time, each from its launch to the next.

    A program that ran once is chosen only if no program of the device ran more than once.

    Args:
        trace: the attributed trace.
        device: number of each activity's device.
        devices: rank and device of each number.
    """
    program = trace.gpu["program"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    places = devices.with_row_index("place").with_columns(pl.col("place").cast(pl.Int64))
    executions = (
        trace.programs.with_row_index("row")
        .filter(pl.col("program").is_not_null())
        .join(places, on=["rank", "device"], maintain_order="left")
    )
    place = np.full(trace.programs.height + 1, NO_ROW)  # one more, for activities of no program
    place[executions["row"].to_numpy()] = executions["place"].to_numpy()
    its_own = place[program] == device
    ran = pl.DataFrame({"row": program, "ns": trace.gpu["duration"]}).filter(
        its_own & (program != NO_ROW)
    )
    spent = ran.group_by("row").agg(pl.col("ns").sum())
    chosen = (
        executions.join(spent.cast({"row": executions.schema["row"]}), on="row")
        .group_by("place", "program")
        .agg(repeated=pl.len() > 1, ns=pl.col("ns").sum())
        .sort("repeated", "ns", "program")
        .group_by("place")
        .agg(pl.col("program").last())
    )
    steps = executions.join(chosen, on=["place", "program"], how="semi").sort("place", "start")
    finish = pl.col("start") + pl.col("duration")
    steps = steps.with_columns(begin=pl.col("launch").fill_null(pl.col("start"))).with_columns(
        end=pl.col("begin").shift(-1).over("place").fill_null(finish)
    )
    number = np.full(trace.programs.height + 1, NO_ROW)
    number[steps["row"].to_numpy()] = np.arange(steps.height)
    of = np.where(its_own & (program != NO_ROW), number[program], NO_ROW)
    names = steps.select(pl.format("{}#{}", pl.col("name").cast(pl.String), "execution"))
    with_steps = np.isin(device, steps["place"].to_numpy())
    begin = steps["begin"].to_numpy()
    end = np.maximum(steps["end"].to_numpy(), begin)
    return _Ranges(names.to_series(), begin, end, of, with_steps & (of == NO_ROW))


def _windows(trace: Attributed, ranges: _Ranges, device: Int64) -> tuple[Int64, pl.DataFrame]:
    """The window of each step on each device where it launched work, with busy and idle time.

    Args:
        trace: the attributed trace.
        ranges: its steps on the host.
        device: number of each activity's device.

    Returns:
        The number of each window's device, ascending; and the columns of `STEP` from step on, in order of time on
        each device.
    """
    start = trace.gpu["start"].to_numpy()
    finish = start + trace.gpu["duration"].to_numpy()
    inside = np.flatnonzero(ranges.of != NO_ROW)
    keys, window, count = np.unique(
        device[inside] * len(ranges.begin) + ranges.of[inside], return_inverse=True, return_counts=True
    )  # fmt: skip
    place, step = np.divmod(keys, len(ranges.begin))
    first = np.full(len(step), np.iinfo(np.int64).max)
    last = np.full(len(step), NEVER)
    np.minimum.at(first, window, start[inside])
    np.maximum.at(last, window, finish[inside])
    outside = _ended_before(
        (device[ranges.outside], start[ranges.outside], finish[ranges.outside]), place, first
    )
    worked = np.maximum(last, outside)
    earlier = reached_before(worked, place)
    begin = np.maximum(np.maximum(earlier, outside), np.minimum(ranges.begin[step], first))
    worked = np.maximum(worked, earlier)
    following = np.append(begin[1:], 0)
    following[np.append(place[1:] != place[:-1], np.True_)] = np.iinfo(np.int64).max
    end = np.maximum(np.maximum(worked, begin), np.minimum(ranges.end[step], following))
    busy, talking, exposed = _ran(trace, (place, begin, end), (device, start, finish))
    name = ranges.name.gather(step)
    windows = pl.DataFrame(
        {
            "step": name,
            "number": name.str.extract(_NUMBER).cast(pl.Int64),
            "start": begin,
            "duration": end - begin,
            "busy_ns": busy,
            "idle_ns": end - begin - busy,
            "communication_ns": talking,
            "exposed_ns": exposed,
            "host_start": ranges.begin[step],
            "host_ns": (ranges.end - ranges.begin)[step],
            "activities": count,
            "first": np.diff(place, prepend=-1) != 0,
        }
    )
    return place, windows


def _ran(
    trace: Attributed, windows: tuple[Int64, Int64, Int64], rows: tuple[Int64, Int64, Int64]
) -> tuple[Int64, Int64, Int64]:
    """Busy time, communication time and exposed communication time of each window.

    Args:
        trace: the attributed trace.
        windows: device, start and end of each window.
        rows: device, start and end of each activity.
    """
    group, start, end = (np.concatenate(pair) for pair in zip(windows, rows, strict=True))
    timeline = OneTimeline.of(group, start, end, int(group.max()) + 1)
    count = len(windows[0])
    begins, ends = timeline.start[:count], timeline.end[:count]
    starts, finishes = timeline.start[count:], timeline.end[count:]
    talks = communicates(trace)
    works = computes(trace, talks)
    talking, computing = talks.to_numpy(), works.to_numpy()

    def covered(mask: Mask) -> Int64:
        return covered_lengths(begins, ends, starts[mask], finishes[mask])

    exposed = covered(computing | talking) - covered(computing)
    return covered(np.ones(len(starts), np.bool_)), covered(talking), exposed


def _ended_before(rows: tuple[Int64, Int64, Int64], place: Int64, first: Int64) -> Int64:
    """For each step, the latest end of the activities outside of steps that start before the step's own work.

    It is at most the start of the step's own work; `NEVER` without such activities.

    Args:
        rows: device, start and end of activities outside of steps.
        place: device of each step.
        first: start of each step's own work.
    """
    device, start, finish = rows
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
