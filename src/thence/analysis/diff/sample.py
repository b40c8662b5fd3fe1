"""`Sample`: one run as a comparison sees it, its steps and what the time of each of them was spent on.

All figures are means over the devices of the run (the ranks, where a rank has one device), so that runs of jobs of
any size read alike. A sample holds sums by step, no activities: many runs fit into memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.conditions import Conditions, conditions
from thence.analysis.diff.counted_steps import left_out
from thence.analysis.diff.steps import device_steps, find_steps
from thence.analysis.exposure import exposure
from thence.analysis.group_by import time_by_place
from thence.model.intervals import NO_ROW
from thence.model.places import COMPARED

if TYPE_CHECKING:
    from collections.abc import Collection

    from thence.analysis.diff.steps import Steps
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

__all__ = ["ALL", "BUSY", "COMMUNICATION", "IDLE", "STEP", "UNATTRIBUTED", "Sample", "sample"]

STEP, BUSY, IDLE, COMMUNICATION = "step", "busy", "idle", "communication"
"""What rows can be by, beside the kinds of place: the whole step, and parts of it."""
ALL = "all"
"""Name of the row of the whole by one of those."""
UNATTRIBUTED = "[no place known]"
"""Name of the row with the time that has no place of a kind."""

_ROWS = pl.Schema(
    {
        "by": pl.String(),
        "name": pl.String(),
        "step": pl.Int32(),
        "ns": pl.Float64(),
        "count": pl.Float64(),
    }
)
_PLACED = ("label", "module", "op_name", "op")
"""Kinds that say where a kernel was launched, for matching; as columns of places."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        inputs: what was read.
        what: what its steps are; see `Steps.what`.
        steps: one row per step in order of time: name, total_ns (its length), left_out (why it does not
            count, null where it does).
        rows: by, name, step (number among those that count), ns and count (of activities) in that step, per
            device. By is one of `STEP`, `BUSY`, `IDLE`, `COMMUNICATION` or a kind of place; a step in which a
            place has no time has no row.
        kernels: name, label, module, op_name, op, and ns and count per step of the kernels launched there.
        conditions: under which it ran, which two sides must share.
        outside_share: part of the device time that is of no step.
    """

    inputs: tuple[str, ...]
    what: str
    steps: pl.DataFrame
    rows: pl.DataFrame
    kernels: pl.DataFrame
    conditions: Conditions
    outside_share: float

    @property
    def counted(self) -> int:
        """How many steps count."""
        return self.steps["left_out"].null_count()


def sample(
    trace: Attributed,
    soundness: Soundness,
    kinds: Collection[str] = COMPARED,
    *,
    outliers: bool = False,
) -> Sample:
    """The sample of a run.

    Args:
        trace: attributed; one run.
        soundness: of the whole trace.
        kinds: of place to divide the time by.
        outliers: whether outlying steps count.
    """
    steps = find_steps(trace)
    on_devices = device_steps(trace, steps)
    codes = left_out(on_devices.total, steps.last, outliers=outliers)
    counted = np.array([code is None for code in codes], np.bool_)
    number = np.where(counted, np.cumsum(counted) - 1, NO_ROW)
    of_activity = np.append(number, NO_ROW)[steps.of_activity]
    devices = max(1, trace.gpu.select("rank", "device").n_unique())
    step = pl.Series("step", of_activity, dtype=pl.Int32)
    whole = {
        STEP: on_devices.total,
        BUSY: on_devices.busy,
        IDLE: on_devices.total - on_devices.busy,
    }
    rows = [
        *(_of_steps(by, values[counted]) for by, values in whole.items()),
        _communication(trace, step, devices),
        *(_by_place(trace, kind, step, devices) for kind in kinds),
    ]
    duration = trace.gpu["duration"]
    outside = duration.filter(pl.Series(steps.of_activity == NO_ROW)).sum()
    return Sample(
        trace.meta.inputs,
        steps.what,
        _step_table(steps, on_devices.total, codes),
        pl.concat(rows),
        _kernels(trace, step, devices * max(1, int(counted.sum()))),
        conditions(trace, soundness, step, devices * max(1, int(counted.sum()))),
        float(outside) / max(1.0, float(duration.sum())),
    )


def _step_table(steps: Steps, total: np.ndarray, codes: list[str | None]) -> pl.DataFrame:
    return pl.DataFrame(
        {"name": list(steps.names), "total_ns": total, "left_out": codes},
        schema={"name": pl.String, "total_ns": pl.Float64, "left_out": pl.String},
    )


def _of_steps(by: str, values: np.ndarray) -> pl.DataFrame:
    """One row per step for the whole of something; it has no count."""
    return pl.DataFrame(
        {
            "by": [by] * len(values),
            "name": [ALL] * len(values),
            "step": np.arange(len(values)),
            "ns": values,
            "count": np.zeros(len(values)),
        },
        schema=_ROWS,
    )


def _communication(trace: Attributed, step: pl.Series, devices: int) -> pl.DataFrame:
    """Exposed communication, where the trace has any."""
    exposed = exposure(trace).rows.select("gpu", "exposed_ns")
    return (
        exposed.with_columns(step=step.gather(exposed["gpu"]))
        .filter(pl.col("step") != NO_ROW)
        .group_by("step")
        .agg(ns=pl.col("exposed_ns").sum() / devices, count=pl.len() / devices)
        .select(
            by=pl.lit(COMMUNICATION), name=pl.lit("exposed"), step="step", ns="ns", count="count"
        )
        .cast(_ROWS)
    )


def _by_place(trace: Attributed, kind: str, step: pl.Series, devices: int) -> pl.DataFrame:
    """Time and activities of each place in each step; nothing where the trace has no place of the kind."""
    parts = time_by_place(trace, kind)
    if parts["place"].null_count() == parts.height:
        return pl.DataFrame(schema=_ROWS)
    rows = parts["gpu"]
    aligned = rows.len() == len(step)  # one row for each activity, in its order
    return (
        parts.lazy()
        .select("place", "duration", step=step if aligned else step.gather(rows))
        .filter(pl.col("step") != NO_ROW)
        .group_by("place", "step")
        .agg(ns=pl.col("duration").sum() / devices, count=pl.len() / devices)
        .select(
            by=pl.lit(kind),
            name=pl.col("place").cast(pl.String).fill_null(UNATTRIBUTED),
            step="step",
            ns="ns",
            count="count",
        )
        .cast(_ROWS)
        .collect()
    )


def _kernels(trace: Attributed, step: pl.Series, shared_by: int) -> pl.DataFrame:
    """Where each kernel was launched, as `Sample.kernels`."""
    places = [pl.lit(trace.places[kind]).alias(kind) for kind in _PLACED]
    keys = ("name", *_PLACED)
    return (
        trace.gpu.select("name", "duration", step, *places)
        .lazy()
        .filter(pl.col("step") != NO_ROW)
        .group_by(keys)
        .agg(ns=pl.col("duration").sum() / shared_by, count=pl.len() / shared_by)
        .with_columns(pl.col(keys).cast(pl.String))
        .collect()
    )
