"""Names of ranges, kernels and copies: columns with many rows and few distinct names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import mask_of

if TYPE_CHECKING:
    from thence.model.arrays import Mask

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
    distinct = names.unique() if len(names) else names
    return distinct.drop_nulls() if distinct.null_count() else distinct


def matching(names: pl.Series, pattern: str) -> pl.Series:
    """Which names contain a match of a regular expression; every distinct name is searched once.

    Args:
        names: Categorical; a null matches nothing.
        pattern: as Polars takes it.
    """
    distinct = pl.lit(names.unique())
    matches = distinct.filter(distinct.cast(pl.String).str.contains(pattern))
    return names.to_frame().select(pl.all().is_in(matches.implode()).fill_null(value=False)).to_series()


def among(names: pl.Series, chosen: pl.Series) -> Mask:
    """Which names are among the chosen ones.

    Args:
        names, chosen: Categorical; a null in ``names`` is not among them.
    """
    if names.is_empty() or chosen.is_empty():
        return np.zeros(len(names), np.bool_)
    return mask_of(names.is_in(pl.Series([chosen])))
