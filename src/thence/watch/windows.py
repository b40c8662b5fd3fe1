"""Summaries of the windows of a recording, computed from its tables.

A window is a run of recorded steps. Its first step does not count, because CUPTI is attached in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import MissingData
from thence.model.formats import DESCRIPTION
from thence.model.json_fields import decoded
from thence.model.kernel_names import short_names
from thence.opening import open_trace
from thence.readers.recording.folder import Description
from thence.watch.summary_file import MAX_DURATIONS, MAX_PLACES, MAX_WAITS, SCHEMA, Collective, Steps, Window

if TYPE_CHECKING:
    from pathlib import Path

    from thence.trace import Trace

_KERNELS = 10
_MAX_NAME = 160
"""Characters of a name."""
_NS = 1_000
"""Nanoseconds of a microsecond."""


def summarized(folder: Path, after_unix_ns: int) -> list[Window]:
    """A summary of each complete window of a process that ended after a time, in order.

    Args:
        folder: of the process, in a recording.
        after_unix_ns: Unix time in ns; 0 for all windows.

    Raises:
        InputError: the folder holds no recording.
        NotAsWritten: its description is damaged.
    """
    about = decoded((folder / DESCRIPTION).read_bytes(), Description)
    trace = open_trace(str(folder))
    times = _runs(trace, finished=about.finished)
    zero = trace.meta.epoch_ns
    if times.is_empty() or zero is None:
        return []
    try:
        steps = trace.steps().frame
    except MissingData:  # nothing was launched in a recorded step
        return []
    steps = _steps_of_runs(steps, times)
    windows = [
        _window(trace, about, zero, times.filter(run=int(run)), steps.filter(run=int(run)))
        for run in steps["run"].unique().sort()
    ]
    new = [window for window in windows if window.end_unix_ns > after_unix_ns]
    before = after_unix_ns - zero
    for window in new:
        end = window.end_unix_ns - zero
        window.all_steps = _all_steps(times.filter(pl.col("start") >= before, pl.col("start") < end), zero)
        before = end
    return new


def _runs(trace: Trace, *, finished: bool) -> pl.DataFrame:
    """All steps in order with columns run (number of the run of recorded or other steps that it is in) and counts.

    Of a recording that goes on, a run at the end is not complete: it counts for nothing.
    """
    times = trace.tables.step_times.sort("start").with_columns(run=pl.col("recorded").rle_id())
    first = pl.col("run") != pl.col("run").shift(1)
    complete = pl.lit(value=True) if finished else pl.col("run") < pl.col("run").max()
    # The clocks of begin and duration are two, so a step may seem to end after the next one has begun.
    end = pl.min_horizontal(pl.col("start") + pl.col("duration"), pl.col("start").shift(-1))
    return times.with_columns(counts=pl.col("recorded") & ~first.fill_null(value=True) & complete, end=end)


def _steps_of_runs(steps: pl.DataFrame, times: pl.DataFrame) -> pl.DataFrame:
    """The steps that count, with the run that each is in."""
    of_times = times.select("start", "run", "counts", "number").rename({"number": "planned"}).sort("start")
    return (
        steps.sort("host_start")
        .join_asof(of_times, left_on="host_start", right_on="start", strategy="backward", suffix="_of_times")
        .filter("counts")
    )


def _window(trace: Trace, about: Description, zero: int, times: pl.DataFrame, steps: pl.DataFrame) -> Window:
    rows = trace.activities.with_row_index("gpu").join(steps.select("row").unique(), left_on="step_row", right_on="row")
    modules, other, unattributed = _largest(rows, pl.coalesce(_text("module"), _text("label")), MAX_PLACES)
    counted = times.filter("counts")
    sampling = about.sampling
    first, last = int(times["number"][0]), int(times["number"][-1])
    asked = [r.why for r in (sampling.requests if sampling else []) if first <= r.step <= last]
    causes = {
        name.removeprefix("idle_").removesuffix("_ns"): int(steps[name].sum())
        for name in steps.columns
        if name.startswith("idle_") and name != "idle_ns"
    }
    return Window(
        schema=SCHEMA,
        rank=about.rank or 0,
        host=about.host or "",
        pid=about.pid,
        first_step=int(counted["number"][0]),
        steps=counted.height,
        begin_unix_ns=zero + int(counted["start"][0]),
        end_unix_ns=zero + int(counted["end"][-1]),
        duration_ns=int(steps["duration"].sum()),
        busy_ns=int(steps["busy_ns"].sum()),
        exposed_ns=int(steps["exposed_ns"].sum()),
        idle_ns={cause: total for cause, total in causes.items() if total},
        modules=modules,
        other_ns=other,
        unattributed_ns=unattributed,
        kernels=_largest(rows.with_columns(_short("name", rows)), _text("name"), _KERNELS)[0],
        collectives=_collectives(trace, rows),
        asked="; ".join(asked) or None,
        interval=sampling.interval if sampling else 0,
        cost_share=sampling.cost_share if sampling else None,
        dropped=about.dropped + sum(about.lost.values()),
    )


def _text(column: str) -> pl.Expr:
    return pl.col(column).cast(pl.String)


def _short(column: str, rows: pl.DataFrame) -> pl.Expr:
    return _text(column).replace(short_names(rows[column].cast(pl.String).unique().drop_nulls().to_list()))


def _largest(rows: pl.DataFrame, name: pl.Expr, most: int) -> tuple[dict[str, int], int, int]:
    """GPU time of the largest groups by a name, of the other ones, and of rows without a name."""
    totals = rows.group_by(name.str.head(_MAX_NAME).alias("name")).agg(pl.col("duration").sum())
    named = totals.drop_nulls().sort("duration", "name", descending=[True, False])
    kept = dict(named.head(most).rows())
    missing = int(totals.filter(pl.col("name").is_null())["duration"].sum())
    return kept, int(named["duration"].sum()) - sum(kept.values()), missing


def _collectives(trace: Trace, rows: pl.DataFrame) -> list[Collective]:
    described = trace.tables.collectives.filter(pl.col("gpu").is_not_null())
    if described.is_empty():
        return []
    joined = rows.join(
        described.select(
            pl.col("gpu").cast(pl.UInt32),
            pl.col("collective").cast(pl.String),
            pl.coalesce(pl.col("group_description", "group_name").cast(pl.String)).alias("group"),
        ),
        on="gpu",
    ).sort("start")
    groups = joined.group_by("collective", "group").agg(
        count=pl.len(), total=pl.col("duration").sum(), each=(pl.col("duration") // _NS).head(MAX_WAITS + 1)
    )
    largest = groups.sort("total", "collective", descending=[True, False]).head(MAX_PLACES)
    return [
        Collective(
            str(row["collective"])[:_MAX_NAME],
            row["group"] and row["group"][:_MAX_NAME],
            row["count"],
            row["total"],
            row["each"] if row["count"] <= MAX_WAITS else None,
        )
        for row in largest.iter_rows(named=True)
    ]


def _all_steps(times: pl.DataFrame, zero: int) -> Steps | None:
    if times.is_empty():
        return None
    durations = times["duration"].to_numpy()
    median, p95 = (int(value) for value in np.quantile(durations, (0.5, 0.95)))
    return Steps(
        first=int(times["number"][0]),
        count=times.height,
        begin_unix_ns=zero + int(times["start"][0]),
        end_unix_ns=zero + int(times["end"][-1]),
        total_ns=int(durations.sum()),
        median_ns=median,
        p95_ns=p95,
        max_ns=int(durations.max()),
        longest=int(times["number"][int(durations.argmax())]),
        durations_us=(durations // _NS).tolist() if times.height <= MAX_DURATIONS else None,
    )
