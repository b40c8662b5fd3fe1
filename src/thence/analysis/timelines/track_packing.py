"""Packs overlapping slices into lanes so that a timeline viewer can draw them.

On one track, a viewer can only draw slices that are nested or disjoint. Slices that cross (one starts
inside another and ends after it) need several lanes: extra tracks that the viewer shows as one row. In
this module a lane is always such a sub-track.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.model.intervals import chain_to, enclosing, reached_before

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.model.arrays import Int64, Mask

    Stacks = tuple[tuple[int, ...], ...]

_MAX_STEPS = 200_000
"""Budget of placements, over all slices, for the backtracking search for fewer lanes than the greedy choice."""
_MAX_SEARCHED = 64
"""Larger groups of crossing slices keep the greedy choice."""
_MAX_COMPARED = 64
"""Best fit compares this many lanes at most; beyond that, first free lane (a heap) replaces best fit."""


def split_lanes(track: Int64, start: Int64, end: Int64) -> Int64:
    """Assigns lanes to slices: lane 0 on a track without crossings, else as few lanes as can be found.

    The number of lanes is minimal for groups of crossing slices that are small or that the greedy choice
    packs into two. In general the problem is colouring a circle graph, which is NP-hard, so larger groups
    keep the greedy choice: best fit, the lane whose open slice ends soonest after the new one, else an
    empty lane. It never takes more lanes than there are open slices at once.

    Args:
        track: number of the track of each slice, shape (n,).
        start: ns, shape (n,), in any order.
        end: ns, not before the start. A slice of length 0 lies inside a slice that starts at that time,
            not inside one that ends there.

    Returns:
        int64 array of shape (n,), lanes of each track counted from 0.
    """
    lanes = np.zeros(len(track), np.int64)
    order = np.lexsort((-end, start, track))
    on, begin = track[order], start[order]
    until = np.maximum(end[order], begin + 1)
    parent = enclosing(on, begin, until)
    crossing = _crossing(on, begin, until, parent)
    if crossing.any():
        # Slices nested inside a crossing slice must be assigned to a lane as well.
        rows = np.flatnonzero(chain_to(parent, np.arange(len(on)), crossing) >= 0)
        lanes[order[rows]] = _placed(on[rows], begin[rows], until[rows])
    return lanes


def _crossing(track: Int64, start: Int64, end: Int64, parent: Int64) -> Mask:
    """Which slices overlap a sibling; siblings never contain one another, so an overlap is a crossing."""
    family = np.where(parent >= 0, parent, -1 - track)
    order = np.argsort(family, kind="stable")
    overlaps = reached_before(end[order], family[order]) > start[order]
    cluster = np.cumsum(~overlaps) - 1
    result = np.zeros(len(track), np.bool_)
    result[order] = np.bincount(cluster)[cluster] > 1
    return result


def _placed(track: Int64, start: Int64, end: Int64) -> Int64:
    """Assigns lanes to slices sorted by track and start, one group of overlapping slices at a time."""
    number = np.cumsum(np.diff(track, prepend=track[:1]) != 0)
    low, span = int(start.min()), int(end.max()) - int(start.min()) + 1
    lanes = np.zeros(len(track), np.int64)
    by_choice = np.ones(len(track), np.bool_)
    if (int(number[-1]) + 1) * span < 1 << 62:
        begin, until = start - low + number * span, end - low + number * span
        before = reached_before(end, number)
        fresh = start >= before
        firsts = np.flatnonzero(fresh)
        lanes = _alternating(fresh, end > before)
        open_now = np.arange(1, len(track) + 1) - np.searchsorted(np.sort(until), begin, "right")
        by_choice = (np.maximum.reduceat(open_now, firsts) > 2)[np.cumsum(fresh) - 1]
    else:  # the keys above would overflow int64: treat each whole track as one group
        firsts = np.flatnonzero(np.diff(number, prepend=-1))
    search = _Search(_MAX_STEPS)
    chosen = firsts[by_choice[firsts]].tolist()
    lasts = np.append(firsts, len(track))[np.searchsorted(firsts, chosen) + 1].tolist()
    for first, last in zip(chosen, lasts, strict=True):
        lanes[first:last] = search.lanes(start[first:last].tolist(), end[first:last].tolist())
    return lanes


def _alternating(fresh: Mask, latest: Mask) -> Int64:
    """Lanes for groups in which at most two slices are open at once: 0 and 1 in alternation.

    The slice that is open when another starts is the one with the latest end so far, so slices that
    extend the latest end alternate between the lanes, and each other slice takes the other lane.

    Args:
        fresh: which slices are the first of their group.
        latest: which slices end later than all before them.
    """
    turn = np.cumsum(latest)
    of_group = turn[np.flatnonzero(fresh)][np.cumsum(fresh) - 1]
    lanes: Int64 = (turn - of_group + ~latest) % 2
    return lanes


@dataclass
class _Search:
    """Packs groups of crossing slices in order of their start, with backtracking.

    Attributes:
        steps: placements that may still be tried to save lanes.
    """

    steps: int

    def lanes(self, start: Sequence[int], end: Sequence[int]) -> list[int]:
        """The lane of each slice of one group, in order of start."""
        best = _first_choice(start, end)
        while (count := max(best) + 1) > 2 and len(start) <= _MAX_SEARCHED:
            lanes = self._within(start, end, count - 1)
            if lanes is None:
                break
            best = lanes
        return best

    def _within(self, start: Sequence[int], end: Sequence[int], most: int) -> list[int] | None:
        """Packs all slices into ``most`` lanes by depth-first search.

        None if that is impossible, or if the budget of steps is used up.
        """
        empty: Stacks = ((),) * most
        states: list[Stacks] = [empty]
        choices: list[Iterator[int]] = [iter(range(most))]
        chosen: list[int] = []
        while choices and self.steps > 0:
            self.steps -= 1
            row = len(choices) - 1
            lane = next(choices[-1], None)
            if lane is None:
                choices.pop()
                states.pop()
                if chosen:
                    chosen.pop()
                continue
            after = _put(states[-1], lane, start[row], end[row])
            if after is None:
                continue
            chosen.append(lane)
            if len(chosen) == len(start):
                return chosen
            states.append(after)
            # Empty lanes are equivalent: only the first of them needs to be tried.
            used = next((i for i, stack in enumerate(after) if not stack), most - 1) + 1
            choices.append(iter(range(max(used, max(chosen) + 1))))
        return None


def _put(state: Stacks, lane: int, start: int, end: int) -> Stacks | None:
    """The open ends of all lanes after adding a slice to one; None if it would cross another slice."""
    stack = tuple(e for e in state[lane] if e > start)
    if stack and stack[-1] < end:
        return None
    return (*state[:lane], (*stack, end), *state[lane + 1 :])


def _first_choice(start: Sequence[int], end: Sequence[int]) -> list[int]:
    """Best fit: each slice goes to the lane that fits it most tightly, to a new lane if none fits."""
    stacks: list[list[int]] = []
    lanes = []
    for begin, until in zip(start, end, strict=True):
        best, best_end, vacant = -1, 0, -1
        for lane, stack in enumerate(stacks):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack:
                vacant = lane if vacant < 0 else vacant
            elif stack[-1] >= until and (best < 0 or stack[-1] < best_end):
                best, best_end = lane, stack[-1]
        chosen = best if best >= 0 else vacant
        if chosen < 0:
            if len(stacks) == _MAX_COMPARED:
                return _by_vacancy(start, end)
            chosen = len(stacks)
            stacks.append([])
        stacks[chosen].append(until)
        lanes.append(chosen)
    return lanes


def _by_vacancy(start: Sequence[int], end: Sequence[int]) -> list[int]:
    """First fit: each slice goes to the lowest lane without an open slice; O(n log n) by two heaps."""
    taken: list[tuple[int, int]] = []  # end and lane of open slices
    vacant: list[int] = []
    lanes = []
    for begin, until in zip(start, end, strict=True):
        while taken and taken[0][0] <= begin:
            heapq.heappush(vacant, heapq.heappop(taken)[1])
        lane = heapq.heappop(vacant) if vacant else len(taken)
        heapq.heappush(taken, (until, lane))
        lanes.append(lane)
    return lanes


@dataclass(frozen=True, slots=True)
class Steps:
    """Begin and end events of slices in the order in which they happen, track after track.

    A slice with nothing inside begins and ends in one step.

    Attributes:
        begins: row of the slice that begins in each step, -1 if none begins; int64.
        ends: row of the slice that ends in each step, -1 if none ends; int64.
    """

    begins: Int64
    ends: Int64


def nested_sequence(track: Int64, start: Int64, end: Int64) -> Steps:
    """Orders begin and end events such that they nest on every track, also at equal times.

    Args:
        track: number of the lane of each slice, on which no two cross; see `split_lanes`.
        start: ns, in any order.
        end: ns, not before the start.
    """
    rows = len(track)
    order = np.lexsort((-end, start, track))
    on, begin = track[order], start[order]
    until = np.maximum(end[order], begin + 1)
    bounds = [0, *(np.flatnonzero(on[1:] != on[:-1]) + 1).tolist(), rows]
    closed = np.empty(rows, np.int64)  # slices that end before each begins
    after = np.empty(rows, np.int64)  # the first slice that begins after each ends
    for low, high in itertools.pairwise(bounds):
        closed[low:high] = low + np.searchsorted(np.sort(until[low:high]), begin[low:high], side="right")
        after[low:high] = low + np.searchsorted(begin[low:high], until[low:high], side="left")
    number = np.arange(rows)
    begins_at = number + closed
    inside = after - number - 1
    begins = np.full(2 * rows, -1, np.int64)
    ends = np.full(2 * rows, -1, np.int64)
    begins[begins_at] = order
    ends[begins_at[inside == 0]] = order[inside == 0]
    around = inside > 0
    ends[begins_at[around] + 2 * inside[around] + 1] = order[around]
    happens = (begins >= 0) | (ends >= 0)
    return Steps(begins[happens], ends[happens])
