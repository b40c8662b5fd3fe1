"""The host table as arrays, with the launch of every device activity: the input of attribution by launches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.sources import parse_frames
from thence.model.columns import name_codes, row_numbers
from thence.model.grouped_intervals import numbered, rows_of_groups
from thence.model.intervals import NO_ROW, chain_to, last_begun
from thence.model.launches import CALLS, UNCERTAIN, matched_rows
from thence.model.tables import HOST_CATEGORIES

if TYPE_CHECKING:
    from thence.attribution.sources import Frames
    from thence.model.arrays import Array, Int64, Mask, UInt8, UInt32
    from thence.model.own_code import OwnCode
    from thence.model.tables import Tables


@dataclass(frozen=True)
class HostRows:
    """The host table as arrays, with the launches of the activities.

    Attributes:
        tables: of the trace.
        own: which files are the user's own code.
        category: position in `HOST_CATEGORIES` of each row.
        parent, forward: row numbers, `NO_ROW` for none.
        launch: host row that launched each activity.
    """

    tables: Tables
    own: OwnCode
    category: UInt8
    parent: Int64
    forward: Int64
    launch: Int64
    _masks: dict[tuple[str, ...], Mask] = field(default_factory=dict)
    _names_of: dict[tuple[str, ...], pl.Series] = field(default_factory=dict)

    @property
    def names(self) -> pl.Series:
        """Name of every host row."""
        return self.tables.host["name"]

    @cached_property
    def backward_op(self) -> Int64:
        """The nearest op around each launch that has a forward op, `NO_ROW` for none."""
        return self.climb(self.launch, self.forward != NO_ROW)

    @cached_property
    def forward_op(self) -> Int64:
        """The forward op of each `backward_op`, `NO_ROW` for none."""
        return values_at(self.forward, self.backward_op, NO_ROW)

    @cached_property
    def frames(self) -> Frames:
        """The host rows parsed as Python frames."""
        return parse_frames(self.tables.host, self.own)

    @cached_property
    def in_graph(self) -> Mask:
        """Which activities were launched by cudaGraphLaunch, cuGraphLaunch or hipGraphLaunch."""
        of_graph = self.with_names(_matching(self.used_names("runtime", "driver"), "GraphLaunch"))
        return values_at(of_graph, self.launch, missing=False)

    @cached_property
    def step(self) -> pl.Series:
        """The step that was open when the launch began, on any thread of the launching process.

        Of nested steps, such as a server's step inside a profiler's, this is the outermost.
        """
        table = self.tables.host
        step_row = np.full(len(self.launch), NO_ROW, np.int64)
        of_step = self.of("step")
        steps = np.flatnonzero(of_step)
        steps = steps[self.climb(self.parent[steps], of_step) == NO_ROW]
        launched = np.flatnonzero(self.launch != NO_ROW)
        if not len(steps) or not len(launched):
            return gathered(self.names, step_row)
        start = table["start"].to_numpy()
        end = start + table["duration"].to_numpy()
        number, processes = numbered(table, "rank", "process")
        steps_of, launched_of = (
            rows_of_groups(number[rows], processes.height) for rows in (steps, self.launch[launched])
        )
        for process_steps, process_launches in zip(steps_of, launched_of, strict=True):
            if not len(process_steps):
                continue
            rows, activities = steps[process_steps], launched[process_launches]
            time = start[self.launch[activities]]
            last = last_begun(start[rows], time)
            inside = (last != NO_ROW) & (time < end[rows[last]])
            step_row[activities[inside]] = rows[last[inside]]
        return gathered(self.names, step_row)

    def of(self, *categories: str) -> Mask:
        """Which host rows are of one of the categories."""
        if categories not in self._masks:
            chosen = _are(categories) & self._recorded
            self._masks[categories] = chosen.take(self.category) if chosen.any() else self._none
        return self._masks[categories]

    @cached_property
    def _recorded(self) -> Mask:
        """Which of `HOST_CATEGORIES` occur."""
        counts: Mask = np.bincount(self.category, minlength=len(HOST_CATEGORIES)) > 0
        return counts

    @cached_property
    def _none(self) -> Mask:
        """A mask that selects no host row; read-only, because callers share it."""
        none = np.zeros(len(self.parent), np.bool_)
        none.flags.writeable = False
        return none

    def climb(self, rows: Int64, wanted: Mask) -> Int64:
        """The nearest wanted host row among each row and its ancestors, `NO_ROW` for none."""
        return chain_to(self.parent, rows, wanted)

    def used_names(self, *categories: str) -> pl.Series:
        """The distinct names of host rows of these categories."""
        if categories not in self._names_of:
            codes = self._codes[self._used]
            chosen = _are(categories).take(self.category[self._used]) & (codes != 0)
            _, first = np.unique(codes[chosen], return_index=True)
            self._names_of[categories] = self.names[self._used[chosen][first]]
        return self._names_of[categories]

    @cached_property
    def uncertain(self) -> dict[str, Mask]:
        """Which activities have a launch that does not show their place, by the code of the reason."""
        used = self.used_names("runtime", "driver")
        texts = used.cast(pl.String).to_list()
        names_of_code = {
            code: used.filter(np.array([text in names for text in texts], np.bool_))
            for code, names in UNCERTAIN.items()
        }
        return {
            code: values_at(self.with_names(names), self.launch, missing=False)
            for code, names in names_of_code.items()
            if len(names)
        }

    @cached_property
    def every_name(self) -> pl.Series:
        """The distinct names of host rows."""
        return self.used_names(*HOST_CATEGORIES)

    def named(self, pattern: str, *categories: str) -> Mask:
        """Which host rows of these categories have a name that contains a match of the pattern."""
        fitting = _matching(self.used_names(*categories), pattern)
        return self.of(*categories) & self.with_names(fitting) if len(fitting) else self._none

    def with_names(self, names: pl.Series) -> Mask:
        """Which host rows have one of these names (Categorical)."""
        if names.is_empty():
            return self._none
        codes = self._codes
        wanted = np.zeros(int(codes.max(initial=0)) + 1, np.bool_)
        numbers = name_codes(names)
        wanted[numbers[numbers < len(wanted)]] = True
        return wanted.take(codes)

    @cached_property
    def _used(self) -> Int64:
        """A row of each distinct pair of category and name."""
        pair = self._codes * np.int64(len(HOST_CATEGORIES)) + self.category
        row = np.full(int(pair.max(initial=0)) + 1, NO_ROW, np.int64)
        row[pair] = np.arange(len(pair))
        rows: Int64 = row[row != NO_ROW]
        return rows

    @cached_property
    def _codes(self) -> UInt32:
        """Number of the name of each host row, from 1 on; 0 for null."""
        return name_codes(self.names).astype(np.uint32)


def host_rows(tables: Tables, launch: Int64, own: OwnCode) -> HostRows:
    """The host table of a trace as arrays.

    Args:
        launch: host row that launched each row of gpu, `NO_ROW` where unknown.
    """
    category = tables.host["category"].to_physical().to_numpy()
    parent, forward = (row_numbers(tables.host[name]) for name in ("parent", "forward"))
    return HostRows(tables, own, category, parent, forward, launch)


def _matching(names: pl.Series, pattern: str) -> pl.Series:
    """The names that contain a match of the pattern."""
    return names.filter(names.cast(pl.String).str.contains(pattern)) if len(names) else names


def _are(categories: tuple[str, ...]) -> Mask:
    """Which of `HOST_CATEGORIES` are among the categories."""
    return np.array([category in categories for category in HOST_CATEGORIES], np.bool_)


def values_at(values: Array, rows: Int64, missing: int) -> Array:
    """The value at each row, ``missing`` at `NO_ROW`; ``values`` may be empty if all rows are `NO_ROW`."""
    result = np.full(len(rows), missing, values.dtype)
    valid = rows != NO_ROW
    result[valid] = values[rows[valid]]
    return result


def gathered(values: pl.Series, row: Int64) -> pl.Series:
    """The value at each row, null at `NO_ROW`."""
    return values[pl.Series(row).cast(pl.UInt32, strict=False)]  # negative numbers become null


_LINKED = pl.col("category").is_in(["op", "range", "framework"])


def launch_rows(tables: Tables) -> Int64:
    """Host row that launched each row of ``tables.gpu``, `NO_ROW` where the trace does not show it.

    This is the API call with the same correlation id or, where that call was not recorded, the op that the
    producer linked (``external``). A correlation id that several calls of one rank share identifies
    none of them.
    """
    launch = matched_rows(tables.gpu, tables.host, "correlation", CALLS)
    unknown = launch == NO_ROW
    if unknown.any():
        # For profilers that were told to record no API calls: in our recordings, 14.0 s of device time, it finds none.
        launch = np.where(unknown, matched_rows(tables.gpu, tables.host, "external", _LINKED), launch)
    return launch
