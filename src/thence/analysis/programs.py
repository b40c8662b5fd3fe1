"""XLA programs: number of executions, GPU time, and idle time inside and between executions."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.warmup import Phases, WarmUp, phases
from thence.model.intervals import NEVER, reached_before, union_lengths

if TYPE_CHECKING:
    from thence.model.attributed import Attributed

__all__ = ["By", "Programs", "programs"]


class By(enum.Enum):
    """When two executions count as the same program."""

    IDENTITY = "identity"
    """Equal fingerprint, or equal name and number: different programs of one name are separate rows."""
    NAME = "name"
    """Equal name, as in the notebook of nsys-jax."""


@dataclass(frozen=True)
class Programs:
    """Time of XLA programs on the GPU.

    Standard deviations are those of the population (ddof 0), as in nsys-jax's notebook.

    Attributes:
        phases: which executions were counted, and why.
        programs: by program, longest first: program, name, executions, gpu_ns_total (Int64), gpu_ns_mean,
            gpu_ns_std, thunks_mean, thunks_std, thunk_ns (sum over thunks), active_ns (at least one
            thunk running), idle_inside_ns (none running during an execution), idle_before_ns (idle
            since the execution before on that device), launch_latency_ns_mean and _max (from the
            host's launch to the first thunk; null where the trace has no host times).
        devices: by rank and device: executions, gpu_ns, active_ns, idle_inside_ns, idle_between_ns,
            wall_ns (first start to last end). wall = gpu + idle_between unless programs overlap.
        executions: one row per counted execution: row (in Tables.programs), rank, device, program, name,
            start, duration, thunks, thunk_ns, active_ns, idle_inside_ns, idle_before_ns, launch_latency_ns.
    """

    phases: Phases
    programs: pl.DataFrame
    devices: pl.DataFrame
    executions: pl.DataFrame

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: times of programs in milliseconds, units in the keys."""
        rows = self.programs.select(
            pl.col("name").alias("program"),
            pl.col("program").alias("identity"),
            "executions",
            *(
                (pl.col(f"gpu_ns_{what}") / 1e6).alias(f"gpu_ms_{what}")
                for what in ("total", "mean", "std")
            ),
            "thunks_mean",
            "thunks_std",
            "idle_inside_ns",
            "idle_before_ns",
            "launch_latency_ns_mean",
            "launch_latency_ns_max",
        )
        return {
            "warm_up": self.phases.rule.value,
            "statement": self.phases.statement,
            "rows": rows.rows(named=True),
            "devices": self.devices.rows(named=True),
        }


def programs(
    trace: Attributed, warm_up: WarmUp | Phases = WarmUp.HEURISTIC, by: By = By.IDENTITY
) -> Programs:
    """Executions, GPU time and idle time of every program.

    Args:
        trace: attributed.
        warm_up: rule that says which executions count, or its result.
        by: what makes two executions ones of the same program.
    """
    phase = phases(trace, warm_up) if isinstance(warm_up, WarmUp) else warm_up
    executions = _executions(trace, phase)
    keys = ["program", "name"] if by is By.IDENTITY else ["name"]
    return Programs(phase, _by_program(executions, keys), _by_device(executions), executions)


def _executions(trace: Attributed, phase: Phases) -> pl.DataFrame:
    chosen = (
        trace.programs.with_row_index("row")
        .filter(phase.steady)
        .select(
            "row",
            "rank",
            "device",
            pl.col("program", "name").cast(pl.String),
            "start",
            "duration",
            (pl.col("start") - pl.col("launch")).alias("launch_latency_ns"),
        )
        .sort("rank", "device", "start", maintain_order=True)
    )
    place = chosen.select(pl.struct("rank", "device").rle_id()).to_series()
    end = (chosen["start"] + chosen["duration"]).to_numpy()
    before = pl.Series(reached_before(end, place.cast(pl.Int64).to_numpy()))
    idle = pl.when(before != NEVER).then((pl.col("start") - before).clip(lower_bound=0))
    thunks = _thunks(trace)
    return (
        chosen.with_columns(idle_before_ns=idle)
        .join(thunks, on="row", how="left", maintain_order="left")
        .with_columns(idle_inside_ns=(pl.col("duration") - pl.col("active_ns")).clip(lower_bound=0))
    )


def _thunks(trace: Attributed) -> pl.DataFrame:
    """For every row of programs: number of thunks, sum of their durations, and union of their time."""
    rows = trace.programs.height
    gpu = trace.gpu.filter(pl.col("program").is_not_null()).select("program", "start", "duration")
    group = gpu["program"].to_numpy().astype(np.int64)
    start = gpu["start"].to_numpy()
    duration = gpu["duration"].to_numpy()
    summed = np.zeros(rows, np.int64)
    np.add.at(summed, group, duration)  # bincount would round to floats
    return pl.DataFrame(
        {
            "row": pl.Series(np.arange(rows), dtype=pl.UInt32),
            "thunks": np.bincount(group, minlength=rows),
            "thunk_ns": summed,
            "active_ns": union_lengths(group, start, start + duration, rows),
        }
    )


def _by_program(executions: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    identity = (
        pl.col("program").first() if "program" in keys else pl.col("name").first().alias("program")
    )
    grouped = executions.group_by(keys, maintain_order=True).agg(
        *([] if "program" in keys else [identity]),
        executions=pl.len(),
        gpu_ns_total=pl.col("duration").sum(),
        gpu_ns_mean=pl.col("duration").mean(),
        gpu_ns_std=pl.col("duration").std(ddof=0),
        thunks_mean=pl.col("thunks").mean(),
        thunks_std=pl.col("thunks").std(ddof=0),
        thunk_ns=pl.col("thunk_ns").sum(),
        active_ns=pl.col("active_ns").sum(),
        idle_inside_ns=pl.col("idle_inside_ns").sum(),
        idle_before_ns=pl.col("idle_before_ns").sum(),
        launch_latency_ns_mean=pl.col("launch_latency_ns").mean(),
        launch_latency_ns_max=pl.col("launch_latency_ns").max(),
    )
    ordered = ["program", "name", *(c for c in grouped.columns if c not in ("program", "name"))]
    return grouped.select(ordered).sort("gpu_ns_total", descending=True, maintain_order=True)


def _by_device(executions: pl.DataFrame) -> pl.DataFrame:
    end = pl.col("start") + pl.col("duration")
    return (
        executions.group_by("rank", "device", maintain_order=True)
        .agg(
            executions=pl.len(),
            gpu_ns=pl.col("duration").sum(),
            active_ns=pl.col("active_ns").sum(),
            idle_inside_ns=pl.col("idle_inside_ns").sum(),
            idle_between_ns=pl.col("idle_before_ns").sum(),
            wall_ns=end.max() - pl.col("start").min(),
        )
        .sort("rank", "device")
    )
