"""`compare`: every row of two sides with its interval and verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.diff.comparability import not_checked, refusals
from thence.analysis.diff.estimates import MAX_RUNS, discoveries, estimates, folds, more_runs, run_means, tree
from thence.analysis.diff.explanation import explain
from thence.analysis.diff.gate import NEW, judge
from thence.analysis.diff.hardware import hardware_change, hardware_text
from thence.analysis.diff.matching import kernels_of, matched_names, moved_time
from thence.analysis.diff.memory import memory_change, memory_text
from thence.analysis.diff.moved_streams import moved_work
from thence.analysis.diff.sample import ALL, BUSY, COMMUNICATION, EXPOSED, IDLE, STEP, WHOLE_TRACE
from thence.analysis.diff.work import work_change, work_text
from thence.analysis.steps.windows import RULES
from thence.errors import UsageError
from thence.model.answer import Answer, TableView
from thence.model.kernel_names import short_names
from thence.model.places import LAYERED
from thence.model.thresholds import (
    FALSE_DISCOVERY_RATE,
    NEGLIGIBLE_STEP_SHARE,
    ONE_RUN_IDLE_SHARE,
    ONE_RUN_STEP_SHARE,
    ONE_RUN_WORK_SHARE,
    SAME_SHARE,
)
from thence.model.totals import close, must
from thence.units import format_count, format_share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.diff.comparability import NotChecked, Refusal
    from thence.analysis.diff.estimates import Estimates, RunMeans
    from thence.analysis.diff.gate import Bound, Gate
    from thence.analysis.diff.matching import Match
    from thence.analysis.diff.moved_streams import MovedWork
    from thence.analysis.diff.sample import Sample
    from thence.model.arrays import Mask


VERDICTS = ("slower", "faster", "new", "gone", "unknown", "same")
_WHOLE = (STEP, BUSY, IDLE, COMMUNICATION)
_ALWAYS = ((STEP, ALL), (BUSY, ALL), (IDLE, ALL), (COMMUNICATION, EXPOSED))
"""Rows that are never left out, even if they are small."""

ROWS = {
    "by": pl.String,
    "name": pl.String,
    "short_name": pl.String,
    "before_ns": pl.Float64,
    "after_ns": pl.Float64,
    "difference_ns": pl.Float64,
    "low_ns": pl.Float64,
    "high_ns": pl.Float64,
    "difference_share": pl.Float64,
    "verdict": pl.String,
    "more_runs": pl.Int64,
    "p": pl.Float64,
    "before_count": pl.Float64,
    "after_count": pl.Float64,
    "matched": pl.String,
}
"""Columns of `Diff.rows`."""


@dataclass(frozen=True)
class Row:
    """The row of the whole step, with the columns of `Diff.rows`."""

    before_ns: float
    after_ns: float
    low_ns: float | None
    high_ns: float | None
    verdict: str
    more_runs: int | None

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it; shares are of before."""

        def share(ns: float | None) -> float | None:
            return ns / self.before_ns if ns is not None and self.before_ns else None

        return {
            "before_ns": self.before_ns,
            "after_ns": self.after_ns,
            "difference_ns": self.difference_ns,
            "low_ns": self.low_ns,
            "high_ns": self.high_ns,
            "difference_share": share(self.difference_ns),
            "low_share": share(self.low_ns),
            "high_share": share(self.high_ns),
            "verdict": self.verdict,
            "more_runs": self.more_runs,
        }


