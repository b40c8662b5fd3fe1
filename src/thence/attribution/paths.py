"""Paths of range names, from the outermost range to the innermost, as nodes of a prefix tree.

Because of the prefix tree, memory grows with the number of rows and not with their depth. The text of a
path of more than `MAX_LEVELS` names is shortened in the middle: it has the `KEPT_LEVELS` outermost names,
the number of levels left out, and the `KEPT_LEVELS` innermost names, as in
``a/b/[99,968 levels left out]/y/z``. If several shortened paths would have the same text, all but the first
of them are numbered: ``[99,968 levels left out, 2]``.

The text of a path repeats the names around it, so a few long names around many ranges can make texts of thousands
of times the trace's size. If the texts of a trace exceed `MAX_TEXT`, its longest names are shortened (with ``…#2``
at their end, numbered so that they stay different), and fewer levels are kept, until they do not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.host_rows import gathered
from thence.model.columns import row_numbers
from thence.model.intervals import NO_ROW, chain_to
from thence.model.shortened_names import narrowed
from thence.model.trees import ancestors, depths, trie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Int64, Mask

SEPARATOR = "/"
MAX_LEVELS = 256
"""Levels of the deepest path that is written in full; stacks of Python programs stay below."""
KEPT_LEVELS = 16
"""Levels kept at either end of a shortened path."""
MAX_TEXT, MAX_TEXT_PER_ROW = 1_000_000, 64
"""Characters of the distinct paths of a trace, and more for each host row, which takes some 100 bytes or more in a
file. Real recordings have at most 100,000."""


@dataclass(frozen=True)
class Form:
    """How paths are written.

    Attributes:
        max_levels: of a path that is written in full.
        kept_levels: at either end of a shortened path.
        name_width: characters of the longest name; 0: names are written in full.
    """

    max_levels: int
    kept_levels: int
    name_width: int = 0


_SHORTER = (Form(64, 16, 1000), Form(32, 16, 100), Form(8, 4, 40))
"""What is tried, in this order, if the texts are too long."""


@dataclass(frozen=True)
class PathTree:
    """A prefix tree of paths: each node is the path of its parent plus one name.

    Attributes:
        parent: node of the path without its last name, `NO_ROW` for a path of one name; shape (n,).
        name: last name of each path, Categorical or String. Nodes with the same parent have different names.
        dotted: whether names can be whole paths: a name that begins with its parent's name and a dot, such as
            ``model.layers.3`` in ``model``, then replaces the parent's name in the text.
        max_text: characters that the texts of distinct paths may have together before they are shortened.

    Nodes are sorted by depth, so that parents come before children.
    """

    parent: Int64
    name: pl.Series
    dotted: bool = False
    max_text: int = MAX_TEXT

    def texts(
        self, nodes: Int64, separator: str = SEPARATOR, shorter: Sequence[Form] = _SHORTER, form: Form | None = None
    ) -> pl.Series:
        """The paths as text, shortened where they are very deep; see the docstring of this module.

        Args:
            nodes: distinct nodes, in any order, shape (m,).
            shorter: forms to use instead, the first that suffices, if the texts are too long.
            form: of the texts; by default, in full up to `MAX_LEVELS`.

        Returns:
            String Series, one value per node. The text of a shortened path differs from all others.
        """
        depth = depths(self.parent)
        form = form or Form(MAX_LEVELS, KEPT_LEVELS)
        if shorter and self._characters(nodes, depth, form) > self.max_text:
            following, *rest = shorter
            narrow = replace(self, name=narrowed(self.name, following.name_width))
            return narrow.texts(nodes, separator, rest, following)
        deep = depth[nodes] > form.max_levels
        full = np.where(deep, chain_to(self.parent, nodes, depth <= form.kept_levels), nodes)
        heads = self._full_texts(full, depth, separator)
        if not deep.any():
            return heads
        tails = self._tails(nodes[deep], form.kept_levels, separator)
        lacking = depth[nodes[deep]] - 2 * form.kept_levels
        others = heads.filter(pl.Series(~deep))
        short = _shortened(heads.filter(pl.Series(deep)), lacking, tails, others, separator)
        return heads.scatter(np.flatnonzero(deep), short)

    def _characters(self, nodes: Int64, depth: Int64, form: Form) -> int:
        """The number of characters of the texts of nodes, give or take some for each level left out."""
        names = (self.name.cast(pl.String).str.len_chars().fill_null(0) + 1).to_numpy()
        names = names.astype(np.int64)
        sums = names.copy()  # of a node and all around it, where it is not too deep
        bounds = np.searchsorted(depth, np.arange(2, form.max_levels + 2))
        for low, high in itertools.pairwise(bounds.tolist()):
            sums[low:high] += sums[self.parent[low:high]]
        deep = nodes[depth[nodes] > form.max_levels]
        total = int(sums[nodes[depth[nodes] <= form.max_levels]].sum())
        if len(deep):
            kept = np.arange(len(depth)) < np.searchsorted(depth, form.kept_levels + 1)
            total += int(sums[chain_to(self.parent, deep, kept)].sum())
        for _ in range(form.kept_levels):
            total += int(names[deep].sum())
            deep = self.parent[deep]
        return total

    def _full_texts(self, nodes: Int64, depth: Int64, separator: str) -> pl.Series:
        """The paths in full, built level by level for all ancestors of the wanted nodes."""
        rows = np.flatnonzero(ancestors(self.parent, nodes))
        position = np.full(len(self.parent), NO_ROW, np.int64)
        position[rows] = np.arange(len(rows))
        names = gathered(self.name, rows).cast(pl.String).fill_null("")
        deepest = int(depth[rows].max(initial=0))
        bounds = np.searchsorted(depth[rows], np.arange(1, deepest + 2))
        levels = [pl.Series([], dtype=pl.String)]
        above = 0
        for low, high in itertools.pairwise(bounds.tolist()):
            texts = names.slice(low, high - low)
            if low:
                around = levels[-1].gather(position[self.parent[rows[low:high]]] - above)
                texts = self._below(around, self.name.gather(self.parent[rows[low:high]]), texts, separator)
            levels.append(texts)
            above = low
        return gathered(pl.concat(levels), position[nodes])

    def _below(self, path: pl.Series, last: pl.Series, name: pl.Series, separator: str) -> pl.Series:
        """Appends names to paths, whose last names are given."""
        joined = path + separator + name
        if not self.dotted:
            return joined
        rows = pl.DataFrame({"path": path, "last": last.cast(pl.String), "name": name, "joined": joined})
        extends = pl.col("name").str.starts_with(pl.col("last") + ".")
        head = pl.col("path").str.head(pl.col("path").str.len_chars() - pl.col("last").str.len_chars())
        return rows.select(pl.when(extends).then(head + pl.col("name")).otherwise("joined").alias("")).to_series()

    def _tails(self, nodes: Int64, levels: int, separator: str) -> pl.Series:
        """The innermost names of deep paths, as text."""
        names = self.name.cast(pl.String).fill_null("")
        text, ancestor = names.gather(nodes), nodes
        for _ in range(levels - 1):
            ancestor = self.parent[ancestor]
            text = names.gather(ancestor) + separator + text
        return text


def left_out(levels: int) -> str:
    """The text that replaces the omitted levels of a shortened path."""
    return f"[{levels:,} levels left out]"


def _shortened(heads: pl.Series, levels: Int64, tails: pl.Series, others: pl.Series, separator: str) -> pl.Series:
    """Shortened paths that are distinct from each other and from all of ``others``."""
    lacking, position = np.unique(levels, return_inverse=True)
    gap = pl.Series([left_out(count)[:-1] for count in lacking.tolist()]).gather(position)
    parts = pl.DataFrame({"head": heads, "gap": gap, "tail": tails})
    number = pl.int_range(1, pl.len() + 1).over("head", "gap", "tail")
    parts = parts.with_columns(number=number)
    suffix = pl.when(pl.col("number") == 1).then(pl.lit("]")).otherwise(pl.format(", {}]", "number"))
    between = pl.lit(separator)
    while True:
        text = parts.select(pl.concat_str("head", between, "gap", suffix, between, "tail")).to_series()
        taken = ~text.is_first_distinct() | text.is_in(others.implode())
        if not taken.any():
            return text
        # A name can equal the text that replaces omitted levels.
        parts = parts.with_columns(number=pl.col("number") + taken.cast(pl.Int64) * len(text))


def path_names(parent: Int64, names: pl.Series, rows: Int64, wanted: Mask, *, dotted: bool = False) -> pl.Series:
    """The path of the wanted rows around each row as text, such as ``forward/attention``.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        names: Categorical name of every host row.
        rows: innermost wanted row of each activity; `NO_ROW` gives null.
        wanted: which host rows belong on the path.
        dotted: as in `PathTree`.

    Returns:
        Categorical Series, one value per row, null where there is no path.
    """
    if not (rows != NO_ROW).any():
        return pl.Series([None], dtype=pl.Categorical()).new_from_index(0, len(rows))
    tree, node = path_tree(parent, names, rows, wanted, dotted=dotted)
    used = np.unique(node[node != NO_ROW])
    position = np.full(len(tree.parent) + 1, len(used), np.int64)  # the last entry is for NO_ROW
    position[used] = np.arange(len(used))
    texts = tree.texts(used, SEPARATOR).extend_constant(None, 1)
    return gathered(texts.cast(pl.Categorical()), position[node])


def path_tree(
    parent: Int64, names: pl.Series, rows: Int64, wanted: Mask, *, dotted: bool = False
) -> tuple[PathTree, Int64]:
    """The path of the wanted rows around each row as a node of a prefix tree.

    Names may contain the separator of `path_names`.

    Args:
        parent: parent row of every host row, `NO_ROW` at the top.
        names: Categorical name of every host row; only those of wanted rows matter.
        rows: innermost wanted row of each activity; `NO_ROW` gives `NO_ROW`.
        wanted: which host rows belong on the path.
        dotted: as in `PathTree`.

    Returns:
        The tree of the paths of the rows and of the wanted rows around them, and the node of each row.
    """
    on_path = np.flatnonzero(ancestors(parent, rows) & wanted)
    number = np.full(len(parent) + 1, NO_ROW, np.int64)  # the last entry is for NO_ROW
    number[on_path] = np.arange(len(on_path))
    around = number[chain_to(parent, parent[on_path], wanted)]
    on_path_names = gathered(names, on_path)
    codes = row_numbers(on_path_names.to_physical())
    node, first = trie(around, codes)
    above = around[first]
    tree_parent = np.where(above == NO_ROW, NO_ROW, node[above]) if len(node) else above
    max_text = MAX_TEXT + MAX_TEXT_PER_ROW * len(parent)
    tree = PathTree(tree_parent, gathered(on_path_names, first), dotted, max_text)
    return tree, np.append(node, NO_ROW)[number[rows]]
