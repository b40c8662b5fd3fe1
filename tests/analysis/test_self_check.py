"""Figures that contradict each other are refused, whatever made them so."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import polars as pl
import pytest

from helpers import kernel, launch, opened
from thence.analysis.self_check import checked_references
from thence.analysis.streams import Devices
from thence.errors import Contradiction

if TYPE_CHECKING:
    from pathlib import Path

    import thence


@pytest.fixture
def trace(tmp_path: Path) -> thence.Trace:
    """Five kernels on two streams, some at the same time."""
    events = [e for i in range(1, 6) for e in (
        launch(i, 10 * i), kernel(i, 10 * i + 2, 12, args={"stream": 7 + i % 2}),
    )]  # fmt: skip
    return opened(tmp_path, events)


def test_impossible_totals_are_refused(trace: thence.Trace) -> None:
    sound = trace.report()
    sound.self_check()
    for change in (
        {"busy_ns": -1}, {"busy_ns": sound.span_ns + 1}, {"sum_ns": sound.sum_ns + 1}, {"span_ns": sound.busy_ns - 1},
        {"rows": sound.rows.head(0)}, {"rows": sound.rows.with_columns(total_ns=-pl.col("total_ns"))},
        {"attributed_ns": {k: v + 1 for k, v in sound.attributed_ns.items()}},
    ):  # fmt: skip
        with pytest.raises(Contradiction, match="please report this") as refused:
            dataclasses.replace(sound, **change).self_check()
        assert "\n" not in str(refused.value)


def test_rows_that_are_not_there_are_refused(trace: thence.Trace) -> None:
    sound = trace.tables
    checked_references(sound)
    beyond = sound.host.height
    broken_host = sound.host.with_columns(parent=pl.lit(beyond, sound.host.schema["parent"]))
    broken_places = sound.places.with_columns(launch=pl.lit(beyond, sound.places.schema["launch"]))
    for change in (
        {"host": broken_host}, {"places": broken_places}, {"places": sound.places.head(1)},
        {"places": sound.places.with_columns(label_rule=pl.lit(None, sound.places.schema["label_rule"]))},
    ):  # fmt: skip
        with pytest.raises(Contradiction):
            checked_references(dataclasses.replace(sound, **change))


def test_streams_that_cannot_be_are_refused(trace: thence.Trace) -> None:
    sound = trace.streams()
    (device,) = sound.concurrency
    assert sum(device.busy_streams_ns) == device.busy_ns == 52_000  # 12 to 64 us, without a gap
    rows = sound.concurrency.rows.with_columns(busy_ns=pl.lit(1))
    broken = dataclasses.replace(sound, concurrency=Devices(rows))
    with pytest.raises(Contradiction):
        broken.self_check()


def test_frames_that_do_not_add_up_are_refused(trace: thence.Trace) -> None:
    sound = trace.flame()
    for change in ({"sum_ns": sound.sum_ns + 1}, {"nodes": sound.nodes.with_columns(self_ns=-pl.col("self_ns"))}):
        with pytest.raises(Contradiction):
            dataclasses.replace(sound, **change).self_check()
