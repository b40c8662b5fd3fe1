"""Estimates the clock offset of each rank from the collectives that the ranks share.

A collective in which every rank needs data from every other (`thence.model.collective_kinds.JOINT`) ends at
nearly the same time on every rank, so the ends of shared collectives show how far the ranks' clocks are
apart. One constant per rank is estimated:

    skew of an end     = end - mean over ranks of the ends of the same instance
    correction of rank = median of its skews             (to be subtracted from its times)
    residual           = skews after the correction

Clocks that already agree are not corrected: all corrections are 0 if none exceeds the scatter of the ends (the
90th percentile of the absolute residuals, but at least 1 us), or if the ends agree at least as well without them.

The formula is that of nsys-jax (align_profiler_data_timestamps), with these differences: instances are
matched by `thence.analysis.collectives.instances`; an instance needs only two of the ranks, since each pair
that shares instances is informative; and times are not changed, corrections are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.instances import Instances, collective_instances, together
from thence.model.answer import Answer, TableView
from thence.model.collective_kinds import JOINT
from thence.model.columns import values_or
from thence.model.thresholds import CLOCK_SCATTER_QUANTILE, TIMESTAMP_NS
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.model.arrays import Float64, Int64
    from thence.model.attributed import Attributed


_PASSES = 1000
"""Upper bound on the passes of the median iteration."""
_SETTLED_NS = 0.5
"""The iteration has converged when every correction changes by less than this."""
_NO_ENDS = pl.DataFrame(
    schema={"instance": pl.Int64, "rank": pl.Int32, "device": pl.Int32, "end": pl.Int64, "group_size": pl.Int32}
)


@dataclass(frozen=True)
class Alignment(Answer):
    """Estimated clock offsets of the ranks.

    Attributes:
        corrections: one row per rank: rank, correction_ns (Int64, to be subtracted from the rank's times; null
            if the rank shares no collective with another; 0 for all if the clocks agree), instances (how many
            it shares), cluster (ranks of one cluster are aligned with each other, but not with other clusters).
        skews: rank, instance (number as in `collective_instances`), skew_ns: distance of each end from the mean end
            of its instance after the correction.
        residual_median_ns: median of the absolute residual skews; None without shared instances.
        residual_max_ns: the largest absolute residual skew.
        residual_p90_ns: the 90th percentile of the absolute residual skews.
        matched: number of collective instances that at least two ranks took part in and that were used.
    """

    corrections: pl.DataFrame
    skews: pl.DataFrame
    residual_median_ns: float | None
    residual_max_ns: float | None
    residual_p90_ns: float | None
    matched: int

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return "clocks of the ranks", self.statement

    def views(self) -> tuple[TableView, ...]:
        """The correction of each rank."""
        headings = {
            "rank": "rank", "correction_ns": "subtracted from its times", "instances": "shared collectives",
            "cluster": "cluster",
        }  # fmt: skip
        return (TableView(self.corrections, headings),)

    @property
    def applied(self) -> bool:
        """Whether any rank's clock is corrected."""
        return bool((self.corrections["correction_ns"].fill_null(0) != 0).any())

    @property
    def statement(self) -> str:
        """One sentence on what was corrected, as text for the user."""
        if self.residual_median_ns is None or self.residual_max_ns is None:
            return (
                "the ranks share no collective that ends together on all of them, so their clocks are not "
                "aligned: waits between ranks are valid only if the clocks are the same"
            )
        median, most = format_ns(self.residual_median_ns), format_ns(self.residual_max_ns)
        ends = f"the ends of {self.matched:,} shared collectives"
        if not self.applied:
            distance = f"{median} from the mean of their ranks in the median, {most} at most"
            return f"the ranks' clocks agree: {ends} are {distance}; none is shifted"
        largest = format_ns(float(self.corrections["correction_ns"].abs().cast(pl.Float64).to_numpy().max(initial=0)))
        return f"clocks aligned by {ends}, by up to {largest}; remaining difference: median {median}, at most {most}"

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values, without the individual skews."""
        return {
            "rows": self.corrections.rows(named=True),
            "residual_median_ns": self.residual_median_ns,
            "residual_max_ns": self.residual_max_ns,
            "residual_p90_ns": self.residual_p90_ns,
            "applied": self.applied,
            "statement": self.statement,
            "instances": self.matched,
        }

    @property
    def shifts(self) -> dict[int, int]:
        """The correction of each rank that has one, ns."""
        return dict(self.corrections.drop_nulls("correction_ns").select("rank", "correction_ns").rows())

    def shift(self, rank: str = "rank") -> pl.Expr:
        """An expression for each row's correction in ns, 0 where the rank has none.

        Subtracting it from a time puts that time on the common clock.

        Args:
            rank: name of the column that holds the rank.
        """
        aligned = self.corrections.drop_nulls("correction_ns")
        return pl.col(rank).replace_strict(aligned["rank"], aligned["correction_ns"], default=0, return_dtype=pl.Int64)


def align_clocks(trace: Attributed, instances: Instances | None = None) -> Alignment:
    """Estimates the corrections that put the ranks on one clock.

    Args:
        trace: a trace of several ranks. An instance is used if its kind ends together on all ranks, every device of
            the trace in its group shows it, and its group is the largest, or connects ranks that larger ones do not.
        instances: as `collective_instances` returns them for this trace; None computes them.
    """
    return aligned(instances or collective_instances(trace), trace.ranks)


def aligned(instances: Instances, ranks: Sequence[int]) -> Alignment:
    """As `align_clocks`, from instances alone.

    Args:
        instances: instances of the ranks.
        ranks: the ranks to align, ascending.
    """
    shared = _ends_by_rank(instances) if len(ranks) > 1 else _NO_ENDS
    numbers = {rank: number for number, rank in enumerate(ranks)}
    rank = shared["rank"].replace_strict(numbers, return_dtype=pl.Int64).to_numpy()
    instance = shared.select(pl.col("instance").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    end = shared["end"].to_numpy()
    since = (end - (end.min() if len(end) else 0)).astype(np.float64)
    cluster = _connected_components(rank, instance, len(ranks))
    corrections, left = _worth_it(rank, instance, since, _median_corrections(rank, instance, since, cluster))
    counts = np.bincount(rank, minlength=len(ranks))
    frame = pl.DataFrame(
        {
            "rank": pl.Series(ranks, dtype=pl.Int32),
            "correction_ns": corrections,
            "instances": counts,
            "cluster": cluster,
        }
    ).with_columns(pl.when(pl.col("instances") > 0).then("correction_ns").alias("correction_ns"))
    absolute = np.abs(left)
    some = len(absolute) > 0
    return Alignment(
        frame,
        shared.select("rank", "instance").with_columns(skew_ns=left),
        float(np.median(absolute)) if some else None,
        float(absolute.max()) if some else None,
        float(np.quantile(absolute, CLOCK_SCATTER_QUANTILE)) if some else None,
        shared["instance"].n_unique(),
    )


def _worth_it(rank: Int64, instance: Int64, end: Float64, estimated: Float64) -> tuple[Int64, Float64]:
    """The corrections, all 0 if the clocks already agree, and the residual skews."""
    corrections = np.rint(estimated).astype(np.int64)
    left, recorded = _skews(instance, end - corrections[rank]), _skews(instance, end)
    if not len(end):
        return corrections, left
    scatter = max(np.quantile(np.abs(left), CLOCK_SCATTER_QUANTILE), TIMESTAMP_NS)
    within = np.abs(corrections).max() <= scatter
    if within or np.median(np.abs(recorded)) <= np.median(np.abs(left)):
        return np.zeros_like(corrections), recorded
    return corrections, left


def _ends_by_rank(instances: Instances) -> pl.DataFrame:
    """The mean end per rank of every instance that is used to compare the clocks of two or more ranks."""
    ends = (
        instances.rows.select(
            *("instance", "rank", "device", "end", "group_size"), *("collective", "unmatched", "matched", "members")
        )
        .filter(
            pl.col("collective").is_in(JOINT), pl.col("unmatched").is_null(), pl.col("matched") == pl.col("members")
        )
        .drop("collective", "unmatched", "matched", "members")
    )
    last, size = pl.col("end").max(), pl.col("group_size").max()
    if _repeats(ends, "instance", "rank", "device"):
        ends = ends.group_by("instance", "rank", "device").agg(last, size)
    by_rank = ends
    if _repeats(ends, "instance", "rank"):
        mean = pl.col("end").mean().round().cast(pl.Int64)
        by_rank = ends.group_by("instance", "rank").agg(mean, size)
    shared = by_rank.filter(pl.len().over("instance") > 1)
    return _connecting(shared).sort("instance", "rank")


def _connecting(shared: pl.DataFrame) -> pl.DataFrame:
    """The ends in the largest groups, and those in smaller ones that connect ranks that no larger group connects."""
    sizes = shared["group_size"].drop_nulls().unique().sort(descending=True).to_list()
    if len(sizes) < 2:
        return shared
    rank, instance = (
        shared.select(pl.col(name).rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
        for name in ("rank", "instance")
    )
    size = values_or(shared["group_size"], 0)
    used, apart = np.zeros(len(size), np.bool_), rank.max() + 2
    for this in sizes:
        more = used | (size == this)
        clusters = len(np.unique(_connected_components(rank[more], instance[more], int(rank.max()) + 1)))
        if clusters < apart:
            used, apart = more, clusters
    return shared.filter(pl.Series(used))


def _repeats(rows: pl.DataFrame, *keys: str) -> bool:
    """Whether two rows have the same keys, which is rare."""
    number = np.sort(together(rows, *keys))
    return bool((np.diff(number) == 0).any())


def _skews(instance: Int64, end: Float64) -> Float64:
    """The difference between each end and the mean end of its instance."""
    counts = np.maximum(np.bincount(instance), 1)
    return end - (np.bincount(instance, weights=end) / counts)[instance]


def _median_corrections(rank: Int64, instance: Int64, end: Float64, cluster: Int64) -> Float64:
    """The median skew of each rank, iterated to convergence where not every rank has every instance.

    Where all ranks of a cluster took part in all of its instances, the corrections shift all means alike and one
    pass suffices. Otherwise correcting a rank shifts only the means of its instances, so the medians are computed
    again until none changes by `_SETTLED_NS`. A change that is common to all clocks of a cluster does not affect the
    skews, so it does not count as a change.

    Args:
        rank: number of the rank of each end, from 0.
        instance: number of the instance of each end, from 0.
        end: ns.
        cluster: cluster of each rank, as `_connected_components` returns it.
    """
    ranks = len(cluster)
    corrections = np.zeros(ranks)
    members = np.maximum(np.bincount(cluster, minlength=ranks), 1)
    settled = _complete(rank, instance, cluster)
    for number in range(_PASSES):
        skews = _skews(instance, end - corrections[rank])
        # A rank without shared instances has no median, and is not moved.
        change = np.nan_to_num(quantiles(rank, skews, ranks, 0.5))
        if number:
            change -= (np.bincount(cluster, weights=change, minlength=ranks) / members)[cluster]
        corrections += change
        largest = np.zeros(ranks)
        np.maximum.at(largest, cluster, np.abs(change))
        settled |= largest < _SETTLED_NS
        going_on = ~settled[cluster][rank]
        if not going_on.any():
            break
        if not going_on.all():
            rank, end = rank[going_on], end[going_on]
            instance = np.unique(instance[going_on], return_inverse=True)[1]
    return corrections


def _complete(rank: Int64, instance: Int64, cluster: Int64) -> npt.NDArray[np.bool_]:
    """For each cluster number, whether each rank of the cluster has an end of each instance of the cluster."""
    count = len(cluster)
    of_rank = np.bincount(rank, minlength=count)
    of_cluster = np.zeros(count, np.int64)
    first = np.unique(instance, return_index=True)[1]
    np.add.at(of_cluster, cluster[rank[first]], 1)
    complete = np.ones(count, np.bool_)
    np.logical_and.at(complete, cluster, of_rank == of_cluster[cluster])
    return complete


def quantiles(group: Int64, value: Float64, groups: int, share: float) -> Float64:
    """A quantile of the values of each group, as `np.quantile` interpolates; NaN for groups without any.

    Args:
        group: group of each value, from 0, shape (n,).
        value: shape (n,).
        groups: how many groups.
        share: from 0 to 1.
    """
    if len(group) and (np.diff(group) < 0).any():
        # NumPy sorts 16-bit integers in linear time (radix sort).
        narrow = group.astype(np.uint16) if groups <= 1 << 16 else group
        value = value[np.argsort(narrow, kind="stable")]
    count = np.bincount(group, minlength=groups)
    first = np.cumsum(count) - count
    result = np.full(groups, np.nan)
    for size in np.unique(count[count > 0]):
        alike = np.flatnonzero(count == size)
        place = (size - 1) * share
        low = int(place)
        high = min(low + 1, size - 1)
        table = np.partition(value[first[alike, None] + np.arange(size)], (low, high), axis=1)
        result[alike] = table[:, low] + (table[:, high] - table[:, low]) * (place - low)
    return result


def _connected_components(rank: Int64, instance: Int64, ranks: int) -> Int64:
    """Connected components of the graph of ranks and instances: the lowest rank number of each."""
    cluster = np.arange(ranks, dtype=np.int64)
    while len(rank):
        lowest = np.full(instance.max() + 1, ranks, np.int64)
        np.minimum.at(lowest, instance, cluster[rank])
        new = cluster.copy()
        np.minimum.at(new, rank, lowest[instance])
        if (new == cluster).all():
            break
        cluster = new[
            new
        ]  # pointer jumping, so that long chains take few passes: new holds ranks of the same component
    return cluster
