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

from thence.model.intervals import levels, unions
from thence.model.one_timeline import OneTimeline, numbered

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed
    from thence.units import Ns

    Int64 = npt.NDArray[np.int64]

__all__ = ["exposed_time"]

_OTHER, _OPEN = 1 << 52, 1 << 36
"""Weights of open intervals: of work that is not selected, and of a row of the table, in addition to its number."""


def exposed_time(trace: Attributed, parts: pl.DataFrame, row: Int64) -> tuple[Int64, Ns]:
    """The exposed time of each part of an activity's time, and the time in which several rows ran.

    Args:
        trace: attributed.
        parts: as `thence.analysis.group_by.time_by_place` returns them.
        row: number of the row of the table that each part belongs to, shape (m,), less than 2^31.

    Returns:
        ns for each part, whose sums over the parts of a row are its exposed time, shape (m,); and the busy time of the
        selected work that is in none of them. An activity with several parts counts as a row of its own, whose exposed
        time is divided like its duration.
    """
    gpu = parts["gpu"].to_numpy()
    several = np.bincount(gpu, minlength=trace.gpu.height)[gpu] > 1
    first = int(row.max(initial=-1)) + 1
    owner = np.zeros(trace.gpu.height, np.int64)
    owner[gpu] = np.where(several, first + gpu, row)
    exposed, overlapped = _exposed_groups(trace, owner)
    return _divided(exposed, parts, owner), overlapped


def _exposed_groups(trace: Attributed, owner: Int64) -> tuple[Int64, Ns]:
    """The time in which only work of one group ran, by group; and the rest of the busy time."""
    frames = [trace.gpu] if trace.unselected is None else [trace.gpu, trace.unselected.gpu]
    every = pl.concat([frame.select("rank", "device", "start", "duration") for frame in frames])
    device, devices = numbered(every, "rank", "device")
    begin = every["start"].to_numpy()
    line = OneTimeline.of(device, begin, begin + every["duration"].to_numpy(), devices.height)
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
    exposed = np.zeros(int(owner.max(initial=-1)) + 1, np.int64)
    np.add.at(exposed, level[alone] % _OPEN, length[alone])
    busy = int(length[(level % _OTHER) >= _OPEN].sum())
    return exposed, busy - int(exposed.sum())


def _divided(exposed: Int64, parts: pl.DataFrame, owner: Int64) -> Int64:
    """The exposed time of a group divided among its parts in proportion to their durations, in whole ns.

    Each part is the difference of consecutive rounded cumulative sums, so that rounding loses nothing.
    """
    of_part = owner[parts["gpu"].to_numpy()]
    frame = pl.DataFrame({"group": of_part, "duration": parts["duration"]})
    whole = pl.col("duration").sum().over("group")
    reached = pl.col("duration").cum_sum().over("group") / whole.cast(pl.Float64)
    ends = (reached.fill_nan(0) * pl.Series(exposed[of_part])).round().cast(pl.Int64)
    divided = frame.select("group", ends=ends).select(
        pl.col("ends") - pl.col("ends").shift(1).over("group").fill_null(0)
    )
    return divided.to_series().to_numpy()
