"""Conversion from counters to nanoseconds: rates of SM clocks, and starts of traces on a common clock.

The SM clock rate differs between SMs and over time (1.94 to 1.98 GHz within one kernel on an H200). A
trace that recorded both clocks at its start and end is therefore converted by the rate between these two
samples. Where a layout lacks them, the rate comes from another source, which ``clock_source`` names. If nothing
tells the rate, times stay in cycles: a rate that is not known is not assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from thence.errors import UsageError
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.inside.columns import Columns
    from thence.model.arrays import Float64, Int64


SOURCES = ("timer", "measured", "given", "neighbours", "estimated", "launch", "unknown")
"""Where the rate of a trace's clock comes from. timer: its events are in ns already. measured: from
its own two samples of both clocks. given: by the caller. neighbours: the median of the buffer's
measured traces, for a trace that never finished or is too short for the timer's resolution. estimated:
from the clocks at the starts of successive blocks on one SM. launch: from the duration of the kernel in a
trace of the same run. unknown: nothing tells it, and times are in cycles."""
_TIMER, _MEASURED, _GIVEN, _NEIGHBOURS, _ESTIMATED, _LAUNCH, _UNKNOWN = range(7)

_TIMER_STEP_NS = 32
"""Resolution of %globaltimer on an H200."""
_LENGTHS_THAT_SHOW_A_STEP = 3
_SHORT_NS = 32 * _TIMER_STEP_NS  # one step of the timer is 3 % of it
_MIN_SPAN_NS = 100 * _TIMER_STEP_NS  # and 1 % of this
_MAX_SPAN_NS = 1_000_000_000
"""Longest span in which the low word of an SM clock cannot wrap, at up to 4 GHz."""
_MIN_GHZ, MAX_GHZ = 0.1, 4.0
"""SM clocks beyond these are impossible."""
_WRAP = 1 << 32  # of a low word
_OUTSIDE_NS, _OUTSIDE_RANGE_NS = 950, 350
"""By how much a kernel takes longer than from the first start to the last end inside it, ns, and how far that varies:
0.6 to 1.3 us for CuPy, Triton, Pallas and Mosaic kernels on an H200 (docs/inside.md)."""
_HALVINGS = 40  # of the range of rates: far below a part in a million


@dataclass(frozen=True)
class Clocks:
    """Start and clock rate of each trace; arrays of shape (traces,).

    Attributes:
        start_ns: start of each trace, on one clock for all traces.
        ghz: counter steps in a nanosecond: the SM clock's rate, or 1 where events are in ns.
        sm_ghz: rate of the SM clock, also where events are in ns; NaN where not known.
        source: index into `SOURCES`.
        notes: what was estimated, or is not known, as sentences.
        unit: ns; or cycles, if the rate is unknown: then ``start_ns`` and all that follows from it are cycles, and
            starts are comparable only within one SM.
    """

    start_ns: Int64
    ghz: Float64
    sm_ghz: Float64
    source: npt.NDArray[np.uint8]
    notes: tuple[str, ...]
    unit: str = "ns"


def clocks_of(columns: Columns, clock_ghz: float | None = None) -> Clocks:
    """Rates and starts of all traces.

    Args:
        columns: columns of one buffer.
        clock_ghz: rate for traces that did not measure it.

    Raises:
        UsageError: ``clock_ghz`` is outside the range of possible clock rates, or it is needed, because some traces
            count ns and others cycles of an unknown rate.
    """
    if clock_ghz is not None and not _MIN_GHZ <= clock_ghz <= MAX_GHZ:
        raise UsageError(f"a clock of {clock_ghz} GHz is impossible: SM clocks run at {_MIN_GHZ} to {MAX_GHZ} GHz")
    start = columns.timer if columns.timer_bits == 64 else unwrapped(columns.timer)
    rate, source = _measured(columns)
    missing = np.isnan(rate) & columns.in_cycles
    notes: list[str] = []
    if missing.any():
        chosen, how = _rate_for_unmeasured(columns, start, rate, clock_ghz)
        if how == _UNKNOWN:
            return _in_cycles(columns, source)
        rate[missing], source[missing] = chosen, how
        notes.append(_rate_note(int(missing.sum()), len(missing), chosen, how))
    ghz = np.where(columns.in_cycles, rate, 1.0)
    source[~columns.in_cycles] = _TIMER
    if columns.timer_bits == 0 and len(start):
        start = _starts_by_sm_clock(columns, ghz)
        notes.append(
            "this version of the layout does not record when blocks began: the first block of "
            "every SM is drawn at 0, and the others by the SM's clock"
        )
    return Clocks(start, ghz, rate, source, tuple(notes))


def precision_of(columns: Columns) -> list[str]:
    """A note if the traces are so short that the timer's resolution makes their clock rates inaccurate."""
    measured = columns.in_cycles & (columns.total_ns > 0) & (columns.total_cycles > 0)
    lasted = columns.total_ns[measured]
    if len(np.unique(lasted)) < _LENGTHS_THAT_SHOW_A_STEP:
        return []
    step, median = int(np.gcd.reduce(lasted)), float(np.median(lasted))
    if step < _TIMER_STEP_NS or median >= 100 * step:
        return []
    text = (
        f"traces last {format_ns(median)}, and the timer advances in steps of {step:,} ns: lengths in a"
        f" single trace are uncertain by up to {format_share(step, median)}"
    )
    return [text]


