"""GPU time grouped by one kind of place (kernel, label, source ...): the rows behind every such table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.missing import why_no_collectives
from thence.attribution.work.data_types import data_types
from thence.attribution.work.operator_calls import call_shapes
from thence.errors import MissingData, UsageError
from thence.model.attributed import RULE
from thence.model.phases import POSITIONS, Position
from thence.model.places import BY, KINDS
from thence.model.reasons import REASONS
from thence.model.thresholds import WELL_COVERED_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thence.model.attributed import Attributed


_KIND = {kind.name: kind for kind in KINDS}
_SOURCES = {Position.FUNCTION: "function", Position.LINE: "source line"}
_NUMBERED = {
    "rank": pl.format("rank {}", "rank"),
    "device": pl.format("rank {} device {}", "rank", "device"),
    "stream": pl.format("rank {} device {} stream {}", "rank", "device", "stream"),
}
"""Display names of the columns of gpu whose values are numbers."""
_COMPUTED: Mapping[str, Callable[[Attributed], pl.Series]] = {"dtype": data_types, "shape": call_shapes}
"""Kinds of places that are computed from other columns of the activity."""
_OF_ITSELF = ("kind", *_NUMBERED)


def time_by_place(trace: Attributed, by: str) -> pl.DataFrame:
    """Assigns each activity's time to its place; an activity shared by several places has several rows.

    Args:
        by: one of `thence.model.places.BY`.

    Returns:
        columns ``gpu`` (row), ``place`` (null where there is none), ``reason`` (code of why there is no
        place; null where there is one), ``duration`` (ns, the part of this place), ``phase`` and, by source,
        ``position`` (`Position`; null where there is no place). The durations of an activity's rows add up
        to its duration.

    Raises:
        UsageError: ``by`` is not in `thence.model.places.BY`.
        MissingData: ``by`` is "collective", and the trace describes no collectives.
    """
    if by not in BY:
        raise UsageError(f"cannot divide GPU time by {by!r}; choose one of {', '.join(BY)}")
    kind = _KIND[by]
    if by == "source" and trace.shares is not None:
        return _by_share(trace, trace.shares)
    if kind.origin == "collectives":
        return _unsplit(trace, _collectives(trace), kind.missing)
    if by in _COMPUTED:
        return _unsplit(trace, _COMPUTED[by](trace), kind.missing)
    if kind.origin == "gpu":
        column = _NUMBERED.get(by, pl.col(kind.column))
        return _unsplit(trace, trace.gpu.select(column).to_series(), kind.missing)
    rows = _unsplit(trace, trace.places[by], trace.places[f"{by}_rule"])
    return rows.with_columns(trace.places["position"]) if by == "source" else rows


def name_of_place() -> pl.Expr:
    """The name of a row by ``place`` and ``reason``: the place, or why there is none, as a sentence in brackets."""
    return pl.coalesce(
        pl.col("place").cast(pl.String), pl.format("[{}]", pl.col("reason").cast(pl.String).replace(REASONS))
    )


def separated_from_steady(trace: Attributed, parts: pl.DataFrame, by: str) -> pl.DataFrame:
    """Sets the place of work that tables of an XLA trace keep separate to null, and its reason to the code of the work.

    Tables by properties of the activity itself (`_OF_ITSELF`) keep nothing separate.

    Args:
        trace: attributed; ``places["separate"]`` is used.
        parts: as `time_by_place` returns them.
        by: the kind of place of ``parts``.
    """
    separate = trace.places["separate"]
    if by in _OF_ITSELF or separate.null_count() == len(separate):
        return parts
    why = pl.lit(separate.gather(parts["gpu"].cast(pl.UInt32)).alias("separate"))
    return parts.with_columns(
        place=pl.when(why.is_null()).then("place"), reason=pl.coalesce(why, pl.col("reason").cast(RULE))
    )


def _unsplit(trace: Attributed, place: pl.Series, reason: pl.Series | str) -> pl.DataFrame:
    """One row per activity, with all of its time at one place."""
    given = reason if isinstance(reason, pl.Series) else pl.lit(reason, RULE)
    return pl.DataFrame({"duration": trace.gpu["duration"], "phase": trace.places["phase"]}).select(
        gpu=pl.int_range(pl.len(), dtype=pl.Int32),
        place=place,
        reason=pl.when(pl.lit(place).is_null()).then(given),
        duration="duration",
        phase="phase",
    )


def _by_share(trace: Attributed, shares: pl.DataFrame) -> pl.DataFrame:
    """Each activity's time split among its places in proportion to their weights."""
    rows = shares["gpu"].cast(pl.UInt32)
    line = pl.lit(Position.LINE.value, pl.Enum(POSITIONS))  # shares are those of the HLO
    return shares.with_columns(
        duration=split_by_weight(trace.gpu["duration"], shares), phase=trace.places["phase"].gather(rows)
    ).select(
        gpu=pl.col("gpu").cast(pl.Int32),
        place="place",
        reason=pl.when(pl.col("place").is_null()).then("rule"),
        duration="duration",
        phase="phase",
        position=pl.when(pl.col("place").is_not_null()).then(line),
    )


def heading_of(trace: Attributed, by: str) -> str:
    """The heading of a table by a kind of place; by source, it depends on what line numbers mean in this trace."""
    if by == "source":
        held = trace.places["position"].drop_nulls().unique().to_list()
        if len(held) == 1:
            return _SOURCES[Position(held[0])]
    return general_heading(by)


def general_heading(by: str) -> str:
    """The heading of a table by a kind of place, independent of the trace."""
    return _KIND[by].heading or by


def split_by_weight(time: pl.Series, claims: pl.DataFrame) -> pl.Series:
    """Splits a time of each activity by weight into whole ns that add up to it exactly.

    Each part is the difference of consecutive rounded cumulative sums, so rounding loses nothing.

    Args:
        time: of each activity, ns.
        claims: columns gpu and weight; the weights of one activity sum to 1.
    """
    whole = time.gather(claims["gpu"].cast(pl.UInt32))
    reached = (pl.col("weight").cum_sum().over("gpu") * whole).round().cast(pl.Int64)
    return (
        claims.select("gpu", reached=reached)
        .select(pl.col("reached") - pl.col("reached").shift(1).over("gpu").fill_null(0))
        .to_series()
    )


def _collectives(trace: Attributed) -> pl.Series:
    named = trace.collectives.select("gpu", "collective").unique("gpu", keep="first")
    if named.is_empty():
        raise MissingData(f"{', '.join(trace.meta.inputs)}: {why_no_collectives(trace)}")
    rows = pl.select(gpu=pl.int_range(trace.gpu.height, dtype=pl.Int32))
    return rows.join(named, on="gpu", how="left", maintain_order="left")["collective"]


def default_kind(trace: Attributed, kinds: Sequence[str], otherwise: str) -> str:
    """The first kind that covers at least two thirds of the GPU time; if none does, the kind that covers most.

    A kind of which the trace has only one place distinguishes nothing, and is skipped.

    Args:
        kinds: kinds to choose from, the most informative first.
        otherwise: the result if the trace has no places of any of these kinds.
    """
    duration = trace.gpu["duration"]
    total = max(int(duration.sum()), 1)
    covered: dict[str, float] = {}
    for kind in kinds:
        places = trace.places[kind]
        if places.n_unique() - bool(places.null_count()) < 2:
            continue
        time = duration.filter(places.is_not_null()).sum()
        covered[kind] = int(time) / total
        if covered[kind] >= WELL_COVERED_SHARE:
            return kind
    best = max(covered, key=covered.__getitem__, default=otherwise)
    return best if covered.get(best) else otherwise
