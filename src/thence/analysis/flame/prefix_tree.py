"""The prefix tree of a flame graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.model.columns import group_sums, row_numbers
from thence.model.grouped_intervals import distinct
from thence.model.intervals import NO_ROW, chain_to
from thence.model.phases import Phase
from thence.model.trees import depths, subtree_minima, subtree_sums, trie

if TYPE_CHECKING:
    from collections.abc import Sequence

Int64: TypeAlias = npt.NDArray[np.int64]
Entry: TypeAlias = tuple[str, str, str | None]
"""Name, kind and full name of a frame: children of a frame with equal entries are the same frame."""

PHASE_SUMS = tuple(f"{phase.value}_ns" for phase in Phase)
"""Columns of the time of each phase: ``forward_ns``, ``backward_ns`` and so on."""

COLUMNS = {
    "node": pl.Int64,
    "parent": pl.Int64,
    "depth": pl.Int64,
    "name": pl.String,
    "full_name": pl.String,
    "kind": pl.String,
    "self_ns": pl.Int64,
    "total_ns": pl.Int64,
    "count": pl.Int64,
    **dict.fromkeys(PHASE_SUMS, pl.Int64),
    "idle": pl.Boolean,
}
"""Schema of the nodes of a tree."""

FRAMES = {"parent": pl.Int64, "name": pl.String, "kind": pl.String, "full_name": pl.String}
"""Schema of `Groups.frames`."""

_ENTRY = ["name", "kind", "full_name"]
_SUMS = ("self_ns", "count", *PHASE_SUMS)


@dataclass(frozen=True)
class Groups:
    """Activities grouped by all their frames.

    Attributes:
        frames: columns of `FRAMES`: the parent of each frame (`NO_ROW` for outermost frames) and its entry.
            Equal paths may occur more than once; each frame is on the path of at least one group.
        innermost: row in ``frames`` of the innermost frame of each group.
        sums: columns self_ns, count and `PHASE_SUMS` of each group.
        members: the activities of each group, if one activity may be in several groups; else None.
    """

    frames: pl.DataFrame
    innermost: Int64
    sums: pl.DataFrame
    members: pl.Series | None

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[Entry]], sums: pl.DataFrame) -> Groups:
        """Groups from explicit paths: the frames of each, outermost first, at least one."""
        lengths = np.array([len(path) for path in paths], np.int64)
        last = np.cumsum(lengths) - 1
        parent = np.arange(int(lengths.sum())) - 1
        parent[last - lengths + 1] = NO_ROW
        entries = [entry for path in paths for entry in path]
        schema = {name: FRAMES[name] for name in _ENTRY}
        frames = pl.DataFrame(entries, schema=schema, orient="row")
        return cls(frames.select(pl.Series("parent", parent), *_ENTRY), last, sums, None)

    def with_more(self, more: Groups) -> Groups:
        """Both sets of groups; no activity may be in both."""
        members, height = self.members, self.frames.height
        if members is not None:
            none = pl.Series([[]], dtype=members.dtype).new_from_index(0, len(more.innermost))
            members = members.append(none)
        shifted = pl.when(pl.col("parent") != NO_ROW).then(pl.col("parent") + height)
        frames = more.frames.with_columns(parent=shifted.otherwise(NO_ROW))
        return Groups(
            pl.concat([self.frames, frames]),
            np.concatenate([self.innermost, more.innermost + height]),
            pl.concat([self.sums, more.sums]),
            members,
        )


def build_tree(groups: Groups, root: str) -> pl.DataFrame:
    """Builds the prefix tree of groups of activities.

    Args:
        root: name of the root.

    Returns:
        nodes in the columns of `COLUMNS`, each after its parent, in breadth-first order. Siblings are
        in the order in which their entries first appear in the groups.
    """
    top = pl.DataFrame([(NO_ROW, root, "root", None)], schema=FRAMES, orient="row")
    rows = pl.concat([top, groups.frames.with_columns(pl.col("parent") + 1)])  # NO_ROW becomes 0
    around = rows["parent"].to_numpy()
    entries = rows.select(_ENTRY).unique(maintain_order=True).with_row_index("code")
    codes = rows.join(entries, on=_ENTRY, how="left", maintain_order="left", nulls_equal=True)["code"]
    code = codes.cast(pl.Int64).to_numpy()
    node, first = trie(around, code)
    parent = np.where(around[first] == NO_ROW, NO_ROW, node[around[first]])
    leaf = node[groups.innermost + 1]
    order = _order(parent, code[first], leaf)
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    above = parent[order]
    parent, leaf = np.where(above == NO_ROW, NO_ROW, number[above]), number[leaf]
    labels = rows[first[order]].select(_ENTRY)
    exact = {name: group_sums(leaf, groups.sums[name].to_numpy(), len(order)) for name in _SUMS}
    depth = depths(parent) - 1
    totals = {name: subtree_sums(parent, exact[name]) for name in _SUMS if name != "count"}
    return labels.select(
        pl.Series("node", np.arange(len(order))),
        pl.Series("parent", parent).replace(NO_ROW, None),
        pl.Series("depth", depth),
        *("name", "full_name", "kind"),
        pl.Series("self_ns", exact["self_ns"]),
        pl.Series("total_ns", totals["self_ns"]),
        pl.Series("count", _counts(groups, parent, depth, leaf, labels["kind"])),
        *(pl.Series(name, totals[name]) for name in PHASE_SUMS),
        (pl.col("kind") == "idle").alias("idle"),
    ).cast(pl.Schema(COLUMNS))


def _order(parent: Int64, code: Int64, leaf: Int64) -> Int64:
    """Breadth-first order; within a level, nodes are sorted by where their entry first appears in the groups.

    The first appearance is the lowest group, and the least depth in it, of any node with the same entry.
    """
    depth = depths(parent)
    group = np.full(len(parent), len(leaf), np.int64)
    np.minimum.at(group, leaf, np.arange(len(leaf)))
    by_group = np.lexsort((depth, subtree_minima(parent, group)))
    _, first, entry = np.unique(code[by_group], return_index=True, return_inverse=True)
    seen = np.empty(len(parent), np.int64)
    seen[by_group] = first[entry]
    return np.lexsort((np.arange(len(parent)), seen, depth))


def _counts(groups: Groups, parent: Int64, depth: Int64, leaf: Int64, kind: pl.Series) -> Int64:
    """Number of activities at each node; an activity in several groups counts once."""
    count = groups.sums["count"].to_numpy()
    gaps = (kind == "idle").to_numpy()[leaf]  # idle groups have no members; counted separately
    if groups.members is None:
        result = subtree_sums(parent, group_sums(leaf, count, len(parent)))
    else:
        result = subtree_sums(parent, group_sums(leaf[gaps], count[gaps], len(parent)))
        result += _distinct(groups.members, parent, depth, leaf)
    result[0] -= count[gaps].sum()
    return result


def _distinct(members: pl.Series, parent: Int64, depth: Int64, leaf: Int64) -> Int64:
    """Number of distinct members in each subtree, counted from the deepest level upwards.

    Each (node, activity) pair is one int64, node * size + activity, so that np.unique removes the
    duplicates before the pairs move up to their parents.
    """
    pairs = pl.DataFrame({"node": leaf, "gpu": members}).explode("gpu", empty_as_null=True, keep_nulls=True)
    pairs = pairs.drop_nulls().unique()
    node, gpu = pairs["node"].to_numpy(), pairs["gpu"].to_numpy().astype(np.int64)
    order = np.argsort(-depth[node], kind="stable")
    node, gpu = node[order], gpu[order]
    size = int(gpu.max(initial=0)) + 1
    bounds = np.searchsorted(-depth[node], np.arange(-int(depth[node].max(initial=0)), 2))
    result, node_members = np.zeros(len(parent), np.int64), np.empty(0, np.int64)
    for low, high in itertools.pairwise(bounds.tolist()):
        node_members = distinct(np.concatenate([node_members, node[low:high] * size + gpu[low:high]]))
        np.add.at(result, node_members // size, 1)
        node_members = parent[node_members // size] * size + node_members % size
    return result


def keep_largest(nodes: pl.DataFrame, most: int) -> tuple[pl.DataFrame, int]:
    """Keeps the largest nodes; under each kept node, the smaller descendants are merged into one node.

    The frame of all idle time is always kept.

    Args:
        most: how many nodes to keep; the merged nodes are added to these.

    Returns:
        The new tree and the number of nodes that were merged.
    """
    if nodes.height <= most:
        return nodes, 0
    # A parent is never smaller than its child and comes first among equals, so it is also kept.
    order = nodes.sort("total_ns", "node", descending=[True, False])["node"].head(most)
    all_idle = nodes["idle"] & (nodes["depth"] == 1)
    keep = all_idle | nodes["node"].is_in(order.implode())
    parent = row_numbers(nodes["parent"])
    hidden = nodes.filter(~keep)
    holder = chain_to(parent, hidden["node"].to_numpy(), keep.to_numpy())
    # Times of the outermost hidden nodes include those of the nodes inside them.
    outermost = hidden.filter(keep.gather(hidden["parent"].cast(pl.UInt32)))
    hidden_below = pl.DataFrame({"parent": holder}).group_by("parent").agg(hidden=pl.len())
    smaller = (
        outermost.group_by("parent", maintain_order=True)
        .agg(pl.col("total_ns", "count", *PHASE_SUMS).sum(), pl.col("depth", "idle").first())
        .join(hidden_below, on="parent", how="left", maintain_order="left")
        .with_columns(
            node=pl.int_range(pl.len()) + nodes.height,
            name=pl.format("({} smaller frames)", "hidden"),
            full_name=pl.lit(None, pl.String),
            kind=pl.lit("smaller"),
            self_ns="total_ns",
        )
        .select(*COLUMNS)
    )
    kept = pl.concat([nodes.filter(keep), smaller.cast(pl.Schema(COLUMNS))])
    number = np.full(nodes.height + smaller.height, NO_ROW, np.int64)
    number[kept["node"].to_numpy()] = np.arange(kept.height)
    position = pl.Series(number)
    return (
        kept.with_columns(
            node=pl.int_range(pl.len(), dtype=pl.Int64), parent=position.gather(kept["parent"].cast(pl.UInt32))
        ),
        hidden.height,
    )
