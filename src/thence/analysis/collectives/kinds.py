"""Kinds of collectives: what each means for time and bandwidth. `thence.model.collective_kinds` recognises them.

Bandwidths follow nccl-tests (doc/PERFORMANCE.md) and nsys-jax: with message size m in bytes, n
devices in the group and duration t in ns, in decimal GB/s (1 GB/s = 1 byte/ns)

    algorithm bandwidth = K m / t       K = n for all-gather and reduce-scatter, else 1
    bus bandwidth       = B K m / t     B = (n-1)/n for all-gather, reduce-scatter, all-to-all;
                                            2 (n-1)/n for all-reduce; else 1
"""

from __future__ import annotations

import polars as pl

JOINT = (*("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"), "barrier")
"""Every participant needs data from every other, so none can end before the last has begun, and they
end together."""
FROM_ROOT = ("broadcast", "scatter")
"""Receivers wait for the root; the root may end before they begin."""
TO_ROOT = ("reduce", "gather")
"""The root waits for all others; they may end before it begins."""
PEERS = ("send", "recv")
"""A pair: source and destination."""
MESSAGES = (*PEERS, "send-recv", "coalesced", "collective-permute")
"""Sends and receives, alone or in batches: a device waits for its neighbours only."""

_SCALED = ("all-gather", "reduce-scatter")
_PARTIAL = ("all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")


def bandwidths(time_ns: str) -> tuple[pl.Expr, pl.Expr]:
    """Algorithm and bus bandwidth in GB/s from the columns collective, bytes and group_size.

    Args:
        time_ns: name of the column that holds the time; 0 and null give null.
    """
    kind, n = pl.col("collective"), pl.col("group_size").cast(pl.Float64)
    scale = pl.when(kind.is_in(_SCALED)).then(n).otherwise(1.0)
    bus = (
        pl.when(kind.is_in(_PARTIAL)).then((n - 1) / n).when(kind == "all-reduce").then(2 * (n - 1) / n).otherwise(1.0)
    )
    timed = pl.when(pl.col(time_ns) > 0).then(pl.col(time_ns))
    algorithm = scale * pl.col("bytes") / timed
    return algorithm, bus * algorithm
