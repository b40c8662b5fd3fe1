"""The stack of frames of each device activity, outermost first: the input of flame graphs.

source   functions of the user's own code that were open, ``file.py:12 Block.forward``; for XLA work, the lines
         of the user's own code in the stack that the HLO holds, with their functions; the time of a fusion is
         divided among the stacks of its constituent instructions
op_name  parts of the HLO instruction's op_name
module   nn.Module calls
label    ranges that the user named
stack    all Python frames, ``file.py(12): function``
ops      operators, and the ranges that libraries named

Frames come from host ranges and from the HLO, so a name may contain any character, including separators.
Only paths that exist solely as text are split: op_names and labels of XLA work at each ``/`` outside of brackets,
labels from a library's ranges at each ``/``, and stacks in the HLO at each ``;``, which names of frames lack there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.launch_places import paths_of
from thence.attribution.paths import SEPARATOR, PathTree, path_tree
from thence.attribution.xla.op_names import segments_of
from thence.model.columns import mask_of, row_numbers
from thence.model.graph_labels import FRAME_SEPARATOR
from thence.model.intervals import NO_ROW, chain_to
from thence.model.own_code import OwnCode
from thence.model.reasons import text_of
from thence.model.trees import trie

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed


@dataclass(frozen=True)
class Stacks:
    """The paths of all activities.

    Attributes:
        claims: columns gpu (row), node (of ``tree``: the innermost frame; `NO_ROW` for none) and weight;
            the weights of one activity sum to 1.
        tree: every distinct path; may hold paths that no claim refers to.
        attributed: for each node, whether it is a frame; if not, it is an outermost node that names the
            reason why there is no place.
        shared: whether one activity's time may be split among several paths.
    """

    claims: pl.DataFrame
    tree: PathTree
    attributed: Mask
    shared: bool


def stacks_of(trace: Attributed, by: str, frames: Mapping[str, tuple[str, ...]] | None = None) -> Stacks:
    """The path of every row of ``trace.gpu``.

    Args:
        by: one of `thence.model.places.FLAMES`.
        frames: the frames of each place by its text; None for those that the trace holds.
    """
    if by == "source" and trace.shares is not None:
        return _weighted_source_stacks(trace)
    places = trace.places
    empty = np.empty(0, np.int64)
    host, node = PathTree(empty, pl.Series([], dtype=pl.String)), np.full(places.height, NO_ROW)
    if by != "op_name" and frames is None:
        own = OwnCode.of(trace.own, trace.installed)
        host, node = paths_of(trace, places["launch"], by, own)
    rows = pl.DataFrame({"place": places[by], "rule": places[f"{by}_rule"], "host": node})
    distinct = rows.unique(maintain_order=True)
    place, rule = (distinct[name].cast(pl.String) for name in ("place", "rule"))
    spelt = _known_from_host_ranges(by, host, distinct["host"].to_numpy(), place)
    given = frames or {}
    paths = [
        (f"[{text_of(reason)}]",) if text is None else given.get(text) or _frames(by, text)
        for text, reason in zip(place.filter(~spelt), rule.filter(~spelt), strict=True)
    ]
    tree, attributed, ends = _with_paths(host, paths, place.filter(~spelt).is_not_null().to_numpy())
    end = distinct["host"].to_numpy().copy()
    end[~spelt.to_numpy()] = len(host.parent) + np.arange(len(paths))
    distinct = distinct.with_columns(node=ends[end])
    claims = rows.join(distinct, on=rows.columns, how="left", maintain_order="left", nulls_equal=True)
    return Stacks(
        claims.select(pl.int_range(pl.len(), dtype=pl.Int64).alias("gpu"), "node", weight=1.0),
        tree,
        attributed,
        shared=False,
    )


def _known_from_host_ranges(by: str, host: PathTree, node: Int64, place: pl.Series) -> pl.Series:
    """Which places equal the text of their host path, so that their frames are known without splitting text."""
    around = node != NO_ROW
    used = np.unique(node[around])
    innermost = host.name.gather(used).cast(pl.String)
    texts = innermost if by == "source" else host.texts(used)
    equal = texts.gather(np.searchsorted(used, node[around])) == place.filter(pl.Series(around))
    result = np.zeros(len(node), np.bool_)
    result[around] = mask_of(equal)
    return pl.Series(result, dtype=pl.Boolean)


def _with_paths(tree: PathTree, paths: Sequence[Sequence[str]], attributed: Mask) -> tuple[PathTree, Mask, Int64]:
    """Adds paths to a prefix tree.

    Args:
        tree: a tree whose nodes are all attributed.
        paths: names, outermost first.
        attributed: whether each of the paths is.

    Returns:
        The new tree; which of its nodes are attributed; and the node in it of each old node, followed by
        that of the last name of each path, `NO_ROW` for a path without a name.
    """
    lengths = np.array([len(path) for path in paths], np.int64)
    old, begin = len(tree.parent), np.cumsum(lengths) - lengths
    chained = np.arange(old - 1, old - 1 + int(lengths.sum()))
    chained[begin[lengths > 0]] = NO_ROW
    last = np.where(lengths > 0, old + begin + lengths - 1, NO_ROW)
    parent = np.concatenate([tree.parent, chained])
    more = pl.Series([name for path in paths for name in path], dtype=pl.String)
    names = pl.concat([tree.name.cast(pl.String), more]).cast(pl.Categorical())
    is_frame = np.concatenate([np.ones(old, np.bool_), np.repeat(attributed, lengths)])
    code = row_numbers(names.to_physical()) * 2 + is_frame
    node, first = trie(parent, code)
    above = parent[first]
    new = PathTree(np.where(above == NO_ROW, NO_ROW, node[above]), names.gather(first))
    return new, is_frame[first], np.concatenate([node[:old], np.append(node, NO_ROW)[last]])


def _frames(by: str, place: str) -> tuple[str, ...]:
    """Splits the text of a place into frames."""
    if by == "source":
        return (place,)
    if by == "stack":
        return tuple(place.split(FRAME_SEPARATOR))
    parts = segments_of(place) if by in ("op_name", "label") else place.split(SEPARATOR)
    return tuple(part for part in parts if part) or (place,)


def _weighted_source_stacks(trace: Attributed) -> Stacks:
    """Source stacks of XLA work, each weighted by its share of the time.

    A stack has the lines of the user's own code; if there are none, the innermost line.
    """
    from thence.attribution.xla.hlo_places import stack_shares

    rows = stack_shares(trace)
    keys = ["module", "frame", "rule"]
    reason = pl.when(pl.col("frame").is_null()).then("rule").alias("rule")
    rows = rows.with_columns(reason)  # equal stacks found by different rules count as one
    distinct = rows.select(keys).unique(maintain_order=True)
    frames = _Frames.of(trace, distinct["module"].drop_nulls().unique().sort().to_list())
    row = frames.rows(distinct)
    of_user = chain_to(frames.parent, row, frames.own)
    innermost = chain_to(frames.parent, row, frames.named)
    tree, node = path_tree(frames.parent, frames.places, of_user, frames.own)
    others = np.flatnonzero(of_user == NO_ROW)
    texts = frames.places.gather(innermost[others][innermost[others] != NO_ROW]).cast(pl.String)
    places = iter(texts.to_list())
    known = distinct["frame"].is_not_null().to_numpy()
    rules = distinct["rule"].to_list()
    paths = [
        ((next(places),) if innermost[i] != NO_ROW else ()) if known[i] else (f"[{text_of(rules[i])}]",)
        for i in others.tolist()
    ]
    tree, attributed, ends = _with_paths(tree, paths, known[others])
    node[others] = len(ends) - len(others) + np.arange(len(others))
    distinct = distinct.with_columns(node=ends[node])
    claims = rows.join(distinct, on=keys, how="left", maintain_order="left", nulls_equal=True)
    return Stacks(claims.select("gpu", "node", "weight"), tree, attributed, shared=True)


@dataclass(frozen=True)
class _Frames:
    """The frames of several HLO modules.

    Attributes:
        first: row of the first frame of each module.
        parent: row of the parent of each frame, `NO_ROW` for outermost ones.
        places: of each frame, Categorical.
        own: whether each frame is in the user's own code.
        named: whether the file of each frame is known.
    """

    first: dict[int, int]
    parent: Int64
    places: pl.Series
    own: Mask
    named: Mask

    @classmethod
    def of(cls, trace: Attributed, modules: Sequence[int]) -> _Frames:
        from thence.attribution.xla.origins import frame_places, frames_with_file

        own = OwnCode.of(trace.own, trace.installed)
        tables = [trace.hlo[module] for module in modules]
        heights = [table.frames.height for table in tables]
        first = np.concatenate([[0], np.cumsum(heights)])[: len(heights)].tolist()
        parents = [table.frames["parent"].cast(pl.Int64).to_numpy() for table in tables]
        above = [np.where(parent > 0, parent - 1 + begin, NO_ROW) for parent, begin in zip(parents, first, strict=True)]
        none = np.zeros(0, np.bool_)
        return cls(
            dict(zip(modules, first, strict=True)),
            np.concatenate([np.zeros(0, np.int64), *above]),
            pl.concat([pl.Series([], dtype=pl.Categorical()), *map(frame_places, tables)]),
            np.concatenate([none, *(frames_with_file(table, own) for table in tables)]),
            np.concatenate([none, *(frames_with_file(table, bool) for table in tables)]),
        )

    def rows(self, stacks: pl.DataFrame) -> Int64:
        """The row of the innermost frame of each stack, by its module and frame; `NO_ROW` without one."""
        first = stacks["module"].cast(pl.Int64).replace_strict(self.first, default=None)
        row = first + stacks["frame"].cast(pl.Int64) - 1
        return row_numbers(row).copy()
