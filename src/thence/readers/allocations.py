"""Allocations from the events of an allocator: each call that hands out memory, with the call that returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.tables import MEMORY, MEMORY_TOTALS

if TYPE_CHECKING:
    from collections.abc import Mapping

HOST_MEMORY = -1
"""Device number of the host's memory among events."""
_OF_ALLOCATION = ("rank", "process", "thread", "start")


def allocations(events: Mapping[str, Any], allocator: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables `MEMORY` and `MEMORY_TOTALS` of an allocator's events.

    An event at an address ends the allocation that an earlier one began there. Memory that is returned and was never
    seen to be handed out is from before the trace.

    Args:
        events: columns, with the events of each device in the allocator's order: rank, process, thread, device
            (`HOST_MEMORY` for the host), start (ns), address, bytes (negative where they are returned), allocated and
            reserved (bytes after the event; reserved -1 where unknown).
        allocator: its name.
    """
    order = np.lexsort((events["device"], events["rank"]))
    rows = {name: np.asarray(values)[order] for name, values in events.items()}
    count = len(order)
    number = np.arange(count)
    same_place = np.lexsort((number, rows["address"], rows["device"], rows["rank"]))
    following, before = np.full(count, -1, np.int64), np.full(count, -1, np.int64)
    first, second = same_place[:-1], same_place[1:]
    there = np.ones(len(first), np.bool_)
    for name in ("rank", "device", "address"):
        there &= rows[name][first] == rows[name][second]
    following[first[there]] = second[there]
    before[second[there]] = first[there]
    begins = rows["bytes"] > 0
    returns_unseen = ~begins & ~((before >= 0) & begins[before])
    earlier, opened = np.flatnonzero(returns_unseen), np.flatnonzero(begins)
    # Sorted by device; of each device those from before the trace first, as they are returned.
    row = np.concatenate([earlier, opened])
    seen = np.concatenate([np.zeros(len(earlier), np.bool_), np.ones(len(opened), np.bool_)])
    sort = np.lexsort((row, seen, rows["device"][row], rows["rank"][row]))
    row, seen = row[sort], seen[sort]
    closed = np.where(seen, following[row], row)
    device = _known(rows["device"], rows["device"] != HOST_MEMORY)
    names = pl.Series([allocator], dtype=pl.Categorical())
    memory = MEMORY.frame(
        {
            "rank": rows["rank"][row],
            "device": device.gather(row),
            **{name: _known(rows[name][row], seen) for name in ("process", "thread", "start")},
            "end": _known(rows["start"][closed], closed >= 0),
            "opened": _known(row, seen),
            "closed": _known(closed, closed >= 0),
            "address": rows["address"][row].astype(np.uint64),
            "bytes": np.abs(rows["bytes"][row]),
            "allocator": names.new_from_index(0, len(row)),
        }
    )
    reserved = _known(rows["reserved"], rows["reserved"] >= 0)
    totals = MEMORY_TOTALS.frame(
        {
            "rank": rows["rank"],
            "device": device,
            "allocator": names.new_from_index(0, count),
            "start": rows["start"],
            "allocated": rows["allocated"],
            "reserved": reserved,
            "inactive": reserved - pl.Series(rows["allocated"]),
        }
    )
    return memory, totals


def _known(values: Any, known: Any) -> pl.Series:
    """The values, with null where they are not known."""
    column = pl.Series(values)
    return column if known.all() else column.set(pl.Series(~known), None)
