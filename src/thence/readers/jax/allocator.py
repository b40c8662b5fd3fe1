"""Allocations from what XLA's allocator (BFC) wrote into a profile: a host event for each call, with what it left.

The allocator of a GPU holds nearly all of its memory from its start on, or as much as was needed until then; an event
states neither, so what it reserved is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.tables import MEMORY, MEMORY_TOTALS
from thence.readers.allocations import allocations

if TYPE_CHECKING:
    from thence.readers.jax.xspace import XSpace

_ALLOCATES, _RETURNS = "MemoryAllocation", "MemoryDeallocation"
_OF_GPU = r"^GPU_(\d{1,4})_bfc$"
"""Allocators of GPUs by their number (gpu_helpers.cc). Others are of the host's memory."""
_MAX_BYTES = 1 << 44
"""More than any device has."""


def memory_tables(space: XSpace, rank: int, process: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables `MEMORY` and `MEMORY_TOTALS`, empty if the profile has no such events.

    Args:
        rank: of the process.
        process: its id, 0 if unknown.
    """
    changes = space.memory.with_columns(
        device=pl.col("allocator").cast(pl.String).str.extract(_OF_GPU).cast(pl.Int32, strict=False)
    ).filter(
        pl.col("device").is_not_null(),
        pl.col("name").cast(pl.String).is_in([_ALLOCATES, _RETURNS]),
        pl.col("bytes").is_between(1, _MAX_BYTES),
        pl.col("allocated").is_between(0, _MAX_BYTES),
    )
    if changes.is_empty():
        return MEMORY.empty(), MEMORY_TOTALS.empty()
    changes = changes.sort("start", "start_rest_ps", maintain_order=True)
    allocates = (changes["name"].cast(pl.String) == _ALLOCATES).to_numpy()
    size, requested = changes["bytes"].to_numpy(), changes["requested"].to_numpy()
    events = {
        "rank": np.full(changes.height, rank, np.int32),
        "process": np.full(changes.height, process, np.int64),
        "thread": changes["thread"].to_numpy(),
        "device": changes["device"].to_numpy(),
        "start": changes["start"].to_numpy(),
        "address": changes["address"].to_numpy(),
        "bytes": np.where(allocates, size, -size),
        "requested": np.where((requested >= 0) & (requested <= size), requested, -1),
        "allocated": changes["allocated"].to_numpy(),
        "reserved": np.full(changes.height, -1, np.int64),
    }
    return allocations(events, "bfc")
