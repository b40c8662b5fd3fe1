"""Estimates offset and drift of the ranks' clocks from the collectives that the ranks share.

    offset    as `thence.analysis.collectives.clock_sync` estimates it: the median difference between the ends of
              collectives on a rank and the mean ends of these collectives over all ranks
    drift     slope of a straight line, fitted by least squares to the residuals after the offset, in ns per second

A drift is applied only if, over the time of the rank's shared collectives, it moves the rank by more than 1 us and by
more than `CLOCK_DRIFT_RATIO` times the scatter of the residuals (their 90th percentile) about the line, and if the line
halves that scatter. Otherwise the slope may be due to noise or to an outlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.clock_sync import Alignment, aligned, quantiles
from thence.model.thresholds import CLOCK_DRIFT_RATIO, CLOCK_SCATTER_QUANTILE, MIN_CLOCK_SAMPLES, TIMESTAMP_NS

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.collectives.instances import Instances
    from thence.model.arrays import Float64, Int64


@dataclass(frozen=True)
class Clocks:
    """The clocks of the ranks.

    Attributes:
        rows: rank, offset_ns (to be subtracted from the rank's times; null if it shares no collective with any
            other rank), drift_ns_per_s (null if it shares too few), drift_applied, instances (number of shared
            collectives), cluster (ranks of one cluster are aligned with each other), residual_median_ns,
            residual_p90_ns (of the ends of its collectives after the correction; null if it shares none).
        alignment: as `align_clocks` returns it.
        middle: time (ns) at which the correction of drifts is 0.
    """

    rows: pl.DataFrame
    alignment: Alignment
    middle: float

    @property
    def unaligned(self) -> list[int]:
        """Ranks that share no collective with any other rank, so that their waits are unknown."""
        return self.rows.filter(pl.col("offset_ns").is_null())["rank"].to_list()

    @property
    def statements(self) -> list[str]:
        """The corrections that were made, and ranks for which none was possible, one sentence each."""
        if self.rows.height < 2:
            return []
        said = [self.alignment.statement]
        drifting = self.rows.filter("drift_applied")
        if not drifting.is_empty():
            most = float(np.abs(drifting["drift_ns_per_s"].to_numpy()).max())
            said.append(
                f"clock drift of {drifting.height:,} rank{'s' if drifting.height > 1 else ''} corrected: up to "
                f"{most:,.0f} ns per second"
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
        """The ns to subtract from each time, given its rank."""
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
        instances: the collectives of all ranks; their times may have any origin.
        ranks: all ranks of the job, ascending; ranks without collectives are not aligned.
    """
    alignment = aligned(instances, instances.rows["rank"].unique().sort().to_list())
    ends = instances.rows.group_by("instance").agg(end=pl.col("end").mean())
    skews = alignment.skews.join(ends, on="instance").sort("rank", "end", "instance")
    time, skew = skews["end"].to_numpy(), skews["skew_ns"].to_numpy().astype(np.float64)
    middle = float(np.mean(time)) if len(time) else 0.0
    present, at, count = np.unique(skews["rank"].to_numpy(), return_inverse=True, return_counts=True)
    slope, intercept, span = _lines(at, (time - middle) / 1e9, skew, len(present))
    fitted = skew - intercept[at] - slope[at] * (time - middle) / 1e9
    scatter = quantiles(at, np.abs(fitted), len(present), CLOCK_SCATTER_QUANTILE)
    moved = np.abs(slope) * span
    before = quantiles(at, np.abs(skew), len(present), CLOCK_SCATTER_QUANTILE)
    applied = (count >= MIN_CLOCK_SAMPLES) & (moved > np.maximum(CLOCK_DRIFT_RATIO * scatter, TIMESTAMP_NS))
    applied &= scatter < before / 2
    left = np.where(applied[at], fitted, skew)
    # A line through the residuals also changes the offset: by its intercept.
    extra = np.where(applied, np.rint(intercept), 0).astype(np.int64)
    found = pl.DataFrame(
        {
            "rank": pl.Series(present, dtype=pl.Int32),
            "extra": extra,
            "drift_ns_per_s": np.where(count >= MIN_CLOCK_SAMPLES, slope, np.nan),
            "drift_applied": applied,
            "residual_median_ns": quantiles(at, np.abs(left), len(present), 0.5),
            "residual_p90_ns": quantiles(at, np.abs(left), len(present), CLOCK_SCATTER_QUANTILE),
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


def _lines(at: Int64, time: Float64, value: Float64, count: int) -> tuple[Float64, Float64, Float64]:
    """The least-squares line of each rank: slope, value at time 0, and the time from its first to its last point."""
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
