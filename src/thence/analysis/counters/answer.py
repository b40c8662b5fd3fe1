"""What hardware counters a trace holds: when they were sampled, their sums, what was idle, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.counters.devices import CLOCKS, sampled_devices
from thence.analysis.counters.measured import FIGURES
from thence.model.counter_names import BY_NAME, ENERGY
from thence.model.peaks import tensor_flop_in_cycle
from thence.model.thresholds import COUNTER_ENERGY_EDGE_NS, COUNTER_ERROR_SHARE
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.counters.devices import Sampled
    from thence.model.attributed import Attributed

WRITES = (
    "bytes written to memory count when the cache writes them back, often while a later kernel runs: those of one "
    "place are 5 % (150 MB a kernel) to 33 % (15 MB) too low or too high"
)
"""What is said beside them: of kernels of known work on an H200."""
TOTALS = {
    "rank": pl.Int32(), "device": pl.Int32(), "counter": pl.String(), "unit": pl.String(), "total": pl.Float64(),
    "idle": pl.Float64(), "idle_share": pl.Float64(),
}  # fmt: skip
"""Columns of `Counters.totals`."""
WINDOWS = {
    "rank": pl.Int32(), "device": pl.Int32(), "start_ns": pl.Int64(), "end_ns": pl.Int64(), "samples": pl.Int64(),
}  # fmt: skip
"""Columns of `Counters.windows`."""
ENERGIES = {
    "rank": pl.Int32(), "device": pl.Int32(), "joules": pl.Float64(), "total_ns": pl.Int64(), "steps": pl.Int64(),
    "joules_per_step": pl.Float64(),
}  # fmt: skip
"""Columns of `Counters.energy`."""
_RATES = {
    "flop": ("tensor TFLOP/s", 1e3), "dram_read_bytes": ("read GB/s", 1.0), "dram_write_bytes": ("written GB/s", 1.0),
    "l2_bytes": ("L2 GB/s", 1.0), "pcie_read_bytes": ("PCIe in GB/s", 1.0), "pcie_write_bytes": ("PCIe out GB/s", 1.0),
    "nvlink_receive_bytes": ("NVLink in GB/s", 1.0), "nvlink_transmit_bytes": ("NVLink out GB/s", 1.0),
}  # fmt: skip
"""Amounts that a table shows in a ns of the time that was sampled, with heading and divisor."""
_SHARES = {
    "tensor_active_ns": "tensor cores active", "dram_busy_ns": "memory busy", "pcie_busy_ns": "PCIe busy",
    "nvlink_receive_ns": "NVLink in busy", "nvlink_transmit_ns": "NVLink out busy",
}  # fmt: skip
"""Amounts of time that it shows as a share of the time that was sampled, with heading."""
_SHOWN = {"padding": ("padding", ".3f"), "sm_active_share": ("SMs active", ".1%"), "warps_per_sm": ("warps", ".1f"),
          "watts": ("watts", ",.0f")}  # fmt: skip
_SAID = {"sm_active_ns": "the multiprocessors active", "dram_busy_ns": "memory's peak"}
"""Amounts of time that a page of findings states as a share."""
_MAX_LEFT_OUT = 4
_MAX_APART = 0.05
"""Share of the time from the first step to the last one that may be in no step, where energy is that of steps."""
_PADDED = 1.02
"""Executed over asked for, from which a page of findings names the place."""


@dataclass(frozen=True)
class Counters:
    """The hardware counters of a trace.

    Attributes:
        windows: times in which counters were sampled without a gap.
        totals: of each device and counter: its sum, and how much of it was counted in samples in which nothing ran
            (null for clocks, which run always).
        energy: of each device with readings of its energy: rank, device, joules, total_ns, the number of whole steps in
            that time, and joules_per_step: energy from the first of them to the last, by their number. Null where steps
            are not long against the time between readings, or other work lies between them.
        left_out: counter and text: which counters could not be sampled or are not read, and why.
        trouble: sentences about what was asked for and is missing.
        interval_ns: length of the samples; None if unknown.
        tensor_flop: FLOP of 16-bit types in a cycle of tensor cores, if it is known and the same of all devices.
    """

    windows: pl.DataFrame
    totals: pl.DataFrame
    energy: pl.DataFrame
    left_out: tuple[tuple[str, str], ...] = ()
    trouble: tuple[str, ...] = ()
    interval_ns: int | None = None
    tensor_flop: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The values of ``counters`` in JSON."""
        return {
            "interval_ns": self.interval_ns,
            "precision_share": COUNTER_ERROR_SHARE,
            "windows": self.windows.to_dicts(),
            "totals": self.totals.to_dicts(),
            "energy": self.energy.to_dicts(),
            "left_out": [{"counter": name, "text": text} for name, text in self.left_out],
            "trouble": list(self.trouble),
        }

    def remarks(self, measured: pl.DataFrame) -> Iterator[str]:
        """Notes below a table.

        Args:
            measured: the figures that it shows, as `thence.analysis.counters.measured.measured` returns them.
        """
        yield from (f"hardware counters: {text}" for text in self.trouble)
        if self.left_out:
            names = ", ".join(f"{name} ({text})" for name, text in self.left_out[:_MAX_LEFT_OUT])
            more = len(self.left_out) - _MAX_LEFT_OUT
            yield f"hardware counters that are left out: {names}" + (f" and {more} more" if more > 0 else "")
        for row in self.energy.iter_rows(named=True):
            per_step = row["joules_per_step"]
            yield (
                f"rank {row['rank']} GPU {row['device']} used {row['joules']:,.1f} J in {format_ns(row['total_ns'])}, "
                f"{1e9 * row['joules'] / row['total_ns']:,.0f} W on average"
                + ("" if per_step is None else f"; {per_step:,.4g} J a step ({several(row['steps'], 'step')})")
            )
        if self.windows.is_empty():
            return
        hidden = sum(_imprecise(measured, name) for name in FIGURES if name not in (ENERGY, "watts"))
        if hidden:
            yield (
                f"{several(hidden, 'counted figure')} of places are left out: their 95 % interval is wider than "
                f"{format_share(COUNTER_ERROR_SHARE, 1)} of them on each side"
            )
        if any(measured[name].null_count() < measured.height for name in ("dram_write_bytes", "dram_busy_ns")):
            yield WRITES

    def said(self, by_row: pl.DataFrame) -> str:
        """What a page of findings says: rates while counters were sampled, and the place with most padding.

        Args:
            by_row: name of each place, and the columns of `thence.analysis.counters.measured.SCHEMA`.
        """
        lasting = int((self.windows["end_ns"] - self.windows["start_ns"]).sum())
        totals = dict(self.totals.group_by("counter").agg(pl.col("total").sum()).rows())
        rates = []
        if self.tensor_flop is not None and "tensor_cycles" in totals:
            rates.append(f"{self.tensor_flop * totals['tensor_cycles'] / lasting / 1e3:,.0f} TFLOP/s of tensor cores")
        if {"dram_read_bytes", "dram_write_bytes"} <= totals.keys():
            moved = totals["dram_read_bytes"] + totals["dram_write_bytes"]
            rates.append(f"{moved / lasting:,.0f} GB/s of memory")
        rates += [
            f"{format_share(totals[name] / lasting, 1)} of {what}" for name, what in _SAID.items() if name in totals
        ]
        text = f"the hardware counted {' and '.join(rates)} while it was sampled" if rates else ""
        padded = by_row.filter(pl.col("padding") >= _PADDED).sort("flop", descending=True, nulls_last=True)
        if text and padded.height:
            name, padding = padded.select("name", "padding").row(0)
            text += f"; tensor cores did {format_share(padding - 1, 1)} more than asked for in {name}"
        return text

    def title(self, measured: pl.DataFrame) -> str:
        """The sentence above the table of figures."""
        often = "" if self.interval_ns is None else f", in samples of {format_ns(self.interval_ns)}"
        time = format_ns(int(measured["sampled_ns"].sum()))
        return f"counted by the hardware during {time} of GPU time{often}; ± is half of the 95 % interval:"


