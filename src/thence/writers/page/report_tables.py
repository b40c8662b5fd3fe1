"""Result frames as the tables of the HTML report: columns with kinds, rows of plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.report.summary import IDLE_INSIDE, OVERLAPPED
from thence.model.kernel_names import clip
from thence.model.words import WORDS
from thence.units import format_count, format_ns, format_share
from thence.writers.text.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.report.summary import Summary

MAX_ROWS = 500
"""Most rows of one table; of further rows only the number is shown."""
MAX_NAME = 400
"""Most characters of one text."""
_OP_NAME = 120


@dataclass(frozen=True)
class Field:
    """One column of a table.

    Attributes:
        column: name of the column in the frame.
        title: heading.
        kind: how a value is shown: text, count, ns, share, bytes, gbps or number.
        bar: whether a bar next to the value shows its size.
    """

    column: str
    title: str
    kind: str
    bar: bool = False


# The columns of each table.
STREAM_FIELDS = (
    Field("rank", "rank", "count"),
    Field("device", "GPU", "count"),
    Field("stream", "stream", "count"),
    Field("busy_ns", "busy", "ns", bar=True),
    Field("concurrent_ns", "with another busy", "ns"),
)
ROOFLINE_FIELDS = (
    Field("total_ns", "total", "ns"),
    Field("headroom_ns", "headroom", "ns", bar=True),
    Field("share", "of headroom", "share"),
    Field("bound", "bound by", "text"),
    Field("tflops", "TFLOP/s", "number"),
    Field("flop_share", "with FLOP", "share"),
    Field("gbps", "GB/s", "gbps"),
    Field("peak_share", "of roofline", "share"),
    Field("modelled_share", "modelled", "share"),
    Field("count", "count", "count"),
)
MEMORY_FIELDS = (
    Field("bytes", "live", "bytes", bar=True),
    Field("share", "of the peak", "share"),
    Field("count", "allocations", "count"),
    Field("kind", "kind", "text"),
    Field("rank", "rank", "count"),
    Field("device", "GPU", "count"),
)
OUTSIDE_FIELDS = (
    Field("library", "library", "text"),
    Field("bytes", "live", "bytes", bar=True),
    Field("count", "allocations", "count"),
    Field("rank", "rank", "count"),
    Field("device", "GPU", "count"),
)
GROWTH_FIELDS = (
    Field("source", "line", "text"),
    Field("module", "module", "text"),
    Field("op", "operator", "text"),
    Field("bytes_per_step", "a step", "bytes", bar=True),
    Field("steps", "steps", "count"),
)
RECOMPUTE_FIELDS = (
    Field("module", "module", "text"),
    Field("saved_bytes", "saved", "bytes", bar=True),
    Field("activation_bytes", "activations", "bytes"),
    Field("forward_ns", "costs", "ns"),
)
IDLE_CAUSE_FIELDS = (
    Field("cause", "cause", "text"),
    Field("meaning", "what it means", "text"),
    Field("total_ns", "idle", "ns", bar=True),
    Field("share", "share", "share"),
    Field("count", "pieces", "count"),
)
IDLE_FIELDS = (
    Field("cause", "cause", "text"),
    Field("by", "by", "text"),
    Field("name", "name", "text"),
    Field("total_ns", "idle", "ns", bar=True),
    Field("share", "share", "share"),
    Field("count", "pieces", "count"),
)
IDLE_WAIT_FIELDS = (
    Field("name", "last call that waited", "text"),
    Field("place", "called at", "text"),
    Field("total_ns", "idle after it", "ns", bar=True),
    Field("share", "share", "share"),
    Field("count", "calls", "count"),
)
IDLE_LATE_FIELDS = (
    Field("rank", "rank", "count"),
    Field("device", "GPU", "count"),
    Field("wait_ns", "waited in collectives (busy time; computing or not)", "ns", bar=True),
)
SIZE_FIELDS = (
    Field("collective", "collective", "text"),
    Field("bytes", "size", "bytes"),
    Field("group_size", "group", "count"),
    Field("link", "link", "text"),
    Field("count", "count", "count"),
    Field("transfer_bus_gbps_median", "transfer, bus GB/s", "gbps", bar=True),
    Field("transfer_bus_gbps_max", "best", "gbps"),
    Field("transfer_bus_gbps_std", "std", "gbps"),
    Field("bus_gbps_mean", "whole kernel", "gbps"),
    Field("exposed_ns", "exposed", "ns"),
    Field("hidden_ns", "hidden", "ns"),
    Field("overlapped_ns", "overlapped", "ns"),
    Field("wait_ns_mean", "mean longest wait", "ns"),
    Field("wait_ns_max", "longest", "ns"),
    Field("kernel", "kernel without a description", "text"),
)
LAST_ARRIVAL_FIELDS = (
    Field("who", "last arrivals", "text"),
    Field("last", "collectives", "count"),
    Field("instances", "of", "count"),
    Field("waited_ns", "others waited", "ns", bar=True),
    Field("waited_device_ns", "summed over GPUs", "ns"),
    Field("late_ns_mean", "mean after first", "ns"),
    Field("late_ns_max", "largest", "ns"),
)
GAIN_FIELDS = (
    Field("change", "change", "text"),
    Field("before_ns", "step", "ns"),
    Field("after_ns", "would take", "ns"),
    Field("gain_ns", "gain", "ns", bar=True),
    Field("gain_share", "of a step", "share"),
    Field("low_share", "at least", "share"),
    Field("high_share", "at most", "share"),
)
PROGRAM_FIELDS = (
    Field("name", "program", "text"),
    Field("executions", "runs", "count"),
    Field("span_ns_total", "span", "ns", bar=True),
    Field("share", "share", "share"),
    Field("busy_ns_total", "busy", "ns"),
    Field("span_ns_mean", "mean span", "ns"),
    Field("span_ns_std", "std", "ns"),
    Field("thunks_mean", "thunks", "number"),
    Field("thunks_std", "std", "number"),
    Field("idle_inside_ns", "idle inside", "ns"),
    Field("idle_between_ns", "idle between", "ns"),
    Field("launch_latency_ns_mean", "launch latency", "ns"),
)
COMPILE_FIELDS = (
    Field("name", "phase", "text"),
    Field("count", "ranges", "count"),
    Field("self_ns", "wall time", "ns", bar=True),
    Field("share", "share", "share"),
    Field("total_ns", "with phases inside", "ns"),
)
SPREAD_FIELDS = (
    Field("operation", "computation", "text"),
    Field("program", "program", "text"),
    Field("count", "count", "count"),
    Field("mean_ns", "mean", "ns"),
    Field("std_ns", "std", "ns"),
    Field("spread", "spread", "share", bar=True),
)


def frame_data(frame: pl.DataFrame, fields: Sequence[Field], note: str = "", most: int = MAX_ROWS) -> dict[str, Any]:
    """A table of the page as JSON values.

    Args:
        frame: the rows, in the order in which they are shown.
        note: one sentence below the table.
        most: most rows.
    """
    shown = frame.head(most)
    hidden = frame.height - shown.height
    notes = [note] if note else []
    if hidden:
        notes.append(f"{format_count(hidden)} more rows are not in this page")
    return {
        "columns": [_column(f) for f in fields],
        "rows": [list(row) for row in zip(*(_values(shown[f.column], f.kind) for f in fields), strict=True)],
        "note": "; ".join(notes),
    }


def _column(field: Field) -> dict[str, Any]:
    """A column's heading, and what its word means, if `WORDS` explains it: the page shows that on hover."""
    explained = {"meaning": WORDS[field.title]} if field.title in WORDS else {}
    return {"title": field.title, "kind": field.kind, "bar": field.bar} | explained


