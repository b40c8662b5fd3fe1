"""Compile time by phase; self times add up to wall time although several threads compile in parallel.

On the thread that called the compiler, time belongs to the innermost range. While that thread waits
for workers, the time from the first worker's start to the last worker's end counts once as wall time
and is divided among the phases in proportion to the time each takes on the workers. This is the
accounting of nsys-jax (generate_compilation_statistics). The self times sum exactly to the wall time
of the outermost XlaCompile ranges.

nsys-jax's early versions dropped the rest of a range that launched workers (its time outside the
workers and other children); here it counts as self time of the range.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.answer import Answer, TableView
from thence.model.intervals import NO_ROW, chain_to, covered_lengths, innermost
from thence.model.totals import MIN_NS, ROUNDING, must
from thence.units import format_ns, several

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


SHOWN_SHARE = 0.99
"""A terminal shows the longest phases that together take this share of the time."""
LIBRARY_LOADING = "first XlaCompile: library loading"
"""Phase to which the self time of a process's first compilation is counted: it loads cuBLAS, cuDNN and others."""

_COMPILE = "XlaCompile"
_AUTOTUNING = ("XlaAutotunerCompilation", "XlaAutotunerMeasurement")
_MODULE = r"[#,]module=([^#,]+)"


class Autotuning(enum.Enum):
    """How the phases inside autotuning are counted."""

    BLOCK = "block"
    """As XlaAutotunerCompilation or XlaAutotunerMeasurement, without the phases inside these."""
    DETAIL = "detail"
    """Phase by phase, together with the same phases outside autotuning."""


@dataclass(frozen=True)
class Compilation(Answer):
    """Compile time of a trace by phase and by program.

    Attributes:
        autotuning: how the phases inside autotuning are counted.
        wall_ns: duration of the outermost XlaCompile ranges, summed over ranks.
        phases: by phase, longest first: name, self_ns (Float64; wall time of this phase alone, summed over
            ranks; the column sums to wall_ns), total_ns (with the phases inside, so totals overlap), share (of
            wall_ns), count (of ranges), self_ns_min and self_ns_max (smallest and largest self time of one
            rank in this phase; the smallest is 0 if a rank does not have the phase).
        ranks: by rank: rank, total_ns (wall time of its outermost XlaCompile ranges).
        programs: by outermost XlaCompile, in order of rank and start: rank, program, start, total_ns (wall
            time), autotuning_ns, and parallel_ns (wall time in which workers were busy, in autotuning or
            not); the latter two are part of total_ns.
    """

    autotuning: Autotuning
    wall_ns: int
    phases: pl.DataFrame
    ranks: pl.DataFrame
    programs: pl.DataFrame

    def covering(self, share: float) -> int:
        """How many of the longest phases together take at least this share (0 to 1) of the wall time."""
        before = int((self.phases["share"].cum_sum() < share - 1e-9).sum())  # sums are inexact
        return min(before + 1, self.phases.height)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (
            f"compilation: {format_ns(self.wall_ns)}",
            f"{several(self.programs.height, 'compilation')} of {several(self.ranks.height, 'rank')}",
        )

    def views(self) -> tuple[TableView, ...]:
        """The phases; a terminal shows as many as take `SHOWN_SHARE` of the time."""
        headings = {"name": "phase", "count": "count", "self_ns": "time", "share": "share"}
        if self.ranks.height > 1:
            headings |= {"self_ns_min": "least rank", "self_ns_max": "most rank"}
        return (TableView(self.phases, headings, rows_shown=self.covering(SHOWN_SHARE), bar="self_ns"),)

    def remarks(self) -> Iterator[str]:
        """The time of all phases, and of the slowest and the fastest rank where there are several."""
        total = f"compilation took {format_ns(self.wall_ns)} of wall time in {several(self.programs.height, 'program')}"
        if self.ranks.height < 2:
            yield total
            return
        by_rank = self.ranks.sort("total_ns", descending=True)
        (slowest, most), (fastest, least) = by_rank.row(0), by_rank.row(-1)
        yield (
            f"{total}, added over {self.ranks.height} ranks: rank {slowest} took the longest "
            f"({format_ns(most)}), rank {fastest} the shortest ({format_ns(least)})"
        )

    def self_check(self) -> None:
        """See `Answer`."""
        wall, phases = self.wall_ns, self.phases
        adds_up = math.isclose(float(phases["self_ns"].sum()), wall, rel_tol=ROUNDING, abs_tol=MIN_NS * phases.height)
        must(self.caveats.inputs, adds_up, "the phases of compilation do not add up to its wall time")

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {
            "autotuning": self.autotuning.value,
            "total_ns": self.wall_ns,
            "rows": self.phases.rows(named=True),
            "ranks": self.ranks.rows(named=True),
            "programs": self.programs.rows(named=True),
        }


