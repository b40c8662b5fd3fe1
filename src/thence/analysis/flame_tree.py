"""The prefix tree of a flame graph, built one level of frames at a time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from thence.model.intervals import NO_ROW, chain_to

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COLUMNS", "Groups", "largest", "tree"]

Int64: TypeAlias = npt.NDArray[np.int64]
Entry: TypeAlias = tuple[str, str, str | None]
"""Name, kind and full name of a frame: equal entries under one frame are one frame."""

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
    "forward_ns": pl.Int64,
    "backward_ns": pl.Int64,
    "idle": pl.Boolean,
}
"""Schema of the nodes of a tree."""

_SUMS = ("self_ns", "count", "forward_ns", "backward_ns")


@dataclass(frozen=True)
class Groups:
    """Activities grouped by all their frames.

    Attributes:
        frames: of each group, outermost first.
        sums: columns self_ns, count, forward_ns and backward_ns.
        members: the activities of each group, where one may be in several; else None.
    """

    frames: Sequence[Sequence[Entry]]
    sums: pl.DataFrame
    members: pl.Series | None

    def with_more(self, more: Groups) -> Groups:
        """These and others, whose activities are none of these."""
        members = self.members
        if members is not None:
            none = pl.Series([[]], dtype=members.dtype).new_from_index(0, len(more.frames))
            members = members.append(none)
        return Groups([*self.frames, *more.frames], pl.concat([self.sums, more.sums]), members)


def tree(groups: Groups, root: str) -> pl.DataFrame:
    """The tree of some groups.

    Args:
        groups: with their times.
        root: name of the root.

    Returns:
        nodes in the columns of `COLUMNS`, each after its parent, level by level.
    """
    entries: dict[Entry, int] = {}
    lengths = np.array([len(frames) for frames in groups.frames], np.int64)
    codes = np.array(
        [
            entries.setdefault(entry, len(entries))
            for entry in itertools.chain.from_iterable(groups.frames)
        ],
        np.int64,
    )
    at = np.concatenate([[0], np.cumsum(lengths)])[:-1]
    sums = {name: groups.sums[name].to_numpy() for name in _SUMS}
    node = np.zeros(len(lengths), np.int64)  # the innermost node of each group so far
    parents, names, depths = [np.array([NO_ROW])], [np.array([NO_ROW])], [np.array([0])]
    totals = {name: [sums[name].sum(keepdims=True)] for name in _SUMS}
    ran = np.flatnonzero([frames[0][1] != "idle" for frames in groups.frames])  # gaps: apart
    totals["count"] = [_counts(groups, ran, node[ran], 1)]
    below = 1
    for level in range(int(lengths.max(initial=0))):
        active = np.flatnonzero(lengths > level)
        base = len(entries)
        keys, own = np.unique(node[active] * base + codes[at[active] + level], return_inverse=True)
        parents.append(keys // base)
        names.append(keys % base)
        depths.append(np.full(len(keys), level + 1))
        for name in _SUMS:
            if name != "count":
                totals[name].append(_summed(own, sums[name][active], len(keys)))
        totals["count"].append(_counts(groups, active, own, len(keys)))
        node[active] = below + own
        below += len(keys)
    exact = _summed(node, sums["self_ns"], below)
    labels = [(root, "root", None), *(list(entries)[i] for i in np.concatenate(names)[1:].tolist())]
    kinds = [kind for _, kind, _ in labels]
    return pl.DataFrame(
        {
            "node": np.arange(below),
            "parent": pl.Series(np.concatenate(parents)).replace(NO_ROW, None),
            "depth": np.concatenate(depths),
            "name": [name for name, _, _ in labels],
            "full_name": pl.Series([full for *_, full in labels], dtype=pl.String),
            "kind": kinds,
            "self_ns": exact,
            "total_ns": np.concatenate(totals["self_ns"]),
            **{name: np.concatenate(totals[name]) for name in _SUMS[1:]},
            "idle": [kind == "idle" for kind in kinds],
        },
        schema=COLUMNS,
    )


def _summed(group: Int64, values: Int64, groups: int) -> Int64:
    """Exact sums by group: bincount would round to floats."""
    result = np.zeros(groups, np.int64)
    np.add.at(result, group, values)
    return result


def _counts(groups: Groups, rows: Int64, node: Int64, nodes: int) -> Int64:
    """Activities at each node: one that several groups share counts once."""
    if groups.members is None:
        return _summed(node, groups.sums["count"].to_numpy()[rows], nodes)
    pairs = (
        pl.DataFrame({"node": node, "gpu": groups.members.gather(rows)})
        .explode("gpu", empty_as_null=True, keep_nulls=True)
        .drop_nulls()
        .group_by("node")
        .agg(pl.col("gpu").n_unique())
    )
    result = np.zeros(nodes, np.int64)
    result[pairs["node"].to_numpy()] = pairs["gpu"].to_numpy()
    # Gaps of idle frames are no activities and have no members.
    lone = groups.members.gather(rows).list.len().to_numpy() == 0
    return result + _summed(node[lone], groups.sums["count"].to_numpy()[rows[lone]], nodes)


def largest(nodes: pl.DataFrame, most: int) -> tuple[pl.DataFrame, int]:
    """The largest nodes; those below each of them that are smaller become one node.

    Idle nodes are always kept.

    Args:
        nodes: of a tree.
        most: how many to keep; the nodes that hold the rest come on top.

    Returns:
        The new tree and the number of nodes that were put together.
    """
    if nodes.height <= most:
        return nodes, 0
    # A parent is never smaller than its child and comes first among equals, so it is kept as well.
    order = nodes.sort("total_ns", "node", descending=[True, False])["node"].head(most)
    keep = nodes["idle"] | nodes["node"].is_in(order.implode())
    parent = nodes["parent"].fill_null(NO_ROW).to_numpy()
    hidden = nodes.filter(~keep)
    holder = chain_to(parent, hidden["node"].to_numpy(), keep.to_numpy())
    # Times of the outermost hidden nodes hold those of the nodes inside them.
    outermost = hidden.filter(keep.gather(hidden["parent"].cast(pl.UInt32)))
    hidden_below = pl.DataFrame({"parent": holder}).group_by("parent").agg(hidden=pl.len())
    smaller = (
        outermost.group_by("parent", maintain_order=True)
        .agg(
            pl.col("total_ns", "count", "forward_ns", "backward_ns").sum(), pl.col("depth").first()
        )
        .join(hidden_below, on="parent", how="left", maintain_order="left")
        .with_columns(
            node=pl.int_range(pl.len()) + nodes.height,
            name=pl.format("({} smaller frames)", "hidden"),
            full_name=pl.lit(None, pl.String),
            kind=pl.lit("smaller"),
            self_ns="total_ns",
            idle=pl.lit(value=False),
        )
        .select(*COLUMNS)
    )
    kept = pl.concat([nodes.filter(keep), smaller.cast(pl.Schema(COLUMNS))])
    number = np.full(nodes.height + smaller.height, NO_ROW, np.int64)
    number[kept["node"].to_numpy()] = np.arange(kept.height)
    position = pl.Series(number)
    return (
        kept.with_columns(
            node=pl.int_range(pl.len(), dtype=pl.Int64),
            parent=position.gather(kept["parent"].cast(pl.UInt32)),
        ),
        hidden.height,
    )
