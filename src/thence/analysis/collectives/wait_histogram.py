"""Histogram of the waits of collectives (`collectives.waits`), with bins that begin at 1, 2, 5, 10, 20, 50 ... us."""

from __future__ import annotations

import polars as pl

_STEPS = (1, 2, 5)
_LEAST_NS = 1_000
_DECADES = 8  # up to 1000 s
_EDGES = tuple(_LEAST_NS * 10**decade * step for decade in range(_DECADES + 1) for step in _STEPS)


def wait_histogram(instances: pl.DataFrame) -> pl.DataFrame:
    """Counts instances by collective and wait.

    Args:
        instances: columns collective and wait_ns of `thence.analysis.collectives.communication.Collectives`.

    Returns:
        columns collective, from_ns, to_ns (a bin holds waits of at least from_ns and below to_ns; the first
        bin begins at 0, the last has no end: null) and count; ordered by bin and collective. All collectives have
        the same bins: empty bins between others have a count of 0, empty bins at the ends are left out.
    """
    begins = pl.Series([0, *_EDGES], dtype=pl.Int64)
    bins = pl.DataFrame({"from_ns": begins, "to_ns": begins.shift(-1)}).with_row_index("bin")
    known = instances.filter(pl.col("wait_ns").is_not_null())
    number = begins.search_sorted(known["wait_ns"], side="right").cast(pl.UInt32) - 1
    counted = known.select("collective", bin=number).group_by("collective", "bin").agg(count=pl.len().cast(pl.Int64))
    held = bins.filter(pl.col("bin").is_between(counted["bin"].min(), counted["bin"].max()))
    return (
        counted.select("collective")
        .unique()
        .join(held, how="cross")
        .join(counted, on=["collective", "bin"], how="left", nulls_equal=True)
        .sort("bin", "collective")
        .select("collective", "from_ns", "to_ns", pl.col("count").fill_null(0))
    )
