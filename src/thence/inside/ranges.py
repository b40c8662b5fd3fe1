"""Builds the table of ranges and instants with their times, about 500,000 events at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.inside.columns import INSTANT, UNKNOWN, Columns
from thence.inside.matching import match
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.inside.clocks import Clocks
    from thence.model.arrays import Int64

_RANGE_KINDS = ("range", "instant")

_EVENTS_AT_A_TIME = 1 << 19
"""Limits the size of the temporary arrays, whose memory is reused from one part to the next."""
_MOST_UNKNOWN_NAMES = 1000


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
        if len(unnamed) <= _MOST_UNKNOWN_NAMES:
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
    """All ranges and instants, and warnings about events that do not belong to a complete, named range.

    Args:
        columns: columns of one buffer.
        clocks: clocks of its traces.
        end_ns: end of each trace.
        names: names by id.
        overhead_cycles: cycles for recording one event.
    """
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
    of = np.repeat(np.arange(len(columns.trace)), columns.count)[begin]
    until = end if closed.all() else np.where(closed, end, columns.first[1:][of] - 1)
    rate, offset = ghz_of[of], start_of[of]
    entered, left = columns.counter[begin] / rate, columns.counter[until] / rate
    start = offset + np.rint(entered).astype(np.int64)
    duration = offset + np.rint(left).astype(np.int64) - start
    if not closed.all():
        duration = np.where(closed, duration, end_of[of] - start)
        left = np.where(closed, left, entered + duration)
        defects.unclosed += int((~closed).sum())
    np.maximum(duration, 0, out=duration)  # of a trace whose clock ran backwards
    net = left - entered - (until - begin) * each_of[of]
    np.maximum(net, 0.0, out=net)
    name = columns.name[begin]
    if len(labels.unnamed):
        defects.unnamed += int((name >= len(labels.codes)).sum())
    instant = columns.kind[begin] == INSTANT
    return pl.DataFrame(
        [
            pl.Series("trace", columns.trace.astype(np.int32)[of]),
            pl.Series("block", columns.block.astype(np.int32)[of]),
            pl.Series("index", columns.index.astype(np.int32)[of]),
            known_series("sm", columns.sm[of]),
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
