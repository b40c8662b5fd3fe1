"""Kernels by stream, and concurrency of streams and kernel groups.

busy        time in which at least one activity of a stream ran (interval union)
concurrent  part of the busy time in which another stream of the device was busy, too
overlap     of groups A and B: time in which at least one activity of each ran, on any streams;
            of A with itself: time in which at least two activities of A ran
hidden      part of the communication time during which a kernel or thunk that is no communication ran:
            see `thence.analysis.exposure`, which `collectives` uses, too
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.expectations import Check, judge, parse_expectation
from thence.analysis.exposure import exposure
from thence.analysis.kernel_groups import NO_PATTERNS, Patterns, kernel_groups
from thence.errors import MissingData
from thence.model.intervals import covered_lengths, levels, shared_length, union, unions
from thence.notebook import Form, Shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.model.attributed import Attributed
    from thence.model.tables import Meta
    from thence.units import Ns

    Int64 = npt.NDArray[np.int64]
    Intervals = tuple[Int64, Int64]

__all__ = ["Concurrency", "Streams", "streams"]

IN_GRAPHS = (
    "{:,} activities ran inside CUDA graphs: their streams are those that the driver gave the branches "
    "of the graph"
)
_UNKNOWN = -1
"""Stands for a stream that the trace does not name."""
NO_STREAMS = "the trace does not say on which streams its kernels ran"


@dataclass(frozen=True)
class Concurrency:
    """Concurrency on one device. All times are ns.

    Attributes:
        rank, device: which.
        busy_ns: time in which anything ran.
        busy_streams_ns: time in which exactly 1, 2, 3 ... streams were busy; it adds up to busy_ns.
            Empty where the trace does not say which streams there were.
        overlap_ns: by group and group, see the module; symmetric, without zeros.
        communication_ns: time in which communication ran.
        hidden_ns: see the module.
    """

    rank: int
    device: int
    busy_ns: Ns
    busy_streams_ns: tuple[Ns, ...]
    overlap_ns: Mapping[str, Mapping[str, Ns]]
    communication_ns: Ns
    hidden_ns: Ns

    @property
    def hidden_share(self) -> float | None:
        """Hidden part of the communication, from 0 to 1; None without communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None

    def to_json(self) -> dict[str, Any]:
        """The concurrency of the device as JSON values."""
        one, two, *more = (*self.busy_streams_ns, 0, 0)
        return {
            "busy_ns": self.busy_ns,
            "busy_streams_ns": {"1": one, "2": two, "3+": sum(more)}
            if self.busy_streams_ns
            else None,
            "overlap_ns": {a: dict(row) for a, row in self.overlap_ns.items()},
            "communication": {
                "busy_ns": self.communication_ns,
                "hidden_ns": self.hidden_ns,
                "exposed_ns": self.communication_ns - self.hidden_ns,
                "hidden_share": self.hidden_share,
            },
        }


