"""Summaries of single ranks as tables, and the summary of all ranks from these tables.

Every figure of a `Summary` is a sum over ranks, or follows from such sums. So a job is summarised rank by rank,
which needs only the memory of one rank, and the result equals that of `summarize` on all ranks together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.activity_rooflines import BOUND_SUMS, WORK_SUMS, summed_work
from thence.analysis.grouping.layers import folded_rows
from thence.analysis.grouping.time_by_place import general_heading
from thence.analysis.rank_tables import RANK, rank_table
from thence.analysis.report.summary import Summary, finished_rows
from thence.model.places import BY, LAYERED
from thence.model.reasons import Reason, reason_of
from thence.model.tables import KINDS, Column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.analysis.rank_tables import Frames
    from thence.model.selection import Selection
    from thence.model.tables import Meta, Table

MERGED_BY = frozenset(BY) - {"hlo"}
"""Kinds of place that can be merged. HLO instructions cannot: their further columns are values, not sums."""

_NS = Column("total_ns", pl.Int64(), "sum of durations, ns")
_COUNT = Column("count", pl.Int64(), "device activities")
_BY = Column("by", pl.String(), "what the rows of the table are by")

_TABLES = (
    rank_table(
        "totals",
        "one rank",
        (
            Column("ranks", pl.Int64(), "ranks with device activities"),
            Column("devices", pl.Int64(), "devices with activities"),
            Column("streams", pl.Int64(), "streams with activities"),
            Column("span_ns", pl.Int64(), "first start to last end, per device, summed, ns"),
            Column("busy_ns", pl.Int64(), "union of all activities, per device, summed, ns"),
            Column("sum_ns", pl.Int64(), "sum of durations, ns"),
            Column("windows", pl.Int64(), "windows of selected steps; null if none are selected"),
            Column("labels_joined", pl.Boolean(), "whether a label of a CUDA graph was joined"),
            Column("xla", pl.Boolean(), "whether there are XLA programs"),
        ),
        required=("ranks", "devices", "streams", "span_ns", "busy_ns", "sum_ns", "labels_joined", "xla"),
    ),
    rank_table(
        "kinds",
        "one kind of activity of one rank",
        (Column("kind", pl.String(), "as in gpu"), _COUNT, _NS),
        required=("kind", "count", "total_ns"),
    ),
    rank_table(
        "stated",
        "one reason for time without a place, or the time with one",
        (
            Column("place", pl.String(), "kind of place"),
            Column("code", pl.String(), "of the reason; null: time that has a place"),
            _NS,
        ),
        required=("place", "total_ns"),
    ),
    rank_table(
        "details",
        "one sentence about a CUDA graph that could not be matched",
        (Column("text", pl.String(), "the sentence"), _COUNT, _NS),
        required=("text", "count", "total_ns"),
    ),
    rank_table(
        "divisions",
        "one table by some kind of place",
        (
            _BY,
            Column("heading", pl.String(), "what the rows are, in words"),
            Column("overlapped_ns", pl.Int64(), "as in `Summary`"),
            Column("idle_inside_ns", pl.Int64(), "as in `Summary`; null where that is None"),
        ),
        required=("by", "heading", "overlapped_ns"),
    ),
    rank_table(
        "separate",
        "what such a table shows in separate rows",
        (
            _BY,
            Column("code", pl.String(), "code in thence.model.reasons"),
            Column("executions", pl.Int64(), "number of executions of XLA programs"),
            _COUNT,
            _NS,
        ),
        required=("by", "code", "executions", "count", "total_ns"),
    ),
    rank_table(
        "rows",
        "one row of such a table",
        (
            _BY,
            Column("name", pl.String(), "the place, or why there is none"),
            Column("attributed", pl.Boolean(), "whether it is a place"),
            Column("reason", pl.String(), "code of why there is no place; null for a place"),
            Column("position", pl.String(), "by source: function or line; else null"),
            _COUNT,
            _NS,
            Column("exposed_ns", pl.Int64(), "time in which no other work ran, ns"),
            Column("backward_ns", pl.Int64(), "part of total_ns whose phase is backward, ns"),
            Column("flop", pl.Float64(), "FLOP of the work with a roofline, a whole number; null: unknown"),
            Column("flop_ns", pl.Int64(), "time of the work with known FLOP, ns; null: none"),
            Column("bytes", pl.Int64(), "bytes of the work with a roofline; null: unknown"),
            Column("bytes_ns", pl.Int64(), "time of the work with known bytes, ns; null: none"),
            Column("modelled_ns", pl.Int64(), "time of the work with a roofline, ns; null: none"),
            Column("headroom_ns", pl.Int64(), "time of that work beyond its roofline, ns; null: unknown"),
            *(Column(name, pl.Int64(), "time of that work by what decides its roofline, ns") for name in BOUND_SUMS),
        ),
        required=("by", "name", "attributed", "count", "total_ns", "exposed_ns", "backward_ns"),
    ),
)
REPORT_TABLES = {table.name: table for table in _TABLES}
"""The tables that `summary_tables` returns; all columns of type Int64, and flop, add up over ranks."""

_SUMMED = tuple(
    (table, [c.name for c in table.columns if c.dtype == pl.Int64() and c.name not in WORK_SUMS])
    for table in _TABLES
    if table.name != "divisions"
)


def summary_tables(summaries: Sequence[Summary], rank: int | None, *, labels_joined: bool, xla: bool) -> Frames:
    """Summaries of one trace as the tables `REPORT_TABLES`.

    Args:
        summaries: of the trace, by different kinds of place.
        rank: of the trace; None if it has several.
        labels_joined: whether the trace holds labels of CUDA graphs.
        xla: whether it holds XLA programs.
    """
    first = summaries[0]
    ranks = {"ranks": first.ranks, "devices": first.devices, "streams": first.streams}
    times = {"span_ns": first.span_ns, "busy_ns": first.busy_ns, "sum_ns": first.sum_ns}
    stated: list[tuple[str, str | None, int]] = [(kind, None, ns) for kind, ns in first.attributed_ns.items()]
    stated += [(k, r.code, r.total_ns) for k, reasons in first.unattributed.items() for r in reasons]
    rows: dict[str, list[Any]] = {
        "totals": [(*ranks.values(), *times.values(), first.windows, labels_joined, xla)],
        "kinds": [(kind, count, first.kind_ns[kind]) for kind, count in first.counts.items()],
        "stated": stated,
        "divisions": [(s.by, s.heading, s.overlapped_ns, s.idle_inside_ns) for s in summaries],
    }
    frames = {t.name: pl.DataFrame(rows[t.name], _without_rank(t), orient="row") for t in _TABLES if t.name in rows}
    frames["details"] = first.details
    frames["separate"] = pl.concat([_keyed(s.separate, s.by) for s in summaries])
    frames["rows"] = pl.concat([_keyed(s.rows, s.by) for s in summaries], how="diagonal_relaxed")
    return {table.name: _shaped(frames[table.name], table, rank) for table in _TABLES}


def _keyed(frame: pl.DataFrame, by: str) -> pl.DataFrame:
    texts = frame.with_columns(pl.col(pl.Enum, pl.Categorical).cast(pl.String))
    return texts.with_columns(by=pl.lit(by))


def _without_rank(table: Table) -> dict[str, Any]:
    return {name: dtype for name, dtype in table.schema.items() if name != RANK.name}


def _shaped(frame: pl.DataFrame, table: Table, rank: int | None) -> pl.DataFrame:
    frame = frame.with_columns(pl.lit(rank, RANK.dtype).alias(RANK.name))
    lacking = [pl.lit(None, c.dtype).alias(c.name) for c in table.columns if c.name not in frame.columns]
    return frame.with_columns(lacking).select(*table.schema).cast(table.schema)  # type: ignore[arg-type]


def folded(frames: Mapping[str, pl.DataFrame]) -> Frames:
    """The tables of several ranks added up: one row for each place, whose rank is null."""
    result = {}
    for table, summed in _SUMMED:
        keys = [column.name for column in table.columns if column.name not in (*summed, *WORK_SUMS, RANK.name)]
        work = summed_work() if table.name == "rows" else []
        result[table.name] = frames[table.name].group_by(keys, maintain_order=True).agg(pl.col(summed).sum(), *work)
    known = pl.col("idle_inside_ns").null_count() == 0
    same = pl.col("heading").n_unique() == 1
    divisions = frames["divisions"].group_by("by", maintain_order=True)
    result["divisions"] = divisions.agg(
        heading=pl.when(same).then(pl.col("heading").first()),
        overlapped_ns=pl.col("overlapped_ns").sum(),
        idle_inside_ns=pl.when(known).then(pl.col("idle_inside_ns").sum()),
    )
    return {table.name: _shaped(result[table.name], table, None) for table in _TABLES}


def merged_summary(frames: Mapping[str, pl.DataFrame], by: str, meta: Meta, selection: Selection) -> Summary:
    """The summary of all ranks in the tables, as `summarize` returns it for their trace.

    Args:
        frames: tables of one or several ranks, concatenated or `folded`; not empty.
        by: one of `MERGED_BY`, for which the tables hold rows.
        selection: which part of the ranks' traces was selected.
    """
    of_kind = {name: frame.filter(by=by) if "by" in frame.columns else frame for name, frame in frames.items()}
    sums = {name: frame.drop(RANK.name) for name, frame in folded(of_kind).items()}
    totals = sums["totals"].select(pl.col(pl.Int64).sum(), pl.col(pl.Boolean).any()).row(0, named=True)
    total = totals["sum_ns"]
    counted = {kind: (n, ns) for kind, n, ns in sums["kinds"].iter_rows()}
    shown = [kind for kind in KINDS if kind in counted]
    attributed = sums["stated"].filter(pl.col("code").is_null())
    heading = sums["divisions"]["heading"][0]
    rows = finished_rows(sums["rows"], by, total, ("position",) if by == "source" else ())
    return Summary(
        meta=meta,
        selection=str(selection),
        ranks=totals["ranks"],
        devices=totals["devices"],
        span_ns=totals["span_ns"],
        busy_ns=totals["busy_ns"],
        sum_ns=total,
        counts={kind: counted[kind][0] for kind in shown},
        streams=totals["streams"],
        kind_ns={kind: counted[kind][1] for kind in shown},
        attributed_ns=dict(attributed.select("place", "total_ns").iter_rows()),
        unattributed=_reasons(sums["stated"], attributed["place"].to_list(), meta, total, totals["labels_joined"]),
        details=sums["details"].sort("total_ns", "text", descending=[True, False]),
        by=by,
        heading=heading if heading is not None else general_heading(by),
        separate=sums["separate"].drop("by").sort("total_ns", "code", descending=[True, False]),
        rows=rows,
        overlapped_ns=sums["divisions"]["overlapped_ns"][0],
        idle_inside_ns=sums["divisions"]["idle_inside_ns"][0],
        folded=folded_rows(rows, total) if by in LAYERED else None,
        idle_unknown=selection.idle_unknown,
        windows=totals["windows"] if selection.steps is not None else None,
    )


def _reasons(
    stated: pl.DataFrame,
    kinds: Sequence[str],
    meta: Meta,
    total: int,
    labels_joined: bool,  # noqa: FBT001 - a column
) -> dict[str, tuple[Reason, ...]]:
    """For every kind of place, the time without a place by reason, the largest first."""
    ordered = stated.drop_nulls("code").sort("total_ns", "code", descending=[True, False])
    return {
        kind: tuple(
            reason_of(code, ns, total, meta.formats, labels_joined=labels_joined, accelerators=meta.accelerators)
            for code, ns in ordered.filter(place=kind).select("code", "total_ns").iter_rows()
        )
        for kind in kinds
    }
