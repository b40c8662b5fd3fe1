"""Estimates the clock offset of each rank from the collectives that the ranks share.

A collective ends at nearly the same moment on every rank, so the ends of shared collectives show how
far the ranks' clocks are apart. One constant per rank is estimated:

    skew of an end     = end - mean over ranks of the ends of the same instance
    correction of rank = median of its skews             (to be subtracted from its times)

This is the formula of nsys-jax (align_profiler_data_timestamps), with three differences: instances
match by program name, instruction and the number of earlier runs, so that a rank whose autotuner
chose another kernel (another fingerprint) still matches; an instance needs only two of the ranks, since
each pair that shares instances is informative; and times are not changed, corrections are returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Float64 = npt.NDArray[np.float64]

__all__ = ["Alignment", "align_clocks", "collective_instances"]

_PASSES = 1000
"""Upper bound on the passes of the median iteration."""
_SETTLED_NS = 0.5
"""The iteration has converged when no correction changes by as much."""
_PAIRWISE = r"(?i)permute|send|recv|host"
_GROUP = ("group_name", "group_description", "group_ranks")


@dataclass(frozen=True)
class Alignment:
    """Estimated clock offsets of the ranks.

    Attributes:
        corrections: by rank: rank, correction_ns (Int64, to be subtracted from the rank's times; null
            if it shares no collective with any other), instances (how many it shares), cluster
            (ranks of one cluster are aligned with each other, not with those of another).
        skews: rank, instance (number as in `collective_instances`), skew_ns: residual distance of each end
            from the mean of its instance after the correction.
        residual_median_ns: median of the absolute residual skews; None without shared instances.
        residual_max_ns: the largest of them.
        matched: number of collective instances that at least two ranks took part in.
    """

    corrections: pl.DataFrame
    skews: pl.DataFrame
    residual_median_ns: float | None
    residual_max_ns: float | None
    matched: int

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values, without the individual skews."""
        return {
            "rows": self.corrections.rows(named=True),
            "residual_median_ns": self.residual_median_ns,
            "residual_max_ns": self.residual_max_ns,
            "instances": self.matched,
        }

    def shift(self, rank: str = "rank") -> pl.Expr:
        """An expression for each row's correction in ns, 0 where the rank has none.

        Subtracting it from a time puts that time on the common clock.

        Args:
            rank: name of the column that holds the rank.
        """
        aligned = self.corrections.drop_nulls("correction_ns")
        return pl.col(rank).replace_strict(
            aligned["rank"], aligned["correction_ns"], default=0, return_dtype=pl.Int64
        )


def collective_instances(trace: Attributed) -> pl.DataFrame:
    """Matches rows of ``Tables.collectives`` that are the same collective on different ranks and devices.

    Collectives of XLA programs match by program name, instruction and how often that instruction
    ran on the device before. Others match by process group, kind and sequence number within the group,
    or by their order where there is no sequence number. Each replay of a CUDA graph repeats the sequence
    numbers of its capture, so the order of the graph launches is part of the key there. Replica groups of
    one instruction are not distinguished, because no producer lists them per execution.

    Returns:
        row (in Tables.collectives), rank, device, gpu (row), collective, start, end (ns),
        group_size, instance (number); rows without a kernel are left out.
    """
    rows = (
        trace.collectives.with_row_index("row")
        .filter(pl.col("gpu").is_not_null())
        .select("row", "gpu", "collective", "group_size", "sequence", *_GROUP)
    )
    kernels = trace.gpu.select(
        "rank", "device", "start", "duration", "program", "hlo", "name", "correlation"
    )[rows["gpu"].to_numpy()]
    replayed = rows["gpu"].is_in(trace.graph_places["gpu"].implode()).alias("replayed")
    names = trace.programs.select(
        pl.int_range(pl.len(), dtype=pl.Int32).alias("program"),
        pl.col("name").alias("program_name"),
    )
    joined = (
        rows.hstack(kernels.rename({"name": "kernel"}))
        .hstack([replayed])
        .join(names, on="program", how="left", maintain_order="left")
    )
    of_program = pl.col("program").is_not_null() & pl.col("hlo").is_not_null()
    group_columns = ("collective", *_GROUP, "sequence")
    joined = joined.with_columns(
        *(
            pl.when(of_program).then(pl.col(column)).alias(column)
            for column in ("program_name", "hlo")
        ),
        *(
            pl.when(~of_program).then(pl.col(column)).alias(f"own_{column}")
            for column in group_columns
        ),
    )
    key = ("program_name", "hlo", *(f"own_{column}" for column in group_columns))
    # Several kernels with one sequence number are parts of one collective.
    launch = pl.col("correlation").ne_missing(pl.col("correlation").shift())
    ordered = joined.sort("start", maintain_order=True).with_columns(
        number=pl.when(pl.col("own_sequence").is_null())
        .then(pl.int_range(pl.len()).over("rank", "device", *key))
        .when("replayed")
        .then(launch.cum_sum().cast(pl.Int64).over("rank", "device", *key))
    )
    numbered = ordered.with_columns(
        instance=pl.struct(pl.col(*key, "number")).rank("dense").cast(pl.Int64) - 1
    )
    end = pl.col("start") + pl.col("duration")
    columns = ("row", "rank", "device", "gpu", "collective", "start")
    return numbered.sort("row").select(*columns, end.alias("end"), "group_size", "instance")


