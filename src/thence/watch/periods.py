"""How the steps of a job went over days, from the summaries of its windows: ``thence steps DIR/*/summaries.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.answer import Answer, Caveats, TableView
from thence.model.formats import OLDER_SUMMARIES_FILE
from thence.units import format_ns, several
from thence.watch.estimates import share_intervals
from thence.watch.summary_file import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from thence.watch.summary_file import Window

_SECOND = 1_000_000_000
_PERIODS = tuple(_SECOND * seconds for seconds in (10, 60, 600, 3_600, 21_600, 86_400, 604_800))
_MAX_PERIODS = 48
"""Periods of one rank, at most; longer ones if there would be more."""
_COLUMNS = {
    "rank": pl.Int64(),
    "begin": pl.String(),
    "begin_unix_ns": pl.Int64(),
    "steps": pl.Int64(),
    "median_ns": pl.Int64(),
    "p95_ns": pl.Int64(),
    "max_ns": pl.Int64(),
    "longest": pl.Int64(),
    "windows": pl.Int64(),
    "busy_share": pl.Float64(),
    "low_share": pl.Float64(),
    "high_share": pl.Float64(),
    "idle_cause": pl.String(),
    "idle_cause_share": pl.Float64(),
}


@dataclass(frozen=True)
class StepsByPeriod(Answer):
    """Steps by period of time.

    Attributes:
        period_ns: length of a period.
        periods: a row for each rank and period with summaries: rank, begin (UTC) and begin_unix_ns, steps (recorded or
            not), median_ns and p95_ns (medians over the lines of the period of these figures of their steps), max_ns
            and longest (its number), windows (recorded in turn), busy_share with low_share and high_share (the interval
            of the share of all its steps; null for few windows), idle_cause (the largest) and idle_cause_share.
        damaged: lines that could not be read.
    """

    period_ns: int
    periods: pl.DataFrame
    damaged: int = 0

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return ("steps over time", self._title())

    def _title(self) -> str:
        steps = several(int(self.periods["steps"].sum()), "step")
        return (
            f"{steps} of {several(self.periods['rank'].n_unique(), 'rank')}, by periods of {format_ns(self.period_ns)}"
        )

    def views(self) -> tuple[TableView, ...]:
        """See `Answer`."""
        shown = {
            "rank": "rank", "begin": "from (UTC)", "steps": "steps", "median_ns": "median", "p95_ns": "95 of 100 below",
            "max_ns": "longest", "longest": "step", "busy_share": "busy", "low_share": "from", "high_share": "to",
            "idle_cause": "idle most by", "idle_cause_share": "share", "windows": "windows",
        }  # fmt: skip
        return (TableView(self.periods, shown, self._title(), bar="median_ns"),)

    def remarks(self) -> Iterator[str]:
        """See `Answer`."""
        if self.damaged:
            yield f"{several(self.damaged, 'line')} of the summaries could not be read"

    def to_frame(self) -> pl.DataFrame:
        """The periods."""
        return self.periods

    def to_json(self) -> dict[str, Any]:
        """See `Answer`."""
        return {"period_ns": self.period_ns, "damaged_lines": self.damaged, "periods": self.periods}


def steps_by_period(paths: Sequence[Path]) -> StepsByPeriod:
    """Steps by period of time, from the files of one job's processes.

    Raises:
        DamagedInput: the files hold no summary of a window.
    """
    files = [read(folder) for folder in sorted({path.parent for path in paths})]
    lines = sorted((w for summaries in files for w in summaries.windows), key=lambda window: window.end_unix_ns)
    if not lines:
        raise DamagedInput(
            str(paths[0]), f"holds no summary of a window, as thence record --always writes; nor {OLDER_SUMMARIES_FILE}"
        )
    period = next(
        (p for p in _PERIODS if lines[-1].end_unix_ns - lines[0].begin_unix_ns <= p * _MAX_PERIODS), _PERIODS[-1]
    )
    grouped: dict[tuple[int, int], list[Window]] = {}
    for window in lines:
        grouped.setdefault((window.rank, window.end_unix_ns // period * period), []).append(window)
    rows = [_row(rank, begin, windows) for (rank, begin), windows in sorted(grouped.items())]
    return StepsByPeriod(
        period,
        pl.DataFrame(rows, _COLUMNS, orient="row"),
        sum(summaries.damaged for summaries in files),
        caveats=Caveats(inputs=tuple(map(str, paths))),
    )


def _row(rank: int, begin: int, windows: Sequence[Window]) -> tuple[Any, ...]:
    steps = [window.all_steps for window in windows if window.all_steps is not None]
    longest = max(steps, key=lambda each: each.max_ns, default=None)
    in_turn = [window for window in windows if window.asked is None and window.duration_ns > 0]
    whole = np.array([window.duration_ns for window in in_turn], np.float64)
    busy = np.array([[window.busy_ns] for window in in_turn], np.float64)
    bounds = share_intervals(busy, whole)
    causes: dict[str, int] = {}
    for window in in_turn:
        for name, total in window.idle_ns.items():
            causes[name] = causes.get(name, 0) + total
    cause = max(causes, key=lambda name: causes[name]) if causes else None
    return (
        rank,
        _utc(begin),
        begin,
        sum(each.count for each in steps),
        round(float(np.median([each.median_ns for each in steps]))) if steps else None,
        round(float(np.median([each.p95_ns for each in steps]))) if steps else None,
        longest and longest.max_ns,
        longest and longest.longest,
        len(in_turn),
        float(busy.sum() / whole.sum()) if in_turn else None,
        None if bounds is None else float(bounds[0, 0]),
        None if bounds is None else float(bounds[1, 0]),
        cause,
        causes[cause] / float(whole.sum()) if cause else None,
    )


def _utc(unix_ns: int) -> str:
    try:
        return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # of a damaged file
        return "?"
