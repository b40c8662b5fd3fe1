"""Idle time by cause and by place: the answer of ``thence idle``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.collectives.waits import participants
from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES, MEANINGS, REASON_TITLES, REASONS
from thence.analysis.idle.places import Contexts, HostPlaces, PieceNames, kinds_of, piece_names
from thence.analysis.no_device_work import no_device_work
from thence.analysis.selection.windows import cut_to_windows, windows_of_selection
from thence.analysis.steps.plain_step import plain_step, unrecorded_steps
from thence.errors import UsageError
from thence.model.answer import Answer, TableView
from thence.model.columns import at_once
from thence.model.kernel_names import short_names
from thence.model.places import IDLE_BY
from thence.model.totals import must, smallest
from thence.parallel import both
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from thence.analysis.collectives.answer import Collectives
    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.instances import Instances
    from thence.model.attributed import Attributed
    from thence.units import Ns

_PLACES_OF_WAITS = ("source", "label", "op")
_ROWS_SHOWN = 15
"""Rows by place that a terminal shows."""
_ROWS = {
    "cause": pl.String(), "by": pl.String(), "name": pl.String(), "total_ns": pl.Int64(), "count": pl.Int64(),
    "share": pl.Float64(),
}  # fmt: skip
_WAITS = {
    "name": pl.String(), "place": pl.String(), "total_ns": pl.Int64(), "count": pl.Int64(), "share": pl.Float64(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AddedIdle:
    """Idle time that recording added.

    In a step, recording makes the host slower, and kernels at most a little: a step that is longer by some time holds
    at most so much more idle time.

    Attributes:
        ns: at most, of all idle time.
        step_ns: how much longer a step takes while it is recorded, at the median.
        unrecorded: number of steps that were not recorded, which are in no row.
    """

    ns: Ns
    step_ns: Ns
    unrecorded: int

    def text(self, idle_ns: Ns) -> str:
        """One sentence on it.

        Args:
            idle_ns: all idle time.
        """
        left = f"{several(self.unrecorded, 'step')} that were not recorded, to measure this, are left out"
        if not self.ns:
            return f"recording added no idle time that its steps without recording show; {left}"
        return (
            f"recording added at most {format_ns(self.ns)} ({format_share(self.ns, idle_ns)}) of it: "
            f"{format_ns(self.step_ns)} to a step; {left}"
        )


@dataclass(frozen=True)
class IdleTime(Answer):
    """Why the devices were idle.

    Attributes:
        idle_ns: idle time between the first start and the last end of each device, or in what is selected, summed;
            equal to `Summary.idle_ns`, and None if it is unknown, with nothing in the tables.
        causes: cause, total_ns, count (pieces), share (of idle_ns), meaning; the largest first. total_ns adds up to
            idle_ns.
        rows: cause, by, name (null: none), total_ns, count (pieces), share (of idle_ns); the rows of a cause add up
            to its total_ns.
        waits: name (of the call), place, total_ns, count (calls), share: idle time after calls that waited and emptied
            the queue. Waits are not a cause: the same time is also in ``causes``.
        late: rank, device, wait_ns: time in which kernels of collectives waited for the last rank. It is busy
            time, and not in any other table. Empty for one rank.
        reasons: reason and total_ns of the time whose cause is unknown.
        silent_ns: time whose cause is host because no recorded row shows anything else.
        unsampled_ns: time whose cause is host because there is no sample of it, although the trace holds samples.
        unnamed: pieces as `thence.analysis.idle.causes.idle_causes` returns them.
        names: the name of each piece.
        unknown: why idle time is unknown, as a part of a sentence; empty if it is known.
        added: how much of it recording added; None if that is unknown, as in traces that are no recordings.
    """

    idle_ns: Ns | None
    causes: pl.DataFrame
    rows: pl.DataFrame
    waits: pl.DataFrame
    late: pl.DataFrame
    reasons: pl.DataFrame
    silent_ns: Ns
    unsampled_ns: Ns
    unnamed: pl.DataFrame = field(repr=False)
    names: PieceNames = field(repr=False)
    unknown: str = ""
    added: AddedIdle | None = None

    @cached_property
    def pieces(self) -> pl.DataFrame:
        """The pieces in `unnamed` with the columns by and name."""
        return self.unnamed.hstack(self.names.columns())

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each reason why a part is unknown, and one on the program without a recorded row."""
        if self.unknown:
            return (f"idle time is unknown: {self.unknown}",)
        notes = [] if self.added is None else [self.added.text(self.idle_ns or 0)]
        notes += [
            f"unknown ({REASON_TITLES[reason]}): {format_ns(total)}: {REASONS[reason]}"
            for reason, total in self.reasons.select("reason", "total_ns").rows()
        ]
        if self.unsampled_ns:
            notes.append(
                f"host: in {format_ns(self.unsampled_ns)} of it there is no sample, as in pauses of less than 0.5 ms: "
                "the line, function or range around it is named"
            )
        if not self.silent_ns:
            return tuple(notes)
        notes.append(
            f"host: in {format_ns(self.silent_ns)} of it the main thread was in no recorded range or call, so "
            "nothing shows what the program did; stacks (torch.profiler with_stack=True) or samples (thence record) do"
        )
        return tuple(notes)

    @property
    def shown_rows(self) -> pl.DataFrame:
        """`rows` in words for the user, see `in_words`."""
        return in_words(self.rows)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return ("why the GPU was idle",)

    def views(self) -> tuple[TableView, ...]:
        """The causes, their rows, and if there are any, calls that waited and waits in collectives."""
        devices = self.unnamed.select("rank", "device").n_unique()
        over = f", summed over {devices:,} GPUs" if devices > 1 else ""
        causes = {"cause": "cause", "total_ns": "idle", "share": "share", "count": "pieces", "meaning": ""}
        rows = {
            "cause": "cause", "by": "by", "name": "name", "total_ns": "idle", "share": "share", "count": "pieces",
        }  # fmt: skip
        waits = {
            "name": "last call that waited", "place": "called at", "total_ns": "idle after it", "share": "share",
            "count": "calls",
        }  # fmt: skip
        late = {"rank": "rank", "device": "GPU", "wait_ns": "waited in collectives (busy time; computing or not)"}
        shown = self.shown_rows
        kernels = shown["by"] == "kernel"
        short = short_names(shown["name"].filter(kernels).drop_nulls().to_list())
        shown = shown.with_columns(
            name=shown["name"].replace(short).zip_with(kernels.fill_null(value=False), shown["name"])
        )
        further = ((self.waits, waits), (self.late, late))
        return (
            TableView(self.causes, causes, f"idle: {self.total}{over}", bar="total_ns"),
            TableView(shown, rows, rows_shown=_ROWS_SHOWN),
            *(TableView(frame, headings, rows_shown=_ROWS_SHOWN) for frame, headings in further if frame.height),
        )

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.notes

    def known(self) -> dict[str, float]:
        """See `Answer`."""
        return {"cause": 1 - int(self.reasons["total_ns"].sum()) / max(self.idle_ns or 0, 1)}

    def to_frame(self) -> pl.DataFrame:
        """The rows of all causes."""
        return self.rows

    def self_check(self) -> None:
        """Checks that its causes add up to it, and its rows to the causes.

        Raises:
            Contradiction: they do not.
        """
        causes = dict(self.causes[["cause", "total_ns"]].rows())
        rows = dict(self.rows.group_by("cause").agg(pl.col("total_ns").sum()).rows())
        must(
            self.caveats.inputs,
            sum(causes.values()) == (self.idle_ns or 0) and rows == causes,
            "the causes of idle time do not add up to it",
        )
        frames = (self.causes, self.rows, self.waits)
        shortest = min(smallest(frame, ("total_ns",)) for frame in frames)
        after = int(self.waits["total_ns"].sum()) <= (self.idle_ns or 0)
        must(
            self.caveats.inputs,
            shortest >= 0 and after,
            "a cause of idle time has a negative duration, or more than all idle time",
        )

    @property
    def total(self) -> str:
        """The idle time in words."""
        return "unknown" if self.idle_ns is None else format_ns(self.idle_ns)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        of_cause = self.rows.partition_by("cause", as_dict=True)
        columns = ["by", "name", "total_ns", "count"]
        return {
            "idle_ns": self.idle_ns,
            "recording_added_at_most_ns": None if self.added is None else self.added.ns,
            "unsampled_ns": self.unsampled_ns,
            "idle_unknown": self.unknown,
            "idle_is": "unknown" if self.idle_ns is None else "at most" if self.caveats.work_missing else "exact",
            "causes": [
                {**cause, "rows": of_cause[(cause["cause"],)].select(columns).to_dicts()}
                for cause in self.causes.select("cause", "total_ns", "share", "count").to_dicts()
            ],
            "after_waits": self.waits.to_dicts(),
            "waited_in_collectives": self.late.to_dicts(),
            "unknown": self.reasons.with_columns(
                text=pl.col("reason").replace_strict(REASONS, return_dtype=pl.String)
            ).to_dicts(),
        }


