"""Hardware counters as tracks of timelines: the mean rate of each counter in each sample."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import polars as pl

from thence.model.counter_names import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.attributed import Attributed
    from thence.model.counter_names import Counter

_UNITS = {"bytes": ("GB/s", 1.0), "joules": ("W", 1e9), "ns": ("%", 100.0)}
"""Unit of a rate by that of the amount, and what a rate in a ns is multiplied by."""


def _title(counter: Counter) -> str:
    """The name of a track."""
    words = counter.name.removesuffix(f"_{counter.unit}").replace("_", " ")
    return f"counted {'power' if counter.unit == 'joules' else words}"


def _unit(counter: Counter) -> str:
    return _UNITS.get(counter.unit, (f"10^9 {counter.unit}/s", 1.0))[0]


UNITS: Mapping[str, str] = MappingProxyType({_title(counter): _unit(counter) for counter in COUNTERS})
"""Unit of each track by its name."""


def counter_tracks(trace: Attributed) -> pl.DataFrame:
    """The rates, in the columns of `thence.model.timeline.Timeline.counters`; 0 where nothing was sampled."""
    tracks = []
    for counter in COUNTERS:
        rows = trace.counters.filter(pl.col(counter.name).is_not_null()).sort("rank", "device", "start")
        if rows.height:
            scale = _UNITS.get(counter.unit, ("", 1.0))[1]
            tracks.append(_track(rows, counter.name, scale).with_columns(counter=pl.lit(_title(counter))))
    schema = {"rank": pl.Int32, "device": pl.Int32, "counter": pl.String, "time": pl.Int64, "value": pl.Float64}
    return pl.concat([pl.DataFrame(schema=schema), *(track.select(*schema) for track in tracks)])


def _track(rows: pl.DataFrame, name: str, scale: float) -> pl.DataFrame:
    """A value at the start of each sample, and 0 at the end of one that no other follows."""
    following = pl.col("start").shift(-1).over("rank", "device")
    values = rows.select("rank", "device", time="start", value=scale * pl.col(name) / (pl.col("end") - pl.col("start")))
    last = rows.filter((following > pl.col("end")).fill_null(value=True))
    ends = last.select("rank", "device", time="end", value=pl.lit(0.0))
    return pl.concat([values, ends])
