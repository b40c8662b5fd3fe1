"""Decodes a buffer of in-kernel events of any layout into traces, ranges and events in nanoseconds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.inside.clocks import SOURCES, Clocks, clocks_at, clocks_of, precision_of, rate_in_slice
from thence.inside.columns import IGNORED, STATES, UNKNOWN, Columns, as_words
from thence.inside.formats import flashinfer, mosaic, proton, thence
from thence.inside.ranges import Labels, enum_series, known_series, ranges_of
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from thence.inside.description import Description
    from thence.model.arrays import Int64, UInt32

    Reader = Callable[[UInt32, Description, str], Columns]

_EVENT_KINDS = ("enter", "exit", "instant")
"""Kinds of events in `Decoded.events`; the kinds in `Decoded.ranges` are range and instant."""

_READERS: Mapping[str, Reader] = {
    "thence": thence.read,
    "mosaic": mosaic.read,
    "mosaic-2024": mosaic.read,
    "flashinfer": flashinfer.read,
    "flashinfer-old": flashinfer.read,
    "mirage": flashinfer.read,
    "proton": proton.read,
}
_MAX_SMS = 1 << 16
_MAX_OVERHEAD_CYCLES = 64
"""Recording an event takes about 50 cycles on an H200; a larger distance includes other work."""


@dataclass(frozen=True)
class Decoded:
    """The decoded buffer of one launch of a kernel.

    If ``unit`` is cycles, because nothing tells the rate of the SM clock, the columns whose names end in _ns here end
    in _cycles, and starts are comparable only within one SM.

    Attributes:
        description: description of the buffer.
        traces: one row for each warp, warpgroup or block that was traced: trace, block, index, sm
            (null: not recorded), start_ns, end_ns, events, dropped, clock_ghz, clock_source (of
            `thence.inside.clocks.SOURCES`), state (of `thence.inside.columns.STATES`).
        ranges: one row for each range or instant, by trace and start: trace, block, index, sm, name,
            kind (range, instant), start_ns, duration_ns, net_ns (Float64), depth, closed.
            start_ns and duration_ns are as recorded; net_ns is the duration minus the time for
            recording the events in the range. closed is false for ranges without an exit event: they
            end with their trace.
        overhead_cycles: cycles for recording one event, as subtracted in net_ns; 0 where not known.
        timer_bits: bits of %globaltimer that start_ns is based on: 64; 32, where start_ns is known up to
            a multiple of 2^32 ns; or 0, where start_ns is comparable only within one SM.
        scope: what a trace is: block, warpgroup, warp, group, or trace where the layout does not say.
        notes: what was estimated, or is not known, as sentences.
        warnings: data that could not be read or belongs to no range, as sentences.
    """

    description: Description
    traces: pl.DataFrame
    ranges: pl.DataFrame
    overhead_cycles: float
    timer_bits: int
    scope: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    _columns: Columns
    _clocks: Clocks

    @property
    def unit(self) -> str:
        """The unit of all times: ns, or cycles if the rate of the SM clock is unknown."""
        return self._clocks.unit

    def at_rate(self, ghz: float, note: str) -> Decoded:
        """The buffer with cycles converted to ns.

        Args:
            ghz: rate of the SM clock.
            note: where it comes from, as a sentence.
        """
        return _decoded(self._columns, self.description, clocks_at(self._columns, ghz, note))

    def rate_in_slice(self, slice_ns: int) -> tuple[float, float] | None:
        """The rate in GHz at which it fills its kernel, and its relative uncertainty; None if there is none."""
        return rate_in_slice(self._columns, slice_ns)

    def in_unit(self, frame: pl.DataFrame) -> pl.DataFrame:
        """A frame of times in the unit of this buffer, whose columns are named _ns, named by the unit."""
        return _renamed(frame, "ns", self.unit)

    def as_ns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """One of its frames with columns named _ns, for code that computes in either unit."""
        return _renamed(frame, self.unit, "ns")

    @cached_property
    def events(self) -> pl.DataFrame:
        """One row for each event as recorded: trace, name, kind (of `_EVENT_KINDS`), time_ns, counter.

        counter counts from the trace's start, in cycles, or in ns where clock_source is timer.
        """
        columns, clocks = self._columns, self._clocks
        kept = np.flatnonzero(columns.kind < IGNORED)
        trace_of_event = np.repeat(np.arange(len(columns.trace)), columns.count)[kept]
        counter = columns.counter[kept]
        time = clocks.start_ns[trace_of_event] + np.rint(counter / clocks.ghz[trace_of_event]).astype(np.int64)
        frame = pl.DataFrame(
            [
                pl.Series("trace", columns.trace[trace_of_event].astype(np.int32)),
                Labels.of(columns.name, self.description.names).series(columns.name[kept]),
                enum_series("kind", columns.kind[kept], _EVENT_KINDS),
                pl.Series("time_ns", time),
                pl.Series("counter", counter),
            ]
        )
        return self.in_unit(frame)


def _renamed(frame: pl.DataFrame, before: str, after: str) -> pl.DataFrame:
    """The frame with another unit at the ends of its columns' names."""
    return frame.rename(lambda name: re.sub(f"_{before}$", f"_{after}", name))


