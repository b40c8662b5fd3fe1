"""How well the GPU was used: FLOP, bytes and the roofline of each place and step, and what it could gain.

The roofline of an activity is the shortest time that its device allows (`thence.analysis.activity_rooflines`). Headroom
is the rest of its time. Both are summed over activities, never computed from sums over different data types, so they
add up to the modelled time. Work without a model has no headroom; its time is listed with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.activity_rooflines import (
    BOUNDS,
    LINKS_WAIT,
    REASONS,
    STATE_PEAKS,
    activity_rooflines,
    attainable_peaks,
    known_peaks,
    most_of,
)
from thence.analysis.counters.answer import counters_of, figures_as_text
from thence.analysis.counters.measured import SCHEMA as MEASURED
from thence.analysis.counters.measured import measured
from thence.analysis.grouping.time_by_place import heading_of, name_of_place, separated_from_steady, time_by_place
from thence.analysis.steps.windows import selected_steps
from thence.attribution.work.data_types import data_types
from thence.errors import MissingData
from thence.model.answer import Answer, Lines, TableView, result_or_reason
from thence.model.kernel_names import short_names
from thence.model.names import matching
from thence.model.peaks import clock_of_peaks
from thence.model.phases import Phase
from thence.model.totals import close, must
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.analysis.counters.answer import Counters
    from thence.model.attributed import Attributed
    from thence.model.peaks import Peaks

_HEADINGS = {
    "total_ns": "total", "headroom_ns": "headroom", "share": "of headroom", "bound": "bound by", "tflops": "TFLOP/s",
    "flop_share": "with FLOP", "gbps": "GB/s", "intensity": "FLOP/byte", "peak_share": "of roofline",
    "attainable_share": "of attainable",
    "modelled_share": "modelled", "count": "count",
}  # fmt: skip
_CLOCK_SHARE = 0.01
"""Share of the sampled time from which a low clock is stated."""
_WIDE_SHARE = 0.05
"""Share of the GPU time from which matrix products in TF32 or FP32 are stated."""
_WIDE = {"float32": "FP32", "tf32": "TF32"}
_PRODUCT = r"(?i)gemm|gemv"
"""In names of kernels that multiply matrices, where the trace does not tell their FLOP."""
_NARROWER = {
    False: "torch.autocast with bfloat16",
    True: "bfloat16 parameters and inputs, or jax_default_matmul_precision",
}
"""What makes matrix products narrower: in PyTorch, and in a program that XLA compiled."""
_TO_TF32 = ", or torch.set_float32_matmul_precision for TF32"
_OF_ACTIVITY = ("flop", "bytes", "compute_ns", "roofline_ns", "attainable_ns")
"""Columns of activities that are divided among places."""
_OF_GPU = ("rank", "device")
STEPS = {
    "rank": pl.Int32(), "device": pl.Int32(), "steps": pl.Int64(), "duration_ns": pl.Int64(), "flop": pl.Float64(),
    "recomputed_flop": pl.Float64(), "mfu": pl.Float64(), "hfu": pl.Float64(), "known_share": pl.Float64(),
}  # fmt: skip
"""Columns of `Roofline.steps`."""
CLOCKS = {"rank": pl.Int32(), "device": pl.Int32(), "mhz": pl.Float64(), "peak_mhz": pl.Float64()}
"""Columns of `Roofline.clocks`."""


@dataclass(frozen=True)
class Roofline(Answer):
    """Use of the GPU by place.

    Attributes:
        by: the kind of place of a row.
        heading: of the column of places.
        peaks: of each device, with their source.
        totals: total_ns, flop_modelled_ns (time of activities with known FLOP), bytes_only_ns (with bytes alone), flop,
            bytes, roofline_ns (of modelled time), headroom_ns.
        steps: the typical steps of each device: their number, the sum of their durations, flop and recomputed_flop of
            the work that they launched, mfu and hfu (null if no FLOP are known), and known_share, the share of the
            time of that work whose FLOP or bytes are known. Empty without steps, or if only a part of the work is
            selected.
        rows: by, name (the place, or why there is none, as `report` names it), rank and device (null where the row sums
            several), count, total_ns, modelled_ns, flop, bytes, tflops (10^12 FLOP/s in the time with FLOP), flop_share
            (that time as a share of total_ns), gbps (10^9 bytes/s in the time with bytes), intensity (FLOP / bytes of
            activities that have both), bound (of `BOUNDS`, what limits most of its modelled time; unknown if nothing is
            modelled), roofline_ns, headroom_ns, peak_share (roofline_ns / modelled_ns), attainable_share (the same at
            the peaks of ``attainable``), modelled_share, share (of headroom), reason (code of why there is no place;
            null for a place), measured (what the hardware counted, a struct of
            `thence.analysis.counters.measured.SCHEMA`; null without counters); the largest headroom first. Null where
            nothing is known.
        reasons: code, total_ns and text of time without a roofline.
        dtypes: data types of the FLOP, that with most FLOP first.
        wide_ns: GPU time of matrix products by the data type that they multiply in, of those that are wider than
            bfloat16 and slower on these devices: tf32 and float32. Products are activities with FLOP, and kernels that
            are named so; their type is that of `thence.attribution.work.data_types`.
        of_xla: whether XLA compiled the program.
        attainable: of each device of which the trace tells it, what it attains (measured, or at the clock that it ran
            at), as `peaks`.
        clocks: rank, device, mhz (median of the clock that was sampled while the device worked) and peak_mhz (the clock
            at which the peaks of its tensor cores hold; null where it is not known); one row for each device whose
            clock was sampled.
        counters: the hardware counters; None if the trace has none and nobody asked for them.
        selection: which part of the trace was selected, in words; empty for the whole.
    """

    by: str
    heading: str
    peaks: tuple[tuple[int, int, Peaks], ...]
    totals: Mapping[str, float | None]
    steps: pl.DataFrame
    rows: pl.DataFrame
    reasons: pl.DataFrame
    dtypes: tuple[str, ...] = ()
    wide_ns: Mapping[str, int] = field(default_factory=dict)
    of_xla: bool = False
    attainable: tuple[tuple[int, int, Peaks], ...] = ()
    clocks: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=CLOCKS))
    counters: Counters | None = None
    selection: str = ""

    @property
    def measured(self) -> pl.DataFrame:
        """What the hardware counted for each row: `thence.analysis.counters.measured.SCHEMA`; no rows without."""
        held = self.rows["measured"]
        return held.struct.unnest() if held.dtype == pl.Struct else pl.DataFrame(schema=MEASURED)

    @property
    def modelled_share(self) -> float:
        """Share of the GPU time that has a model."""
        modelled = (self.totals["flop_modelled_ns"] or 0) + (self.totals["bytes_only_ns"] or 0)
        return modelled / max(self.totals["total_ns"] or 0, 1)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        totals = {name: value or 0 for name, value in self.totals.items()}
        modelled = totals["flop_modelled_ns"] + totals["bytes_only_ns"]
        whole = max(totals["total_ns"], 1)
        flop, alone = (format_share(totals[name] / whole, 1) for name in ("flop_modelled_ns", "bytes_only_ns"))
        text = (
            f"GPU time {format_ns(totals['total_ns'])} ({self.selection or 'the whole recording'}): {flop} with known "
            f"FLOP, {alone} with known bytes alone; "
            f"{format_ns(modelled)} that have a model would take {format_ns(totals['roofline_ns'])} at the roofline"
        )
        return (text, *self._step_texts())

    @property
    def wide_share(self) -> float:
        """Share of the GPU time in `wide_ns`."""
        return sum(self.wide_ns.values()) / max(self.totals["total_ns"] or 0, 1)

    @property
    def wide_text(self) -> str:
        """That matrix products are wider than they could be, in words; empty if they take less than a twentieth."""
        if self.wide_share < _WIDE_SHARE:
            return ""
        whole = max(self.totals["total_ns"] or 0, 1)
        shares = [f"{_WIDE[dtype]} for {format_share(ns / whole, 1)}" for dtype, ns in self.wide_ns.items()]
        _, _, peaks = self.peaks[0]
        how = _NARROWER[self.of_xla] + (_TO_TF32 if "float32" in self.wide_ns and not self.of_xla else "")
        times = [f"{peaks.tflops['bfloat16'] / peaks.tflops[dtype]:.1f}" for dtype in self.wide_ns]
        return (
            f"matrices are multiplied in {' and in '.join(shares)} of the GPU time, where the peak of bfloat16 is "
            f"{' and '.join(times)} times as high; if less exact results will do: {how}"
        )

    def _step_texts(self) -> Iterator[str]:
        for row in self.steps.drop_nulls("mfu").iter_rows(named=True):
            yield (
                f"rank {row['rank']} GPU {row['device']}: MFU {format_share(row['mfu'], 1)}, HFU "
                f"{format_share(row['hfu'], 1)} of {several(row['steps'], 'step')} "
                f"({format_share(row['known_share'], 1)} of their GPU time with known FLOP or bytes)"
            )

    def views(self) -> tuple[TableView | Lines, ...]:
        """See `Answer`."""
        rows = self.rows
        if self.by == "kernel":
            rows = rows.with_columns(pl.col("name").replace(short_names(rows["name"].to_list())))
        headings = {name: text for name, text in _HEADINGS.items() if self.attainable or name != "attainable_share"}
        return (
            Lines(tuple((text, "") for text in self.about())),
            TableView(rows, {"name": self.heading, **headings}, rows_shown=20, bar="headroom_ns"),
            *(view for view in [self.counted_view(rows["name"])] if view is not None),
        )

    def counted_view(self, names: pl.Series) -> TableView | None:
        """The table of what the hardware counted, the rows with most time first; None if it counted nothing.

        Args:
            names: what each row is called.
        """
        counted = self.measured
        if self.counters is None or counted.is_empty():
            return None
        texts, headings = figures_as_text(counted)
        known = [name for name in headings if name not in ("sampled_share", "clock_mhz")]
        shown = texts.with_columns(names, total_ns=self.rows["total_ns"])
        shown = shown.filter(pl.any_horizontal(pl.col(name).is_not_null() for name in known) if known else False)
        if shown.is_empty():
            return None
        ordered = shown.sort("total_ns", "name", descending=[True, False])
        title = self.counters.title(counted)
        return TableView(ordered, {"name": self.heading, **headings}, title=title, rows_shown=20)

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        peaks = {
            f"{kind} of {peaks.device}: "
            + ", ".join(f"{dtype} {value:,.0f}" for dtype, value in peaks.tflops.items())
            + f" TFLOP/s, {peaks.gbps:,.0f} GB/s ({peaks.source})"
            for kind, held in (("peaks", self.peaks), ("attainable", self.attainable))
            for _, _, peaks in held
            if peaks.gbps is not None
        }
        clocks = (
            f"rank {row['rank']} GPU {row['device']}: the multiprocessors' clock was {row['mhz']:,.0f} MHz in the "
            f"median while it worked, {format_share(row['mhz'] / row['peak_mhz'], 1)} of the "
            f"{row['peak_mhz']:,.0f} MHz of its peaks"
            for row in self.clocks.drop_nulls().iter_rows(named=True)
        )
        unknown = (
            f"no roofline for {format_ns(total)}: {text}"
            for total, text in self.reasons.select("total_ns", "text").iter_rows()
        )
        counted = () if self.counters is None else self.counters.remarks(self.measured)
        wide = (self.wide_text,) if self.wide_text else ()
        links = (LINKS_WAIT,) if (self.rows["bound"] == "link").any() else ()
        cure = () if self.peaks else (f"the peaks of these devices are not known; {STATE_PEAKS}",)
        said = (*wide, *links, *cure, *sorted(peaks, reverse=True), *clocks, *self._clock_as_cause())
        return (*said, *unknown, *counted)

    def _clock_as_cause(self) -> Iterator[str]:
        """How much of the sampled time is a clock below that of the peaks, in rows that compute decides."""
        known, counted = self.clocks["peak_mhz"].drop_nulls().unique().to_list(), self.measured
        if len(known) != 1 or counted.is_empty():
            return
        (peak,) = known
        time, mhz = pl.col("sampled_ns"), pl.col("clock_mhz")
        slow = counted.with_columns(self.rows["bound"]).filter(pl.col("bound") == "compute", mhz < peak)
        lost, mean = slow.select((time * (1 - mhz / peak)).sum(), (mhz * time).sum() / time.sum()).row(0)
        share = lost / max(int(counted["sampled_ns"].sum()), 1)
        if share >= _CLOCK_SHARE:
            yield (
                f"{format_share(share, 1)} of the sampled GPU time is clock: work bound by compute ran at {mean:,.0f} "
                f"MHz, below the {peak:,.0f} MHz of its peaks"
            )

    def to_json(self) -> dict[str, Any]:
        """See `Answer`."""
        return {
            "by": self.by,
            "selection": self.selection,
            "peaks": _peaks_json(self.peaks),
            "attainable": _peaks_json(self.attainable),
            "clocks": self.clocks,
            "totals": dict(self.totals),
            "steps": self.steps,
            "rows": self.rows,
            "reasons": self.reasons,
            "counters": None if self.counters is None else self.counters.to_json(),
        }  # fmt: skip

    def to_frame(self) -> pl.DataFrame:
        """The rows, with full names."""
        return self.rows

    def self_check(self) -> None:
        """See `Answer`."""
        rows = self.rows
        times = {name: float(rows[f"{name}_ns"].sum()) for name in ("total", "modelled", "roofline", "headroom")}
        inputs = self.caveats.inputs
        must(
            inputs,
            close(times["total"], self.totals["total_ns"] or 0),
            "the rows of the roofline do not add up to the time",
        )
        least = [rows[name].min() for name in ("flop", "bytes", "roofline_ns")]
        possible = all(value is None or float(value) >= 0 for value in least)  # type: ignore[arg-type]
        must(inputs, possible, "a row of the roofline has less than no work")
        adds_up = close(times["modelled"], times["roofline"] + times["headroom"])
        must(inputs, adds_up, "roofline and headroom do not add up to the modelled time")


def _peaks_json(held: Sequence[tuple[int, int, Peaks]]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "device": device, "name": peaks.device, "dtype": dtype, "tflops": value, "gbps": peaks.gbps,
         "source": peaks.source}
        for rank, device, peaks in held
        for dtype, value in peaks.tflops.items()
    ]  # fmt: skip


def roofline(trace: Attributed, by: str, given: Peaks | None = None) -> Roofline:
    """FLOP, bytes and headroom of each place.

    Args:
        by: one of `thence.model.places.BY`.
        given: peaks for all devices, instead of the known ones.

    Raises:
        UsageError: ``by`` is no kind of place.
        MissingData: the trace holds no device activity, or the peaks of none of its devices are known.
    """
    if trace.gpu.is_empty():
        raise MissingData(f"{', '.join(trace.meta.inputs)}: there is no device activity")
    try:
        peaks = known_peaks(trace, given)
    except MissingData:
        if trace.counters.is_empty():
            raise
        peaks = {}  # what was counted needs none
    attainable = attainable_peaks(trace)
    activities = activity_rooflines(trace, peaks).with_columns(
        attainable_ns=activity_rooflines(trace, attainable)["roofline_ns"] if attainable else pl.lit(None, pl.Float64)
    )
    shared = shared_among_places(separated_from_steady(trace, time_by_place(trace, by), by), activities)
    totals = summed(shared.with_columns(place=pl.lit(0)).group_by("place", maintain_order=True)).row(0, named=True)
    with_flop = int(activities.filter(pl.col("flop").is_not_null())["duration"].sum())
    return Roofline(
        by,
        heading_of(trace, by),
        _by_device(peaks),
        {
            "total_ns": totals["total_ns"],
            "flop_modelled_ns": with_flop,
            "bytes_only_ns": totals["modelled_ns"] - with_flop,
            **{name: totals[name] for name in ("flop", "bytes", "roofline_ns", "headroom_ns")},
        },
        step_utilisation(trace, activities),
        _rows(shared, trace, by, activities),
        _reasons(activities),
        _types(activities),
        _wide_ns(trace, activities, peaks),
        not trace.programs.is_empty(),
        _by_device(attainable),
        _clocks(trace),
        counters_of(trace),
        str(trace.selection),
    )


def _rows(shared: pl.DataFrame, trace: Attributed, by: str, activities: pl.DataFrame) -> pl.DataFrame:
    """`Roofline.rows` of what `shared_among_places` returns."""
    rows = summed(shared.group_by("place", "no_place", maintain_order=True))
    return (
        rows.with_columns(measured=_measured(shared, rows, trace, activities))
        .rename({"no_place": "reason"})
        .with_columns(pl.col("reason").cast(pl.String), name=name_of_place())
        .sort("headroom_ns", "total_ns", "name", descending=[True, True, False])
        .with_columns(share=pl.col("headroom_ns") / pl.max_horizontal(pl.col("headroom_ns").sum(), 1.0), by=pl.lit(by))
        .select("by", "name", pl.exclude("by", "name", "place", "reason", "measured"), "reason", "measured")
    )


def _measured(shared: pl.DataFrame, rows: pl.DataFrame, trace: Attributed, activities: pl.DataFrame) -> pl.Series:
    """What was counted for each row; null without counters."""
    if trace.counters.is_empty():
        return pl.Series([None], dtype=pl.Null).new_from_index(0, rows.height)
    keys = ["place", "no_place"]
    group = rows.select(keys).with_row_index("group")
    parts = shared.select("gpu", "part", *keys).join(group, on=keys, nulls_equal=True, maintain_order="left")
    return measured(trace, parts, activities).to_struct("measured")


def _reasons(activities: pl.DataFrame) -> pl.DataFrame:
    """`Roofline.reasons`, the most time first."""
    return (
        activities.filter(pl.col("reason").is_not_null())
        .group_by(code="reason")
        .agg(total_ns=pl.col("duration").sum())
        .sort("total_ns", "code", descending=[True, False])
        .with_columns(text=pl.col("code").replace_strict(dict(REASONS), return_dtype=pl.String))
    )


def _types(activities: pl.DataFrame) -> tuple[str, ...]:
    """Data types of the FLOP, that with most FLOP first."""
    summed_flop = activities.drop_nulls("flop").group_by("dtype").agg(pl.col("flop").sum())
    return tuple(summed_flop.sort("flop", "dtype", descending=[True, False])["dtype"].drop_nulls())


def _wide_ns(trace: Attributed, activities: pl.DataFrame, peaks: Mapping[tuple[int, int], Peaks]) -> dict[str, int]:
    """`Roofline.wide_ns`, the most time first."""
    slower = [
        dtype
        for dtype in _WIDE
        if peaks and all(held.tflops.get("bfloat16", 0.0) > held.tflops.get(dtype, math.inf) for held in peaks.values())
    ]
    named = pl.when(pl.lit(matching(trace.gpu["name"], _PRODUCT))).then(pl.lit(data_types(trace).cast(pl.String)))
    product = pl.when(pl.col("flop").is_not_null()).then("dtype").otherwise(named)
    slow = activities.select("duration", dtype=product).filter(pl.col("dtype").is_in(slower))
    summed_ns = slow.group_by("dtype").agg(pl.col("duration").sum())
    return dict(summed_ns.sort("duration", "dtype", descending=[True, False]).rows())


def _clocks(trace: Attributed) -> pl.DataFrame:
    """`Roofline.clocks`."""
    rows = [
        (device.rank, device.device, device.clock_mhz, clock_of_peaks(device.name or ""))
        for device in sorted(trace.meta.devices, key=lambda device: (device.rank, device.device))
        if device.clock_mhz is not None
    ]
    return pl.DataFrame(rows, CLOCKS, orient="row")


def _by_device(peaks: Mapping[tuple[int, int], Peaks]) -> tuple[tuple[int, int, Peaks], ...]:
    return tuple((rank, device, known) for (rank, device), known in sorted(peaks.items()))


def shared_among_places(parts: pl.DataFrame, activities: pl.DataFrame) -> pl.DataFrame:
    """Work and roofline of each part of an activity at a place.

    Args:
        parts: as `time_by_place` returns them.
        activities: as `activity_rooflines` returns them.

    Returns:
        columns gpu, place, no_place (why there is none), part (ns) and those of ``activities``, with the part's share
        of work and roofline.
    """
    placed = parts.select("gpu", "place", no_place="reason", part="duration")
    row = pl.col("gpu").cast(pl.UInt32)
    shared = placed.hstack(activities[placed.select(row).to_series()])
    share = pl.when(pl.col("duration") > 0).then(pl.col("part") / pl.col("duration")).otherwise(0.0)
    return shared.with_columns(pl.selectors.by_name(_OF_ACTIVITY, require_all=False) * share)


def step_utilisation(trace: Attributed, activities: pl.DataFrame) -> pl.DataFrame:
    """MFU and HFU of the typical steps of each device, in the columns of `STEPS`.

    MFU is the time that the FLOP of the model would take at the peaks of their data types, over the duration of the
    steps; HFU counts recomputed forward passes, too.

    Args:
        trace: attributed; if a part of its work is selected, nothing is returned.
        activities: as `activity_rooflines` returns them.
    """
    selection = trace.selection
    whole = selection.of_ranks_and_devices_only or (selection.steps is not None and not selection.only)
    steps = result_or_reason(lambda: selected_steps(trace)).result if whole else None
    if steps is None:
        return pl.DataFrame(schema=STEPS)
    typical = steps.typical.select("rank", "device", "row", "duration")
    durations = typical.group_by("rank", "device").agg(
        steps=pl.len().cast(pl.Int64), duration_ns=pl.col("duration").sum()
    )
    recomputed = (trace.places["phase"].cast(pl.String) == Phase.RECOMPUTE.value).fill_null(value=False)
    launched = activities.with_columns(row=trace.places["step_row"].cast(pl.Int64), again=recomputed).join(
        typical.select("rank", "device", "row"), on=["rank", "device", "row"], how="semi", maintain_order="left"
    )
    compute, known = pl.col("compute_ns"), pl.col("reason").is_null()
    work = launched.group_by("rank", "device", maintain_order=True).agg(
        flop=_known_sum("flop"),
        recomputed_flop=pl.col("flop").filter("again").sum(),
        model_ns=compute.filter(~pl.col("again")).sum(),
        hardware_ns=_known_sum("compute_ns"),
        known_share=pl.col("duration").filter(known).sum() / pl.col("duration").sum(),
    )
    hardware = pl.col("hardware_ns")
    return (
        durations.join(work, on=["rank", "device"])
        .with_columns(
            mfu=pl.when(hardware.is_not_null()).then(pl.col("model_ns") / pl.col("duration_ns")),
            hfu=hardware / pl.col("duration_ns"),
        )
        .sort("rank", "device")
        .select(pl.col(name).cast(dtype) for name, dtype in STEPS.items())
    )


def _known_sum(column: str) -> pl.Expr:
    """The sum; null if no value is known."""
    return pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum())


def summed(groups: Any) -> pl.DataFrame:
    """The rows of `Roofline.rows`, without share, of groups of what `shared_among_places` returns."""
    known, time = pl.col("reason").is_null(), pl.col("part")
    both = pl.col("flop").is_not_null() & pl.col("bytes").is_not_null()
    constants = {name: pl.when(pl.col(name).min() == pl.col(name).max()).then(pl.col(name).first()) for name in _OF_GPU}
    frame: pl.DataFrame = groups.agg(
        **constants,
        count=pl.len(),
        total_ns=time.sum(),
        modelled_ns=time.filter(known).sum(),
        flop=_known_sum("flop"),
        bytes=_known_sum("bytes"),
        tflops=_known_sum("flop") / time.filter(pl.col("flop").is_not_null()).sum() / 1e3,
        flop_share=pl.when(pl.col("flop").is_not_null().any()).then(
            time.filter(pl.col("flop").is_not_null()).sum() / time.sum()
        ),
        gbps=_known_sum("bytes") / time.filter(pl.col("bytes").is_not_null()).sum(),
        intensity=pl.col("flop").filter(both).sum() / pl.col("bytes").filter(both).sum(),
        roofline_ns=pl.col("roofline_ns").sum(),
        attainable_share=_known_sum("attainable_ns") / time.filter(pl.col("attainable_ns").is_not_null()).sum(),
        **{bound: time.filter(pl.col("bound") == bound).sum() for bound in BOUNDS},
    )
    return frame.with_columns(
        headroom_ns=pl.col("modelled_ns") - pl.col("roofline_ns"),
        peak_share=pl.when(pl.col("modelled_ns") > 0).then(pl.col("roofline_ns") / pl.col("modelled_ns")),
        modelled_share=pl.when(pl.col("total_ns") > 0).then(pl.col("modelled_ns") / pl.col("total_ns")),
        bound=pl.when(pl.col("modelled_ns") == 0).then(pl.lit("unknown")).otherwise(most_of(BOUNDS)),
        **{
            name: pl.when(pl.col(name).is_finite()).then(name)
            for name in ("tflops", "flop_share", "gbps", "intensity", "attainable_share")
        },
    ).drop(BOUNDS)
