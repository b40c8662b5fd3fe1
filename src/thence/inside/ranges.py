"""Enter and exit events matched into ranges, and the table of ranges and instants with their times.

There is no Python loop over events: they are matched level by level, and the table is made about 500,000 events at a
time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.inside.columns import ENTER, EXIT, INSTANT, UNKNOWN, Columns, starts_of
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.inside.clocks import Clocks
    from thence.model.arrays import Array, Int64, Mask, UInt8

_LEVELS_ONE_BY_ONE = 32
"""Nesting depth up to which each level is matched separately; deeper events are sorted by level."""
_STEP = np.array([1, -1, 0, 0], np.int8)
_RANGE_KINDS = ("range", "instant")
_EVENTS_AT_A_TIME = 1 << 19
"""Limits the size of the temporary arrays, whose memory is reused from one part to the next."""
_MAX_UNKNOWN_NAMES = 1000


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


@dataclass(frozen=True)
class Labels:
    """Names as categories.

    Attributes:
        categories: distinct names.
        codes: category of each id that has a name.
        unnamed: the ids without a name that occur, ascending.
        unnamed_codes: category of each id in ``unnamed``.
    """

    categories: tuple[str, ...]
    codes: npt.NDArray[np.uint32]
    unnamed: npt.NDArray[Any]
    unnamed_codes: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, ids: npt.NDArray[Any], names: tuple[str, ...]) -> Labels:
        """Categories for all ids that occur."""
        labels = [name or f"range {number}" for number, name in enumerate(names)]
        place: dict[str, int] = {}
        codes = [place.setdefault(label, len(place)) for label in labels]
        unnamed = np.unique(ids[ids >= len(names)])
        if len(unnamed) <= _MAX_UNKNOWN_NAMES:
            others = [f"range {int(number)}" for number in unnamed]
        else:
            others = ["range without a name"] * len(unnamed)
        more = [place.setdefault(label, len(place)) for label in others]
        return cls(tuple(place), np.array(codes, np.uint32), unnamed, np.array(more, np.uint32))

    def series(self, ids: npt.NDArray[Any]) -> pl.Series:
        """The column "name" for event ids."""
        if not len(self.unnamed):
            return enum_series("name", self.codes[ids], self.categories)
        is_named = ids < len(self.codes)
        result = np.zeros(len(ids), np.uint32)
        result[is_named] = self.codes[ids[is_named]]
        result[~is_named] = self.unnamed_codes[np.searchsorted(self.unnamed, ids[~is_named])]
        return enum_series("name", result, self.categories)


@dataclass
class _Defects:
    """Counts of events that do not belong to a complete, named range."""

    unclosed: int = 0
    unnamed: int = 0
    stray: Counter[int] = field(default_factory=Counter)

    def warnings(self, names: tuple[str, ...]) -> list[str]:
        warnings = []
        if self.unclosed:
            warnings.append(
                f"{several(self.unclosed, 'range')} entered and never left: shown until the end of the trace,"
                " and not counted in statistics"
            )
        if self.stray:
            ((number, _),) = self.stray.most_common(1)
            label = (number < len(names) and names[number]) or f"range {number}"
            warnings.append(
                f"{several(self.stray.total(), 'exit')} of ranges that were not entered left out,"
                f" most often of {label!r}"
            )
        if self.unnamed:
            warnings.append(
                f"{several(self.unnamed, 'range')} with an id that the description does not name: shown as numbers"
            )
        return warnings


def ranges_of(
    columns: Columns, clocks: Clocks, end_ns: Int64, names: tuple[str, ...], overhead_cycles: float
) -> tuple[pl.DataFrame, list[str]]:
    """All ranges and instants, and warnings about events that do not belong to a complete, named range."""
    labels = Labels.of(columns.name, names)
    defects = _Defects()
    rate = clocks.ghz if clocks.unit == "cycles" else clocks.sm_ghz
    each_ns = np.nan_to_num(overhead_cycles / rate)
    frames = [
        _frame(
            columns.part(low, high),
            (clocks.ghz[low:high], clocks.start_ns[low:high], end_ns[low:high], each_ns[low:high]),
            labels,
            defects,
        )
        for low, high in _parts(columns.first)
    ]
    return pl.concat(frames), defects.warnings(names)


def _parts(first: Int64) -> Iterator[tuple[int, int]]:
    """Yields parts (low, high) of consecutive traces with at most `_EVENTS_AT_A_TIME` events together.

    A trace with more events is a part of its own. There is at least one part, which may be empty.
    """
    traces = len(first) - 1
    low = 0
    while True:
        high = int(np.searchsorted(first, first[low] + _EVENTS_AT_A_TIME, side="right")) - 1
        high = min(max(high, low + 1), traces)
        yield low, high
        low = high
        if low >= traces:
            return


def _frame(
    columns: Columns, of_traces: tuple[Any, Int64, Int64, Any], labels: Labels, defects: _Defects
) -> pl.DataFrame:
    ghz_of, start_of, end_of, each_of = of_traces
    begin, end, depth = _begun(columns, defects)
    closed = end >= 0
    trace = np.repeat(np.arange(len(columns.trace)), columns.count)[begin]
    until = end if closed.all() else np.where(closed, end, columns.first[1:][trace] - 1)
    rate, offset = ghz_of[trace], start_of[trace]
    entered, left = columns.counter[begin] / rate, columns.counter[until] / rate
    start = offset + np.rint(entered).astype(np.int64)
    duration = offset + np.rint(left).astype(np.int64) - start
    if not closed.all():
        duration = np.where(closed, duration, end_of[trace] - start)
        left = np.where(closed, left, entered + duration)
        defects.unclosed += int((~closed).sum())
    np.maximum(duration, 0, out=duration)  # of a trace whose clock ran backwards
    net = left - entered - (until - begin) * each_of[trace]
    np.maximum(net, 0.0, out=net)
    name = columns.name[begin]
    if len(labels.unnamed):
        defects.unnamed += int((name >= len(labels.codes)).sum())
    instant = columns.kind[begin] == INSTANT
    return pl.DataFrame(
        [
            pl.Series("trace", columns.trace.astype(np.int32)[trace]),
            pl.Series("block", columns.block.astype(np.int32)[trace]),
            pl.Series("index", columns.index.astype(np.int32)[trace]),
            known_series("sm", columns.sm[trace]),
            labels.series(name),
            enum_series("kind", instant.astype(np.uint32), _RANGE_KINDS),
            pl.Series("start_ns", start),
            pl.Series("duration_ns", duration),
            pl.Series("net_ns", net),
            pl.Series("depth", depth),
            pl.Series("closed", closed),
        ]
    )


def _begun(columns: Columns, defects: _Defects) -> tuple[Int64, Int64, npt.NDArray[np.int32]]:
    """Enters and instants in order, the exit of each (-1 where there is none), and their depths."""
    matches = match(columns.kind, columns.name, columns.count)
    for number, count in zip(*np.unique(columns.name[matches.stray], return_counts=True), strict=True):
        defects.stray[int(number)] += int(count)
    instants = np.flatnonzero(columns.kind == INSTANT)
    if not len(instants):
        return matches.begin, matches.end, matches.depth
    begin = np.concatenate([matches.begin, instants])
    order = np.argsort(begin, kind="stable")
    depths = np.concatenate([matches.depth, matches.level[instants]])
    return begin[order], np.concatenate([matches.end, instants])[order], depths[order]


def enum_series(name: str, codes: npt.NDArray[Any], categories: tuple[str, ...]) -> pl.Series:
    """An Enum column from the indices of its categories."""
    # Uses gather(), because the cast from integers to an Enum differs between versions of Polars.
    return pl.Series(name, categories, pl.Enum(categories)).gather(codes)


def known_series(name: str, values: npt.NDArray[Any]) -> pl.Series:
    """Numbers as an Int32 column, null where they are `UNKNOWN`."""
    series = pl.Series(name, values.astype(np.int32))
    unknown = values == UNKNOWN
    return series.set(pl.Series(unknown), None) if unknown.any() else series
