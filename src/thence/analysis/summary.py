"""Where the GPU time went: span, busy, sum, and a table by any kind of place.

span   from the first start to the last end, per device, summed over devices
busy   time in which at least one activity ran (union of intervals), per device, summed
idle   span - busy
sum    plain sum of durations; larger than busy where streams overlap
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import MissingData, UsageError
from thence.model.intervals import union_lengths
from thence.model.kernel_names import short_names
from thence.model.tables import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.model.tables import Meta, Tables
    from thence.units import Ns

__all__ = ["BY", "Summary", "summarize"]

ATTRIBUTED = ("label", "module", "op", "source", "phase", "step")
"""Kinds of places whose share of the GPU time every summary states."""

_FROM_GPU = {
    "kernel": pl.col("name").cast(pl.String),
    "kind": pl.col("kind").cast(pl.String),
    "rank": pl.format("rank {}", "rank"),
    "device": pl.format("rank {} device {}", "rank", "device"),
    "stream": pl.format("rank {} device {} stream {}", "rank", "device", "stream"),
}
BY = (
    "kernel",
    "label",
    "module",
    "op",
    "ops",
    "source",
    "stack",
    "phase",
    "step",
    "collective",
    *tuple(_FROM_GPU)[1:],
)
"""What a summary can be made by."""


@dataclass(frozen=True)
class Summary:
    """Totals of a trace, and its GPU time by one kind of place. All times are ns.

    Attributes:
        meta: facts of the trace.
        ranks, devices: how many have device activities.
        span_ns, busy_ns, sum_ns: see the module.
        counts: activities of each kind.
        streams: streams with at least one activity.
        kind_ns: sum of durations of each kind.
        attributed_ns: sum of durations that have a place of each kind.
        unattributed_ns: for each kind, the reasons for the rest and their sums.
        by: what the rows are.
        rows: ``name``, ``short_name`` (of kernels; of others the name), ``attributed`` (False where the
            name is the reason why there is none), ``count``, ``total_ns``, ``mean_ns``, ``share`` (of
            sum_ns), ``backward_ns`` (part of total_ns that ran for the backward pass), ordered by
            total_ns, largest first.
    """

    meta: Meta
    ranks: int
    devices: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    counts: Mapping[str, int]
    streams: int
    kind_ns: Mapping[str, Ns]
    attributed_ns: Mapping[str, Ns]
    unattributed_ns: Mapping[str, Mapping[str, Ns]]
    by: str
    rows: pl.DataFrame

    @property
    def idle_ns(self) -> Ns:
        """Time within the span in which nothing ran."""
        return self.span_ns - self.busy_ns

    def _repr_html_(self) -> str:
        from thence.writers.html_table import summary_html

        return summary_html(self)

    def to_json(self) -> dict[str, Any]:
        """The summary as the command line prints it with ``--format json``."""
        return {
            "inputs": list(self.meta.inputs),
            "ranks": self.ranks,
            "devices": self.devices,
            "span_ns": self.span_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "sum_ns": self.sum_ns,
            "counts": dict(self.counts),
            "kind_ns": dict(self.kind_ns),
            "attributed_ns": dict(self.attributed_ns),
            "unattributed_ns": {
                kind: dict(reasons) for kind, reasons in self.unattributed_ns.items()
            },
            "by": self.by,
            "rows": self.rows.to_dicts(),
            "warnings": list(self.meta.warnings),
        }


def summarize(
    tables: Tables, places: pl.DataFrame, collectives: pl.DataFrame, by: str = "kernel"
) -> Summary:
    """The summary of a trace.

    Args:
        tables: of the trace.
        places: place of every device activity, as `thence.attribution.places.attribute` gives them.
        collectives: described collectives, each with its device activity.
        by: one of `BY`.

    Raises:
        UsageError: ``by`` is none of them.
        MissingData: the trace holds no device activity, or no place of that kind.
    """
    if by not in BY:
        raise UsageError(f"cannot summarise by {by!r}; choose one of {', '.join(BY)}")
    gpu = tables.gpu
    if gpu.is_empty():
        raise MissingData(_no_activity(tables))
    total = int(gpu["duration"].sum())
    span, busy = _span_and_busy(gpu)
    kinds = gpu.group_by("kind").agg(pl.len(), ns=pl.col("duration").sum())
    counted = {kind: (n, ns) for kind, n, ns in kinds.iter_rows()}
    shown = [kind for kind in KINDS if kind != "thunk" or kind in counted]
    return Summary(
        meta=tables.meta,
        ranks=gpu["rank"].n_unique(),
        devices=gpu.select("rank", "device").n_unique(),
        span_ns=span,
        busy_ns=busy,
        sum_ns=total,
        counts={kind: counted.get(kind, (0, 0))[0] for kind in shown},
        streams=gpu.select("rank", "device", "stream").n_unique(),
        kind_ns={kind: counted.get(kind, (0, 0))[1] for kind in shown},
        attributed_ns={
            kind: int(gpu["duration"].filter(places[kind].is_not_null()).sum())
            for kind in ATTRIBUTED
        },
        unattributed_ns={kind: _reasons(gpu, places, kind) for kind in ATTRIBUTED},
        by=by,
        rows=_with_short_names(_rows(_keyed(gpu, places, collectives, by), total)),
    )


def _no_activity(tables: Tables) -> str:
    inputs = ", ".join(tables.meta.inputs)
    if tables.meta.warnings:  # a file that is cut short may have lost its GPU rows
        return f"{inputs}: no GPU activity could be read; {'; '.join(tables.meta.warnings)}"
    if tables.host.is_empty():
        return f"{inputs}: the trace is empty"
    return (
        f"{inputs}: the trace holds {tables.host.height:,} host ranges but no GPU activity; record with "
        "ProfilerActivity.CUDA, and make sure that no other profiler held the GPU's counters (CUPTI) meanwhile"
    )


def _span_and_busy(gpu: pl.DataFrame) -> tuple[Ns, Ns]:
    start = gpu["start"].to_numpy()
    end = start + gpu["duration"].to_numpy()
    group = (
        gpu.select(pl.struct("rank", "device").rank("dense").cast(pl.Int64) - 1)
        .to_series()
        .to_numpy()
    )
    groups = int(group.max()) + 1
    busy = union_lengths(group, start, end, groups)
    first = np.full(groups, np.iinfo(np.int64).max)
    last = np.full(groups, np.iinfo(np.int64).min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return int((last - first).sum()), int(busy.sum())


def _reasons(gpu: pl.DataFrame, places: pl.DataFrame, kind: str) -> dict[str, Ns]:
    missing = places[kind].is_null()
    reasons = pl.DataFrame(
        {"reason": places[f"{kind}_rule"].filter(missing), "ns": gpu["duration"].filter(missing)}
    )
    grouped = reasons.group_by("reason").agg(pl.col("ns").sum()).sort("ns", descending=True)
    return {str(reason): int(ns) for reason, ns in grouped.iter_rows()}


def _keyed(
    gpu: pl.DataFrame, places: pl.DataFrame, collectives: pl.DataFrame, by: str
) -> pl.DataFrame:
    """Each activity with the name of its row (null: none), and the reason where it has none."""
    base = pl.DataFrame({"duration": gpu["duration"], "phase": places["phase"].cast(pl.String)})
    reason = pl.lit(None, pl.String)
    if by in places.columns:
        return base.with_columns(key=places[by], reason=places[f"{by}_rule"])
    if by == "collective":
        named = collectives.select("gpu", key="collective").unique("gpu", keep="first")
        keys = pl.select(gpu=pl.int_range(gpu.height, dtype=pl.Int32)).join(
            named, on="gpu", how="left", maintain_order="left"
        )
        if named.is_empty():
            raise MissingData(
                "the trace describes no collectives; torch 2.1 and newer record them for NCCL"
            )
        return base.with_columns(key=keys["key"], reason=pl.lit("no collective"))
    key = gpu["name"] if by == "kernel" else gpu.select(_FROM_GPU[by]).to_series()
    return base.with_columns(key=key, reason=reason)


def _rows(keyed: pl.DataFrame, total: Ns) -> pl.DataFrame:
    grouped = (
        keyed.group_by("key", pl.when(pl.col("key").is_null()).then("reason").alias("why"))
        .agg(
            pl.len().alias("count"),
            total_ns=pl.col("duration").sum(),
            backward_ns=pl.col("duration").filter(pl.col("phase") == "backward").sum(),
        )
        .with_columns(
            name=pl.coalesce(
                pl.col("key").cast(pl.String), pl.format("[{}]", pl.col("why").cast(pl.String))
            ),
            attributed=pl.col("key").is_not_null(),
            mean_ns=pl.col("total_ns") / pl.col("count"),
            share=pl.col("total_ns") / max(total, 1),
        )
        .sort("total_ns", "name", descending=[True, False])
    )
    return grouped.select(
        "name", "attributed", "count", "total_ns", "mean_ns", "share", "backward_ns"
    )


def _with_short_names(rows: pl.DataFrame) -> pl.DataFrame:
    """A kernel's name as short as it stays unambiguous; other names are short enough, and no C++."""
    short = short_names(rows["name"].to_list())
    return rows.with_columns(
        short_name=pl.Series([short[name] for name in rows["name"]], dtype=pl.String)
    )