@dataclass(frozen=True)
class Diff(Answer):
    """What changed between two sides. Times are ns per step and device, means over the runs of a side.

    Attributes:
        before, after: the runs of each side.
        refusals: why the sides should not be compared; see `refusals`.
        not_checked: conditions that could not be compared, because not every input records them.
        total: the length of a step.
        rows: rows that take at least a thousandth of a step on one side, with the columns of `ROWS`. by:
            busy, idle, communication or a kind of place. low_ns and high_ns: 95 % interval of the difference,
            null where the noise is unknown. more_runs: how many more runs a side are needed for a verdict, null
            where there is one, or the noise is unknown. p: before correction, null for new and gone. matched: the
            rule by which rows of different names were matched (`Match`). Rows of the whole step and its parts come
            first, then rows whose difference is more than noise, then the others; each by size of the difference.
        moved: as `moved_time` returns it.
        explanation: sentences; the first names the cause.
        between: whether the noise is that between runs, rather than within single runs.
        left_out: number of rows that are not in ``rows`` because they are too small.
        means: means of all rows in all runs, those of before first; for gates.
        folded: rows by module and label with equal layers of a model as one row, each with an interval and verdict of
            its own; the columns of `ROWS`. None if no layers are equal.
        moved_streams: work that runs on another stream after than before, and whether that paid; None if there is none.
        work: how much of the change is that of the work, and how much that of its use of the GPU, as
            `thence.analysis.diff.work.work_change` returns it; None if the work of one side is not known.
        memory: how the peak of memory changed, as `thence.analysis.diff.memory.memory_change` returns it; None if it
            is not known of one side.
        matches: the rows whose names differ between the sides.
        hardware: how the rates of hardware counters changed, as `thence.analysis.diff.hardware.hardware_change` returns
            it; None if one side has none.
    """

    before: tuple[Sample, ...]
    after: tuple[Sample, ...]
    refusals: tuple[Refusal, ...]
    not_checked: tuple[NotChecked, ...]
    total: Row
    rows: pl.DataFrame
    moved: tuple[dict[str, Any], ...]
    explanation: tuple[str, ...]
    between: bool
    left_out: int
    means: RunMeans
    folded: pl.DataFrame | None = None
    moved_streams: MovedWork | None = None
    work: pl.DataFrame | None = None
    memory: pl.DataFrame | None = None
    hardware: pl.DataFrame | None = None
    matches: tuple[Match, ...] = ()

    def judged(self, bounds: Sequence[Bound]) -> tuple[Gate, ...]:
        """Whether each bound holds. A kernel that takes the place of another one is new: `Match.replaces`.

        Raises:
            MissingData: neither side has the row of a bound.
        """
        of_new = self.means
        if any(bound.by == NEW for bound in bounds):
            same = [match for match in self.matches if not match.replaces]
            of_new = run_means([*self.before, *self.after], _renamed(same))
        return tuple(
            gate for bound in bounds for gate in judge(of_new if bound.by == NEW else self.means, *self.sides, [bound])
        )

    @property
    def sides(self) -> tuple[range, range]:
        """The numbers of the runs of each side in `means`."""
        return range(len(self.before)), range(len(self.before), len(self.before) + len(self.after))

    @property
    def shown_rows(self) -> pl.DataFrame:
        """The rows for tables: those by module and label folded, if there are equal layers."""
        if self.folded is None:
            return self.rows
        others = self.rows.filter(~pl.col("by").is_in(LAYERED))
        return _ordered(pl.concat([others, self.folded]))

    def tree(self, depth: int, *, each: bool = False) -> pl.DataFrame:
        """The rows by module and label as a tree, each with everything inside of it; see `estimates.tree`.

        Args:
            depth: levels of the tree.
            each: whether every layer of a model is a node of its own.
        """
        rows = self.rows if each else self.shown_rows
        kinds = [by for by in LAYERED if by in rows["by"]]
        trees = [tree(rows.filter(pl.col("by") == by), depth) for by in kinds]
        whole = rows.filter(pl.col("by").is_in([*_WHOLE])).with_columns(level=1, part="short_name")
        return pl.concat([whole, *trees], how="diagonal_relaxed")

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.explanation

    def views(self) -> tuple[TableView, ...]:
        """The rows."""
        headings = {
            "short_name": "name", "by": "by", "before_ns": "before", "after_ns": "after",
            "difference_ns": "difference", "low_ns": "at least", "high_ns": "at most", "verdict": "verdict",
        }  # fmt: skip
        return (TableView(self.shown_rows, headings, full="name"),)

    def remarks(self) -> Iterator[str]:
        """Why the sides are not comparable, or what of that was not checked, and how the figures were made."""
        yield from (f"not comparable ({refusal.code}): {refusal.text}" for refusal in self.refusals)
        yield from (f"not checked ({entry.code}): {entry.text}" for entry in self.not_checked)
        yield from self.notes

    def to_frame(self) -> pl.DataFrame:
        """All rows, of every layer."""
        return self.rows

    def document(self) -> dict[str, Any]:
        """`to_json`; the notes are in it."""
        return self.to_json()

    def self_check(self) -> None:
        """See `Answer`."""
        inputs = [name for side in (self.before, self.after) for run in side for name in run.inputs]
        for column, step_ns in (("before_ns", self.total.before_ns), ("after_ns", self.total.after_ns)):
            parts = self.rows.filter(pl.col("by").is_in([BUSY, IDLE]), pl.col("name") == ALL)[column]
            adds_up = len(parts) < 2 or close(float(parts.sum()), step_ns)
            must(inputs, adds_up, "busy and idle time of a step do not add up to it")

    def by(self, kinds: Sequence[str]) -> Diff:
        """The same comparison with only the rows of these kinds of place and those of the whole step and its parts."""
        wanted = pl.col("by").is_in([*_WHOLE, *kinds])
        folded = None if self.folded is None else self.folded.filter(wanted)
        return replace(self, rows=self.rows.filter(wanted), folded=folded)

    @property
    def notes(self) -> tuple[str, ...]:
        """How the figures were computed, one sentence each."""
        return (*self._noise(), *self._versions(), *self._steps(), *self._left_out())

    def _noise(self) -> Iterator[str]:
        tested = self.rows["p"].count()
        if self.between:
            runs = f"{len(self.before)} runs before and {len(self.after)} after"
            yield (
                f"noise is how much the means of {runs} vary; verdicts hold at a false discovery rate of 5 % among "
                f"{format_count(tested)} rows (Benjamini-Hochberg), intervals at 95 % for each row by itself"
            )
        else:
            yield (
                "intervals are those of the noise within each run; several runs per side (--before, --after) measure "
                "how much runs differ"
            )

    def _versions(self) -> Iterator[str]:
        sides = [_versions(samples) for samples in (self.before, self.after)]
        differing = [
            f"{name} {sides[0][name]} before and {sides[1][name]} after"
            for name in sorted(sides[0].keys() & sides[1].keys())
            if sides[0][name] != sides[1][name]
        ]
        if differing:
            yield f"versions differ: {'; '.join(differing)}"

    def _steps(self) -> Iterator[str]:
        for side, samples in (("before", self.before), ("after", self.after)):
            codes = pl.concat([sample.steps["left_out"] for sample in samples])
            counted = codes.null_count()
            parts = [
                f"{count} {RULES[code]}"
                for code, count in codes.drop_nulls().value_counts(sort=True, name="n").iter_rows()
            ]
            left = f"; left out: {', '.join(parts)}" if parts else ""
            if samples[0].what == WHOLE_TRACE:
                yield f"{side}: there are no steps, so each run counts as one step"
            else:
                of_all = f"{format_count(counted)} of {format_count(len(codes))} {samples[0].what}"
                yield f"{side}: {of_all} count{left}"
            outside = max(sample.outside_share for sample in samples)
            if outside > 0.01:
                yield f"{side}: {format_share(outside, 1)} of the device time belongs to no step and is in no row"

    def _left_out(self) -> Iterator[str]:
        for side, samples in (("before", self.before), ("after", self.after)):
            if any(sample.idle_is_total for sample in samples):
                yield (
                    f"{side}: idle time is not divided by cause, because that takes long for so many steps and host "
                    "ranges; --idle causes does it"
                )
        if self.left_out:
            yield (f"{format_count(self.left_out)} rows of less than a thousandth of a step on both sides are left out")

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        return {
            "comparable": not self.refusals,
            "refusals": [refusal.to_json() for refusal in self.refusals],
            "not_checked": [entry.to_json() for entry in self.not_checked],
            "runs": {
                side: [_run_json(sample) for sample in samples]
                for side, samples in (("before", self.before), ("after", self.after))
            },
            "noise": "between runs" if self.between else "within runs",
            "explanation": list(self.explanation),
            "total": self.total.to_json(),
            "rows": self.rows.to_dicts(),
            "folded": None if self.folded is None else self.folded.to_dicts(),
            "moved": list(self.moved),
            "moved_streams": None if self.moved_streams is None else self.moved_streams.to_json(),
            "work": None if self.work is None else self.work.to_dicts(),
            "memory": None if self.memory is None else self.memory.to_dicts(),
            "hardware": None if self.hardware is None else self.hardware.to_dicts(),
            "notes": list(self.notes),
        }


