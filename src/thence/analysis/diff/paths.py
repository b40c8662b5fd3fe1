"""Rows for whole paths: a label or module together with all that begins with it."""

from __future__ import annotations

import polars as pl

from thence.analysis.diff.sample import UNATTRIBUTED
from thence.model.places import KINDS

__all__ = ["PARTS", "whole_paths"]

PARTS = "/..."
"""End of the name of a row that holds a path and all paths that begin with it."""

_NESTED = tuple(kind.name for kind in KINDS if kind.nests)
_DEEPEST = 8
"""Names of a path, from the outermost on, that have rows of their own."""


def whole_paths(rows: pl.DataFrame) -> pl.DataFrame:
    """For each path that several paths begin with, in whichever run: the sum of them, step by step.

    Args:
        rows: by, name, run, step, ns and count, of all runs.

    Returns:
        rows of the same columns; each is named as the path, with `PARTS` behind it.
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
