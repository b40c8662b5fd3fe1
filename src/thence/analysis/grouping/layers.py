"""The layers of a model in tables of GPU time: equal layers as one row, and a tree of the model's parts.

Both are sums of the rows of a table by module, label or op_name, in which each activity has one place. So their times
are those of the rows, to the nanosecond, and equal rows of two traces give equal results.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import polars as pl

from thence.analysis.activity_rooflines import USE, WORK_SUMS, summed_work, use_of_sums
from thence.attribution.xla.op_names import segments_of
from thence.model.layers import folded_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.units import Ns

_SPREAD = ("layer_min_ns", "layer_median_ns", "layer_max_ns", "differs", "differs_ns", "differs_share")
_SEPARATOR = re.compile(r"[/.](?=[^/.])")
_INDEX = re.compile(r"[/.]?\[?[\d*]+\]?(?=$|[/.])")
"""A part of a path that is only the index of a layer."""


def folded_rows(rows: pl.DataFrame, sum_ns: Ns) -> pl.DataFrame:
    """Rows of a table with equal layers of the model as one row, the most time first.

    Args:
        rows: name, attributed, reason, count, total_ns, exposed_ns, backward_ns and `WORK_SUMS`, as in `Summary.rows`,
            by one of `LAYERED`.
        sum_ns: time that is a share of 1, ns.

    Returns:
        ``name`` (with ``*`` for the index of the layer), ``attributed``, ``reason``, ``layers`` (how many are in
        the row; null for a row that is no layer, or a part of a single layer), ``count``, ``total_ns``, ``mean_ns``,
        ``share``, ``exposed_ns``, ``backward_ns``, `WORK_SUMS`, `USE`; and of the times of the single layers
        ``layer_min_ns``, ``layer_median_ns`` and ``layer_max_ns``, and the layer whose time is farthest from the
        median: ``differs`` (its index), its time ``differs_ns``, and ``differs_share`` (that time less the median, as a
        share of the median); null where all layers take equally long.
    """
    names = folded_names(rows.filter("attributed")["name"])
    held = rows.join(names, on="name", how="left", maintain_order="left")
    together = pl.col("attributed") & (pl.len().over("folded", "attributed") > 1)
    held = held.with_columns(
        folded=pl.when(together).then("folded").otherwise("name"), layer=pl.when(together).then("layer")
    )
    sums = held.group_by("folded", "attributed", maintain_order=True).agg(
        pl.col("reason").first(),
        pl.col("count", "total_ns", "exposed_ns", "backward_ns").sum(),
        *summed_work(),
        layers=pl.when(pl.col("layer").count() > 0).then(pl.col("layer").n_unique().cast(pl.Int64)),
    )
    return (
        sums.join(_spread(held), on="folded", how="left", maintain_order="left")
        .with_columns(
            *use_of_sums(), mean_ns=pl.col("total_ns") / pl.col("count"), share=pl.col("total_ns") / max(sum_ns, 1)
        )
        .rename({"folded": "name"})
        .sort("total_ns", "name", descending=[True, False])
        .select(
            *("name", "attributed", "reason", "layers", "count", "total_ns", "mean_ns", "share"),
            *("exposed_ns", "backward_ns", *WORK_SUMS, *USE, *_SPREAD),
        )
    )


def _spread(held: pl.DataFrame) -> pl.DataFrame:
    """For each folded row, the columns `_SPREAD`.

    Args:
        held: folded, layer and total_ns of every row; layer is null of rows that are not folded.
    """
    layers = (
        held.drop_nulls("layer")
        .group_by("folded", "layer", maintain_order=True)
        .agg(pl.col("total_ns").sum())
        .with_columns(median=pl.col("total_ns").median().over("folded"))
        .with_columns(apart=(pl.col("total_ns") - pl.col("median")).abs())
    )
    farthest = pl.col("apart").arg_max()
    differ = pl.col("apart").max() > 0
    return layers.group_by("folded").agg(
        layer_min_ns=pl.col("total_ns").min(),
        layer_median_ns=pl.col("median").first(),
        layer_max_ns=pl.col("total_ns").max(),
        differs=pl.when(differ).then(pl.col("layer").get(farthest)),
        differs_ns=pl.when(differ).then(pl.col("total_ns").get(farthest)),
        differs_share=pl.when(differ & (pl.col("median").first() > 0)).then(
            pl.col("total_ns").get(farthest) / pl.col("median").first() - 1
        ),
    )


def tree_rows(rows: pl.DataFrame, by: str, sum_ns: Ns, depth: int | None = None, *, each: bool = False) -> pl.DataFrame:
    """The parts of a model as a tree, each with the time of everything inside of it.

    A part that launches nothing itself and holds a single part is one node with it: ``jit(step)/jvp(Model)``.

    Args:
        rows: as `folded_rows` takes them.
        by: the kind of place of the rows, one of `LAYERED`.
        sum_ns: time that is a share of 1, ns.
        depth: levels of the tree that are returned; None: all. The times of deeper parts are in those around them.
        each: whether every layer is a node of its own.

    Returns:
        one row per node, each before those inside of it, siblings the most time first: ``name`` (the whole path),
        ``part`` (what it adds to the path around it), ``depth`` (1 for the outermost), ``attributed``, ``layers``
        (1 for a part of a single layer whose name has an index; null for a node that is no layer), ``count``,
        ``total_ns`` (with everything inside), ``self_ns`` (outside of the parts inside), ``backward_ns`` (part of
        total_ns) and ``share``.
    """
    nodes = _nodes(_levels(rows, by, each=each))
    ordered = pl.DataFrame(
        list(_preorder(nodes, depth)), {"number": pl.UInt32, "depth": pl.Int64, "part": pl.String}, orient="row"
    )
    return (
        nodes.select(pl.all().gather(ordered["number"]))
        .hstack(ordered.drop("number"))
        .with_columns(
            name=pl.when(pl.col("paths") > 1).then("folded").otherwise("path"),
            layers=pl.when(pl.col("layers") > 0).then("layers"),
            share=pl.col("total_ns") / max(sum_ns, 1),
        )
        .select(*TREE)
    )


def _levels(rows: pl.DataFrame, by: str, *, each: bool) -> pl.DataFrame:
    """The rows once for every part of their path.

    Returns:
        the columns of the rows; ``path`` (of the part), ``folded`` (that path with its layers folded, unless ``each``),
        ``inside_of`` (the folded path around it, null for the outermost), ``layer`` (the number of the layer) and
        ``own`` (ns of the row if the part is its innermost, else 0).
    """
    paths = [
        list(prefixes(name, by)) if attributed else [name]
        for name, attributed in rows.select("name", "attributed").iter_rows()
    ]
    levels = (
        rows.select("name", "attributed", "count", "total_ns", "backward_ns")
        .with_columns(path=pl.Series(paths, dtype=pl.List(pl.String)))
        .with_columns(around=pl.col("path").list.shift(1))
        .explode("path", "around", empty_as_null=True, keep_nulls=True)
    )
    folds = folded_names(levels.filter("attributed")["path"].unique(maintain_order=True))
    if each:
        folds = folds.with_columns(folded="name", layer=pl.lit(None, pl.String))
    known = folds.select("folded", "layer", path="name")
    around = folds.select(around="name", inside_of="folded")
    joined = levels.join(known, on="path", how="left", maintain_order="left")
    return joined.join(around, on="around", how="left", maintain_order="left").with_columns(
        folded=pl.when("attributed").then("folded").otherwise("path"),
        own=pl.when(pl.col("name") == pl.col("path")).then("total_ns").otherwise(0),
    )


def _nodes(levels: pl.DataFrame) -> pl.DataFrame:
    """The sums of every part, the most time first."""
    return (
        levels.group_by("folded", "attributed", maintain_order=True)
        .agg(
            pl.col("inside_of", "path").first(),
            pl.col("path").n_unique().alias("paths"),
            pl.col("count", "total_ns", "backward_ns").sum(),
            self_ns=pl.col("own").sum(),
            layers=pl.col("layer").drop_nulls().n_unique().cast(pl.Int64),
        )
        .sort("total_ns", "folded", descending=[True, False])
    )


TREE = ("name", "part", "depth", "attributed", "layers", "count", "total_ns", "self_ns", "backward_ns", "share")
"""Columns of a tree."""


def folded_frames(places: pl.Series, by: str) -> dict[str, tuple[str, ...]]:
    """The parts of the folded path of each place, outermost first: the frames of a flame graph of layers.

    Args:
        places: of activities, by one of `LAYERED`.
        by: that kind.
    """
    names = folded_names(places.cast(pl.String).unique(maintain_order=True).drop_nulls())
    frames = {}
    for name, folded in names.select("name", "folded").iter_rows():
        paths = ["", *prefixes(folded, by)]
        frames[name] = tuple(_part(path, outer) for outer, path in pairwise(paths))
    return frames


def prefixes(name: str, by: str) -> Iterator[str]:
    """The paths of the parts around a place, outermost first, and its own.

    Names of modules are separated by ``/`` or, where they are paths in the program, by dots; labels and op_names by
    ``/`` outside of brackets.
    """
    if by == "module":
        yield from (name[: match.start()] for match in _SEPARATOR.finditer(name) if match.start())
    else:
        end = -1
        for segment in segments_of(name)[:-1]:
            end += len(segment) + 1
            if name[:end].strip("/"):
                yield name[:end]
    yield name


def _preorder(nodes: pl.DataFrame, depth: int | None) -> Iterator[tuple[int, int, str]]:
    """Yields the number of each node, its level and its part of the path, each node before those inside of it."""
    names, around, own = (nodes[name].to_list() for name in ("folded", "inside_of", "self_ns"))
    inside: dict[str | None, list[int]] = {}
    for number, outer in enumerate(around):
        inside.setdefault(outer, []).append(number)
    waiting: list[tuple[int, int, str]] = [(n, 1, "") for n in reversed(inside.get(None, []))]
    while waiting:
        number, level, outer = waiting.pop()
        below = inside.get(names[number], [])
        while len(below) == 1 and not own[number]:  # nothing but the part inside
            number = below[0]
            below = inside.get(names[number], [])
        yield number, level, _part(names[number], outer)
        if depth is None or level < depth:
            waiting += [(n, level + 1, names[number]) for n in reversed(below)]


def _part(path: str, outer: str) -> str:
    """What a path adds to the path around it; an index keeps the name of what it counts."""
    if not outer or not path.startswith(outer):
        return path
    rest = path[len(outer) :]
    if _INDEX.match(rest):
        return re.split(r"[/.]", outer)[-1] + rest
    return rest.lstrip("/.")
