"""The steps of two runs on one time axis, with steps of the same number aligned at their starts.

Each step is moved as a whole by one offset, so that the k-th counted steps of both runs begin at the same time.
Durations never change. The longer step of a pair determines where the next pair begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.sample import run_steps
from thence.model.intervals import NO_ROW
from thence.model.places import COMPARED

if TYPE_CHECKING:
    from thence.model.arrays import Int64
    from thence.model.attributed import Attributed


SIDES = ("before", "after")
MAX_STEPS = 20
"""The most pairs of steps that are shown."""
_PLACES = tuple(kind for kind in COMPARED if kind not in ("kernel", "hlo"))
_GAP = 0.02
"""Gap between two pairs of steps, as a share of the longest step."""


@dataclass(frozen=True)
class AlignedSteps:
    """The steps of two runs side by side. Times are ns; the first pair begins at 0.

    Attributes:
        inputs: the inputs of the two runs.
        activities: side (0 before, 1 after), rank, device, stream, name, kind, start, duration and places of the
            device activities in the shown steps.
        steps: side, name, start, duration and moved_ns (the offset that was added to the step's times).
    """

    inputs: tuple[tuple[str, ...], tuple[str, ...]]
    activities: pl.DataFrame
    steps: pl.DataFrame


def aligned_steps(before: Attributed, after: Attributed) -> AlignedSteps:
    """The first counted steps of two runs, aligned."""
    sides = [_steps_of(trace) for trace in (before, after)]
    count = min(MAX_STEPS, *(frame.height for frame, _ in sides))
    lengths = np.array([frame["duration"].to_numpy()[:count] for frame, _ in sides])
    longest = lengths.max(axis=0, initial=0)
    room = int(_GAP * longest.max(initial=0))
    starts = np.concatenate([[0], np.cumsum(longest + room)[:-1]]).astype(np.int64)
    activities, steps = [], []
    for side, ((frame, gpu), trace) in enumerate(zip(sides, (before, after), strict=True)):
        shown = frame.head(count)
        moved = starts[: shown.height] - shown["start"].to_numpy()
        steps.append(
            shown.select(
                pl.lit(side, pl.Int32).alias("side"),
                "name",
                pl.Series("start", starts[: shown.height]),
                "duration",
                pl.Series("moved_ns", moved),
            )
        )
        activities.append(_moved(trace, gpu, moved, side))
    inputs = before.meta.inputs, after.meta.inputs
    return AlignedSteps(inputs, pl.concat(activities), pl.concat(steps))


def _steps_of(trace: Attributed) -> tuple[pl.DataFrame, Int64]:
    """Name, start and duration of the counted steps, and for each activity the number of its counted step."""
    steps = run_steps(trace, causes=False)
    counted = steps.times["left_out"].is_null().to_numpy()
    number = np.append(np.where(counted, np.cumsum(counted) - 1, NO_ROW), NO_ROW)
    frame = steps.times.filter(pl.Series(counted)).select(
        "name", start="start_ns", duration=pl.col("total_ns").round().cast(pl.Int64)
    )
    return frame, number[steps.of_activity]


def _moved(trace: Attributed, step: Int64, moved: Int64, side: int) -> pl.DataFrame:
    """The activities in the shown steps, each moved with its step."""
    rows = np.flatnonzero((step != NO_ROW) & (step < len(moved)))
    columns = ("rank", "device", "stream", "name", "kind", "start", "duration")
    places = [trace.places[kind].cast(pl.String) for kind in _PLACES]
    frame = trace.gpu.select(*columns).with_columns(*places)[rows]
    return frame.with_columns(
        pl.lit(side, pl.Int32).alias("side"),
        pl.col("start") + pl.Series(moved[step[rows]]),
        pl.col("name", "kind").cast(pl.String),
    )
