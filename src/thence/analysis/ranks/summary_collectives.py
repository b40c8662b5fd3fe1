"""The collectives in the summary of a rank, and what the device did between them.

For every kernel of a collective, the summary holds how long the device had computed, copied and been idle since its
first activity, when the kernel began and when it ended. A difference of two such values is the compute, copy or idle
time between two kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.exposure import exposure
from thence.analysis.collectives.first_calls import first_calls_of_ranks
from thence.analysis.collectives.instances import collective_instances
from thence.analysis.ranks.summary_tables import COLLECTIVES, GROUPS, PARTS
from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import covered_lengths, reached_before, union

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed

    Intervals = tuple[Int64, Int64]

_GROUP = {"name": "group_name", "description": "group_description", "members": "group_ranks"}
_EVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class _DeviceCoverage:
    """Unions of the activities of one device, as starts and ends in ns: ascending, disjoint."""

    start: int
    all: Intervals
    compute: Intervals
    compute_or_copy: Intervals
    compute_or_communication: Intervals


@dataclass(frozen=True)
class Coverage:
    """The unions of the activities of every device, by rank and device."""

    devices: dict[tuple[object, ...], _DeviceCoverage]

    @classmethod
    def of(cls, work: pl.DataFrame) -> Coverage:
        """The unions of activities with columns rank, device, start, end, communicates and computes."""
        start, end, talks, computes = (work[name].to_numpy() for name in ("start", "end", "communicates", "computes"))
        kinds = np.ones(len(start), np.bool_), computes, ~talks, talks | computes
        number, devices = numbered(work, "rank", "device")
        found = {}
        for key, rows in zip(devices.rows(), rows_of_groups(number, devices.height), strict=True):
            chosen = [rows[kind[rows]] for kind in kinds]
            unions = [union(start[ours], end[ours]) for ours in chosen]
            found[key] = _DeviceCoverage(int(start[rows].min()), *unions)
        return cls(found)

    def of_rows(self, frame: pl.DataFrame) -> list[tuple[Int64, _DeviceCoverage]]:
        """The row numbers of each device in a frame with the columns rank and device, and the unions of the device."""
        number, devices = numbered(frame, "rank", "device")
        rows = rows_of_groups(number, devices.height)
        return [(ours, self.devices[key]) for ours, key in zip(rows, devices.rows(), strict=True)]


def collective_tables(
    trace: Attributed, coverage: Coverage, work: pl.DataFrame, step: Int64
) -> dict[str, pl.DataFrame]:
    """The tables collectives, parts and groups of a summary.

    Args:
        trace: the attributed trace.
        coverage: coverage of its devices.
        work: its activities, in the order of ``trace.gpu``, with start, end, rank, device and communicates.
        step: step of each activity, -1 for none.
    """
    described = trace.collectives.with_row_index("of").filter(pl.col("gpu").is_not_null())
    rank = trace.gpu["rank"]
    of_rank = described.select("gpu", rank=rank.gather(described["gpu"].cast(pl.UInt32)))
    numbers = of_rank.select("gpu", number=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"))
    parts = trace.collective_parts.join(numbers, on="gpu")
    keys = list(_GROUP.values())
    # In large jobs a group lists thousands of ranks, so each group is stored once.
    used = pl.concat(
        [
            rows.select(pl.col(key).cast(pl.String) for key in keys).with_columns(
                rank=rank.gather(rows["gpu"].cast(pl.UInt32))
            )
            for rows in (described, parts)
        ]
    )
    groups = used.unique().sort("rank", *keys).with_columns(group=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"))
    rows = _kernels(trace, described, groups, step)
    return {
        "collectives": _between(trace, rows, coverage, work).select(list(COLLECTIVES.schema)),
        "parts": _grouped(parts.with_columns(rank=rank.gather(parts["gpu"].cast(pl.UInt32))), groups)
        .with_columns(order=pl.int_range(pl.len()).over("rank", "number"))
        .sort("rank", "number", "host", maintain_order=True)
        .with_columns(order=pl.int_range(pl.len()).over("rank", "number"))
        .select(list(PARTS.schema)),
        "groups": groups.select("rank", "group", **_GROUP).select(list(GROUPS.schema)),
    }


def _grouped(rows: pl.DataFrame, groups: pl.DataFrame) -> pl.DataFrame:
    """Adds the number of the group, and casts texts to String."""
    keys = list(_GROUP.values())
    texts = rows.with_columns(pl.col(*keys, "collective", "element_type").cast(pl.String))
    return texts.join(groups, on=["rank", *keys], how="left", nulls_equal=True, maintain_order="left")


def _kernels(trace: Attributed, described: pl.DataFrame, groups: pl.DataFrame, step: Int64) -> pl.DataFrame:
    """The columns that identify the collective of a kernel; and gpu, the kernel's row."""
    at = described["gpu"].to_numpy()
    host = trace.places["launch"].gather(described["gpu"].cast(pl.UInt32)).cast(pl.UInt32)
    gpu = trace.gpu[at]
    program = gpu["program"]
    replayed = described["gpu"].is_in(trace.graph_places["gpu"].implode())
    first = first_calls_of_ranks(trace, collective_instances(trace).rows)
    rows = described.with_columns(
        gpu.select("rank", "device", "start", "duration", "correlation", pl.col("hlo").cast(pl.String)),
        step=pl.Series(step[at], dtype=pl.Int32),
        launch=trace.host["start"].gather(host),
        replayed=replayed,
        first_call=pl.col("of").is_in(first.cast(pl.UInt32).implode()),
        execution=program,
        program=trace.programs["name"].cast(pl.String).gather(program.cast(pl.UInt32)),
    )
    return _grouped(rows, groups).with_columns(
        number=pl.int_range(pl.len(), dtype=pl.Int32).over("rank"),
        # Executions are numbered within their rank.
        execution=pl.col("execution") - pl.col("execution").min().over("rank"),
    )


