"""What must hold for every answer, whatever the trace: times are possible, and parts add up.

No input can break these conditions once its row references hold and its times are within bounds, which readers and
`thence.analysis.self_check` see to; only a defect of thence can. So they are checked here rather than in each run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.collectives.answer import Collectives
from thence.analysis.diff.answer import Diff
from thence.analysis.flame.answer import Flame
from thence.analysis.programs.answer import Programs
from thence.analysis.programs.compilation import Compilation
from thence.analysis.report.summary import Summary
from thence.analysis.streams import Streams

if TYPE_CHECKING:
    from thence.model.answer import Answer

ROUNDING = 1e-6
MIN_NS = 1.0


def not_negative(frame: pl.DataFrame, *columns: str) -> None:
    """No value in the columns is below 0."""
    for column in columns:
        assert frame.filter(pl.col(column) < 0).is_empty(), column


def all_hold(frame: pl.DataFrame, condition: pl.Expr) -> None:
    """The condition holds in every row; where it is null it cannot be judged."""
    assert frame.filter(~condition).is_empty()


def tiles_follow_each_other(tiles: pl.DataFrame) -> None:
    """The tiles of a critical path neither overlap nor leave gaps."""
    not_negative(tiles, "duration")
    all_hold(tiles, pl.col("start") + pl.col("duration") == pl.col("start").shift(-1))


@functools.singledispatch
def possible(answer: Answer) -> None:
    """Asserts that the times of an answer are possible and its parts add up."""
    raise TypeError(type(answer))


@possible.register
def _(answer: Summary) -> None:
    if not answer.selection:
        # Each nanosecond with work is exposed in one row, or several rows share it.
        assert int(answer.rows["exposed_ns"].sum()) + answer.overlapped_ns == answer.busy_ns
    not_negative(answer.rows, "count", "total_ns", "exposed_ns", "backward_ns")
    if answer.folded is not None:
        sums = ("count", "total_ns", "exposed_ns", "backward_ns")
        assert answer.folded.select(sums).sum().equals(answer.rows.select(sums).sum())


@possible.register
def _(answer: Flame) -> None:
    not_negative(answer.nodes, "self_ns", "total_ns")
    assert int(answer.nodes["self_ns"].sum()) == int(answer.nodes["total_ns"][0])


@possible.register
def _(answer: Programs) -> None:
    not_negative(answer.executions, "duration", "busy_ns", "thunk_ns", "idle_inside_ns", "idle_before_ns")
    all_hold(answer.executions, pl.col("busy_ns") <= pl.col("thunk_ns"))
    all_hold(answer.executions, pl.col("idle_inside_ns") <= pl.col("duration"))


@possible.register
def _(answer: Compilation) -> None:
    all_hold(answer.phases, pl.col("self_ns") >= -MIN_NS - ROUNDING * answer.wall_ns)
    assert int(answer.ranks["total_ns"].sum()) == answer.wall_ns
    assert int(answer.programs["total_ns"].sum()) == answer.wall_ns


@possible.register
def _(answer: Streams) -> None:
    for device in answer.concurrency:
        assert 0 <= device.hidden_ns <= device.communication_ns <= device.busy_ns
    not_negative(answer.streams, "busy_ns")
    all_hold(answer.streams, pl.col("concurrent_ns") <= pl.col("busy_ns"))


@possible.register
def _(answer: Collectives) -> None:
    parts = ("exposed_ns", "overlapped_ns", "hidden_ns")
    not_negative(answer.rows, *parts)
    all_hold(answer.rows, pl.sum_horizontal(parts) == pl.col("duration_ns"))
    not_negative(answer.devices, "exposed_ns")
    all_hold(answer.devices, pl.col("exposed_ns") <= pl.col("communication_ns"))
    not_negative(answer.instances, "wait_ns", "device_wait_ns", "transfer_ns")
    not_negative(answer.last_arrivals, "last", "waited_ns", "waited_device_ns")


@possible.register
def _(answer: Diff) -> None:
    not_negative(answer.rows, "before_ns", "after_ns")
    slack = MIN_NS + ROUNDING * pl.max_horizontal("before_ns", "after_ns")
    all_hold(answer.rows, (pl.col("after_ns") - pl.col("before_ns") - pl.col("difference_ns")).abs() <= slack)
    all_hold(answer.rows, pl.col("low_ns") <= pl.col("high_ns"))
    if answer.moved_streams is None:
        return
    for column in ("before_ns", "after_ns"):
        times = {name: float(part[column] or 0) for name, part in answer.moved_streams.parts.items()}
        step, joined = getattr(answer.total, column), times["streams"] - times["overlapped"]
        assert abs(joined - times["any"]) <= MIN_NS + ROUNDING * step
        assert abs(joined + times["other"] + times["idle"] - step) <= MIN_NS + ROUNDING * step
        assert min(times.values()) > -MIN_NS
