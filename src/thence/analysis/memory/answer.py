"""Where the memory went: bytes live at the peak by place, conserved, and what grows and what would help.

For each allocator (of a device, or of the host where no device's is known):

    peak   = bytes of the rows + before
    before = bytes that were allocated before the trace began and live then
    reserved = peak + inactive

A row has the bytes that the allocator handed out, rounding included: rounding is the part of them that nobody asked
for. What holds memory outside of the allocator (CUDA's context, NCCL, cuBLAS) is in ``outside_bytes``, which is split
into what was asked of CUDA, by place, and the rest. Everything that the input cannot tell is null.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.memory.growth import GROWTH, growth
from thence.analysis.memory.kinds import placed_memory
from thence.analysis.memory.moments import PEAK, live_at, moments, readings, zero
from thence.analysis.memory.outside import OUTSIDE, outside
from thence.analysis.memory.places import DEVICE, HOST_DEVICE, PLACES, MemoryPlaces, with_device
from thence.analysis.memory.program_buffers import has_plans, planned_buffers, with_planned_buffers
from thence.analysis.memory.recompute import RECOMPUTED, recomputed
from thence.errors import MissingData, UsageError
from thence.model.answer import Answer, Lines, TableView
from thence.model.intervals import NO_ROW
from thence.model.places import KINDS, MEMORY_BY
from thence.model.reasons import advice, text_of
from thence.model.totals import must
from thence.units import format_bytes, format_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.attributed import Attributed

_KIND = {kind.name: kind for kind in KINDS}
_NO_EVENTS = (
    "holds no events about memory: torch.profiler records them with profile_memory=True, and torch.cuda.memory."
    "_dump_snapshot() writes a memory snapshot, which thence reads"
)
_LOST = "events about memory are missing: more is live by them than the allocator states that it handed out"
_REASONS = {
    "before_trace": "allocated before the trace began: record from before the model is made to see where",
    "kind_unknown": "what it is for cannot be proved",
}
DEVICES = {
    "rank": pl.Int32(), "device": pl.Int32(), "program": pl.String(), "peak_bytes": pl.Int64(), "at_ns": pl.Int64(),
    "step": pl.String(), "before_bytes": pl.Int64(), "rounding_bytes": pl.Int64(), "inactive_bytes": pl.Int64(),
    "reserved_bytes": pl.Int64(), "outside_bytes": pl.Int64(), "outside_rest_bytes": pl.Int64(),
}  # fmt: skip
"""Columns of `Memory.devices`."""
_SIZES = ("allocated", "reserved", "device_free", "largest_inactive")
_IN_JSON = {"start": "at_ns", **{name: f"{name}_bytes" for name in _SIZES}}
"""Names of columns of failures in JSON, where the unit is in the key."""
_MAX_TOLD = 3
"""Places of the device with the highest peak that a sentence names."""
_IS_SHOWN = pl.any_horizontal(pl.col("start", *PLACES).is_not_null())
"""Allocations with a row: those of the trace, and earlier ones of which the input states a place."""
_IS_HELD = pl.col("program").is_null()
"""Rows of what an allocator handed out; others are of what a program needs."""
_HEADINGS = {"bytes": "live", "share": "of the peak", "count": "allocations", "kind": "kind"}


@dataclass(frozen=True)
class Memory(Answer):
    """Memory that was live at one moment, by place.

    Attributes:
        by: the kind of place of a row.
        heading: of the column of places.
        at: which moment: ``peak``, ``oom`` or a time.
        devices: one row for each allocator, in the columns of `DEVICES`: bytes that it had handed out at that moment,
            its time, what of them was allocated before the trace at unknown places, what was rounded up, what it held
            beside them (inactive), and all that it held (reserved). device is null for memory of the host. Then, at the
            peak, one row for each XLA program of which the plan is known, with its name and what it needs when it needs
            most.
        rows: by, name (null: no place), rank, device, program, bytes, share (of the peak), count, kind (mixed:
            several; null: unknown), the most bytes first; without what was allocated before the trace. Those of XLA
            programs follow those of allocators, which hold the same memory.
        outside: as `thence.analysis.memory.outside.outside` returns it.
        reasons: code, bytes and text of what has no place, and of what was allocated before the trace.
        failures: rank, device, start (ns), bytes (asked for), allocated, reserved, device_free, largest_inactive,
            module, source and op of allocations that failed.
        growth: as `thence.analysis.memory.growth.growth` returns it.
        recomputed: as `thence.analysis.memory.recompute.recomputed` returns it; empty unless of the peak.
    """

    by: str
    heading: str
    at: str
    devices: pl.DataFrame
    rows: pl.DataFrame
    outside: pl.DataFrame
    reasons: pl.DataFrame
    failures: pl.DataFrame
    growth: pl.DataFrame
    recomputed: pl.DataFrame

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return tuple(map(self._of_device, self.devices.iter_rows(named=True)))

    def _of_device(self, row: dict[str, Any]) -> str:
        what = "peak" if self.at == PEAK else "live"
        where = " of the host" if row["device"] is None else f" GPU {row['device']}"
        where += "" if row["program"] is None else f", XLA program {row['program']}"
        time, step = row["at_ns"], "" if row["step"] is None else f" in step {row['step']}"
        when = step if time is None else f" at {format_ns(time)}{step}"
        if time is not None and time < 0:
            when = f"{step}, {format_ns(-time)} before the first device activity"
        parts = [f"rank {row['rank']}{where}: {what} {format_bytes(row['peak_bytes'])}{when}"]
        for name, said in (
            ("before_bytes", "allocated before the trace"),
            ("rounding_bytes", "rounding"),
            ("inactive_bytes", "reserved and not in use"),
            ("outside_bytes", "outside of the allocator"),
        ):
            if row[name]:
                parts.append(f"{format_bytes(row[name])} {said}")
        return ", ".join(parts)

    def views(self) -> tuple[TableView | Lines, ...]:
        """See `Answer`."""
        one_device = self.devices.select("rank", "device").n_unique() == 1
        several_devices = {} if one_device else {"rank": "rank", "device": "GPU"}
        headings = {"name": self.heading, **_HEADINGS, **several_devices}
        if self.by == "kind":
            del headings["kind"]
        shown: list[TableView | Lines] = [Lines(tuple((line, "bold") for line in self.about()))]
        shown.append(TableView(self.held, headings, rows_shown=20, bar="bytes"))
        if self.held.height < self.rows.height:
            title = "what XLA programs need when they need most, as planned:"
            shown.append(TableView(self.rows.filter(~_IS_HELD), headings, title, rows_shown=5, bar="bytes"))
        if self.outside.height:
            names = {"name": self.heading, "library": "library", "bytes": "live", "count": "allocations"}
            title = "what was asked of CUDA itself, outside of the allocator:"
            shown.append(TableView(self.outside, names | several_devices, title, rows_shown=5, bar="bytes"))
        if self.failures.height:
            shown.append(Lines(tuple((line, "red") for line in self._failed())))
        if self.growth.height:
            names = {
                "source": "line",
                "module": "module",
                "op": "operator",
                "bytes_per_step": "a step",
                "steps": "steps",
            }
            names |= several_devices
            shown.append(TableView(self.growth, names, "memory that every step leaves behind:", rows_shown=5))
        if self.recomputed.height:
            names = {
                "module": "module",
                "saved_bytes": "saved",
                "activation_bytes": "activations",
                "forward_ns": "costs",
            }
            names |= several_devices
            title = "what recomputing a module in the backward pass would save of the peak, and its time a step:"
            shown.append(TableView(self.recomputed, names, title, rows_shown=5))
        return tuple(shown)

    def _failed(self) -> Iterator[str]:
        for row in self.failures.iter_rows(named=True):
            place = row["source"] or row["module"] or row["op"]
            known = (
                ("allocated", "were allocated"),
                ("reserved", "were reserved"),
                ("device_free", "of the device were free"),
                ("largest_inactive", "had the largest free block that was reserved"),
            )
            parts = [f"{format_bytes(row[name])} {said}" for name, said in known if row[name] is not None]
            yield (
                f"out of memory on rank {row['rank']} GPU {row['device']}: {format_bytes(row['bytes'])} asked for"
                + (f" by {place}" if place else "")
                + (f"; {', '.join(parts)}" if parts else "")
            )

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        reasons = (f"{format_bytes(size)}: {said}" for _, size, said in self.reasons.iter_rows())
        return (*self._highest(), *reasons)

    def _highest(self) -> Iterator[str]:
        """Which device has the highest peak, and where it holds more than the one with the lowest."""
        rows = self.highest
        if rows is None or not rows["more_bytes"]:
            return
        most, least = (f"rank {rows[f'{than}rank']} GPU {rows[f'{than}device']}" for than in ("", "than_"))
        places = [
            f"{format_bytes(row['more_bytes'])} more at {row['name'] or 'no known place'}"
            for row in rows["rows"][:_MAX_TOLD]
        ]
        more = format_bytes(rows["more_bytes"])
        yield f"{most} has the highest peak, {more} more than {least}" + (f": {', '.join(places)}" if places else "")

    @property
    def allocators(self) -> pl.DataFrame:
        """The rows of ``devices`` that are of allocators."""
        return self.devices.filter(_IS_HELD)

    @property
    def held(self) -> pl.DataFrame:
        """The rows of allocators; without any, those of XLA programs."""
        held = self.rows.filter(_IS_HELD)
        return self.rows if held.is_empty() else held

    @property
    def most(self) -> dict[str, Any]:
        """The row of ``devices`` with the highest peak: an allocator's, without any an XLA program's."""
        order = (~_IS_HELD, "peak_bytes", "rank", "device", "program")
        return self.devices.sort(*order, descending=[False, True, False, False, False]).row(0, named=True)

    @property
    def highest(self) -> dict[str, Any] | None:
        """The device with the highest peak, compared with the one with the lowest; None unless there are several.

        Keys: rank, device, than_rank, than_device, more_bytes, and rows: the places that hold more there, as name and
        more_bytes, the most first.
        """
        devices = self.allocators.filter(pl.col("device").is_not_null())
        if devices.height < 2:
            return None
        ordered = devices.sort("peak_bytes", "rank", "device", descending=[True, False, False])
        most, least = ordered.row(0, named=True), ordered.row(-1, named=True)
        sides = [
            self.rows.filter(pl.col("rank") == side["rank"], pl.col("device") == side["device"]).select("name", "bytes")
            for side in (most, least)
        ]
        both = sides[0].join(sides[1], on="name", how="left", nulls_equal=True, suffix="_least")
        rows = both.select("name", more_bytes=pl.col("bytes") - pl.col("bytes_least").fill_null(0))
        return {
            "rank": most["rank"],
            "device": most["device"],
            "than_rank": least["rank"],
            "than_device": least["device"],
            "more_bytes": most["peak_bytes"] - least["peak_bytes"],
            "rows": rows.filter(pl.col("more_bytes") > 0)
            .sort("more_bytes", "name", descending=[True, False], nulls_last=True)
            .to_dicts(),
        }

    def to_json(self) -> dict[str, Any]:
        """See `Answer`."""
        return {
            "by": self.by,
            "at": self.at,
            "devices": self.devices,
            "rows": self.rows,
            "outside": self.outside,
            "reasons": self.reasons,
            "failures": self.failures.rename(_IN_JSON),
            "growth": self.growth,
            "recompute": self.recomputed,
            "highest": self.highest,
        }  # fmt: skip

    def to_frame(self) -> pl.DataFrame:
        """The rows, with full names."""
        return self.rows

    def self_check(self) -> None:
        """See `Answer`."""
        inputs = self.caveats.inputs
        keys = ["rank", "device", "program"]
        live = self.rows.group_by(keys).agg(rows=pl.col("bytes").sum())
        sums = self.devices.join(live, on=keys, how="left", nulls_equal=True)
        rest = pl.col("peak_bytes") - pl.col("before_bytes") - pl.col("rows").fill_null(0)
        adds_up = not sums.filter(rest != 0).height
        must(inputs, adds_up, "the rows and what was allocated before the trace do not add up to the peak")
        held = pl.col("reserved_bytes") - pl.col("inactive_bytes") - pl.col("peak_bytes")
        must(inputs, not sums.filter(held != 0).height, "peak and inactive memory do not add up to what is reserved")
        keys = ["rank", "device"]
        asked = self.outside.group_by(keys).agg(outside=pl.col("bytes").sum())
        split = self.devices.join(asked, on=keys).select(
            pl.col("outside_bytes") - pl.col("outside_rest_bytes") - pl.col("outside")
        )
        must(inputs, not (split.to_series() != 0).any(), "what is outside of the allocator does not add up")
        negative = self.devices.select(pl.min_horizontal(pl.selectors.ends_with("_bytes")).min()).item()
        must(inputs, negative is None or negative >= 0, "a size is negative")


def memory(trace: Attributed, by: str | None, at: str = PEAK) -> Memory:
    """Bytes that were live at one moment, by place.

    Args:
        trace: attributed; memory is that of its ranks and devices, whatever else is selected.
        by: one of `MEMORY_BY`; None: the first of module, source and op that is known, else rank.
        at: as `thence.analysis.memory.moments.moments` takes it.

    Raises:
        UsageError: ``by`` or ``at`` has another value.
        MissingData: the trace holds no events about memory, or no allocation failed.
    """
    if by is not None and by not in MEMORY_BY:
        raise UsageError(f"memory has no places by {by}: choose one of {', '.join(MEMORY_BY)}")
    if trace.memory_totals.is_empty():
        if has_plans(trace):
            return _of_programs(trace, by or "source", at)
        raise MissingData(f"{trace.meta.named}: {_NO_EVENTS}")
    totals, chosen = readings(trace), moments(trace, at)
    placed = allocations(trace)
    row = placed.join(chosen.select(*DEVICE, "row"), on=DEVICE, how="left", maintain_order="left")["row"].fill_null(-1)
    live = pl.Series(live_at(placed, row.to_numpy())) & (row >= 0)
    placed = placed.with_columns(live=live)
    shown = by or next((kind for kind in ("module", "source", "op") if placed[kind].null_count() < len(live)), "rank")
    beside, rest = outside(trace, chosen, shown)
    devices = _devices(chosen, placed, zero(trace), rest)
    if not (devices["before_bytes"] >= 0).all():
        raise MissingData(f"{trace.meta.named}: {_LOST}; record fewer steps, so that no event is lost")
    at_moment = placed.filter("live", _IS_SHOWN)
    rows = _rows(at_moment, shown, chosen)
    helps = recomputed(trace, placed, totals, chosen if at == PEAK else chosen.clear())
    answer = Memory(
        shown, _heading(shown), at, devices, _shown(rows), beside, _reasons(trace, rows, devices, shown),
        _failures(trace), _shown(growth(placed, trace.steps)), _shown(helps),
    )  # fmt: skip
    if at != PEAK or not has_plans(trace):
        return answer
    programs, needed = _planned(trace, shown)
    return replace(
        answer,
        devices=pl.concat([answer.devices, programs]),
        rows=pl.concat([answer.rows, needed], how="vertical_relaxed"),
    )


def _of_programs(trace: Attributed, by: str, at: str) -> Memory:
    """The memory of XLA programs, which their compiler planned; exact, and without a time."""
    if at != PEAK:
        raise MissingData(
            f"{trace.meta.named}: what is known of memory is what XLA programs need when they need most: --at peak"
        )
    devices, rows = _planned(trace, by)
    return Memory(
        by, _heading(by), at, devices, rows, pl.DataFrame(schema=OUTSIDE), _reasons(trace, rows, devices, by),
        _failures(trace), pl.DataFrame(schema=GROWTH), pl.DataFrame(schema=RECOMPUTED),
    )  # fmt: skip


def _planned(trace: Attributed, by: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of `Memory.devices` and `Memory.rows` of the XLA programs of which the plan is known."""
    executed = trace.programs.select("rank", "device", "hlo", program=pl.col("name").cast(pl.String)).unique()
    planned = planned_buffers(trace)
    held = executed.join(planned, left_on="hlo", right_on="number").with_columns(
        name=pl.col("rank").cast(pl.String) if by == "rank" else pl.col(by).cast(pl.String)
    )
    used = pl.col("kind").is_not_null()
    sums = held.group_by("rank", "device", "program").agg(
        peak_bytes=pl.col("bytes").filter(used).sum(), inactive_bytes=pl.col("bytes").filter(~used).sum()
    )
    devices = sums.with_columns(
        before_bytes=pl.lit(0), reserved_bytes=pl.col("peak_bytes") + pl.col("inactive_bytes")
    ).sort("rank", "device", "peak_bytes", "program", descending=[False, False, True, False])
    devices = devices.select(
        (pl.col(name) if name in devices.columns else pl.lit(None).alias(name)).cast(dtype)
        for name, dtype in DEVICES.items()
    )
    keys = ("rank", "device", "program")
    rows = held.filter(used).group_by(*keys, "name").agg(*_SUMS).join(sums, on=keys)
    return devices, _in_order(rows.with_columns(share=pl.col("bytes") / pl.col("peak_bytes")), by)