def why_no_causes(trace: Attributed) -> str | None:
    """The reason why the causes of a trace's idle time cannot be computed; None if they can."""
    if trace.selection.idle_unknown:
        return trace.selection.idle_unknown
    if trace.host.is_empty():
        return "the trace holds no host ranges"
    return None


def in_words(rows: pl.DataFrame) -> pl.DataFrame:
    """Replaces codes in the columns by and name by words for the user.

    Reasons get short names. Rows of the program without a recorded row get a name in words, and null in by.
    """
    silent = (pl.col("cause") == "host") & (pl.col("by") == "call") & pl.col("name").is_null()
    return rows.with_columns(
        by=pl.when(~silent).then("by"),
        name=pl.when(pl.col("by") == "reason")
        .then(pl.col("name").replace(REASON_TITLES))
        .when(silent)
        .then(pl.lit("(in no recorded range or call)"))
        .otherwise("name"),
    )


def idle_time(trace: Attributed, by: str = "place", late: pl.DataFrame | None = None) -> IdleTime:
    """Idle time of all devices by cause, and each cause by place.

    Args:
        by: one of `IDLE_BY`.
        late: as `waited_in_collectives` returns it; None if it was not computed.

    Raises:
        UsageError: ``by`` is not in `IDLE_BY`.
        MissingData: the trace holds no device activity.
    """
    if by not in IDLE_BY:
        raise UsageError(f"idle time cannot be divided by {by!r}; choose one of {', '.join(IDLE_BY)}")
    if trace.gpu.is_empty():
        raise no_device_work(trace)
    late = late if not trace.selection.idle_unknown else None
    pieces, contexts = both(lambda: idle_causes(trace), lambda: Contexts.of(trace.host))
    total = int(pieces["duration"].sum())
    after = pieces.lazy().drop_nulls("wait").group_by("wait").agg(total_ns=pl.col("duration").sum()).pipe(at_once)
    asked, kinds = [pieces["host"], after["wait"]], [*kinds_of(by), *_PLACES_OF_WAITS]
    places = HostPlaces.of(trace, contexts, asked, kinds)
    names = piece_names(trace, pieces, by, places)
    silent = pieces.filter(pl.col("cause") == "host", pl.col("host").is_null())
    unknown = trace.selection.idle_unknown
    return IdleTime(
        None if unknown else total,
        _causes(pieces, total),
        _rows(pieces, names, total),
        _after_waits(trace, after, total, places),
        pl.DataFrame(schema={"rank": pl.Int32, "device": pl.Int32, "wait_ns": pl.Int64}) if late is None else late,
        pieces.lazy()
        .drop_nulls("reason")
        .group_by("reason")
        .agg(total_ns=pl.col("duration").sum())
        .with_columns(pl.col("reason").cast(pl.String))
        .sort("total_ns", "reason", descending=[True, False])
        .pipe(at_once),
        int(silent["duration"].sum()),
        _unsampled(trace, pieces),
        pieces,
        names,
        unknown,
        None if unknown else _added_by_recording(trace, total),
    )


