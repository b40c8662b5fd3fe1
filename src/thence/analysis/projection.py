"""Host ranges projected on the GPU: when what they launched ran, whatever the host did meanwhile.

A range launched what the API calls launched that began in it on its own thread. Its projection
goes from the first start to the last end of those activities: the definition of nsys's
``nvtx_gpu_proj_trace``, here for ranges of any producer. Ranges need not nest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.launches import launch_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.tables import Tables

    Int64 = npt.NDArray[np.int64]

__all__ = ["RANGES", "Projected", "project"]

RANGES = ("range", "framework", "compile", "step", "module", "op")
"""Categories of host ranges that are projected unless others are asked for."""

_COUNTS = {"launches": pl.Int64(), "activities": pl.Int64()}
_SPAN = {"start": pl.Int64(), "duration": pl.Int64(), **_COUNTS}


@dataclass(frozen=True)
class Projected:
    """Host ranges on the GPU.

    Attributes:
        ranges: one row per range that launched something, in the order of the host table: host (its
            row, Int32), rank, name, start, duration (ns, on the trace's clock), launches (calls that
            something ran for; nsys's NumGPUOps) and activities (what ran: the launch of a CUDA graph
            is one launch and many activities).
        streams: the same for each stream on its own: host, rank, device, stream, start, duration,
            launches, activities.
    """

    ranges: pl.DataFrame
    streams: pl.DataFrame


def project(tables: Tables, categories: Sequence[str] = RANGES) -> Projected:
    """Projects host ranges on the GPU through the calls that they made.

    Args:
        tables: of the trace.
        categories: which host ranges to project, of `thence.model.tables.HOST_CATEGORIES`.
    """
    launch, _ = launch_rows(tables)
    activities = tables.gpu.select(
        "device", "stream", "start", end=pl.col("start") + pl.col("duration"), call=launch
    ).filter(pl.col("call") >= 0)
    rows = np.flatnonzero(tables.host["category"].is_in(list(categories)).to_numpy())
    until = _ends(tables.host, rows)
    host = tables.host.select(pl.int_range(pl.len(), dtype=pl.Int32).alias("host"), "rank", "name")
    whole = _spans(activities, rows, until).join(host, on="host", maintain_order="left")
    parts = []
    for (device, stream), part in activities.group_by("device", "stream"):
        spans = _spans(part, rows, until)
        place = (pl.lit(device, pl.Int32).alias("device"), pl.lit(stream, pl.Int64).alias("stream"))
        parts.append(spans.with_columns(place))
    empty = pl.DataFrame(
        schema={"host": pl.Int32(), **_SPAN, "device": pl.Int32, "stream": pl.Int64}
    )
    streams = pl.concat([empty, *parts]).join(host, on="host", maintain_order="left")
    return Projected(
        whole.select("host", "rank", "name", *_SPAN),
        streams.select("host", "rank", "device", "stream", *_SPAN).sort("host", "device", "stream"),
    )


def _ends(host: pl.DataFrame, rows: Int64) -> Int64:
    """The first row after each range that begins on its thread when the range has ended."""
    thread = host.select(pl.struct("rank", "process", "thread").rle_id()).to_series().to_numpy()
    bounds = np.searchsorted(thread, np.arange(int(thread[-1]) + 2)) if len(thread) else np.zeros(1)
    start = host["start"].to_numpy()
    end = start[rows] + np.maximum(host["duration"].to_numpy()[rows], 1)
    result = np.empty(len(rows), np.int64)
    of_thread = np.searchsorted(rows, bounds)
    for number in range(len(bounds) - 1):
        low, high = int(bounds[number]), int(bounds[number + 1])
        part = slice(int(of_thread[number]), int(of_thread[number + 1]))
        result[part] = low + np.searchsorted(start[low:high], end[part])
    return result


def _spans(activities: pl.DataFrame, rows: Int64, until: Int64) -> pl.DataFrame:
    """First start, last end and number of the activities whose call lies in [row, until)."""
    calls = (
        activities.group_by("call")
        .agg(pl.col("start").min(), pl.col("end").max(), pl.len().cast(pl.Int64).alias("count"))
        .sort("call")
    )
    call = calls["call"].to_numpy()
    low, high = np.searchsorted(call, rows), np.searchsorted(call, until)
    some = high > low
    low, high = low[some], high[some]
    start = -_range_maximum(-calls["start"].to_numpy(), low, high)
    end = _range_maximum(calls["end"].to_numpy(), low, high)
    before = np.concatenate([[0], np.cumsum(calls["count"].to_numpy())])
    return pl.DataFrame(
        {
            "host": rows[some].astype(np.int32),
            "start": start,
            "duration": end - start,
            "launches": (high - low).astype(np.int64),
            "activities": before[high] - before[low],
        },
        schema={"host": pl.Int32(), **_SPAN},
    )


def _range_maximum(values: Int64, low: Int64, high: Int64) -> Int64:
    """The largest of values[low:high] for many pairs, none empty.

    Windows of 1, 2, 4 ... values are made one after the other; two of the largest that fits cover a
    range. So time is n log n, and memory that of two windows.
    """
    result = np.empty(len(low), np.int64)
    level = np.zeros(len(low), np.int64)
    level[:] = np.floor(np.log2(np.maximum(high - low, 1)))
    window = values
    for power in range(int(level.max(initial=0)) + 1):
        chosen = np.flatnonzero(level == power)
        first, last = window[low[chosen]], window[high[chosen] - (1 << power)]
        result[chosen] = np.maximum(first, last)
        window = np.maximum(window[: -(1 << power)], window[1 << power :])
    return result
