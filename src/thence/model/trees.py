"""Trees as parent arrays: subtree sums, depths and prefix trees, for any depth.

Any number of trees is one int64 array: the parent row of every row, `NO_ROW` for roots. Cycles are not allowed.
Nothing here loops over rows: pointer doubling handles n rows of depth d in O(n log d). Only the prefix trees of
shallow trees are made level by level.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from collections.abc import Iterator

Int64: TypeAlias = npt.NDArray[np.int64]
UInt64: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_ROUND = 1000
"""Fixed cost of one round of array operations, expressed in rows."""
_MAX_LEVELS = 1000
"""Most levels of trees whose prefix tree is made level by level: each level has a fixed cost of about 50 us."""
_SMALL_TABLE = 1 << 16
"""Entries that a lookup table over the range of the values may always have, even if there are few values."""


def depths(parent: Int64) -> Int64:
    """The depth of each row: 1 for roots."""
    top = len(parent)  # a virtual parent of all roots, at depth 0
    jump = np.append(np.where(parent < 0, top, parent), top).astype(np.int32)
    result = np.ones(top + 1, np.int32)
    result[top] = 0
    while (further := result[jump]).any():
        result += further
        jump = jump[jump]
    return result[:top].astype(np.int64)


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
        rows: where to start, shape (m,), in any order; `NO_ROW` entries are ignored.
    """
    marked = np.zeros(len(parent), np.bool_)
    marked[rows[rows >= 0]] = True
    # Going up level by level touches each row once. What is left of a very deep trees uses pointer doubling.
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


def numbered(values: Int64) -> tuple[Int64, Int64]:
    """Numbers distinct values from 0, in order of their first rows.

    Returns:
        The number of each value, shape (n,), and the first row of each number, shape (m,).
    """
    least = int(values.min(initial=0))
    size = int(values.max(initial=-1)) - least + 1
    if size > 4 * len(values) + _SMALL_TABLE:
        _, first, number = np.unique(values, return_index=True, return_inverse=True)
        order = np.argsort(first)
        of_sorted = np.empty(len(order), np.int64)
        of_sorted[order] = np.arange(len(order))
        return of_sorted[number], first[order]
    place = values - least
    table = np.full(size, NO_ROW)
    table[place[::-1]] = np.arange(len(place) - 1, -1, -1)  # reversed: the first of equal values remains
    first = np.sort(table[table != NO_ROW])
    table[place[first]] = np.arange(len(first))
    return table[place], first


def numbered_together(*columns: Int64) -> tuple[Int64, Int64]:
    """As `numbered`, of the distinct combinations of the values of several columns."""
    number, first = numbered(columns[0])
    for values in columns[1:]:
        other, others = numbered(values)
        number, first = numbered(number * max(len(others), 1) + other)
    return number, first


def trie(parent: Int64, code: Int64) -> tuple[Int64, Int64]:
    """The prefix tree of trees: rows with equal sequences of codes from the root share a node.

    Args:
        parent: of every row, shape (n,).
        code: of every row, shape (n,).

    Returns:
        The node of every row, shape (n,), and the first row of every node, shape (m,). Nodes are in
        order of their depth, those of one depth in order of their first rows.
    """
    depth = depths(parent)
    if int(depth.max(initial=0)) <= _MAX_LEVELS:
        return _trie_by_levels(parent, numbered(code)[0], depth)
    return _trie_by_hashes(parent, code)


def _trie_by_levels(parent: Int64, code: Int64, depth: Int64) -> tuple[Int64, Int64]:
    """As `trie`: the nodes of a level are the distinct pairs of a node of the level above and a code.

    Args:
        parent: of every row, shape (n,).
        code: of every row, numbered from 0.
        depth: of every row, 1 for roots.
    """
    order = np.argsort(depth.astype(np.uint16), kind="stable")
    around, code = parent[order], code[order]
    codes = int(code.max(initial=0)) + 1
    node = np.full(len(parent) + 1, NO_ROW)  # the last entry is the parent node of roots
    firsts = [np.empty(0, np.int64)]
    above, count = NO_ROW, 0  # the first node of the level above, and how many nodes there are
    for low, high in pairwise(np.cumsum(np.bincount(depth, minlength=1)).tolist()):
        number, first = numbered((node[around[low:high]] - above) * codes + code[low:high])
        node[order[low:high]] = number + count
        firsts.append(order[low:high][first])
        above, count = count, count + len(first)
    return node[:-1], np.concatenate(firsts)


def _trie_by_hashes(parent: Int64, code: Int64) -> tuple[Int64, Int64]:
    """As `trie`, for deep trees.

    Each path is hashed with a random seed by pointer doubling. The result is then verified exactly; in
    case of a collision the loop repeats with another seed.
    """
    has_parent = parent >= 0
    while True:
        # A secret seed: nobody can make a file whose names collide each time.
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
    """A number for each hash, ascending with the hashes, and the first row of each number.

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
