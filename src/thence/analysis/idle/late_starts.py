"""Until when the trace explains that a device was idle before an activity: one definition for all that judge it.

An idle device has nothing on any of its streams. So the activity that ends an idle gap begins soon after its launch,
unless its stream waits for an event. With the launch call lasting from ``b`` to ``e``, a gap is divided into:

    before b          the host had not launched it yet
    b to e            the call; without this and the next part if it was launched before the gap
    up to patience    `MAX_LAUNCH_LATENCY_NS` after the call returned, or `MAX_QUEUED_GAP_NS` after the gap began if it
                      was launched before the gap; the whole rest if the same call launched an activity that began
                      before the gap: nodes of a CUDA graph wait for each other and for the graph's conditions
    up to held        if its stream waits for events: while the work before them runs, and `MAX_LAUNCH_LATENCY_NS` after
                      its end and after the gap began; host functions and memory values that its stream waits for have
                      no recorded end, so they hold the whole rest
    the rest          unexplained: the device did, or its stream waited for, something that the trace does not contain

`thence.analysis.idle.causes` names a cause for each part, and unknown for the last (reason started_late).
`thence.analysis.soundness` judges how much of the time is unexplained. Activities that a what-if cannot explain
(`thence.analysis.whatif.health`) are more: they include those that waited while the device was busy.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.waiting import event_edges
from thence.model.grouped_intervals import numbered
from thence.model.intervals import NEVER, NO_ROW, reached_before
from thence.model.names import matching
from thence.model.tables import API_CALLS
from thence.model.thresholds import MAX_LAUNCH_LATENCY_NS, MAX_QUEUED_GAP_NS

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from thence.model.arrays import Int64
    from thence.model.tables import Tables


_LATEST = int(np.iinfo(np.int64).max)
_HOLDING = r"(?:LaunchHostFunc|StreamAddCallback|StreamWaitValue|StreamBatchMemOp|WaitExternalSemaphores)"
"""Calls that make a stream wait for the host, for a value in memory or for another API: their ends are not recorded."""


@dataclass(frozen=True)
class Gaps:
    """Times in which a device is idle.

    Attributes:
        rank, device: of the device.
        start, end: ns, in order of time.
        gpu: row of the activity that starts at the end of each gap, `NO_ROW` if there is none.
    """

    rank: int
    device: int
    start: Int64
    end: Int64
    gpu: Int64


@dataclass(frozen=True)
class AllGaps:
    """The idle gaps of all devices, in order of device and time.

    Attributes:
        devices: rank and device, by number.
        first: first start of each device's activities, ns.
        first_gpu: row of that activity.
        span: from there to the last end, ns.
        number: number of the device of each gap.
        start, end, gpu: as `Gaps`.
    """

    devices: pl.DataFrame
    first: Int64
    first_gpu: Int64
    span: Int64
    number: Int64
    start: Int64
    end: Int64
    gpu: Int64

    @classmethod
    def of(cls, tables: Tables) -> AllGaps:
        """The gaps between the first start and the last end of every device, as `Summary.idle_ns` counts them."""
        number, devices = numbered(tables.gpu, "rank", "device")
        start = tables.gpu["start"].to_numpy()
        row = np.lexsort((start, number))
        number, start = number[row].astype(np.int64), start[row]
        end = start + tables.gpu["duration"].to_numpy()[row]
        reached = reached_before(end, number)
        empty = (start > reached) & (reached != NEVER)
        first = np.searchsorted(number, np.arange(devices.height))
        span = np.maximum.reduceat(end, first) - start[first] if len(first) else first
        begins, rows = (start[first], row[first]) if len(first) else (first, first)
        return cls(devices, begins, rows, span, number[empty], reached[empty], start[empty], row[empty])

    def chosen(self, which: npt.NDArray[np.bool_]) -> AllGaps:
        """Some of the gaps."""
        return replace(
            self, number=self.number[which], start=self.start[which], end=self.end[which], gpu=self.gpu[which]
        )


def device_gaps(tables: Tables, spans: Mapping[tuple[int, int], tuple[int, int]] | None = None) -> list[Gaps]:
    """`AllGaps` device by device.

    Args:
        tables: device activities.
        spans: for some ranks and devices, a start and an end (ns): only these devices have gaps, which also reach
            from the start to the first activity, and from the last activity to the end.
    """
    gaps = AllGaps.of(tables)
    borders = np.searchsorted(gaps.number, np.arange(gaps.devices.height + 1)).tolist()
    found = [
        Gaps(rank, device, gaps.start[low:high], gaps.end[low:high], gaps.gpu[low:high])
        for (rank, device), (low, high) in zip(gaps.devices.rows(), itertools.pairwise(borders), strict=True)
    ]
    if spans is None:
        return found
    return [
        _reaching(device, spans[device.rank, device.device], int(first), int(first + span), int(row))
        for device, first, span, row in zip(found, gaps.first, gaps.span, gaps.first_gpu, strict=True)
        if (device.rank, device.device) in spans
    ]


def _reaching(gaps: Gaps, span: tuple[int, int], first: int, last: int, row: int) -> Gaps:
    """The gaps of a device with those before its first activity, which has this row, and after its last one."""
    before, after = int(span[0] < first), int(span[1] > last)
    return replace(
        gaps,
        start=np.concatenate([[span[0]][:before], gaps.start, [last][:after]]).astype(np.int64),
        end=np.concatenate([[first][:before], gaps.end, [span[1]][:after]]).astype(np.int64),
        gpu=np.concatenate([[row][:before], gaps.gpu, [NO_ROW][:after]]).astype(np.int64),
    )


@dataclass(frozen=True)
class Parts:
    """The borders of the parts of gaps, in ns and in order; a part is empty if its borders are equal.

    Attributes:
        launched: end of the time before the launch.
        returned: end of the launch call.
        patience: end of the time that a launch or a queue takes.
        held: end of the time in which events hold the activity; the unexplained rest begins.
        queued: whether the activity was launched before the gap.
        known: whether the launch is known; otherwise, all borders are the begin of the gap, and held is its end.
    """

    launched: Int64
    returned: Int64
    patience: Int64
    held: Int64
    queued: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Starts:
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
    def of(cls, start: Int64, call: Int64, launched: Int64, returned: Int64, held: Int64) -> Starts:
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

    def parts(self, of: Gaps | AllGaps) -> Parts:
        """The parts of gaps."""
        begin, end = of.start, of.end
        act = np.maximum(of.gpu, 0)
        known = (of.gpu != NO_ROW) & (self.launched[act] >= 0)
        launched = np.where(known, np.clip(self.launched[act], begin, end), begin)
        returned = np.where(known, np.clip(self.returned[act], launched, end), begin)
        queued = known & (self.launched[act] <= begin)
        patience = np.where(queued, MAX_QUEUED_GAP_NS, MAX_LAUNCH_LATENCY_NS)
        patience[queued & (self.begun[act] < begin)] = _LATEST >> 1
        patient = np.where(known, np.minimum(end, returned + patience), begin)
        waits = self.held[act] != NEVER  # to see that an event has happened takes time, too
        held = np.where(waits, np.maximum(self.held[act], begin + MAX_LAUNCH_LATENCY_NS), patient)
        held = np.where(known, np.clip(held, patient, end), end)
        return Parts(launched, returned, patient, held, queued, known)


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
    calls = tables.host.select("rank", "category", "name", "start").filter(pl.col("category").is_in(API_CALLS))
    holding = calls.filter(matching(calls["name"], _HOLDING)).sort("rank", "start")
    if not holding.is_empty():
        held[_behind_calls(tables, launch, holding)] = _LATEST
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
