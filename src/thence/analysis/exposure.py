"""Exposed communication: the time in which a device communicates and computes nothing.

    communication = union of the activities that `communicates` names
    compute       = union of all other kernels and thunks; copies and sets are neither
    exposed       = length of (communication minus compute), per device

Each exposed instant is charged to one activity, so that rows add up to the device: to the one that began
first among those that run then, of equal ones to the lowest row. For one activity

    duration = exposed (charged to it) + hidden (compute runs) + overlapped (charged to an earlier one)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.kernel_groups import communicates, computes
from thence.model.intervals import covered_lengths, reached_before, union

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Intervals = tuple[Int64, Int64]

__all__ = ["Exposure", "exposure"]

_DEVICES = {
    "rank": pl.Int32(),
    "device": pl.Int32(),
    "communication_ns": pl.Int64(),
    "exposed_ns": pl.Int64(),
}


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


def exposure(trace: Attributed) -> Exposure:
    """Divides the time of all communication into exposed, hidden and overlapped."""
    talking = communicates(trace)
    lanes = trace.gpu.select("rank", "device", "start", "duration").with_columns(
        talking, computes(trace, talking)
    )
    lanes = lanes.with_row_index("gpu").filter(pl.col("communicates") | pl.col("computes"))
    parts, devices = [], []
    for (rank, device), rows in sorted(lanes.group_by("rank", "device"), key=lambda part: part[0]):
        ours = rows.filter("communicates").sort("start", "gpu")
        if ours.is_empty():
            continue
        compute = union(*_intervals(rows.filter("computes")))
        start, end = _intervals(ours)
        hidden = covered_lengths(start, end, *compute)
        charged = np.minimum(np.maximum(start, reached_before(end)), end)
        exposed = end - charged - covered_lengths(charged, end, *compute)
        begins, ends = union(start, end)
        parts.append(
            ours.select("gpu").with_columns(
                exposed_ns=exposed, hidden_ns=hidden, overlapped_ns=end - start - hidden - exposed
            )
        )
        devices.append((rank, device, int((ends - begins).sum()), int(exposed.sum())))
    schema = {
        "gpu": pl.UInt32(),
        **dict.fromkeys(("exposed_ns", "hidden_ns", "overlapped_ns"), pl.Int64()),
    }
    return Exposure(
        pl.DataFrame(devices, schema=_DEVICES, orient="row"),
        pl.concat(parts).sort("gpu") if parts else pl.DataFrame(schema=schema),
    )


def _intervals(rows: pl.DataFrame) -> Intervals:
    start = rows["start"].to_numpy()
    return start, start + rows["duration"].to_numpy()
