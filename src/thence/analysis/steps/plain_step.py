"""How long a step takes without being recorded, and what recording adds to it.

thence's recorder leaves some windows of steps unrecorded, in which nothing of it costs time, and measures the steps of
these windows and as many recorded ones around each (`thence.capture.session.step_times`). The table ``step_times``
holds both. The typical step of each kind is the median; its interval is that of order statistics: of n values sorted,
the median of the distribution lies between the k-th smallest and the k-th largest with the probability

    1 - 2 P(B < k), B binomial with n trials of 1/2

whatever the distribution is, if the values are independent (David and Nagaraja, Order Statistics, 7.1). k is the
largest for which this is at least 95 %, so 6 values are needed. Steps that follow each other are not independent: the
host of a program becomes slower and faster over seconds, so this interval alone is too narrow. It is made wider where
the medians of single windows are outside of it. What no window of a process shows is how fast the host is in another
process of the same program: `PlainStep.beside_other_processes` adds that, by the share of a step in which nothing runs
on the GPU.

With several ranks, a step counts as plain if no rank recorded it, and as recorded if all ranks did; its duration is the
longest of the ranks, because the others wait for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.model.thresholds import BETWEEN_PROCESSES_HOST_SHARE, BETWEEN_PROCESSES_SHARE
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from thence.model.attributed import Attributed
    from thence.model.tables import Tables
    from thence.units import Ns

PROBABILITY = 0.95
"""Of the intervals of medians."""
MIN_STEPS = 6
"""Fewer values have no interval of a median with that probability: 2 * 0.5**5 > 1 - `PROBABILITY`."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Steps of one kind, plain or recorded.

    Attributes:
        count: number of steps.
        median_ns: of their durations.
        low_ns, high_ns: the interval in which the median is, see above.
        windows: number of runs of steps with consecutive numbers.
    """

    count: int
    median_ns: float
    low_ns: Ns
    high_ns: Ns
    windows: int

    def wider(self, share: float) -> Typical:
        """The same with an interval that is longer on each side, by a share of the median."""
        beside = share * self.median_ns
        return replace(self, low_ns=math.floor(self.low_ns - beside), high_ns=math.ceil(self.high_ns + beside))

    def to_json(self) -> dict[str, Any]:
        """The values for JSON."""
        return {
            "count": self.count, "median": self.median_ns, "low": self.low_ns, "high": self.high_ns,
            "windows": self.windows,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PlainStep:
    """The step of a program as it is without a recorder, and as it was while it was recorded.

    Attributes:
        plain: steps that were not recorded.
        recorded: recorded steps around these; None if there are too few.
    """

    plain: Typical
    recorded: Typical | None

    @property
    def added_share(self) -> float | None:
        """By which share recording makes a step longer; None if it is unknown."""
        if self.recorded is None:
            return None
        return self.recorded.median_ns / max(self.plain.median_ns, 1) - 1

    @property
    def added_interval(self) -> tuple[float, float] | None:
        """The lowest and the highest share that both intervals allow."""
        if self.recorded is None:
            return None
        return (
            self.recorded.low_ns / max(self.plain.high_ns, 1) - 1,
            self.recorded.high_ns / max(self.plain.low_ns, 1) - 1,
        )

    @property
    def added_ns(self) -> float:
        """How much longer recording makes a step; 0 if that is unknown, or not longer."""
        return 0.0 if self.recorded is None else max(self.recorded.median_ns - self.plain.median_ns, 0.0)

    def beside_other_processes(self, busy_ns: float) -> PlainStep:
        """The same with intervals in which medians of other processes of the program are, too.

        Args:
            busy_ns: of a step, the time in which anything runs on the GPU: this part repeats from process to process,
                unlike the time in which the GPU waits for the host.
        """
        waits = max(1 - busy_ns / max(self.plain.median_ns, 1), 0.0)
        share = BETWEEN_PROCESSES_SHARE + BETWEEN_PROCESSES_HOST_SHARE * waits
        return PlainStep(self.plain.wider(share), None if self.recorded is None else self.recorded.wider(share))

    @property
    def text(self) -> str:
        """As part of a sentence: ``13.07 ms a step (12.98 ms to 13.2 ms), 14.7 ms while recorded (+12.5 %)``."""
        plain = self.plain
        text = f"{format_ns(plain.median_ns)} a step ({format_ns(plain.low_ns)} to {format_ns(plain.high_ns)})"
        if self.recorded is None:
            return text
        added = self.added_share or 0.0
        sign = "+" if added >= 0 else "-"
        return f"{text}, {format_ns(self.recorded.median_ns)} while recorded ({sign}{format_share(abs(added), 1)})"

    @property
    def basis(self) -> str:
        """Of what the figures are made."""
        others = "" if self.recorded is None else f" and {self.recorded.count:,} recorded"
        windows = several(self.plain.windows, "window")
        return f"medians of {self.plain.count:,} plain{others} steps, {windows}, interval {PROBABILITY * 100:.0f} %"

    def to_json(self) -> dict[str, Any]:
        """The values for JSON."""
        low, high = self.added_interval or (None, None)
        return {
            **self.plain.to_json(),
            "recorded": None if self.recorded is None else self.recorded.to_json(),
            "added_share": self.added_share,
            "added_share_low": low,
            "added_share_high": high,
        }


def plain_step(times: pl.DataFrame) -> PlainStep | None:
    """The step without recording; None if no steps were left unrecorded, or fewer than `MIN_STEPS` that count.

    Its intervals are those of this process.

    Args:
        times: the table step_times.
    """
    if times.is_empty() or times["recorded"].all():
        return None
    ranks = times["rank"].n_unique()
    of_number = (
        times.filter("counted")
        .group_by("number", "recorded")
        .agg(pl.col("duration").max(), ranks=pl.col("rank").n_unique())
        .filter(pl.col("ranks") == ranks)
    )
    plain, recorded = (_typical(of_number.filter(pl.col("recorded") == kind)) for kind in (False, True))
    return None if plain is None else PlainStep(plain, recorded)


def why_no_plain_step(tables: Tables) -> str:
    """Why `plain_step` is None for a recording with steps, as a part of a sentence; empty for other traces."""
    times = tables.step_times
    if times.is_empty():
        return ""
    troubles = [
        trouble
        for facts in tables.meta.facts
        if (trouble := (facts.get("plain_steps") or {}).get("trouble")) is not None
    ]
    if troubles:
        return str(troubles[0])
    left = unrecorded_steps(times)
    if left:
        return f"of {several(left, 'step')} that were not recorded, fewer than {MIN_STEPS} count on all ranks"
    return "no steps were left unrecorded, which the recorder does after some 60 steps"


def of_some_steps(trace: Attributed) -> bool:
    """Whether a range of steps is selected, of which the plain steps are not."""
    return isinstance(trace.selection.steps, tuple)


def unrecorded_steps(times: pl.DataFrame) -> int:
    """The number of steps that were not recorded: that of the rank with most.

    Args:
        times: the table step_times.
    """
    left = times.filter(~pl.col("recorded")).group_by("rank").len()
    return int(str(left["len"].max() or 0))


def median_interval(count: int) -> tuple[int, int] | None:
    """Positions, in sorted values, of the ends of the interval of their median; None for too few values."""
    outside, k = 0.0, 0
    while True:
        outside += 2 * math.exp(
            math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            - count * math.log(2)
        )  # fmt: skip
        if outside > 1 - PROBABILITY or 2 * k >= count:
            break
        k += 1
    return (k - 1, count - k) if k else None


def _typical(steps: pl.DataFrame) -> Typical | None:
    steps = steps.sort("number")
    values = np.sort(steps["duration"].to_numpy())
    ends = median_interval(len(values))
    if ends is None:
        return None
    window = (pl.col("number").diff() != 1).fill_null(value=True).cum_sum()
    medians = steps.group_by(window=window).agg(pl.col("duration").median())["duration"].to_numpy()
    low, high = (values[end] for end in ends)
    return Typical(
        len(values),
        float(np.median(values)),
        math.floor(min(low, medians.min())),
        math.ceil(max(high, medians.max())),
        len(medians),
    )
