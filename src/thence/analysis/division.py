"""The GPU time divided among the places of one kind: the rows behind every table by something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.undescribed import no_collectives
from thence.errors import MissingData, UsageError

if TYPE_CHECKING:
    from thence.attribution.combined import Attribution
    from thence.model.tables import Tables

__all__ = ["BY", "divided", "weighed"]

_FROM_GPU = {
    "kernel": pl.col("name"),
    "kind": pl.col("kind").cast(pl.String),
    "rank": pl.format("rank {}", "rank"),
    "device": pl.format("rank {} device {}", "rank", "device"),
    "stream": pl.format("rank {} device {} stream {}", "rank", "device", "stream"),
}
_FROM_PLACES = (
    "label", "module", "op", "ops", "source", "stack", "phase", "step", "program", "hlo", "opcode", "op_name",
)  # fmt: skip
BY = ("kernel", *_FROM_PLACES, "collective", "kind", "rank", "device", "stream")
"""What the GPU time can be divided by."""

NO_COLLECTIVE = "no collective"


def divided(tables: Tables, attribution: Attribution, by: str) -> pl.DataFrame:
    """Each activity with its place; one that several places share has a row for each of them.

    Args:
        tables: of the trace.
        attribution: of the same trace.
        by: one of `BY`.

    Returns:
        columns ``gpu`` (row), ``place`` (null where there is none), ``reason`` (why not; null where
        there is one), ``duration`` (ns, the part of this place) and ``phase``. The durations of
        an activity's rows add up to its own.

    Raises:
        UsageError: ``by`` is none of `BY`.
        MissingData: the trace describes no collectives, and those are asked for.
    """
    if by not in BY:
        raise UsageError(f"cannot divide GPU time by {by!r}; choose one of {', '.join(BY)}")
    if by == "source" and attribution.shares is not None:
        return _by_share(tables, attribution, attribution.shares)
    if by == "collective":
        return _whole(tables, attribution, _collectives(tables, attribution), NO_COLLECTIVE)
    if by in _FROM_GPU:
        return _whole(tables, attribution, tables.gpu.select(_FROM_GPU[by]).to_series(), None)
    places = attribution.places
    return _whole(tables, attribution, places[by], places[f"{by}_rule"])


def _whole(
    tables: Tables, attribution: Attribution, place: pl.Series, reason: pl.Series | str | None
) -> pl.DataFrame:
    """Every activity at one place."""
    given = reason if isinstance(reason, pl.Series) else pl.lit(reason, pl.String)
    return pl.DataFrame(
        {"duration": tables.gpu["duration"], "phase": attribution.places["phase"]}
    ).select(
        gpu=pl.int_range(pl.len(), dtype=pl.Int32),
        place=place,
        reason=pl.when(pl.lit(place).is_null()).then(given),
        duration="duration",
        phase="phase",
    )


def _by_share(tables: Tables, attribution: Attribution, shares: pl.DataFrame) -> pl.DataFrame:
    """Every activity divided by weight."""
    rows = shares["gpu"].cast(pl.UInt32)
    return shares.with_columns(
        duration=weighed(tables, shares), phase=attribution.places["phase"].gather(rows)
    ).select(
        gpu=pl.col("gpu").cast(pl.Int32),
        place="place",
        reason=pl.when(pl.col("place").is_null()).then("rule"),
        duration="duration",
        phase="phase",
    )


def weighed(tables: Tables, claims: pl.DataFrame) -> pl.Series:
    """The time of each claim in whole ns: differences of rounded running sums, so nothing is lost.

    Args:
        tables: of the trace.
        claims: columns gpu and weight; the weights of one activity sum to 1.
    """
    whole = tables.gpu["duration"].gather(claims["gpu"].cast(pl.UInt32))
    reached = (pl.col("weight").cum_sum().over("gpu") * whole).round().cast(pl.Int64)
    return (
        claims.select("gpu", reached=reached)
        .select(pl.col("reached") - pl.col("reached").shift(1).over("gpu").fill_null(0))
        .to_series()
    )


def _collectives(tables: Tables, attribution: Attribution) -> pl.Series:
    named = attribution.collectives.select("gpu", "collective").unique("gpu", keep="first")
    if named.is_empty():
        raise MissingData(f"{', '.join(tables.meta.inputs)}: {no_collectives(tables)}")
    rows = pl.select(gpu=pl.int_range(tables.gpu.height, dtype=pl.Int32))
    return rows.join(named, on="gpu", how="left", maintain_order="left")["collective"]