def allocations(trace: Attributed) -> pl.DataFrame:
    """The allocations of the GPUs (of the hosts, where no GPU's are known), with their places.

    Returns:
        the columns of `thence.model.tables.MEMORY` with every place that is known (device is `HOST_DEVICE` for the
        host's memory), step (row of steps) and step_name.
    """
    table = with_device(trace.memory)
    of_gpus = table.filter(pl.col("device") != HOST_DEVICE)
    table = of_gpus if _knows_gpus(trace) else table
    # Others are outside of the allocators: `thence.analysis.memory.outside`.
    of_readings = with_device(trace.memory_totals).select(DEVICE).unique()
    table = table.join(of_readings, on=DEVICE, how="semi", maintain_order="left")
    step = pl.Series("step", MemoryPlaces(trace, table).step).replace(NO_ROW, None)
    names = trace.steps["name"].gather(step.cast(pl.UInt32))
    table = with_planned_buffers(trace, table.with_columns(step, names.alias("step_name")))
    return placed_memory(trace, table)


def _knows_gpus(trace: Attributed) -> bool:
    return trace.memory_totals["device"].null_count() < trace.memory_totals.height


def _shown(frame: pl.DataFrame) -> pl.DataFrame:
    """A table with null for the device of the host's memory."""
    return frame.with_columns(pl.when(pl.col("device") != HOST_DEVICE).then("device").alias("device"))


