"""Checks of the answers about collectives, programs, compilation, idle time, steps, what-ifs and comparisons.

`thence.analysis.consistency` does the same for traces and their totals. The checks only sum results, which is cheap
compared to computing them. A check imports inside its function what only it needs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.consistency import must

if TYPE_CHECKING:
    from thence.analysis.collectives.communication import Collectives
    from thence.analysis.diff.compare import Diff
    from thence.analysis.idle.table import IdleTime
    from thence.analysis.programs.compilation import Compilation
    from thence.analysis.programs.programs import Programs
    from thence.analysis.steps.table import StepTable
    from thence.analysis.whatif.prediction import WhatIf
    from thence.model.tables import Meta
    from thence.units import Ns

_ROUNDING = 1e-6
"""Relative error that sums of floating-point times may have."""
_PARTS = ("exposed_ns", "hidden_ns", "overlapped_ns")
_LEAST_NS = 1.0


def consistent_collectives(times: Collectives, meta: Meta) -> Collectives:
    """Returns the collectives after checking that their times are possible and add up.

    Raises:
        Contradiction: a time is impossible, or times do not add up.
    """
    rows, sizes = times.rows, times.by_size
    parts = rows.select(
        possible=(pl.min_horizontal(*_PARTS) >= 0).all(),
        whole=(pl.sum_horizontal(*_PARTS) == pl.col("duration_ns")).all(),
    ).row(0)
    must(meta.inputs, all(parts), "parts of collectives do not add up to their durations")
    summed = ("duration_ns", *_PARTS)
    agree = sizes.select(pl.col("count", *summed).sum()).row(0) == (
        rows.height,
        *rows.select(pl.col(summed).sum()).row(0),
    )
    must(meta.inputs, agree, "the rows by size do not add up to all collectives")
    devices = times.devices
    possible = devices.select(
        (pl.col("exposed_ns") >= 0) & (pl.col("exposed_ns") <= pl.col("communication_ns"))
    ).to_series()
    must(meta.inputs, bool(possible.all()), "a device is exposed for longer than it communicates")
    exposed = int(rows["exposed_ns"].sum()) + times.left_out["exposed_ns"]
    must(
        meta.inputs,
        exposed == int(devices["exposed_ns"].sum()),
        "exposed times of collectives do not add up to those of the devices",
    )
    waits = _least(times.instances, ("wait_ns", "device_wait_ns", "transfer_ns"))
    must(meta.inputs, waits >= 0, "a wait or a transfer has a negative duration")
    waited = _least(times.last_arrivals, ("last", "waited_ns", "waited_device_ns"))
    must(meta.inputs, waited >= 0, "a device is waited for a negative number of times")
    return times


def consistent_programs(times: Programs, meta: Meta) -> Programs:
    """Returns the programs after checking that their times are possible and add up.

    Raises:
        Contradiction: a time is impossible, or times do not add up.
    """
    of_all = times.executions
    expected = (
        of_all.height,
        *of_all.select(pl.col("duration", "busy_ns", "idle_inside_ns", "idle_before_ns").sum()).row(0),
    )
    columns = ("executions", "span_ns{}", "busy_ns{}", "idle_inside_ns", "idle_between_ns")
    for frame, ending, what in ((times.programs, "_total", "programs"), (times.devices, "", "devices")):
        found = frame.select(pl.col(c.format(ending)).sum() for c in columns).row(0)
        must(meta.inputs, found == expected, f"the times of {what} do not add up to their executions")
    least = _least(of_all, ("duration", "busy_ns", "thunk_ns", "idle_inside_ns", "idle_before_ns"))
    must(meta.inputs, least >= 0, "an execution of a program has a negative duration")
    busy = of_all.select(
        ((pl.col("busy_ns") <= pl.col("thunk_ns")) & (pl.col("idle_inside_ns") <= pl.col("duration"))).all()
    ).item()
    must(meta.inputs, bool(busy), "a program is busy for longer than its work lasts")
    return times


def consistent_compilation(times: Compilation, meta: Meta) -> Compilation:
    """Returns the compile times after checking that the parts add up to the wall time.

    Raises:
        Contradiction: they do not.
    """
    wall = times.wall_ns
    phases = times.phases
    close = math.isclose(float(phases["self_ns"].sum()), wall, rel_tol=_ROUNDING, abs_tol=_LEAST_NS * phases.height)
    must(meta.inputs, close, "the phases of compilation do not add up to its wall time")
    least = phases["self_ns"].min()
    slack = -_LEAST_NS - _ROUNDING * wall
    must(meta.inputs, least is None or float(str(least)) >= slack, "a phase of compilation has a negative duration")
    for frame, what in ((times.ranks, "ranks"), (times.programs, "programs")):
        adds_up = int(frame["total_ns"].sum()) == wall
        must(meta.inputs, adds_up, f"compile times of the {what} do not add up to the whole")
    return times


def consistent_idle(found: IdleTime, meta: Meta) -> IdleTime:
    """Returns the idle time after checking that its causes add up to it, and its rows to the causes.

    Raises:
        Contradiction: they do not.
    """
    of_causes = dict(found.causes.select("cause", "total_ns").rows())
    of_rows = dict(found.rows.group_by("cause").agg(pl.col("total_ns").sum()).rows())
    must(
        meta.inputs,
        sum(of_causes.values()) == (found.idle_ns or 0) and of_rows == of_causes,
        "the causes of idle time do not add up to it",
    )
    frames = (found.causes, found.rows, found.waits)
    least = min(_least(frame, ("total_ns",)) for frame in frames)
    after = int(found.waits["total_ns"].sum()) <= (found.idle_ns or 0)
    must(meta.inputs, least >= 0 and after, "a cause of idle time has a negative duration, or more than all idle time")
    return found


def consistent_steps(found: StepTable, meta: Meta) -> StepTable:
    """Returns the steps after checking that their times are possible and add up.

    Raises:
        Contradiction: a time is impossible, or times do not add up.
    """
    from thence.analysis.steps.windows import STEP

    causes = [name for name in found.frame.columns if name not in STEP]
    ordered = (
        (pl.min_horizontal("exposed_ns", "idle_ns", *causes) >= 0)
        & (pl.col("exposed_ns") <= pl.col("communication_ns"))
        & (pl.col("communication_ns") <= pl.col("busy_ns"))
        & (pl.col("busy_ns") + pl.col("idle_ns") == pl.col("duration"))
    )
    possible = found.frame.select(ordered.all()).item()
    must(meta.inputs, bool(possible), "the parts of a step do not add up to it")
    idle = found.frame.select((pl.sum_horizontal(*causes, pl.lit(0)) == pl.col("idle_ns")).all())
    must(meta.inputs, bool(idle.item()), "the causes of a step's idle time do not add up to it")
    return found


def consistent_what_if(found: WhatIf, meta: Meta) -> WhatIf:
    """Returns the predictions after checking that no step has a negative duration and that gains are differences.

    Raises:
        Contradiction: a duration is negative, a gain is not the difference of its durations, or bounds are swapped.
    """
    rows = found.rows.drop_nulls("after_ns")
    possible = rows.select(
        (
            (pl.col("after_ns") >= 0)
            & (pl.col("before_ns") - pl.col("after_ns") == pl.col("gain_ns"))
            & (pl.col("low_share") <= pl.col("high_share"))
        ).all()
    ).item()
    must(meta.inputs, bool(possible), "a predicted step has a negative duration, or gains do not add up")
    return found


def consistent_path(tiles: pl.DataFrame, meta: Meta) -> pl.DataFrame:
    """Returns the tiles of a critical path after checking that they follow each other without gap or overlap.

    Raises:
        Contradiction: they do not.
    """
    start = tiles["start"]
    end = start + tiles["duration"]
    follow = bool((end.head(max(tiles.height - 1, 0)) == start.slice(1)).all())
    must(
        meta.inputs,
        follow and _least(tiles, ("duration",)) >= 0,
        "the parts of the critical path overlap or leave gaps",
    )
    return tiles


def consistent_diff(found: Diff) -> Diff:
    """Returns the comparison after checking that busy and idle time add up to steps, and that differences are right.

    Raises:
        Contradiction: times do not add up, or a difference is not that of its two sides.
    """
    from thence.analysis.diff.sample import ALL, BUSY, IDLE

    inputs = [name for side in (found.before, found.after) for run in side for name in run.inputs]
    rows = found.rows
    for column, whole in (("before_ns", found.total.before_ns), ("after_ns", found.total.after_ns)):
        parts = rows.filter(pl.col("by").is_in([BUSY, IDLE]), pl.col("name") == ALL)[column]
        close = len(parts) < 2 or _close(float(parts.sum()), whole)
        must(inputs, close, "busy and idle time of a step do not add up to it")
    difference = pl.col("after_ns") - pl.col("before_ns")
    slack = _LEAST_NS + _ROUNDING * pl.max_horizontal("before_ns", "after_ns")
    possible = rows.select(
        (
            (pl.min_horizontal("before_ns", "after_ns") >= 0)
            & ((difference - pl.col("difference_ns")).abs() <= slack)
            & (pl.col("low_ns") <= pl.col("high_ns")).fill_null(value=True)
        ).all()
    ).item()
    must(inputs, bool(possible), "a difference is not that of its two sides")
    if found.moved_streams is not None:
        moved = found.moved_streams.parts
        for column in ("before_ns", "after_ns"):
            times = {name: float(part[column] or 0) for name, part in moved.items()}
            step = times["streams"] - times["overlapped"] + times["other"] + times["idle"]
            whole = getattr(found.total, column)
            close = (
                _close(times["streams"] - times["overlapped"], times["any"])
                and _close(step, whole)
                and min(times.values()) > -_LEAST_NS
            )
            must(inputs, close, "times of moved work and of the rest do not add up to the step")
    return found


def _close(left: float, right: Ns | float) -> bool:
    return math.isclose(left, right, rel_tol=_ROUNDING, abs_tol=_LEAST_NS)


def _least(frame: pl.DataFrame, columns: tuple[str, ...]) -> float:
    """The least value in the columns; 0 if there is none."""
    values = frame.select(pl.min_horizontal(pl.col(columns).min())).item()
    return 0 if values is None else float(values)
