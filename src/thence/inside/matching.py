"""Matches enter and exit events into ranges, without a Python loop over the events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.inside.columns import ENTER, EXIT, starts_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.model.arrays import Array, Int64, Mask, UInt8


_LEVELS_ONE_BY_ONE = 32
"""Nesting depth up to which each level is matched separately; deeper events are sorted by level."""
_STEP = np.array([1, -1, 0, 0], np.int8)


@dataclass(frozen=True)
class Matches:
    """Ranges among the events of all traces.

    Attributes:
        begin: index of the event that opens each range, ascending; shape (ranges,).
        end: index of the event that closes each range; -1 for a range without an exit.
        depth: number of ranges that are open around each range.
        stray: indices of the exits without an enter.
        level: nesting level of every event; for instants, the number of ranges open around it.
    """

    begin: Int64
    end: Int64
    depth: npt.NDArray[np.int32]
    stray: Int64
    level: npt.NDArray[np.int32]


def match(kind: UInt8, name: Array, count: Int64) -> Matches:
    """The ranges of all traces.

    Enters and exits are paired like nested brackets. If this leaves an exit alone or pairs it with another
    name (an exit was left out, or ranges cross), the trace's events are matched separately for each name.

    Args:
        kind: kind of each event, trace after trace.
        name: id of each event's name.
        count: number of events of each trace.
    """
    partner, level, stray = _brackets(kind, count)
    begin = np.flatnonzero(kind == ENTER)
    end = partner[begin]
    crossing = (end >= 0) & (name[begin] != name[end])
    if crossing.any() or stray.any():
        suspects = np.append(begin[crossing], np.flatnonzero(stray))
        rows = _events_of_traces(suspects, count)
        _by_name(kind, name, count, rows, partner, stray)
        end = partner[begin]
    return Matches(begin, end, level[begin], np.flatnonzero(stray), level)


def _brackets(kind: UInt8, count: Int64) -> tuple[Int64, npt.NDArray[np.int32], Mask]:
    """The other event of each pair (-1 for none), the level of each event, and stray exits."""
    step = _STEP[kind]
    first = starts_of(count)
    depth = np.cumsum(step, dtype=np.int32)
    before = depth - step
    filled = np.flatnonzero(count)
    base = np.zeros(len(count), np.int32)
    base[filled] = before[first[filled]]
    if base.any():
        depth -= np.repeat(base, count)
    stray = np.zeros(len(kind), np.bool_)
    if int(depth.min(initial=0)) < 0:
        depth, stray = _without_strays(depth, step, count)
    level = depth - (step > 0)
    partner = np.full(len(kind), -1, np.int64)
    pairable = (step != 0) & ~stray if (stray.any() or not step.all()) else None
    for rows in _levels(level, pairable):
        _pair(kind, rows, partner)
    return partner, level, stray


def _without_strays(
    depth: npt.NDArray[np.int32], step: npt.NDArray[np.int8], count: Int64
) -> tuple[npt.NDArray[np.int32], Mask]:
    """Depths when exits without an enter are left out, and a mask of these exits."""
    number = np.repeat(np.arange(len(count), dtype=np.int64), count)
    apart = 2 * len(depth) + 2
    # Shift each trace far below the previous one, so that the running minimum starts anew at each trace.
    lowest = np.minimum.accumulate(depth - number * apart) + number * apart
    lowest = np.minimum(lowest, 0).astype(np.int32)
    earlier = np.roll(lowest, 1)
    begins = starts_of(count)[:-1]
    earlier[begins[begins < len(depth)]] = 0
    return depth - lowest, (step < 0) & (lowest < earlier)


def _levels(level: npt.NDArray[np.int32], pairable: Mask | None) -> Any:
    """Yields the events of each level in their order; all deeper levels together, sorted by level."""
    deepest = int(level.max(initial=-1))
    for number in range(min(deepest + 1, _LEVELS_ONE_BY_ONE)):
        chosen = level == number
        yield np.flatnonzero(chosen if pairable is None else chosen & pairable)
    if deepest >= _LEVELS_ONE_BY_ONE:
        chosen = level >= _LEVELS_ONE_BY_ONE
        rows = np.flatnonzero(chosen if pairable is None else chosen & pairable)
        yield rows[np.argsort(level[rows], kind="stable")]


def _pair(kind: UInt8, rows: Int64, partner: Int64) -> None:
    """Pairs each enter with the next event on its level, if that event is an exit.

    On one level of one trace, enters and exits alternate. Only the last enter may lack an exit; the
    event after it is then the first enter of another trace or level.
    """
    closes = kind[rows] == EXIT
    opens = np.flatnonzero(~closes[:-1] & closes[1:])
    partner[rows[opens]] = rows[opens + 1]


def _events_of_traces(events: Int64, count: Int64) -> Int64:
    """All events of the traces to which the given events belong, in order."""
    first = starts_of(count)
    traces = np.unique(np.searchsorted(first, events, side="right") - 1)
    sizes = count[traces]
    offset = np.repeat(first[traces] - starts_of(sizes)[:-1], sizes)
    return offset + np.arange(int(sizes.sum()))


def _by_name(kind: UInt8, name: Array, count: Int64, rows: Int64, partner: Int64, stray: Mask) -> None:
    """Matches the events ``rows`` again, separately for each trace and name."""
    trace = np.searchsorted(starts_of(count), rows, side="right") - 1
    order = np.lexsort((name[rows], trace))
    events = rows[order]
    of_trace, of_name = trace[order], name[events]
    fresh = np.ones(len(events), np.bool_)
    fresh[1:] = (of_trace[1:] != of_trace[:-1]) | (of_name[1:] != of_name[:-1])
    sizes = np.diff(np.append(np.flatnonzero(fresh), len(events)))
    partners, _, lost = _brackets(kind[events], sizes)
    partner[events] = np.where(partners >= 0, events[partners], -1)
    stray[events] = lost
