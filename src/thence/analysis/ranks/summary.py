"""Summarises one rank: the data from which to find which rank is late, since when, and why.

The summaries of many ranks fit into memory even if their traces do not. Each is made from its rank alone. Results that
need several ranks (which kernels are one collective, clocks, waits) are computed from the summaries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.collectives.missing import job_size
from thence.analysis.idle.causes import idle_causes
from thence.analysis.idle.host_causes import CAUSES
from thence.analysis.idle.places import names_of_contexts
from thence.analysis.kernel_groups import communicates, computes
from thence.analysis.ranks.host_work import host_work
from thence.analysis.ranks.summary_collectives import Coverage, collective_tables
from thence.analysis.ranks.summary_tables import DEVICES, IDLE, KERNELS, MOST_ROWS, PLACES, STEPS, SUMMARY
from thence.analysis.select import select
from thence.analysis.steps.windows import STEP, selected_steps
from thence.errors import MissingData
from thence.model.intervals import NO_ROW, covered_lengths, last_begun, union_lengths
from thence.model.places import COMPARED
from thence.model.places import PLACES as PLACES_OF_LAUNCHES
from thence.model.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


_MAX_ROWS = 200_000  # activities and host ranges of ranks that are summarised together
_MAX_RANKS = 256
_BY = (*(kind for kind in COMPARED if kind in PLACES_OF_LAUNCHES), "phase")
_IDLE_BY = ("source", "module", "label", "op", "call")
_DEVICE = ("rank", "device")
_OF_STEP = ("rank", "device", "step")


def summarise_rank(trace: Attributed, *, explain: bool = True) -> dict[str, pl.DataFrame]:
    """The summary of one rank.

    Args:
        trace: the attributed trace of one rank, or of several, which are summarised as if each were alone. Of
            several, either all must have steps or none.
        explain: whether kernels, places and idle are wanted, from which the reasons of late ranks are found; without
            them the summary takes a fraction of the time.

    Returns:
        A frame for each table of `thence.analysis.ranks.summary_tables.SUMMARY`, with exactly its columns and
        types; without rows if the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        return {name: table.empty() for name, table in SUMMARY.items()}
    talking = communicates(trace)
    work = trace.gpu.select("rank", "device", "start", "duration").with_columns(
        end=pl.col("start") + pl.col("duration"), communicates=talking, computes=computes(trace, talking)
    )
    frame, kind = _steps(trace, work)
    step = _step_of(trace, work, frame, kind)
    epoch = trace.meta.epoch_ns or 0
    coverage = Coverage.of(work)
    found = {
        "devices": _devices(trace, work, kind),
        "steps": _step_rows(trace, frame, coverage),
        **collective_tables(trace, coverage, work, step),
    }
    if explain:
        found["kernels"] = _kernels(trace, work, step)
        found["places"] = _places(trace, work, step)
        found["idle"] = _idle(trace, frame)
    moments = ("start", "end", "launch", "exposed_start", "exposed_end")
    return {
        name: found[name]
        .with_columns(pl.col(c) + epoch for c in moments if c in found[name].columns)
        .select(pl.col(c.name).cast(c.dtype) for c in table.columns)
        if name in found
        else table.empty()
        for name, table in SUMMARY.items()
    }


def summarise_ranks(trace: Attributed, *, explain: bool = True) -> dict[str, pl.DataFrame]:
    """The summaries of all ranks of a trace, concatenated; that of a rank does not depend on the other ranks.

    Small ranks are summarised together: a summary takes hundreds of array operations, however few its rows are.
    """
    if len(trace.ranks) < 2:
        return summarise_rank(trace, explain=explain)
    parts = (part for batch in _batches(trace) for part in _summarised(trace, batch, explain=explain))
    return {name: frame.sort("rank", maintain_order=True) for name, frame in concatenated(parts).items()}


def _batches(trace: Attributed) -> Iterator[tuple[int, ...]]:
    """The ranks with device work, in batches of limited size; in a batch, all ranks have steps, or none has."""
    stepping = trace.host.filter(pl.col("category") == "step")["rank"].unique()
    host = trace.host.group_by("rank").len("ranges")
    rows = trace.gpu.group_by("rank").len("rows").join(host, on="rank", how="left").sort("rank")
    rows = rows.select(
        "rank", rows=pl.col("rows") + pl.col("ranges").fill_null(0), steps=pl.col("rank").is_in(stepping.implode())
    )
    for part in rows.partition_by("steps", maintain_order=True):
        batch: list[int] = []
        size = 0
        for rank, count, _ in part.rows():
            if batch and (size + count > _MAX_ROWS or len(batch) == _MAX_RANKS):
                yield tuple(batch)
                batch, size = [], 0
            batch.append(rank)
            size += count
        yield tuple(batch)


