"""Summary of an in-kernel profile: time by range, and load balance of the SMs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import MissingData
from thence.model.answer import Answer, TableView
from thence.model.intervals import levels, union_lengths
from thence.units import format_count, format_ns, format_share

if TYPE_CHECKING:
    from thence.inside.decoding import Decoded

_QUANTILES = {"p50_ns": 0.5, "p90_ns": 0.9, "p99_ns": 0.99}


_HEADINGS = {
    "name": "range",
    "count": "count",
    "total_ns": "total",
    "share": "share",
    "mean_ns": "mean",
    "p50_ns": "p50",
    "p90_ns": "p90",
    "p99_ns": "p99",
    "sm_low_ns": "SM low",
    "sm_high_ns": "SM high",
    "unclosed": "unclosed",
}
"""Columns of `InsideSummary.rows` that are shown, the most important first; names as in ns."""


@dataclass(frozen=True)
class InsideSummary(Answer):
    """Time by range and SM load of one kernel launch.

    If the rate of the SM clock is unknown, ``unit`` is cycles: columns of ``rows`` end in _cycles instead of _ns, and
    all that compares starts on different SMs or is a time in ns is None.

    Attributes:
        kernel: its name, empty when unknown.
        rows: one row for each range name, largest total first: name, count, total_ns (sum of net times:
            recorded duration less recording overhead), mean_ns, p50_ns, p90_ns, p99_ns, min_ns, max_ns,
            share (of the time of all traces; nested ranges each count in full), recorded_ns (total as
            recorded), sms (number of SMs on which it ran), sm_low_ns and sm_high_ns (smallest and largest
            mean of one SM), unclosed (ranges without an end, which no other column counts).
        instants: name, count of instants.
        unit: ns or cycles.
        sms: one row for each SM: sm, blocks, traces, and in ns busy_ns (at least one trace ran), idle_ns (span_ns less
            busy_ns), start_ns and end_ns since the first trace's start.
        traces, blocks: number of traces (of warps, warpgroups or blocks) and number of blocks.
        span_ns: first start to last end of any trace.
        trace_ns: sum of the durations of all traces.
        start_spread_ns: from the first to the last start of a block.
        tail_ns: from the moment the first SM finished its last trace to the end.
        tail_idle: share of the SMs' time in the tail that was idle.
        waves: number of blocks / largest number of concurrent blocks.
        imbalance: busy time of the busiest SM / mean busy time of all SMs that ran something.
        idle_sms: number of SMs that ran nothing; None if the device's number of SMs is unknown.
        clock_ghz: median SM clock; None if it is unknown.
        clock_sources: number of traces by the source of their clock's rate.
        states: number of traces by state, see `thence.inside.columns.STATES`.
        dropped: events lost because the buffer was full.
        overhead_cycles: cycles that net times subtract for each event.
        notes, warnings: of the decoder.
    """

    kernel: str
    rows: pl.DataFrame
    instants: pl.DataFrame
    sms: pl.DataFrame
    unit: str
    traces: int
    blocks: int
    span_ns: int | None
    trace_ns: int | None
    start_spread_ns: int | None
    tail_ns: int | None
    tail_idle: float | None
    waves: float | None
    imbalance: float
    idle_sms: int | None
    clock_ghz: float | None
    clock_sources: dict[str, int]
    states: dict[str, int]
    dropped: int
    overhead_cycles: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def about(self) -> tuple[str, ...]:
        """The launch, and what the SMs did."""
        return inside_lines(self)

    def views(self) -> tuple[TableView, ...]:
        """The ranges, then instants if there are any."""
        headings = headings_of(self)
        if not int(self.rows["unclosed"].sum()):
            del headings["unclosed"]
        instants = TableView(self.instants, {"name": "instant", "count": "count"})
        return (TableView(self.rows, headings), *(() if self.instants.is_empty() else (instants,)))

    def remarks(self) -> tuple[str, ...]:
        """The notes and warnings of the decoder."""
        return (*self.notes, *self.warnings)

    def to_json(self) -> dict[str, Any]:
        """Every attribute except notes and warnings as JSON values; units are in the keys."""
        frames = ("rows", "instants", "sms")
        texts = ("notes", "warnings", "caveats")
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in (*frames, *texts)}
        return plain | {name: getattr(self, name).to_dicts() for name in frames}


def headings_of(summary: InsideSummary) -> dict[str, str]:
    """The shown columns of a summary with their headings, by the unit of its times."""
    return {re.sub("_ns$", f"_{summary.unit}", name): text for name, text in _HEADINGS.items()}


def inside_lines(summary: InsideSummary, path: str = "") -> tuple[str, str]:
    """The line about the launch, which begins with the path if there is one, and the line about the SMs."""
    named = "".join(f"{name}: " for name in (path, summary.kernel) if name)
    head = f"{named}{format_count(summary.traces)} traces of {format_count(summary.blocks)} blocks, "
    idle = "" if summary.idle_sms is None else f", {summary.idle_sms} ran nothing"
    ran = f"{summary.sms.height} SMs ran something{idle}; " if not summary.sms.is_empty() else ""
    span, spread, waves = summary.span_ns, summary.start_spread_ns, summary.waves
    tail, tail_idle = summary.tail_ns, summary.tail_idle
    if span is None or spread is None or waves is None or tail is None or tail_idle is None:
        below = f"{ran}starts on different SMs cannot be compared in cycles"
        return f"{head}times in cycles: the rate of the SM clock is unknown", below
    head += f"{format_ns(span)} from the first start to the last end"
    below = f"blocks began within {format_ns(spread)}, {waves:.2f} waves"
    if not summary.sms.is_empty():
        below += (
            f"; {ran}tail {format_ns(tail)},"
            f" {format_share(tail_idle, 1)} of it idle; busiest SM"
            f" {summary.imbalance:.2f} times the mean"
        )
    return head, below


def summarize(decoded: Decoded) -> InsideSummary:
    """Summarizes one kernel launch.

    Raises:
        MissingData: nothing was traced.
    """
    traces, ranges = decoded.as_ns(decoded.traces), decoded.as_ns(decoded.ranges)
    if traces.is_empty():
        raise MissingData("all traces of the buffer are empty: the kernel did not run, or is not instrumented")
    first, last = _int(traces["start_ns"].min()), _int(traces["end_ns"].max())
    trace_ns = _int((traces["end_ns"] - traces["start_ns"]).sum())
    sms = _multiprocessors(traces, first, last)
    starts = traces.group_by("block").agg(pl.col("start_ns").min())["start_ns"]
    ghz = traces["clock_ghz"].median()
    of_device = decoded.description.launch.get("multiprocessors")
    in_ns = decoded.unit == "ns"
    return InsideSummary(
        kernel=decoded.description.kernel,
        rows=decoded.in_unit(_rows(ranges, trace_ns)),
        instants=_instants(ranges),
        sms=sms if in_ns else sms.select("sm", "blocks", "traces"),
        unit=decoded.unit,
        traces=traces.height,
        blocks=traces["block"].n_unique(),
        span_ns=last - first if in_ns else None,
        trace_ns=trace_ns if in_ns else None,
        start_spread_ns=_int(starts.max()) - _int(starts.min()) if in_ns else None,
        **(_tail(sms, last - first) if in_ns else {"tail_ns": None, "tail_idle": None}),
        waves=_waves(traces) if in_ns else None,
        imbalance=_imbalance(sms),
        idle_sms=max(of_device - sms.height, 0) if isinstance(of_device, int) and sms.height else None,
        clock_ghz=ghz if isinstance(ghz, float) else None,
        clock_sources=_counts(traces["clock_source"]),
        states=_counts(traces["state"]),
        dropped=_int(traces["dropped"].sum()),
        overhead_cycles=decoded.overhead_cycles,
        notes=decoded.notes,
        warnings=decoded.warnings,
    )


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _counts(column: pl.Series) -> dict[str, int]:
    counted = column.cast(pl.String).value_counts(sort=True, name="count")
    return dict(counted.iter_rows())


def _rows(ranges: pl.DataFrame, trace_ns: int) -> pl.DataFrame:
    lasting = ranges.filter(pl.col("kind") == "range")
    closed = lasting.filter("closed")
    net = pl.col("net_ns")
    per_name = closed.group_by("name").agg(
        count=pl.len(),
        total_ns=net.sum(),
        mean_ns=net.mean(),
        **{column: net.quantile(q, "linear") for column, q in _QUANTILES.items()},
        min_ns=net.min(),
        max_ns=net.max(),
        recorded_ns=pl.col("duration_ns").sum(),
        sms=pl.col("sm").drop_nulls().n_unique(),
    )
    means = closed.drop_nulls("sm").group_by("name", "sm").agg(mean=net.mean())
    spread = means.group_by("name").agg(sm_low_ns=pl.col("mean").min(), sm_high_ns=pl.col("mean").max())
    unclosed = lasting.filter(~pl.col("closed")).group_by("name").agg(unclosed=pl.len())
    names = lasting.select(pl.col("name").unique())
    joined = (
        names.join(per_name, on="name", how="left")
        .join(spread, on="name", how="left")
        .join(unclosed, on="name", how="left")
    )
    return (
        joined.with_columns(
            pl.col("name").cast(pl.String),
            pl.col("count", "unclosed", "sms", "recorded_ns").fill_null(0),
            pl.col("total_ns").fill_null(0.0),
        )
        .with_columns(share=pl.col("total_ns") / trace_ns if trace_ns else pl.lit(0.0))
        .sort("total_ns", "name", descending=[True, False])
        .select(
            "name", "count", "total_ns", "share", "mean_ns", "p50_ns", "p90_ns", "p99_ns", "min_ns",
            "max_ns", "sm_low_ns", "sm_high_ns", "sms", "recorded_ns", "unclosed",
        )
    )  # fmt: skip


def _instants(ranges: pl.DataFrame) -> pl.DataFrame:
    chosen = ranges.filter(pl.col("kind") == "instant")
    counted = chosen.group_by("name").agg(count=pl.len()).with_columns(pl.col("name").cast(pl.String))
    return counted.sort("name")


def _multiprocessors(traces: pl.DataFrame, first: int, last: int) -> pl.DataFrame:
    """Load of each SM; empty if the buffer's layout does not record SM ids."""
    located = traces.drop_nulls("sm")
    per_sm = (
        located.group_by("sm")
        .agg(
            blocks=pl.col("block").n_unique(),
            traces=pl.len(),
            start_ns=pl.col("start_ns").min() - first,
            end_ns=pl.col("end_ns").max() - first,
        )
        .sort("sm")
    )
    number = np.searchsorted(per_sm["sm"].to_numpy(), located["sm"].to_numpy()).astype(np.int64)
    busy = union_lengths(number, located["start_ns"].to_numpy(), located["end_ns"].to_numpy(), per_sm.height)
    return per_sm.with_columns(
        pl.Series("busy_ns", busy, pl.Int64), pl.Series("idle_ns", last - first - busy, pl.Int64)
    ).select("sm", "blocks", "traces", "busy_ns", "idle_ns", "start_ns", "end_ns")


def _tail(sms: pl.DataFrame, span_ns: int) -> dict[str, Any]:
    if sms.is_empty():
        return {"tail_ns": 0, "tail_idle": 0.0}
    tail = span_ns - _int(sms["end_ns"].min())
    idle = (span_ns - sms["end_ns"]).mean()
    share = idle / tail if tail and isinstance(idle, float) else 0.0
    return {"tail_ns": tail, "tail_idle": share}


def _waves(traces: pl.DataFrame) -> float:
    blocks = traces.group_by("block").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
    ends = np.maximum(blocks["end_ns"].to_numpy(), blocks["start_ns"].to_numpy() + 1)
    ones = np.ones(blocks.height, np.int64)
    _, _, running = levels(blocks["start_ns"].to_numpy(), ends, ones)
    return blocks.height / int(running.max(initial=1))


def _imbalance(sms: pl.DataFrame) -> float:
    mean = sms["busy_ns"].mean()
    return _int(sms["busy_ns"].max()) / mean if isinstance(mean, float) and mean else 1.0
