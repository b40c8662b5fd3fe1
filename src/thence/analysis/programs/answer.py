"""XLA programs: number of executions, their span, busy time, and idle time inside and between executions.

span     from the start of an execution to its end, idle time inside it included
busy     the part of the span in which at least one of the execution's thunks ran (union)
between  from the end of the previous execution on the same device to the start of this one, less the time
         in which the device did other work: copies, kernels of no program. The previous execution is the one
         that ended last of all that began earlier, whether or not it counts here (warm-up, incomplete,
         autotuning).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.programs.warmup import Phases, WarmUp, phases
from thence.model.answer import Answer, TableView
from thence.model.columns import group_sums
from thence.model.intervals import NEVER, covered_lengths, reached_before, union_lengths
from thence.model.thresholds import SHOWN_SHARE
from thence.model.totals import must
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.model.attributed import Attributed


_HEADINGS = {
    "name": "program",
    "share": "share",
    "executions": "runs",
    "span_ns_total": "span",
    "span_ns_mean": "mean",
    "span_ns_std": "+-",
    "thunks_mean": "thunks",
    "thunks_std": "+-",
    "idle_inside_ns": "idle inside",
    "idle_between_ns": "between",
    "busy_ns_total": "busy",
    "launch_latency_ns_mean": "launch",
}


class By(enum.Enum):
    """When two executions count as the same program."""

    IDENTITY = "identity"
    """Equal fingerprint, or equal name and number: different programs of one name are separate rows."""
    NAME = "name"
    """Equal name, as in the notebook of nsys-jax."""


@dataclass(frozen=True)
class Programs(Answer):
    """Time of XLA programs on the GPU.

    Standard deviations are those of the population (ddof 0), as in nsys-jax's notebook.

    Attributes:
        phases: which executions were counted, and which were left out.
        programs: by program, longest first: program, name, executions, span_ns_total (Int64), span_ns_mean,
            span_ns_std, busy_ns_total, thunks_mean, thunks_std, thunk_ns (sum over thunks), idle_inside_ns
            (span less busy), idle_between_ns (before its executions), launch_latency_ns_mean and _max (from
            the host's launch to the start of the execution; null where the trace has no host times), share (of
            the spans of all programs, from 0 to 1).
        devices: by rank and device: executions, span_ns, busy_ns, idle_inside_ns, idle_between_ns, wall_ns
            (first start to last end). Unless programs overlap, wall_ns = span_ns + idle_between_ns + the time in
            between of other work and of executions that are left out.
        executions: one row per counted execution: row (in Tables.programs), rank, device, program, name,
            start, duration, thunks, thunk_ns, busy_ns, idle_inside_ns, idle_before_ns (null for the first
            of a device), launch_latency_ns.
    """

    phases: Phases
    programs: pl.DataFrame
    devices: pl.DataFrame
    executions: pl.DataFrame

    @property
    def large(self) -> int:
        """How many programs tables and pictures show: those with at least `SHOWN_SHARE`, but at least one."""
        return max(1, int((self.programs["share"] >= SHOWN_SHARE).sum()))

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return (several(self.programs.height, "XLA program"),)

    def views(self) -> tuple[TableView, ...]:
        """The programs; a terminal shows those of at least `SHOWN_SHARE` of the time."""
        ranked = ("name", "executions", "span_ns_total", "busy_ns_total", "idle_inside_ns")
        return (TableView(self.programs, _HEADINGS, ranked=ranked, rows_shown=self.large, bar="span_ns_total"),)

    def remarks(self) -> Iterator[str]:
        """Whether times are summed over devices, and what was left out."""
        gpus = self.devices.select("rank", "device").n_unique()
        if gpus > 1:
            yield f"span, idle and busy time are summed over {several(gpus, 'GPU')}"
        yield self.phases.counted_statement

    def self_check(self) -> None:
        """See `Answer`."""
        of_all = self.executions
        expected = (
            of_all.height,
            *of_all.select(pl.col("duration", "busy_ns", "idle_inside_ns", "idle_before_ns").sum()).row(0),
        )
        columns = ("executions", "span_ns{}", "busy_ns{}", "idle_inside_ns", "idle_between_ns")
        for frame, ending, what in ((self.programs, "_total", "programs"), (self.devices, "", "devices")):
            sums = frame.select(pl.col(c.format(ending)).sum() for c in columns).row(0)
            must(self.caveats.inputs, sums == expected, f"the times of {what} do not add up to their executions")

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: each time in milliseconds and in nanoseconds, units in the keys.

        ``gpu_ms_*`` and ``idle_before_ns`` are older names of ``span_ms_*`` and ``idle_between_ns``.
        """
        rows = self.programs.select(
            pl.col("name").alias("program"),
            pl.col("program").alias("identity"),
            "executions",
            "share",
            *_milliseconds("gpu", "span", "total", "mean", "std"),
            *_milliseconds("span", "span", "total", "mean", "std"),
            *_milliseconds("busy", "busy", "total"),
            (pl.col("idle_inside_ns") / 1e6).alias("idle_inside_ms"),
            (pl.col("idle_between_ns") / 1e6).alias("idle_between_ms"),
            *_milliseconds("launch_latency", "launch_latency", "mean", "max"),
            "thunks_mean",
            "thunks_std",
            "span_ns_total",
            "busy_ns_total",
            "idle_inside_ns",
            "idle_between_ns",
            pl.col("idle_between_ns").alias("idle_before_ns"),
            "launch_latency_ns_mean",
            "launch_latency_ns_max",
        )
        devices = self.devices.with_columns(gpu_ns="span_ns", active_ns="busy_ns")
        left_out = self.phases.left_out.with_columns(*_milliseconds("span", "span", "total"))
        return {
            "warm_up": self.phases.rule.value,
            "statement": self.phases.counted_statement,
            "rows": rows.rows(named=True),
            "devices": devices.rows(named=True),
            "left_out": left_out.rows(named=True),
        }