def _measured(columns: Columns) -> tuple[Float64, npt.NDArray[np.uint8]]:
    """Rates from each trace's own samples, NaN where there are none."""
    rate = np.full(len(columns.trace), np.nan)
    has_samples = (columns.total_ns > 0) & (columns.total_cycles > 0)
    rate[has_samples] = columns.total_cycles[has_samples] / columns.total_ns[has_samples]
    # In a short trace the timer's resolution dominates the error of the rate. The median rate is more
    # accurate, unless the trace differs from it by more than one timer step.
    long = has_samples & (columns.total_ns >= _SHORT_NS)
    source = np.full(len(rate), _MEASURED, np.uint8)
    if long.any():
        common = float(np.median(rate[long]))
        expected = common * columns.total_ns
        step = common * _TIMER_STEP_NS
        vague = has_samples & ~long & (np.abs(columns.total_cycles - expected) <= step)
        rate[vague], source[vague] = common, _NEIGHBOURS
    rate[~((rate >= _MIN_GHZ) & (rate <= MAX_GHZ))] = np.nan
    return rate, source


def clocks_at(columns: Columns, ghz: float, note: str) -> Clocks:
    """Clocks of a buffer at a rate that a trace of the same run tells.

    Args:
        columns: columns of one buffer.
        ghz: rate for traces that did not measure it.
        note: where it comes from, as a sentence.
    """
    clocks = clocks_of(columns, ghz)
    source = np.where(clocks.source == _GIVEN, _LAUNCH, clocks.source).astype(np.uint8)
    return replace(clocks, source=source, notes=(note, *clocks.notes[1:]))


def rate_in_slice(columns: Columns, slice_ns: int) -> tuple[float, float] | None:
    """The rate of the SM clock at which the traces of a buffer fill their kernel, and its relative uncertainty.

    Starts are in ns of the timer and lengths in cycles, so the time from the first start to the last end depends on
    the rate; the kernel takes `_OUTSIDE_NS` longer.

    Args:
        columns: columns of one buffer that counts cycles.
        slice_ns: duration of its kernel in a trace.

    Returns:
        None: the layout records no starts, or no plausible rate makes the traces fit.
    """
    if columns.timer_bits == 0 or not len(columns.trace):
        return None
    start = columns.timer if columns.timer_bits == 64 else unwrapped(columns.timer)
    begun = start - start.min()
    lengths = np.zeros(len(begun), np.int64)
    filled = np.flatnonzero(columns.count)
    lengths[filled] = columns.counter[columns.first[1:][filled] - 1]
    lengths = np.maximum(lengths, columns.total_cycles)

    def rate(span_ns: float) -> float:
        low, high = _MIN_GHZ, MAX_GHZ
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if (begun + lengths / middle).max() > span_ns else (low, middle)
        return high

    middle, fast, slow = (
        rate(slice_ns - _OUTSIDE_NS + change) for change in (0, -_OUTSIDE_RANGE_NS, _OUTSIDE_RANGE_NS)
    )
    # A rate at an end of the range was not found: halving ran into the end.
    if not _MIN_GHZ * 1.01 < middle < MAX_GHZ * 0.99:
        return None
    return middle, (fast - slow) / 2 / middle