def _versions(side: Sequence[Sample]) -> dict[str, str]:
    """The versions that the runs of a side record; different versions are joined by commas."""
    versions_of: dict[str, set[str]] = {}
    for sample in side:
        for name, version in sample.conditions.versions.items():
            versions_of.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(versions)) for name, versions in versions_of.items()}


def _run_json(sample: Sample) -> dict[str, Any]:
    left_out = sample.steps.drop_nulls("left_out")
    return {
        "inputs": list(sample.inputs),
        "steps_are": sample.what,
        "steps": sample.steps.height,
        "counted": sample.counted,
        "left_out": left_out.select("name", "total_ns", reason="left_out").to_dicts(),
    }


def compare(before: Sequence[Sample], after: Sequence[Sample]) -> Diff:
    """Compares two sides of runs.

    Args:
        before: one or more runs.
        after: one or more runs.

    Raises:
        UsageError: a side has no run, or its runs have no device work.
    """
    if not before or not after:
        raise UsageError("a comparison needs at least one run on each side")
    kernels = kernels_of(before), kernels_of(after)
    matches = matched_names(*kernels, (_sources(before), _sources(after)))
    renamed = _renamed(matches)
    means = run_means([*before, *after], renamed)
    ours, theirs = range(len(before)), range(len(before), len(before) + len(after))
    estimated = estimates(means, ours, theirs)
    step = means.keys.index((STEP, ALL))
    frame, left_out = judged_rows(means, estimated, step, (ours, theirs), matches)
    is_step = (pl.col("by") == STEP) & (pl.col("name") == ALL)
    whole = frame.filter(is_step).row(0, named=True)
    total = Row(*(whole[k] for k in ("before_ns", "after_ns", "low_ns", "high_ns", "verdict", "more_runs")))
    rows = frame.filter(~is_step)
    moved = moved_time(*kernels, max(total.before_ns, total.after_ns))
    known_share = None if estimated.between else ONE_RUN_STEP_SHARE
    streams = moved_work(before, after, renamed, total.to_json(), known_share)
    explained = explain(total.to_json(), rows, moved, kernels, known_share)
    work = work_change([run.work for run in before], [run.work for run in after])
    held = memory_change([run.memory for run in before], [run.memory for run in after])
    counted = hardware_change([run.hardware for run in before], [run.hardware for run in after])
    said = (None if streams is None else streams.text, work_text(work), hardware_text(counted), memory_text(held))
    told = [text for text in said if text is not None]
    return Diff(
        tuple(before),
        tuple(after),
        refusals(before, after),
        not_checked(before, after),
        total,
        rows,
        tuple(moved),
        (explained[0], *told, *explained[1:]),
        estimated.between,
        left_out,
        means,
        _folded([*before, *after], (ours, theirs)),
        streams,
        work,
        held,
        counted,
        tuple(matches),
    )


