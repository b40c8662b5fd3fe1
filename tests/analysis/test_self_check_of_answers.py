"""Answers that contradict themselves are refused; those of recordings are not."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl
import pytest

import thence
from helpers import DATA, STACK
from thence.errors import Contradiction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from thence.model.answer import Answer


@cache
def opened(name: str) -> thence.Trace:
    return thence.open(DATA / name)


def more(frame: pl.DataFrame, column: str, by: float = 1) -> pl.DataFrame:
    """The frame with one more in the first row of a column."""
    first = pl.int_range(pl.len()) == 0
    return frame.with_columns(pl.when(first).then(pl.col(column) + by).otherwise(column).alias(column))


def refused(sound: Answer, changes: Iterable[dict[str, Any]]) -> None:
    """Each of the changes makes a sound result one that is refused in one sentence."""
    sound.self_check()
    for change in changes:
        with pytest.raises(Contradiction, match="please report this") as error:
            dataclasses.replace(sound, **change).self_check()
        assert "\n" not in str(error.value)


def test_collectives() -> None:
    trace = opened("torch/waits/group_rank0.json.gz")
    sound = trace.collectives("keep")
    changes = [
        *({"rows": more(sound.rows, c)} for c in ("duration_ns", "exposed_ns", "hidden_ns")),
        *({"by_size": more(sound.by_size, c)} for c in ("count", "duration_ns", "overlapped_ns")),
        {"devices": more(sound.devices, "exposed_ns")}, {"left_out": sound.left_out | {"exposed_ns": 1}},
    ]  # fmt: skip
    refused(sound, changes)


def test_programs() -> None:
    trace = opened("jax/streams_moved.xplane.pb")
    sound = trace.programs("keep")
    changes = [
        *({"programs": more(sound.programs, c)} for c in ("executions", "span_ns_total", "idle_between_ns")),
        *({"devices": more(sound.devices, c)} for c in ("busy_ns", "idle_inside_ns")),
        {"executions": more(sound.executions, "duration")},
    ]  # fmt: skip
    refused(sound, changes)


def test_compilation() -> None:
    trace = opened("jax/recording")
    sound = trace.compile()
    long = 0.01 * sound.wall_ns
    changes = [
        {"wall_ns": sound.wall_ns + long}, {"phases": more(sound.phases, "self_ns", long)},
    ]  # fmt: skip
    refused(sound, changes)


def test_idle_time() -> None:
    trace = thence.open(STACK)
    sound = trace.idle()
    changes = [
        {"idle_ns": sound.idle_ns + 1}, {"causes": more(sound.causes, "total_ns")},
        {"rows": more(sound.rows, "total_ns")},
        {"waits": pl.DataFrame({"total_ns": [sound.idle_ns + 1]})},
    ]  # fmt: skip
    refused(sound, changes)


def test_steps() -> None:
    trace = thence.open(STACK)
    sound = trace.steps()
    cause = next(name for name in sound.frame.columns if name.startswith("idle_") and name != "idle_ns")
    columns = ("duration", "busy_ns", "idle_ns", cause)
    changes = [
        *({"frame": more(sound.frame, column)} for column in columns),
        {"frame": sound.frame.with_columns(exposed_ns=pl.col("busy_ns"), communication_ns=0)},
    ]
    refused(sound, changes)


def test_what_ifs() -> None:
    trace = thence.open(STACK)
    sound = trace.whatif(free=["kernel:."])
    changes = [
        {"rows": more(sound.rows, column, 10**12)} for column in ("before_ns", "after_ns", "gain_ns", "low_share")
    ]  # fmt: skip
    refused(sound, changes)


def test_comparisons() -> None:
    trace = thence.open(STACK)
    sound = trace.diff(trace)
    rows = sound.rows
    busy = rows.with_columns(
        before_ns=pl.when(pl.col("by") == "busy").then(pl.col("before_ns") * 2).otherwise("before_ns")
    )
    total = dataclasses.replace(sound.total, after_ns=2 * sound.total.after_ns)
    refused(sound, [{"rows": busy}, {"total": total}])