def _heading(by: str) -> str:
    return "kind" if by == "kind" else _KIND[by].heading or by


def _devices(chosen: pl.DataFrame, placed: pl.DataFrame, begins: int, rest: pl.DataFrame) -> pl.DataFrame:
    shown = placed.filter("live", _IS_SHOWN)
    sums = shown.group_by(DEVICE).agg(
        seen=pl.col("bytes").sum(),
        rounding=(pl.col("bytes") - pl.col("requested")).sum(),
        unknown=pl.col("requested").null_count(),
    )
    both = chosen.join(rest, on=["rank", "device"], how="left", maintain_order="left")
    devices = both.join(sums, on=DEVICE, how="left", maintain_order="left").with_columns(
        pl.col("seen").fill_null(0), before=pl.col("allocated") - pl.col("seen").fill_null(0)
    )
    frame = devices.select(
        "rank",
        "device",
        "step",
        program=pl.lit(None, pl.String),
        peak_bytes="allocated",
        at_ns=pl.col("start") - begins,
        before_bytes="before",
        rounding_bytes=pl.when(pl.col("unknown") == 0).then("rounding"),
        inactive_bytes="inactive",
        reserved_bytes="reserved",
        outside_bytes="outside",
        outside_rest_bytes="rest",
    )
    return _shown(frame.select(pl.col(name).cast(dtype) for name, dtype in DEVICES.items()))


