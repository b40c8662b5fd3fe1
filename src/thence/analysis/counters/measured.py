"""What the hardware counted for each place: amounts, rates, and the error of each.

Only activities that ran in samples count, and nothing is scaled to the others: ``sampled_ns`` is the time that was
sampled. A figure whose 95 % interval is wider than `COUNTER_ERROR_SHARE` of it on each side is null, and its error says
so. FLOP of tensor cores are those that they executed, with the padding of tiles; what a place has of them in kernels of
other types than 16-bit ones is not known in FLOP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.counters.devices import CLOCKS, Sampled, device_of, sampled_devices
from thence.analysis.counters.sharing import of_places, pairs_of, pieces_of, shared, sums, with_idle
from thence.attribution.work.data_types import data_types
from thence.model.columns import values_or
from thence.model.counter_names import COUNTERS, ENERGY
from thence.model.intervals import Intervals
from thence.model.peaks import tensor_flop_in_cycle
from thence.model.thresholds import COUNTER_ENERGY_EDGE_NS, COUNTER_ERROR_SHARE

if TYPE_CHECKING:
    from thence.analysis.counters.sharing import Pieces
    from thence.model.arrays import Float64, Int64, Mask
    from thence.model.attributed import Attributed

AMOUNTS = tuple(counter.name for counter in COUNTERS if counter.name not in CLOCKS)
"""Counters whose amounts are shared among places."""
DERIVED = ("flop", "padding", "sm_active_share", "warps_per_sm", "watts")
"""Figures that follow from them, with the errors of these."""
FIGURES = (*DERIVED, *AMOUNTS)
SCHEMA = {
    "sampled_ns": pl.Int64(), "sampled_share": pl.Float64(), "clock_mhz": pl.Float64(),
    **dict.fromkeys(FIGURES, pl.Float64()), "error": pl.Struct(dict.fromkeys(FIGURES, pl.Float64())),
}  # fmt: skip
"""Columns of `measured`. sampled_ns: time in samples, of activities that run together each. sampled_share: of the
place's time. clock_mhz: mean clock of the multiprocessors in that time. flop: of tensor cores. padding: flop over what
the program asked for, of activities of 16-bit types with a model; 1.05 is 5 % more. sm_active_share: mean share of
multiprocessors that held a warp, of cycles, or else of time. warps_per_sm: mean warps that a multiprocessor held.
watts: energy_joules over the place's time in samples of energy. error: half of the 95 % interval, as a share of each
figure."""
_NORMAL_95 = 1.96
_SIXTEEN_BITS = ("bfloat16", "float16")
_KNOWN_SHARE = 0.999
"""Share of the cycles of a place's tensor cores that must be of known FLOP."""


