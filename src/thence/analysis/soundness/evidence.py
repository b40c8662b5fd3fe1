"""Data that several rules use: the launches of a trace with the device work of each, and the ranks' windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.launches import CALLS, IDENTIFIED
from thence.model.names import matching
from thence.model.row_groups import rows_by_number
from thence.units import format_ns

if TYPE_CHECKING:
    from thence.analysis.soundness.findings import Finding, NotChecked
    from thence.model.tables import Tables
    from thence.units import Ns

__all__ = ["Evidence", "Judgement", "Launches", "Window", "called"]

Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_KERNEL_LAUNCH = r"^(?:cuda|cu|hip)\w*Launch\w*Kernel"
_GRAPH_LAUNCH = r"^(?:cuda|cu|hip)GraphLaunch"
_WAIT = r"^(?:cudaDeviceSynchronize|cuCtxSynchronize|hipDeviceSynchronize)"


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

    A runtime call and the driver call that it makes are one launch.

    Attributes:
        table: rank, process, thread, start (ns), end (ns), graph (whether it launches a CUDA graph), work
            (number of device activities that it launched), first (start of the first of these, ns) and last (end of
            the last one, ns); both are null if there are none.
        of_work: for each device activity, the row of its launch in ``table``, or `NO_ROW`.
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
            .collect()
        )
        return {
            rank: Window(start, end, tuple(devices))
            for rank, start, end, devices in frame.select("rank", "start", "end", "devices").rows()
        }

    def window(self, rank: int) -> Window:
        """The window of a rank; an empty window for a rank without device work."""
        return self.windows.get(rank) or Window(0, 0, ())

    @cached_property
    def calls(self) -> pl.DataFrame:
        """The API calls: rank, process, thread, category, name, start, end (ns) and correlation, as in host."""
        return (
            self.tables.host.lazy()
            .filter(CALLS)
            .select(
                *("rank", "process", "thread", "category", "name", "start", "correlation"),
                end=pl.col("start") + pl.col("duration"),
            )
            .collect()
        )

    @cached_property
    def launches(self) -> Launches:
        """Every launch that has a correlation id, with its device work."""
        calls = called(self.calls, f"{_KERNEL_LAUNCH}|{_GRAPH_LAUNCH}").filter(
            pl.col("correlation").is_not_null() & IDENTIFIED
        )
        graph_names = called(calls, _GRAPH_LAUNCH)["name"].unique()
        calls = calls.with_columns(
            graph=pl.col("name").is_in(graph_names.implode()), launch=_outermost(calls)
        )
        row, ambiguous = self._matched(calls)
        table = _merged(calls).select(
            *("rank", "process", "thread", "start", "end", "graph", "correlation")
        )
        first, last = self._times_of_work(row, table.height)
        work = np.bincount(row[row != NO_ROW], minlength=table.height)
        table = table.with_columns(
            work=pl.Series(work, dtype=pl.Int64), first=pl.Series(first), last=pl.Series(last)
        ).with_columns(pl.when(pl.col("work") > 0).then(pl.col("first", "last")))
        return Launches(table, row, ambiguous)

    def _times_of_work(self, row: Int64, rows: int) -> tuple[Int64, Int64]:
        """First start and last end of the work of each launch (ns); arbitrary for a launch without work."""
        first = np.full(rows, np.iinfo(np.int64).max)
        last = np.full(rows, np.iinfo(np.int64).min)
        launched = row != NO_ROW
        start = self.tables.gpu["start"].to_numpy()[launched]
        np.minimum.at(first, row[launched], start)
        np.maximum.at(last, row[launched], start + self.tables.gpu["duration"].to_numpy()[launched])
        return first, last

    def _matched(self, calls: pl.DataFrame) -> tuple[Int64, Mask]:
        """The launch of each activity, and whether several launches have its correlation id."""
        gpu = self.tables.gpu
        row = np.full(gpu.height, NO_ROW, np.int64)
        ambiguous = np.zeros(gpu.height, np.bool_)
        ids = gpu["correlation"].fill_null(0).to_numpy()
        work = dict(rows_by_number(gpu["rank"].to_numpy()))
        for rank, rows in rows_by_number(calls["rank"].to_numpy()):
            part = calls[rows]
            wanted = work.get(rank, rows[:0])
            wanted = wanted[ids[wanted] != 0]
            known, launch = part["correlation"].to_numpy(), part["launch"].to_numpy()
            order = np.argsort(known, kind="stable")
            known, launch = known[order], launch[order]
            shared = (known[1:] == known[:-1]) & (launch[1:] != launch[:-1])
            several = np.isin(known, known[1:][shared])
            at = np.minimum(np.searchsorted(known, ids[wanted]), len(known) - 1)
            found = known[at] == ids[wanted]
            row[wanted[found]] = launch[at[found]]
            ambiguous[wanted[found]] = several[at[found]]
        return row, ambiguous

    @cached_property
    def launching_ranks(self) -> dict[int, tuple[int, int]]:
        """For each rank with launches, the number of its launches, and of its launches with device work."""
        counted = self.launches.table.group_by("rank").agg(
            pl.len().alias("launches"), working=(pl.col("work") > 0).sum()
        )
        return {rank: (n, working) for rank, n, working in counted.rows()}

    def waits(self, rank: int) -> pl.DataFrame:
        """The calls in which the host waited for all work of a device; columns as `calls`."""
        return self._waits.filter(pl.col("rank") == rank)

    @cached_property
    def _waits(self) -> pl.DataFrame:
        return called(self.calls, _WAIT)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """The profiler steps, as rows of host."""
        return self.tables.host.filter(pl.col("category") == "step")

    @cached_property
    def kernel_ranks(self) -> frozenset[int]:
        """Ranks that ran kernels."""
        kernels = self.tables.gpu.lazy().filter(pl.col("kind") == "kernel")
        return frozenset(kernels.select(pl.col("rank").unique()).collect()["rank"])

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
    return calls.group_by("launch", maintain_order=True).agg(
        *(pl.col(c).first() for c in ("rank", "process", "thread", "start", "correlation")),
        end=pl.col("end").max(),
        graph=pl.col("graph").any(),
    )


def _outermost(calls: pl.DataFrame) -> pl.Series:
    """The launch number of each call; a driver call inside a runtime call of its thread has the number of that call."""
    until = pl.when(pl.col("category") == "runtime").then("end").otherwise("start")
    reached = until.cum_max().shift(1).over("rank", "process", "thread")
    inner = (pl.col("category") == "driver") & (pl.col("start") < reached)
    return calls.select((~inner.fill_null(value=False)).cum_sum().cast(pl.Int64) - 1).to_series()