_SUMS = (
    pl.col("bytes").sum(),
    pl.len().cast(pl.Int64).alias("count"),
    pl.when(pl.col("kind").n_unique() == 1)
    .then(pl.col("kind").first().cast(pl.String))
    .otherwise(pl.lit("mixed"))
    .alias("kind"),
)


def _rows(live: pl.DataFrame, by: str, chosen: pl.DataFrame) -> pl.DataFrame:
    names = {"step": "step_name"}
    name = pl.col("rank").cast(pl.String) if by == "rank" else pl.col(names.get(by, by)).cast(pl.String)
    return (
        live.group_by("rank", "device", "allocator", name=name)
        .agg(*_SUMS)
        .join(chosen.select(*DEVICE, "allocated"), on=DEVICE)
        .with_columns(program=pl.lit(None, pl.String), share=pl.col("bytes") / pl.col("allocated"))
        .pipe(_in_order, by)
    )


_ROWS = ("by", "name", "rank", "device", "program", "bytes", "share", "count", "kind")


def _in_order(rows: pl.DataFrame, by: str) -> pl.DataFrame:
    """The columns of `Memory.rows`, the most bytes first."""
    order = ("bytes", "rank", "device", "program", "name")
    descending = [True, *[False] * (len(order) - 1)]
    return rows.with_columns(by=pl.lit(by)).sort(order, descending=descending, nulls_last=True).select(_ROWS)


