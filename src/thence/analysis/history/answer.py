"""`history`: since which run a program is slower or faster, and by which place.

1. Runs that cannot be compared with the newest one (`thence.analysis.diff.comparability`: another GPU, other shapes,
   another profiler ...) are left out.
2. The series of the step, of its parts and of the places that take longest are divided into levels
   (`thence.analysis.history.levels`).
3. Two levels that follow each other are compared as the two sides of `thence diff` are, with the same noise model
   (`thence.analysis.diff.estimates`). A change counts if its 95 % interval excludes 0 and it is larger than what is
   called the same there.
   Where the step changes, every row is compared, as `thence diff` does, at a false discovery rate of `CHANGE_LEVEL`.
4. Changes of several rows within `ONE_CHANGE_RUNS` runs are one change, dated by the clearest of them.

The step is examined with `CHANGE_LEVEL`, and so are all other rows together (Bonferroni), so that a history without a
change names one with at most twice this probability.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.answer import judged_rows
from thence.analysis.diff.comparability import refusals
from thence.analysis.diff.estimates import discoveries, estimates
from thence.analysis.diff.explanation import explain
from thence.analysis.diff.gate import judge
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, EXPOSED, IDLE, STEP, UNATTRIBUTED
from thence.analysis.history.levels import best_near, cuts
from thence.analysis.history.run_summary import means_of
from thence.errors import MissingData, UsageError
from thence.model.answer import Answer, Lines, TableView
from thence.model.kernel_names import clip, short_names
from thence.model.thresholds import (
    CHANGE_LEVEL,
    HISTORY_ROW_SHARE,
    NEGLIGIBLE_STEP_SHARE,
    ONE_CHANGE_RUNS,
    ONE_RUN_STEP_SHARE,
    SAME_SHARE,
)
from thence.model.totals import close, must
from thence.units import format_ns, several, signed_share

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.analysis.diff.estimates import RunMeans
    from thence.analysis.diff.gate import Bound, Gate
    from thence.analysis.history.run_summary import RunSummary

MAX_PLACES = 200
"""Most places that are examined: those of the longest time."""
WHOLE = ((STEP, ALL), (BUSY, ALL), (IDLE, ALL), (COMMUNICATION, EXPOSED))
"""The rows of the step and its parts, which come first."""
_NO_KERNELS = pl.DataFrame(
    schema={
        **dict.fromkeys(("name", "label", "module", "op_name", "op"), pl.String),
        "ns": pl.Float64,
        "count": pl.Float64,
    }
)
RUNS = {
    "run": pl.Int64,
    "name": pl.String,
    "started_ns": pl.Int64,
    "started_from": pl.String,
    "steps": pl.Int64,
    "step_ns": pl.Float64,
    "busy_ns": pl.Float64,
    "idle_ns": pl.Float64,
    "level": pl.Int64,
}
"""Columns of `History.runs`."""
CHANGES = {
    "by": pl.String,
    "name": pl.String,
    "run": pl.Int64,
    "since": pl.String,
    "before_ns": pl.Float64,
    "after_ns": pl.Float64,
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "change_share": pl.Float64,
    "verdict": pl.String,
}
"""Columns of `History.changes`."""
PLACES: dict[str, pl.DataType | type[pl.DataType]] = {
    "by": pl.String,
    "name": pl.String,
    "short_name": pl.String,
    "first_ns": pl.Float64,
    "newest_ns": pl.Float64,
    "change_share": pl.Float64,
    "verdict": pl.String,
    "since_run": pl.Int64,
    "since": pl.String,
    "ns": pl.List(pl.Float64),
}
"""Columns of `History.places`."""
_SHOWN_RUNS = {
    "run": "run", "started": "started", "name": "name", "steps": "steps", "step_ns": "step", "busy_ns": "busy",
    "idle_ns": "idle", "level": "level",
}  # fmt: skip
_SHOWN_PLACES = {
    "by": "by", "short_name": "name", "first_ns": "first level", "newest_ns": "newest level", "change": "change",
    "verdict": "verdict", "since": "since",
}  # fmt: skip
_ROWS_SHOWN = 10
_LONGEST = 60


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that is not in the history.

    Attributes:
        name: the run.
        code: ``unreadable``, or as in `thence.analysis.diff.comparability.Refusal`.
        text: why, one sentence.
    """

    name: str
    code: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {"name": self.name, "code": self.code, "text": self.text}


