"""The numbers of ranks of a job whose inputs may hold the same rank, or not state theirs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_MAX_RANKS = 1 << 31
"""Every rank is less than this, because tables hold ranks as Int32."""


def rank_numbers(parts: Sequence[tuple[tuple[int, ...], bool]]) -> list[tuple[int, ...]]:
    """The ranks of each input in the job; inputs have different ones.

    An input that states its ranks keeps them, unless one before it states one of them. The others follow in their
    order: they keep theirs if these are free, or get numbers above all others.

    Args:
        parts: of each input, its ranks and whether it states them.
    """
    taken: set[int] = set()
    numbers: dict[int, tuple[int, ...]] = {}
    for number, (ranks, stated) in enumerate(parts):
        if stated and taken.isdisjoint(ranks):
            numbers[number] = ranks
            taken.update(ranks)
    for number, (ranks, _) in enumerate(parts):
        if number not in numbers:
            numbers[number] = ranks if taken.isdisjoint(ranks) else _free(len(ranks), taken)
            taken.update(numbers[number])
    return [numbers[number] for number in range(len(parts))]


def _free(count: int, taken: Collection[int]) -> tuple[int, ...]:
    """The next free numbers: above all others or, as a file may claim the highest possible rank, from 0 on."""
    starts = itertools.chain([max(taken) + 1], itertools.count())
    return next(
        tuple(range(start, start + count))
        for start in starts
        if start + count <= _MAX_RANKS and not any(start + i in taken for i in range(count))
    )
