"""Equal rows among many, where few are different: without sorting."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import polars as pl

    Uint64 = npt.NDArray[np.uint64]
    Rows = npt.NDArray[np.intp]
    Numbers = npt.NDArray[np.uint32]

__all__ = ["distinct", "distinct_values"]

_SLOTS_BITS = 14  # tables of this size stay in the processor's cache
_ROUNDS = 8
_AT_ONCE = 1 << 17
_MIX = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


def distinct(words: Sequence[Uint64]) -> tuple[Rows, Numbers]:
    """One row of each kind, and which of those each row equals.

    Where very many rows differ, two of the rows returned may be equal.

    Args:
        words: what a row is made of, at least one array of shape (n,).

    Returns:
        row numbers, shape (m,), and for each row a number from 0 to m - 1, shape (n,).
    """
    rows = len(words[0])
    if rows <= _AT_ONCE:
        return _distinct(words)
    of = np.empty(rows, np.uint32)
    firsts: list[Rows] = []
    known = 0
    for start in range(0, rows, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        first, numbers = _distinct([word[part] for word in words])
        of[part] = numbers + known
        firsts.append(first + start)
        known += len(first)
    first = np.concatenate(firsts)
    if known > rows // 4:
        return first, of
    chosen, numbers = distinct([word[first] for word in words])
    return first[chosen], np.take(numbers, of)


def _distinct(words: Sequence[Uint64]) -> tuple[Rows, Numbers]:
    """The same for few rows.

    Rows are put into slots by a hash, one of each slot stands for it, and those that differ from it
    are tried again with another hash. What remains after some rounds stands for itself.
    """
    of = np.zeros(len(words[0]), np.uint32)
    firsts: list[Rows] = []
    known = 0
    rows: Rows = np.arange(len(of))
    parts = list(words)
    for number in range(_ROUNDS):
        slot = _slots(parts, number)
        taken = np.full(1 << _SLOTS_BITS, -1, np.intp)
        taken[slot] = np.arange(len(slot))
        used = np.flatnonzero(taken >= 0)
        chosen = taken[used]
        taken[used] = np.arange(len(used))
        found = np.take(taken, slot)
        firsts.append(rows[chosen])
        differs = np.zeros(len(slot), np.bool_)
        for part in parts:
            differs |= np.take(part[chosen], found) != part
        of[rows] = found + known
        known += len(chosen)
        if not differs.any():
            break
        rows = rows[differs]
        parts = [part[differs] for part in parts]
    else:
        of[rows] = known + np.arange(len(rows))
        firsts.append(rows)
    return np.concatenate(firsts), of


def distinct_values(*columns: pl.Series) -> tuple[Rows, Numbers]:
    """The same for columns of whole numbers; null is a value like any.

    Args:
        columns: Int64, at least one.
    """
    words = []
    for column in columns:
        words.append(column.fill_null(0).to_numpy().view(np.uint64))
        if column.null_count():
            words.append(column.is_null().to_numpy().astype(np.uint64))
    return distinct(words)


def _slots(words: Sequence[Uint64], number: int) -> Rows:
    mixed = words[0] * np.uint64(_MIX[number % len(_MIX)] + 2 * number)
    for word in words[1:]:
        mixed ^= mixed >> np.uint64(29)
        mixed += word
        mixed *= np.uint64(_MIX[(number + 1) % len(_MIX)] + 2 * number)
    mixed >>= np.uint64(64 - _SLOTS_BITS)
    return mixed.view(np.int64)