def _renamed(matches: Iterable[Match]) -> dict[tuple[str, str], str]:
    """Kind and names of rows that are shown under another name, to that name."""
    return {(match.by, name): match.name for match in matches for name in (*match.before, *match.after)}


def _folded(samples: Sequence[Sample], sides: tuple[range, range]) -> pl.DataFrame | None:
    """The rows by module and label with equal layers as one row, as `Diff.folded`."""
    wanted = pl.col("by").is_in([STEP, *LAYERED])
    some = [replace(sample, rows=sample.rows.filter(wanted)) for sample in samples]
    names = folds(pl.concat([sample.rows.select("by", "name") for sample in some]))
    if not names:
        return None
    means = run_means(some, names)
    estimated = estimates(means, *sides)
    frame, _ = judged_rows(means, estimated, means.keys.index((STEP, ALL)), sides, ())
    return frame.filter(pl.col("by").is_in(LAYERED))


def _sources(side: Sequence[Sample]) -> set[str]:
    return {name for s in side for name in s.rows.filter(pl.col("by") == "source")["name"].unique()}


def judged_rows(
    means: RunMeans, estimated: Estimates, step: int, sides: tuple[range, range], matches: Sequence[Match]
) -> tuple[pl.DataFrame, int]:
    """The rows of two sides with their verdicts, as `Diff.rows`, and the number of rows that were too small.

    Args:
        means: of the runs of both sides, and perhaps of others.
        estimated: estimates of both sides.
        step: number of the row of the whole step.
        sides: numbers of the runs of each side.
        matches: rows of different names that are one.
    """
    step_ns = max(estimated.before[step], estimated.after[step])
    least = NEGLIGIBLE_STEP_SHARE * step_ns
    parts = np.array([by in _WHOLE for by, _ in means.keys], np.bool_)
    whole = np.array([key in _ALWAYS for key in means.keys], np.bool_)
    kept = np.flatnonzero(whole | (np.maximum(estimated.before, estimated.after) >= least))
    new, gone = ((_new_or_gone(means, side, other) & ~parts)[kept] for side, other in ((sides[1], sides[0]), sides))
    margin = np.maximum(SAME_SHARE * estimated.before[kept], least)
    names = [means.keys[row] for row in kept]
    known = np.zeros(len(kept)) if estimated.between else _known_to_differ(estimated, kept, names)
    verdicts, needed = _verdicts(estimated, kept, (new, gone), margin, known, min(map(len, sides)))
    shown = dict(_short(names, matches))
    by_match = {(m.by, m.name): m.rule for m in matches}
    difference = (estimated.after - estimated.before)[kept]
    base = estimated.before[kept]
    frame = pl.DataFrame(
        {
            "by": [by for by, _ in names],
            "name": [name for _, name in names],
            "short_name": [shown[key] for key in names],
            "before_ns": base,
            "after_ns": estimated.after[kept],
            "difference_ns": difference,
            "low_ns": estimated.low[kept],
            "high_ns": estimated.high[kept],
            "difference_share": np.divide(difference, base, out=np.full(len(base), np.nan), where=base > 0),
            "verdict": verdicts,
            "more_runs": needed,
            "p": np.where(new | gone, np.nan, estimated.p[kept]),
            "before_count": means.count[kept][:, [*sides[0]]].mean(axis=1),
            "after_count": means.count[kept][:, [*sides[1]]].mean(axis=1),
            "matched": [by_match.get(key) for key in names],
        },
        schema=ROWS,
    )
    limits = pl.col("low_ns", "high_ns", "p", "difference_share")
    frame = frame.with_columns(pl.when(limits.is_finite()).then(limits))
    frame = frame.with_columns(pl.when(pl.col("more_runs") > 0).then("more_runs").alias("more_runs"))
    return _ordered(frame), len(means.keys) - len(kept)


