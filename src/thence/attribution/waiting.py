"""Completes events and waits for which the producer wrote no ids: from the order of the calls, checked against times.

The stream of a call is inferred from the launches of its thread: if a stream waits, it is the stream of the thread's
next launch; if the host waits, that of the thread's last launch. A wait is for the last record before it on its
thread; for a stream that waits, if there is none, for the last record of its rank. That record is on the stream of
its thread's last launch, or on the stream before that if the last one is the stream that waits. With several streams
these guesses are often wrong, so a guess that the times contradict is dropped: if the work before the record ended
after the work behind the wait began, or after the host call returned.

torch.profiler writes which stream waits only for streams on which something ran (Kineto defers those rows, and drops
those of other streams). So if it names the streams of a rank's other waits, a wait without a stream is made by a
stream on which nothing ran: of such streams, the one on which the thread of the wait last made a record. NCCL has such
a stream for each communicator, and through it the kernels of a communicator wait for each other, whatever streams they
are on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from thence.model.intervals import NEVER, NO_ROW
from thence.model.tables import EVENTS, WAITS
from thence.model.thresholds import EARLY_RETURN_NS, TIMESTAMP_NS
from thence.model.waiting import waiting_tables

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.tables import Tables


_THREAD = ["rank", "process", "thread"]
_STREAM = ["rank", "device", "stream"]


def completed_waiting(tables: Tables, launch: Int64) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The tables events and waits, with streams and records inferred and ``known`` never null.

    Args:
        launch: host row that launched each activity, `NO_ROW` where unknown.
    """
    events, waits = tables.events, tables.waits
    if events.is_empty() and waits.is_empty():
        events, waits = waiting_tables(tables.host)
    if events["known"].null_count() == 0 and waits["known"].null_count() == 0:
        return events, waits
    launches = _launches(tables, launch)
    events = _inferred_events(_timed(events, tables.host), launches)
    waits = _inferred_waits(_timed(waits, tables.host), events, launches)
    return (
        EVENTS.frame({name: events[name] for name in EVENTS.schema}),
        WAITS.frame({name: waits[name] for name in WAITS.schema}),
    )


def event_edges(tables: Tables, launch: Int64) -> pl.DataFrame:
    """The pairs of activities of which one waited for the other through an event.

    Args:
        tables: with complete events.
        launch: host row that launched each activity.

    Returns:
        For each wait whose record is known and which has work on both sides: wait (row in events), waiting (row in
        gpu: the first activity that was launched behind the wait on its stream) and awaited (row in gpu: the last
        activity that was launched before the record on its stream). The records that this stream itself waited for
        since that activity was launched give rows of their own, with the same wait.
    """
    schema = {"wait": pl.UInt32(), "waiting": pl.UInt32(), "awaited": pl.UInt32()}
    events = tables.events
    if events["record"].null_count() == events.height:
        return pl.DataFrame(schema=schema)
    timed, on_stream = _timed(events, tables.host), _by_stream(_launches(tables, launch))
    direct = _pairs(timed)
    through = _through(timed, direct, on_stream)
    passed = _edges(timed, through, on_stream).filter(pl.col("ended") <= pl.col("starts") + TIMESTAMP_NS)
    return pl.concat([_edges(timed, direct, on_stream), passed]).select(list(schema)).unique(maintain_order=True)


def launches_by_stream(tables: Tables, launch: Int64) -> pl.DataFrame:
    """One row per launch and stream that it has work on, in order of time.

    Returns:
        rank, device, stream, time (ns, of the launch), first and last (rows in gpu: the activity on the stream that
        began first, and the one that ended last), start and end (ns, when they did).
    """
    return _by_stream(_launches(tables, launch))


def _timed(calls: pl.DataFrame, host: pl.DataFrame) -> pl.DataFrame:
    """Calls with row, process, thread, time (start) and until (end), in order of time."""
    columns = host.select("process", "thread", "start", "duration").select(
        pl.all().gather(calls["host"].cast(pl.UInt32))
    )
    return (
        calls.with_row_index("row")
        .hstack(columns.select("process", "thread", time="start", until=pl.col("start") + pl.col("duration")))
        .sort("time", maintain_order=True)
    )