@dataclass(frozen=True)
class History(Answer):
    """The runs of a program in order of time. Times are ns per step and device, as in `thence.analysis.diff`.

    Attributes:
        explanation: sentences; the first says since when the step is slower or faster, and because of what.
        runs: one row per run, the oldest first, with the columns of `RUNS`: run (its number, from 1), started_from
            (as in `RunSummary`), level (number of the step's level, from 1).
        changes: every change of the step, its parts and places, with the columns of `CHANGES`: run and since are number
            and name of the first run of the new level; before_ns and after_ns are the means of the levels; low_ns and
            high_ns the 95 % interval of the difference; verdict slower or faster. The step comes first, then by size.
        places: a row for the step, each of its parts and each place that was examined, with the columns of `PLACES`:
            first_ns and newest_ns are means of the first and the newest level; verdict (of its newest change; null if
            there is none) and since; ns is the time in each run. Changed ones come first, then by time.
        left_out: runs that are not in the history, and why.
        means: the rows of all runs.
        few: whether there are too few runs to tell a change from noise.
        gates: the bounds that were judged, see `judged`.
    """

    explanation: tuple[str, ...]
    runs: pl.DataFrame
    changes: pl.DataFrame
    places: pl.DataFrame
    left_out: tuple[LeftOut, ...]
    means: RunMeans
    few: bool
    gates: tuple[Gate, ...] = ()

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.explanation

    def views(self) -> tuple[TableView | Lines, ...]:
        """The sentences, the places and the newest runs."""
        places = self.places.with_columns(
            change=pl.col("change_share").map_elements(signed_share, return_dtype=pl.String)
        )
        newest = self.runs.with_columns(started=started_text(self.runs)).reverse()
        head, *more = self.explanation
        gates = tuple((str(gate), "bold red" if gate.verdict == "exceeded" else "bold") for gate in self.gates)
        return (
            Lines(((head, "bold"), *((text, "") for text in more), *gates)),
            TableView(places, _SHOWN_PLACES, ranked=("short_name", "change", "since"), full="name"),
            TableView(newest, _SHOWN_RUNS, "runs, the newest first", ("run", "step_ns", "name"), _ROWS_SHOWN),
        )

    def remarks(self) -> Iterator[str]:
        """The runs that are left out, and how the figures were made."""
        yield from (f"left out ({entry.code}): {entry.text}" for entry in self.left_out)
        by_file = self.runs.filter(pl.col("started_from") == "files").height
        if by_file:
            runs = f"{several(by_file, 'run')} of {self.runs.height}"
            yield f"{runs} without a start time: ordered by the time of the files"
        if not self.few:
            yield (
                "changes: rank-sum test of every cut, 1 % for the step and 1 % for all other rows together; levels "
                "compared as by thence diff, intervals at 95 %"
            )

    def to_frame(self) -> pl.DataFrame:
        """One row for each run and place: run, name, started_ns, by, place, ns."""
        runs = self.runs.select("run", run_name="name", started="started_ns")
        listed_ns = self.places.select("by", "name", "ns", run=pl.lit(self.runs["run"].to_list()))
        rows = listed_ns.explode("ns", "run").join(runs, on="run", maintain_order="left")
        return rows.select("run", "run_name", started_ns="started", by="by", name="name", ns="ns")

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "explanation": list(self.explanation),
            "runs": self.runs.to_dicts(),
            "changes": self.changes.to_dicts(),
            "places": self.places.to_dicts(),
            "left_out": [entry.to_json() for entry in self.left_out],
            "gates": [gate.to_json() for gate in self.gates],
        }

    def self_check(self) -> None:
        """See `Answer`."""
        for row in self.runs.iter_rows(named=True):
            adds_up = close(row["busy_ns"] + row["idle_ns"], row["step_ns"])
            must([row["name"]], adds_up, "busy and idle time of a step do not add up to it")

    def by(self, kinds: Sequence[str]) -> History:
        """The same history with only the places of these kinds, and the step and its parts."""
        wanted = pl.col("by").is_in([*kinds, *(by for by, _ in WHOLE)])
        return replace(self, places=self.places.filter(wanted), changes=self.changes.filter(wanted))

    def judged(self, bounds: Sequence[Bound]) -> History:
        """The history with bounds of the newest runs.

        If the step became slower at its newest change, the runs since then are compared with the level before it.
        Otherwise the newest run is compared with all earlier ones of its level.

        Raises:
            UsageError: there are fewer than three runs to compare.
            MissingData: no run has the row of a bound.
        """
        level = self.runs["level"].to_list()
        newest = level[-1]
        of_step = self.changes.filter(pl.col("by") == STEP).sort("run")
        slower = of_step.height > 0 and of_step["verdict"][-1] == "slower"
        if slower:
            after = [number for number, run_level in enumerate(level) if run_level == newest]
            before = [number for number, run_level in enumerate(level) if run_level == newest - 1]
        else:
            *before, last = (number for number, run_level in enumerate(level) if run_level == newest)
            after = [last]
        if len(before) + len(after) < 3:
            raise UsageError(
                f"--fail-on compares the newest run with earlier ones, of which there "
                f"{'is 1' if len(before) == 1 else 'are none'}: give three runs or more"
            )
        return replace(self, gates=judge(self.means, before, after, bounds))


