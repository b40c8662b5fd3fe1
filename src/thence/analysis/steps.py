"""The steps of a program on every device, in order of time.

A step begins on a device when the host has begun it and the work of earlier steps has ended, whichever is
later; it ends when the host has ended it and its own work has, whichever is later, but not after the next
begins. Steps of one device therefore never overlap, and where the host's steps follow each other without a
break, as those of torch.profiler do, they tile the time. On a device that runs behind the host, a step is the
time of its work; on one that waits for the host, it is the step of the host.

    begin = max(end of all earlier work, min(begin on the host, first start of its own activities))
    end   = max(end of its own and all earlier work, min(end on the host, begin of the next))

Work belongs to the step in which it was launched. What was launched outside of every step is earlier work of
the steps whose own work begins after it. All times of a step are those of its window, whatever was launched
where:

    busy     = union of the activities in the window
    exposed  = part of it in which communication ran and nothing computed (`thence.analysis.exposure`)
    idle     = duration - busy

Where the trace holds no steps, the executions of the XLA program that took most of the device's time, of those
that ran more than once, are the steps: from one launch to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import communicates, computes
from thence.errors import MissingData
from thence.model.intervals import NEVER, NO_ROW, covered_lengths, last_begun

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
        frame: one row per rank, device and step that launched something there, by rank, device and start;
            columns as in `STEP`. step: its name. number: the number at the end of the name, null without.
            start (ns on the trace's clock) and duration (ns): on the device, see the module. busy_ns, idle_ns,
            communication_ns, exposed_ns: in that window; busy_ns + idle_ns = duration. host_start, host_ns:
            of the range on the host. activities: how many it launched. first: whether it is the first on its
            device, which may contain warm-up.
        kind: what a step is: one of the profiler's or the program's own (step), or an execution of an XLA
            program (program).
    """

    frame: pl.DataFrame
    kind: Literal["step", "program"]

    def to_json(self) -> dict[str, Any]:
        """The steps as JSON values."""
        times = {"start": "start_ns", "duration": "duration_ns", "host_start": "host_start_ns"}
        return {"kind": self.kind, "steps": self.frame.rename(times).to_dicts()}


@dataclass(frozen=True)
class _Ranges:
    """Steps of one device as the host saw them, in order: names, begins and ends (ns).

    ``of`` is the step of each activity of the device, `NO_ROW` for none; ``outside`` are those that
    are known to have been launched outside of every step.
    """

    name: pl.Series
    begin: Int64
    end: Int64
    of: Int64
    outside: Mask


def steps(attributed: Attributed) -> Steps:
    """The steps of every device, in order of time.

    Args:
        attributed: the whole trace, or ranks and devices of it. Of a part in time, or of searched activities,
            the busy time is that of the part.

    Raises:
        MissingData: the trace holds no steps and no executions of XLA programs, or nothing ran in them.
    """
    host = attributed.host.filter(pl.col("category") == "step")
    kind: Literal["step", "program"] = "program" if host.is_empty() else "step"
    talks = communicates(attributed)
    rows = attributed.gpu.select("rank", "device", "start", "duration", "program").with_columns(
        launch=attributed.places["launch"].cast(pl.Int64).fill_null(NO_ROW),
        communicates=talks,
        computes=computes(attributed, talks),
    )
    parts = []
    for (rank, device), ours in sorted(rows.group_by("rank", "device"), key=lambda part: part[0]):
        if kind == "step":
            ranges = _of_host(attributed, host.filter(pl.col("rank") == rank), ours)
        else:
            ranges = _of_programs(attributed, (rank, device), ours)
        if ranges is not None and (ranges.of != NO_ROW).any():
            place = {"rank": pl.lit(rank), "device": pl.lit(device)}
            parts.append(_windows(ranges, ours).with_columns(**place).select(list(STEP)))
    if not parts:
        raise MissingData(
            f"{', '.join(attributed.meta.inputs)}: holds no steps; torch.profiler's step(), thence.step() and "
            "jax.profiler.StepTraceAnnotation record them"
        )
    return Steps(pl.concat([part.cast(STEP) for part in parts]), kind)  # type: ignore[arg-type]


def _of_host(trace: Attributed, ranges: pl.DataFrame, ours: pl.DataFrame) -> _Ranges | None:
    """The step that was open on the host when each activity was launched."""
    if ranges.is_empty():
        return None
    ranges = ranges.sort("start", maintain_order=True)
    begin = ranges["start"].to_numpy()
    end = begin + ranges["duration"].to_numpy()
    launch = ours["launch"].to_numpy()
    launched = trace.host["start"].to_numpy()[np.maximum(launch, 0)]
    last = last_begun(begin, launched)
    known = launch != NO_ROW
    inside = known & (last != NO_ROW) & (launched < end[last])
    of = np.where(inside, last, NO_ROW)
    return _Ranges(ranges["name"].cast(pl.String), begin, end, of, known & ~inside)