def _between(trace: Attributed, rows: pl.DataFrame, coverage: Coverage, work: pl.DataFrame) -> pl.DataFrame:
    """Adds exposed time, and the times that the device had computed, copied and been idle at start and end."""
    charged = exposure(trace).rows.select("gpu", "exposed_ns")
    charged_rows = rows.with_row_index("at").with_columns(pl.col("gpu").cast(pl.UInt32))
    charged_rows = charged_rows.join(charged, on="gpu", how="left", maintain_order="left")
    pieces = _longest_exposed(work, coverage)
    charged_rows = charged_rows.with_columns(
        exposed_start=pieces["exposed_start"].gather(charged_rows["gpu"]),
        exposed_end=pieces["exposed_end"].gather(charged_rows["gpu"]),
    )
    start = charged_rows["start"].to_numpy()
    times = {"start": start, "end": start + charged_rows["duration"].to_numpy()}
    columns = {
        f"{what}_{when}_ns": np.zeros(len(start), np.int64) for when in times for what in ("compute", "copy", "idle")
    }
    for ours, device in coverage.of_rows(charged_rows):
        for when, time in times.items():
            since = _since(time[ours], device)
            for what, values in zip(("compute", "copy", "idle"), since, strict=True):
                columns[f"{what}_{when}_ns"][ours] = values
    return charged_rows.with_columns(**{name: pl.Series(v) for name, v in columns.items()})


def _since(time: Int64, device: _DeviceCoverage) -> tuple[Int64, Int64, Int64]:
    """Compute, copy and idle time of a device from its first activity to each time."""
    begin = np.full(len(time), device.start)
    compute = covered_lengths(begin, time, *device.compute)
    copy = covered_lengths(begin, time, *device.compute_or_copy) - compute
    idle = time - begin - covered_lengths(begin, time, *device.all)
    return compute, copy, idle


def _longest_exposed(work: pl.DataFrame, coverage: Coverage) -> pl.DataFrame:
    """For every activity that communicates, the longest piece of exposed time that is charged to it."""
    begin, finish = np.zeros(work.height, np.int64), np.zeros(work.height, np.int64)
    talking = work.with_row_index("gpu").filter("communicates").sort("start", "gpu")
    gpu, starts, ends = (talking[name].to_numpy() for name in ("gpu", "start", "end"))
    for ours, device in coverage.of_rows(talking):
        end = ends[ours]
        start = np.minimum(np.maximum(starts[ours], reached_before(end)), end)
        piece = _longest_overlap(start, end, _outside(device.compute))
        begin[gpu[ours]], finish[gpu[ours]] = piece
    return pl.DataFrame({"exposed_start": begin, "exposed_end": finish})


def _outside(covered: Intervals) -> Intervals:
    """The intervals outside of a union."""
    start, end = covered
    return np.concatenate([[-_EVER], end]), np.concatenate([start, [_EVER]])


def _longest_overlap(start: Int64, end: Int64, free: Intervals) -> Intervals:
    """The longest overlap of each interval with one of the disjoint intervals ``free``.

    If there is no overlap, the result is empty at the interval's start.
    """
    first = np.searchsorted(free[1], start, side="right")
    last = np.maximum(np.searchsorted(free[0], end, side="left"), first)
    count = last - first
    of = np.repeat(np.arange(len(start)), count)
    at = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + first[of]
    begin, finish = np.maximum(free[0][at], start[of]), np.minimum(free[1][at], end[of])
    order = np.lexsort((finish - begin, of))
    longest = order[np.flatnonzero(np.diff(of[order], append=len(start)))]
    begins, ends = start.copy(), start.copy()
    begins[of[longest]], ends[of[longest]] = begin[longest], finish[longest]
    return begins, ends