def started_text(runs: pl.DataFrame) -> pl.Series:
    """When each run started, as text in UTC."""
    times = pl.from_epoch(runs["started_ns"], time_unit="ns")
    return times.dt.strftime("%Y-%m-%d %H:%M:%S")


def history(runs: Sequence[RunSummary], unreadable: Sequence[LeftOut] = (), *, anyway: bool = False) -> History:
    """The history of a program.

    Args:
        unreadable: runs that could not be read.
        anyway: whether runs that cannot be compared with the newest one are kept.

    Raises:
        MissingData: there is no run.
    """
    ordered = sorted(runs, key=lambda run: (run.started_ns, run.name))
    if not ordered:
        raise MissingData("there is no run that can be read: " + "; ".join(entry.text for entry in unreadable))
    used, left_out = (ordered, []) if anyway else _comparable(ordered)
    means = means_of(used)
    names = [run.name for run in used]
    # even runs of which each is slower than the one before could be in this order by chance
    few = not cuts(np.arange(len(used), dtype=np.float64), CHANGE_LEVEL)
    changes = _changes(means, names)
    begins = changes.filter(pl.col("by") == STEP)["run"].to_list()
    frame = _runs(used, means, begins)
    places = _places(means, names, changes)
    return History(
        explanation=_explained(means, _called(frame), begins, changes, few=few),
        runs=frame,
        changes=changes,
        places=places,
        left_out=(*unreadable, *left_out),
        means=means,
        few=few,
    )


def _comparable(runs: Sequence[RunSummary]) -> tuple[list[RunSummary], list[LeftOut]]:
    """The runs that can be compared with the newest one, each recording once; and the others."""
    newest = runs[-1]
    used: list[RunSummary] = []
    left_out = []
    seen: dict[tuple[object, ...], str] = {}
    for run in reversed(runs):
        reasons = refusals([run], [newest]) if run is not newest else ()
        other = seen.setdefault(run.conditions.identity, run.name)
        if reasons:
            left_out.append(LeftOut(run.name, reasons[0].code, reasons[0].text))
        elif other != run.name:
            left_out.append(LeftOut(run.name, "duplicate", f"{run.name} is the same recording as {other}"))
        else:
            used.append(run)
    return used[::-1], left_out[::-1]


def _examined(means: RunMeans) -> list[int]:
    """The rows whose series are examined: the step and its parts, then the places that take longest."""
    step = means.mean[means.keys.index((STEP, ALL))].max()
    most = means.mean.max(axis=1)
    whole = [means.keys.index(key) for key in WHOLE if key in means.keys]
    others = [
        row
        for row in np.argsort(-most, kind="stable").tolist()
        if row not in whole and most[row] >= HISTORY_ROW_SHARE * step and means.keys[row][1] != UNATTRIBUTED
    ]
    return [*whole, *others[:MAX_PLACES]]


def _changes(means: RunMeans, names: Sequence[str]) -> pl.DataFrame:
    """Every change of every row that is examined, as `History.changes`."""
    rows = _examined(means)
    step_row = means.keys.index((STEP, ALL))
    level = dict.fromkeys(rows, CHANGE_LEVEL / max(1, len(rows) - 1)) | {step_row: CHANGE_LEVEL}
    own = {row: cuts(means.mean[row], level[row]) for row in rows}
    own = _with_the_step(means, rows, own, own[step_row])
    dated = _dated([change for row in rows for change in _compared(means, row, step_row, own[row])])
    begins = {row: sorted({dated.get((row, cut), cut) for cut in own[row]}) for row in rows}
    changes = [change for row in rows for change in _compared(means, row, step_row, begins[row])]
    lines = []
    for change in changes:
        by, name = means.keys[change.row]
        since = names[change.cut]
        share = change.difference / change.before if change.before > 0 else None
        lines.append(
            (
                by,
                name,
                change.cut + 1,
                since,
                change.before,
                change.after,
                change.low,
                change.high,
                share,
                change.verdict,
            )
        )
    frame = pl.DataFrame(lines, schema=CHANGES, orient="row")
    of_step = (pl.col("by") == STEP) & (pl.col("name") == ALL)
    return frame.sort(~of_step, -(pl.col("after_ns") - pl.col("before_ns")).abs(), "by", "name", "run")