def _of_programs(
    trace: Attributed, device: tuple[object, ...], ours: pl.DataFrame
) -> _Ranges | None:
    """Executions of the program that took most of the device's time, each from its launch to the next.

    A program that ran once is chosen only where none ran again.
    """
    executions = (
        trace.programs.with_row_index("row")
        .filter(pl.col("rank") == device[0], pl.col("device") == device[1])
        .filter(pl.col("program").is_not_null())
    )
    if executions.is_empty():
        return None
    spent = ours.group_by("program").agg(ns=pl.col("duration").sum())
    times = (
        executions.select("row", pl.col("program").alias("identity"))
        .join(spent, left_on="row", right_on="program")
        .group_by("identity")
        .agg(repeated=pl.len() > 1, ns=pl.col("ns").sum())
        .sort("repeated", "ns", "identity")
    )
    if times.is_empty():
        return None
    chosen = executions.filter(pl.col("program") == times["identity"][-1]).sort("start")
    finish = chosen["start"] + chosen["duration"]
    begin = chosen["launch"].fill_null(chosen["start"]).to_numpy()
    end = np.append(begin[1:], int(finish[-1]))
    number = np.full(trace.programs.height, NO_ROW, np.int64)
    number[chosen["row"].to_numpy()] = np.arange(chosen.height)
    program = ours["program"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    of = np.where(program == NO_ROW, NO_ROW, number[program])
    names = pl.select(pl.format("{}#{}", chosen["name"].cast(pl.String), chosen["execution"]))
    return _Ranges(names.to_series(), begin, np.maximum(end, begin), of, of == NO_ROW)


def _windows(ranges: _Ranges, ours: pl.DataFrame) -> pl.DataFrame:
    """The window of each step that launched something on the device, and what ran there."""
    start = ours["start"].to_numpy()
    finish = start + ours["duration"].to_numpy()
    count = np.bincount(ranges.of[ranges.of != NO_ROW], minlength=len(ranges.begin))
    used = np.flatnonzero(count)
    place = np.full(len(ranges.begin), NO_ROW, np.int64)
    place[used] = np.arange(len(used))
    of = np.where(ranges.of == NO_ROW, NO_ROW, place[ranges.of])
    first = np.full(len(used), np.iinfo(np.int64).max)
    last = np.full(len(used), NEVER)
    np.minimum.at(first, of[of != NO_ROW], start[of != NO_ROW])
    np.maximum.at(last, of[of != NO_ROW], finish[of != NO_ROW])
    outside = _ended_before(start[ranges.outside], finish[ranges.outside], first)
    worked = np.maximum.accumulate(np.maximum(last, outside))
    earlier = np.maximum(np.concatenate([[NEVER], worked[:-1]]), outside)
    begin = np.maximum(earlier, np.minimum(ranges.begin[used], first))
    following = np.append(begin[1:], np.iinfo(np.int64).max)
    end = np.maximum(np.maximum(worked, begin), np.minimum(ranges.end[used], following))
    busy, computing, talking = (
        covered_lengths(begin, end, start[mask], finish[mask])
        for mask in (
            np.ones(len(start), np.bool_),
            ours["computes"].to_numpy(),
            ours["communicates"].to_numpy(),
        )
    )
    both = ours["computes"].to_numpy() | ours["communicates"].to_numpy()
    exposed = covered_lengths(begin, end, start[both], finish[both]) - computing
    name = ranges.name.gather(used)
    return pl.DataFrame(
        {
            "step": name,
            "number": name.str.extract(_NUMBER).cast(pl.Int64),
            "start": begin,
            "duration": end - begin,
            "busy_ns": busy,
            "idle_ns": end - begin - busy,
            "communication_ns": talking,
            "exposed_ns": exposed,
            "host_start": ranges.begin[used],
            "host_ns": (ranges.end - ranges.begin)[used],
            "activities": count[used],
            "first": np.arange(len(used)) == 0,
        }
    )


def _ended_before(start: Int64, finish: Int64, first: Int64) -> Int64:
    """The latest end of the activities that start before each step's own work, `NEVER` for none."""
    order = np.argsort(start, kind="stable")
    latest = np.concatenate([[NEVER], np.maximum.accumulate(finish[order])])
    result: Int64 = latest[np.searchsorted(start[order], first)]
    return np.minimum(result, first)
