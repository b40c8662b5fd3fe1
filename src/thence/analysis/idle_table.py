"""Idle time by cause and by place: the answer of ``thence idle``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.idle_causes import IDLE, REASONS, idle_causes
from thence.analysis.idle_rules import MEANINGS
from thence.analysis.steps import steps
from thence.analysis.waits import participants
from thence.attribution.launch_places import places_of_rows
from thence.errors import MissingData, UsageError
from thence.model.intervals import NO_ROW, chain_to
from thence.model.own_code import OwnCode
from thence.model.questions import IDLE_BY
from thence.model.tables import API_CALLS
from thence.notebook import Form, Shown
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.analysis.clock_sync import Alignment
    from thence.analysis.collective_instances import Instances
    from thence.analysis.communication import Collectives
    from thence.model.attributed import Attributed
    from thence.units import Ns

    Int64 = npt.NDArray[np.int64]

__all__ = ["IdleTime", "idle_time", "idle_tracks", "names_of_pieces", "waited_in_collectives"]

_KINDS = {"line": "source", "label": "label", "module": "module", "op": "op"}
_OF_WAITS = ("source", "label", "op")
_OUTER = ("source", "label", "module")
"""Kinds of places that operators and calls have from the rows around them, unless these belong to a forward operator
or carry metadata."""
_PREFERRED = ("line", "label", "module", "op", "call")
_ROWS = {
    "cause": pl.String(), "by": pl.String(), "name": pl.String(), "total_ns": pl.Int64(), "count": pl.Int64(),
    "share": pl.Float64(),
}  # fmt: skip


@dataclass(frozen=True)
class IdleTime(Shown):
    """Why the devices were idle.

    Attributes:
        idle_ns: between the first start and the last end of each device, summed; as `Summary` states it.
        causes: cause, total_ns, share (of idle_ns), count (pieces); the largest first; the total_ns add up to
            idle_ns.
        rows: cause, by, name (null: none), total_ns, count (pieces), share (of idle_ns); those of a cause add up
            to it.
        waits: name (of the call), place, total_ns, count, share: idle time after calls that waited and emptied
            the queue. No cause: the same time is in causes.
        late: rank, device, wait_ns: time in which kernels of collectives waited for a late rank. It is busy
            time, and in none of the others. Empty for one rank.
        reasons: reason, total_ns of what is unknown.
        named: pieces as `thence.analysis.idle_causes.idle_causes` returns them, each with the by (Categorical) and
            the name (Categorical or String) of its row.
    """

    idle_ns: Ns
    causes: pl.DataFrame
    rows: pl.DataFrame
    waits: pl.DataFrame
    late: pl.DataFrame
    reasons: pl.DataFrame
    named: pl.DataFrame = field(repr=False)

    @cached_property
    def pieces(self) -> pl.DataFrame:
        """Those of `named`, with by and name as String."""
        return self.named.with_columns(pl.col("by", "name").cast(pl.String))

    @property
    def notes(self) -> tuple[str, ...]:
        """Why a part is unknown, one sentence for each reason; and how much is Python only because nothing else is."""
        notes = [
            f"unknown: {format_ns(total)}: {REASONS[reason]}"
            for reason, total in self.reasons.select("reason", "total_ns").rows()
        ]
        silent = self.named.filter(pl.col("cause") == "python", pl.col("host").is_null())
        if silent.is_empty():
            return tuple(notes)
        total = format_ns(int(silent["duration"].sum()))
        notes.append(
            f"python: in {total} of it the main thread was in nothing recorded, which of a Python program is Python; "
            "stacks (torch.profiler with_stack=True) or lines (thence record) say where"
        )
        return tuple(notes)

    def form(self) -> Form:
        """What a notebook shows of it."""
        unknown = int(self.reasons["total_ns"].sum())
        causes = (
            f"{cause} {format_ns(ns)}" for cause, ns in self.causes["cause", "total_ns"].rows()
        )
        return Form(
            f"idle: {format_ns(self.idle_ns)}",
            ", ".join(causes),
            self.rows,
            {"name": "idle at", "by": "by", "cause": "cause", "total_ns": "idle", "share": "share"},
            "total_ns",
            {"cause": 1 - unknown / max(self.idle_ns, 1)},
            self.notes,
        )

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        of_cause = self.rows.partition_by("cause", as_dict=True)
        columns = ["by", "name", "total_ns", "count"]
        return {
            "idle_ns": self.idle_ns,
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


def idle_time(trace: Attributed, by: str = "place", late: pl.DataFrame | None = None) -> IdleTime:
    """Idle time of all devices by cause, and each cause by place.

    Args:
        trace: attributed.
        by: of `IDLE_BY`.
        late: of `waited_in_collectives`; None where nothing is known of it.

    Raises:
        UsageError: ``by`` is none of `IDLE_BY`.
        MissingData: the trace holds no device activity.
    """
    if by not in IDLE_BY:
        raise UsageError(
            f"{by!r} is nothing that idle time can be by; choose one of {', '.join(IDLE_BY)}"
        )
    if trace.gpu.is_empty():
        raise MissingData(f"{', '.join(trace.meta.inputs)}: holds no device activity")
    pieces = idle_causes(trace)
    total = int(pieces["duration"].sum())
    places = _Places.of(trace, [pieces["host"], pieces["wait"]], [*_kinds_of(by), *_OF_WAITS])
    named = _named(trace, pieces, by, places)
    rows = (
        named.group_by("cause", "by", "name")
        .agg(total_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64))
        .with_columns(pl.col("cause", "by", "name").cast(pl.String))
        .with_columns(share=pl.col("total_ns") / max(total, 1))
        .sort("total_ns", "cause", "name", descending=[True, False, False])
    )
    return IdleTime(
        total,
        _causes(pieces, total),
        rows.select(list(_ROWS)),
        _after_waits(trace, pieces, total, places),
        pl.DataFrame(schema={"rank": pl.Int32, "device": pl.Int32, "wait_ns": pl.Int64})
        if late is None
        else late,
        pieces.filter(pl.col("reason").is_not_null())
        .group_by("reason")
        .agg(total_ns=pl.col("duration").sum())
        .with_columns(pl.col("reason").cast(pl.String))
        .sort("total_ns", "reason", descending=[True, False]),
        named.select(*IDLE, "by", "name"),
    )


def _causes(pieces: pl.DataFrame, total: Ns) -> pl.DataFrame:
    grouped = pieces.group_by("cause").agg(
        total_ns=pl.col("duration").sum(), count=pl.len().cast(pl.Int64)
    )
    return (
        grouped.with_columns(pl.col("cause").cast(pl.String))
        .with_columns(
            share=pl.col("total_ns") / max(total, 1),
            meaning=pl.col("cause").replace_strict(MEANINGS, return_dtype=pl.String),
        )
        .sort("total_ns", "cause", descending=[True, False])
    )


def names_of_pieces(
    trace: Attributed, pieces: pl.DataFrame, kinds: Sequence[str]
) -> dict[str, pl.Series]:
    """What each piece of idle time is named by each of several kinds, null where it has no name.

    Args:
        trace: attributed.
        pieces: of `idle_causes`.
        kinds: of `IDLE_BY`, without place.

    Returns:
        for each kind the names, Categorical.
    """
    needed = [kind for by in kinds for kind in _kinds_of(by)]
    places = _Places.of(trace, [pieces["host"]], needed)
    return {by: _names(trace, pieces, by, places).cast(pl.Categorical()) for by in kinds}


@dataclass(frozen=True)
class _Places:
    """The places of those host rows that pieces are about, each row once: many pieces are of the same.

    Attributes:
        number: of each host row among those.
        names: of each kind, Categorical, by number; empty where no row has one.
    """

    number: pl.Series
    names: dict[str, pl.Series]

    @classmethod
    def of(cls, trace: Attributed, columns: Sequence[pl.Series], kinds: Sequence[str]) -> _Places:
        """Of columns of host rows."""
        mentioned = [column.drop_nulls().to_numpy() for column in columns]
        rows, number = _each_once(trace.host.height, mentioned)
        kinds = list(dict.fromkeys(kinds))
        if not len(rows) or not kinds:
            nothing = pl.Series([], dtype=pl.Categorical())
            return cls(number, dict.fromkeys(kinds, nothing))
        own = OwnCode.of(trace.own, trace.installed)
        outer = [kind for kind in kinds if kind in _OUTER]
        names = places_of_rows(trace, rows, own, [kind for kind in kinds if kind not in _OUTER])
        return cls(number, _without_nulls(names) | _outer_places(trace, rows, own, outer))

    def named(self, kind: str, rows: pl.Series) -> pl.Series:
        """The place of each row, null for none."""
        if self.names[kind].is_empty():
            return pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(rows))
        return self.names[kind].gather(self.number.gather(rows.cast(pl.UInt32)))


def _outer_places(
    trace: Attributed, rows: Int64, own: OwnCode, kinds: Sequence[str]
) -> dict[str, pl.Series]:
    """The places of `_OUTER` kinds: those of the nearest row around that can have one of its own, each asked once."""
    host = trace.host
    inside = host["category"].is_in(["op", *API_CALLS])
    inside &= host["forward"].is_null() & host["metadata"].is_null()
    parent = host["parent"].fill_null(NO_ROW).to_numpy().astype(np.int64)
    around = chain_to(parent, rows, ~inside.to_numpy())
    asked, number = _each_once(host.height, [around[around != NO_ROW]])
    found = _without_nulls(places_of_rows(trace, asked, own, kinds))
    at = number.gather(pl.Series(around).cast(pl.UInt32, strict=False))
    return {kind: names if names.is_empty() else names.gather(at) for kind, names in found.items()}


def _without_nulls(found: dict[str, pl.Series]) -> dict[str, pl.Series]:
    """Names by kind, empty where all are null."""
    return {
        kind: names.clear() if names.null_count() == len(names) else names
        for kind, names in found.items()
    }


def _each_once(
    height: int, mentioned: Sequence[npt.NDArray[np.integer[Any]]]
) -> tuple[Int64, pl.Series]:
    """The host rows that are mentioned, in order, and the number of each row of host among them."""
    present = np.zeros(height, np.bool_)
    for rows in mentioned:
        present[rows] = True
    number = np.cumsum(present, dtype=np.int32) - 1
    return np.flatnonzero(present), pl.Series(number).cast(pl.UInt32, strict=False)


def _kinds_of(by: str) -> list[str]:
    """The kinds of places that names by this need."""
    if by == "place":
        return list(_KINDS.values())
    return [_KINDS[by]] if by in _KINDS else []


def _named(trace: Attributed, pieces: pl.DataFrame, by: str, places: _Places) -> pl.DataFrame:
    """Pieces with by (Categorical) and name (Categorical or String)."""
    if by != "place":
        kind = pl.lit(by).cast(pl.Categorical())
        return pieces.with_columns(_names(trace, pieces, by, places).alias("name"), by=kind)
    tried = {kind: _names(trace, pieces, kind, places) for kind in _PREFERRED}
    named = pieces.with_columns(**{f"by {kind}": name for kind, name in tried.items()})
    reason = pl.col("reason").cast(pl.Categorical())
    chosen = [
        pl.when(pl.col(f"by {kind}").is_not_null()).then(pl.lit(kind).cast(pl.Categorical()))
        for kind in _PREFERRED
    ]
    chosen.append(pl.when(reason.is_not_null()).then(pl.lit("reason").cast(pl.Categorical())))
    return named.with_columns(
        by=pl.coalesce(*chosen, pl.lit("call").cast(pl.Categorical())),
        name=pl.coalesce(*(f"by {kind}" for kind in _PREFERRED), reason),
    )


def _names(trace: Attributed, pieces: pl.DataFrame, by: str, places: _Places) -> pl.Series:
    """The name of each piece, Categorical or String, null for none."""
    if by in _KINDS:
        return places.named(_KINDS[by], pieces["host"])
    if by in ("call", "wait"):
        column = pieces["host" if by == "call" else "wait"].cast(pl.UInt32)
        return trace.host["name"].gather(column)
    if by == "kernel":
        return trace.gpu["name"].gather(pieces["gpu"].cast(pl.UInt32))
    if by == "step":
        return _steps(trace, pieces)
    return pieces[by].cast(pl.String)


def _steps(trace: Attributed, pieces: pl.DataFrame) -> pl.Series:
    """The step in whose window on the device each piece begins."""
    try:
        frame = steps(trace).frame
    except MissingData:
        return pl.repeat(None, pieces.height, dtype=pl.String, eager=True)
    windows = frame.select(
        "rank", "device", "start", "step", end=pl.col("start") + pl.col("duration")
    )
    found = (
        pieces.select("rank", "device", "start")
        .with_row_index("piece")
        .sort("start")
        .join_asof(
            windows.sort("start", maintain_order=True),
            on="start",
            by=["rank", "device"],
            check_sortedness=False,  # Polars cannot check it of groups
        )
        .sort("piece")
    )
    return found.select(pl.when(pl.col("start") < pl.col("end")).then("step")).to_series()


def _after_waits(
    trace: Attributed, pieces: pl.DataFrame, total: Ns, places: _Places
) -> pl.DataFrame:
    """Idle time after calls that emptied the queue, by call and where it was called."""
    after = pieces.filter(pl.col("wait").is_not_null()).select("wait", "duration")
    names = [places.named(kind, after["wait"]) for kind in _OF_WAITS]
    name = trace.host["name"].gather(after["wait"].cast(pl.UInt32))
    return (
        after.with_columns(name=name, place=pl.select(pl.coalesce(names)).to_series())
        .group_by("name", "place")
        .agg(total_ns=pl.col("duration").sum(), count=pl.col("wait").n_unique().cast(pl.Int64))
        .with_columns(pl.col("name", "place").cast(pl.String))
        .with_columns(share=pl.col("total_ns") / max(total, 1))
        .sort("total_ns", "name", "place", descending=[True, False, False])
    )


def waited_in_collectives(
    times: Collectives, alignment: Alignment | None, instances: Instances
) -> pl.DataFrame:
    """How long kernels of collectives waited for a late rank, per device: rank, device, wait_ns.

    Args:
        times: of all collectives, none left out as warm-up.
        alignment: of the ranks' clocks.
        instances: which kernels are one collective.
    """
    places = participants(times.rows.filter(pl.col("described")), alignment, instances.peers)
    return (
        places.filter("own")
        .group_by("rank", "device")
        .agg(pl.col("wait_ns").sum())
        .sort("rank", "device")
    )


def idle_tracks(trace: Attributed) -> pl.DataFrame:
    """The causes of idle time as a track of each device, as `thence.model.timeline.Timeline.spans`."""
    pieces = idle_causes(trace)
    return pieces.select(
        "rank",
        "device",
        "start",
        "duration",
        track=pl.lit("why idle"),
        name=pl.col("cause").cast(pl.String),
    )