def summary_data(summary: Summary) -> dict[str, Any]:
    """A summary as a table of the page; kernels have their full names in addition to the short names."""
    fields = (
        Field("short_name", summary.heading, "text"),
        Field("count", "count", "count"),
        Field("total_ns", "total", "ns", bar=True),
        Field("share", "share", "share"),
        Field("mean_ns", "mean", "ns"),
        *_exposed_field(summary),
        *_backward_field(summary),
        *((Field("op_name", "op_name", "text"),) if "op_name" in summary.rows.columns else ()),
    )
    left = summary.rows.slice(MAX_ROWS)
    rest = int(left["total_ns"].sum())
    notes = [f"the rest takes {format_ns(rest)} ({format_share(rest, summary.sum_ns)})"] * bool(rest)
    if summary.overlapped_ns:
        notes.append(f"{OVERLAPPED}: {format_ns(summary.overlapped_ns)} of the busy time")
    if summary.idle_inside_ns is not None:
        notes.append(f"{IDLE_INSIDE}: {format_ns(summary.idle_inside_ns)}")
    rows = summary.rows
    if "op_name" in rows.columns:  # long for instructions that XLA merged: it lists every part
        names = [name and clip(name, _OP_NAME) for name in rows["op_name"]]
        rows = rows.with_columns(op_name=pl.Series(names, dtype=pl.String))
    data = frame_data(rows, fields, "; ".join(notes))
    full = summary.rows.head(MAX_ROWS)
    if summary.by in ("kernel", "source"):
        data["full"] = _values(full["name"], "text")
    data["muted"] = [not attributed for attributed in full["attributed"]]
    return data