def _reasons(trace: Attributed, rows: pl.DataFrame, devices: pl.DataFrame, by: str) -> pl.DataFrame:
    unplaced = int(rows.filter(pl.col("name").is_null())["bytes"].sum())
    before = int(devices["before_bytes"].sum())
    reasons = []
    if before:
        reasons.append(("before_trace", before, _REASONS["before_trace"]))
    if unplaced and by == "kind":
        reasons.append(("kind_unknown", unplaced, _REASONS["kind_unknown"]))
    elif unplaced:
        recorded = trace.steps if by == "step" else trace.host.filter(pl.col("category").is_in(_KIND[by].categories))
        nothing = rows["name"].null_count() == rows.height and recorded.is_empty()
        code = _KIND[by].missing if nothing else _KIND[by].outside
        how = advice(code, trace.meta.formats) if nothing else None
        reasons.append((code, unplaced, text_of(code).replace("launched", "allocated") + (f"; {how}" if how else "")))
    return pl.DataFrame(reasons, schema={"code": pl.String, "bytes": pl.Int64, "text": pl.String}, orient="row")


def _failures(trace: Attributed) -> pl.DataFrame:
    places = MemoryPlaces(trace, trace.memory_failures)
    return trace.memory_failures.select(
        "rank",
        "device",
        pl.col("start") - zero(trace),
        *("bytes", *_SIZES),
        *(places.of_calls(kind).cast(pl.String).alias(kind) for kind in ("module", "source", "op")),
    )
