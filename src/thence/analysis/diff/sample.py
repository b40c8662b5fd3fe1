"""`Sample`: one run as a comparison sees it, its steps and what the time of each of them was spent on.

All figures are means over the devices of the run (the ranks, where a rank has one device), so that runs of jobs of
any size read alike. A sample holds sums by step, no activities: many runs fit into memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.conditions import Conditions, conditions
from thence.analysis.diff.counted_steps import left_out
from thence.analysis.diff.steps import IDLE_CAUSE, run_steps
from thence.analysis.group_by import time_by_place
from thence.model.intervals import NO_ROW
from thence.model.places import COMPARED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

__all__ = [
    "ALL",
    "BUSY",
    "COMMUNICATION",
    "EXPOSED",
    "IDLE",
    "PLACED",
    "STEP",
    "UNATTRIBUTED",
    "Sample",
    "sample",
]

STEP, BUSY, IDLE, COMMUNICATION = "step", "busy", "idle", "communication"
"""What rows can be by, beside the kinds of place: the whole step, and parts of it."""
ALL, EXPOSED = "all", "exposed"
"""Name of the row of the whole by one of those, and of that by communication."""
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
_MOST_HOST_RANGES = 600_000
"""Host ranges up to which idle time is divided by cause unless asked otherwise: some 1 s of CPU time per million."""
PLACED = (*("label", "module"), *("op_name", "op"))
"""Kinds that say where a kernel was launched, for matching; as columns of places."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        inputs: what was read.
        what: what its steps are; see `RunSteps.what`.
        steps: one row per step in order of time: name, total_ns (its length), left_out (why it does not
            count, null where it does).
        rows: by, name, step (number among those that count), ns and count (of activities) in that step, per
            device. By is one of `STEP`, `BUSY`, `IDLE`, `COMMUNICATION` or a kind of place; a step in which a
            place has no time has no row.
        kernels: name, label, module, op_name, op, and ns and count per step of the kernels launched there.
        conditions: under which it ran, which two sides must share.
        outside_share: part of the device time that is of no step.
        idle_is_total: whether idle time was not divided by cause, for the time that it takes.
    """

    inputs: tuple[str, ...]
    what: str
    steps: pl.DataFrame
    rows: pl.DataFrame
    kernels: pl.DataFrame
    conditions: Conditions
    outside_share: float
    idle_is_total: bool = False

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
    causes: bool | None = None,
) -> Sample:
    """The sample of a run.

    Args:
        trace: attributed; one run.
        soundness: of the whole trace.
        kinds: of place to divide the time by.
        outliers: whether outlying steps count.
        causes: whether to divide idle time by cause; None: if that takes little time.
    """
    if causes is None:
        causes = trace.host.height <= _MOST_HOST_RANGES
    steps = run_steps(trace, causes=causes)
    codes = left_out(steps.times["total_ns"].to_numpy(), steps.last, outliers=outliers)
    counted = np.array([code is None for code in codes], np.bool_)
    number = np.where(counted, np.cumsum(counted) - 1, NO_ROW)
    of_activity = np.append(number, NO_ROW)[steps.of_activity]
    devices = max(1, trace.gpu.select("rank", "device").n_unique())
    step = pl.Series("step", of_activity, dtype=pl.Int32)
    shared_by = devices * max(1, int(counted.sum()))
    rows = [
        *_whole(steps.times.filter(pl.Series(counted))),
        *(_by_place(trace, kind, step, devices) for kind in kinds),
    ]
    duration = trace.gpu["duration"]
    outside = duration.filter(pl.Series(steps.of_activity == NO_ROW)).sum()
    return Sample(
        trace.meta.inputs,
        steps.what,
        steps.times.select("name", "total_ns", left_out=pl.Series(codes, dtype=pl.String)),
        pl.concat(rows),
        _kernels(trace, step, shared_by),
        conditions(trace, soundness, step, shared_by),
        float(outside) / max(1.0, float(duration.sum())),
        idle_is_total=not causes,
    )


def _whole(times: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Rows of the whole step and its parts; idle time by cause where the causes are known."""
    yield _of_steps(STEP, ALL, times["total_ns"])
    yield _of_steps(BUSY, ALL, times["busy_ns"])
    yield _of_steps(IDLE, ALL, times["idle_ns"])
    if times["communication_ns"].sum():
        yield _of_steps(COMMUNICATION, EXPOSED, times["exposed_ns"])
    for column in times.columns:
        if cause := re.fullmatch(IDLE_CAUSE, column):
            yield _of_steps(IDLE, cause[1], times[column])


def _of_steps(by: str, name: str, ns: pl.Series) -> pl.DataFrame:
    """One row per step for the whole of something; it has no count."""
    frame = pl.DataFrame({"step": np.arange(len(ns)), "ns": ns})
    named = frame.with_columns(by=pl.lit(by), name=pl.lit(name), count=pl.lit(0.0))
    return named.select(*_ROWS).cast(_ROWS)


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
    places = [pl.lit(trace.places[kind]).alias(kind) for kind in PLACED]
    keys = ("name", *PLACED)
    return (
        trace.gpu.select("name", "duration", step, *places)
        .lazy()
        .filter(pl.col("step") != NO_ROW)
        .group_by(keys)
        .agg(ns=pl.col("duration").sum() / shared_by, count=pl.len() / shared_by)
        .with_columns(pl.col(keys).cast(pl.String))
        .collect()
    )
