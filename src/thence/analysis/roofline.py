"""How well the GPU was used: FLOP, bytes and the roofline of each place, and what it could gain.

For each activity the roofline is the shortest time that its device allows: the longer of FLOP / peak of the data type
and bytes / memory bandwidth. Headroom is the rest of its time. Both are summed over activities, never computed from
sums over different data types, so they add up to the modelled time. Work without a model has no headroom; its time is
listed with the reason. Williams, Waterman, Patterson: "Roofline" (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.consistency import close, must
from thence.analysis.data_types import data_types
from thence.analysis.group_by import heading_of, time_by_place
from thence.analysis.kernel_groups import communicates
from thence.attribution.work.activity_work import activity_work
from thence.errors import MissingData
from thence.model.answer import Answer, Lines, TableView
from thence.model.kernel_names import short_names
from thence.model.peaks import DTYPES, Peaks, peaks_of
from thence.model.thresholds import SHORT_KERNEL_NS
from thence.units import format_ns, format_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.attributed import Attributed

REASONS: Mapping[str, str] = {
    "no_operator": "it was launched by no operator whose inputs are recorded: torch.profiler records them with "
    "record_shapes=True, and in CUDA graphs only the eager run or the capture has operators",
    "no_model": "the operator's inputs are recorded, but nothing says how many bytes it moves, or they are lists "
    "whose shapes are not recorded",
    "communication": "it communicates; its ceiling is a link, which is not modelled",
    "link": "it copies between host and device, whose link is not modelled",
    "no_peak": "the peak of its data type on this device is not known",
}
"""Why an activity has no roofline, by code."""
_HEADINGS = {
    "total_ns": "total", "headroom_ns": "headroom", "share": "of headroom", "bound": "bound by", "tflops": "TFLOP/s",
    "gbps": "GB/s", "peak_share": "of roofline", "modelled_share": "modelled", "count": "count",
}  # fmt: skip


@dataclass(frozen=True)
class Roofline(Answer):
    """Use of the GPU by place.

    Attributes:
        by: the kind of place of a row.
        heading: of the column of places.
        peaks: of each device, with their source.
        totals: total_ns, flop_modelled_ns (time of activities with known FLOP), bytes_only_ns (with bytes alone), flop,
            bytes, roofline_ns (of modelled time), headroom_ns.
        rows: name (null: no place), count, total_ns, modelled_ns, flop, bytes, tflops (10^12 FLOP/s in the time with
            FLOP), gbps (10^9 bytes/s in the time with bytes), bound (what limits most of its roofline: compute, memory,
            latency; unknown if nothing is modelled), roofline_ns, headroom_ns, peak_share (roofline_ns / modelled_ns),
            modelled_share, share (of headroom); the largest headroom first.
        reasons: code, total_ns and text of time without a roofline.
    """

    by: str
    heading: str
    peaks: tuple[tuple[int, int, Peaks], ...]
    totals: Mapping[str, float]
    rows: pl.DataFrame
    reasons: pl.DataFrame

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        totals = self.totals
        modelled = totals["flop_modelled_ns"] + totals["bytes_only_ns"]
        whole = max(totals["total_ns"], 1)
        flop, alone = (format_share(totals[name] / whole, 1) for name in ("flop_modelled_ns", "bytes_only_ns"))
        text = (
            f"GPU time {format_ns(totals['total_ns'])}: {flop} with known FLOP, {alone} with known bytes alone; "
            f"{format_ns(modelled)} that have a model would take {format_ns(totals['roofline_ns'])} at the roofline"
        )
        return (text,)

    def views(self) -> tuple[TableView | Lines, ...]:
        """See `Answer`."""
        rows = self.rows
        if self.by == "kernel":
            names = rows["name"].cast(pl.String)
            rows = rows.with_columns(name=names.replace(short_names(names.drop_nulls().to_list())))
        return (
            Lines(((self.about()[0], ""),)),
            TableView(rows, {"name": self.heading, **_HEADINGS}, rows_shown=20, bar="headroom_ns"),
        )

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        peaks = {
            f"peaks of {peaks.device}: "
            + ", ".join(f"{dtype} {value:,.0f}" for dtype, value in peaks.tflops.items())
            + f" TFLOP/s, {peaks.gbps:,.0f} GB/s ({peaks.source})"
            for _, _, peaks in self.peaks
            if peaks.gbps is not None
        }
        unknown = (
            f"no roofline for {format_ns(total)}: {text}"
            for total, text in self.reasons.select("total_ns", "text").iter_rows()
        )
        return (*sorted(peaks), *unknown)

    def to_json(self) -> dict[str, Any]:
        """See `Answer`."""
        return {
            "by": self.by,
            "peaks": [
                {"rank": rank, "device": device, "name": peaks.device, "dtype": dtype, "tflops": value,
                 "gbps": peaks.gbps, "source": peaks.source}
                for rank, device, peaks in self.peaks
                for dtype, value in peaks.tflops.items()
            ],
            "totals": dict(self.totals),
            "rows": self.rows,
            "reasons": self.reasons,
        }  # fmt: skip

    def self_check(self) -> None:
        """See `Answer`."""
        rows = self.rows
        times = {name: float(rows[f"{name}_ns"].sum()) for name in ("total", "modelled", "roofline", "headroom")}
        inputs = self.caveats.inputs
        must(
            inputs, close(times["total"], self.totals["total_ns"]), "the rows of the roofline do not add up to the time"
        )
        adds_up = close(times["modelled"], times["roofline"] + times["headroom"])
        must(inputs, adds_up, "roofline and headroom do not add up to the modelled time")


def roofline(trace: Attributed, by: str, given: Peaks | None = None) -> Roofline:
    """FLOP, bytes and headroom of each place.

    Args:
        trace: attributed.
        by: one of `thence.model.places.BY`.
        given: peaks for all devices, instead of the known ones.

    Raises:
        UsageError: ``by`` is no kind of place.
        MissingData: the trace holds no device activity, or the peaks of none of its devices are known.
    """
    if trace.gpu.is_empty():
        raise MissingData(f"{', '.join(trace.meta.inputs)}: there is no device activity")
    peaks = _peaks(trace, given)
    activities = _activities(trace, peaks)
    parts = time_by_place(trace, by).select("gpu", name="place", part="duration")
    row = pl.col("gpu").cast(pl.UInt32)
    shared = parts.hstack(activities[parts.select(row).to_series()].drop("rank", "device"))
    share = pl.when(pl.col("duration") > 0).then(pl.col("part") / pl.col("duration")).otherwise(0.0)
    shared = shared.with_columns(pl.col(name) * share for name in ("flop", "bytes", "roofline_ns"))
    rows = _summed(shared.group_by("name", maintain_order=True)).sort("headroom_ns", "total_ns", descending=True)
    rows = rows.with_columns(share=pl.col("headroom_ns") / max(float(rows["headroom_ns"].sum()), 1.0))
    totals = _summed(shared.with_columns(name=pl.lit(0)).group_by("name")).row(0, named=True)
    with_flop = int(activities.filter(pl.col("reason").is_null(), pl.col("flop").is_not_null())["duration"].sum())
    reasons = (
        activities.filter(pl.col("reason").is_not_null())
        .group_by(code="reason")
        .agg(total_ns=pl.col("duration").sum())
        .sort("total_ns", descending=True)
        .with_columns(text=pl.col("code").replace_strict(dict(REASONS), return_dtype=pl.String))
    )
    return Roofline(
        by,
        heading_of(trace, by),
        tuple((rank, device, found) for (rank, device), found in peaks.items()),
        {
            "total_ns": totals["total_ns"],
            "flop_modelled_ns": with_flop,
            "bytes_only_ns": totals["modelled_ns"] - with_flop,
            **{name: totals[name] for name in ("flop", "bytes", "roofline_ns", "headroom_ns")},
        },
        rows,
        reasons,
    )


def _peaks(trace: Attributed, given: Peaks | None) -> dict[tuple[int, int], Peaks]:
    """The peaks of each device by rank and device; devices of unknown peaks are left out."""
    pairs = trace.gpu.select("rank", "device").unique().sort("rank", "device").rows()
    if given is not None:
        return dict.fromkeys(pairs, given)
    names = {(device.rank, device.device): device.name or "" for device in trace.meta.devices}
    found = {pair: peaks for pair in pairs if (peaks := peaks_of(names.get(pair, ""))) is not None}
    if not found:
        unknown = sorted({names.get(pair) or "a device without a name" for pair in pairs})
        raise MissingData(
            f"{', '.join(trace.meta.inputs)}: the peaks of {', '.join(unknown)} are not known; "
            "--peak bfloat16=989 --bandwidth 3350 states them (TFLOP/s without sparsity, and GB/s)"
        )
    return found


def _activities(trace: Attributed, peaks: Mapping[tuple[int, int], Peaks]) -> pl.DataFrame:
    """Rank, device, duration, flop, bytes, roofline_ns, bound and reason of each activity; null where unknown."""
    types = data_types(trace)
    ceilings = pl.DataFrame(
        [
            (rank, device, dtype, found.tflops.get(dtype or ""), found.gbps)
            for (rank, device), found in peaks.items()
            for dtype in (*DTYPES, None)
        ],
        schema={"rank": pl.Int32, "device": pl.Int32, "dtype": pl.String, "tflops": pl.Float64, "gbps": pl.Float64},
        orient="row",
    )  # fmt: skip
    activities = (
        trace.gpu.select("rank", "device", "kind", "duration", communicates=communicates(trace), name=pl.col("name"))
        .hstack(activity_work(trace, types))
        .join(ceilings, on=["rank", "device", "dtype"], how="left", maintain_order="left", nulls_equal=True)
    )
    flop_ns = pl.col("flop") / pl.col("tflops") / 1e3  # FLOP / (TFLOP/s) = 1e-12 s; in ns
    bytes_ns = pl.col("bytes") / pl.col("gbps")
    link = (pl.col("kind") == "memcpy") & pl.col("name").cast(pl.String).str.contains("HtoD|DtoH|PtoP")
    reason = (
        pl.when("communicates").then(pl.lit("communication"))
        .when(link).then(pl.lit("link"))
        .when(pl.col("flop").is_null() & pl.col("bytes").is_null() & ~pl.col("called"))
        .then(pl.lit("no_operator"))
        .when(pl.col("flop").is_null() & pl.col("bytes").is_null()).then(pl.lit("no_model"))
        .when((pl.col("flop").is_not_null() & pl.col("tflops").is_null()) | pl.col("gbps").is_null())
        .then(pl.lit("no_peak"))
    )  # fmt: skip
    ideal = pl.max_horizontal(flop_ns, bytes_ns)
    bound = (
        pl.when((pl.col("duration") <= SHORT_KERNEL_NS) & (ideal < pl.col("duration") / 2)).then(pl.lit("latency"))
        .when(flop_ns.fill_null(0) >= bytes_ns.fill_null(0)).then(pl.lit("compute"))
        .otherwise(pl.lit("memory"))
    )  # fmt: skip
    known = pl.col("reason").is_null()
    return activities.with_columns(reason=reason).select(
        "rank", "device", "duration", "reason",
        flop=pl.when(known).then("flop"),
        bytes=pl.when(known).then("bytes"),
        roofline_ns=pl.when(known).then(pl.min_horizontal(ideal, pl.col("duration").cast(pl.Float64))),
        bound=pl.when(known).then(bound),
    )  # fmt: skip


def _summed(groups: Any) -> pl.DataFrame:
    """The rows of `Roofline.rows` of groups of parts of activities."""
    known = pl.col("reason").is_null()
    time = pl.col("part")

    def limited(bound: str) -> pl.Expr:
        return time.filter(known & (pl.col("bound") == bound)).sum()

    frame: pl.DataFrame = groups.agg(
        count=pl.len(),
        total_ns=time.sum(),
        modelled_ns=time.filter(known).sum(),
        flop=pl.col("flop").sum(),
        bytes=pl.col("bytes").sum(),
        tflops=pl.col("flop").sum() / time.filter(known & pl.col("flop").is_not_null()).sum() / 1e3,
        gbps=pl.col("bytes").sum() / time.filter(known & pl.col("bytes").is_not_null()).sum(),
        roofline_ns=pl.col("roofline_ns").sum(),
        compute=limited("compute"), memory=limited("memory"), latency=limited("latency"),
    )  # fmt: skip
    largest = pl.max_horizontal("compute", "memory", "latency")
    return frame.with_columns(
        headroom_ns=pl.col("modelled_ns") - pl.col("roofline_ns"),
        peak_share=pl.when(pl.col("modelled_ns") > 0).then(pl.col("roofline_ns") / pl.col("modelled_ns")),
        modelled_share=pl.when(pl.col("total_ns") > 0).then(pl.col("modelled_ns") / pl.col("total_ns")),
        bound=pl.when(pl.col("modelled_ns") == 0).then(pl.lit("unknown"))
        .when(pl.col("compute") == largest).then(pl.lit("compute"))
        .when(pl.col("memory") == largest).then(pl.lit("memory"))
        .otherwise(pl.lit("latency")),
        tflops=pl.when(pl.col("tflops").is_finite()).then("tflops"),
        gbps=pl.when(pl.col("gbps").is_finite()).then("gbps"),
    ).drop("compute", "memory", "latency")  # fmt: skip
