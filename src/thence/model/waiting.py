"""Host calls that wait, and calls that make streams record events or wait for them, by their names.

A runtime call makes the driver call of the same meaning; producers list one of the two.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.model.names import distinct_names
from thence.model.tables import API_CALLS, EVENTS, HOST_CATEGORIES, WAITS

if TYPE_CHECKING:
    from thence.model.tables import Tables

_CALLS = (
    ("record", r"(?:cuda|cu|hip)EventRecord(?:WithFlags)?"),
    ("wait", r"(?:cuda|cu|hip)StreamWaitEvent"),
    ("device", r"(?:cuda|hip)DeviceSynchronize|cuCtxSynchronize"),
    ("stream", r"(?:cuda|cu|hip)StreamSynchronize"),
    ("event", r"(?:cuda|cu|hip)EventSynchronize"),
    ("copy", r"(?:cuda|hip)Memcpy(?:ToSymbol|FromSymbol|2D|3D)?|cuMemcpy(?:HtoD|DtoH|DtoD|2D|3D)?(?:_v2)?"),
    ("free", r"(?:cuda|hip)Free|cuMemFree(?:_v2)?"),
)  # fmt: skip
_SUFFIX = r"(?:_ptsz|_ptds|_spt)*"  # per-thread default stream
_PATTERNS = [(kind, re.compile(f"(?:{pattern}){_SUFFIX}")) for kind, pattern in _CALLS]
_EVENT_CALLS = ("record", "wait")
_NAMED_WAITS = ("device", "copy", "free")
"""Kinds of waits whose name states what they wait for."""
_CATEGORIES_OF_CALLS = [HOST_CATEGORIES.index(category) for category in API_CALLS]
_NO_NAME = (1 << 32) - 1
"""Number of no Categorical."""
_MAX_NAMES = 4096
"""Names whose kind is remembered: thousands of small files have the same."""

CALL_FACTS = {
    "rank": pl.Int32(),
    "correlation": pl.Int64(),
    "device": pl.Int32(),
    "stream": pl.Int64(),
    "event": pl.Int64(),
    "recorded_by": pl.Int64(),
    "recorded_on": pl.Int64(),
    "never_recorded": pl.Boolean(),
}
"""Columns of what a producer states about a call, which rank and correlation identify. device, stream: those on which
it acts. event: id. recorded_by: for waits, correlation of the call that made the record; recorded_on: stream of the
record. never_recorded: whether the producer lists all records, and none is of this event. Null if not stated."""


_NO_FACTS = pl.DataFrame(schema=CALL_FACTS)


def names_of_calls(names: pl.Series) -> pl.DataFrame:
    """The distinct names of waiting and event calls: columns name (as given) and kind (`EVENT_KINDS`, `WAIT_KINDS`)."""
    used = distinct_names(names)
    kind_of_number = [
        (number, kind) for number, text in enumerate(used.cast(pl.String)) if (kind := kind_of_call(text))
    ]
    rows = pl.Series([number for number, _ in kind_of_number], dtype=pl.UInt32)
    kinds = pl.Series("kind", [kind for _, kind in kind_of_number], dtype=pl.String)
    return pl.DataFrame([used[rows].alias("name"), kinds])


@functools.lru_cache(maxsize=_MAX_NAMES)
def kind_of_call(name: str) -> str | None:
    """The kind of a waiting or event call (`EVENT_KINDS`, `WAIT_KINDS`) by its name; None for other names."""
    return next((kind for kind, pattern in _PATTERNS if pattern.fullmatch(name)), None)


def call_facts(columns: dict[str, pl.Series] | None = None) -> pl.DataFrame:
    """A frame with the columns of `CALL_FACTS`; columns that are not given are null."""
    if columns is None:
        return _NO_FACTS
    given = pl.DataFrame(columns)
    return given.select(
        (pl.col(name) if name in given.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in CALL_FACTS.items()
    )


class Calls(NamedTuple):
    """Host rows of waiting and event calls, in any order, and the kind of each (`EVENT_KINDS`, `WAIT_KINDS`)."""

    rows: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.object_]


def with_waiting(tables: Tables, facts: pl.DataFrame, calls: Calls | None = None) -> Tables:
    """The tables of a reader with events and waits, made from host rows and from what the producer states of calls."""
    events, waits = waiting_tables(tables.host, facts, calls)
    return dataclasses.replace(tables, events=events, waits=waits)


def waiting_tables(
    host: pl.DataFrame, facts: pl.DataFrame | None = None, calls: Calls | None = None
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables events and waits of the calls in a host table; ``known`` is null if the producer states nothing.

    The id of a record is accepted only if that record is in the trace and earlier than the call: profilers that do
    not list records may refer to records of an earlier profile.

    Args:
        host: as `thence.model.tables.HOST`.
        facts: as `CALL_FACTS`, at most one row for each call.
        calls: the calls, if the reader knows them; otherwise they are found by category and name.
    """
    rows, kinds = _calls(host) if calls is None else calls
    if not len(rows):
        return EVENTS.empty(), WAITS.empty()
    rank = host["rank"].to_numpy()[rows]
    order = np.lexsort((rows, host["start"].to_numpy()[rows], rank))
    rows, kinds = rows[order], kinds[order]
    if facts is None or facts.is_empty():
        return _tables_of_names(rank[order], rows, kinds)
    all_calls = (
        host.select("rank", "category", "name", "start", "correlation")
        .with_row_index("host")[rows]
        .with_columns(kind=pl.Series(kinds, dtype=pl.String))
    )
    once = facts.filter(pl.col("correlation").is_not_null()).unique(
        ["rank", "correlation"], keep="first", maintain_order=True
    )
    all_calls = all_calls.join(once, on=["rank", "correlation"], how="left", maintain_order="left")
    of_events = pl.col("kind").is_in(_EVENT_CALLS)
    events = all_calls.filter(of_events).with_row_index("row")
    records = events.filter(pl.col("kind") == "record").select(
        "rank", recorded_by="correlation", record=pl.col("row").cast(pl.Int32), made="start",
        on="stream",
    )  # fmt: skip
    records = records.drop_nulls("recorded_by").unique(["rank", "recorded_by"], keep="none", maintain_order=True)
    events = _with_records(events, records)
    waits = _with_records(all_calls.filter(~of_events), records)
    streams = _streams_named_by_waits(pl.concat([f.select("record", "recorded_on") for f in (events, waits)]))
    events = events.join(streams, left_on="row", right_on="named", how="left", maintain_order="left")
    is_record = pl.col("kind") == "record"
    stream = pl.when(is_record).then(pl.coalesce("stream", "named_stream")).otherwise("stream")
    events = events.with_columns(stream=stream).with_columns(
        known=pl.when(is_record & pl.col("stream").is_not_null()).then(pl.lit("recorded")).otherwise("known")
    )
    return (
        EVENTS.frame({name: events[name] for name in EVENTS.schema}),
        WAITS.frame({name: waits[name] for name in WAITS.schema}),
    )