def _rate_for_unmeasured(columns: Columns, start: Int64, rate: Float64, given: float | None) -> tuple[float, int]:
    """The rate for all traces without a rate of their own, and its index into `SOURCES`."""
    if given is not None:
        return given, _GIVEN
    measured: Float64 = rate[~np.isnan(rate)]
    if len(measured):
        return float(np.median(measured)), _NEIGHBOURS
    estimated = _successive_blocks(columns, start)
    return (math.nan, _UNKNOWN) if estimated is None else (estimated, _ESTIMATED)


def _in_cycles(columns: Columns, source: npt.NDArray[np.uint8]) -> Clocks:
    """Clocks of a buffer that counts cycles of an unknown rate."""
    if not columns.in_cycles.all():
        raise UsageError(
            "some traces of the buffer count ns and others cycles, and nothing tells the rate of the SM clock: give "
            "it (--clock-ghz)"
        )
    source[:] = _UNKNOWN
    ones = np.ones(len(source))
    note = (
        "times are in cycles of the SM clock, not in ns: nothing in the buffer tells the clock's rate; give it "
        "(--clock-ghz) if you know it. The first block of every SM is drawn at 0, and the others by the SM's clock"
    )
    unknown = np.full(len(source), np.nan)
    return Clocks(_starts_by_sm_clock(columns, ones), ones, unknown, source, (note,), "cycles")


def _rate_note(count: int, traces: int, ghz: float, how: int) -> str:
    who = "all traces" if count == traces else several(count, "trace")
    rate = f"{ghz:.3f} GHz for the SM clock of {who}"
    if how == _GIVEN:
        return f"cycles are converted to ns with {rate}, as given"
    if how == _NEIGHBOURS:
        return f"cycles are converted to ns with {rate}, the median of the others"
    return f"cycles are converted to ns with {rate}, estimated from successive blocks on the same SMs"


def _successive_blocks(columns: Columns, start: Int64) -> float | None:
    """The median over all SMs of the clock rate in GHz between the first and the last start on each SM.

    None if the starts are too close together on every SM, or the rate is not plausible.
    """
    usable = (columns.clock >= 0) & (columns.sm >= 0) & (columns.timer_bits > 0)
    rows = np.flatnonzero(usable)
    if len(rows) < 2:
        return None
    rows = rows[np.lexsort((start[rows], columns.sm[rows]))]
    first = np.flatnonzero(np.diff(columns.sm[rows], prepend=-1))
    last = np.append(first[1:], len(rows)) - 1
    span = start[rows[last]] - start[rows[first]]
    cycles = (columns.clock[rows[last]] - columns.clock[rows[first]]) % _WRAP
    good = (span >= _MIN_SPAN_NS) & (span <= _MAX_SPAN_NS)
    if not good.any():
        return None
    rates = cycles[good] / span[good]
    rate = float(np.median(rates))
    return rate if _MIN_GHZ <= rate <= MAX_GHZ else None


def unwrapped(low: Int64) -> Int64:
    """64-bit times from their low 32 bits, each taken to be less than 2.1 s from the median time.

    Args:
        low: ns, each from 0 to 2^32 - 1, shape (n,).

    Returns:
        int64 ns of shape (n,), none negative; equal to ``low`` modulo 2^32.
    """
    if not len(low):
        return low
    apart = _signed(low - low[0])
    middle = int(np.median(apart))
    times: Int64 = low[0] + middle + _signed(apart - middle)
    least = int(times.min())
    return times - least // _WRAP * _WRAP


def _signed(difference: Int64) -> Int64:
    result: Int64 = (difference + _WRAP // 2) % _WRAP - _WRAP // 2
    return result


def _starts_by_sm_clock(columns: Columns, ghz: Float64) -> Int64:
    """Starts of traces in ns by the clock of their SM; 0 is the earliest start on each SM."""
    start = np.zeros(len(columns.trace), np.int64)
    for sm in np.unique(columns.sm):
        rows = np.flatnonzero((columns.sm == sm) & (columns.clock >= 0))
        if len(rows):
            clock = columns.clock[rows]
            since = clock - int(clock.min())
            start[rows] = np.rint(since / ghz[rows]).astype(np.int64)
    return start