def _launches(tables: Tables, launch: Int64) -> pl.DataFrame:
    """Activities whose launch is known: gpu, rank, device, stream, start, end; process, thread, time of the launch."""
    rows = pl.Series(launch)
    activities = tables.gpu.select(
        "rank", "device", "stream", "start", end=pl.col("start") + pl.col("duration")
    ).with_row_index("gpu")
    known = activities.with_columns(launch=rows).filter(pl.col("launch") != NO_ROW)
    calls = tables.host.select("process", "thread", time="start").select(
        pl.all().gather(known["launch"].cast(pl.UInt32))
    )
    return known.drop("launch").hstack(calls).sort("time", "start", maintain_order=True)


def _by_stream(launches: pl.DataFrame) -> pl.DataFrame:
    """One row per launch and stream: the activity on the stream that began first, and the one that ended last."""
    return (
        launches.group_by(*_STREAM, "time", maintain_order=True)
        .agg(
            first=pl.col("gpu").sort_by("start").first(),
            start=pl.col("start").min(),
            last=pl.col("gpu").sort_by("end").last(),
            end=pl.col("end").max(),
        )
        .sort("time", maintain_order=True)
    )


def _asof(calls: pl.DataFrame, others: pl.DataFrame, by: list[str], strategy: str) -> pl.DataFrame:
    """Joins each call with the last row of ``others`` before it, or the first after it, among equals of ``by``."""
    return calls.join_asof(
        others,
        on="time",
        by=by,
        strategy=strategy,  # type: ignore[arg-type]
        check_sortedness=False,
    )


def _pairs(events: pl.DataFrame) -> pl.DataFrame:
    """Columns wait and record: each wait whose record is known, with that record."""
    return events.filter(pl.col("record").is_not_null()).select(wait="row", record=pl.col("record").cast(pl.UInt32))


def _through(events: pl.DataFrame, pairs: pl.DataFrame, on_stream: pl.DataFrame) -> pl.DataFrame:
    """Columns wait and record: records that a wait is for indirectly, through the waits of other streams.

    A record completes when its stream has done the work launched on it, and the waits that were queued on it after
    the last launch. The last record of a stream includes those before it, so there are no more rows than waits times
    streams.
    """
    number = pl.struct(_STREAM).rank("dense").alias("number")
    placed = events.drop_nulls(_STREAM).select("row", "kind", "time", *_STREAM, number)
    records = placed.filter(pl.col("kind") == "record").rename({"row": "record"})
    launched = on_stream.select(*_STREAM, "time", since="time")
    records = _asof(records, launched, _STREAM, "backward").select("record", "number", "time", "since")
    waits = placed.filter(pl.col("kind") == "wait").rename({"row": "wait"})
    waits = (
        waits.join(pairs, on="wait", maintain_order="left")
        .join(records.select("record", source="number"), on="record", maintain_order="left")
        .filter(pl.col("number") != pl.col("source"))
        .select("number", "source", "time", waited="time", before="record")
    )
    records_and_sources = records.join(waits.select("number", "source").unique(), on="number").sort("time")
    hops = (
        _asof(records_and_sources, waits, ["number", "source"], "backward")
        .filter(pl.col("waited") > pl.col("since").fill_null(NEVER))
        .select("record", "before")
    )
    made = records.select("record", source="number", made="time")
    direct = pairs.join(made, on="record")
    reachable, latest = direct, direct
    while latest.height:
        reached = reachable.group_by("wait", "source").agg(reached=pl.col("made").max())
        latest = (
            latest.join(hops, on="record")
            .select("wait", record="before")
            .join(made, on="record")
            .sort("made")
            .unique(["wait", "source"], keep="last")
            .join(reached, on=["wait", "source"], how="left")
            .filter(pl.col("made") > pl.col("reached").fill_null(NEVER))
            .drop("reached")
        )
        reachable = pl.concat([reachable, latest])
    return reachable.slice(direct.height).select("wait", "record")