def _summarised(trace: Attributed, ranks: tuple[int, ...], *, explain: bool) -> Iterator[dict[str, pl.DataFrame]]:
    """The summary of a batch of ranks; a rank of which others have steps and it has none has one of its own."""
    found = summarise_rank(select(trace, Selection(ranks=ranks)), explain=explain)
    without = sorted(set(ranks) - set(found["steps"]["rank"]))
    if not without or len(ranks) == 1:
        yield found
        return
    yield {name: frame.filter(~pl.col("rank").is_in(without)) for name, frame in found.items()}
    for rank in without:
        yield summarise_rank(select(trace, Selection(ranks=(rank,))), explain=explain)


def concatenated(summaries: Iterable[Mapping[str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    """The summaries of several ranks, concatenated table by table."""
    parts = list(summaries)
    return {name: pl.concat([table.empty(), *(part[name] for part in parts)]) for name, table in SUMMARY.items()}


def _steps(trace: Attributed, work: pl.DataFrame) -> tuple[pl.DataFrame, str | None]:
    """The steps with their number on the device (row), and their kind; without steps, the whole trace as one step."""
    try:
        found = selected_steps(trace)
    except MissingData:
        whole = work.group_by(*_DEVICE).agg(pl.col("start").min(), duration=pl.col("end").max() - pl.col("start").min())
        ones = work.group_by(*_DEVICE).agg(covered=pl.struct("start", "end"))
        busy = [int(union_lengths(np.zeros(len(s), np.int64), *_pair(s), 1)[0]) for s in ones["covered"]]
        whole = whole.join(ones.select(*_DEVICE, busy_ns=pl.Series(busy)), on=_DEVICE)
        frame = whole.with_columns(idle_ns=pl.col("duration") - pl.col("busy_ns"), first=pl.lit(value=True))
        missing = {name: dtype for name, dtype in STEP.items() if name not in frame.columns}
        frame = frame.with_columns(pl.lit(None, dtype).alias(n) for n, dtype in missing.items())
        kind = None
    else:
        frame, kind = found.frame.rename({"row": "row_of_step"}), found.kind
    frame = frame.sort(*_DEVICE, "start", maintain_order=True).with_columns(
        row=pl.int_range(pl.len(), dtype=pl.Int32).over(*_DEVICE)
    )
    return frame, kind


def _pair(rows: pl.Series) -> tuple[Int64, Int64]:
    return rows.struct.field("start").to_numpy(), rows.struct.field("end").to_numpy()


def _step_of(trace: Attributed, work: pl.DataFrame, frame: pl.DataFrame, kind: str | None) -> Int64:
    """The step of each activity: the one that launched it, else the one in whose window it began."""
    inside = _in_window(work, frame)
    if kind is not None:
        step = frame.select(*_DEVICE, step_row="row_of_step", at=pl.int_range(pl.len()))
        launched = trace.places.select(pl.col("step_row").cast(pl.Int64))
        of = pl.concat([work.select(*_DEVICE), launched], how="horizontal").join(
            step, on=[*_DEVICE, "step_row"], how="left", maintain_order="left"
        )
        inside = of["at"].fill_null(pl.Series(inside)).to_numpy()
    return np.append(frame["row"].to_numpy(), NO_ROW)[inside]


def _in_window(rows: pl.DataFrame, frame: pl.DataFrame) -> Int64:
    """The row of the step in whose window each row (rank, device, start) begins, `NO_ROW` for none."""
    result = np.full(rows.height, NO_ROW, np.int64)
    ranks, devices = rows["rank"].to_numpy(), rows["device"].to_numpy()
    start = rows["start"].to_numpy()
    changes = (ranks[1:] != ranks[:-1]) | (devices[1:] != devices[:-1])
    # Rows of one device follow each other.
    for low, high in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), rows.height]):
        if low == high:
            continue
        ours = (frame["rank"] == ranks[low]) & (frame["device"] == devices[low])
        steps_here = np.flatnonzero(ours.to_numpy())
        if not len(steps_here):
            continue
        begin, length = (frame[name].to_numpy()[steps_here] for name in ("start", "duration"))
        last = last_begun(begin, start[low:high])
        inside = (last != NO_ROW) & (start[low:high] < (begin + length)[last])
        result[low:high] = np.where(inside, steps_here[last], NO_ROW)
    return result


