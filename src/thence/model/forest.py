"""Forests as parent arrays: subtree sums, depths and prefix trees, for any depth.

A forest is an int64 array: the parent row of every row, `NO_ROW` for roots. Cycles are not allowed.
Nothing here loops over rows or levels: pointer doubling handles n rows of depth d in O(n log d).
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ancestors", "depths", "subtree_minima", "subtree_sums", "trie"]

Int64: TypeAlias = npt.NDArray[np.int64]
UInt64: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_ROUND = 1000
"""What one round of array operations costs beside its rows, in rows."""


def depths(parent: Int64) -> Int64:
    """The depth of each row: 1 for roots."""
    result = np.ones(len(parent), np.int64)
    for rows, above in _jumps(parent):
        result[rows] += result[above]
    return result


def subtree_sums(parent: Int64, values: Int64) -> Int64:
    """The exact int64 sum over the subtree of each row."""
    totals = values.copy()
    for rows, above in _jumps(parent):
        np.add.at(totals, above, totals[rows])
    return totals


def subtree_minima(parent: Int64, values: Int64) -> Int64:
    """The smallest value in the subtree of each row."""
    smallest = values.copy()
    for rows, above in _jumps(parent):
        np.minimum.at(smallest, above, smallest[rows])
    return smallest


def ancestors(parent: Int64, rows: Int64) -> Mask:
    """Which rows are one of the given rows or an ancestor of one.

    Args:
        parent: of every row, shape (n,).
        rows: where to start, shape (m,), in any order; `NO_ROW` stands for none.
    """
    marked = np.zeros(len(parent), np.bool_)
    marked[rows[rows >= 0]] = True
    # Level by level each row is touched once; what is very deep is left to steps of doubling length.
    owner = np.empty(len(parent), np.int64)
    frontier, spent = np.flatnonzero(marked), 0
    while len(frontier) and spent <= len(parent):
        spent += _ROUND
        up = parent[frontier]
        up = up[up >= 0]
        up = up[~marked[up]]
        marked[up] = True
        owner[up] = np.arange(len(up))
        frontier = up[owner[up] == np.arange(len(up))]
    if len(frontier):
        for below, above in _jumps(parent):
            marked[above[marked[below]]] = True
    return marked


def trie(parent: Int64, code: Int64) -> tuple[Int64, Int64]:
    """The prefix tree of a forest: rows with equal sequences of codes from the root share a node.

    Each path is hashed with a random seed by pointer doubling. The result is then verified exactly; in
    case of a collision the loop repeats with another seed.

    Args:
        parent: of every row, shape (n,).
        code: what is to be told apart, shape (n,).

    Returns:
        The node of every row, shape (n,), and the first row of every node, shape (m,). Nodes are in
        order of their depth, those of one depth in order of their first rows.
    """
    has_parent = parent >= 0
    while True:
        hashes = _hashes(parent, code, secrets.randbits(63))
        node, first = _numbered(hashes)
        around = np.full(len(parent), NO_ROW, np.int64)
        around[has_parent] = node[parent[has_parent]]
        # If the rows of every node agree in code and in parent node, their whole paths agree (induction).
        of_first = first[node]
        if (code == code[of_first]).all() and (around == around[of_first]).all():
            break
    order = np.lexsort((first, depths(around[first])))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number[node], first[order]


def _jumps(parent: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Pointer doubling: for 1, 2, 4, ... steps up, the rows with such an ancestor, and that ancestor."""
    jump = parent
    rows = np.flatnonzero(jump >= 0)
    while len(rows):
        above = jump[rows]
        yield rows, above
        further = np.full(len(parent), NO_ROW, np.int64)
        further[rows] = jump[above]
        jump = further
        rows = rows[jump[rows] >= 0]


def _numbered(hashes: UInt64) -> tuple[Int64, Int64]:
    """A number for each hash, in their order, and the first row of each number.

    `np.unique` would do the same with a stable sort, which takes several times as long for hashes.
    """
    order = np.argsort(hashes)
    ascending = hashes[order]
    differs = np.ones(len(order), np.bool_)
    differs[1:] = ascending[1:] != ascending[:-1]
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(differs) - 1
    begins = np.flatnonzero(differs)
    return number, np.minimum.reduceat(order, begins) if len(begins) else begins


def _hashes(parent: Int64, code: Int64, seed: int) -> UInt64:
    """Hashes of the paths of codes from the root; unequal paths collide with negligible probability."""
    result = _mixed(code.astype(np.uint64) + np.uint64(seed))
    for rows, above in _jumps(parent):
        result[rows] = _mixed(result[rows] * np.uint64(3) + result[above])
    return result


def _mixed(values: UInt64) -> UInt64:
    """The finalizer of SplitMix64; products are taken modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
