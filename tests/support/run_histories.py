"""Histories of runs: one recorded step of a real training program, run again and again with noise and a planted change.

    time of an activity in a step = recorded time x pace of the run x pace of its kernel in the run x noise of the step

All rows follow from the activities: the time of a module, an operator, a line or a kernel is the sum of its activities.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

import thence
from diff_runs import CONDITIONS
from helpers import STACK
from thence.analysis.diff.sample import Sample, run_steps
from thence.analysis.history.run_summary import RunSummary, summary_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY_NS = 86_400_000_000_000
FIRST_NS = 1_790_000_000_000_000_000
IDLE = 0.01
"""What is left of the recorded idle time: the host limits the recorded program, and the GPU this one."""
KINDS = ("module", "op", "kernel")


@cache
def recorded() -> tuple[pl.DataFrame, float]:
    """Module, operator, kernel and duration of each activity of the last recorded step; and its idle time, ns."""
    trace = thence.open(STACK).tables
    steps = run_steps(trace, causes=False)
    last = steps.times.height - 1
    rows = trace.gpu.select(
        "duration", kernel=pl.col("name").cast(pl.String),
        **{kind: trace.places[kind].cast(pl.String).fill_null("[no place known]") for kind in ("module", "op")},
    ).filter(pl.Series(steps.of_activity == last))  # fmt: skip
    return rows, IDLE * float(steps.times["idle_ns"][last])


@dataclass(frozen=True)
class Noise:
    """How runs differ: standard deviations of the pace of a run, a kernel in a run and a step, and disturbed runs.

    Attributes:
        run, kernel, step: as shares.
        disturbed: share of the runs that share their GPU or host with something else.
        most: share by which such a run is slower, at most.
    """

    run: float = 0.01
    kernel: float = 0.02
    step: float = 0.01
    disturbed: float = 0.07
    most: float = 0.15


def longest_module() -> str:
    """The module in which the step spends most time."""
    rows, _ = recorded()
    known = rows.filter(~pl.col("module").str.starts_with("["))
    return str(known.group_by("module").agg(pl.col("duration").sum()).sort("duration")["module"][-1])


def runs(
    seed: int, count: int = 44, since: int = 30, slower: float = 1.0, noise: Noise | None = None
) -> list[RunSummary]:
    """The runs of a history, one a day.

    Args:
        seed: of the random numbers.
        count: how many.
        since: number (from 1) of the first run in which `longest_module` is slower.
        slower: how many times as long its activities take then.
        noise: of the runs.
    """
    random = np.random.default_rng(seed)
    planted = np.array(recorded()[0]["module"] == longest_module())
    every = []
    for number in range(1, count + 1):
        factor = np.where(planted & (number >= since), slower, 1.0)
        sample = _run(random, factor, noise or Noise(), number)
        every.append(summary_of(sample, f"run{number:02}", FIRST_NS + number * DAY_NS, "recording"))
    return every


def _run(random: np.random.Generator, factor: np.ndarray, noise: Noise, number: int, steps: int = 8) -> Sample:
    rows, idle = recorded()
    kernels = rows["kernel"].rank("dense").to_numpy() - 1
    pace = np.exp(random.normal(0, noise.run))
    if random.random() < noise.disturbed:
        pace *= 1 + random.uniform(0, noise.most)
    of_kernel = np.exp(random.normal(0, noise.kernel, kernels.max() + 1))[kernels]
    of_step = np.exp(random.normal(0, noise.step, (steps, rows.height)))
    times = rows["duration"].to_numpy() * factor * pace * of_kernel * of_step
    idles = idle * pace * np.exp(random.normal(0, 3 * noise.step, steps))
    busy = times.sum(axis=1)
    whole = ("step", "busy", "idle"), np.stack([busy + idles, busy, idles])
    frames = [_rows(whole[0], ["all"] * 3, whole[1])]
    for kind in KINDS:
        names = rows[kind].unique().sort()
        place = (rows[kind].rank("dense").to_numpy() - 1).astype(np.int64)
        sums = np.stack([np.bincount(place, step, minlength=len(names)) for step in times], axis=1)
        frames.append(_rows([kind] * len(names), names.to_list(), sums))
    table = pl.DataFrame({"name": [str(s) for s in range(steps)], "total_ns": busy + idles, "left_out": [None] * steps})
    about = replace(CONDITIONS, identity=(number, int(busy.sum())))
    return Sample(
        (f"run{number}",), "steps", table.cast({"left_out": pl.String}), pl.concat(frames), pl.DataFrame(), about, 0.0
    )


def _rows(by: Sequence[str], names: Sequence[str], ns: np.ndarray) -> pl.DataFrame:
    """Rows of a sample from times of shape (rows, steps)."""
    count, steps = ns.shape
    row = np.repeat(np.arange(count), steps)
    step = np.tile(np.arange(steps, dtype=np.int32), count)
    named = {"by": pl.Series(by, dtype=pl.String).gather(row), "name": pl.Series(names, dtype=pl.String).gather(row)}
    return pl.DataFrame({**named, "step": step, "ns": ns.ravel(), "count": 1.0})
