"""Places of the work that autograd's threads do outside of nodes.

While ``loss.backward()`` waits, threads of autograd run the nodes; a node has the places of its forward operator.
Work of such a thread before its first node and after its last node, such as the first all-gather and the last
reduce-scatter of FSDP, belongs to the call: it gets the line and phase of the call, if only one thread was inside such
a call at that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import reached_before

if TYPE_CHECKING:
    import polars as pl

    from thence.model.arrays import Int64, Mask


_BACKWARD, _OF_NODES = "backward", ("backward", "recompute")
"""The phase of a thread that calls autograd's engine, and the phases of the engine's own threads."""


@dataclass(frozen=True, slots=True)
class Noted:
    """The boundaries of one kind of place: which place each thread is in from which time on.

    Attributes:
        thread: id; the rows of a thread are adjacent and in order of time.
        time: Unix ns.
        place: row of the place from then on.
    """

    thread: Int64
    time: Int64
    place: Int64

    def until(self, last: int) -> Int64:
        """The time at which the thread came to its next place; `last` (Unix ns) if there is no next place."""
        result = np.append(self.time[1:], last)
        result[np.append(self.thread[1:] != self.thread[:-1], np.True_)[: len(result)]] = last
        return result[: len(self.time)]


@dataclass(frozen=True, slots=True)
class EngineCalls:
    """Calls of autograd's engine during which no other thread was inside such a call.

    Attributes:
        engines: ids of autograd's threads.
        thread: id of the thread that called.
        begin: Unix ns, ascending.
        end: likewise.
    """

    engines: Int64
    thread: Int64
    begin: Int64
    end: Int64


def engine_calls(phases: Noted, names: pl.Series, last: int) -> EngineCalls:
    """Calls of autograd's engine, by the phases that threads were in.

    Args:
        phases: which phase each thread is in.
        names: of the places; null means that a thread is in no place of the kind.
        last: last time in the recording, Unix ns.
    """
    name = names.gather(phases.place)
    of_nodes = name.is_in(_OF_NODES).fill_null(value=True).to_numpy()
    others = np.unique(phases.thread[~of_nodes])
    engines = np.setdiff1d(phases.thread[name.is_not_null().to_numpy()], others)
    inside = (name == _BACKWARD).fill_null(value=False).to_numpy() & np.isin(phases.thread, others)
    begin, end, thread = phases.time[inside], phases.until(last)[inside], phases.thread[inside]
    order = np.argsort(begin, kind="stable")
    begin, end, thread = begin[order], end[order], thread[order]
    alone = (reached_before(end) <= begin) & (end <= np.append(begin[1:], last)[: len(end)])
    return EngineCalls(engines, thread[alone], begin[alone], end[alone])


def with_places_of_calls(noted: Noted, named: Mask, calls: EngineCalls) -> Noted:
    """Gives threads of autograd the caller's places of one kind, wherever they are in none during a call.

    Args:
        noted: places of the kind.
        named: for each place, whether it has a name; one without means that a thread is in no place of the kind.
        calls: of autograd's engine.
    """
    callers = _of_callers(noted, calls)
    parts = [(noted.thread, noted.time, noted.place, np.ones(len(noted.time), np.int64))]
    for engine in calls.engines.tolist():
        own = noted.thread == engine
        time, known = noted.time[own], named[noted.place[own]]
        free = ~np.append(np.False_, known)
        begins = np.append(np.iinfo(np.int64).min, time)[free]
        ends = np.append(time, np.iinfo(np.int64).max)[free]
        _, row, begin, end = _shared((begins, ends), callers[:2])
        thread, zero = np.full(len(row), engine), np.zeros(len(row), np.int64)
        # At equal times, the end of a caller's place sorts first, then the thread's own, then the caller's begin.
        parts += [(thread, end, zero, zero), (thread, begin, callers[2][row], zero + 2)]
    threads, times, places, turn = map(np.concatenate, zip(*parts, strict=True))
    order = np.lexsort((turn, times, threads))
    return Noted(threads[order], times[order], places[order])


def _of_callers(noted: Noted, calls: EngineCalls) -> tuple[Int64, Int64, Int64]:
    """Begin, end and place for the places that callers are in during their calls, in order of time."""
    empty = np.empty(0, np.int64)
    parts = [(empty, empty, empty)]
    until = noted.until(np.iinfo(np.int64).max)
    for caller in np.unique(calls.thread).tolist():
        own, of_it = noted.thread == caller, calls.thread == caller
        row, _, begin, end = _shared((noted.time[own], until[own]), (calls.begin[of_it], calls.end[of_it]))
        parts.append((begin, end, noted.place[own][row]))
    begin, end, place = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(begin, kind="stable")
    return begin[order], end[order], place[order]


def _shared(first: tuple[Int64, Int64], second: tuple[Int64, Int64]) -> tuple[Int64, Int64, Int64, Int64]:
    """Intersections of two sets of intervals, each without overlaps: row in the first, in the second, begin, end."""
    (begins, ends), (other_begins, other_ends) = first, second
    low = np.searchsorted(ends, other_begins, side="right")
    count = np.maximum(np.searchsorted(begins, other_ends, side="left") - low, 0)
    other = np.repeat(np.arange(len(count)), count)
    one = np.arange(len(other)) + np.repeat(low - (np.cumsum(count) - count), count)
    begin, end = (np.maximum(begins[one], other_begins[other]), np.minimum(ends[one], other_ends[other]))
    return one, other, begin, end