def align_clocks(trace: Attributed) -> Alignment:
    """Estimates the corrections that put the ranks on one clock.

    Args:
        trace: of several ranks; collectives, gpu and programs are used. Only collectives that at least
            two ranks share and whose group is the largest are used. Left out are those that ran on more
            devices than the group has (several groups run concurrently and need not end together), and
            point-to-point transfers.
    """
    shared = _ends_by_rank(collective_instances(trace))
    ranks = trace.ranks
    numbers = {rank: number for number, rank in enumerate(ranks)}
    rank = shared["rank"].replace_strict(numbers, return_dtype=pl.Int64).to_numpy()
    instance = (
        shared.select(pl.col("instance").rank("dense").cast(pl.Int64) - 1).to_series().to_numpy()
    )
    end = shared["end"].to_numpy()
    origin = end.min() if len(end) else 0
    corrections = _median_corrections(rank, instance, (end - origin).astype(np.float64), len(ranks))
    rounded = np.rint(corrections).astype(np.int64)
    left = _skews(instance, (end - origin - rounded[rank]).astype(np.float64))
    counts = np.bincount(rank, minlength=len(ranks))
    frame = pl.DataFrame(
        {
            "rank": pl.Series(ranks, dtype=pl.Int32),
            "correction_ns": rounded,
            "instances": counts,
            "cluster": _connected_components(rank, instance, len(ranks)),
        }
    ).with_columns(pl.when(pl.col("instances") > 0).then("correction_ns").alias("correction_ns"))
    skews = shared.select("rank", "instance").with_columns(skew_ns=left)
    absolute = skews["skew_ns"].abs()
    return Alignment(
        frame,
        skews,
        float(np.median(absolute)) if len(absolute) else None,
        float(absolute.to_numpy().max()) if len(absolute) else None,
        shared["instance"].n_unique(),
    )


def _ends_by_rank(rows: pl.DataFrame) -> pl.DataFrame:
    """Mean end per rank of every instance that shows how the clocks of two ranks or more differ."""
    joint = ~pl.col("collective").cast(pl.String).str.contains(_PAIRWISE).fill_null(value=False)
    ends = (
        rows.filter(joint)
        .group_by("instance", "rank", "device")
        .agg(pl.col("end").max(), pl.col("group_size").max())
        .filter((pl.len().over("instance") <= pl.col("group_size")).fill_null(value=True))
    )
    by_rank = ends.group_by("instance", "rank").agg(
        pl.col("end").mean().round().cast(pl.Int64), pl.col("group_size").max()
    )
    shared = by_rank.filter(pl.len().over("instance") > 1)
    largest = pl.col("group_size").max()
    return shared.filter((pl.col("group_size") == largest) | largest.is_null()).sort(
        "instance", "rank"
    )


def _skews(instance: Int64, end: Float64) -> Float64:
    """The difference between each end and the mean end of its instance."""
    counts = np.maximum(np.bincount(instance), 1)
    return end - (np.bincount(instance, weights=end) / counts)[instance]


def _median_corrections(rank: Int64, instance: Int64, end: Float64, ranks: int) -> Float64:
    """The median skew of each rank, iterated to convergence where not every rank has every instance.

    If all ranks took part in all instances, the corrections shift all means alike and one pass suffices.
    Otherwise correcting a rank shifts only the means of its instances, so the medians are taken
    again until none changes by `_SETTLED_NS`.
    """
    corrections = np.zeros(ranks)
    present = np.unique(rank)
    complete = len(instance) == len(present) * len(np.unique(instance))
    for _ in range(1 if complete else _PASSES):
        skews = _skews(instance, end - corrections[rank])
        change = np.zeros(ranks)
        for number in present:
            change[number] = np.median(skews[rank == number])
        corrections += change
        if np.abs(change).max(initial=0) < _SETTLED_NS:
            break
    return corrections


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
        cluster = new
    return cluster
