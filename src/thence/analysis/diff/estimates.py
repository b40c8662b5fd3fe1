"""Statistics of a comparison: a model with two levels, steps within runs and runs on a side.

The time of a row in step s of run r of a side is modelled as

    side mean + deviation of the run + deviation of the step

The sample consists of runs: the deviation of a run counts once, no matter how many steps the run has. The mean of a
run is the plain mean over its steps. With three or more runs on the two sides together, the noise is the variance of
the means of the runs:

    if each side has three or more runs, Welch's test; its degrees of freedom after Satterthwaite
    else one pooled variance for both sides, because one or two runs are too few for a variance of their own

In both cases the variance is at least the one that independent steps would cause, which guards against runs that
agree by chance. With one run a side, the differences between runs are unknown, and the noise is that of the steps.
Steps depend on their neighbours: the mean of n steps with lag-one correlation r varies like the mean of
n (1 - r) / (1 + r) independent steps. The estimate of r from few steps is uncertain, and if it is too small, noise
looks like a difference. So it is corrected for its bias of about -(1 + 4 r) / n (Marriott and Pope, 1954) and
increased by one standard error.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.sample import UNATTRIBUTED
from thence.analysis.grouping.layers import prefixes
from thence.analysis.student_t import quantile, two_sided
from thence.model.layers import folded_names
from thence.model.places import LAYERED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.diff.sample import Sample
    from thence.model.arrays import Float64, Mask


PARTS = "/..."
"""Suffix of the name of a row that sums a path and all paths that begin with it."""

_DEEPEST = 8
"""Number of levels of a path, from the outermost, for which there are rows of whole paths."""


def whole_paths(rows: pl.DataFrame) -> pl.DataFrame:
    """For each path with which several paths of any run begin, the sum of these paths for each run and step.

    Args:
        rows: by, name, run, step, ns and count, of all runs.

    Returns:
        rows with the same columns, named by the path followed by `PARTS`.
    """
    pairs = []
    paths = rows.filter(pl.col("by").is_in(LAYERED), pl.col("name") != UNATTRIBUTED)
    for by, names in paths.select("by", "name").unique().group_by("by"):
        around: dict[str, list[str]] = {}
        for path in names["name"]:
            for head in islice(prefixes(path, by[0]), _DEEPEST):
                around.setdefault(head, []).append(path)
        pairs += [(by[0], path, f"{head}{PARTS}") for head, inner in around.items() if len(inner) > 1 for path in inner]
    schema = {"by": pl.String, "name": pl.String, "whole": pl.String}
    joined = paths.join(pl.DataFrame(pairs, schema=schema, orient="row"), on=["by", "name"])
    return joined.group_by("by", "run", "step", name="whole").agg(pl.col("ns", "count").sum()).select(rows.columns)


def folds(rows: pl.DataFrame) -> dict[tuple[str, str], str]:
    """By and name of the rows that are equal layers of a model with others, to the name that they share.

    Args:
        rows: by and name of the rows of both sides.
    """
    folded: dict[tuple[str, str], str] = {}
    paths = rows.filter(pl.col("by").is_in(LAYERED), pl.col("name") != UNATTRIBUTED)
    for by, names in paths.select("by", "name").unique().sort("name").group_by("by"):
        layers = folded_names(names["name"]).filter(pl.len().over("folded") > 1)
        folded |= {(str(by[0]), n): to for n, to in layers.select("name", "folded").iter_rows()}
    return folded


def tree(rows: pl.DataFrame, depth: int) -> pl.DataFrame:
    """The rows of paths as a tree: each path before those inside of it, siblings by size of the difference.

    The row of a path is that with everything inside of it, if there is one. Paths that no row stands for are left
    out, and what is inside of them belongs to the path around them.

    Args:
        rows: rows of a comparison by one kind of place.
        depth: levels that are kept.

    Returns:
        the rows with ``level`` (1 for the outermost) and ``part`` (what a path adds to the path around it).
    """
    numbered = rows.with_row_index("number")
    by_path: dict[str, int] = {}
    for number, name in numbered.select("number", "name").iter_rows():
        path = name.removesuffix(PARTS)
        if path not in by_path or name.endswith(PARTS):
            by_path[path] = number
    inside: dict[str, list[str]] = {}
    kinds = rows["by"].to_list()
    for path, number in by_path.items():
        outer = [head for head in prefixes(path, kinds[number]) if head in by_path]
        inside.setdefault(outer[-2] if len(outer) > 1 else "", []).append(path)
    size = rows["difference_ns"].abs().to_list()
    order: list[tuple[int, int, str]] = []
    waiting = [("", "", 0)]
    while waiting:
        path, around, level = waiting.pop()
        if level:
            order.append((by_path[path], level, path.removeprefix(around).lstrip("/.")))
        if level < depth:
            below = sorted(inside.get(path, []), key=lambda name: (size[by_path[name]], name))
            waiting += [(name, path, level + 1) for name in below]
    kept = pl.DataFrame(order, {"number": pl.UInt32, "level": pl.Int64, "part": pl.String}, orient="row")
    return kept.join(numbered, on="number", how="left", maintain_order="left").drop("number")


MAX_RUNS = 1000
"""The most runs a side that `more_runs` considers."""

_MIN_OWN_STEPS = 3
"""If each side has at least this many runs, each side has its own variance."""
_MAX_CORRELATION = 0.9
_POWER_BOTH_TAILS = 0.4
"""Probability of both tails whose t gives a power of 80 %: one tail of 20 %."""


@dataclass(frozen=True)
class RunMeans:
    """The rows of all runs. Arrays have shape (rows, runs) unless another is given.

    Attributes:
        keys: by and name of each row, shape (rows,).
        mean: ns per step.
        least: variance of the mean, estimated from the steps of the run as if they were independent; nan for a single
            step.
        error: variance of the mean, taking into account that steps depend on their neighbours; nan for a single step.
        freedom: degrees of freedom of ``error``.
        count: activities per step.
        share: share of the steps in which the row has any time.
        steps: number of counted steps, shape (runs,).
    """

    keys: list[tuple[str, str]]
    mean: Float64
    least: Float64
    error: Float64
    freedom: Float64
    count: Float64
    share: Float64
    steps: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Estimates:
    """Differences after - before; arrays have shape (rows,).

    Attributes:
        before, after: means of the sides, ns per step.
        low, high: the 95 % interval of the difference, for each row by itself; infinite where the noise is unknown.
        p: probability of a difference at least as large if there is none; 1 where the noise is unknown.
        deviation: standard deviation of the mean of one run, ns: between runs, or estimated from steps within runs.
        freedom: degrees of freedom; 1 where the noise is unknown.
        between: whether the noise is that between runs.
    """

    before: Float64
    after: Float64
    low: Float64
    high: Float64
    p: Float64
    deviation: Float64
    freedom: Float64
    between: bool


def run_means(samples: Sequence[Sample], renamed: Mapping[tuple[str, str], str]) -> RunMeans:
    """Means and errors of every row in every run.

    Args:
        renamed: by and name of rows that are shown under another name, to that name.
    """
    rows = pl.concat([s.rows.with_columns(run=pl.lit(n, pl.Int32)) for n, s in enumerate(samples)])
    counted = np.array([sample.counted for sample in samples], np.int64)
    if renamed:
        names = pl.DataFrame(
            [(by, name, new) for (by, name), new in renamed.items()],
            schema={"by": pl.String, "name": pl.String, "new": pl.String},
            orient="row",
        )
        rows = rows.join(names, on=["by", "name"], how="left", maintain_order="left")
        rows = rows.with_columns(name=pl.coalesce("new", "name")).drop("new")
    rows = pl.concat([rows, whole_paths(rows)])
    by_step = rows.group_by("by", "name", "run", "step").agg(pl.col("ns", "count").sum())
    ordered = by_step.sort("by", "name", "run", "step")
    same = pl.all_horizontal(
        *(pl.col(c) == pl.col(c).shift(-1) for c in ("by", "name", "run")),
        pl.col("step") + 1 == pl.col("step").shift(-1),
    )
    sums = ordered.with_columns(
        lagged=pl.when(same).then(pl.col("ns") * pl.col("ns").shift(-1)).otherwise(0.0),
        last=pl.lit(pl.Series(counted - 1)).gather(pl.col("run")),
    )
    sums = sums.group_by("by", "name", "run", maintain_order=True).agg(
        total=pl.col("ns").sum(),
        squares=pl.col("ns").pow(2).sum(),
        lagged=pl.col("lagged").sum(),
        ends=pl.col("ns").filter((pl.col("step") == 0) | (pl.col("step") == pl.col("last"))).sum(),
        count=pl.col("count").sum(),
        present=(pl.col("ns") > 0).sum(),
    )
    return _as_arrays(sums, counted)


def _as_arrays(sums: pl.DataFrame, steps: npt.NDArray[np.int64]) -> RunMeans:
    keys = sums.select("by", "name").unique(maintain_order=True).with_row_index("row")
    row = sums.join(keys, on=["by", "name"], maintain_order="left")["row"].to_numpy()
    run = sums["run"].to_numpy()

    def matrix(column: str) -> Float64:
        values = np.zeros((keys.height, len(steps)))
        values[row, run] = sums[column].to_numpy()
        return values

    n = np.maximum(steps, 1).astype(np.float64)
    mean = matrix("total") / n
    several = n > 1
    variance = np.maximum(matrix("squares") - n * mean**2, 0.0) / np.maximum(n - 1, 1)
    # The difference of large sums: a result below their rounding error is 0.
    variance[variance < 1e-12 * mean**2] = 0.0
    crossed = mean * (2 * matrix("total") - matrix("ends"))  # the first and the last step are in one pair each
    covariance = (matrix("lagged") - crossed) / np.maximum(n - 1, 1) + mean**2
    correlation = np.divide(covariance, variance, out=np.zeros_like(mean), where=variance > 0)
    known = np.clip(correlation, 0, 1)
    correlation = correlation + (1 + 4 * known) / n + np.sqrt((1 - known**2) / n)
    correlation = np.clip(correlation, 0, _MAX_CORRELATION)
    effective = np.maximum(n * (1 - correlation) / (1 + correlation), 2.0)
    return RunMeans(
        keys.select("by", "name").rows(),
        mean,
        np.where(several, variance / n, np.nan),
        np.where(several, variance / effective, np.nan),
        np.where(several, np.minimum(effective, n) - 1, 0.0),
        matrix("count") / n,
        matrix("present") / n,
        steps,
    )


def estimates(means: RunMeans, before: Sequence[int], after: Sequence[int], bound: float = 0.0) -> Estimates:
    """The difference of every row, with its interval.

    Args:
        means: means of the runs of both sides.
        before: numbers of the runs before.
        after: numbers of the runs after.
        bound: allowed relative increase: the difference is after - (1 + bound) before, so that its interval
            shows whether the relative change exceeds the bound.
    """
    sides = [means.mean[:, [*runs]] for runs in (before, after)]
    scales = (1.0 + bound, 1.0)
    centres = [values.mean(axis=1) for values in sides]
    between = len(before) + len(after) >= 3
    if between:
        errors = [means.least[:, [*runs]] for runs in (before, after)]
        variance, freedom, deviation = _between(sides, errors, scales)
    else:
        errors = [means.error[:, [*runs]] for runs in (before, after)]
        parts = [np.square(s) * e[:, 0] for s, e in zip(scales, errors, strict=True)]
        degrees = [means.freedom[:, runs[0]] for runs in (before, after)]
        variance, freedom = _satterthwaite(parts, degrees)
        deviation = np.sqrt(variance / 2)
    difference = centres[1] - scales[0] * centres[0]
    known = np.isfinite(variance) & (freedom > 0)
    error = np.sqrt(np.where(known, variance, 0.0))
    freedom = np.where(known, freedom, 1.0)
    half = np.where(known, quantile(0.05, freedom) * error, np.inf)
    t = np.divide(difference, error, out=np.where(difference == 0, 0.0, np.inf), where=error > 0)
    p = np.where(known, two_sided(t, freedom), 1.0)
    low, high = difference - half, difference + half
    return Estimates(centres[0], centres[1], low, high, p, deviation, freedom, between=between)


def _between(
    sides: Sequence[Float64], errors: Sequence[Float64], scales: Sequence[float]
) -> tuple[Float64, Float64, Float64]:
    """The variance of the difference, its degrees of freedom, and the standard deviation of one run."""
    counts = [values.shape[1] for values in sides]
    within = [np.nan_to_num(np.nanmean(_filled(e), axis=1)) for e in errors]
    squares = [np.square(v - v.mean(axis=1, keepdims=True)).sum(axis=1) for v in sides]
    if min(counts) >= _MIN_OWN_STEPS:
        own = [np.maximum(s / (n - 1), w) for s, n, w in zip(squares, counts, within, strict=True)]
    else:
        pooled = sum(squares) / (sum(counts) - 2)
        own = [np.maximum(pooled, np.maximum(*within))] * 2
    parts = [np.square(k) * v / n for k, v, n in zip(scales, own, counts, strict=True)]
    deviation = np.sqrt((own[0] + own[1]) / 2)
    if min(counts) >= _MIN_OWN_STEPS:
        degrees = [np.full(len(v), n - 1.0) for v, n in zip(own, counts, strict=True)]
        return (*_satterthwaite(parts, degrees), deviation)
    return parts[0] + parts[1], np.full(len(own[0]), sum(counts) - 2.0), deviation


def _filled(errors: Float64) -> Float64:
    """The errors, with 0 in rows that are all nan, so that `np.nanmean` does not warn."""
    return np.where(np.isnan(errors).all(axis=1, keepdims=True), 0.0, errors)


def _satterthwaite(parts: Sequence[Float64], degrees: Sequence[Float64]) -> tuple[Float64, Float64]:
    """The sum of two variances, and its degrees of freedom."""
    variance = parts[0] + parts[1]
    # No degrees of freedom: the last line makes the result 0.
    spread = sum(np.square(v) / np.maximum(n, 1e-9) for v, n in zip(parts, degrees, strict=True))
    least = np.minimum(*degrees)
    freedom = np.divide(np.square(variance), spread, out=least.copy(), where=spread > 0)
    return variance, np.where(np.minimum(*degrees) > 0, freedom, 0.0)


def discoveries(p: Float64, level: float = 0.05) -> Mask:
    """The rows that differ at a false discovery rate, after Benjamini and Hochberg (1995).

    If no row differs in truth, the probability that any row is reported as different is at most the level.
    """
    order = np.argsort(p, kind="stable")
    allowed = level * np.arange(1, len(p) + 1) / max(1, len(p))
    passing = np.flatnonzero(p[order] <= allowed)
    discovered = np.zeros(len(p), np.bool_)
    if len(passing):
        discovered[order[: passing[-1] + 1]] = True
    return discovered


def more_runs(wanted: Float64, deviation: Float64, runs: int, level: float) -> npt.NDArray[np.int64]:
    """How many more runs a side are needed to detect a difference with a power of 80 %.

    Args:
        wanted: the difference, ns, above 0, shape (rows,).
        deviation: standard deviation of one run, ns.
        runs: number of runs of the smaller side.
        level: level at which a row counts as different, after the correction.

    Returns:
        shape (rows,), at least 1; `MAX_RUNS` where that many runs or more are needed.
    """
    sizes = np.unique(np.geomspace(2, MAX_RUNS, 200).astype(np.int64))  # steps of 3 %: no guess is better
    freedom = (2.0 * sizes - 2).astype(np.float64)
    rounded = 10 ** (np.floor(4 * np.log10(level)) / 4)  # few levels, so quantiles are cached
    critical = quantile(float(rounded), freedom) + quantile(_POWER_BOTH_TAILS, freedom)
    reach = critical * np.sqrt(2.0 / sizes)  # difference in deviations; decreases with size
    ratio = np.divide(wanted, deviation, out=np.full(len(wanted), np.inf), where=deviation > 0)
    place = len(sizes) - np.searchsorted(reach[::-1], ratio, side="right")
    needed = np.where(place < len(sizes), sizes[np.minimum(place, len(sizes) - 1)], MAX_RUNS)
    return np.where(needed >= MAX_RUNS, MAX_RUNS, np.maximum(needed - runs, 1))