def _devices(trace: Attributed, work: pl.DataFrame, kind: str | None) -> pl.DataFrame:
    names = {(device.rank, device.device): device.name for device in trace.meta.devices}
    described = np.zeros(work.height, np.bool_)
    described[trace.collectives["gpu"].drop_nulls().to_numpy()] = True
    rows = []
    for (rank, device), ours in sorted(
        work.with_columns(described=described).group_by(*_DEVICE), key=lambda part: part[0]
    ):
        start, end = ours["start"].to_numpy(), ours["end"].to_numpy()
        busy = union_lengths(np.zeros(len(start), np.int64), start, end, 1)
        silent = int((ours["communicates"] & ~ours["described"]).sum())
        name = names.get((int(str(rank)), int(str(device))))
        rows.append((rank, device, name, start.min(), end.max(), busy[0], kind, silent))
    of_trace = ("epoch_known", "job_ranks")
    columns = [column.name for column in DEVICES.columns if column.name not in of_trace]
    schema = {name: dtype for name, dtype in DEVICES.schema.items() if name in columns}
    known = trace.meta.epoch_ns is not None
    return pl.DataFrame(rows, schema=schema, orient="row").with_columns(
        epoch_known=pl.lit(known), job_ranks=pl.lit(job_size(trace), pl.Int32)
    )


def _step_rows(trace: Attributed, frame: pl.DataFrame, coverage: Coverage) -> pl.DataFrame:
    start = frame["start"].to_numpy()
    end = start + frame["duration"].to_numpy()
    compute, copy, exposed = (np.zeros(frame.height, np.int64) for _ in range(3))
    for rows, device in coverage.of_rows(frame):
        span = start[rows], end[rows]
        compute[rows] = covered_lengths(*span, *device.compute)
        copy[rows] = covered_lengths(*span, *device.compute_or_copy) - compute[rows]
        exposed[rows] = covered_lengths(*span, *device.compute_or_communication) - compute[rows]
    every = frame.with_columns(compute_ns=compute, copy_ns=copy, exposed_ns=exposed)
    every = every.rename({"step": "name", "row": "step"})
    every = every.with_columns(host_work(trace, every))
    return every.select(column.name for column in STEPS.columns)


def _largest(rows: pl.DataFrame, of: list[str], names: list[str], kept: tuple[str, ...] = ()) -> pl.DataFrame:
    """Sums by step, device, ``of``, ``kept`` and names, reduced by `_without_shorter`."""
    return _without_shorter(_summed(rows, [*of, *kept, *names]), of, names, kept)