def _edges(events: pl.DataFrame, pairs: pl.DataFrame, on_stream: pl.DataFrame) -> pl.DataFrame:
    """The activities on both sides of waits and their records: wait, waiting, awaited, starts and ended.

    Pairs of one stream are left out: a stream that waits for its own record waits for nothing.
    """
    waits = events.select(*_STREAM, "time", wait="row").join(pairs, on="wait", maintain_order="left")
    behind = _asof(waits, on_stream.select(*_STREAM, "time", "first", "start"), _STREAM, "forward")
    records = events.filter(pl.col("kind") == "record").select(*_STREAM, "time", record="row")
    before = _asof(records, on_stream.select(*_STREAM, "time", "last", "end"), _STREAM, "backward")
    waiting_stream, recording_stream = (
        pl.struct(_STREAM).alias("waiting_stream"),
        pl.struct(_STREAM).alias("recording_stream"),
    )
    sides = behind.select("wait", "record", waiting_stream, waiting="first", starts="start").join(
        before.select("record", recording_stream, awaited="last", ended="end"), on="record", maintain_order="left"
    )
    return sides.drop_nulls(["waiting", "awaited"]).filter(pl.col("waiting_stream") != pl.col("recording_stream"))


def _on_thread(launches: pl.DataFrame) -> pl.DataFrame:
    """The thread and time of each launch, its stream (on), and the last other stream of the thread before (other)."""
    stream = pl.struct("device", "stream")
    changes = (stream != stream.shift(1).over(_THREAD)).fill_null(value=False)
    before = pl.when(changes).then(stream.shift(1).over(_THREAD))
    return launches.select(*_THREAD, "time", on=stream, other=before.forward_fill().over(_THREAD))


