"""Conversion from counters to nanoseconds: rates of SM clocks, and starts of traces on a common clock.

The SM clock rate differs between SMs and over time (1.94 to 1.98 GHz within one kernel on an H200). A
trace that recorded both clocks at its start and end is therefore converted by the rate between these two
samples. Where a layout lacks them, the rate comes from another source, which ``clock_source`` names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.errors import UsageError
from thence.inside.columns import several
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.inside.columns import Columns, Int64

    Float64 = npt.NDArray[np.float64]

__all__ = ["SOURCES", "Clocks", "clocks_of", "precision_of", "unwrapped"]

_ASSUMED_GHZ = 1.98
"""Highest SM clock of H100 SXM and H200, used if the rate was neither measured nor given nor can be estimated."""

SOURCES = ("timer", "measured", "given", "neighbours", "estimated", "assumed")
"""Where the rate of a trace's clock comes from. timer: its events are in ns already. measured: from
its own two samples of both clocks. given: by the caller. neighbours: the median of the buffer's
measured traces, for a trace that never finished or is too short for the timer's resolution. estimated:
from the clocks at the starts of successive blocks on one SM. assumed: `_ASSUMED_GHZ`."""
_TIMER, _MEASURED, _GIVEN, _NEIGHBOURS, _ESTIMATED, _ASSUMED = range(6)

_TIMER_STEP_NS = 32
"""Resolution of %globaltimer on an H200."""
_LENGTHS_THAT_SHOW_A_STEP = 3
_SHORT_NS = 32 * _TIMER_STEP_NS
_LEAST_SPAN_NS = 100 * _TIMER_STEP_NS
_MOST_SPAN_NS = 1_000_000_000
"""Longest span in which the low word of an SM clock cannot wrap, at up to 4 GHz."""
_LEAST_GHZ, _MOST_GHZ = 0.1, 4.0
_WRAP = 1 << 32


@dataclass(frozen=True)
class Clocks:
    """Start and clock rate of each trace; arrays of shape (traces,).

    Attributes:
        start_ns: start of each trace, on one clock for all traces.
        ghz: counter steps in a nanosecond: the SM clock's rate, or 1 where events are in ns.
        sm_ghz: rate of the SM clock, also where events are in ns; NaN where not known.
        source: index into `SOURCES`.
        notes: what was estimated or assumed, as sentences.
    """

    start_ns: Int64
    ghz: Float64
    sm_ghz: Float64
    source: npt.NDArray[np.uint8]
    notes: tuple[str, ...]


def clocks_of(columns: Columns, clock_ghz: float | None = None) -> Clocks:
    """Rates and starts of all traces.

    Args:
        columns: columns of one buffer.
        clock_ghz: rate for traces that did not measure it.

    Raises:
        UsageError: ``clock_ghz`` is outside the range of possible clock rates.
    """
    if clock_ghz is not None and not _LEAST_GHZ <= clock_ghz <= _MOST_GHZ:
        raise UsageError(
            f"a clock of {clock_ghz} GHz is impossible: SM clocks run at {_LEAST_GHZ} to {_MOST_GHZ} GHz"
        )
    start = columns.timer if columns.timer_bits == 64 else unwrapped(columns.timer)
    rate, source = _measured(columns)
    missing = np.isnan(rate) & columns.in_cycles
    notes: list[str] = []
    if missing.any():
        chosen, how = _rate_for_unmeasured(columns, start, rate, clock_ghz)
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
    rate[~((rate >= _LEAST_GHZ) & (rate <= _MOST_GHZ))] = np.nan
    return rate, source


def _rate_for_unmeasured(
    columns: Columns, start: Int64, rate: Float64, given: float | None
) -> tuple[float, int]:
    """The rate for all traces without a rate of their own, and its index into `SOURCES`."""
    if given is not None:
        return given, _GIVEN
    measured: Float64 = rate[~np.isnan(rate)]
    if len(measured):
        return float(np.median(measured)), _NEIGHBOURS
    estimated = _successive_blocks(columns, start)
    return (_ASSUMED_GHZ, _ASSUMED) if estimated is None else (estimated, _ESTIMATED)


def _rate_note(count: int, of: int, ghz: float, how: int) -> str:
    who = "all traces" if count == of else several(count, "trace")
    rate = f"{ghz:.3f} GHz for the SM clock of {who}"
    if how == _GIVEN:
        return f"cycles are converted to ns with {rate}, as given"
    if how == _NEIGHBOURS:
        return f"cycles are converted to ns with {rate}, the median of the others"
    if how == _ESTIMATED:
        return f"cycles are converted to ns with {rate}, estimated from successive blocks on the same SMs"
    return (
        f"cycles are converted to ns with {rate}, which is assumed: the buffer does not record the "
        "clock rate, and durations are too short if the clock ran slower; give the rate if you "
        "know it"
    )


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
    good = (span >= _LEAST_SPAN_NS) & (span <= _MOST_SPAN_NS)
    if not good.any():
        return None
    rates = cycles[good] / span[good]
    rate = float(np.median(rates))
    return rate if _LEAST_GHZ <= rate <= _MOST_GHZ else None


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
