"""Matches two sequences by their order: the launches of a program, and the activities of a graph replay.

An alignment pairs launches with activities in increasing order, each at most once, and only pairs that fit: `match`
gets a weight for each pair of kinds, 0 for those that cannot belong together. Of all alignments, those with the
largest sum of weights are considered. An activity is matched for certain only if all of them pair it with one and the
same launch. So a kernel that one side lacks leaves its neighbours matched, and a stretch in which it could be any of
several equal kernels stays open, with the launches that remain possible for each activity.

Long sequences are first divided at pairs of which each side fits nothing else: unique kernels that are in the same
order on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

FITS, POSSIBLE = 2, 1
"""Weights of pairs: launch and activity have the same kernel, or nothing contradicts that they have."""

_MAX_CELLS = 64_000_000
"""Pairs of two sequences that are compared at once, such as 8,000 with 8,000: 128 MB. Their sums fit 16 bits."""


@dataclass(frozen=True)
class Matched:
    """The launches that each activity can be.

    Attributes:
        launch, activity: positions of all possible pairs, ascending by activity.
        open: for each activity, whether it can also be without a launch, or was not compared.
        pairs: how many launches and activities an alignment pairs.
    """

    launch: NDArray[np.int64]
    activity: NDArray[np.int64]
    open: NDArray[np.bool_]
    pairs: int

    def only(self) -> NDArray[np.int64]:
        """For each activity, the position of the only launch that it can be, -1 where there is none or several."""
        count = np.bincount(self.activity, minlength=len(self.open))
        only = np.full(len(self.open), -1)
        only[self.activity] = self.launch
        only[(count != 1) | self.open] = -1
        return only


def match(weight: NDArray[np.int8], launches: NDArray[np.int64], activities: NDArray[np.int64]) -> Matched:
    """Matches activities to launches.

    Args:
        weight: 0 to 2 for each kind of launch (row) and kind of activity (column).
        launches: kind of each launch, in order.
        activities: kind of each activity, in order.
    """
    pairs: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    opened = np.zeros(len(activities), np.bool_)
    parts, count = [(0, len(launches), 0, len(activities))], 0
    while parts:
        first, last, begin, end = parts.pop()
        rows, columns = launches[first:last], activities[begin:end]
        if not len(rows) or not len(columns):
            continue
        if len(rows) == len(columns) and (weight[rows, columns] == FITS).all():
            pairs.append((np.arange(first, last), np.arange(begin, end)))
            count += len(rows)
        elif len(rows) * len(columns) <= _MAX_CELLS:
            launch, activity, unmatched, paired = _possible(weight, rows, columns)
            count += paired
            pairs.append((launch + first, activity + begin))
            opened[begin:end] |= unmatched
        else:
            launch, activity = _unique(weight, rows, columns)
            launch, activity = launch + first, activity + begin
            opened[begin:end] = not len(launch)
            count += len(launch)
            pairs.append((launch, activity))
            ends = zip([*launch.tolist(), last], [*activity.tolist(), end], strict=True)
            for to_launch, to_activity in ends if len(launch) else ():
                parts.append((first, to_launch, begin, to_activity))
                first, begin = to_launch + 1, to_activity + 1
    launch = np.concatenate([np.empty(0, np.int64), *(pair[0] for pair in pairs)])
    activity = np.concatenate([np.empty(0, np.int64), *(pair[1] for pair in pairs)])
    order = np.lexsort((launch, activity))
    return Matched(launch[order], activity[order], opened, count)


def most_in_common(weight: NDArray[np.int8], launches: NDArray[np.int64], activities: NDArray[np.int64]) -> int:
    """The most pairs that an alignment can have, by counting the launches and activities that fit anything."""
    fitting = weight[np.ix_(np.unique(launches), np.unique(activities))] > 0
    by_launch = np.bincount(launches)[np.unique(launches)][fitting.any(axis=1)].sum()
    by_activity = np.bincount(activities)[np.unique(activities)][fitting.any(axis=0)].sum()
    return int(min(by_launch, by_activity))


def _unique(
    weight: NDArray[np.int8], launches: NDArray[np.int64], activities: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of which each side fits nothing else and that are in the same order as all other such pairs."""
    kinds, first, count = np.unique(launches, return_index=True, return_counts=True)
    others, begin, times = np.unique(activities, return_index=True, return_counts=True)
    fits = weight[np.ix_(kinds, others)] > 0
    alone = fits & (fits @ times == 1)[:, None] & (count @ fits == 1)[None, :]
    row, column = np.nonzero(alone)
    launch, activity = first[row], begin[column]
    order = np.argsort(launch)
    launch, activity = launch[order], activity[order]
    before = np.maximum.accumulate(np.concatenate([[-1], activity[:-1]]))
    after = np.minimum.accumulate(np.concatenate([activity[1:], [len(activities)]])[::-1])[::-1]
    ordered = (before < activity) & (activity < after)
    return launch[ordered], activity[ordered]


def _possible(
    weight: NDArray[np.int8], launches: NDArray[np.int64], activities: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], int]:
    """The pairs that any best alignment has, which activities any leaves unmatched, and how many pairs one has."""
    columns = weight.astype(np.int16)[:, activities]  # weights of each kind of launch
    best = np.zeros((len(launches) + 1, len(activities) + 1), np.int16)
    for i, kind in enumerate(launches.tolist()):
        reached, before = best[i + 1], best[i]
        np.add(before[:-1], columns[kind], out=reached[1:])
        np.copyto(reached[1:], before[1:], where=columns[kind] == 0)
        np.maximum(reached[1:], before[1:], out=reached[1:])
        np.maximum.accumulate(reached, out=reached)
    most = best[-1, -1]
    # The best sums of the remaining launches and activities, from the end.
    rest = np.zeros(len(activities) + 1, np.int16)
    unmatched = best[-1, :-1] + rest[1:] == most
    found = []
    for i in range(len(launches) - 1, -1, -1):
        with_pair = rest[1:] + columns[launches[i]]
        fits = columns[launches[i]] > 0
        paired = fits & (best[i, :-1] + with_pair == most)
        found.append(np.flatnonzero(paired))
        np.maximum(rest[:-1], np.where(fits, with_pair, 0), out=rest[:-1])
        rest = np.maximum.accumulate(rest[::-1])[::-1]
        unmatched |= best[i, :-1] + rest[1:] == most
    counts = [len(positions) for positions in found]
    launch = np.repeat(np.arange(len(launches) - 1, -1, -1), counts)
    activity = np.concatenate(found).astype(np.int64)
    return launch, activity, np.asarray(unmatched, np.bool_), _length(best)


def _length(best: NDArray[np.int16]) -> int:
    """How many pairs one best alignment has."""
    i, j, count = best.shape[0] - 1, best.shape[1] - 1, 0
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j, count = i - 1, j - 1, count + 1
    return count
