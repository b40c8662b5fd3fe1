"""For each row of a table, the time in which nothing else ran on the GPU.

A kernel that runs beside others costs less than its duration: if it were free, the others would still take their time.
So `total_ns` alone does not say what can be gained. The exposed time of a row is that in which work of this row ran on
a device, and no other work did, not even work that is not selected. Together with the time in which work of several
rows ran, or unselected work beside it, the exposed times add up to the busy time of the work in the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.group_by import split_by_weight
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import levels, unions

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.units import Ns


_OTHER, _OPEN = 1 << 52, 1 << 36
"""Weights of open intervals: of work that is not selected, and of a row of the table, in addition to its number."""


def exposed_time(trace: Attributed, parts: pl.DataFrame, row: Int64) -> tuple[Int64, Ns]:
    """The exposed time of the rows of a table, and the time in which several rows ran.

    Args:
        trace: attributed.
        parts: as `thence.analysis.group_by.time_by_place` returns them.
        row: the row of the table that each part belongs to, shape (m,): the number of the first part of that row.

    Returns:
        ns for each part, whose sums over the parts of a row are its exposed time, shape (m,); and the busy time of the
        selected work that is in none of them. An activity with several parts counts as a row of its own, whose exposed
        time is divided like its duration.
    """
    gpu = parts["gpu"].to_numpy()
    several = np.bincount(gpu, minlength=trace.gpu.height)[gpu] > 1
    owner = np.zeros(trace.gpu.height, np.int64)
    owner[gpu] = np.where(several, len(row) + gpu, row)
    exposed, overlapped = _exposed_groups(trace, owner, len(row) + trace.gpu.height)
    result = exposed[: len(row)].copy()
    share = parts["duration"] / trace.gpu["duration"].gather(parts["gpu"].cast(pl.UInt32))
    claims = pl.DataFrame({"gpu": parts["gpu"], "weight": share.fill_nan(0)}).filter(several)
    result[several] += split_by_weight(pl.Series(exposed[len(row) :]), claims).to_numpy()
    return result, overlapped


def _exposed_groups(trace: Attributed, owner: Int64, groups: int) -> tuple[Int64, Ns]:
    """The time in which only work of one group ran, by group, shape (groups,); and the rest of the busy time."""
    frames = [trace.gpu] if trace.unselected is None else [trace.gpu, trace.unselected.gpu]
    every = pl.concat([frame.select("rank", "device", "start", "duration") for frame in frames])
    device, devices = numbered(every, "rank", "device")
    begin = every["start"].to_numpy()
    line = GroupedIntervals.of(device, begin, begin + every["duration"].to_numpy(), devices.height)
    count = len(owner)
    start, end = line.start[:count], line.end[:count]
    group, opens, closes = unions(owner, start, end)
    others = len(frames) > 1
    pieces = levels(
        np.concatenate([opens, *([start, line.start[count:]] if others else [])]),
        np.concatenate([closes, *([end, line.end[count:]] if others else [])]),
        np.concatenate([
            _OPEN + group,
            # All work less the selected work is the work that is not selected.
            *([np.full(count, -_OTHER), np.full(len(line.start) - count, _OTHER)] if others else []),
        ]),
    )  # fmt: skip
    length, level = pieces[1] - pieces[0], pieces[2]
    alone = level // _OPEN == 1
    exposed = np.zeros(groups, np.int64)
    np.add.at(exposed, level[alone] % _OPEN, length[alone])
    busy = int(length[(level % _OTHER) >= _OPEN].sum())
    return exposed, busy - int(exposed.sum())
