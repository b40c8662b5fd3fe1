"""Rows for whole paths: a label or module together with all paths that begin with it."""

from __future__ import annotations

from itertools import islice

import polars as pl

from thence.analysis.diff.sample import UNATTRIBUTED
from thence.analysis.layers import prefixes
from thence.model.layers import folded_names
from thence.model.places import LAYERED

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
    found: dict[tuple[str, str], str] = {}
    paths = rows.filter(pl.col("by").is_in(LAYERED), pl.col("name") != UNATTRIBUTED)
    for by, names in paths.select("by", "name").unique().sort("name").group_by("by"):
        layers = folded_names(names["name"]).filter(pl.len().over("folded") > 1)
        found |= {(str(by[0]), n): to for n, to in layers.select("name", "folded").iter_rows()}
    return found


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
