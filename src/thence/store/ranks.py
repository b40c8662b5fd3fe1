"""Assigns ranks to the parts of a store, with care for duplicates, gaps, and inputs that do not state their rank."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from thence.store.layout import MOST_RANKS, Entry, Left, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

_LISTED = 10
"""Most missing ranks that a warning lists."""


class Found(NamedTuple):
    """A part, and its folder."""

    folder: str
    part: Part


class Numbered(NamedTuple):
    """The parts of the job, sorted by rank; the inputs that are left out, with the reason; and warnings."""

    entries: tuple[Entry, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...]


def numbered(found: Sequence[Found], *, add: bool = False) -> Numbered:
    """Assigns ranks to all parts.

    Of several parts that state the same rank, the newest is kept. A part that does not state its rank gets the next
    free number if its own is taken; it is left out if it was not recorded at the same time as the others.

    Args:
        found: all parts, in the order of the inputs.
        add: keep all parts: those whose rank is taken get the next free numbers.
    """
    stated = [one for one in found if one.part.stated]
    unstated = [one for one in found if not one.part.stated]
    chosen: list[tuple[Found, tuple[int, ...]]] = []
    left: list[Left] = []
    warnings: list[str] = []
    holder: dict[int, Found] = {}
    for one in sorted(stated, key=_recency, reverse=True):
        clash = next((rank for rank in one.part.ranks if rank in holder), None)
        if clash is not None and not add:
            other = holder[clash].part.source
            left.append(
                Left(
                    one.part.source,
                    f"{one.part.source}: holds rank {clash}, which the newer input {other} holds too",
                    "duplicate",
                )
            )
            continue
        if clash is not None:
            unstated.append(one)
            continue
        holder.update(dict.fromkeys(one.part.ranks, one))
        chosen.append((one, one.part.ranks))
    for one in sorted(unstated, key=lambda one: one.part.source):
        away = next((x for x in holder.values() if not add and _apart(one.part, x.part)), None)
        if away is not None:
            text = (
                f"{one.part.source}: does not state its rank, and was not recorded at the same time as "
                f"{away.part.source}"
            )
            left.append(Left(one.part.source, text, "other_time"))
            continue
        ranks = _free(one.part.ranks, holder)
        if ranks != one.part.ranks:
            shown = ", ".join(map(str, ranks))
            warnings.append(f"{one.part.source}: does not state a rank that is free; shown as rank {shown}")
        holder.update(dict.fromkeys(ranks, one))
        chosen.append((one, ranks))
    chosen.sort(key=lambda pair: pair[1])
    warnings += _gaps(sorted(holder))
    return Numbered(tuple(_entry(one, ranks) for one, ranks in chosen), tuple(left), tuple(warnings))


def _recency(one: Found) -> tuple[int, str]:
    return (one.part.window[1] if one.part.window else 0, one.part.source)


def _apart(one: Part, other: Part) -> bool:
    """Whether two windows are known and do not overlap."""
    if one.window is None or other.window is None:
        return False
    return one.window[1] < other.window[0] or other.window[1] < one.window[0]


def _free(ranks: tuple[int, ...], holder: dict[int, Found]) -> tuple[int, ...]:
    """The ranks themselves if none of them is taken, else the next free numbers."""
    if not any(rank in holder for rank in ranks):
        return ranks
    count = len(ranks)
    starts = itertools.chain(
        [max(holder) + 1], itertools.count()
    )  # then from 0 on: a file may claim the highest possible rank
    first = next(
        start for start in starts if start + count <= MOST_RANKS and not any(start + i in holder for i in range(count))
    )
    return tuple(range(first, first + len(ranks)))


def _gaps(ranks: Sequence[int]) -> list[str]:
    """A warning about the ranks below the highest one that no part holds."""
    if not ranks:
        return []
    count = ranks[-1] + 1 - len(ranks)
    if not count:
        return []
    # A file can claim to be rank two billion, so missing ranks are only generated as far as they are listed.
    between = (range(a + 1, b) for a, b in itertools.pairwise((-1, *ranks)))
    missing = itertools.islice(itertools.chain.from_iterable(between), _LISTED)
    listed = ", ".join(map(str, missing)) + (" ..." if count > _LISTED else "")
    return [f"of the ranks 0 to {ranks[-1]:,}, {count:,} {'is' if count == 1 else 'are'} missing: {listed}"]


def _entry(one: Found, ranks: tuple[int, ...]) -> Entry:
    part = one.part
    return Entry(
        folder=one.folder,
        source=part.source,
        ranks=ranks,
        written=part.ranks,
        rows=part.rows.get("gpu", 0),
        memory_bytes=part.memory_bytes,
        cpu_seconds=part.cpu_seconds,
        peak_bytes=part.peak_bytes,
    )
