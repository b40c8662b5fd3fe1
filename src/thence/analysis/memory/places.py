"""Places of allocations: those that the format states, else by the host ranges around the call, as for launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.places import Contexts, HostPlaces
from thence.attribution.host_rows import gathered, host_rows
from thence.attribution.launch_phases import row_phases
from thence.model.columns import row_numbers, values_or
from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import NO_ROW, chain_to, innermost, last_begun
from thence.model.own_code import OwnCode

if TYPE_CHECKING:
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed

_BY_CONTEXT = ("module", "source", "label")
PLACES = (*_BY_CONTEXT, "op", "phase")
"""Kinds of places of allocations that host ranges show."""
HOST_DEVICE = -1
"""Stands for the host's memory, whose device is null, where tables are joined."""
DEVICE = ("rank", "device", "allocator")
"""What identifies an allocator; ``device`` is `HOST_DEVICE` for the host's memory."""
_ALLOCATES = r"^aten::(?:new_)?empty(?:_\w+)?$|^aten::resize_?$|^MemoryAllocation$"
"""Operators that allocate for the operator around them, and the event of XLA's allocator itself."""
_LATEST = np.iinfo(np.int64).max


def with_device(frame: pl.DataFrame) -> pl.DataFrame:
    """A table of memory whose device is `HOST_DEVICE` for the host's memory, so that it can be joined."""
    return frame.with_columns(pl.col("device").fill_null(HOST_DEVICE))


@dataclass(frozen=True)
class MemoryPlaces:
    """The places of calls of allocators.

    Attributes:
        trace: attributed.
        calls: rows of `thence.model.tables.MEMORY` or `MEMORY_FAILURES`.
    """

    trace: Attributed
    calls: pl.DataFrame

    @cached_property
    def host(self) -> Int64:
        """The innermost row of host around each call, `NO_ROW` where none is."""
        result = np.full(self.calls.height, NO_ROW, np.int64)
        table = self.trace.host
        keys = ("rank", "process", "thread")
        time_of_place = pl.coalesce("launch", "start") if "launch" in self.calls.columns else pl.col("start")
        called = self.calls.select(*keys, start=time_of_place).with_row_index("row").drop_nulls()
        if called.is_empty() or table.is_empty():
            return result
        start = table["start"].to_numpy()
        end = start + table["duration"].to_numpy()
        number, threads = numbered(table, *keys)
        rows_of_threads = rows_of_groups(number, threads.height)
        joined = called.join(threads.with_row_index("number"), on=keys, how="inner", maintain_order="left")
        of_thread = rows_of_groups(joined["number"].to_numpy().astype(np.int64), threads.height)
        row, time = joined["row"].to_numpy(), joined["start"].to_numpy()
        for rows, calls in zip(rows_of_threads, of_thread, strict=True):
            if len(calls):
                moments = time[calls], time[calls]
                result[row[calls]] = innermost(rows, start, end, self.parent, moments)
        return result

    @cached_property
    def parent(self) -> Int64:
        """The parent of each row of host, `NO_ROW` for none."""
        return row_numbers(self.trace.host["parent"])

    @cached_property
    def operator(self) -> Int64:
        """The innermost operator around each call, as a row of host; `NO_ROW` for none."""
        return chain_to(self.parent, self.host, self._is_operator)

    @cached_property
    def _asking_operator(self) -> Int64:
        """The innermost operator around each call that does more than allocate; without one, the innermost."""
        names = self.trace.host["name"]
        used = names.filter(pl.Series(self._is_operator)).unique().drop_nulls()
        allocating = used.filter(used.cast(pl.String).str.contains(_ALLOCATES))
        computes = self._is_operator & ~names.is_in(allocating.implode()).fill_null(value=False).to_numpy()
        outer = chain_to(self.parent, self.host, computes)
        return np.where(outer == NO_ROW, self.operator, outer)

    @cached_property
    def _is_operator(self) -> Mask:
        is_operator: Mask = (self.trace.host["category"] == "op").to_numpy()
        return is_operator

    @cached_property
    def _found(self) -> HostPlaces:
        return HostPlaces.of(self.trace, Contexts.of(self.trace.host), [pl.Series(self.host)], _BY_CONTEXT)

    @cached_property
    def _phases(self) -> tuple[Int64, pl.Series, pl.Series]:
        """The rows of operators, their phases, and those of the calls.

        Unlike other places, phases depend on more than the ranges around a row: only the forward pass of what is
        differentiated is one.
        """
        operators = np.flatnonzero(self._is_operator)
        rows = np.concatenate([operators, self.host])
        own = OwnCode.of(self.trace.own, self.trace.installed)
        phases = row_phases(host_rows(self.trace, rows, own))
        return operators, phases[: len(operators)], phases[len(operators) :]

    def _of_host(self, kind: str) -> pl.Series:
        if kind == "phase":
            return self._phases[2]
        if kind == "op":
            return gathered(self.trace.host["name"], self._asking_operator)
        context = self._found.contexts.at(pl.Series(self.host)).astype(np.int64)
        return gathered(self._found.names[kind], context)

    def of_calls(self, kind: str) -> pl.Series:
        """The place of each call: the stated one, else that of the host ranges around it."""
        stated = self.calls[kind]
        if self.trace.host.is_empty():
            return stated
        host = self._of_host(kind)
        return stated if host.null_count() == len(host) else pl.select(pl.coalesce(stated, host)).to_series()

    @cached_property
    def phase_starts(self) -> pl.DataFrame:
        """When operators of each pass began: rank, phase, start; sorted by rank and start."""
        rows, phases, _ = self._phases
        return (
            self.trace.host.select("rank", "start")[rows].with_columns(phase=phases).drop_nulls().sort("rank", "start")
        )

    @cached_property
    def step(self) -> Int64:
        """The row of steps in which each call was made, `NO_ROW` outside of steps."""
        device = values_or(self.calls["device"], HOST_DEVICE)
        return steps_at(self.trace, self.calls["rank"].to_numpy(), device, self.calls["start"])


def steps_at(trace: Attributed, ranks: Int64, devices: Int64, times: pl.Series) -> Int64:
    """The row of steps that each time of a rank's device is in, `NO_ROW` for none; times may be null."""
    result = np.full(len(times), NO_ROW, np.int64)
    known = times.is_not_null().to_numpy()
    time = values_or(times, 0)
    steps = trace.steps.with_row_index("row").select("row", "rank", "device", "start", "duration")
    for rank, device in np.unique(np.stack([ranks[known], devices[known]]), axis=1).T.tolist():
        of_device = steps.filter(pl.col("rank") == rank, pl.col("device").is_null() | (pl.col("device") == device))
        if of_device.is_empty():
            continue
        calls = np.flatnonzero(known & (ranks == rank) & (devices == device))
        row, start, duration = (of_device[name].to_numpy() for name in ("row", "start", "duration"))
        last = last_begun(start, time[calls])
        inside = (last != NO_ROW) & (time[calls] < start[last] + duration[last])
        result[calls[inside]] = row[last[inside]]
    return result


def next_start(starts: Int64, times: Int64) -> Int64:
    """The first of the sorted starts at or after each time; the largest int64 if there is none."""
    return np.append(starts, _LATEST)[np.searchsorted(starts, times)]