def _inferred_events(events: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Events in order of their rows, with streams and records inferred and ``known`` filled."""
    if events.is_empty():
        return events
    threads = _on_thread(launches)
    forward = _asof(events, threads.select(*_THREAD, "time", next="on"), _THREAD, "forward")
    timed = _asof(forward, threads, _THREAD, "backward")
    is_wait, unknown = pl.col("kind") == "wait", pl.col("stream").is_null()
    guessed = (
        pl.when(is_wait & pl.col("rank").is_in(_named_ranks(events).implode()))
        .then("bare")
        .when(is_wait)
        .then(pl.coalesce("next", "on"))
    )
    timed = (
        _asof(timed, _bare(events, launches), _THREAD, "backward")
        .with_columns(guess=guessed, unstated=is_wait & pl.col("known").is_null(), guessed=~is_wait & unknown)
        .with_columns(
            device=pl.when(is_wait & unknown).then(pl.col("guess").struct.field("device")).otherwise("device"),
            stream=pl.when(is_wait & unknown).then(pl.col("guess").struct.field("stream")).otherwise("stream"),
        )
    )
    records = timed.filter(~is_wait)
    made = records.select(*_THREAD, "time", guess_record="row")
    named = _asof(timed.filter("unstated"), made, _THREAD, "backward")
    anywhere = _asof(named, made.select("rank", "time", any_record="guess_record"), ["rank"], "backward")
    named = anywhere.select(
        "row", waits_on=pl.struct("device", "stream"), guess_record=pl.coalesce("guess_record", "any_record")
    )
    timed = timed.join(named, on="row", how="left", maintain_order="left").with_columns(
        record=pl.coalesce("record", pl.col("guess_record").cast(pl.Int32))
    )
    timed = _with_streams_of_records(timed, named)
    contradicted = _edges(timed, _pairs(timed), _by_stream(launches)).filter(
        pl.col("ended") > pl.col("starts") + TIMESTAMP_NS
    )
    wrong = pl.col("unstated") & pl.col("row").is_in(contradicted["wait"].implode())
    timed = timed.with_columns(record=pl.when(~wrong).then("record"))
    unclear = pl.when(is_wait).then(pl.col("record").is_null() | unknown).otherwise(unknown)
    inferred = pl.when(unclear).then(pl.lit("unknown")).otherwise(pl.lit("inferred"))
    return timed.with_columns(known=pl.coalesce("known", inferred)).sort("row")


def _named_ranks(events: pl.DataFrame) -> pl.Series:
    """Ranks for which the producer names the streams of waits."""
    named = (pl.col("kind") == "wait") & pl.col("stream").is_not_null()
    return events.filter(named)["rank"].unique()


def _bare(events: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Records on streams on which nothing ran: their thread and time, and the stream as ``bare``."""
    records = events.filter(pl.col("kind") == "record", pl.col("stream").is_not_null())
    return records.join(launches.select(_STREAM).unique(), on=_STREAM, how="anti", maintain_order="left").select(
        *_THREAD, "time", bare=pl.struct("device", "stream")
    )


def _with_streams_of_records(timed: pl.DataFrame, named: pl.DataFrame) -> pl.DataFrame:
    """Gives records without a stream that of the last launch on their thread, other than the stream that waits."""
    awaiting = (
        named.drop_nulls("guess_record").group_by(pl.col("guess_record").alias("row")).agg(pl.col("waits_on").first())
    )
    joined = timed.join(awaiting, on="row", how="left", maintain_order="left")
    same = pl.col("on").eq_missing(pl.col("waits_on"))
    guess = pl.when(same).then("other").otherwise("on")
    return joined.with_columns(
        pl.when("guessed").then(guess.struct.field(name)).otherwise(name).alias(name) for name in ("device", "stream")
    )


def _inferred_waits(waits: pl.DataFrame, events: pl.DataFrame, launches: pl.DataFrame) -> pl.DataFrame:
    """Waits in order of their rows, with streams and records inferred and ``known`` filled."""
    if waits.is_empty():
        return waits
    kind, unstated = pl.col("kind"), pl.col("known").is_null()
    timed = _asof(waits, _on_thread(launches).drop("other"), _THREAD, "backward")
    guessed = unstated & (kind == "stream")
    timed = timed.with_columns(
        pl.when(guessed).then(pl.col("on").struct.field(name)).otherwise(name).alias(name)
        for name in ("device", "stream")
    )
    on_stream = _by_stream(launches)
    records = events.filter(pl.col("kind") == "record").sort("time").select(*_THREAD, "time", guess_record="row")
    before = _asof(
        events.filter(pl.col("kind") == "record").sort("time").select(*_STREAM, "time", record_row="row"),
        on_stream.select(*_STREAM, "time", ended="end"),
        _STREAM,
        "backward",
    )
    timed = _asof(timed, records, _THREAD, "backward")
    timed = timed.join(
        before.select("record_row", record_ended="ended"),
        left_on="guess_record",
        right_on="record_row",
        how="left",
        maintain_order="left",
    )
    timed = _asof(timed, on_stream.select(*_STREAM, "time", stream_ended="end"), _STREAM, "backward")
    returned = pl.col("until") + EARLY_RETURN_NS
    fits_stream = (pl.col("stream_ended") <= returned).fill_null(value=False)
    fits_record = (pl.col("record_ended") <= returned).fill_null(value=False)
    guessed_event = unstated & (kind == "event")
    return timed.with_columns(
        record=pl.when(guessed_event & fits_record).then(pl.col("guess_record").cast(pl.Int32)).otherwise("record"),
        stream=pl.when(guessed & ~fits_stream).then(None).otherwise("stream"),
        known=pl.when(~unstated)
        .then("known")
        .when((guessed & fits_stream) | (guessed_event & fits_record))
        .then(pl.lit("inferred"))
        .otherwise(pl.lit("unknown")),
    ).sort("row")