def _exposed_field(summary: Summary) -> tuple[Field, ...]:
    """The column of exposed time, if any work overlaps."""
    return (Field("exposed_ns", "exposed", "ns"),) if summary.overlapped_ns else ()


def _backward_field(summary: Summary) -> tuple[Field, ...]:
    """The column of the backward pass, if there is one; a table by phase shows it as a row."""
    shown = summary.by != "phase" and summary.rows["backward_ns"].max()
    return (Field("backward_ns", "backward", "ns"),) if shown else ()


def folded_data(summary: Summary, folded: pl.DataFrame) -> dict[str, Any]:
    """The rows of a summary with equal layers of a model as one row, as a table of the page."""
    fields = (
        Field("name", summary.heading, "text"),
        Field("layers", "layers", "count"),
        Field("count", "count", "count"),
        Field("total_ns", "total", "ns", bar=True),
        Field("share", "share", "share"),
        *_exposed_field(summary),
        *_backward_field(summary),
        Field("layer_min_ns", "per layer, least", "ns"),
        Field("layer_median_ns", "median", "ns"),
        Field("layer_max_ns", "largest", "ns"),
        Field("differs", "differs most", "text"),
        Field("differs_share", "by", "share"),
    )
    note = "* stands for the number of a layer"
    if summary.idle_inside_ns is not None:
        note += f"; {IDLE_INSIDE}: {format_ns(summary.idle_inside_ns)}"
    data = frame_data(folded, fields, note)
    return data | {"muted": [not held for held in folded["attributed"].head(MAX_ROWS)]}


def tree_data(summary: Summary) -> dict[str, Any]:
    """The parts of a model as a tree, as a table of the page; names are indented by their level."""
    nodes = summary.tree()
    indented = pl.concat_str(pl.lit("\u2003").repeat_by(pl.col("depth") - 1).list.join(""), pl.col("part"))
    fields = (
        Field("part", summary.heading, "text"),
        Field("layers", "layers", "count"),
        Field("count", "count", "count"),
        Field("total_ns", "total, with everything inside", "ns", bar=True),
        Field("share", "share", "share"),
        Field("self_ns", "itself", "ns"),
        *_backward_field(summary),
    )
    data = frame_data(nodes.with_columns(part=indented), fields)
    shown = nodes.head(MAX_ROWS)
    return data | {"full": _values(shown["name"], "text"), "muted": [not held for held in shown["attributed"]]}


def _values(column: pl.Series, kind: str) -> list[Any]:
    if kind == "text":
        texts = column.cast(pl.String).to_list()
        return [None if text is None else printable(text[:MAX_NAME]) for text in texts]
    if column.dtype.is_float():
        column = column.round_sig_figs(6)
        finite = column.is_finite().fill_null(value=False)
        return [value if ok else None for value, ok in zip(column, finite, strict=True)]
    return column.to_list()