class _Sums:
    """Amounts and variances of places, by counter, over devices."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.amount: dict[str, Float64] = {}
        self.variance: dict[str, Float64] = {}

    def add(self, name: str, amount: Float64, deviation: Float64 | None = None) -> None:
        """Adds what one device says of every place."""
        nothing = np.zeros(self.places)
        self.amount[name] = self.amount.get(name, nothing) + amount
        self.variance[name] = self.variance.get(name, nothing) + (nothing if deviation is None else deviation**2)

    def error(self, name: str) -> Float64:
        """Half of the 95 % interval as a share of the amount; 0 for an amount of 0 that is exact, else infinite."""
        deviation = _NORMAL_95 * np.sqrt(self.variance[name])
        amount = self.amount[name]
        unknown = np.where(deviation > 0, np.inf, 0.0)
        return np.divide(deviation, amount, out=unknown, where=amount > 0)


def measured(
    trace: Attributed, parts: pl.DataFrame, activities: pl.DataFrame, precision: float = COUNTER_ERROR_SHARE
) -> pl.DataFrame:
    """What was counted for groups of parts of activities, in the columns of `SCHEMA`: one row for each group.

    Args:
        trace: attributed, perhaps a part of a trace.
        parts: columns gpu (row in ``trace.gpu``), part (ns of the activity) and group (number of the place, from 0).
        activities: as `thence.analysis.activity_rooflines.activity_rooflines` returns them, for ``trace``.
        precision: largest error of a figure that is not null.
    """
    whole, rows = trace.part_of or (trace, pl.int_range(trace.gpu.height, dtype=pl.UInt32, eager=True))
    groups = int(parts["group"].max()) + 1 if parts.height else 0  # type: ignore[arg-type]
    gpu = parts["gpu"].cast(pl.Int64).to_numpy()
    duration = np.maximum(trace.gpu["duration"].to_numpy()[gpu], 1)
    claim = _Claims(gpu, rows.cast(pl.Int64).to_numpy()[gpu], parts["group"].cast(pl.Int64).to_numpy(),
                    parts["part"].to_numpy() / duration, groups)  # fmt: skip
    summed = _Sums(groups)
    asked = _asked(trace, activities)
    for sampled in sampled_devices(whole):
        if ENERGY in sampled.amounts:
            _add_energy(summed, sampled, claim)
        else:
            _add_counters(summed, sampled, claim, trace, asked)
    total = sums(claim.group, parts["part"].to_numpy(), groups)
    return _frame(summed, total, precision)


class _Claims:
    """Parts of activities at places: row in the trace's gpu, row in the whole trace's, group and part of its time."""

    def __init__(self, row: Int64, whole_row: Int64, group: Int64, weight: Float64, groups: int) -> None:
        self.row, self.whole_row, self.group, self.weight, self.groups = row, whole_row, group, weight, groups

    def of(self, sampled: Sampled) -> tuple[Int64, Int64]:
        """Which claims are of activities of a device that ran in samples, and their positions among these."""
        position = np.searchsorted(sampled.rows, self.whole_row)
        held = position < len(sampled.rows)
        held[held] = sampled.rows[position[held]] == self.whole_row[held]
        return np.flatnonzero(held), position[held]


def _asked(trace: Attributed, activities: pl.DataFrame) -> pl.DataFrame:
    """Of each activity: wide, whether it computes in other than 16-bit types; flop, what was asked for in these."""
    of_kernel = data_types(trace).cast(pl.String)
    return activities.select(
        wide=pl.lit(of_kernel.is_not_null() & ~of_kernel.is_in(_SIXTEEN_BITS)).fill_null(value=False)
        & ~pl.col("dtype").is_in(_SIXTEEN_BITS).fill_null(value=False),
        flop=pl.when(pl.col("dtype").is_in(_SIXTEEN_BITS)).then("flop"),
    )


def _add_counters(summed: _Sums, sampled: Sampled, claims: _Claims, trace: Attributed, asked: pl.DataFrame) -> None:
    """Adds the counters of one device."""
    held, position = claims.of(sampled)
    if not len(held):
        return
    pairs = sampled.pairs
    group, weight = claims.group[held], claims.weight[held]
    pieces = pieces_of(pairs, position, group, weight, claims.groups)
    time = pairs.time[pieces.pair] * pieces.weight
    summed.add("sampled_ns", sums(pieces.place, time, claims.groups))
    device = device_of(trace, sampled)
    if "sm_elapsed_cycles" in sampled.amounts:
        cycles = sampled.amounts["sm_elapsed_cycles"] / (sampled.end - sampled.start)
        elapsed = sums(pieces.place, time * cycles[pairs.sample[pieces.pair]], claims.groups)
        summed.add("clock_ns", sums(pieces.place, time, claims.groups))
        summed.add("sm_elapsed_cycles", elapsed)
        if device is not None and device.multiprocessors:
            summed.add("all_sm_cycles", elapsed * device.multiprocessors)
    for name, shares in sampled.shares.items():
        summed.add(name, *of_places(shares, pieces))
    in_cycle = tensor_flop_in_cycle(None if device is None else device.compute_capability)
    if "tensor_cycles" in sampled.shares and in_cycle is not None:
        _add_tensor_flop(summed, sampled, pieces, asked[claims.row[held]], position, in_cycle)


def _add_tensor_flop(
    summed: _Sums, sampled: Sampled, pieces: Pieces, asked: pl.DataFrame, position: Int64, in_cycle: int
) -> None:
    """Adds known_cycles (of 16-bit types), and padded_cycles and asked_cycles of the activities with a model.

    Args:
        summed: to add to.
        asked: what `_asked` returns of each claim.
        position: of the activity of each claim among those of the device.
        in_cycle: FLOP in a cycle.
    """
    pairs, cycles = sampled.pairs, sampled.shares["tensor_cycles"].of_pairs
    wide, flop = np.zeros(len(sampled.rows), np.bool_), np.full(len(sampled.rows), np.nan)
    wide[position], flop[position] = asked["wide"].to_numpy(), values_or(asked["flop"], np.nan)
    duration = np.maximum(sampled.activity_end - sampled.activity_start, 1)
    activity = pairs.activity[pieces.pair]
    modelled = ~np.isnan(flop[activity]) & ~wide[activity]

    def placed(values: Float64, which: Mask) -> Float64:
        return sums(pieces.place, np.where(which, values[pieces.pair] * pieces.weight, 0.0), pieces.places)

    summed.add("known_cycles", placed(cycles, ~wide[activity]))
    summed.add("padded_cycles", placed(cycles, modelled))
    summed.add(
        "asked_cycles", placed(pairs.time * (np.nan_to_num(flop) / duration)[pairs.activity] / in_cycle, modelled)
    )
    summed.add("flop_in_cycle", np.full(pieces.places, float(in_cycle)))


def _add_energy(summed: _Sums, sampled: Sampled, claims: _Claims) -> None:
    """Adds the energy of one device. What runs in a row at one place is of one kind, because samples are long."""
    held, position = claims.of(sampled)
    if not len(held):
        return
    group = np.full(len(sampled.rows), claims.groups, np.int64)  # what is not selected is a place of its own
    group[position[::-1]] = claims.group[held][::-1]
    order = np.argsort(sampled.activity_start, kind="stable")
    start, until = sampled.activity_start[order], np.maximum.accumulate(sampled.activity_end[order])
    first = np.flatnonzero(np.append(True, np.diff(group[order]) != 0))
    begin = start[first]
    end = np.minimum(until[np.append(first[1:], len(start)) - 1], np.append(begin[1:], until[-1]))
    runs = Intervals(begin, np.maximum(end, begin))
    samples = Intervals(sampled.start, sampled.end)
    pairs = with_idle(pairs_of(samples, runs, group[order][first], ends=False), samples, runs)
    place = group[order][first]
    rows = np.flatnonzero(place < claims.groups)
    pieces = pieces_of(pairs, rows, place[rows], np.ones(len(rows)), claims.groups)
    summed.add(ENERGY, *of_places(shared(pairs, sampled.amounts[ENERGY]), pieces, COUNTER_ENERGY_EDGE_NS))
    summed.add("energy_ns", sums(pieces.place, pairs.time[pieces.pair], claims.groups))


def _frame(summed: _Sums, total: Float64, precision: float) -> pl.DataFrame:
    """`SCHEMA` of what was summed; ``total`` is the time of each place, ns."""
    figures: dict[str, pl.Series] = {}
    errors: dict[str, pl.Series] = {}
    for name in FIGURES:
        figure = _figure(summed, name)
        if figure is None:
            continue
        value, error = figure
        shown = np.isfinite(value) & (error <= precision)
        figures[name] = pl.Series(np.where(shown, value, np.nan)).fill_nan(None)
        errors[name] = pl.Series(np.where(np.isfinite(value) & np.isfinite(error), error, np.nan)).fill_nan(None)
    sampled = summed.amount.get("sampled_ns", np.zeros(summed.places))
    clock = _ratio(summed, "sm_elapsed_cycles", "clock_ns")
    nothing = pl.Series([None], dtype=pl.Float64).new_from_index(0, summed.places)
    columns: dict[str, pl.Series] = {
        "sampled_ns": pl.Series(np.rint(sampled)),
        "sampled_share": pl.Series(sampled / np.maximum(total, 1)),
        "clock_mhz": nothing if clock is None else pl.Series(1e3 * clock).fill_nan(None),
        **figures,
        "error": pl.DataFrame({name: errors.get(name, nothing) for name in FIGURES}).to_struct("error"),
    }
    return pl.DataFrame({name: columns.get(name, nothing) for name in SCHEMA}).cast(SCHEMA)  # type: ignore[arg-type]


def _figure(summed: _Sums, name: str) -> tuple[Float64, Float64] | None:
    """A figure of each place, not a number where it is unknown, and its error; None if nothing was counted."""
    if name in summed.amount:
        return np.where(_seen(summed, name), summed.amount[name], np.nan), summed.error(name)
    if name == "flop":
        known = _ratio(summed, "known_cycles", "tensor_cycles")
        if known is None:
            return None
        per_cycle = summed.amount["flop_in_cycle"].max()
        flop = summed.amount["tensor_cycles"] * per_cycle
        whole = (known >= _KNOWN_SHARE) | (summed.amount["tensor_cycles"] == 0)
        return np.where(whole & _seen(summed, name), flop, np.nan), summed.error("tensor_cycles")
    in_time = "sm_active_cycles" not in summed.amount
    dividend, divisor, error = {
        "padding": ("padded_cycles", "asked_cycles", "tensor_cycles"),
        "sm_active_share": ("sm_active_ns", "sampled_ns", "sm_active_ns")
        if in_time
        else ("sm_active_cycles", "all_sm_cycles", "sm_active_cycles"),
        "warps_per_sm": ("warps", "all_sm_cycles", "warps"),
        "watts": (ENERGY, "energy_ns", ENERGY),
    }.get(name, ("", "", ""))
    value = _ratio(summed, dividend, divisor)
    if value is None:
        return None
    return (1e9 * value if name == "watts" else value), summed.error(error)


def _seen(summed: _Sums, name: str) -> Mask:
    """Which places ran in samples of a counter."""
    seen: Mask = summed.amount.get("energy_ns" if name == ENERGY else "sampled_ns", np.zeros(summed.places)) > 0
    return seen


def _ratio(summed: _Sums, dividend: str, divided_by: str) -> Float64 | None:
    """One sum over another, not a number where that is 0; None if either was not counted."""
    if dividend not in summed.amount or divided_by not in summed.amount:
        return None
    divisor = summed.amount[divided_by]
    ratio: Float64 = np.divide(summed.amount[dividend], divisor, out=np.full(summed.places, np.nan), where=divisor > 0)
    return ratio
