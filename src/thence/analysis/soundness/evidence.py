"""Data that several rules use: the launches of a trace with the device work of each, and the ranks' windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.columns import at_once, values_or
from thence.model.grouped_intervals import numbered, rows_by_number
from thence.model.intervals import NO_ROW
from thence.model.launches import CALLS, COUNTED, IDENTIFIED, UNCERTAIN
from thence.model.names import among, distinct_names, matching
from thence.units import format_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.soundness.findings import Finding, NotChecked
    from thence.model.arrays import Int64, Mask
    from thence.model.tables import Tables
    from thence.units import Ns


_KERNEL_LAUNCH = r"^(?:cuda|cu|hip)\w*Launch\w*Kernel"
_GRAPH_LAUNCH = r"^(?:cuda|cu|hip)GraphLaunch"
_WAIT = r"^(?:cudaDeviceSynchronize|cuCtxSynchronize|hipDeviceSynchronize)"
_WITHOUT_A_TIME = (*COUNTED, *(name for names in UNCERTAIN.values() for name in names))
"""Names of launches that were identified by their CUPTI number; they lie between two times, which may be far apart."""
_LAUNCHES = ["rank", "process", "thread", "name", "start", "end", "correlation", "graph", "shared"]
"""Columns of launches that are those of their calls."""


@dataclass
class Judgement:
    """The result of one rule for a trace.

    Attributes:
        findings: violations that make the trace unsound.
        notes: findings that explain results but do not make them wrong.
        not_checked: rules that cannot be applied.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Window:
    """The time from the first start to the last end of a rank's device work.

    Attributes:
        start, end: ns on the trace's clock.
        devices: devices of the rank that have work.
    """

    start: Ns
    end: Ns
    devices: tuple[int, ...]

    @property
    def span(self) -> Ns:
        """Length in ns."""
        return self.end - self.start

    @property
    def device(self) -> int | None:
        """The rank's device; None unless it has exactly one."""
        return self.devices[0] if len(self.devices) == 1 else None

    def share(self, ns: Ns) -> float:
        """A time as a part of the window, from 0 to 1."""
        return min(1.0, ns / self.span) if self.span > 0 else 1.0

    def at(self, *times: Ns) -> str:
        """One or two times as text, counted from the first device activity."""
        moments = " to ".join(dict.fromkeys(format_ns(time - self.start) for time in times))
        return f"{moments} after the rank's first device activity"


def called(frame: pl.DataFrame, pattern: str) -> pl.DataFrame:
    """The host ranges whose name matches a regular expression."""
    return frame.filter(matching(frame["name"], pattern))


@dataclass(frozen=True)
class Launches:
    """The launches of kernels and CUDA graphs, in order of rank, process, thread and time.

    A runtime call and the driver call that it makes are one launch. jax.profiler names a launch by its kernel.

    Attributes:
        table: rank, process, thread, name, start (ns), end (ns), correlation, graph (whether it launches a CUDA
            graph), shared (whether other launches of its rank have the same correlation id), work (number of device
            activities with this id), first (start of the first of these, ns) and last (end of the last one, ns); both
            are null if there are none.
        of_work: for each device activity, the row of its launch in ``table``, or `NO_ROW`; the first of several
            launches with the same id.
        ambiguous: mask of the device activities whose correlation id belongs to several launches.
    """

    table: pl.DataFrame
    of_work: Int64
    ambiguous: Mask


