"""Offset and drift of the ranks' clocks, from the collectives that they share.

    offset    as `thence.analysis.collectives.clock_sync` estimates it: the median distance of a rank's ends from the
              mean ends
    drift     slope of a straight line through what is left, in ns for each second, by least squares

A drift is applied only where it moves a rank, over the time of its shared collectives, by more than `_CLEAR` times
what the ends scatter by (nine in ten residuals), by more than 1 us, and where it halves that scatter: a slope through
noise, or to an outlier, is no drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.clock_sync import Alignment, aligned, quantiles

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.collectives.instances import Instances

    Int64 = npt.NDArray[np.int64]
    Float64 = npt.NDArray[np.float64]

__all__ = ["Clocks", "clocks_of"]

_RESOLUTION_NS = 1000
_FEWEST = 8
"""Shared collectives of a rank from which on a line is fitted."""
_SCATTER = 0.9
_CLEAR = 5


@dataclass(frozen=True)
class Clocks:
    """The clocks of the ranks.

    Attributes:
        rows: rank, offset_ns (to be subtracted from its times; null where it shares no collective with any
            other rank), drift_ns_per_s (null where too few are shared), drift_applied, instances (shared ones),
            cluster (ranks of one cluster are aligned with each other), residual_median_ns, residual_p90_ns
            (of its ends after the correction; null without any).
        alignment: as `align_clocks` returns it.
        middle: time (ns) at which drifts count as 0.
    """

    rows: pl.DataFrame
    alignment: Alignment
    middle: float

    @property
    def unaligned(self) -> list[int]:
        """Ranks that share no collective with any other, so that their waits are not known."""
        return self.rows.filter(pl.col("offset_ns").is_null())["rank"].to_list()

    @property
    def statements(self) -> list[str]:
        """What was done, a sentence each."""
        if self.rows.height < 2:
            return []
        said = [self.alignment.statement]
        drifting = self.rows.filter("drift_applied")
        if not drifting.is_empty():
            most = float(np.abs(drifting["drift_ns_per_s"].to_numpy()).max())
            said.append(
                f"the clocks of {drifting.height:,} ranks drift, by up to {most:,.0f} ns per second: corrected"
            )
        alone = self.unaligned
        if alone and self.alignment.matched:
            shown = ", ".join(map(str, alone[:8])) + (", ..." if len(alone) > 8 else "")
            said.append(
                f"rank{'s' if len(alone) > 1 else ''} {shown}: no collective is shared with another rank, so waits "
                "there are unknown"
            )
        return said

    def shift(self, rank: npt.NDArray[np.int32], time: Int64) -> Int64:
        """What is to be subtracted from times of ranks, in ns."""
        known = self.rows["rank"].to_numpy()
        at = np.searchsorted(known, rank)
        offset = self.rows["offset_ns"].fill_null(0).to_numpy()[at]
        drifts = self.rows.select(
            pl.when("drift_applied").then("drift_ns_per_s").otherwise(0.0).fill_null(0.0)
        ).to_series()
        moved = drifts.to_numpy()[at] * (time - self.middle) / 1e9
        result: Int64 = offset + np.rint(moved).astype(np.int64)
        return result

    def to_json(self) -> dict[str, Any]:
        """The clocks as JSON values."""
        return {"statements": self.statements, "ranks": self.rows.to_dicts()}


def clocks_of(instances: Instances, ranks: list[int]) -> Clocks:
    """Offsets and drifts of the ranks.

    Args:
        instances: the collectives of all ranks, times of any origin.
        ranks: all ranks of the job, ascending; those without collectives are not aligned.
    """
    alignment = aligned(instances, instances.rows["rank"].unique().sort().to_list())
    ends = instances.rows.group_by("instance").agg(end=pl.col("end").mean())
    skews = alignment.skews.join(ends, on="instance").sort("rank", "end", "instance")
    time, skew = skews["end"].to_numpy(), skews["skew_ns"].to_numpy().astype(np.float64)
    middle = float(np.mean(time)) if len(time) else 0.0
    present, at, count = np.unique(
        skews["rank"].to_numpy(), return_inverse=True, return_counts=True
    )
    slope, intercept, span = _lines(at, (time - middle) / 1e9, skew, len(present))
    fitted = skew - intercept[at] - slope[at] * (time - middle) / 1e9
    scatter = quantiles(at, np.abs(fitted), len(present), _SCATTER)
    moved = np.abs(slope) * span
    before = quantiles(at, np.abs(skew), len(present), _SCATTER)
    applied = (count >= _FEWEST) & (moved > np.maximum(_CLEAR * scatter, _RESOLUTION_NS))
    applied &= scatter < before / 2
    left = np.where(applied[at], fitted, skew)
    # A line through what is left moves the offset, too.
    extra = np.where(applied, np.rint(intercept), 0).astype(np.int64)
    found = pl.DataFrame(
        {
            "rank": pl.Series(present, dtype=pl.Int32),
            "extra": extra,
            "drift_ns_per_s": np.where(count >= _FEWEST, slope, np.nan),
            "drift_applied": applied,
            "residual_median_ns": quantiles(at, np.abs(left), len(present), 0.5),
            "residual_p90_ns": quantiles(at, np.abs(left), len(present), _SCATTER),
        }
    ).with_columns(pl.col("drift_ns_per_s").fill_nan(None))
    every = pl.DataFrame({"rank": pl.Series(ranks, dtype=pl.Int32)})
    rows = (
        every.join(alignment.corrections, on="rank", how="left", maintain_order="left")
        .join(found, on="rank", how="left", maintain_order="left")
        .select(
            "rank",
            (pl.col("correction_ns") + pl.col("extra").fill_null(0)).alias("offset_ns"),
            "drift_ns_per_s",
            pl.col("drift_applied").fill_null(value=False),
            pl.col("instances").fill_null(0),
            "cluster",
            "residual_median_ns",
            "residual_p90_ns",
        )
    )
    return Clocks(rows, alignment, middle)


def _lines(
    at: Int64, time: Float64, value: Float64, count: int
) -> tuple[Float64, Float64, Float64]:
    """Slope, value at time 0, and length of time of the line of least squares of each rank."""
    many = np.maximum(np.bincount(at, minlength=count), 1)
    mean_time = np.bincount(at, time, minlength=count) / many
    mean_value = np.bincount(at, value, minlength=count) / many
    away = time - mean_time[at]
    spread = np.bincount(at, away * away, minlength=count)
    shared = np.bincount(at, away * (value - mean_value[at]), minlength=count)
    slope = np.divide(shared, spread, out=np.zeros(count), where=spread > 0)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(low, at, time)
    np.maximum.at(high, at, time)
    return slope, mean_value - slope * mean_time, np.where(many > 1, high - low, 0.0)
