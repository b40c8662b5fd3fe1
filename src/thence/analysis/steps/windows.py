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

`thence.attribution.steps` finds the steps themselves: their times on the host, and which work each of them launched.
`thence.analysis.steps.counted` decides which of them are typical.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import communicates, computes
from thence.analysis.steps.counted import RULES, left_out_of_windows
from thence.attribution.host_rows import row_numbers
from thence.errors import MissingData
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import NEVER, NO_ROW, covered_lengths, reached_before
from thence.model.tables import ENDLESS, NO_STEPS, STEP_KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.selection import StepChoice


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
_STEM = r"[\W_]*\d+\D*$"
_NAMED = {"step": "marked {}", "range": "ranges named {}", "program": "executions of {}", "module": "calls of {}"}
"""What steps are, by their kind, if their names have a common stem."""
_LEFT = {"first": "the first", "warm_up": "{} of warm-up", "outlier": "{} outlying", "last": "the last"}


@dataclass(frozen=True)
class Steps:
    """The steps of a trace.

    Attributes:
        frame: one row per rank, device and step that launched work on the device, sorted by rank, device and
            start; columns as in `STEP`. step: its name. number: as in `thence.model.tables.STEPS`. start (ns on the
            trace's clock) and duration (ns): of its window on the device, see the module's docstring. busy_ns,
            idle_ns, communication_ns, exposed_ns: in that window; busy_ns + idle_ns = duration. host_start,
            host_ns: start and duration on the host. activities: number of activities that it launched. first:
            whether it is the first on its device. left_out: the rule of `thence.analysis.steps.counted.RULES` by
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
    left = [_LEFT[rule].format(count) for rule, count in left_out.items()]
    return f"{what}; without {', '.join(left)}" if left else what


def words_of(kind: str, names: pl.Series) -> str:
    """What steps are, in words.

    Args:
        kind: a key of `STEP_KINDS`.
        names: their names. What several names have in common without their numbers is named.
    """
    stems = names.str.replace(_STEM, "").unique().drop_nulls().sort()
    stem = stems[0] if len(stems) == 1 else ""
    return _NAMED[kind].format(stem) if stem and kind in _NAMED else STEP_KINDS[kind]


def steps(attributed: Attributed) -> Steps:
    """The steps of every device, in order of time.

    Args:
        attributed: the whole trace, or a part of it: then the steps are those of all work of the same ranks and
            devices.

    Raises:
        MissingData: the trace has no steps, or nothing ran in them.
    """
    trace = attributed.around
    of = row_numbers(trace.places["step_row"])
    if not (of != NO_ROW).any():
        raise MissingData(f"{trace.meta.named}: holds no steps: {NO_STEPS}")
    device, devices = numbered(trace.gpu, "rank", "device")
    of_device, windows = _windows(trace, of, device)
    kind = str(trace.steps["kind"].gather(windows["row"]).mode().sort()[0])
    frame = pl.concat([devices[of_device], windows], how="horizontal")
    frame = frame.with_columns(left_out_of_windows(frame, endless=kind in ENDLESS))
    return Steps(frame.select(list(STEP)).cast(STEP), kind)  # type: ignore[arg-type]


def selected_steps(trace: Attributed) -> Steps:
    """The steps in which selected work was launched: all steps, if nothing but ranks and devices is selected.

    Raises:
        MissingData: the trace has no steps, or none of the selected ones.
    """
    found = steps(trace)
    if trace.unselected is None:
        return found
    launched = trace.gpu.select("rank", "device", row=trace.places["step_row"].cast(pl.Int64)).unique()
    frame = found.frame
    if trace.selection.steps is not None:
        frame = selected_windows(frame, trace.selection.steps)
    else:
        frame = frame.join(launched, on=["rank", "device", "row"], how="semi", maintain_order="left")
    if frame.is_empty():
        raise MissingData(f"{trace.meta.named}: holds none of the selected steps")
    return replace(found, frame=frame)


def selected_windows(frame: pl.DataFrame, chosen: StepChoice) -> pl.DataFrame:
    """The rows of `Steps.frame` of the chosen steps."""
    if isinstance(chosen, str):  # TYPICAL
        return frame.filter(pl.col("left_out").is_null())
    first, last = chosen
    number = pl.col("number")
    return frame.filter(
        pl.lit(value=True) if first is None else number >= first, pl.lit(value=True) if last is None else number < last
    )


def _windows(trace: Attributed, of: Int64, device: Int64) -> tuple[Int64, pl.DataFrame]:
    """The window of each step on each device where it launched work, with busy and idle time.

    Args:
        trace: the attributed trace.
        of: the step in which each activity was launched, `NO_ROW` for none.
        device: number of each activity's device.

    Returns:
        The number of each window's device, ascending; and the columns of `STEP` from step on, in order of time on
        each device.
    """
    start = trace.gpu["start"].to_numpy()
    finish = start + trace.gpu["duration"].to_numpy()
    host_start = trace.steps["start"].to_numpy()
    host_ns = trace.steps["duration"].to_numpy()
    inside = np.flatnonzero(of != NO_ROW)
    keys, window, count = np.unique(
        device[inside] * len(host_start) + of[inside], return_inverse=True, return_counts=True
    )
    place, step = np.divmod(keys, len(host_start))
    first = np.full(len(step), np.iinfo(np.int64).max)
    last = np.full(len(step), NEVER)
    np.minimum.at(first, window, start[inside])
    np.maximum.at(last, window, finish[inside])
    before = (trace.places["step_rule"] == "outside_steps").to_numpy()
    outside = _ended_before((device[before], start[before], finish[before]), place, first)
    worked = np.maximum(last, outside)
    earlier = reached_before(worked, place)
    begin = np.maximum(np.maximum(earlier, outside), np.minimum(host_start[step], first))
    worked = np.maximum(worked, earlier)
    following = np.append(begin[1:], 0)
    following[np.append(place[1:] != place[:-1], np.True_)] = np.iinfo(np.int64).max
    host_end = host_start[step] + host_ns[step]
    end = np.maximum(np.maximum(worked, begin), np.minimum(host_end, following))
    busy, talking, exposed = _ran(trace, (place, begin, end), (device, start, finish))
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
    timeline = GroupedIntervals.of(group, start, end, int(group.max()) + 1)
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