def _with_the_step(
    means: RunMeans, rows: Sequence[int], begins: Mapping[int, list[int]], of_step: Sequence[int]
) -> dict[int, list[int]]:
    """The runs at which levels of rows begin, with those of the step where `thence diff` finds a row different.

    The level of such a row begins where it fits best, up to `ONE_CHANGE_RUNS` runs from that of the step.
    """
    cuts_of_rows = {row: list(begins[row]) for row in rows}
    edges = [0, *of_step, len(means.steps)]
    for first, cut, end in zip(edges, of_step, edges[2:], strict=False):
        told = estimates(means, range(first, cut), range(cut, end))
        for row, differs in zip(rows, discoveries(told.p[[*rows]], CHANGE_LEVEL), strict=True):
            near = any(abs(own - cut) <= ONE_CHANGE_RUNS for own in cuts_of_rows[row])
            if differs and not near:
                cuts_of_rows[row].append(first + best_near(means.mean[row, first:end], cut - first, ONE_CHANGE_RUNS))
    return {row: sorted(cuts_of) for row, cuts_of in cuts_of_rows.items()}


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of a row between two levels, of which the second begins at the run ``cut`` (from 0); times in ns."""

    row: int
    cut: int
    before: float
    after: float
    low: float
    high: float

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        return "slower" if self.after > self.before else "faster"

    @property
    def clarity(self) -> float:
        """How many times its half interval the difference is."""
        half = (self.high - self.low) / 2
        return abs(self.difference) / half if half > 0 else float("inf")


def _dated(changes: Sequence[_Change]) -> dict[tuple[int, int], int]:
    """Row and cut of each change, to the run that dates it: that of the clearest change nearby of the same verdict.

    A place changes by a larger share than the step that it is part of, so its change can be dated when that of the
    step is within the noise of the runs beside it.
    """
    anchors: list[_Change] = []
    dated = {}
    for change in sorted(changes, key=lambda candidate: (-candidate.clarity, candidate.cut, candidate.row)):
        near = [a for a in anchors if abs(a.cut - change.cut) <= ONE_CHANGE_RUNS and a.verdict == change.verdict]
        if not near:
            anchors.append(change)
        dated[change.row, change.cut] = (near or [change])[0].cut
    return dated


def _compared(means: RunMeans, row: int, step_row: int, begins: Sequence[int]) -> list[_Change]:
    """The changes of a row at the runs at which its levels begin, without those that may be noise, or are small."""
    row_means = replace(means, **{name: getattr(means, name)[[row]] for name in ("mean", "least", "error", "freedom")})
    edges = [0, *begins, len(means.steps)]
    changes = []
    for first, cut, end in zip(edges, begins, edges[2:], strict=False):
        told = estimates(row_means, range(first, cut), range(cut, end))
        values = (float(column[0]) for column in (told.before, told.after, told.low, told.high))
        change = _Change(row, cut, *values)
        step_ns = float(means.mean[step_row, cut:end].mean())
        least = max(SAME_SHARE * change.before, NEGLIGIBLE_STEP_SHARE * step_ns)
        certain = np.isfinite(change.low) and not change.low <= 0 <= change.high
        if certain and abs(change.difference) > least:
            changes.append(change)
    return changes


def _runs(runs: Sequence[RunSummary], means: RunMeans, begins: Sequence[int]) -> pl.DataFrame:
    """The runs, as `History.runs`; ``begins`` are the numbers of the runs at which a level of the step begins."""
    number = np.arange(1, len(runs) + 1)
    whole = {f"{by}_ns": means.mean[means.keys.index((by, ALL))] for by in (STEP, BUSY, IDLE)}
    columns = {
        "run": number,
        "name": [run.name for run in runs],
        "started_ns": [run.started_ns for run in runs],
        "started_from": [run.started_from for run in runs],
        "steps": means.steps,
        **whole,
        "level": 1 + np.searchsorted(np.sort(np.array(begins, np.int64)), number, side="right"),
    }
    return pl.DataFrame(columns, schema=RUNS)


def _places(means: RunMeans, names: Sequence[str], changes: pl.DataFrame) -> pl.DataFrame:
    """The rows that were examined, as `History.places`."""
    rows = _examined(means)
    of_row: dict[tuple[str, str], list[int]] = {}
    for by, name, run in changes.select("by", "name", "run").iter_rows():
        of_row.setdefault((by, name), []).append(run)
    short = short_names(sorted({name for by, name in means.keys if by == "kernel"}))
    lines = []
    for row in rows:
        by, name = means.keys[row]
        series = means.mean[row]
        begins = sorted(of_row.get((by, name), []))
        first = float(series[: begins[0] - 1 if begins else None].mean())
        newest = float(series[begins[-1] - 1 if begins else 0 :].mean())
        before = float(series[begins[-2] - 1 if len(begins) > 1 else 0 : begins[-1] - 1].mean()) if begins else newest
        verdict = ("slower" if newest > before else "faster") if begins else None
        share = (newest - first) / first if begins and first > 0 else None
        shown = clip(short.get(name, name) if by == "kernel" else name, _LONGEST)
        since = (begins[-1], names[begins[-1] - 1]) if begins else (None, None)
        lines.append((by, name, shown, first, newest, share, verdict, *since, series.tolist()))
    frame = pl.DataFrame(lines, schema=PLACES, orient="row")
    order = {f"{by} {name}": place for place, (by, name) in enumerate(WHOLE)}
    whole = pl.format("{} {}", "by", "name").replace_strict(order, default=len(WHOLE), return_dtype=pl.Int32)
    changed = (pl.col("newest_ns") - pl.col("first_ns")).abs()
    return frame.sort(
        whole, pl.col("verdict").is_null(), -pl.when(pl.col("verdict").is_not_null()).then(changed).otherwise(0),
        -pl.col("newest_ns"), "by", "name", maintain_order=True,
    )  # fmt: skip


def _called(runs: pl.DataFrame) -> list[str]:
    """What sentences call each run."""
    rows = zip(runs["run"], runs["name"], started_text(runs), strict=True)
    return [f"run {run} ({name}, {started} UTC)" for run, name, started in rows]


def _explained(
    means: RunMeans, names: Sequence[str], begins: Sequence[int], changes: pl.DataFrame, *, few: bool
) -> tuple[str, ...]:
    """The first sentences; ``names`` are as `_called` returns them."""
    step = means.mean[means.keys.index((STEP, ALL))]
    if few:
        span = f"{format_ns(step.min())} to {format_ns(step.max())}"
        told_apart = f"{several(len(names), 'run')}, which are too few to tell a change from noise"
        return (f"{told_apart}: a step takes {span}; thence diff compares two sides of runs",)
    if begins:
        edges = [1, *sorted(begins), len(names) + 1]
        told = [_of_step(means, names, *edges[number - 1 : number + 2]) for number in range(len(edges) - 2, 0, -1)]
        (head, *more), *earlier = told
        return (head, *more, *(f"before that, {sentences[0]}" for sentences in earlier))
    steady = f"no change of the step in {len(names)} runs: {format_ns(step.mean())} in the mean, "
    steady += f"{format_ns(step.min())} to {format_ns(step.max())}"
    places = changes.filter(~pl.struct("by", "name").is_in([{"by": by, "name": name} for by, name in WHOLE]))
    if places.is_empty():
        return (steady,)
    row = places.row(0, named=True)
    change = "" if row["change_share"] is None else f" ({signed_share(row['change_share'])})"
    name = clip(row["name"], _LONGEST)
    times = f"{format_ns(row['before_ns'])} -> {format_ns(row['after_ns'])}{change}"
    return (f"{steady}; but {row['by']} {name} is {row['verdict']} since {names[row['run'] - 1]}: {times}",)


def _of_step(means: RunMeans, names: Sequence[str], before: int, cut: int, after: int) -> tuple[str, ...]:
    """Sentences on a change of the step: runs from ``before`` to ``cut``, and from there to ``after`` (from 1)."""
    sides = range(before - 1, cut - 1), range(cut - 1, after - 1)
    estimated = estimates(means, *sides)
    rows, _ = judged_rows(means, estimated, means.keys.index((STEP, ALL)), sides, ())
    is_step = (pl.col("by") == STEP) & (pl.col("name") == ALL)
    total = rows.filter(is_step).row(0, named=True)
    shares = {f"{end}_share": total[f"{end}_ns"] / total["before_ns"] for end in ("low", "high")}
    known = None if estimated.between else ONE_RUN_STEP_SHARE
    verdict = "slower" if total["difference_ns"] > 0 else "faster"
    judged = total | shares | {"verdict": verdict}
    head, *more = explain(judged, rows.filter(~is_step), (), (_NO_KERNELS, _NO_KERNELS), known)
    return f"{verdict} since {names[cut - 1]}: {head}", *more
