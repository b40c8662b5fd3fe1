"""Timeline rows of a whole job: each step of a rank is one span, named by whether the rank waited or made others wait.

A viewer colours spans by their names, so the rows of all ranks together form a heat map of ranks and steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.thresholds import LATE_RANK_SHARE
from thence.model.timeline import JobRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.ranks.answer import Job

MAX_IN_FULL = 8
"""Most ranks that a timeline or a page shows in full if no ranks are selected; of more, it shows two in full."""
MAX_CELLS = 1_000_000
"""Maximum number of spans of all ranks together; to stay below it, consecutive steps are merged into one span."""
STATES = ("makes others wait", "waits most of the step", "waits", "in time")
"""Names of spans. The first that applies is used: the device caused waits of more than `LATE_RANK_SHARE` of the step;
it waited for more than half of the step; it waited for more than a tenth of it; none of these."""
_MOST_OF_STEP, _PART_OF_STEP = 0.5, 0.1
_PLACE = ["rank", "device"]
_TIMES = ("step_ns", "compute_ns", "wait_ns", "caused_ns")


def opened(job: Job) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rank and device that made the others wait most, and rank and device with which these are compared.

    If the reasons compare it with no device, the second is the device with the median step time.
    """
    slowest = job.ranks.row(0, named=True)
    middle = job.ranks.sort("step_ns", *_PLACE).row(job.ranks.height // 2, named=True)
    place = middle["rank"], middle["device"]
    why = job.reasons[0] if job.reasons else None
    if why is not None and why.median_rank is not None and why.median_device is not None:
        place = why.median_rank, why.median_device
    return (slowest["rank"], slowest["device"]), place


def step_columns(job: Job, most: int) -> tuple[npt.NDArray[np.int64], list[str]]:
    """The column of every step of `Job.keys`, and the columns' labels.

    Each device has a cell in every column; there are at most ``most`` cells, unless there are more devices.
    """
    keys = job.keys
    columns = max(1, most // max(job.ranks.height, 1))
    width = max(1, -(-len(keys) // columns))
    column = np.arange(len(keys)) // width
    if width == 1:
        return column, list(keys)
    ends = [(first, min(first + width, len(keys)) - 1) for first in range(0, len(keys), width)]
    return column, [f"{keys[first]} to {keys[last]}" for first, last in ends]


def job_rows(
    job: Job,
    in_full: Sequence[int],
    late: Mapping[tuple[int, int], str],
    origin_ns: int,
    corrections: Mapping[int, int],
    most: int = MAX_CELLS,
) -> JobRows:
    """The rows of a job.

    Args:
        in_full: ranks whose traces the same timeline shows in full.
        late: texts about stragglers, by rank and device.
        origin_ns: time on the clock of the summaries that is 0 on the timeline.
        corrections: ns to subtract from all times of a rank, by rank.
        most: maximum number of cells of all rows together.
    """
    shift = pl.col("rank").replace_strict(
        pl.Series(list(corrections), dtype=pl.Int32),
        pl.Series(list(corrections.values()), dtype=pl.Int64),
        default=0,
        return_dtype=pl.Int64,
    )
    cells = job.cells.with_columns(start=pl.col("start") - origin_ns - shift)
    cells = _in_columns(cells, job, most)
    several = job.ranks["device"].n_unique() > 1
    title = pl.format("rank {}", "rank")
    top = pl.col("rank").is_in([*in_full, *(rank for rank, _ in late)])
    rows = cells.with_columns(
        track=pl.format("{} GPU {}", title, "device") if several else title, folded=~top, name=_state()
    )
    folded = rows.filter("folded").select(_PLACE).n_unique()
    return JobRows(
        title=f"job: {job.ranks['rank'].n_unique():,} ranks, {len(job.keys):,} steps",
        folded_title=f"other ranks: {folded:,} rows, a span for each step",
        rows=rows.sort("folded", *_PLACE, "start"),
        counters=_counters(cells),
        spans=_late_spans(rows, job, late, most),
    )


def _in_columns(cells: pl.DataFrame, job: Job, most: int) -> pl.DataFrame:
    """One row per device and column; its times are sums over the steps of the column."""
    column, labels = step_columns(job, most)
    steps = pl.DataFrame({"key": list(job.keys), "column": column}, schema={"key": pl.String, "column": pl.Int64})
    names = pl.DataFrame({"step": labels}).with_columns(column=pl.int_range(pl.len()))
    end = pl.col("start") + pl.col("step_ns")
    return (
        cells.join(steps, on="key")
        .group_by(*_PLACE, "column")
        .agg(pl.col("start").min(), end.max().alias("end"), pl.col(_TIMES).sum(), steps=pl.len())
        .with_columns(duration=pl.col("end") - pl.col("start"))
        .join(names, on="column")
        .drop("end")
        .sort(*_PLACE, "start")
    )


def _state() -> pl.Expr:
    """The name of each span, one of `STATES`."""
    step = pl.col("step_ns")
    return (
        pl.when(pl.col("caused_ns") > LATE_RANK_SHARE * step)
        .then(pl.lit(STATES[0]))
        .when(pl.col("wait_ns") > _MOST_OF_STEP * step)
        .then(pl.lit(STATES[1]))
        .when(pl.col("wait_ns") > _PART_OF_STEP * step)
        .then(pl.lit(STATES[2]))
        .otherwise(pl.lit(STATES[3]))
    )


def _counters(cells: pl.DataFrame) -> pl.DataFrame:
    """counter, time, value (ms per step): statistics over all ranks, each valid until the start of the next step."""
    a_step = {name: pl.col(name) / pl.col("steps") for name in _TIMES}
    ms = {
        "step, median of all ranks": a_step["step_ns"].median(),
        "exposed wait, mean of all ranks": a_step["wait_ns"].mean(),
        "wait caused, most of one rank": a_step["caused_ns"].max(),
    }
    of_step = (
        cells.group_by("column")
        .agg(
            time=pl.col("start").median().round().cast(pl.Int64),
            end=(pl.col("start") + pl.col("duration")).max(),
            **{name: value / 1e6 for name, value in ms.items()},
        )
        .sort("time", "column")
    )
    ended = of_step.select(time=pl.col("end").max(), **{name: pl.lit(0.0) for name in ms})
    every = pl.concat([of_step.select("time", *ms), ended])
    return every.unpivot(list(ms), index="time", variable_name="counter", value_name="value").sort(
        "counter", "time", maintain_order=True
    )


def _late_spans(rows: pl.DataFrame, job: Job, late: Mapping[tuple[int, int], str], most: int) -> pl.DataFrame:
    """track, name, start, duration, detail: one span per straggler, from its first late step to its last step."""
    begun = job.stragglers.select(*_PLACE, since="since_step").join(
        pl.DataFrame({"since": list(job.keys), "first": step_columns(job, most)[0]}), on="since", how="left"
    )
    ends = pl.col("start") + pl.col("duration")
    spans = (
        rows.join(begun, on=_PLACE)
        .filter(pl.col("column") >= pl.col("first").fill_null(0))
        .group_by(*_PLACE, "track", "since", maintain_order=True)
        .agg(start=pl.col("start").min(), end=ends.max())
    )
    texts = [late.get(place, "") for place in spans.select(_PLACE).iter_rows()]
    return spans.select(
        track=pl.format("{} is late", "track"),
        name=pl.format("late since {}", "since"),
        start="start",
        duration=pl.col("end") - pl.col("start"),
        detail=pl.Series(texts, dtype=pl.String),
    )