@dataclass(frozen=True)
class Streams(Shown):
    """The streams of a trace. All times are ns.

    Attributes:
        meta: facts of the trace.
        groups: names of all groups, those of the user first.
        rows: rank, device, stream (null where the trace does not say), group, count, total_ns (sum
            of durations), share (of the stream's sum).
        streams: rank, device, stream, busy_ns, concurrent_ns.
        concurrency: of each device.
        notes: what must be known to read the numbers, one sentence each.
    """

    meta: Meta
    groups: tuple[str, ...]
    rows: pl.DataFrame
    streams: pl.DataFrame
    concurrency: tuple[Concurrency, ...]
    notes: tuple[str, ...]

    def check(self, *expectations: str) -> tuple[Check, ...]:
        """Checks expectations such as ``GEMM>=2``: see `thence.analysis.expectations`.

        Raises:
            UsageError: the syntax of one is wrong, or no group has that name.
        """
        return tuple(
            judge(parse_expectation(text, self.groups), self.rows) for text in expectations
        )

    def form(self) -> Form:
        """What a notebook shows of it."""
        return Form(
            f"{self.streams.height:,} streams of {len(self.concurrency):,} GPUs",
            ", ".join(self.meta.inputs),
            self.rows.sort("total_ns", descending=True),
            {
                "group": "group", "rank": "rank", "device": "GPU", "stream": "stream", "count": "count",
                "total_ns": "total", "share": "share",
            },
            "total_ns",
            notes=self.notes,
        )  # fmt: skip

    def to_json(self, checks: Sequence[Check] = ()) -> dict[str, Any]:
        """The streams and the checked expectations as JSON values."""
        return {
            "inputs": list(self.meta.inputs),
            "groups": list(self.groups),
            "devices": [self._device_json(device) for device in self.concurrency],
            "checks": [check.to_json() for check in checks],
        }

    def _device_json(self, of: Concurrency) -> dict[str, Any]:
        here = (pl.col("rank") == of.rank) & (pl.col("device") == of.device)
        counted: dict[int | None, dict[str, dict[str, int]]] = {}
        columns = ("stream", "group", "count", "total_ns")
        for stream, group, count, total in self.rows.filter(here).select(columns).iter_rows():
            counted.setdefault(stream, {})[group] = {"count": count, "total_ns": total}
        stream_rows = self.streams.filter(here).select("stream", "busy_ns", "concurrent_ns")
        return {
            "rank": of.rank,
            "device": of.device,
            "streams": [row | {"groups": counted[row["stream"]]} for row in stream_rows.to_dicts()],
            **of.to_json(),
        }