def _milliseconds(name: str, column: str, *statistics: str) -> list[pl.Expr]:
    """Columns ``<column>_ns_<statistic>`` in milliseconds, as ``<name>_ms_<statistic>``."""
    return [(pl.col(f"{column}_ns_{s}") / 1e6).alias(f"{name}_ms_{s}") for s in statistics]


def programs(trace: Attributed, warm_up: WarmUp | Phases = WarmUp.HEURISTIC, by: By = By.IDENTITY) -> Programs:
    """Executions, GPU time and idle time of every program.

    Args:
        trace: the attributed trace; if a part of it is selected, the executions that have selected work count, each as
            a whole.
        warm_up: rule that decides which executions count, or the result of the rule.
        by: when two executions count as the same program.
    """
    around = trace.around
    phase = phases(around, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    executions = _executions(around, phase)
    if around is not trace:
        executions = executions.filter(pl.col("row").is_in(trace.gpu["program"].drop_nulls().cast(pl.UInt32).implode()))
    keys = ["program", "name"] if by is By.IDENTITY else ["name"]
    return Programs(phase, _by_program(executions, keys), _by_device(executions), executions)


def _executions(trace: Attributed, phase: Phases) -> pl.DataFrame:
    every = (
        trace.programs.with_row_index("row")
        .select(
            "row",
            "rank",
            "device",
            pl.col("program", "name").cast(pl.String),
            "start",
            "duration",
            (pl.col("start") - pl.col("launch")).alias("launch_latency_ns"),
            counted=phase.counted,
        )
        .sort("rank", "device", "start", maintain_order=True)
    )
    thunks = _thunks(trace)
    return (
        every.with_columns(idle_before_ns=_idle_before(every, trace.gpu))
        .filter("counted")
        .drop("counted")
        .join(thunks, on="row", how="left", maintain_order="left")
        .with_columns(idle_inside_ns=(pl.col("duration") - pl.col("busy_ns")).clip(lower_bound=0))
    )


def _idle_before(every: pl.DataFrame, gpu: pl.DataFrame) -> pl.Series:
    """Idle time of the device between each execution and the one before; null for the first of a device.

    Args:
        every: executions, counted or not, by rank, device and start.
    """
    place = every.select(pl.struct("rank", "device").rle_id()).to_series().to_numpy()
    start = every["start"].to_numpy()
    before = reached_before(start + every["duration"].to_numpy(), place.astype(np.int64))
    gap = (before != NEVER) & (start > before)
    idle = np.where(gap, start - np.where(gap, before, start), 0)
    for (rank, device), part in gpu.group_by("rank", "device"):
        begin = part["start"].to_numpy()
        here = ((every["rank"] == rank) & (every["device"] == device)).to_numpy() & gap
        idle[here] -= covered_lengths(before[here], start[here], begin, begin + part["duration"].to_numpy())
    return pl.select(pl.when(pl.lit(pl.Series(before != NEVER))).then(pl.Series(idle))).to_series()


def _thunks(trace: Attributed) -> pl.DataFrame:
    """One row for every row of ``Tables.programs``: its number of thunks, and the sum and union of their times."""
    rows = trace.programs.height
    gpu = trace.gpu.filter(pl.col("program").is_not_null()).select("program", "start", "duration")
    group = gpu["program"].to_numpy().astype(np.int64)
    start = gpu["start"].to_numpy()
    duration = gpu["duration"].to_numpy()
    return pl.DataFrame(
        {
            "row": pl.Series(np.arange(rows), dtype=pl.UInt32),
            "thunks": np.bincount(group, minlength=rows),
            "thunk_ns": group_sums(group, duration, rows),
            "busy_ns": union_lengths(group, start, start + duration, rows),
        }
    )


def _by_program(executions: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    identity = pl.col("program").first() if "program" in keys else pl.col("name").first().alias("program")
    grouped = executions.group_by(keys, maintain_order=True).agg(
        *([] if "program" in keys else [identity]),
        executions=pl.len(),
        span_ns_total=pl.col("duration").sum(),
        span_ns_mean=pl.col("duration").mean(),
        span_ns_std=pl.col("duration").std(ddof=0),
        busy_ns_total=pl.col("busy_ns").sum(),
        thunks_mean=pl.col("thunks").mean(),
        thunks_std=pl.col("thunks").std(ddof=0),
        thunk_ns=pl.col("thunk_ns").sum(),
        idle_inside_ns=pl.col("idle_inside_ns").sum(),
        idle_between_ns=pl.col("idle_before_ns").sum(),
        launch_latency_ns_mean=pl.col("launch_latency_ns").mean(),
        launch_latency_ns_max=pl.col("launch_latency_ns").max(),
    )
    ordered = ["program", "name", *(c for c in grouped.columns if c not in ("program", "name"))]
    share = pl.col("span_ns_total") / pl.col("span_ns_total").sum().clip(lower_bound=1)
    return grouped.select(ordered).with_columns(share=share).sort("span_ns_total", descending=True, maintain_order=True)


def _by_device(executions: pl.DataFrame) -> pl.DataFrame:
    end = pl.col("start") + pl.col("duration")
    return (
        executions.group_by("rank", "device", maintain_order=True)
        .agg(
            executions=pl.len(),
            span_ns=pl.col("duration").sum(),
            busy_ns=pl.col("busy_ns").sum(),
            idle_inside_ns=pl.col("idle_inside_ns").sum(),
            idle_between_ns=pl.col("idle_before_ns").sum(),
            wall_ns=end.max() - pl.col("start").min(),
        )
        .sort("rank", "device")
    )