def counters_of(trace: Attributed) -> Counters | None:
    """The hardware counters of the selected ranks and devices; None if nobody asked for them and there are none."""
    facts = [fact for fact in trace.meta.facts if fact.get("counters")]
    whole = trace.part_of[0] if trace.part_of else trace
    chosen = set(trace.counters.select("rank", "device").unique().rows())
    devices = [of_device for of_device in sampled_devices(whole) if (of_device.rank, of_device.device) in chosen]
    if not facts and not devices:
        return None
    with_energy = [of_device for of_device in devices if ENERGY in of_device.amounts]
    sampled = [of_device for of_device in devices if ENERGY not in of_device.amounts]
    energies = [
        (
            of_device.rank,
            of_device.device,
            float(of_device.amounts[ENERGY].sum()),
            int((of_device.end - of_device.start).sum()),
            *energy_of_steps(whole, of_device),
        )
        for of_device in with_energy
    ]
    windows = [pl.DataFrame(schema=WINDOWS), *(of_device.windows().cast(WINDOWS) for of_device in sampled)]  # type: ignore[arg-type]
    of_facts = [dict(fact["counters"]) for fact in facts]
    in_cycle = {tensor_flop_in_cycle(d.compute_capability) for d in trace.meta.devices if (d.rank, d.device) in chosen}
    intervals = {fact.get("interval_ns") for fact in of_facts} - {None}
    return Counters(
        pl.concat(windows),
        pl.DataFrame([row for of_device in sampled for row in _totals(of_device)], TOTALS, orient="row"),
        pl.DataFrame(energies, ENERGIES, orient="row"),
        tuple(dict.fromkeys(pair for fact in facts for pair in (fact.get("counters_left_out") or {}).items())),
        tuple(dict.fromkeys((*_troubles(of_facts), *(_cut(part) for part in sampled if part.left_out)))),
        intervals.pop() if len(intervals) == 1 else None,
        in_cycle.pop() if len(in_cycle) == 1 else None,
    )


