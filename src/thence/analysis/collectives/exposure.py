"""Exposed communication: the time in which a device communicates and computes nothing.

    communication = union of the activities for which `communicates` is true
    compute       = union of all other kernels and thunks; memcpys and memsets are neither
    exposed       = length of (communication minus compute), per device

Each exposed instant is charged to one activity, so that rows add up to the device: among the communication that runs
at that time, to the activity that began first; among those that began at the same time, to the lowest row. For one
activity

    duration = exposed (charged to it) + hidden (compute runs) + overlapped (charged to an earlier activity)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.grouping.kernel_groups import communicates, computes
from thence.model.attributed import once_per_trace
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import covered_lengths, reached_before, union

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

_DEVICES = {"rank": pl.Int32(), "device": pl.Int32(), "communication_ns": pl.Int64(), "exposed_ns": pl.Int64()}
_ROWS = {
    "gpu": pl.get_index_type(), "exposed_ns": pl.Int64(), "hidden_ns": pl.Int64(), "overlapped_ns": pl.Int64(),
}  # fmt: skip


@dataclass(frozen=True)
class Exposure:
    """Exposed and hidden communication of a trace. All times are ns.

    Attributes:
        devices: rank, device, communication_ns (length of the union), exposed_ns; one row per device that
            communicates, ascending.
        rows: gpu (row in ``trace.gpu``, UInt32), exposed_ns, hidden_ns, overlapped_ns of each activity that
            communicates; exposed_ns adds up to that of its device.
    """

    devices: pl.DataFrame
    rows: pl.DataFrame


@once_per_trace
def exposure(trace: Attributed) -> Exposure:
    """Divides the time of all communication into exposed, hidden and overlapped."""
    talking = communicates(trace)
    if not talking.any():
        return Exposure(pl.DataFrame(schema=_DEVICES), pl.DataFrame(schema=_ROWS))
    lanes = trace.gpu.select("rank", "device", "start", "duration").with_columns(talking, computes(trace, talking))
    lanes = lanes.with_row_index("gpu").filter(pl.col("communicates") | pl.col("computes"))
    lanes = lanes.sort("start", "gpu")
    number, devices = numbered(lanes, "rank", "device")
    start = lanes["start"].to_numpy()
    timeline = GroupedIntervals.of(number, start, start + lanes["duration"].to_numpy(), devices.height)
    computing = lanes["computes"].to_numpy()
    compute = union(timeline.start[computing], timeline.end[computing])
    # Sorted by start on the common timeline, the lowest row first among equal starts.
    talking_rows = np.flatnonzero(lanes["communicates"].to_numpy())
    talking_rows = talking_rows[np.argsort(timeline.start[talking_rows], kind="stable")]
    start, end = timeline.start[talking_rows], timeline.end[talking_rows]
    hidden = covered_lengths(start, end, *compute)
    charged = np.minimum(np.maximum(start, reached_before(end)), end)
    exposed = end - charged - covered_lengths(charged, end, *compute)
    device = number[talking_rows]
    frame = pl.DataFrame(
        {
            "gpu": lanes["gpu"].gather(talking_rows),
            "exposed_ns": exposed,
            "hidden_ns": hidden,
            "overlapped_ns": end - start - hidden - exposed,
        }
    )
    sums = np.zeros((2, devices.height), np.int64)
    np.add.at(sums[0], device, end - charged)  # each nanosecond of the union is charged once
    np.add.at(sums[1], device, exposed)
    totals = devices.with_columns(communication_ns=sums[0], exposed_ns=sums[1])
    communicating = np.isin(np.arange(devices.height), device)
    return Exposure(
        totals.filter(communicating).cast(_DEVICES),  # type: ignore[arg-type]
        frame.sort("gpu"),
    )