def compilation(trace: Attributed, autotuning: Autotuning = Autotuning.BLOCK) -> Compilation:
    """Compile time by phase and by program.

    Args:
        trace: its host ranges of category compile are used; each process of a rank is accounted separately.
        autotuning: how the phases inside autotuning are counted.
    """
    ranges = trace.host.with_row_index("row").filter(pl.col("category") == "compile")
    parts = [
        _accounted(_Ranges.of(part, trace.host.height), autotuning)
        for part in ranges.partition_by("rank", "process", maintain_order=True)
    ]
    rows = pl.concat(parts) if parts else _EMPTY
    outermost = rows.filter("outermost")
    wall = int(outermost["total_ns"].sum())
    ranks = outermost.group_by("rank").agg(pl.col("total_ns").sum().cast(pl.Int64)).sort("rank")
    return Compilation(autotuning, wall, _by_phase(rows, ranks.height, wall), ranks, _by_program(rows))


def _by_phase(rows: pl.DataFrame, ranks: int, wall_ns: int) -> pl.DataFrame:
    by_rank = (
        rows.filter(pl.col("self_ns").is_not_null())
        .group_by("name", "rank")
        .agg(pl.col("self_ns", "total_ns").sum(), count=pl.len())
    )
    everywhere = pl.len() == ranks  # a rank without the phase spent 0 ns in it
    return (
        by_rank.group_by("name")
        .agg(
            pl.col("self_ns", "total_ns").sum(),
            pl.col("count").sum(),
            self_ns_min=pl.when(everywhere).then(pl.col("self_ns").min()).otherwise(0.0),
            self_ns_max=pl.col("self_ns").max(),
        )
        .with_columns(share=pl.col("self_ns") / max(wall_ns, 1))
        .select("name", "self_ns", "total_ns", "share", "count", "self_ns_min", "self_ns_max")
        .sort("self_ns", "name", descending=[True, False])
    )


_EMPTY = pl.DataFrame(
    schema={
        "row": pl.Int64,
        "rank": pl.Int32,
        "name": pl.String,
        "program": pl.String,
        "start": pl.Int64,
        "self_ns": pl.Float64,
        "total_ns": pl.Float64,
        "top": pl.Int64,
        "outermost": pl.Boolean,
        "tuning": pl.Boolean,
        "parallel_ns": pl.Float64,
    }
)


@dataclass(frozen=True)
class _Ranges:
    """The compile ranges of one process as arrays, with row numbers of their own."""

    frame: pl.DataFrame
    start: Int64
    end: Int64
    parent: Int64
    phase: npt.NDArray[np.object_]
    main: Mask  # on a thread that called the compiler
    launcher: Int64  # for a worker's range, the main thread's range that it works for; or NO_ROW

    @classmethod
    def of(cls, frame: pl.DataFrame, height: int) -> _Ranges:
        numbers = np.full(height + 1, NO_ROW, np.int64)
        numbers[frame["row"].to_numpy()] = np.arange(frame.height)
        above = frame["parent"].cast(pl.Int64).fill_null(height).to_numpy()
        parent = numbers[above]
        start = frame["start"].to_numpy()
        end = start + frame["duration"].to_numpy()
        phase = _phases(frame["name"]).to_numpy()
        rows = np.arange(frame.height)
        top = chain_to(parent, rows, parent == NO_ROW)
        main = phase[top] == _COMPILE
        launcher = _launchers(frame["thread"].to_numpy(), start, end, parent, main)
        return cls(frame, start, end, parent, phase, main, np.where(main, NO_ROW, launcher[top]))


def _phases(names: pl.Series) -> pl.Series:
    """The phase of each range name: the text before ``:`` or ``#``; XlaPassPipeline counts as XlaPass."""
    phase = pl.col("name").cast(pl.String).str.extract(r"^([^:#]+)")
    return names.to_frame("name").select(phase.replace("XlaPassPipeline", "XlaPass")).to_series()


def _launchers(thread: Int64, start: Int64, end: Int64, parent: Int64, main: Mask) -> Int64:
    """For each outermost range of a worker thread, the innermost enclosing range on a main thread."""
    launcher = np.full(len(start), NO_ROW, np.int64)
    workers = np.flatnonzero(~main & (parent == NO_ROW))
    for number in np.unique(thread[main]):
        rows = np.flatnonzero(main & (thread == number))  # in order of their start
        around = innermost(rows, start, end, parent, (start[workers], end[workers]))
        # If several threads compile at the time, the thread whose range began last is the launcher.
        launcher_start = np.where(launcher[workers] >= 0, start[launcher[workers]], np.iinfo(np.int64).min)
        later = (around >= 0) & (start[around] > launcher_start)
        launcher[workers[later]] = around[later]
    return launcher


