"""The counters of each device of a trace, shared among its activities, once for a trace and all of its parts.

Kinds of activities, which count at the same rates, are those of one name, grid, block and place (HLO instruction,
module with its layers folded, or label), whose durations do not differ by more than `COUNTER_KIND_RATIO` from one to
the next longer: launches of one kernel for two shapes do. If there are more than `_MAX_KINDS`, places and then all but
names are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.counters.sharing import pairs_of, shared
from thence.model.attributed import once_per_trace
from thence.model.counter_names import COUNTERS, ENERGY
from thence.model.grouped_intervals import numbered
from thence.model.intervals import Intervals
from thence.model.layers import folded_names
from thence.model.thresholds import COUNTER_KIND_RATIO

if TYPE_CHECKING:
    from thence.analysis.counters.sharing import Pairs, Shares
    from thence.model.arrays import Float64, Int64
    from thence.model.attributed import Attributed
    from thence.model.tables import Device

CLOCKS = ("gr_elapsed_cycles", "sm_elapsed_cycles")
"""Counters that tell how fast a clock ran. They count whatever runs, so they are shared by time alone."""
_MAX_KINDS = 200
_MAX_PAIRS = 4_000_000
"""Pairs of a sample and an activity that are shared: 300 windows of 40 ms with kernels of 10 us have as many."""
_GAP_RATIO = 2
"""Samples that begin later than this many of their own lengths after the one before begin another window."""


@dataclass(frozen=True)
class Sampled:
    """Counters of a device that were sampled at the same times.

    Attributes:
        rank, device: of the device.
        start, end: of samples, ns; ascending, not overlapping.
        amounts: of each sample, by counter.
        rows: of activities in the trace's ``gpu`` that ran in samples.
        activity_start, activity_end: of these, ns.
        kind: of each of them.
        left_out: samples at the end that are not shared, because they hold too many activities.
    """

    rank: int
    device: int
    start: Int64
    end: Int64
    amounts: dict[str, Float64]
    rows: Int64
    activity_start: Int64
    activity_end: Int64
    kind: Int64
    left_out: int = 0

    @cached_property
    def pairs(self) -> Pairs:
        """Which part of which activity was in which sample; activities by their position in ``rows``."""
        activities = Intervals(self.activity_start, self.activity_end)
        return pairs_of(Intervals(self.start, self.end), activities, self.kind)

    @cached_property
    def shares(self) -> dict[str, Shares]:
        """Each counter but clocks and energy, shared."""
        return {
            name: shared(self.pairs, amounts) for name, amounts in self.amounts.items() if name not in (*CLOCKS, ENERGY)
        }

    @cached_property
    def window_starts(self) -> Int64:
        """Positions of the samples at which a window begins."""
        apart = self.start[1:] - self.end[:-1] > _GAP_RATIO * (self.end - self.start)[1:]
        return np.concatenate([[0], np.flatnonzero(apart) + 1])

    def windows(self) -> pl.DataFrame:
        """Consecutive samples: rank, device, start_ns, end_ns, samples."""
        first = self.window_starts
        after = np.append(first[1:], len(self.start))
        return pl.DataFrame(
            {"start_ns": self.start[first], "end_ns": self.end[after - 1], "samples": after - first}
        ).select(pl.lit(self.rank, pl.Int32).alias("rank"), pl.lit(self.device, pl.Int32).alias("device"), pl.all())


def device_of(trace: Attributed, sampled: Sampled) -> Device | None:
    """What the producer says of the device; None if it does not describe it."""
    place = sampled.rank, sampled.device
    return next((device for device in trace.meta.devices if (device.rank, device.device) == place), None)


@once_per_trace
def sampled_devices(trace: Attributed) -> tuple[Sampled, ...]:
    """The counters of each device, a group for each set of counters that were sampled together.

    Args:
        trace: a whole trace: samples hold the work of all of its activities, whatever is selected.
    """
    devices: list[Sampled] = []
    for (rank, device), rows in trace.counters.group_by("rank", "device", maintain_order=True):
        held = [counter.name for counter in COUNTERS if rows[counter.name].null_count() < rows.height]
        for names in dict.fromkeys(tuple(name for name in held if _same(rows[name], rows[first])) for first in held):
            samples = rows.filter(pl.col(names[0]).is_not_null()).sort("start")
            devices.append(_sampled(trace, int(str(rank)), int(str(device)), samples, names))
    return tuple(devices)


def _same(left: pl.Series, right: pl.Series) -> bool:
    """Whether two counters are known in the same rows."""
    return bool((left.is_null() == right.is_null()).all())


def _sampled(trace: Attributed, rank: int, device: int, samples: pl.DataFrame, names: tuple[str, ...]) -> Sampled:
    before = pl.col("end").cum_max().shift().fill_null(pl.col("start").min())
    samples = samples.filter(pl.col("start") >= before)  # what overlaps would count twice
    start, end = samples["start"].to_numpy(), samples["end"].to_numpy()
    of_device = (pl.col("rank") == rank) & (pl.col("device") == device) & (pl.col("duration") > 0)
    gpu = trace.gpu.select("rank", "device", "start", "duration").with_row_index("row").filter(of_device)
    activity_start = gpu["start"].to_numpy()
    activity_end = activity_start + gpu["duration"].to_numpy()
    first = np.searchsorted(end, activity_start, side="right")
    after = np.searchsorted(start, activity_end, side="left")
    # How many activities each sample holds: a few, but a damaged trace may have millions in each.
    change = np.bincount(first, minlength=len(start) + 1) - np.bincount(
        np.maximum(after, first), minlength=len(start) + 1
    )
    reached = np.cumsum(np.cumsum(change)[:-1])
    most = len(start) if ENERGY in names else int(np.searchsorted(reached, _MAX_PAIRS, side="right"))
    kept = max(most, 1)
    inside = (after > first) & (first < kept)
    rows = gpu["row"].cast(pl.Int64).to_numpy()[inside]
    return Sampled(
        rank, device, start[:kept], end[:kept], {name: samples[name].to_numpy()[:kept] for name in names},
        rows, activity_start[inside], activity_end[inside], kinds(trace, rows), len(start) - kept,
    )  # fmt: skip


def kinds(trace: Attributed, rows: Int64) -> Int64:
    """The kind of each of these activities, from 0 (see the module's docstring).

    Args:
        rows: of its ``gpu``.
    """
    sizes = (pl.col(name).cast(pl.List(pl.String)).list.join("x") for name in ("grid", "block"))
    what = (
        trace.gpu.select(pl.col("name").to_physical(), *sizes, "duration")
        .with_columns(place=_places(trace.places))[rows]
        .with_columns(pl.col("grid", "block", "place").fill_null(""))
    )
    kind = np.zeros(0, np.int64)
    for columns in (("name", "grid", "block", "place"), ("name", "grid", "block"), ("name",)):
        kind = _in_order(_split_by_duration(what, columns))
        if int(kind.max(initial=-1)) < _MAX_KINDS:
            return kind
    time = np.bincount(kind, what["duration"].to_numpy())
    rank = np.empty(len(time), np.int64)
    rank[np.argsort(-time, kind="stable")] = np.arange(len(time))
    rare: Int64 = np.minimum(rank, _MAX_KINDS - 1)[kind]
    return rare


def _in_order(kind: Int64) -> Int64:
    """The same kinds, numbered in the order in which they come: numbers of names differ from process to process."""
    _, first, number = np.unique(kind, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[number]


def _places(places: pl.DataFrame) -> pl.Series:
    """HLO instruction, folded module or label of each activity, as text."""
    module = places["module"].cast(pl.String)
    folded = folded_names(module.drop_nulls().unique())
    of_module = module.replace(folded["name"], folded["folded"])
    hlo, label = (pl.col(name).cast(pl.String) for name in ("hlo", "label"))
    return places.select(pl.coalesce(hlo, pl.lit(of_module), label)).to_series()


def _split_by_duration(what: pl.DataFrame, columns: tuple[str, ...]) -> Int64:
    """Numbers of what is equal in columns, and close in duration."""
    base, _ = numbered(what, *columns)
    duration = what["duration"].to_numpy()
    order = np.lexsort((duration, base))
    ordered, lasting = base[order], np.maximum(duration[order], 1)
    new = np.ones(len(order), np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]) | (lasting[1:] > COUNTER_KIND_RATIO * lasting[:-1])
    kind = np.empty(len(order), np.int64)
    kind[order] = np.cumsum(new) - 1
    return kind
