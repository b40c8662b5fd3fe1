"""Counts of several runs add up, those of a run that was stopped included."""

from __future__ import annotations

from fuzz.batches import Batch, Totals


def batch(name: str, cases: int, seconds: float, *, failed: int = 0, stopped: bool = False) -> str:
    return Batch(name, 1, 0, cases, failed, stopped, seconds, "").counted


def test_logs_add_up() -> None:
    first = "kineto: 7 cases from 0\n" + batch("kineto", 7, 1.5) + batch("nsys-jax", 2, 0.25)
    stopped = batch("kineto", 4, 2.25, failed=1, stopped=True) + "counted kineto: 9 ca"
    totals = Totals.of_logs([first, stopped])
    assert totals.cases == {"kineto": 11, "nsys-jax": 2}
    assert totals.cpu_seconds == {"kineto": 3.75, "nsys-jax": 0.25}
    assert (totals.failed["kineto"], totals.stopped["kineto"]) == (1, 1)
    assert totals.table().splitlines()[-1].split() == ["all", "13", "4", "1", "1"]
