"""The largest allocations as tracks of timelines: how long each was live, and which module or line made it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.memory.kinds import placed_memory
from thence.analysis.timelines.track_packing import split_lanes
from thence.units import format_bytes

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

MAX_ALLOCATIONS = 300
"""Allocations of a device that have a span: those with most bytes; of equal ones the earlier."""
SPANS = {
    "rank": pl.Int32(), "device": pl.Int32(), "start": pl.Int64(), "duration": pl.Int64(), "track": pl.String(),
    "name": pl.String(),
}  # fmt: skip
_PLACES = ("module", "source", "op", "kind")


def memory_tracks(trace: Attributed) -> pl.DataFrame:
    """The largest allocations of each device, as `thence.model.timeline.Timeline.spans`.

    Spans begin and end with the trace where it does not show that they do.
    """
    table = trace.memory.filter(pl.col("device").is_not_null())
    largest = pl.col("bytes").rank("ordinal", descending=True).over("rank", "device") <= MAX_ALLOCATIONS
    chosen = placed_memory(trace, table).filter(largest)
    if chosen.is_empty():
        return pl.DataFrame(schema=SPANS)
    times = trace.memory_totals["start"]
    begin = chosen["start"].fill_null(times.min())
    end = chosen["end"].fill_null(times.max())
    number = chosen.select(pl.struct("rank", "device").rank("dense").cast(pl.Int64)).to_series().to_numpy()
    lane = split_lanes(number, begin.to_numpy(), np.maximum(end.to_numpy(), begin.to_numpy()))
    place = pl.coalesce(*(pl.col(name).cast(pl.String) for name in _PLACES), pl.lit("unknown"))
    size = pl.Series([format_bytes(value) for value in chosen["bytes"].to_list()], dtype=pl.String)
    return chosen.select(
        "rank",
        "device",
        start=begin,
        duration=(end - begin).clip(lower_bound=0),
        track=pl.format("live memory {}", pl.Series(lane + 1)),
        name=pl.format("{} ({})", place, size),
    ).cast(SPANS)  # type: ignore[arg-type]