def streams(trace: Attributed, patterns: Patterns = NO_PATTERNS) -> Streams:
    """Analyses which kernels ran on which stream, and what ran concurrently.

    Args:
        trace: attributed.
        patterns: groups of the user.

    Raises:
        MissingData: the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        reasons = "; ".join(["holds no GPU activity", *trace.meta.warnings])
        raise MissingData(f"{', '.join(trace.meta.inputs)}: {reasons}")
    group = kernel_groups(trace, patterns)
    # A thunk stands for kernels whose streams its producer did not record.
    recorded_stream = pl.when(pl.col("kind") != "thunk").then("stream")
    activities = trace.gpu.select(
        "rank",
        "device",
        recorded_stream.alias("stream"),
        "start",
        "duration",
    ).with_columns(group)
    devices = sorted(activities.partition_by("rank", "device"), key=lambda d: d.row(0)[:2])
    exposed = {row[:2]: row[2:] for row in exposure(trace).devices.iter_rows()}
    measured = [
        _device(device, patterns.names, exposed.get(device.row(0)[:2], (0, 0)))
        for device in devices
    ]
    in_graphs = trace.gpu["graph"].count()
    notes = [IN_GRAPHS.format(in_graphs)] if in_graphs else []
    if activities["stream"].null_count():
        notes.append(NO_STREAMS)
    return Streams(
        meta=trace.meta,
        groups=patterns.names,
        rows=_rows(activities),
        streams=pl.concat([lanes for lanes, _ in measured]),
        concurrency=tuple(concurrency for _, concurrency in measured),
        notes=tuple(notes),
    )


def _rows(activities: pl.DataFrame) -> pl.DataFrame:
    lane = ("rank", "device", "stream")
    counted = activities.group_by(*lane, "group").agg(
        pl.len().cast(pl.Int64).alias("count"), total_ns=pl.col("duration").sum()
    )
    whole = pl.col("total_ns").sum().over(lane)
    share = pl.col("total_ns") / pl.when(whole > 0).then(whole)
    ordered = counted.sort(*lane, "total_ns", "group", descending=[False] * 3 + [True, False])
    return ordered.with_columns(share=share)


def _device(
    activities: pl.DataFrame, names: Sequence[str], exposed: tuple[Ns, Ns]
) -> tuple[pl.DataFrame, Concurrency]:
    """The streams of one device and their concurrency.

    Args:
        activities: of the device.
        names: of the groups.
        exposed: length of its communication, and of the part that is exposed.
    """
    start = activities["start"].to_numpy()
    end = start + activities["duration"].to_numpy()
    stream = activities["stream"].fill_null(_UNKNOWN).to_numpy()
    numbers = np.unique(stream)
    of_busy, begins, ends = unions(stream, start, end)
    pieces = levels(begins, ends, np.ones(len(of_busy), np.int64))
    several = union(*_masked(pieces, pieces[2] > 1))  # joined, they are far fewer
    (rank, device) = activities.row(0)[:2]
    streams_recorded = activities["stream"].null_count() == 0
    at = np.searchsorted(numbers, of_busy)
    frame = pl.DataFrame(
        {
            "stream": [number if number != _UNKNOWN else None for number in numbers.tolist()],
            "busy_ns": _sums(at, ends - begins, len(numbers)),
            "concurrent_ns": _sums(at, covered_lengths(begins, ends, *several), len(numbers)),
        },
        schema={"stream": pl.Int64, "busy_ns": pl.Int64, "concurrent_ns": pl.Int64},
    ).select(
        pl.lit(rank, pl.Int32).alias("rank"),
        pl.lit(device, pl.Int32).alias("device"),
        "stream",
        "busy_ns",
        pl.when(pl.lit(streams_recorded)).then("concurrent_ns").alias("concurrent_ns"),
    )
    group = activities["group"].to_physical().cast(pl.Int64).to_numpy()
    communication, exposed_ns = exposed
    concurrency = Concurrency(
        rank=rank,
        device=device,
        busy_ns=_length(_masked(pieces, pieces[2] > 0)),
        busy_streams_ns=_by_depth(pieces) if streams_recorded else (),
        overlap_ns=_overlaps(group, start, end, names),
        communication_ns=communication,
        hidden_ns=communication - exposed_ns,
    )
    return frame, concurrency


def _unions(key: Int64, start: Int64, end: Int64) -> dict[int, Intervals]:
    """The interval union of each key, keys ascending."""
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    rows = np.split(order, first[1:])
    return {int(k): union(start[r], end[r]) for k, r in zip(keys, rows, strict=True)}


def _sums(group: Int64, values: Int64, groups: int) -> Int64:
    """The sum of the values of each group, as whole numbers."""
    sums = np.zeros(groups, np.int64)
    np.add.at(sums, group, values)
    return sums


def _masked(pieces: tuple[Int64, Int64, Int64], chosen: npt.NDArray[np.bool_]) -> Intervals:
    return pieces[0][chosen], pieces[1][chosen]


def _length(intervals: Intervals) -> Ns:
    return int((intervals[1] - intervals[0]).sum())


def _by_depth(pieces: tuple[Int64, Int64, Int64]) -> tuple[Ns, ...]:
    starts, ends, depth = pieces
    lengths = _sums(depth, ends - starts, int(depth.max(initial=0)) + 1)
    return tuple(lengths[1:].tolist())


def _overlaps(
    group: Int64, start: Int64, end: Int64, names: Sequence[str]
) -> dict[str, dict[str, Ns]]:
    unions = _unions(group, start, end)
    result: dict[str, dict[str, Ns]] = {names[g]: {} for g in unions}
    for a, ours in unions.items():
        mine = group == a
        if int((end[mine] - start[mine]).sum()) > _length(ours):  # else none of them overlap
            pieces = levels(start[mine], end[mine], np.ones(int(mine.sum()), np.int64))
            result[names[a]][names[a]] = _length(_masked(pieces, pieces[2] > 1))
        for b, theirs in unions.items():
            if b > a and (shared := shared_length(ours, theirs)):
                result[names[a]][names[b]] = result[names[b]][names[a]] = shared
    return {name: row for name, row in result.items() if row}