def decode(buffer: Any, description: Description, clock_ghz: float | None = None, path: str = "the buffer") -> Decoded:
    """Decodes a buffer into traces and ranges.

    Args:
        buffer: the buffer as the kernel wrote it: an array of 32- or 64-bit integers or of bytes on
            the host, any shape, or bytes.
        description: layout, names and launch of the buffer.
        clock_ghz: SM clock for traces that did not measure it themselves.
        path: name of the buffer in errors and warnings.

    Raises:
        DamagedInput: the buffer does not match its description, or nothing in it can be read.
        UsageError: ``clock_ghz`` is outside the range of possible clock rates.
    """
    columns = _READERS[description.flavour](as_words(buffer, path), description, path)
    columns.sm = np.where(columns.sm < _MAX_SMS, columns.sm, UNKNOWN)
    return _decoded(columns, description, clocks_of(columns, clock_ghz))


def _decoded(columns: Columns, description: Description, clocks: Clocks) -> Decoded:
    """Traces and ranges of the columns of a buffer, by its clocks."""
    overhead, overhead_notes = _overhead(columns, description)
    end_ns = _ends(columns, clocks)
    ranges, warnings = ranges_of(columns, clocks, end_ns, description.names, overhead)
    in_ns = clocks.unit == "ns"
    return Decoded(
        description,
        _renamed(_traces(columns, clocks, end_ns), "ns", clocks.unit),
        _renamed(ranges, "ns", clocks.unit),
        overhead,
        columns.timer_bits if in_ns else 0,
        columns.scope,
        (*clocks.notes, *overhead_notes, *(precision_of(columns) if in_ns else ())),
        (*columns.warnings, *_drop_warnings(columns), *warnings),
        columns,
        clocks,
    )


def _overhead(columns: Columns, description: Description) -> tuple[float, list[str]]:
    """Cycles that recording an event takes, and notes about them as sentences."""
    if description.overhead_cycles is not None:
        cycles = max(description.overhead_cycles, 0.0)
        return cycles, [f"{_net_time_note(cycles)}, as measured on the device"] if cycles else []
    if columns.overhead_cycles is not None:
        cycles = columns.overhead_cycles
        return cycles, [f"{_net_time_note(cycles)}, by the rule of the profiler that wrote it"]
    inner = np.ones(max(len(columns.counter) - 1, 0), np.bool_)
    begins = columns.first[1:-1]
    inner[begins[(begins > 0) & (begins < len(columns.counter))] - 1] = False
    inner &= np.repeat(columns.in_cycles, columns.count)[1:]
    if not inner.any():
        return 0.0, []
    least = int(np.diff(columns.counter).min(where=inner, initial=_MAX_OVERHEAD_CYCLES + 1))
    if 0 < least <= _MAX_OVERHEAD_CYCLES:
        return float(least), [f"{_net_time_note(least)}, the smallest distance between two neighbouring events"]
    return 0.0, ["the cost of recording an event is unknown and not subtracted"]


def _net_time_note(cycles: float) -> str:
    return f"from net times {cycles:g} cycles are subtracted for each event recorded in them"


def _ends(columns: Columns, clocks: Clocks) -> Int64:
    """End of each trace in ns: the recorded end, or the last event if it is later or no end was recorded."""
    last = np.zeros(len(columns.trace), np.int64)
    filled = np.flatnonzero(columns.count)
    last[filled] = columns.counter[columns.first[1:][filled] - 1]
    by_events = np.rint(last / clocks.ghz).astype(np.int64)
    in_ns = (columns.total_ns > 0) & (clocks.unit == "ns")
    recorded_ns = np.where(in_ns, columns.total_ns, 0)
    return clocks.start_ns + np.maximum(by_events, recorded_ns)


def _traces(columns: Columns, clocks: Clocks, end_ns: Int64) -> pl.DataFrame:
    return pl.DataFrame(
        [
            pl.Series("trace", columns.trace.astype(np.int32)),
            pl.Series("block", columns.block.astype(np.int32)),
            pl.Series("index", columns.index.astype(np.int32)),
            known_series("sm", columns.sm),
            pl.Series("start_ns", clocks.start_ns),
            pl.Series("end_ns", end_ns),
            pl.Series("events", columns.count.astype(np.int32)),
            pl.Series("dropped", columns.dropped),
            pl.Series("clock_ghz", clocks.sm_ghz, nan_to_null=True),
            enum_series("clock_source", clocks.source, SOURCES),
            enum_series("state", columns.state, STATES),
        ]
    )


def _drop_warnings(columns: Columns) -> list[str]:
    lost = int(columns.dropped.sum())
    warnings = []
    if lost and not any("ring" in text for text in columns.warnings):
        over = int((columns.dropped > 0).sum())
        warnings.append(
            f"{several(over, 'trace')} had no room for {several(lost, 'further event')}: give more capacity"
        )
    if columns.absent:
        warnings.append(f"no events in {several(columns.absent, 'trace')} of the grid")
    return warnings
