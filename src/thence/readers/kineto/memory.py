"""The tables of memory, from PyTorch's events about its allocators (``profile_memory=True``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.columns import nullable
from thence.model.tables import MEMORY_FAILURES
from thence.readers.allocations import HOST_MEMORY, allocations
from thence.readers.kineto.event_structs import MISSING
from thence.readers.kineto.events import MEMORY_EVENTS
from thence.units import several

if TYPE_CHECKING:
    from thence.model.arrays import Array
    from thence.readers.kineto.ranks import Lanes

_CHANGE, _FAILURE = range(len(MEMORY_EVENTS))
_OF_HOST = 0
"""PyTorch's number of the device type CPU."""
_MAX_BYTES, _MAX_DEVICE = 1 << 44, 1 << 15
"""More than any machine has."""
_ALLOCATOR = "torch"


def memory_tables(events: dict[str, Any], lanes: Lanes) -> tuple[dict[str, Any], list[str]]:
    """The tables of memory by name, and sentences on events that were left out because their values are impossible.

    Args:
        events: columns ``memory.*`` of `thence.readers.kineto.events.decode`.
    """
    if not events or not len(events["kind"]):
        return {}, []
    on_host = events["device_type"] == _OF_HOST
    device = np.where(on_host, HOST_MEMORY, events["device_id"])
    possible = on_host | ((events["device_type"] > 0) & (device >= 0) & (device < _MAX_DEVICE))
    possible &= _sizes(events["memory_bytes"], -_MAX_BYTES) & (events["memory_bytes"] != 0)
    of_change = events["kind"] == _CHANGE
    possible &= np.where(
        of_change, (events["address"] != MISSING) & _sizes(events["allocated"], 0), events["memory_bytes"] > 0
    )
    order = np.flatnonzero(possible)
    order = order[np.argsort(events["start"][order], kind="stable")]
    lane = events["lane"][order]
    rank = np.where(lanes.rank < 0, max(0, int(lanes.rank.min(initial=0))), lanes.rank).astype(np.int32)
    reserved = events["reserved"][order]
    columns = {
        "rank": rank[lane],
        "process": lanes.process[lane],
        "thread": lanes.thread[lane],
        "device": device[order].astype(np.int32),
        "start": events["start"][order],
        "address": events["address"][order],
        "bytes": events["memory_bytes"][order],
        "allocated": events["allocated"][order],
        "reserved": np.where(_sizes(reserved, 0) & ~on_host[order], reserved, -1),
    }
    changes, failed = of_change[order], ~of_change[order]
    memory, totals = allocations({name: values[changes] for name, values in columns.items()}, _ALLOCATOR)
    tables: dict[str, Any] = {"memory": memory, "memory_totals": totals}
    if failed.any():
        tables["memory_failures"] = _failures({name: values[failed] for name, values in columns.items()}, totals)
    lost = len(possible) - len(order)
    return tables, [f"left out: {several(lost, 'memory event')} with impossible values"] if lost else []


def _sizes(values: Array, least: int) -> Array:
    sizes: Array = (values >= least) & (values <= _MAX_BYTES)
    return sizes


def _failures(columns: dict[str, Any], totals: pl.DataFrame) -> pl.DataFrame:
    """Rows of `MEMORY_FAILURES`."""
    known = {name: nullable(columns[name], columns[name] < 0) for name in ("device", "allocated", "reserved")}
    frame = MEMORY_FAILURES.frame(
        {
            **{name: columns[name] for name in ("rank", "process", "thread", "start", "bytes")},
            **known,
            "allocator": pl.Series([_ALLOCATOR], dtype=pl.Categorical()).new_from_index(0, len(columns["start"])),
        }
    )
    before = totals.select("rank", "device", "start", after=pl.int_range(pl.len(), dtype=pl.Int32)).sort(
        "start", maintain_order=True
    )
    placed = frame.drop("after").with_columns(device=pl.col("device").fill_null(HOST_MEMORY))
    placed = placed.sort("start", maintain_order=True).join_asof(
        before.with_columns(device=pl.col("device").fill_null(HOST_MEMORY)),
        on="start",
        by=["rank", "device"],
        strategy="backward",
        check_sortedness=False,
    )
    placed = placed.with_columns(device=pl.col("device").replace(HOST_MEMORY, None))
    return placed.select(list(MEMORY_FAILURES.schema)).sort("rank", "device", "start", maintain_order=True)