@dataclass(frozen=True)
class Evidence:
    """A trace, with data that several rules derive from it; each part is computed lazily and cached."""

    tables: Tables

    @cached_property
    def windows(self) -> dict[int, Window]:
        """The window of each rank that has device work, by rank."""
        frame = (
            self.tables.gpu.lazy()
            .group_by("rank")
            .agg(
                pl.col("start").min(),
                end=(pl.col("start") + pl.col("duration")).max(),
                devices=pl.col("device").unique().sort(),
            )
            .sort("rank")
            .pipe(at_once)
        )
        return {rank: Window(start, end, tuple(devices)) for rank, start, end, devices in frame.rows()}

    def window(self, rank: int) -> Window:
        """The window of a rank; an empty window for a rank without device work."""
        return self.windows.get(rank) or Window(0, 0, ())

    @cached_property
    def calls(self) -> pl.DataFrame:
        """The API calls: host (row), rank, process, thread, category, name, start, end (ns), correlation."""
        return (
            self.tables.host.lazy()
            .with_row_index("host")
            .filter(CALLS)
            .select(
                *("host", "rank", "process", "thread", "category", "name", "start", "correlation"),
                end=pl.col("start") + pl.col("duration"),
            )
            .pipe(at_once)
        )

    @cached_property
    def kernels(self) -> Mask:
        """Mask of the activities that are kernels."""
        mask: Mask = (self.tables.gpu["kind"] == "kernel").to_numpy()
        return mask

    @cached_property
    def kernel_names(self) -> pl.Series:
        """The distinct names of the kernels."""
        return distinct_names(self.tables.gpu["name"].filter(self.kernels))

    def _launching(self, calls: pl.DataFrame) -> Mask:
        """Mask of the calls that launch kernels or CUDA graphs."""
        named = matching(calls["name"], f"{_KERNEL_LAUNCH}|{_GRAPH_LAUNCH}")
        return named.to_numpy() | among(calls["name"], self.kernel_names)

    @cached_property
    def launches(self) -> Launches:
        """Every launch that has a correlation id, with its device work."""
        calls, number, call, several = self._matched
        row = np.where(call == NO_ROW, NO_ROW, number[call]) if len(number) else call
        ambiguous = (row != NO_ROW) & several[call] if len(number) else np.zeros(len(row), np.bool_)
        columns = [pl.Series("launch", number), pl.Series("shared", several)]
        table = _merged(calls.hstack(columns)[np.flatnonzero(number != NO_ROW)])
        first, last = self._times_of_work(row, table.height)
        work = np.bincount(row[row != NO_ROW], minlength=table.height)
        columns = [pl.Series("work", work, pl.Int64), pl.Series("first", first), pl.Series("last", last)]
        table = table[_LAUNCHES].hstack(columns)
        table = table.with_columns(pl.when(pl.col("work") > 0).then(pl.col("first", "last")))
        if several.any():
            of_id = ("rank", "correlation")
            table = table.with_columns(
                work=pl.when("shared").then(pl.col("work").max().over(of_id)).otherwise("work"),
                first=pl.when("shared").then(pl.col("first").min().over(of_id)).otherwise("first"),
                last=pl.when("shared").then(pl.col("last").max().over(of_id)).otherwise("last"),
            )
        return Launches(table, row, ambiguous)

    @cached_property
    def by_stream(self) -> tuple[Int64, Int64]:
        """The rows of gpu in order of stream and start, and the number of the stream of each of these."""
        stream, _ = numbered(self.tables.gpu, "rank", "device", "stream")
        rows = np.lexsort((self.tables.gpu["start"].to_numpy(), stream))
        return rows, stream[rows]

    @cached_property
    def differing_graphs(self) -> pl.DataFrame:
        """Rank and id of the CUDA graphs whose launches ran different activities, by number or by the sum of hashes."""
        if self.tables.gpu["graph"].null_count() == self.tables.gpu.height:
            return self.tables.gpu[["rank", "graph"]].clear()
        launched = self.tables.gpu.lazy().filter(pl.col("graph").is_not_null(), pl.col("correlation") > 0)
        what = pl.coalesce(pl.col("node").hash(), pl.col("name").to_physical().hash())
        launches = launched.group_by("rank", "graph", "correlation").agg(pl.len(), what=what.sum())
        differs = pl.struct("len", "what").n_unique() > 1
        graphs = launches.group_by("rank", "graph").agg(differs=differs)
        return graphs.filter("differs").drop("differs").collect()

    @cached_property
    def in_graph(self) -> Mask:
        """Mask of the activities that a launch of a CUDA graph launched."""
        result = self.tables.gpu["graph"].is_not_null().to_numpy().copy()
        row = self.launches.of_work
        known = np.flatnonzero(row != NO_ROW)
        result[known] |= self.launches.table["graph"].to_numpy()[row[known]]
        return result

    def _times_of_work(self, row: Int64, rows: int) -> tuple[Int64, Int64]:
        """First start and last end of the work of each launch (ns); arbitrary for a launch without work."""
        first = np.full(rows, np.iinfo(np.int64).max)
        last = np.full(rows, np.iinfo(np.int64).min)
        launched = row != NO_ROW
        start = self.tables.gpu["start"].to_numpy()[launched]
        np.minimum.at(first, row[launched], start)
        np.maximum.at(last, row[launched], start + self.tables.gpu["duration"].to_numpy()[launched])
        return first, last

    @cached_property
    def call_of_work(self) -> Int64:
        """The row in `calls` of the API call that launched each activity.

        `NO_ROW` if the trace does not contain the call, if several calls have its correlation id, or if only its
        CUPTI number is known, which does not tell when it was made.
        """
        calls, _, call, several = self._matched
        if not calls.height:
            return call
        timed = ~several & ~calls["name"].cast(pl.String).is_in(_WITHOUT_A_TIME).to_numpy()
        rows = calls["row"].to_numpy().astype(np.int64)
        return np.where((call != NO_ROW) & timed[call], rows[call], NO_ROW)

    @cached_property
    def _matched(self) -> tuple[pl.DataFrame, Int64, Int64, Mask]:
        """The calls with an id, and the device work that has these ids.

        Returns:
            The calls: as `calls`, row (in it) and graph. For each of them the number of its launch, `NO_ROW` if it
            launches no kernel or graph. For each activity the first of these calls that has its id, or `NO_ROW`. The
            mask of the calls whose id other launches, or other calls, have as well.
        """
        calls = self.calls.with_row_index("row").filter(pl.col("correlation").is_not_null() & IDENTIFIED)
        launches = np.flatnonzero(self._launching(calls))
        calls = calls.hstack([matching(calls["name"], _GRAPH_LAUNCH).alias("graph")])
        number = np.full(calls.height, NO_ROW, np.int64)
        number[launches] = _outermost(calls[launches]).to_numpy()
        own = np.where(number == NO_ROW, np.arange(len(number)) + len(number), number)
        gpu = self.tables.gpu
        result = np.full(gpu.height, NO_ROW, np.int64)
        several = np.zeros(calls.height, np.bool_)
        ids = values_or(gpu["correlation"], 0)
        known = calls["correlation"].to_numpy()
        work = dict(rows_by_number(gpu["rank"].to_numpy()))
        for rank, rows in rows_by_number(calls["rank"].to_numpy()):
            order = rows[np.argsort(known[rows], kind="stable")]
            sorted_ids, of_id = known[order], own[order]
            shared = (sorted_ids[1:] == sorted_ids[:-1]) & (of_id[1:] != of_id[:-1])
            if shared.any():
                several[order] = np.isin(sorted_ids, sorted_ids[1:][shared])
            wanted = work.get(rank, rows[:0])
            wanted = wanted[ids[wanted] != 0]
            position = np.minimum(np.searchsorted(sorted_ids, ids[wanted]), len(sorted_ids) - 1)
            matches = sorted_ids[position] == ids[wanted]
            result[wanted[matches]] = order[position[matches]]
        return calls, number, result, several

    @cached_property
    def launching_ranks(self) -> dict[int, tuple[int, int]]:
        """For each rank with launches, the number of its launches, and of its launches with device work."""
        working = (self.launches.table["work"] > 0).to_numpy()
        of_rank = rows_by_number(self.launches.table["rank"].to_numpy())
        return {rank: (len(rows), int(working[rows].sum())) for rank, rows in of_rank}

    def without_launches(self, ranks: Sequence[int] = ()) -> str:
        """The reason why no launch of some ranks, or of any rank if none are given, has device work.

        A phrase that says what is missing: the calls, their ids, or the device work.
        """
        launches = self.calls.filter(pl.Series(self._launching(self.calls), dtype=pl.Boolean))
        work = self.tables.gpu
        if ranks:
            launches, work = (x.filter(pl.col("rank").is_in(ranks)) for x in (launches, work))
        if work.is_empty():
            return "there is no device work"
        if not launches.is_empty():
            return f"none of the {launches.height:,} recorded launches has the id of any device work"
        names = self.calls["name"].cast(pl.String)
        if names.is_in(_WITHOUT_A_TIME).any():
            return "launches are known by their CUPTI numbers alone, which only device work has"
        return "no launches are recorded"

    def waits(self, rank: int) -> pl.DataFrame:
        """The calls in which the host waited for all work of a device; columns as `calls`."""
        waits, rows = self._waits
        return waits[rows.get(rank, [])]

    @cached_property
    def _waits(self) -> tuple[pl.DataFrame, dict[int, Int64]]:
        """The waits of all ranks, and the rows of each rank in them."""
        waits = called(self.calls, _WAIT)
        return waits, dict(rows_by_number(waits["rank"].to_numpy()))

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The profiler steps, as rows of host."""
        return self.host_rows("step")

    def host_rows(self, category: str) -> pl.DataFrame:
        """The rows of host of a category."""
        host = self.tables.host
        return host[np.flatnonzero((host["category"] == category).to_numpy())]

    @cached_property
    def kernel_ranks(self) -> frozenset[int]:
        """Ranks that ran kernels."""
        return frozenset(self.tables.gpu["rank"].filter(self.kernels).unique())

    def steps_at(self, rank: int, times: Int64) -> str:
        """The profiler steps that the times lie in, as text; empty if they lie in none."""
        steps = self.steps.filter(pl.col("rank") == rank).select(
            "name", "start", end=pl.col("start") + pl.col("duration")
        )
        if steps.is_empty() or len(times) == 0:
            return ""
        moments = np.sort(times)
        begin, end = steps["start"].to_numpy(), steps["end"].to_numpy()
        inside = np.searchsorted(moments, end) > np.searchsorted(moments, begin)
        names = steps["name"].cast(pl.String).filter(pl.Series(inside)).unique(maintain_order=True)
        if names.is_empty():
            return ""
        shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}, {len(names)} steps"
        return f" (in {shown})"


def _merged(calls: pl.DataFrame) -> pl.DataFrame:
    """One row for each launch, from rows for each call; see `_outermost`."""
    if calls.is_empty() or int(calls["launch"][-1]) + 1 == calls.height:
        return calls
    others = [name for name in calls.columns if name not in ("launch", "end", "graph", "shared")]
    return calls.group_by("launch", maintain_order=True).agg(
        *(pl.col(name).first() for name in others),
        end=pl.col("end").max(),
        graph=pl.col("graph").any(),
        shared=pl.col("shared").any(),
    )


def _outermost(calls: pl.DataFrame) -> pl.Series:
    """The launch number of each call; a driver call inside a runtime call of its thread has the number of that call."""
    until = pl.when(pl.col("category") == "runtime").then("end").otherwise("start")
    reached = until.cum_max().shift(1).over("rank", "process", "thread")
    inner = (pl.col("category") == "driver") & (pl.col("start") < reached)
    return calls.select((~inner.fill_null(value=False)).cum_sum().cast(pl.Int64) - 1).to_series()
