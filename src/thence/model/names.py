"""Names of ranges, kernels and copies: columns with many rows and few distinct names."""

from __future__ import annotations

import polars as pl

UNNAMED = "(unnamed)"
"""Name of activities and host ranges for which the producer gave none: every row has a name."""

TO_DEVICE = r"(?i)HtoD|H2D|Host-to-Device|Host.*-> ?Device"
FROM_DEVICE = r"(?i)DtoH|D2H|Device-to-Host|Device.*-> ?Host"
ON_DEVICE = r"(?i)DtoD|D2D|Device-to-Device"
BETWEEN_DEVICES = r"(?i)PtoP|P2P|Peer-to-Peer"
"""Patterns of the names of copies in each direction: ``Memcpy HtoD (Pinned -> Device)`` of Kineto, recordings and
Nsight Systems, and ``MemcpyH2D`` of XLA's profiler."""


def distinct_names(names: pl.Series) -> pl.Series:
    """The distinct names, without null, in any order."""
    found = names.unique()
    return found.drop_nulls() if found.null_count() else found


def matching(names: pl.Series, pattern: str) -> pl.Series:
    """Which names contain a match of a regular expression; every distinct name is searched once.

    Args:
        names: Categorical; a null matches nothing.
        pattern: as Polars takes it.
    """
    distinct = distinct_names(names).cast(pl.String)
    found = distinct.filter(distinct.str.contains(pattern)).cast(pl.Categorical())
    if found.is_empty():
        return pl.Series([False]).new_from_index(0, len(names)).alias(names.name)
    return names.is_in(found.implode()).fill_null(value=False)
