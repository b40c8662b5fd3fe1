"""Finds where a thread begins to work because another thread of its rank has handed work to it.

Profiler traces hold operators, so the periods in which threads work are known: a thread was handed its work by the
thread that stopped last before. Recordings hold no operators, but the calls of autograd's engine, as rows of the phase
backward on the thread that called it: that thread waits while other threads of its process run the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_threads import thread_numbers
from thence.analysis.whatif.edges import END, STEP
from thence.model.intervals import NO_ROW
from thence.model.row_groups import rows_by_number
from thence.model.tables import API_CALLS
from thence.model.thresholds import HANDED_OVER_NS, THREAD_RESTED_NS

if TYPE_CHECKING:
    from thence.analysis.whatif.edges import Edges, Nodes
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.intervals import Intervals


def handovers(trace: Attributed, host: Intervals, thread: Int64, nodes: Nodes, edges: Edges) -> Int64:
    """Adds nodes and edges where a thread begins to work soon after another thread of its rank has stopped.

    Args:
        trace: with the host rows.
        host: of host rows.
        thread: number of each host row's thread, in ascending order.
        nodes: to which nodes are added.
        edges: to which edges are added.

    Returns:
        The nodes at which threads begin such work.
    """
    by_engine = _calls_of_engine(trace, host, thread)
    source = nodes.add(by_engine.stopped, END, by_engine.by, by_engine.row)
    engine_target = nodes.add(by_engine.start, STEP, by_engine.thread, by_engine.row)
    edges.add(source, engine_target, by_engine.start - by_engine.stopped, "handover")
    busy = _busy_periods(trace, host, thread)
    by = np.full(len(busy.start), NO_ROW)
    for _, ours in rows_by_number(trace.host["rank"].to_numpy()[busy.row]):
        found = _latest_stops(busy.start[ours], busy.stop[ours], busy.thread[ours])
        by[ours] = np.where(found == NO_ROW, NO_ROW, ours[found])
    stopped = np.where(by == NO_ROW, -1, busy.stop[by])
    # The first work of a thread was handed to it, however late it began.
    near = busy.is_first | (busy.start - stopped < HANDED_OVER_NS)
    # A thread that was the last to stop rested for as long as all others: nothing was handed to it.
    handed = np.flatnonzero((by != NO_ROW) & near & (stopped > busy.rested))
    source = nodes.add(stopped[handed], END, busy.thread[by[handed]], busy.row[handed])
    target = nodes.add(busy.start[handed], STEP, busy.thread[handed], busy.row[handed])
    edges.add(source, target, busy.start[handed] - stopped[handed], "handover")
    return np.concatenate([engine_target, target])


@dataclass(frozen=True)
class _Handed:
    """Work handed from one thread to another.

    Attributes:
        by: number of the thread that hands it over.
        stopped: when that thread stopped (ns).
        thread: number of the thread that gets it.
        start: when that thread began it (ns).
        row: a host row of the work.
    """

    by: Int64
    stopped: Int64
    thread: Int64
    start: Int64
    row: Int64


def _calls_of_engine(trace: Attributed, host: Intervals, thread: Int64) -> _Handed:
    """The hand-overs from and to threads that called autograd's engine, of the ranks without rows of operators.

    An outermost row of the phase backward is such a call if another thread of the process with rows of this phase makes
    API calls inside it, and its own thread makes none from the first to the last of these. The work is handed over
    between the API calls of the two threads, or at the ends of the row.
    """
    made, row = _calls_in_backward(trace, host, thread)
    others = thread[made] != thread[row]
    each = pl.DataFrame({"row": row, "thread": thread[made], "others": others}).with_columns(
        start=host.start[made], end=np.minimum(host.end[made], host.end[row])
    )
    worked = (
        each.filter("others")
        .group_by("row", "thread")
        .agg(first=pl.col("start").min(), last=pl.col("end").max())
        .sort("row", "thread")
    )
    whole = worked.group_by("row").agg(begun=pl.col("first").min(), done=pl.col("last").max())
    own = each.filter(~pl.col("others")).join(whole, on="row")
    earlier, later = pl.col("start") < pl.col("begun"), pl.col("start") >= pl.col("done")
    own = own.group_by("row").agg(
        stopped=pl.col("end").filter(earlier).max(),
        resumed=pl.col("start").filter(later).min(),
        amid=(~earlier & ~later).any(),
    )
    worked = worked.join(own, on="row", how="left", maintain_order="left").filter(
        ~pl.col("amid").fill_null(value=False)
    )
    row = worked["row"].to_numpy()
    ends = {"begin": host.start[row], "end": host.end[row]}
    worked = worked.with_columns(**ends, caller=thread[row]).with_columns(
        stopped=pl.min_horizontal("first", pl.coalesce("stopped", "begin")), resumed=pl.coalesce("resumed", "end")
    )
    forth, back = (
        [worked[name].to_numpy() for name in names]
        for names in (("caller", "stopped", "thread", "first", "row"), ("thread", "last", "caller", "resumed", "row"))
    )
    return _Handed(*(np.concatenate(both) for both in zip(forth, back, strict=True)))


def _calls_in_backward(trace: Attributed, host: Intervals, thread: Int64) -> tuple[Int64, Int64]:
    """API calls inside outermost rows of the phase backward, and these rows; of ranks without rows of operators.

    The calls are those of threads of the row's process that have such rows.
    """
    none = np.empty(0, np.int64)
    ranks, category = trace.host["rank"], trace.host["category"]
    rows = np.flatnonzero((category == "phase").to_numpy())
    if not len(rows):
        return none, none
    rows = rows[(trace.host["name"].gather(rows) == "backward").to_numpy()]
    with_operators = ranks.filter(category == "op").unique().implode()
    without = ~ranks.is_in(with_operators).to_numpy()
    rows = rows[without[rows]]
    calls = np.flatnonzero(category.is_in(API_CALLS).to_numpy() & without)
    calls = calls[np.isin(thread[calls], thread[rows])]
    process = thread_numbers(trace.host.select("rank", "process", thread=pl.lit(0)))
    found = [(none, none)]
    for number, ours in rows_by_number(process[rows]):
        mine = _outermost(rows[ours], host)
        made = calls[process[calls] == number]
        at = np.searchsorted(host.start[mine], host.start[made], side="right") - 1
        inside = (at >= 0) & (host.start[made] < host.end[mine[at]])
        found.append((made[inside], mine[at[inside]]))
    made, row = (np.concatenate(column) for column in zip(*found, strict=True))
    return made, row


def _outermost(rows: Int64, host: Intervals) -> Int64:
    """The rows that begin inside no other one, in order of time."""
    rows = rows[np.lexsort((-host.end[rows], host.start[rows]))]
    reached = np.maximum.accumulate(host.end[rows])
    outer = np.ones(len(rows), np.bool_)
    outer[1:] = host.start[rows[1:]] >= reached[:-1]
    return rows[outer]


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


def _busy_periods(trace: Attributed, host: Intervals, thread: Int64) -> _BusyPeriods:
    """The periods of all threads that run operators; operators and API calls are work."""
    category = trace.host["category"]
    with_operators = np.zeros(int(thread[-1]) + 1 if len(thread) else 0, np.bool_)
    with_operators[thread[(category == "op").to_numpy()]] = True
    works = category.is_in(["op", *API_CALLS]).to_numpy()
    rows = np.flatnonzero(works & with_operators[thread])
    own, start = thread[rows], host.start[rows]
    reached = (
        pl.DataFrame({"thread": own, "end": host.end[rows]})
        .select(pl.col("end").cum_max().over("thread"))
        .to_series()
        .to_numpy()
    )
    is_other = np.ones(len(rows), np.bool_)
    is_other[1:] = own[1:] != own[:-1]
    begins = is_other.copy()
    begins[1:] |= start[1:] > reached[:-1] + THREAD_RESTED_NS
    first = np.flatnonzero(begins)
    stop = reached[np.append(first[1:], len(rows))[: len(first)] - 1]
    is_first = is_other[first]
    return _BusyPeriods(own[first], start[first], stop, rows[first], is_first, np.where(is_first, -1, np.roll(stop, 1)))


def _latest_stops(start: Int64, stop: Int64, thread: Int64) -> Int64:
    """For each period of a rank, the one that ends last before it starts; `NO_ROW` if there is none.

    Of several that end at the same time, the one of the thread with the lowest number. A period of no length is not
    its own answer; the previous period of the same thread may be.
    """
    order = np.lexsort((-thread, stop))
    last = np.searchsorted(stop[order], start, side="right") - 1
    last -= (last >= 0) & (order[last] == np.arange(len(order)))
    return np.where(last >= 0, order[last], NO_ROW)
