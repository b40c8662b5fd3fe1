"""`RunSummary`: what the history of a program keeps of one run: the mean time of every place, and its noise.

It is some kB for each run, whatever the size of the trace, so a history needs no trace twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.diff.estimates import RunMeans, folds, run_means
from thence.analysis.diff.sample import ALL, STEP
from thence.model.thresholds import NEGLIGIBLE_STEP_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.analysis.diff.sample import Conditions, Sample

FIGURES = ("mean", "least", "error", "freedom", "count", "share")
"""Columns of `RunSummary.rows` with the figures of `thence.analysis.diff.estimates.RunMeans`."""
ROWS = pl.Schema({"by": pl.String(), "name": pl.String(), **dict.fromkeys(FIGURES, pl.Float64())})
_KEPT_SHARE = NEGLIGIBLE_STEP_SHARE / 5
"""Rows of less than this share of a step are not kept. It is less than what is judged, so that no row is judged that
is kept of some runs only."""

_DIGITS = 9
"""Digits of the figures that are kept."""


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        name: what the user calls it: the path of its file or folder.
        started_ns: Unix time in ns.
        started_from: ``recording`` if the recording states when it began; ``files`` if that is the time at which its
            newest file was written.
        what: what its steps are; see `thence.analysis.diff.sample.RunSteps.what`.
        steps: number of steps that count.
        conditions: the conditions of the run.
        rows: by, name (equal layers of a model are one row) and `FIGURES`; a row for each place, and those of the
            whole step.
    """

    name: str
    started_ns: int
    started_from: str
    what: str
    steps: int
    conditions: Conditions
    rows: pl.DataFrame

    @property
    def inputs(self) -> tuple[str, ...]:
        """The run, for sentences about it."""
        return (self.name,)


def summary_of(sample: Sample, name: str, started_ns: int, started_from: str) -> RunSummary:
    """The summary of a run; the arguments are as the attributes of `RunSummary`."""
    means = run_means([sample], folds(sample.rows))
    figures = {column: getattr(means, column)[:, 0] for column in FIGURES}
    rows = pl.DataFrame({"by": [by for by, _ in means.keys], "name": [name for _, name in means.keys], **figures})
    step_ns = means.mean[means.keys.index((STEP, ALL)), 0]
    kept = rows.filter((pl.col("name") == ALL) | (pl.col("mean") >= _KEPT_SHARE * step_ns)).cast(ROWS)
    kept = kept.with_columns(pl.col(FIGURES).round_sig_figs(_DIGITS))
    return RunSummary(name, started_ns, started_from, sample.what, sample.counted, sample.conditions, kept)


def means_of(runs: Sequence[RunSummary]) -> RunMeans:
    """The rows of all runs; a run without a place spent no time there."""
    rows = pl.concat([run.rows.with_columns(run=pl.lit(number)) for number, run in enumerate(runs)])
    keys = rows.select("by", "name").unique().sort("by", "name").with_row_index("row")
    row = rows.join(keys, on=["by", "name"], how="left", maintain_order="left")["row"].to_numpy()
    steps = np.array([run.steps for run in runs], np.int64)
    matrices = {}
    for column in FIGURES:
        values = np.zeros((keys.height, len(runs)))
        if column in ("least", "error"):
            values[:, steps < 2] = np.nan
        values[row, rows["run"].to_numpy()] = rows[column].to_numpy()
        matrices[column] = values
    return RunMeans(keys.select("by", "name").rows(), steps=steps, **matrices)
