"""`Sample`: the data of one run for a comparison, its steps and how the time of each step was spent.

All figures are means over the devices of the run (the ranks, if a rank has one device), so that runs of jobs of
any size can be compared. A sample holds sums by step and no activities, so many runs fit into memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.conditions import Conditions, conditions
from thence.analysis.diff.steps import IDLE_CAUSE, run_steps
from thence.analysis.diff.streams import streams_of
from thence.analysis.diff.work import WORK, work_of
from thence.analysis.group_by import time_by_place
from thence.analysis.steps.windows import OUTLIER, RULES
from thence.errors import MissingData
from thence.model.intervals import NO_ROW
from thence.model.places import COMPARED
from thence.model.thresholds import MAX_HOST_RANGES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from thence.analysis.diff.streams import Streams
    from thence.analysis.soundness.findings import Soundness
    from thence.model.attributed import Attributed

STEP, BUSY, IDLE, COMMUNICATION = "step", "busy", "idle", "communication"
"""Values of ``by`` in addition to the kinds of place: the whole step, and parts of it."""
ALL, EXPOSED = "all", "exposed"
"""Name of the row of the whole by step, busy or idle, and name of the row by communication."""
UNATTRIBUTED = "[no place known]"
"""Name of the row with the time that has no place of a kind."""

_ROWS = pl.Schema(
    {"by": pl.String(), "name": pl.String(), "step": pl.Int32(), "ns": pl.Float64(), "count": pl.Float64()}
)
PLACED = (*("label", "module"), *("op_name", "op"))
"""Kinds of place (columns of places) by which kernels are matched."""


@dataclass(frozen=True)
class Sample:
    """One run.

    Attributes:
        inputs: the inputs of the run.
        what: what its steps are; see `RunSteps.what`.
        steps: one row per step in order of time: name, total_ns (its length), left_out (why it does not
            count, null if it counts).
        rows: by, name, step (number among the counted steps), ns and count (of activities) in that step, per
            device. by is one of `STEP`, `BUSY`, `IDLE`, `COMMUNICATION` or a kind of place; a step in which a
            place has no time has no row.
        kernels: name, label, module, op_name, op, and ns and count per step and device of the kernels launched there.
        conditions: the conditions of the run, which two sides must share.
        outside_share: share of the device time that belongs to no step.
        idle_is_total: whether idle time was not divided by cause, because that takes long.
        streams: what ran on which stream, and at the same time; None if that is not known.
        work: as `thence.analysis.diff.work.work_of` returns it.
    """

    inputs: tuple[str, ...]
    what: str
    steps: pl.DataFrame
    rows: pl.DataFrame
    kernels: pl.DataFrame
    conditions: Conditions
    outside_share: float
    idle_is_total: bool = False
    streams: Streams | None = None
    work: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=WORK))

    @property
    def counted(self) -> int:
        """Number of steps that count."""
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
        trace: attributed; of one run.
        soundness: soundness of the whole trace.
        kinds: kinds of place by which the time is divided.
        outliers: whether outlying steps count.
        causes: whether to divide idle time by cause; None to do so if it takes little time.

    Raises:
        MissingData: no step counts, because the selected part of the trace has left-out ones only.
    """
    if causes is None:
        causes = trace.host.height <= MAX_HOST_RANGES
    steps = run_steps(trace, causes=causes)
    codes = steps.times["left_out"]
    if outliers:
        codes = codes.replace(OUTLIER, None)
    counted = codes.is_null().to_numpy()
    if not counted.any():
        reasons = "; ".join(RULES[code] for code in codes.unique(maintain_order=True).drop_nulls())
        raise MissingData(
            f"{', '.join(trace.meta.inputs)}: no step of the selected part counts in a comparison ({reasons}); "
            "select a part with other steps"
        )
    number = np.where(counted, np.cumsum(counted) - 1, NO_ROW)
    of_activity = np.append(number, NO_ROW)[steps.of_activity]
    devices = max(1, trace.gpu.select("rank", "device").n_unique())
    step = pl.Series("step", of_activity, dtype=pl.Int32)
    shared_by = devices * max(1, int(counted.sum()))
    rows = [*_whole(steps.times.filter(pl.Series(counted))), *(_by_place(trace, kind, step, devices) for kind in kinds)]
    duration = trace.gpu["duration"]
    outside = duration.filter(pl.Series(steps.of_activity == NO_ROW)).sum()
    return Sample(
        trace.meta.inputs,
        steps.what,
        steps.times.select("name", "total_ns", left_out=codes),
        pl.concat(rows),
        _kernels(trace, step, shared_by),
        conditions(trace, soundness, step, shared_by),
        float(outside) / max(1.0, float(duration.sum())),
        idle_is_total=not causes,
        streams=streams_of(trace, steps.windows, number, PLACED),
        work=work_of(trace, step, shared_by),
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
    """One row per step for the whole step or a part of it, with a count of 0."""
    frame = pl.DataFrame({"step": np.arange(len(ns)), "ns": ns})
    named = frame.with_columns(by=pl.lit(by), name=pl.lit(name), count=pl.lit(0.0))
    return named.select(*_ROWS).cast(_ROWS)


def _by_place(trace: Attributed, kind: str, step: pl.Series, devices: int) -> pl.DataFrame:
    """Time and activities of each place in each step; no rows if the trace has no place of the kind."""
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
    """Time and count of each kernel by the place of its launch, as `Sample.kernels`."""
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