def _added_by_recording(trace: Attributed, total: Ns) -> AddedIdle | None:
    """How much of the idle time recording added: for each recorded step, or part of one, as much as to the median."""
    times = trace.step_times.filter("recorded", pl.col("duration") > 0)
    plain = plain_step(trace.step_times)
    if plain is None or plain.recorded is None:
        return None
    devices = trace.gpu.select("rank", "device").unique()
    steps = times.join(devices, on="rank").sort("rank", "device", "start")
    row, _, start, end = cut_to_windows(steps, windows_of_selection(trace).sort("rank", "device", "start"))
    parts = (end - start) / steps["duration"].gather(row).to_numpy()
    ns = min(round(float(parts.sum()) * plain.added_ns), total)
    return AddedIdle(ns, round(plain.added_ns), unrecorded_steps(trace.step_times))


def _unsampled(trace: Attributed, pieces: pl.DataFrame) -> Ns:
    """Idle time with the cause host that has no sample, in traces that hold samples."""
    sample = trace.host["category"] == "sample"
    if not sample.any():
        return 0
    of_host = pieces.filter(pl.col("cause") == "host", pl.col("host").is_not_null())
    sampled = sample.gather(of_host["host"].cast(pl.UInt32))
    return int(of_host["duration"].filter(~sampled).sum())


