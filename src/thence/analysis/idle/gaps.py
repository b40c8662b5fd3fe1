"""The gaps in which devices are idle, how much of each the trace explains, and the XLA program that each interrupts.

An idle device has nothing on any of its streams. So the activity that ends an idle gap begins soon after its launch,
unless its stream waits for an event. With the launch call lasting from ``b`` to ``e``, a gap is divided into:

    before b          the host had not launched it yet
    b to e            the call; without this and the next part if it was launched before the gap
    latency           `MAX_LAUNCH_LATENCY_NS` after the call returned, or `MAX_QUEUED_GAP_NS` after the gap began if it
                      was launched before the gap; the whole rest if the same call launched an activity that began
                      before the gap: nodes of a CUDA graph wait for each other and for the graph's conditions
    held              if its stream waits for events: while the work before them runs, and `MAX_LAUNCH_LATENCY_NS` after
                      its end and after the gap began; host functions and memory values that its stream waits for have
                      no recorded end, so they hold the whole rest
    the rest          unexplained: the device did, or its stream waited for, something that the trace does not contain

`thence.analysis.idle.causes` names a cause for each part, and unknown for the last (reason started_late).
`thence.analysis.soundness` judges how much of the time is unexplained. Activities that a what-if cannot explain
(`thence.analysis.whatif.prediction`) are more: they include those that waited while the device was busy.

Idle time is assigned to XLA programs as in `thence.analysis.programs.programs`: ``inside`` the execution that
it interrupts, or ``before`` the execution that it delays. The two modules agree to the nanosecond if
programs do not overlap and XLA's autotuner ran nothing. Here, trials of the autotuner are not programs, so the idle
time around them is ``before`` the next program. Time in which an activity outside of any program ran is not idle in
either module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.selection.windows import covers_only_part, cut_to_windows, windows_of_selection
from thence.attribution.waiting import event_edges
from thence.model.attributed import once_per_trace
from thence.model.columns import row_numbers
from thence.model.grouped_intervals import in_order, numbered
from thence.model.intervals import NEVER, NO_ROW, Intervals, gaps, last_begun, longest_begun, reached_before
from thence.model.names import matching
from thence.model.tables import API_CALLS
from thence.model.thresholds import MAX_LAUNCH_LATENCY_NS, MAX_QUEUED_GAP_NS

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.tables import Tables
    from thence.units import Ns


_LATEST = int(np.iinfo(np.int64).max)
_HOLDING_CALLS = r"(?:LaunchHostFunc|StreamAddCallback|StreamWaitValue|StreamBatchMemOp|WaitExternalSemaphores)"
"""Calls that make a stream wait for the host, for a value in memory or for another API: their ends are not recorded."""
_PROGRAM_GAPS = {
    "rank": pl.Int32, "device": pl.Int32, "start": pl.Int64, "duration": pl.Int64, "where": pl.String,
    "program": pl.String, "execution": pl.UInt32,
}  # fmt: skip


@dataclass(frozen=True)
class Gaps(Intervals):
    """Intervals (ns), in order of time, in which one or several devices are idle.

    Attributes:
        gpu: row of the activity that starts at the end of each gap, `NO_ROW` if there is none.
    """

    gpu: Int64


@dataclass(frozen=True)
class AllGaps(Gaps):
    """The gaps of all devices, in order of device and time.

    Attributes:
        devices: rank and device, by number.
        first: first start of each device's activities, ns.
        first_gpu: row of that activity.
        span: from there to the last end, ns.
        number: number of the device of each gap.
    """

    devices: pl.DataFrame
    first: Int64
    first_gpu: Int64
    span: Int64
    number: Int64

    @classmethod
    def of(cls, tables: Tables) -> AllGaps:
        """The gaps between the first start and the last end of every device, as `Summary.idle_ns` counts them."""
        number, devices = numbered(tables.gpu, "rank", "device")
        start = tables.gpu["start"].to_numpy()
        row = in_order(number, start, devices.height)
        number, start = number[row].astype(np.int64), start[row]
        end = start + tables.gpu["duration"].to_numpy()[row]
        reached = reached_before(end, number)
        empty = (start > reached) & (reached != NEVER)
        first = np.searchsorted(number, np.arange(devices.height))
        span = np.maximum.reduceat(end, first) - start[first] if len(first) else first
        begins, rows = (start[first], row[first]) if len(first) else (first, first)
        return cls(reached[empty], start[empty], row[empty], devices, begins, rows, span, number[empty])

    def chosen(self, which: Mask | slice | Int64) -> AllGaps:
        """Some of the gaps."""
        return replace(
            self, start=self.start[which], end=self.end[which], gpu=self.gpu[which], number=self.number[which]
        )


def gaps_in_spans(tables: Tables, spans: pl.DataFrame) -> AllGaps:
    """`AllGaps` of some devices, also from a time to the first activity, and from the last activity to a time.

    Args:
        tables: device activities.
        spans: these devices and times: rank, device, start, end (ns).
    """
    every = AllGaps.of(tables)
    kept = every.devices.with_row_index("before").join(spans, on=["rank", "device"], maintain_order="left")
    before = kept["before"].to_numpy()
    number = np.full(every.devices.height, NO_ROW)
    number[before] = np.arange(kept.height)
    begin, finish = kept["start"].to_numpy(), kept["end"].to_numpy()
    first, last = every.first[before], (every.first + every.span)[before]
    ours = number[every.number] != NO_ROW
    early, late = np.flatnonzero(begin < first), np.flatnonzero(finish > last)
    columns = (
        (begin[early], every.start[ours], last[late]),
        (first[early], every.end[ours], finish[late]),
        (every.first_gpu[before][early], every.gpu[ours], np.full(len(late), NO_ROW)),
        (early, number[every.number[ours]], late),
    )
    start, end, gpu, of_device = (np.concatenate(parts) for parts in columns)
    devices = kept.select("rank", "device")
    result = AllGaps(start, end, gpu, devices, first, every.first_gpu[before], every.span[before], of_device)
    return result.chosen(np.argsort(of_device, kind="stable"))


@dataclass(frozen=True)
class GapParts:
    """The borders of the parts of gaps, in ns and in order; a part is empty if its borders are equal.

    Attributes:
        launched: end of the time before the launch.
        returned: end of the launch call.
        latency_end: end of the time that a launch or a queue takes.
        held_end: end of the time in which events hold the activity; the unexplained rest begins.
        queued: whether the activity was launched before the gap.
        known: whether the launch is known; otherwise, all borders are the begin of the gap, and held_end is its end.
    """

    launched: Int64
    returned: Int64
    latency_end: Int64
    held_end: Int64
    queued: Mask
    known: Mask


@dataclass(frozen=True)
class LaunchTimes:
    """When activities were launched, by row of gpu.

    Attributes:
        launched, returned: begin and end of the launch call, ns; -1 where unknown.
        begun: when the first activity of the same launch call began, ns.
        held: as `held_until` returns it.
    """

    launched: Int64
    returned: Int64
    begun: Int64
    held: Int64

    @classmethod
    def of(cls, start: Int64, call: Int64, launched: Int64, returned: Int64, held: Int64) -> LaunchTimes:
        """From the starts of activities and from the calls that launched them.

        Args:
            start: of each activity, ns.
            call: number of the call that launched each activity, `NO_ROW` where it is not an API call.
            launched: as the attribute.
            returned: as the attribute.
            held: as the attribute.
        """
        begun = start.copy()
        known = np.flatnonzero(call != NO_ROW)
        first = np.full(int(call.max(initial=NO_ROW)) + 1, _LATEST)
        np.minimum.at(first, call[known], start[known])
        begun[known] = first[call[known]]
        return cls(launched, returned, begun, held)

    def parts(self, idle: Gaps) -> GapParts:
        """The parts of gaps."""
        begin, end = idle.start, idle.end
        gpu = np.maximum(idle.gpu, 0)
        known = (idle.gpu != NO_ROW) & (self.launched[gpu] >= 0)
        launched = np.where(known, np.clip(self.launched[gpu], begin, end), begin)
        returned = np.where(known, np.clip(self.returned[gpu], launched, end), begin)
        queued = known & (self.launched[gpu] <= begin)
        latency = np.where(queued, MAX_QUEUED_GAP_NS, MAX_LAUNCH_LATENCY_NS)
        latency[queued & (self.begun[gpu] < begin)] = _LATEST >> 1
        latency_end = np.where(known, np.minimum(end, returned + latency), begin)
        waits = self.held[gpu] != NEVER
        # To see that an event has happened takes time, too.
        held_end = np.where(waits, np.maximum(self.held[gpu], begin + MAX_LAUNCH_LATENCY_NS), latency_end)
        held_end = np.where(known, np.clip(held_end, latency_end, end), end)
        return GapParts(launched, returned, latency_end, held_end, queued, known)


@once_per_trace
def held_activities(trace: Attributed) -> Int64:
    """`held_until` of a trace whose launches are known."""
    return held_until(trace, row_numbers(trace.places["launch"]))


def held_until(tables: Tables, launch: Int64) -> Int64:
    """Until when events, host functions and memory values explain that each activity waits, ns; `NEVER` if none do.

    Args:
        tables: with complete events (`thence.attribution.waiting.completed_waiting`).
        launch: host row that launched each activity, `NO_ROW` where unknown.
    """
    held = np.full(tables.gpu.height, NEVER)
    edges = event_edges(tables, launch)
    awaited = edges["awaited"].to_numpy().astype(np.int64)
    end = tables.gpu["start"].to_numpy() + tables.gpu["duration"].to_numpy()
    np.maximum.at(held, edges["waiting"].to_numpy().astype(np.int64), end[awaited] + MAX_LAUNCH_LATENCY_NS)
    calls = tables.host[["rank", "category", "name", "start"]].filter(pl.col("category").is_in(API_CALLS))
    holding = matching(calls["name"], _HOLDING_CALLS)
    if holding.any():
        held[_behind_calls(tables, launch, calls.filter(holding).sort("rank", "start"))] = _LATEST
    return held


def _behind_calls(tables: Tables, launch: Int64, calls: pl.DataFrame) -> Int64:
    """Rows of gpu with one of the calls between their launch and the previous launch on their stream."""
    rows = np.flatnonzero(launch != NO_ROW)
    launched = tables.gpu[rows].select("rank", "device", "stream").with_columns(
        row=pl.Series(rows), time=tables.host["start"].gather(launch[rows])
    )  # fmt: skip
    stream = ["rank", "device", "stream"]
    launched = launched.sort("time").with_columns(before=pl.col("time").shift(1).over(stream).fill_null(NEVER))
    last = launched.join_asof(
        calls.select("rank", "start", called="start").sort("start"),
        left_on="time", right_on="start", by="rank", check_sortedness=False,
    )  # fmt: skip
    behind = last.filter(pl.col("called") >= pl.col("before"))["row"]
    return behind.to_numpy().astype(np.int64)


def program_gaps(trace: Attributed) -> pl.DataFrame:
    """Lists every idle gap of every device, as far as it is in the windows of `windows_of_selection`, if known.

    Returns:
        columns rank, device, start and duration (ns), where (inside, before or after; null if the
        device ran no XLA program), program (its name; null for ``after``, the time after the last
        execution) and execution (its row in ``programs``).
    """
    names = trace.programs["name"].cast(pl.String)
    programs = trace.programs.with_row_index("row").filter(pl.col("program").is_not_null())  # no autotuner's trials
    ordered = programs.sort("start", maintain_order=True)
    executions = dict(iter(ordered.group_by("rank", "device", maintain_order=True)))
    parts = [pl.DataFrame(schema=_PROGRAM_GAPS)]
    for (rank, device), activities in trace.around.gpu.group_by("rank", "device", maintain_order=True):
        start = activities["start"].to_numpy()
        begin, end = gaps(start, start + activities["duration"].to_numpy())
        where, row = _programs_at(executions.get((rank, device)), begin)
        device_of = {"rank": np.full(len(begin), rank, np.int32), "device": np.full(len(begin), device, np.int32)}
        times = {"start": begin, "duration": end - begin}
        places = {"where": where, "program": names.gather(row), "execution": row}
        parts.append(pl.DataFrame({**device_of, **times, **places}, _PROGRAM_GAPS))
    every = pl.concat(parts)
    if not covers_only_part(trace) or trace.selection.idle_unknown:
        return every
    every = every.sort("rank", "device", "start")
    row_of_gap, _, begins, ends = cut_to_windows(every, windows_of_selection(trace))
    return every[row_of_gap].with_columns(start=pl.Series(begins), duration=pl.Series(ends - begins))


def idle_inside_programs(trace: Attributed) -> Ns | None:
    """Idle time inside the executions of XLA programs, without executions that tables show in separate rows.

    None if no program ran, or if the activities were filtered by name (``only``), so that executions are incomplete.
    """
    if trace.programs.is_empty() or trace.selection.only is not None:
        return None
    counted = trace.gpu["program"].filter(trace.places["separate"].is_null()).drop_nulls().unique()
    chosen = pl.col("execution").is_in(counted.cast(pl.UInt32).implode())
    inside = program_gaps(trace).filter(pl.col("where") == "inside", chosen)
    return int(inside["duration"].sum())


def _programs_at(executions: pl.DataFrame | None, time: Int64) -> tuple[pl.Series, pl.Series]:
    """For times at which a device is idle: inside, before or after, and the row of the program execution or null.

    Args:
        executions: of programs on the device, in order of start, with their rows; None if it ran none.
        time: ns.
    """
    if executions is None:
        nothing = pl.Series([None], dtype=pl.UInt32).new_from_index(0, len(time))
        return nothing.cast(pl.String), nothing
    row = executions["row"].to_numpy()
    begin = executions["start"].to_numpy()
    end = begin + executions["duration"].to_numpy()
    begun = last_begun(begin, time)
    around = np.where(end[begun] > time, begun, longest_begun(begin, end, time))
    inside = (begun != NO_ROW) & (end[around] > time)
    following = np.minimum(begun + 1, len(begin) - 1)
    before = ~inside & (begun + 1 < len(begin))
    where = pl.Series(["inside", "before", "after"]).gather(np.where(inside, 0, np.where(before, 1, 2)))
    program_row = pl.Series(row[np.where(inside, around, following)], dtype=pl.UInt32)
    return where, program_row.set(pl.Series(~inside & ~before), None)
