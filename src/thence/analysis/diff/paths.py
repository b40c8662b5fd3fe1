"""Rows for whole paths: a label or module together with all paths that begin with it."""

from __future__ import annotations

import polars as pl

from thence.analysis.diff.sample import UNATTRIBUTED
from thence.model.places import KINDS

__all__ = ["PARTS", "whole_paths"]

PARTS = "/..."
"""Suffix of the name of a row that sums a path and all paths that begin with it."""

_NESTED = tuple(kind.name for kind in KINDS if kind.nests)
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
    paths = rows.filter(pl.col("by").is_in(_NESTED), pl.col("name") != UNATTRIBUTED)
    for by, names in paths.select("by", "name").unique().group_by("by"):
        around: dict[str, list[str]] = {}
        for path in names["name"]:
            parts = path.split("/")
            for depth in range(1, min(len(parts), _DEEPEST) + 1):
                around.setdefault("/".join(parts[:depth]), []).append(path)
        pairs += [
            (by[0], path, f"{head}{PARTS}")
            for head, inner in around.items()
            if len(inner) > 1
            for path in inner
        ]
    schema = {"by": pl.String, "name": pl.String, "whole": pl.String}
    joined = paths.join(pl.DataFrame(pairs, schema=schema, orient="row"), on=["by", "name"])
    return (
        joined.group_by("by", "run", "step", name="whole")
        .agg(pl.col("ns", "count").sum())
        .select(rows.columns)
    )