def _new_or_gone(means: RunMeans, side: range, other_side: range) -> Mask:
    """Rows that every run of one side has in at least half of its steps, and no run of the other side has at all."""
    present = (means.share[:, [*side]] >= 0.5).all(axis=1)
    absent: Mask = present & (means.share[:, [*other_side]] == 0).all(axis=1)
    return absent


def _known_to_differ(
    estimated: Estimates, kept: npt.NDArray[np.int64], names: Sequence[tuple[str, str]]
) -> npt.NDArray[np.float64]:
    """By how much runs of the same program are known to differ in each row, ns."""
    shares = {STEP: ONE_RUN_STEP_SHARE, IDLE: ONE_RUN_IDLE_SHARE, COMMUNICATION: ONE_RUN_IDLE_SHARE}
    share = np.array([shares.get(by, ONE_RUN_WORK_SHARE) for by, _ in names])
    return share * np.maximum(estimated.before, estimated.after)[kept]


def _verdicts(
    estimated: Estimates,
    kept: npt.NDArray[np.int64],
    alone: tuple[Mask, Mask],
    margin: npt.NDArray[np.float64],
    known_ns: npt.NDArray[np.float64],
    runs: int,
) -> tuple[list[str], list[int]]:
    """The verdict of each row, and how many more runs a side it needs; 0 if it is certain or the noise is unknown.

    Args:
        estimated: estimates of all rows.
        kept: numbers of the rows to judge.
        alone: masks of the rows that are new, and of those that are gone.
        margin: ns within which a difference counts as none.
        known_ns: by how much runs of the same program are known to differ, if there is one run a side; else 0.
        runs: number of runs of the smaller side.
    """
    new, gone = alone
    tested = np.flatnonzero(~(new | gone))
    differs = np.zeros(len(kept), np.bool_)
    differs[tested] = discoveries(estimated.p[kept][tested], FALSE_DISCOVERY_RATE)
    difference = (estimated.after - estimated.before)[kept]
    inside = (estimated.low[kept] >= -margin) & (estimated.high[kept] <= margin)
    nothing = (estimated.before[kept] == 0) & (estimated.after[kept] == 0)
    small = ~nothing & (np.abs(difference) <= known_ns)
    code = np.select(
        [new, gone, small, differs & (difference > 0), differs, inside],
        [VERDICTS.index(name) for name in ("new", "gone", "unknown", "slower", "faster", "same")],
        VERDICTS.index("unknown"),
    )
    verdicts = [VERDICTS[number] for number in code]
    level = FALSE_DISCOVERY_RATE * (1 + int(differs.sum())) / max(1, len(tested))
    deviation = estimated.deviation[kept]
    known = np.isfinite(deviation)
    deviation = np.where(known, deviation, np.inf)
    needed = more_runs(np.maximum(np.abs(difference), margin), deviation, runs, min(level, FALSE_DISCOVERY_RATE))
    unknown = (code == VERDICTS.index("unknown")) & known
    if not estimated.between:
        needed = np.maximum(needed, 2)  # fewer than three runs a side hardly show how runs differ
    return verdicts, np.where(unknown, np.minimum(needed, MAX_RUNS), 0).tolist()


def _short(keys: Sequence[tuple[str, str]], matches: Sequence[Match]) -> Iterator[tuple[tuple[str, str], str]]:
    """The names of rows for tables; names of kernels are shortened."""
    pairs: Mapping[tuple[str, str], Match] = {(m.by, m.name): m for m in matches}
    kernels = {name for by, name in keys if by == "kernel" and (by, name) not in pairs}
    kernels |= {n for m in matches if m.by == "kernel" for n in (m.before[0], m.after[0])}
    short = short_names(sorted(kernels))
    for key in keys:
        match = pairs.get(key)
        if match is None:
            yield key, short.get(key[1], key[1]) if key[0] == "kernel" else key[1]
        else:
            sides = (
                short.get(names[0], names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for names in (match.before, match.after)
            )
            yield key, " -> ".join(sides)


def _ordered(frame: pl.DataFrame) -> pl.DataFrame:
    """Sorts rows: the whole step and its parts, then differences that are more than noise, each the largest first."""
    differs = pl.col("verdict").is_in(["slower", "faster", "new", "gone"])
    of_step = pl.col("by").is_in([*_WHOLE])
    return frame.sort(~of_step, ~differs, -pl.col("difference_ns").abs(), "by", "name", maintain_order=True)
