"""Summary of a trace: span, busy, idle and summed GPU time, and a table by one kind of place.

span   from the first start to the last end, per device, summed over devices
busy   time in which at least one activity ran (union of intervals), per device, summed
idle   span - busy
sum    plain sum of durations; larger than busy where streams overlap

If steps, a program or a time are selected, the span is the length of their windows, and busy is the time in them in
which any work ran, selected or not (`thence.analysis.selection.windows`). If other work is left out, by its name or as
warm-up, span and busy are those of the selected activities, and idle is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.activity_rooflines import BOUND_SUMS, USE, WORK_SUMS, summed_work, use_of_sums, work_of_parts
from thence.analysis.grouping.layers import folded_rows, tree_rows
from thence.analysis.grouping.time_by_place import (
    heading_of,
    name_of_place,
    separated_from_steady,
    split_by_weight,
    time_by_place,
)
from thence.analysis.idle.gaps import idle_inside_programs
from thence.analysis.no_device_work import no_device_work
from thence.analysis.selection.windows import covers_only_part, span_and_busy, windows_of_selection
from thence.analysis.soundness.findings import Soundness
from thence.errors import MissingData, UsageError
from thence.model.answer import Answer, TableView
from thence.model.attributed import once_per_trace
from thence.model.columns import at_once, group_sums
from thence.model.grouped_intervals import GroupedIntervals, numbered
from thence.model.intervals import levels, union_lengths, unions
from thence.model.kernel_names import MAX_SHORTENED, short_names
from thence.model.own_code import short_places
from thence.model.places import KINDS as PLACE_KINDS
from thence.model.places import LAYERED, STATED, STATED_XLA
from thence.model.reasons import CODES, SEPARATE, Reason, reason_of, text_of
from thence.model.tables import KINDS
from thence.model.thresholds import SHOWN_SHARE
from thence.model.totals import must
from thence.units import format_count, format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed
    from thence.model.tables import Meta
    from thence.units import Ns


IDLE_INSIDE = "GPU idle inside programs (not in the sum)"
"""Name of the row that shows `Summary.idle_inside_ns` next to a table."""
OVERLAPPED = "several rows at once"
"""Name of the row that shows `Summary.overlapped_ns` next to a table."""
_OF_HLO = frozenset(kind.name for kind in PLACE_KINDS if kind.origin == "hlo")
_ROW_COLUMNS = ("name", "attributed", "reason", "count", "total_ns", "mean_ns", "share", "exposed_ns", "backward_ns")
_WORK_COLUMNS = (*WORK_SUMS, *USE)
_SEPARATE = {"code": pl.String(), "executions": pl.Int64(), "count": pl.Int64(), "total_ns": pl.Int64()}
_OF_INSTRUCTIONS = ("program", "op_name", "source")
"""Columns of rows by HLO instruction in addition to the name."""
_PLACED = len(CODES)
"""Number of no code."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a trace or a part of it. All times are ns.

    Attributes:
        ranks, devices: number of ranks and devices that have device activities.
        streams: number of streams with at least one activity.
        span_ns, busy_ns, sum_ns: as the module docstring defines them.
        counts: number of activities of each kind of activity.
        kind_ns: sum of durations of each kind of activity.
    """

    ranks: int
    devices: int
    streams: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    counts: Mapping[str, int]
    kind_ns: Mapping[str, Ns]


@dataclass(frozen=True)
class Summary(Answer):
    """Totals of a trace, and its GPU time by one kind of place. All times are ns.

    Attributes:
        meta: facts of the trace.
        selection: which part of the trace was selected, in words; empty for the whole.
        ranks, devices: number of ranks and devices that have device activities.
        span_ns, busy_ns, sum_ns: as the module docstring defines them.
        counts: number of activities of each kind of activity.
        streams: number of streams with at least one activity.
        kind_ns: sum of durations of each kind of activity.
        attributed_ns: for each kind of place, the sum of durations that have such a place.
        unattributed: for each kind of place, the reasons for the rest of the time, the largest first.
        details: sentences about single CUDA graphs that could not be matched, each with its count of
            activities and their time; columns text, count, total_ns, the largest first.
        by: the kind of place of the rows.
        heading: ``by`` in words; by source, whether the rows are functions or lines.
        separate: work that tables of XLA traces keep in separate rows, the most time first: ``code`` (of
            `thence.model.reasons`), ``executions`` of programs, ``count`` (activities, including those outside of
            programs), ``total_ns``. Empty if there is none, and for rows by kind, rank, device or stream.
        rows: ``name``, ``short_name`` (of kernels; by source with paths as the program's own; of others the name),
            ``attributed`` (whether the row is a place), ``reason`` (code of why there is no place, which the name
            then spells out; null for a place), ``count``, ``total_ns``, ``mean_ns``, ``share`` (of sum_ns),
            ``exposed_ns`` (time in which no other work ran on the GPU), ``backward_ns`` (part of total_ns whose phase
            is backward), ``flop``, ``bytes``, ``modelled_ns`` (time) and ``headroom_ns`` (time beyond what the device
            allows) of the work that has a roofline (`thence.analysis.activity_rooflines`), ``flop_ns`` and
            ``bytes_ns`` (time of work with known FLOP, and bytes), the rest of `WORK_SUMS`, and `USE` of
            `thence.analysis.activity_rooflines.use_of_sums`, null where nothing is known, by source ``position``
            (whether the line number is that of a function or a line), and by hlo ``program``, ``op_name`` and
            ``source`` of the instruction (null where several instructions of that name differ in it), ordered by
            total_ns, largest first.
        overlapped_ns: time in which work of several rows ran on a GPU, or work that is not selected beside a row: with
            the ``exposed_ns`` of the rows, it adds up to the busy time of the selected work.
        idle_unknown: why idle time is unknown, as a part of a sentence; empty if it is known.
        windows: number of the windows that the span adds up, of steps on devices; None if no steps are selected.
        idle_inside_ns: for rows by parts of XLA programs (program, hlo, opcode, op_name): how long the GPU was idle
            inside the executions that the rows count, in no row and not in sum_ns; None for other rows, and where
            `idle_inside_programs` returns None.
        folded: for rows by module, label or op_name, these rows with equal layers of the model as one row, as
            `folded_rows` returns them; None for other rows. The sums are those of ``rows``.
        soundness: soundness of the whole trace; `summarize`, which may get only a part of the trace, leaves it
            empty, and `Trace.report` sets it.
    """

    meta: Meta
    selection: str
    ranks: int
    devices: int
    span_ns: Ns
    busy_ns: Ns
    sum_ns: Ns
    counts: Mapping[str, int]
    streams: int
    kind_ns: Mapping[str, Ns]
    attributed_ns: Mapping[str, Ns]
    unattributed: Mapping[str, tuple[Reason, ...]]
    details: pl.DataFrame
    by: str
    heading: str
    separate: pl.DataFrame
    rows: pl.DataFrame
    overlapped_ns: Ns = 0
    idle_inside_ns: Ns | None = None
    folded: pl.DataFrame | None = None
    idle_unknown: str = ""
    windows: int | None = None
    soundness: Soundness = field(default_factory=Soundness)

    def tree(self, depth: int | None = None, *, each: bool = False) -> pl.DataFrame:
        """The rows as a tree of the parts of the model, each part with the time of everything inside of it.

        `thence.analysis.grouping.layers.tree_rows` describes the columns.

        Args:
            depth: levels of the tree; None: all.
            each: whether every layer is a node of its own, instead of one node for all equal layers.

        Raises:
            UsageError: the rows are not by module, label or op_name.
        """
        if self.by not in LAYERED:
            raise UsageError(f"rows by {self.by} make no tree; choose one of {', '.join(LAYERED)}")
        return tree_rows(self.rows, self.by, self.sum_ns, depth, each=each)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was done with the inputs, and on the work in separate rows, one sentence each."""
        if self.separate.is_empty():
            return self.meta.notes
        parts = [
            f"{text_of(code).partition(':')[0].partition(',')[0]} {format_ns(ns)} "
            f"({format_share(ns, self.sum_ns)}, {format_count(executions)} executions)"
            for code, executions, _, ns in self.separate.iter_rows()
        ]
        note = (
            f"in separate rows, and part of the totals: {', '.join(parts)}; --warm-up keep treats them "
            "like the rest, --warm-up heuristic leaves them out of every figure"
        )
        return (*self.meta.notes, note)

    @property
    def idle_ns(self) -> Ns | None:
        """Time within the span in which nothing ran; None if it is unknown."""
        return None if self.idle_unknown else self.span_ns - self.busy_ns

    @property
    def of_steps(self) -> str:
        """The selected steps in words: ``2 steps``, ``1 step of 4 GPUs``; empty if no steps are selected."""
        if self.windows is None:
            return ""
        count = several(-(-self.windows // max(self.devices, 1)), "step")
        return count if self.devices == 1 else f"{count} of {several(self.devices, 'GPU')}"

    @property
    def idle_is(self) -> str:
        """How idle_ns is meant: exact, at most (work that ran is missing in the trace) or unknown."""
        return self.soundness.idle_is(unknown=bool(self.idle_unknown))

    def reasons(self) -> list[tuple[list[str], Ns, Reason]]:
        """Merges equal reasons of different kinds of place; largest time first.

        Returns:
            for each reason code: the kinds that have it, the least time among them (ns), and the `Reason`
            of the kind with the most time.
        """
        by_code: dict[str, list[tuple[str, Reason]]] = {}
        for kind, reasons in self.unattributed.items():
            for reason in reasons:
                if reason.total_ns:
                    by_code.setdefault(reason.code, []).append((kind, reason))
        merged = [
            (
                [kind for kind, _ in entries],
                min(reason.total_ns for _, reason in entries),
                max((reason for _, reason in entries), key=lambda reason: reason.total_ns),
            )
            for entries in by_code.values()
        ]
        return sorted(merged, key=lambda entries: -entries[2].total_ns)

    def about(self) -> tuple[str, ...]:
        """The inputs, and the totals."""
        totals = {"span": self.span_ns, "busy": self.busy_ns, "idle": self.idle_ns, "sum": self.sum_ns}
        texts = {n: "unknown" if ns is None else format_ns(ns) for n, ns in totals.items()}
        return ", ".join(self.meta.inputs), ", ".join(f"{name} {text}" for name, text in texts.items())

    def views(self) -> tuple[TableView, ...]:
        """The rows."""
        beside = {"op_name": "op_name"} if "op_name" in self.rows.columns else {}
        headings = {
            "short_name": f"GPU time by {self.heading}", "count": "count", "total_ns": "total", "mean_ns": "mean",
            "share": "share", "exposed_ns": "exposed",
        }  # fmt: skip
        return (TableView(self.rows, headings | beside, bar="total_ns", full="name"),)

    def remarks(self) -> Iterator[str]:
        """The idle time that is in no row, why it is unknown, and the reasons why time has no place."""
        if self.idle_unknown:
            yield f"idle time is unknown: {self.idle_unknown}"
        if self.idle_inside_ns is not None:
            yield f"{IDLE_INSIDE}: {format_ns(self.idle_inside_ns)}"
        for kinds, _, reason in self.reasons():
            yield f"{', '.join(kinds)}: {format_share(reason.total_ns, self.sum_ns)} {reason}"

    def known(self) -> dict[str, float]:
        """The attributed share of the time by kind of place."""
        return {kind: ns / max(self.sum_ns, 1) for kind, ns in self.attributed_ns.items()}

    def all_notes(self) -> tuple[str, ...]:
        """`remarks`, then what makes the trace unsound, notes and warnings."""
        warnings = (f"warning: {text}" for text in self.meta.warnings)
        return (*self.meta.left_out, *self.remarks(), *self.soundness.lines, *self.notes, *warnings)

    def document(self) -> dict[str, Any]:
        """`to_json`; notes and findings are in it."""
        return self.to_json()

    def to_frame(self) -> pl.DataFrame:
        """The rows, without the times from which ``bound`` follows."""
        return self.rows.drop(BOUND_SUMS)

    def self_check(self) -> None:
        """See `Answer`."""
        inputs = self.meta.inputs
        # In the windows of a selection, other work runs, too.
        most = self.span_ns if self.selection else min(self.span_ns, self.sum_ns)
        possible = 0 <= self.busy_ns <= most
        must(inputs, possible, "devices are busy for longer than they span, or than their work lasts")
        totals = self.rows["total_ns"]
        adds_up = int(totals.sum()) == self.sum_ns and (totals.is_empty() or int(str(totals.min())) >= 0)
        must(inputs, adds_up, f"the rows by {self.by} do not add up to the sum of all work")
        for kind, attributed in self.attributed_ns.items():
            rest = sum(reason.total_ns for reason in self.unattributed[kind])
            adds_up = attributed >= 0 and attributed + rest == self.sum_ns
            must(inputs, adds_up, f"the time with a {kind} and the time without do not add up to the sum")

    def to_json(self) -> dict[str, Any]:
        """The summary as the command line prints it with ``--format json``."""
        return {
            "inputs": list(self.meta.inputs),
            "selection": self.selection,
            "ranks": self.ranks,
            "devices": self.devices,
            "span_ns": self.span_ns,
            "busy_ns": self.busy_ns,
            "idle_ns": self.idle_ns,
            "idle_is": self.idle_is,
            "idle_unknown": self.idle_unknown,
            "sum_ns": self.sum_ns,
            "counts": dict(self.counts),
            "kind_ns": dict(self.kind_ns),
            "attributed_ns": dict(self.attributed_ns),
            "unattributed_ns": {
                kind: [{"code": r.code, "total_ns": r.total_ns, "text": r.text, "advice": r.advice} for r in reasons]
                for kind, reasons in self.unattributed.items()
            },
            "details": self.details.to_dicts(),
            "by": self.by,
            "separate": self.separate.to_dicts(),
            "rows": self.to_frame().to_dicts(),
            "folded": None if self.folded is None else self.folded.drop(BOUND_SUMS).to_dicts(),
            "overlapped_ns": self.overlapped_ns,
            "idle_inside_programs_ns": self.idle_inside_ns,
            "notes": [*self.meta.left_out, *self.notes],
            "warnings": list(self.meta.warnings),
            "soundness": self.soundness.findings_json(),
        }


def summarize(trace: Attributed, by: str = "kernel") -> Summary:
    """The summary of a trace.

    Args:
        by: one of `thence.model.places.BY`.

    Raises:
        UsageError: ``by`` is not in `thence.model.places.BY`.
        MissingData: the trace holds no device activity, ``by`` is "collective" and the trace describes no
            collectives, or ``by`` is a part of XLA programs and no activity has such a place.
    """
    gpu = trace.gpu
    if gpu.is_empty():
        raise no_device_work(trace)
    totals = totals_of(trace)
    total = totals.sum_ns
    reasons = {kind: _reasons(trace, codes, total) for kind, codes in _time_without_place(trace).items()}
    rows = time_by_place(trace, by)
    if by in _OF_HLO and rows["place"].null_count() == rows.height:
        raise MissingData(_nothing_of_hlo(trace, by, _reasons(trace, _sums_of_codes(rows), total)))
    parts = separated_from_steady(trace, rows, by)
    table, overlapped = _rows(trace, parts, totals, by)
    return Summary(
        meta=trace.meta,
        selection=str(trace.selection),
        ranks=totals.ranks,
        devices=totals.devices,
        span_ns=totals.span_ns,
        busy_ns=totals.busy_ns,
        sum_ns=total,
        counts=totals.counts,
        streams=totals.streams,
        kind_ns=totals.kind_ns,
        attributed_ns={kind: total - sum(reason.total_ns for reason in reasons[kind]) for kind in reasons},
        unattributed=reasons,
        details=_details(trace),
        by=by,
        heading=heading_of(trace, by),
        separate=_separate_work(trace, parts),
        rows=table,
        overlapped_ns=overlapped,
        idle_inside_ns=idle_inside_programs(trace) if by in _OF_HLO else None,
        folded=folded_rows(table, total) if by in LAYERED else None,
        idle_unknown=trace.selection.idle_unknown,
        windows=windows_of_selection(trace).height if trace.selection.steps is not None else None,
    )


@once_per_trace
def totals_of(trace: Attributed) -> Totals:
    """Totals of a trace with device activity."""
    gpu = trace.gpu
    known = covers_only_part(trace) and not trace.selection.idle_unknown
    span, busy = span_and_busy(trace) if known else _span_and_busy(gpu)
    kinds = gpu.group_by("kind").agg(pl.len(), ns=pl.col("duration").sum())
    counted = {kind: (n, ns) for kind, n, ns in kinds.iter_rows()}
    shown = [kind for kind in KINDS if kind != "thunk" or kind in counted]
    return Totals(
        gpu["rank"].n_unique(),
        gpu.select("rank", "device").n_unique(),
        gpu.select("rank", "device", "stream").n_unique(),
        span,
        busy,
        int(gpu["duration"].sum()),
        {kind: counted.get(kind, (0, 0))[0] for kind in shown},
        {kind: counted.get(kind, (0, 0))[1] for kind in shown},
    )


def overlap_text(totals: Totals) -> str:
    """Why the sum is longer than busy time where each device has one stream; empty if it is not, or by little."""
    overlap = totals.sum_ns - totals.busy_ns
    if totals.streams != totals.devices or overlap < SHOWN_SHARE * totals.sum_ns:
        return ""
    return (
        f"sum is {format_ns(overlap)} more than busy on one stream: kernels begin before the one before them ends "
        "(dependent launches, or branches of a CUDA graph)"
    )


def _nothing_of_hlo(trace: Attributed, by: str, reasons: Sequence[Reason]) -> str:
    """The message for a trace without any place of a kind that comes from HLO."""
    inputs = ", ".join(trace.meta.inputs)
    if trace.programs.is_empty():
        return (
            f"{inputs}: holds no {by}, because it holds no XLA programs; jax.profiler, nsys-jax, and thence record of "
            "JAX programs write them"
        )
    return f"{inputs}: holds no {by}: {'; '.join(str(reason) for reason in reasons)}"


def _span_and_busy(gpu: pl.DataFrame) -> tuple[Ns, Ns]:
    start = gpu["start"].to_numpy()
    end = start + gpu["duration"].to_numpy()
    group, devices = numbered(gpu, "rank", "device")
    groups = devices.height
    busy = union_lengths(group, start, end, groups)
    first = np.full(groups, np.iinfo(np.int64).max)
    last = np.full(groups, np.iinfo(np.int64).min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return int((last - first).sum()), int(busy.sum())


@once_per_trace
def _time_without_place(trace: Attributed) -> dict[str, dict[str, Ns]]:
    """For each kind of place that reports state, the time without such a place, by the code of the reason."""
    stated = STATED if trace.programs.is_empty() else STATED_XLA
    columns = [kind for kind in stated if kind != "source" or trace.shares is None]
    codes = trace.places.select(
        pl.when(pl.col(kind).is_null()).then(pl.col(f"{kind}_rule").to_physical()).fill_null(_PLACED).alias(kind)
        for kind in columns
    )
    duration = trace.gpu["duration"].to_numpy()
    sums = {}
    for kind in stated:
        if kind not in columns:
            sums[kind] = _sums_of_codes(time_by_place(trace, kind))
            continue
        code = codes[kind].to_numpy()
        total = group_sums(code, duration, _PLACED + 1)
        sums[kind] = {
            CODES[number]: int(total[number]) for number in np.flatnonzero(np.bincount(code[code != _PLACED]))
        }
    return sums


def _sums_of_codes(parts: pl.DataFrame) -> dict[str, Ns]:
    """The time without a place, by the code of the reason."""
    missing = parts.filter(pl.col("place").is_null()).group_by(pl.col("reason").cast(pl.String))
    return dict(missing.agg(pl.col("duration").sum()).rows())


def _reasons(trace: Attributed, sums: dict[str, Ns], total: Ns) -> tuple[Reason, ...]:
    """The time without a place, by reason, the most time first."""
    return tuple(
        reason_of(
            code, ns, total, trace.meta.formats, labels_joined=trace.labels_joined, accelerators=trace.meta.accelerators
        )
        for code, ns in sorted(sums.items(), key=lambda reason: (-reason[1], reason[0]))
    )


def _details(trace: Attributed) -> pl.DataFrame:
    detail = trace.places["detail"]
    if detail.null_count() == len(detail):
        return pl.DataFrame(schema={"text": pl.String, "count": pl.Int64, "total_ns": pl.Int64})
    frame = pl.DataFrame({"text": detail, "ns": trace.gpu["duration"]})
    return (
        frame.filter(pl.col("text").is_not_null())
        .group_by(pl.col("text").cast(pl.String))
        .agg(pl.len().cast(pl.Int64).alias("count"), total_ns=pl.col("ns").sum())
        .sort("total_ns", "text", descending=[True, False])
    )


def _separate_work(trace: Attributed, parts: pl.DataFrame) -> pl.DataFrame:
    """The work that the rows keep separate, as in `Summary.separate`."""
    if trace.places["separate"].null_count() == trace.gpu.height:
        return pl.DataFrame(schema=_SEPARATE)
    rows = parts.filter(pl.col("reason").cast(pl.String).is_in([*SEPARATE]))["gpu"].unique()
    separate = rows.cast(pl.UInt32)
    return (
        trace.gpu.select("program", "duration", code=trace.places["separate"].cast(pl.String))
        .select(pl.all().gather(separate))
        .filter(pl.col("code").is_not_null())
        .group_by("code")
        .agg(
            executions=pl.col("program").drop_nulls().n_unique().cast(pl.Int64),
            count=pl.len().cast(pl.Int64),
            total_ns=pl.col("duration").sum(),
        )
        .sort("total_ns", "code", descending=[True, False])
    )


def _rows(trace: Attributed, parts: pl.DataFrame, totals: Totals, by: str) -> tuple[pl.DataFrame, Ns]:
    """The rows of the table, and the time in which several of them ran."""
    keys = ("place", "reason", *(("position",) if "position" in parts.columns else ()))
    exposed, overlapped = _exposed(trace, parts, totals, keys)
    known = [work for work in work_of_parts(trace, parts) if work.null_count() < len(work)]
    grouped = (
        parts.hstack([exposed.alias("exposed"), *known])
        .lazy()
        .group_by(keys)
        .agg(
            pl.col("gpu").n_unique().cast(pl.Int64).alias("count"),
            *summed_work([work.name for work in known]),
            total_ns=pl.col("duration").sum(),
            exposed_ns=pl.col("exposed").sum(),
            backward_ns=pl.col("duration").filter(pl.col("phase") == "backward").sum(),
        )
        .with_columns(
            name=name_of_place(), attributed=pl.col("place").is_not_null(), reason=pl.col("reason").cast(pl.String)
        )
        .pipe(at_once)
    )
    if by != "hlo":
        return finished_rows(grouped, by, totals.sum_ns, keys[2:]), overlapped
    of_instruction = _of_instructions(trace, parts)
    grouped = grouped.join(of_instruction, on="place", how="left", maintain_order="left")
    table = finished_rows(grouped, by, totals.sum_ns, (*keys[2:], *_OF_INSTRUCTIONS))
    return table, overlapped


def _exposed(trace: Attributed, parts: pl.DataFrame, totals: Totals, keys: Sequence[str]) -> tuple[pl.Series, Ns]:
    if trace.unselected is None and totals.busy_ns == totals.sum_ns:
        return parts["duration"], 0  # nothing overlaps
    row = parts.with_row_index("row").select(pl.col("row").min().cast(pl.Int64).over(keys)).to_series()
    exposed, overlapped = exposed_time(trace, parts, row.to_numpy())
    return pl.Series(exposed), overlapped


def finished_rows(rows: pl.DataFrame, by: str, total: int, more: Sequence[str]) -> pl.DataFrame:
    """Rows of a table by a kind of place, as `Summary.rows`: the largest first, with means, shares and short names.

    Args:
        rows: name, attributed, reason, count, total_ns, exposed_ns, backward_ns, `WORK_SUMS` and ``more``.
        by: the kind of place.
        total: time that is a share of 1, ns.
        more: further columns to keep.
    """
    ordered = (
        rows.lazy()
        .with_columns(mean_ns=pl.col("total_ns") / pl.col("count"), share=pl.col("total_ns") / max(total, 1))
        .with_columns(use_of_sums())
        .sort("total_ns", "name", descending=[True, False])
        .pipe(at_once)
    )
    # Names of kernels and paths of files need shortening; other names are those that the user wrote.
    shortened = {"kernel": short_names, "source": short_places}.get(by)
    names = ordered["name"].cast(pl.String)
    if shortened:
        first = names.head(MAX_SHORTENED).to_list()  # a million texts of Python would take 100 MB
        short = shortened(first)
        names = pl.concat([pl.Series([short[name] for name in first], dtype=pl.String), names[len(first) :]])
    return ordered.select(*_ROW_COLUMNS, *_WORK_COLUMNS, *more, short_name=names)


def _of_instructions(trace: Attributed, parts: pl.DataFrame) -> pl.DataFrame:
    """For each HLO instruction, the columns `_OF_INSTRUCTIONS`; null where its activities differ in the value."""
    instructions = parts.select("place").hstack(
        trace.places.select(_OF_INSTRUCTIONS).select(pl.all().gather(parts["gpu"].cast(pl.UInt32)))
    )
    values = (pl.col(name).drop_nulls() for name in _OF_INSTRUCTIONS)
    return (
        instructions.filter(pl.col("place").is_not_null())
        .group_by("place")
        .agg(pl.when(value.n_unique() == 1).then(value.first()) for value in values)
        .with_columns(pl.col(_OF_INSTRUCTIONS).cast(pl.String))
    )


_OTHER, _OPEN = 1 << 52, 1 << 36
"""Weights of open intervals: of work that is not selected, and of a row of the table, in addition to its number."""


def exposed_time(trace: Attributed, parts: pl.DataFrame, row: Int64) -> tuple[Int64, Ns]:
    """The exposed time of the rows of a table, and the time in which several rows ran.

    Args:
        parts: as `thence.analysis.grouping.time_by_place.time_by_place` returns them.
        row: the row of the table that each part belongs to, shape (m,): the number of the first part of that row.

    Returns:
        ns for each part, whose sums over the parts of a row are its exposed time, shape (m,); and the busy time of the
        selected work that is in none of them. An activity with several parts counts as a row of its own, whose exposed
        time is divided like its duration.
    """
    gpu = parts["gpu"].to_numpy()
    several = np.bincount(gpu, minlength=trace.gpu.height)[gpu] > 1
    owner = np.zeros(trace.gpu.height, np.int64)
    owner[gpu] = np.where(several, len(row) + gpu, row)
    exposed, overlapped = _exposed_groups(trace, owner, len(row) + trace.gpu.height)
    result = exposed[: len(row)].copy()
    share = parts["duration"] / trace.gpu["duration"].gather(parts["gpu"].cast(pl.UInt32))
    claims = pl.DataFrame({"gpu": parts["gpu"], "weight": share.fill_nan(0)}).filter(several)
    result[several] += split_by_weight(pl.Series(exposed[len(row) :]), claims).to_numpy()
    return result, overlapped


def _exposed_groups(trace: Attributed, owner: Int64, groups: int) -> tuple[Int64, Ns]:
    """The time in which only work of one group ran, by group, shape (groups,); and the rest of the busy time."""
    frames = [trace.gpu] if trace.unselected is None else [trace.gpu, trace.unselected.gpu]
    every = pl.concat([frame.select("rank", "device", "start", "duration") for frame in frames])
    device, devices = numbered(every, "rank", "device")
    begin = every["start"].to_numpy()
    line = GroupedIntervals.of(device, begin, begin + every["duration"].to_numpy(), devices.height)
    count = len(owner)
    start, end = line.start[:count], line.end[:count]
    group, opens, closes = unions(owner, start, end)
    others = len(frames) > 1
    pieces = levels(
        np.concatenate([opens, *([start, line.start[count:]] if others else [])]),
        np.concatenate([closes, *([end, line.end[count:]] if others else [])]),
        np.concatenate([
            _OPEN + group,
            # All work less the selected work is the work that is not selected.
            *([np.full(count, -_OTHER), np.full(len(line.start) - count, _OTHER)] if others else []),
        ]),
    )  # fmt: skip
    length, level = pieces[1] - pieces[0], pieces[2]
    alone = level // _OPEN == 1
    exposed = np.zeros(groups, np.int64)
    np.add.at(exposed, level[alone] % _OPEN, length[alone])
    busy = int(length[(level % _OTHER) >= _OPEN].sum())
    return exposed, busy - int(exposed.sum())