def energy_of_steps(trace: Attributed, sampled: Sampled) -> tuple[int, float | None]:
    """How many whole steps ran while energy was read, and the joules of one, as `Counters.energy` has them."""
    times = trace.step_times
    if times.is_empty():
        times = trace.steps.filter(pl.col("device").is_null() | (pl.col("device") == sampled.device))
    steps = times.select("start", "duration", end=pl.col("start") + pl.col("duration")).filter(
        times["rank"] == sampled.rank, pl.col("start") >= int(sampled.start[0]), pl.col("end") <= int(sampled.end[-1])
    )
    if steps.is_empty():
        return 0, None
    begin, end = int(steps["start"].min()), int(steps["end"].max())  # type: ignore[arg-type]
    readings = np.stack([sampled.start, sampled.end], axis=1).ravel()
    used = np.cumsum(np.stack([np.zeros(len(sampled.start)), sampled.amounts[ENERGY]], axis=1).ravel())
    joules = float(np.interp(end, readings, used) - np.interp(begin, readings, used))
    apart = end - begin - int(steps["duration"].sum()) > _MAX_APART * (end - begin)
    late = float((sampled.amounts[ENERGY] / (sampled.end - sampled.start)).max()) * COUNTER_ENERGY_EDGE_NS
    if apart or 2 * late > COUNTER_ERROR_SHARE * joules:
        return steps.height, None
    return steps.height, joules / steps.height


def _totals(sampled: Sampled) -> Iterator[tuple[Any, ...]]:
    """Rows of `Counters.totals`."""
    for name, amounts in sampled.amounts.items():
        total = float(amounts.sum())
        idle = None if name in CLOCKS else sampled.shares[name].idle
        share = None if idle is None or not total else idle / total
        yield sampled.rank, sampled.device, name, BY_NAME[name].unit, total, idle, share


def _cut(sampled: Sampled) -> str:
    """What is said of a device of which not all samples are shared."""
    return (
        f"{several(sampled.left_out, 'sample')} of rank {sampled.rank} GPU {sampled.device} are not shared, because "
        "too many activities ran in the samples before; --window and --steps do not help, a recording with fewer "
        "windows does"
    )


def _troubles(facts: list[dict[str, Any]]) -> Iterator[str]:
    for fact in facts:
        if fact.get("trouble"):
            yield str(fact["trouble"])
        if fact.get("overflowed"):
            yield (
                f"{several(int(fact['overflowed']), 'window')} held more than the hardware's buffer: samples are "
                "missing; a longer interval or a shorter window avoids it"
            )


def _imprecise(measured: pl.DataFrame, name: str) -> int:
    """How many places have an error of a figure that is not shown."""
    error = measured["error"].struct.field(name)
    return int((measured[name].is_null() & (error > COUNTER_ERROR_SHARE)).sum())


def figures_as_text(measured: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, str]]:
    """The figures of a table as text with their errors, and the headings of those that any row has."""
    columns, headings = [measured["sampled_share"]], {"sampled_share": "sampled"}
    for name, (heading, unit) in _RATES.items():
        rate = measured[name] / measured["sampled_ns"] / unit
        columns.append(_texts(rate, measured["error"].struct.field(name), ",.1f").alias(name))
        headings[name] = heading
    for name, heading in _SHARES.items():
        share = measured[name] / measured["sampled_ns"]
        columns.append(_texts(share, measured["error"].struct.field(name), ".1%").alias(name))
        headings[name] = heading
    for name, (heading, form) in _SHOWN.items():
        columns.append(_texts(measured[name], measured["error"].struct.field(name), form).alias(name))
        headings[name] = heading
    clock = measured["clock_mhz"].to_list()
    columns.append(pl.Series("clock_mhz", [None if mhz is None else f"{mhz:,.0f}" for mhz in clock], dtype=pl.String))
    headings["clock_mhz"] = "MHz"
    frame = pl.DataFrame(columns)
    known = [name for name in headings if frame[name].null_count() < frame.height]
    return frame.select(known), {name: headings[name] for name in known}


def _texts(values: pl.Series, errors: pl.Series, form: str) -> pl.Series:
    pairs = zip(values.to_list(), errors.to_list(), strict=True)
    texts = [None if value is None else f"{value:{form}} ±{100 * (error or 0):.1f}%" for value, error in pairs]
    return pl.Series(texts, dtype=pl.String).str.replace_all("%", " %", literal=True)