def _accounted(ranges: _Ranges, autotuning: Autotuning) -> pl.DataFrame:
    """Self and total wall time of every range of one process, in the columns of `_EMPTY`."""
    duration = (ranges.end - ranges.start).astype(np.float64)
    # Above the outermost range of a worker is the range that launched the worker.
    above = np.where(ranges.parent >= 0, ranges.parent, np.where(ranges.parent == NO_ROW, ranges.launcher, NO_ROW))
    tuning = np.isin(ranges.phase, _AUTOTUNING)
    inside_tuning = chain_to(above, above, tuning) >= 0
    hidden = inside_tuning if autotuning is Autotuning.BLOCK else np.zeros(len(duration), bool)
    self_time = duration - _children(ranges.parent, duration, ~hidden)
    launchers, parallel = _parallel(ranges, ~hidden & (ranges.launcher >= 0))
    self_time[launchers] -= parallel
    scale = _shares(ranges, self_time, hidden, launchers, parallel)
    counted = ~hidden & (ranges.main | (ranges.launcher >= 0))
    top = chain_to(above, np.arange(len(above)), above == NO_ROW)
    first = _first_compile(ranges)
    name = np.where(np.arange(len(self_time)) == first, LIBRARY_LOADING, ranges.phase)
    window = np.zeros(len(self_time))
    everywhere, busy = _parallel(ranges, ranges.launcher >= 0)  # autotuning shown or not
    window[everywhere] = busy
    frame = pl.DataFrame(
        {
            "row": ranges.frame["row"].cast(pl.Int64),
            "rank": ranges.frame["rank"],
            "name": pl.Series(name.tolist(), dtype=pl.String),
            "program": ranges.frame["name"].cast(pl.String).str.extract(_MODULE),
            "start": ranges.start,
            "self_ns": self_time * scale,
            "total_ns": duration * scale,
            "top": ranges.frame["row"].cast(pl.Int64).to_numpy()[top],
            "outermost": ranges.main & (ranges.parent == NO_ROW),
            "tuning": tuning & ~inside_tuning,
            "parallel_ns": window,
        }
    )
    return frame.with_columns(pl.when(pl.Series(counted)).then(pl.col("self_ns")).alias("self_ns")).select(
        *_EMPTY.columns
    )


def _children(parent: Int64, duration: npt.NDArray[np.float64], counted: Mask) -> npt.NDArray[np.float64]:
    """For each range, the summed duration of its direct children, which are on the same thread."""
    chosen = np.flatnonzero((parent >= 0) & counted)
    summed = np.bincount(parent[chosen], weights=duration[chosen], minlength=len(parent))
    return summed.astype(np.float64)  # bincount returns integers for empty input


def _parallel(ranges: _Ranges, workers: Mask) -> tuple[Int64, npt.NDArray[np.float64]]:
    """Ranges that launched workers, and the wall time during which those workers were busy.

    The wall time is counted from the workers' first start to their last end, less the time of the
    launching range's own children in between.
    """
    tops = np.flatnonzero(workers & (ranges.parent == NO_ROW))
    launchers, group = np.unique(ranges.launcher[tops], return_inverse=True)
    first = np.full(len(launchers), np.iinfo(np.int64).max)
    last = np.full(len(launchers), np.iinfo(np.int64).min)
    np.minimum.at(first, group, ranges.start[tops])
    np.maximum.at(last, group, ranges.end[tops])
    busy = np.zeros(len(launchers), np.int64)
    for number, launcher in enumerate(launchers):  # a few hundred at most
        child_rows = np.flatnonzero(ranges.parent == launcher)
        window = (first[number : number + 1], last[number : number + 1])
        busy[number] = covered_lengths(*window, ranges.start[child_rows], ranges.end[child_rows])[0]
    return launchers, (last - first - busy).astype(np.float64)


def _shares(
    ranges: _Ranges, own: npt.NDArray[np.float64], hidden: Mask, launchers: Int64, parallel: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The ns of wall time for which 1 ns of each range counts: 1 on main threads, less on parallel workers."""
    scale = np.ones(len(own))
    working = np.flatnonzero(~hidden & (ranges.launcher >= 0))
    group = np.searchsorted(launchers, ranges.launcher[working])
    summed = np.bincount(group, weights=own[working], minlength=len(launchers))
    share = np.divide(parallel, summed, out=np.zeros(len(launchers)), where=summed > 0)
    scale[working] = share[group]
    return scale


def _first_compile(ranges: _Ranges) -> int:
    """Row of the first outermost XlaCompile; NO_ROW if there is none."""
    rows = np.flatnonzero(ranges.main & (ranges.parent == NO_ROW))
    return int(rows[np.argmin(ranges.start[rows])]) if len(rows) else NO_ROW


def _by_program(rows: pl.DataFrame) -> pl.DataFrame:
    within = rows.group_by("top").agg(
        autotuning_ns=pl.col("total_ns").filter("tuning").sum(), parallel_ns=pl.col("parallel_ns").sum()
    )
    return (
        rows.filter("outermost")
        .select("rank", "program", "start", "total_ns", "row")
        .join(within, left_on="row", right_on="top", how="left", maintain_order="left")
        .drop("row")
        .sort("rank", "start", maintain_order=True)
    )
