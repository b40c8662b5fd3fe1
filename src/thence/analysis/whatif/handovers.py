"""Finds where a thread begins to work because another thread of its rank has handed work to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.whatif.edges import END, STEP
from thence.model.intervals import NO_ROW
from thence.model.row_groups import rows_by_number
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.whatif.edges import Edges, Nodes
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["handovers"]

_REST_NS = 15_000  # a thread without work for this long may be given work by another thread
_HANDED_NS = 2_000_000
"""Maximum time from the end of a thread's work to the start of the work that it hands over: autograd first scans its
whole graph, which took 0.5 ms for a model with 6 layers."""


def handovers(
    trace: Attributed, host: tuple[Int64, Int64], thread: Int64, nodes: Nodes, edges: Edges
) -> Int64:
    """Adds nodes and edges where a thread begins to work soon after another thread of its rank has stopped.

    Args:
        trace: with the host rows.
        host: starts and ends of host rows.
        thread: number of each host row's thread, in ascending order.
        nodes: to which nodes are added.
        edges: to which edges are added.

    Returns:
        The nodes at which threads begin such work.
    """
    busy = _busy_periods(trace, host, thread)
    by = np.full(len(busy.start), NO_ROW)
    for _, ours in rows_by_number(trace.host["rank"].to_numpy()[busy.row]):
        found = _latest_stops(busy.start[ours], busy.stop[ours], busy.thread[ours])
        by[ours] = np.where(found == NO_ROW, NO_ROW, ours[found])
    stopped = np.where(by == NO_ROW, -1, busy.stop[by])
    # The first work of a thread was handed to it, however late it began.
    near = busy.is_first | (busy.start - stopped < _HANDED_NS)
    # A thread that was the last to stop rested for as long as all others: nothing was handed to it.
    handed = np.flatnonzero((by != NO_ROW) & near & (stopped > busy.rested))
    source = nodes.add(stopped[handed], END, busy.thread[by[handed]], busy.row[handed])
    target = nodes.add(busy.start[handed], STEP, busy.thread[handed], busy.row[handed])
    edges.add((source, target), busy.start[handed] - stopped[handed], "handover")
    return target


@dataclass(frozen=True)
class _BusyPeriods:
    """Periods in which threads work, thread by thread, in order of time.

    Attributes:
        thread: number of the thread.
        start: start of the period (ns).
        stop: end of the period (ns).
        row: the first host row of the period.
        is_first: whether it is the first period of its thread.
        rested: end of the thread's previous period (ns); -1 for the first.
    """

    thread: Int64
    start: Int64
    stop: Int64
    row: Int64
    is_first: Mask
    rested: Int64


def _busy_periods(trace: Attributed, host: tuple[Int64, Int64], thread: Int64) -> _BusyPeriods:
    """The periods of all threads that run operators; operators and API calls are work."""
    category = trace.host["category"]
    with_operators = np.zeros(int(thread[-1]) + 1 if len(thread) else 0, np.bool_)
    with_operators[thread[(category == "op").to_numpy()]] = True
    works = category.is_in(["op", *API_CALLS]).to_numpy()
    rows = np.flatnonzero(works & with_operators[thread])
    own, start = thread[rows], host[0][rows]
    reached = (
        pl.DataFrame({"thread": own, "end": host[1][rows]})
        .select(pl.col("end").cum_max().over("thread"))
        .to_series()
        .to_numpy()
    )
    is_other = np.ones(len(rows), np.bool_)
    is_other[1:] = own[1:] != own[:-1]
    begins = is_other.copy()
    begins[1:] |= start[1:] > reached[:-1] + _REST_NS
    first = np.flatnonzero(begins)
    stop = reached[np.append(first[1:], len(rows))[: len(first)] - 1]
    is_first = is_other[first]
    return _BusyPeriods(
        own[first],
        start[first],
        stop,
        rows[first],
        is_first,
        np.where(is_first, -1, np.roll(stop, 1)),
    )


def _latest_stops(start: Int64, stop: Int64, thread: Int64) -> Int64:
    """For each period of a rank, the one that ends last before it starts; `NO_ROW` if there is none.

    Of several that end at the same time, the one of the thread with the lowest number. A period of no length is not
    its own answer; the previous period of the same thread may be.
    """
    order = np.lexsort((-thread, stop))
    last = np.searchsorted(stop[order], start, side="right") - 1
    last -= (last >= 0) & (order[last] == np.arange(len(order)))
    return np.where(last >= 0, order[last], NO_ROW)