def _summed(rows: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Count and time of rows by step, device and further columns; faster if names are Categorical."""
    return rows.group_by(*_OF_STEP, *by).agg(count=pl.len().cast(pl.Int64), total_ns=pl.col("duration").sum())


def _without_shorter(sums: pl.DataFrame, of: list[str], names: list[str], kept: tuple[str, ...]) -> pl.DataFrame:
    """Keeps the `MOST_ROWS` longest sums of each step, device and ``of``, and merges the others.

    The merged sums are one row without a name for each value of ``kept``.
    """
    within = [*_OF_STEP, *of]
    sums = sums.with_columns(pl.col(*kept, *names).cast(pl.String))
    keys = [*within, "total_ns", *kept, *names]
    order = sums.sort(*keys, descending=[name == "total_ns" for name in keys])
    largest = pl.int_range(pl.len()).over(within) < MOST_ROWS
    return (
        order.with_columns(pl.when(largest).then(name).alias(name) for name in names)
        .group_by(*within, *kept, *names, maintain_order=True)
        .agg(pl.col("count", "total_ns").sum())
    )


def _worked(work: pl.DataFrame, step: Int64) -> pl.DataFrame:
    """Activities in a step that compute or copy: rank, device, step, duration, gpu (row)."""
    numbered = work.with_row_index("gpu").with_columns(step=pl.Series(step, dtype=pl.Int32))
    chosen = numbered.filter(~pl.col("communicates"), pl.col("step") != NO_ROW)
    return chosen.select(*_OF_STEP, "duration", "gpu")


def _kernels(trace: Attributed, work: pl.DataFrame, step: Int64) -> pl.DataFrame:
    rows = _worked(work, step)
    facts = trace.gpu[rows["gpu"].to_numpy()].select("kind", "name", "grid", "block", "bytes")
    shape = (
        pl.when(pl.col("grid").is_not_null())
        .then(pl.format("grid {} block {}", _dimensions("grid"), _dimensions("block")))
        .when(pl.col("bytes").is_not_null())
        .then(pl.format("{} bytes", "bytes"))
    )
    sums = _summed(rows.hstack(facts), ["kind", "name", "grid", "block", "bytes"])
    sums = sums.with_columns(shape=shape)
    by_shape = sums.group_by(*_OF_STEP, "kind", "name", "shape").agg(pl.col("count", "total_ns").sum())
    kept = _without_shorter(by_shape, [], ["name", "shape"], ("kind",))
    return kept.select(list(KERNELS.schema))


def _dimensions(name: str) -> pl.Expr:
    """Numbers of blocks or threads in x, y and z as text, such as 1x2x3."""
    axes = [pl.col(name).arr.get(axis).cast(pl.String) for axis in range(3)]
    return pl.concat_str(axes, separator="x").alias(name)


def _places(trace: Attributed, work: pl.DataFrame, step: Int64) -> pl.DataFrame:
    rows = _worked(work, step)
    parts = [PLACES.empty()]
    for by in _BY:
        named = rows.with_columns(name=trace.places[by].gather(rows["gpu"]))
        named = named.filter(pl.col("name").is_not_null().any().over("rank"))
        if named.height:
            found = _largest(named, [], ["name"])
            parts.append(found.with_columns(by=pl.lit(by)).select(list(PLACES.schema)))
    return pl.concat(parts)


def _idle(trace: Attributed, frame: pl.DataFrame) -> pl.DataFrame:
    pieces = idle_causes(trace)
    window = _in_window(pieces, frame)
    context, names = names_of_contexts(trace, pieces, _IDLE_BY)
    inside = np.flatnonzero(window != NO_ROW)
    pieces = pieces[inside]
    part = window[inside] * len(CAUSES) + pieces["cause"].to_physical().to_numpy()
    amounts = pieces.select(count=pl.lit(1, pl.Int64()), total_ns="duration")
    # Hundreds of pieces share window, cause and context, so they are summed before names are looked up.
    of_part, of_context, of_pieces = _pair_sums(part, context[inside] + np.int64(1), amounts)
    sums = {by: _named_sums(of_part, of_context - 1, of_pieces, name) for by, name in names.items()}
    activity = pieces["gpu"].fill_null(NO_ROW).to_numpy()
    sums["phase"] = _named_sums(part, activity, amounts, trace.around.places["phase"])
    every, _, total = _pair_sums(of_part, np.zeros_like(of_part), of_pieces)
    sums["cause"] = total.select(part=every, name=pl.lit(None, pl.Categorical()), count="count", total_ns="total_ns")
    rows = pl.concat([found.with_columns(by=pl.lit(by)) for by, found in sums.items()])
    of_window, cause = np.divmod(rows["part"].to_numpy(), len(CAUSES))
    rows = rows.with_columns(
        frame[of_window].select(*_DEVICE, step="row"),
        cause=pl.Series(CAUSES, dtype=pieces.schema["cause"]).gather(cause),
    )
    kept = _without_shorter(rows, ["by"], ["name"], ("cause",))
    return kept.select(list(IDLE.schema))


def _pair_sums(first: Int64, second: Int64, amounts: pl.DataFrame) -> tuple[Int64, Int64, pl.DataFrame]:
    """Sums of amounts (count, total_ns) for each pair of non-negative numbers: first, second, and the sums."""
    size = int(second.max(initial=0)) + 1
    sums = amounts.with_columns(pair=first * size + second).group_by("pair").agg(pl.col("count", "total_ns").sum())
    of_first, of_second = np.divmod(sums["pair"].to_numpy(), size)
    return of_first, of_second, sums


def _named_sums(part: Int64, number: Int64, amounts: pl.DataFrame, names: pl.Series) -> pl.DataFrame:
    """Sums by part and name, of the amounts that have a name: part, name, count, total_ns.

    Args:
        part: part of each amount, from 0.
        number: for each amount, the row of its name in ``names``, or `NO_ROW`.
        amounts: count, total_ns.
        names: Categorical; names may repeat and may be null.
    """
    code = np.append(names.to_physical().cast(pl.Int64).fill_null(NO_ROW).to_numpy(), NO_ROW)
    named = np.flatnonzero(code[number] != NO_ROW)
    of_part, of_code, sums = _pair_sums(part[named], code[number[named]], amounts[named])
    row = np.zeros(int(code.max()) + 2, np.int64)
    row[code] = np.arange(len(code))  # the code -1 of null writes to the spare last element
    return sums.select(part=of_part, name=names.gather(row[of_code]), count="count", total_ns="total_ns")
