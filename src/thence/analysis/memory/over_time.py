"""Memory over time: how much each place holds, from change to change, for charts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.memory.answer import allocations
from thence.analysis.memory.moments import PEAK, moments, readings, zero
from thence.analysis.memory.places import DEVICE, HOST_DEVICE
from thence.errors import MissingData
from thence.model.answer import Answer, TableView

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

BEFORE, OTHERS, NOWHERE = "allocated before the trace", "others", "no place known"
MAX_NAMES = 6
"""Places that are shown by themselves: those with most bytes at the peak."""
_MAX_POINTS = 400
"""Changes that are shown: always the peak, and the highest of each part of the time."""


@dataclass(frozen=True)
class MemoryOverTime(Answer):
    """What one device's memory held over time: the device with the highest peak.

    Attributes:
        by: the kind of the names.
        rank, device: whose memory it is; device None: of the host.
        points: name, time (ns after the first device activity) and bytes: for each name one row at each of the same
            times. The bytes of all names add up to what was allocated.
        names: in the order in which areas are stacked.
        before: the name among them of what was allocated before the trace.
    """

    by: str
    rank: int
    device: int | None
    points: pl.DataFrame
    names: tuple[str, ...]
    before: str = BEFORE

    @property
    def where(self) -> str:
        """Whose memory it is, in words."""
        return "the host" if self.device is None else f"rank {self.rank} GPU {self.device}"

    def about(self) -> tuple[str, ...]:
        """Whose memory it is, and by what."""
        return (f"memory of {self.where} over time, by {self.by}",)

    def views(self) -> tuple[TableView]:
        """The most that each name held, and what it held last."""
        held = self.points.group_by("name", maintain_order=True).agg(
            pl.col("bytes").max().alias("most_bytes"), pl.col("bytes").last().alias("last_bytes")
        )
        headings = {"name": self.by, "most_bytes": "most", "last_bytes": "at the end"}
        return (TableView(held, headings, bar="most_bytes"),)

    def to_frame(self) -> pl.DataFrame:
        """`points`."""
        return self.points

    def to_json(self) -> dict[str, Any]:
        """Every attribute as JSON values; times are in ns."""
        points = self.points.rename({"time": "time_ns"}).to_dicts()
        return {"by": self.by, "rank": self.rank, "device": self.device, "points": points}


def memory_over_time(trace: Attributed, by: str) -> MemoryOverTime:
    """What the device with the highest peak held over time.

    Args:
        by: one of `thence.model.places.MEMORY_BY`.

    Raises:
        MissingData: the trace holds no changes of memory.
    """
    if trace.memory_totals.is_empty():
        raise MissingData(f"{trace.meta.named}: no change of memory is recorded")
    peak = moments(trace, PEAK).sort("allocated", *DEVICE, descending=[True, False, False, False]).row(0, named=True)
    here = [pl.col(name) == peak[name] for name in DEVICE]
    history, held = readings(trace).filter(*here), allocations(trace).filter(*here)
    first, allocated = int(history["row"][0]), history["allocated"].to_numpy()
    rows = _shown_rows(allocated, int(peak["row"]) - first)
    column = {"step": "step_name"}.get(by, by)
    name = held[column].cast(pl.String).fill_null(NOWHERE)
    opened = held["opened"].cast(pl.Int64).fill_null(first).to_numpy() - first
    closed = held["closed"].cast(pl.Int64).fill_null(first + len(allocated)).to_numpy() - first
    size, at_peak = held["bytes"].to_numpy(), int(peak["row"]) - first
    seen = held["opened"].is_not_null()
    live = pl.Series((opened <= at_peak) & (closed > at_peak)) & seen
    sums = pl.DataFrame({"name": name, "bytes": size}).filter(live).group_by("name").agg(pl.col("bytes").sum())
    largest = sums.sort("bytes", "name", descending=[True, False])["name"].head(MAX_NAMES).to_list()
    shown = name.set(~name.is_in(largest), OTHERS)
    names = [*largest, *([OTHERS] if bool((shown == OTHERS).any()) else [])]
    values = {}
    for each in names:
        chosen = ((shown == each) & seen).to_numpy()
        values[each] = _held(len(allocated), opened[chosen], closed[chosen], size[chosen])[rows]
    rest = allocated[rows] - sum(values.values(), np.zeros(len(rows), np.int64))
    if rest.any():
        values = {BEFORE: rest, **values}
    times, which = _steps(history["start"].to_numpy()[rows] - zero(trace))
    points = pl.DataFrame(
        {
            "name": np.repeat(list(values), len(times)),
            "time": np.tile(times, len(values)),
            "bytes": np.concatenate([value[which] for value in values.values()]),
        }
    )
    device = None if peak["device"] == HOST_DEVICE else peak["device"]
    return MemoryOverTime(by, peak["rank"], device, points, tuple(values))


def _held(count: int, opened: Int64, closed: Int64, size: Int64) -> Int64:
    """The bytes that are live after each change."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, opened, size)
    np.subtract.at(change, closed, size)
    live: Int64 = np.cumsum(change)[:-1]
    return live


def _steps(times: Int64) -> tuple[Int64, Int64]:
    """Times at which lines between points make steps, and the number of the change whose value holds at each."""
    number = np.arange(len(times))
    begins = np.append(times[1:] > times[:-1], True)  # of changes at one time the last
    times, number = times[begins], number[begins]
    before = np.flatnonzero(times[1:] - 1 > times[:-1]) + 1
    every = np.concatenate([times, times[before] - 1])
    order = np.argsort(every, kind="stable")
    return every[order], np.concatenate([number, number[before - 1]])[order]


def _shown_rows(allocated: Int64, peak: int) -> Int64:
    """Of many changes the first, the last, the peak, and the highest of equally long runs."""
    count = len(allocated)
    if count <= _MAX_POINTS:
        return np.arange(count)
    edges = np.linspace(0, count, _MAX_POINTS - 2).astype(np.int64)
    highest = [low + int(np.argmax(allocated[low:high])) for low, high in pairwise(edges)]
    return np.unique([0, *highest, peak, count - 1])