def _rows(pieces: pl.DataFrame, names: PieceNames, total: Ns) -> pl.DataFrame:
    """The rows of `IdleTime.rows`: pieces summed by numbers of cause and name, then merged by equal names."""
    size = len(names.name)
    cause = pieces["cause"].to_physical().to_numpy().astype(np.int64)
    sums = (
        pl.DataFrame({"key": cause * size + names.number, "duration": pieces["duration"]})
        .group_by("key")
        .agg(total_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64))
    )
    key = sums["key"]
    return (
        sums.lazy()
        .with_columns(cause=pl.Series(CAUSES)[key // size], by=names.by[key % size], name=names.name[key % size])
        .group_by("cause", "by", "name")
        .agg(pl.col("total_ns", "count").sum())
        .with_columns(share=pl.col("total_ns") / max(total, 1))
        .sort("total_ns", "cause", "name", descending=[True, False, False])
        .select(list(_ROWS))
        .pipe(at_once)
    )


def _causes(pieces: pl.DataFrame, total: Ns) -> pl.DataFrame:
    return (
        pieces.lazy()
        .group_by("cause")
        .agg(total_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64))
        .with_columns(pl.col("cause").cast(pl.String))
        .with_columns(
            share=pl.col("total_ns") / max(total, 1),
            meaning=pl.col("cause").replace_strict(MEANINGS, return_dtype=pl.String),
        )
        .sort("total_ns", "cause", descending=[True, False])
        .pipe(at_once)
    )


def _after_waits(trace: Attributed, after: pl.DataFrame, total: Ns, places: HostPlaces) -> pl.DataFrame:
    """Idle time after calls that emptied the queue, by name of the call and by place.

    Args:
        after: wait (row in host) and total_ns, the idle time after it.
        total: all idle time, in ns.
        places: places of these host rows.
    """
    if after.is_empty():
        return pl.DataFrame(schema=_WAITS)
    context = places.contexts.at(after["wait"])
    place = pl.select(pl.coalesce(*(places.names[kind] for kind in _PLACES_OF_WAITS))).to_series()
    return (
        after.lazy()
        .with_columns(name=trace.host["name"][places.contexts.row[context]], place=place[context])
        .with_columns(pl.col("name", "place").cast(pl.String))
        .group_by("name", "place")
        .agg(pl.col("total_ns").sum(), count=pl.len().cast(pl.Int64))
        .with_columns(share=pl.col("total_ns") / max(total, 1))
        .sort("total_ns", "name", "place", descending=[True, False, False])
        .pipe(at_once)
    )


def waited_in_collectives(times: Collectives, alignment: Alignment | None, instances: Instances) -> pl.DataFrame:
    """How long kernels of collectives waited for the last rank, per device: rank, device, wait_ns.

    Args:
        times: the collectives, none of them left out as warm-up.
        alignment: corrections of the ranks' clocks; None for none.
        instances: the kernels matched across ranks and devices.
    """
    places = participants(times.rows.filter(pl.col("described")), alignment, instances.peers)
    return places.filter("own").group_by("rank", "device").agg(pl.col("wait_ns").sum()).sort("rank", "device")


def idle_tracks(trace: Attributed) -> pl.DataFrame:
    """The causes of idle time as one track per device, with the columns of `thence.model.timeline.Timeline.spans`."""
    pieces = idle_causes(trace)
    return pieces.select(
        "rank", "device", "start", "duration", track=pl.lit("why idle"), name=pl.col("cause").cast(pl.String)
    )
