"""What damaged clocks and lossy profilers do to real traces is found, in every format in which it can be proved."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from planted_defects import DEFECTS, TRACES, divided_by_1000, exact_duplicates, step_without_work
from thence.analysis.soundness.check import check
from thence.readers.registry import read

if TYPE_CHECKING:
    from planted_defects import Plant
    from thence.analysis.soundness.findings import Finding
    from thence.model.tables import Tables

EXPECTED = {
    "exact_duplicates": {"listed_twice"},
    "shifted_duplicates": {"listed_twice", "partial_replay"},
    "doubled_step": {"listed_twice"},
    "step_without_work": {"launch_without_work"},
    "device_clock_+1_ms": {"late_clock", "started_late"},
    "device_clock_-1_ms": {"work_before_launch"},
    "device_clock_+30_ms": {"late_clock", "started_late"},
    "device_clock_-30_ms": {"work_before_launch"},
    "clock_jump_+5000_ms": {"late_clock", "started_late"},
    "clock_jump_-5000_ms": {"work_before_launch"},
    "long_kernel": {"impossible_time"},
    "lossy_replays_but_1": {"partial_replay"},
    "lossy_replays_but_0": {"partial_replay"},
    "divided_by_1000": {"impossible_time"},
}
"""Codes of which one must be found; graphs without ids cannot tell a copy from an additional kernel."""

UNPROVABLE = {
    # No call waits for known work, and the device was idle at too few launches: a clock that is late contradicts
    # nothing.
    ("device_clock_+1_ms", "Nsight, JAX"),
    ("device_clock_+1_ms", "xplane"),
    ("device_clock_+30_ms", "Nsight, JAX"),
    ("device_clock_+30_ms", "xplane"),
    ("clock_jump_+5000_ms", "Nsight, JAX"),
    ("clock_jump_+5000_ms", "xplane, graphs, two GPUs"),
    # Its first work began more than a millisecond after its launch.
    ("device_clock_-1_ms", "graph replay, torch 2.12"),
}


TESTED = (
    "eager, torch 2.12", "FSDP, four ranks", "graph replay, torch 2.12", "graph replay of a block",
    "recording of two ranks", "recording of JAX", "Nsight, graphs", "Nsight, JAX", "xplane",
    "xplane, graphs, two GPUs",
)  # fmt: skip
"""Of the sound traces (`test_recordings`) those that differ in what can be proved: half of them for each defect;
`benchmarks/check_soundness.py` tries all."""


@functools.cache
def tables_of(name: str) -> Tables:
    return read(TRACES[name])


def findings(plant: Plant, name: str) -> tuple[Finding, ...] | None:
    planted = plant(tables_of(name))
    return None if planted is None else check(planted).findings


@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(plant: Plant) -> None:
    number = DEFECTS.index(plant)
    half = TESTED[(number + number // 2) % 2 :: 2]  # each of two that are alike on another half
    codes = {name: found for name in half if (found := findings(plant, name)) is not None}
    assert len(codes) >= 2
    missed = {
        (plant.__name__, name)
        for name, found in codes.items()
        if not {finding.code for finding in found} & EXPECTED[plant.__name__]
    }
    assert missed == {(plant.__name__, name) for name in half} & UNPROVABLE


@pytest.mark.parametrize("name", ["eager, torch 2.12", "xplane"])
def test_copies_are_counted_with_their_time(name: str) -> None:
    whole, doubled = tables_of(name), exact_duplicates(tables_of(name))
    (finding,) = check(doubled).findings
    assert finding.count == doubled.gpu.height - whole.gpu.height > 10
    more = int(doubled.gpu["duration"].sum()) - int(whole.gpu["duration"].sum())
    assert finding.span_ns == more


def test_a_step_without_work_is_missing_work() -> None:
    assert check(step_without_work(tables_of("xplane"))).work_missing


def test_times_in_another_unit_are_called_so() -> None:
    (finding,) = check(divided_by_1000(tables_of("eager, torch 2.11"))).findings
    assert finding.code == "impossible_time"
    assert "the unit of the times is not what the trace states" in finding.text
