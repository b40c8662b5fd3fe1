"""Allocations from the events of an allocator: each call that hands out memory, with the call that returns it.

PyTorch's own history has no threads, and its streams are addresses, which CUPTI does not know. An operator allocates
its results and then launches what writes them. So an allocation of such a history belongs to the thread of the next
launch on its device, if that follows soon. Where threads launch at the same time, it may be that of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.columns import nullable
from thence.model.tables import MEMORY, MEMORY_TOTALS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.arrays import Int64
    from thence.model.tables import Tables

HOST_MEMORY = -1
"""Device number of the host's memory among events."""
_SOON_NS = 1_000_000
"""Between an allocation and the launch that it was made for: a few us in programs that were recorded."""


def allocations(events: Mapping[str, Any], allocator: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables `MEMORY` and `MEMORY_TOTALS` of an allocator's events.

    An event at an address ends the allocation that an earlier one began there. Memory that is returned and was never
    seen to be handed out is from before the trace.

    Args:
        events: columns, with the events of each device in the allocator's order: rank, process, thread, device
            (`HOST_MEMORY` for the host), start (ns), address, bytes (negative where they are returned), allocated and
            reserved (bytes after the event; reserved -1 where unknown), and, where it is known of any, requested
            (bytes, -1 where unknown).
        allocator: its name.
    """
    order = np.lexsort((events["device"], events["rank"]))
    rows = {name: np.asarray(values)[order] for name, values in events.items()}
    before, following = _neighbours(rows)
    begins = rows["bytes"] > 0
    earlier, opened = np.flatnonzero(~begins & ~((before >= 0) & begins[before])), np.flatnonzero(begins)
    # Sorted by device; of each device those from before the trace first, as they are returned.
    row = np.concatenate([earlier, opened])
    seen = np.concatenate([np.zeros(len(earlier), np.bool_), np.ones(len(opened), np.bool_)])
    sort = np.lexsort((row, seen, rows["device"][row], rows["rank"][row]))
    row, seen = row[sort], seen[sort]
    closed = np.where(seen, following[row], row)
    device = nullable(rows["device"], rows["device"] == HOST_MEMORY)
    names = pl.Series([allocator], dtype=pl.Categorical())
    stated = {}
    if "requested" in rows:
        stated["requested"] = nullable(rows["requested"][row], ~seen | (rows["requested"][row] < 0))
    memory = MEMORY.frame(
        {
            "rank": rows["rank"][row],
            "device": device.gather(row),
            **{name: nullable(rows[name][row], ~seen) for name in ("process", "thread", "start")},
            "end": nullable(rows["start"][closed], closed < 0),
            "opened": nullable(row, ~seen),
            "closed": nullable(closed, closed < 0),
            "address": rows["address"][row].astype(np.uint64),
            "bytes": np.abs(rows["bytes"][row]),
            **stated,
            "allocator": names.new_from_index(0, len(row)),
        }
    )
    # Less than what is handed out is no size of what is held.
    reserved = nullable(rows["reserved"], rows["reserved"] < np.maximum(rows["allocated"], 0))
    totals = MEMORY_TOTALS.frame(
        {
            "rank": rows["rank"],
            "device": device,
            "allocator": names.new_from_index(0, len(order)),
            "start": rows["start"],
            "allocated": rows["allocated"],
            "reserved": reserved,
            "inactive": reserved - pl.Series(rows["allocated"]),
        }
    )
    return memory, totals


def with_threads(memory: pl.DataFrame, tables: Tables) -> pl.DataFrame:
    """Allocations of one process, with process, thread and time of the next launch on their device.

    Args:
        memory: rows of `thence.model.tables.MEMORY`, without threads.
        tables: of the process, with its activities and calls.
    """
    called = tables.host.filter(pl.col("correlation").is_not_null()).select(
        "correlation", "process", "thread", launched="start"
    )
    launches = (
        tables.gpu.select("device", "correlation")
        .drop_nulls()
        .join(called.unique("correlation", keep="first"), on="correlation")
        .select("device", "process", "thread", "launched")
        .sort("launched")
    )
    asked = memory.select("device", "start").with_row_index("row").drop_nulls().sort("start")
    joined = asked.join_asof(
        launches,
        left_on="start",
        right_on="launched",
        by="device",
        strategy="forward",
        tolerance=_SOON_NS,
        check_sortedness=False,  # both are sorted above; Polars cannot see it in groups
    ).sort("row")
    rows = joined["row"].to_numpy()
    columns = {}
    for name, of_launch in (("process", "process"), ("thread", "thread"), ("launch", "launched")):
        values, known = np.zeros(memory.height, np.int64), np.zeros(memory.height, np.bool_)
        values[rows] = joined[of_launch].fill_null(0).to_numpy()
        known[rows] = joined[of_launch].is_not_null().to_numpy()
        columns[name] = pl.Series(values).zip_with(pl.Series(known), pl.Series([None], dtype=pl.Int64))
    return memory.with_columns(**columns)


def _neighbours(rows: Mapping[str, Any]) -> tuple[Int64, Int64]:
    """The event before and the one after each at the same address of the same device, -1 for none."""
    count = len(rows["address"])
    at_address = np.lexsort((np.arange(count), rows["address"], rows["device"], rows["rank"]))
    first, second = at_address[:-1], at_address[1:]
    same = np.ones(len(first), np.bool_)
    for name in ("rank", "device", "address"):
        same &= rows[name][first] == rows[name][second]
    before, following = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    following[first[same]], before[second[same]] = second[same], first[same]
    return before, following