def _calls(host: pl.DataFrame) -> Calls:
    """The rows of host that are waiting or event calls."""
    names = names_of_calls(host["name"])
    if names.is_empty():
        return Calls(np.empty(0, np.int64), np.empty(0, np.object_))
    used = names["name"].to_physical().to_numpy()
    code = host["name"].to_physical().fill_null(_NO_NAME).to_numpy()
    category = host["category"].to_physical().to_numpy()
    rows = np.flatnonzero(np.isin(code, used) & np.isin(category, _CATEGORIES_OF_CALLS))
    kind = dict(zip(used.tolist(), names["kind"], strict=True))
    return Calls(rows, np.array([kind[number] for number in code[rows].tolist()], np.object_))


def _tables_of_names(
    rank: npt.NDArray[np.int32], rows: npt.NDArray[np.int64], kinds: npt.NDArray[np.object_]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """As `waiting_tables`, if the producer states nothing but the names of the calls."""
    of_events = np.array([kind in _EVENT_CALLS for kind in kinds], np.bool_)

    def columns(chosen: npt.NDArray[np.bool_]) -> dict[str, Any]:
        return {"rank": rank[chosen], "kind": kinds[chosen].tolist(), "host": rows[chosen].astype(np.int32)}

    waits = columns(~of_events)
    waits["known"] = ["recorded" if kind in _NAMED_WAITS else None for kind in waits["kind"]]
    return EVENTS.frame(columns(of_events)), WAITS.frame(waits)


def _with_records(calls: pl.DataFrame, records: pl.DataFrame) -> pl.DataFrame:
    """Adds the columns record and known to calls."""
    joined = calls.join(records, on=["rank", "recorded_by"], how="left", maintain_order="left").with_columns(
        record=pl.when(pl.col("made") < pl.col("start")).then("record")
    )
    kind, record = pl.col("kind"), pl.col("record")
    certain = record.is_not_null() | (kind.is_in(("stream", "device")) & pl.col("stream").is_not_null())
    named_wait = kind.is_in(_NAMED_WAITS)
    known = (
        pl.when(certain | named_wait)
        .then(pl.lit("recorded"))
        .when(pl.col("never_recorded").fill_null(value=False))
        .then(pl.lit("never_recorded"))
    )
    return joined.with_columns(known=known)


def _streams_named_by_waits(named: pl.DataFrame) -> pl.DataFrame:
    """The stream that a wait states for its record: columns named (row of the record) and named_stream."""
    return (
        named.drop_nulls()
        .group_by(pl.col("record").cast(pl.UInt32).alias("named"))
        .agg(named_stream=pl.col("recorded_on").first())
    )
