"""Which blocks of one device were handed out when, from the history of the allocator and its final state.

**Lives.** A block is live from the event that handed it out to the event that took it back, as the allocator itself
counts: ``free_requested``, even if another stream still uses it. What is live when the history begins is known from
what is live at its end: blocks of the final state that no event of the history handed out, and blocks that the
history takes back without having handed them out. A history that begins with nothing live, as the naive replay of a
ring buffer does, would lose most of the memory.

**Sizes.** Events hold the bytes that were asked for. The allocator counts the bytes of the block: rounded to 512 bytes
(or as ``roundup_power2_divisions`` says), and, above 1 MiB, with up to 1 MiB more that it did not split off. The latter
depends on what was free behind the block, so blocks above 1 MiB are replayed in order: free memory of a segment is
always one stretch, because the allocator joins neighbours at once. Blocks of the final state have their sizes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Int64 = NDArray[np.int64]

ACTIONS = {
    "alloc": 0,
    "free_requested": 1,
    "free_completed": 2,
    "free": 2,  # before torch 2.1
    "segment_alloc": 3,
    "segment_map": 3,
    "segment_free": 4,
    "segment_unmap": 4,
    "oom": 5,
}
"""Numbers of the actions that change something; all others are marks in the history."""
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, OOM = range(6)
OTHER = 6
_COMPLETES, _OPENS = 10, 11
_SMALLEST, _SMALL = 512, 1 << 20  # kMinBlockSize and kSmallSize of CUDACachingAllocator
NEVER = -1
_MAX_FAILURES = 64
"""Failures for which the free memory is searched; the programs that were seen have one."""


@dataclass(frozen=True)
class Settings:
    """Settings of the allocator that decide about sizes of blocks.

    Attributes:
        expandable: whether segments grow, so that all that is left of a block is split off.
        unsplit: bytes from which on a block is never split; None: no such limit.
        divisions: steps between powers of two to which requests are rounded, by the power from 2^20 on; 0 or 1: none.
    """

    expandable: bool = False
    unsplit: int | None = None
    divisions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Events:
    """The history of one device, oldest first: as many entries as it has events.

    Attributes:
        action: as `ACTIONS`, or `OTHER`.
        address: of the block or segment.
        size: bytes that were asked for, or of the segment.
    """

    action: Int64
    address: Int64
    size: Int64


@dataclass(frozen=True)
class Blocks:
    """Blocks that are not free at the end of the history.

    Attributes:
        address, size, requested: of each block.
        allocated: whether it is handed out; else it was taken back, and another stream still uses it.
    """

    address: Int64
    size: Int64
    requested: Int64
    allocated: NDArray[np.bool_]


@dataclass(frozen=True)
class Segments:
    """Segments at the end of the history: their addresses and sizes."""

    address: Int64
    size: Int64


@dataclass
class Lives:
    """Blocks that were handed out, in order of address and time.

    Attributes:
        opened: number of the event that handed each out; `NEVER`: before the history.
        closed: number of the event that took it back; `NEVER`: live at the end.
        completed: number of the event after which it could be handed out again; `NEVER`: none.
        block: row in `Blocks` of those that are there at the end; `NEVER` for others.
        address, requested, size: of each; size is as the allocator counts it.
        inconsistent: blocks whose events contradict each other or the final state, as where events are missing.
        inferred: blocks from before the history whose size is not stated and could be larger.
    """

    opened: Int64
    closed: Int64
    completed: Int64
    block: Int64
    address: Int64
    requested: Int64
    size: Int64
    inconsistent: int = 0
    inferred: int = 0

    def rows(self, rows: Int64) -> Lives:
        """These lives, in this order."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})


_COLUMNS = ("opened", "closed", "completed", "block", "address", "requested", "size")


@dataclass(frozen=True)
class Failure:
    """An allocation that failed: number of the event, and bytes of the largest stretch that was free in a segment."""

    event: int
    largest_inactive: int | None


@dataclass
class _Free:
    """Free stretches of memory, none of which crosses the border of a segment."""

    end: dict[int, int] = field(default_factory=dict)  # by begin
    begin: dict[int, int] = field(default_factory=dict)  # by end
    borders: set[int] = field(default_factory=set)

    def add(self, begin: int, end: int) -> None:
        """Adds a stretch, and joins it with its neighbours; one that it overlaps, in a damaged history, is dropped."""
        if end not in self.borders and end in self.end:
            end = self.take(end) or end
        if begin not in self.borders and begin in self.begin:
            before = self.begin[begin]
            self.take(before)
            begin = before
        self.take(begin)
        if end in self.begin:
            self.take(self.begin[end])
        self.end[begin] = end
        self.begin[end] = begin

    def take(self, begin: int) -> int | None:
        """The end of the stretch that begins here, which is removed; None if there is none."""
        end = self.end.pop(begin, None)
        if end is not None:
            del self.begin[end]
        return end


def rounded(requested: Int64, settings: Settings) -> Int64:
    """Bytes of a block for a request, before what is not split off."""
    size = np.maximum(-(-requested // _SMALLEST) * _SMALLEST, _SMALLEST)
    if not any(count > 1 for count in settings.divisions):
        return size
    # np.log2 may round near a power of two: the next two lines mend it.
    power = np.floor(np.log2(np.maximum(requested, 1))).astype(np.int64)
    power += ((np.int64(1) << np.minimum(power + 1, 62)) <= requested).astype(np.int64)
    power -= ((np.int64(1) << power) > requested).astype(np.int64)
    # The setting roundup_power2_divisions begins at 1 MiB, 2^20.
    divisions = np.array(settings.divisions, np.int64)[np.clip(power - 20, 0, len(settings.divisions) - 1)]
    floor = np.int64(1) << power
    step = floor // np.maximum(divisions, 1)
    divided = np.where(floor == requested, requested, -(-requested // np.maximum(step, 1)) * step)
    return np.where((divisions > 1) & (requested > _SMALLEST * divisions), divided, size)


def lives_of(events: Events, blocks: Blocks, segments: Segments, settings: Settings) -> Lives:
    """Every block that was handed out, with the size that the allocator counts."""
    lives = _with_final_state(_paired(events), blocks, len(events.action))
    lives.size = rounded(lives.requested, settings)
    known = lives.block != NEVER
    lives.size[known] = blocks.size[lives.block[known]]
    if not settings.expandable:
        _with_unsplit(lives, events, segments, settings)
    return lives


def _paired(events: Events) -> Lives:
    """Events of blocks as lives, by address and order."""
    rows = np.flatnonzero(events.action <= FREE_COMPLETED)
    order = rows[np.lexsort((rows, events.address[rows]))]
    action, address = events.action[order], events.address[order]
    begins = action == ALLOC
    new = np.ones(len(order), np.bool_)
    new[1:] = begins[1:] | (address[1:] != address[:-1])
    first = np.flatnonzero(new)
    life = np.cumsum(new) - 1
    count = len(first)
    opened = np.where(begins[first], order[first], NEVER)
    closed, completed = np.full(count, NEVER), np.full(count, NEVER)
    for wanted, events_of in ((FREE_COMPLETED, completed), (FREE_REQUESTED, closed)):
        places = np.flatnonzero(action == wanted)[::-1]  # of several, the first one stays
        events_of[life[places]] = order[places]
    # A history may leave out free_requested; but what begins with its completion was taken back before.
    before = (closed == NEVER) & (completed != NEVER) & (opened == NEVER)
    requested_seen = bool((events.action == FREE_REQUESTED).any())
    closed = np.where((closed == NEVER) & ~(before & requested_seen), completed, closed)
    # The same address was handed out again.
    next_of_address = np.full(count, NEVER)
    again = np.flatnonzero(~_is_new(address[first]))
    next_of_address[again - 1] = opened[again]
    missing = (closed == NEVER) & (next_of_address != NEVER) & ~(before & requested_seen)
    closed = np.where(missing, next_of_address, closed)
    completed = np.where((completed == NEVER) & (next_of_address != NEVER), next_of_address, completed)
    requested = events.size[order[first]]
    nothing = np.full(count, NEVER)
    kept = ~(before & requested_seen)  # only another stream used them when the history began
    lives = Lives(opened, closed, completed, nothing, address[first], requested, requested, int(missing.sum()))
    return lives if kept.all() else lives.rows(np.flatnonzero(kept))


def _is_new(values: Int64) -> NDArray[np.bool_]:
    new = np.ones(len(values), np.bool_)
    new[1:] = values[1:] != values[:-1]
    return new


def _with_final_state(lives: Lives, blocks: Blocks, events: int) -> Lives:
    """The lives, with those that no event began or ended, by the blocks that are handed out at the end."""
    allocated = np.flatnonzero(blocks.allocated)
    order = allocated[np.argsort(blocks.address[allocated], kind="stable")]
    addresses = blocks.address[order]
    still = np.flatnonzero(lives.closed == NEVER)
    place = np.searchsorted(addresses, lives.address[still])
    inside = place < len(addresses)
    inside[inside] = addresses[place[inside]] == lives.address[still][inside]
    lives.block[still[inside]] = order[place[inside]]
    lost = still[~inside]
    lives.closed[lost] = lives.completed[lost] = max(events - 1, 0)
    lives.inconsistent += len(lost)
    seen = np.zeros(len(order), np.bool_)
    seen[place[inside]] = True
    rest = order[~seen]
    never = np.full(len(rest), NEVER)
    more = (never, never, never, rest, blocks.address[rest], blocks.requested[rest], blocks.size[rest])
    columns: dict[str, Any] = {
        name: np.concatenate((getattr(lives, name), of_rest)) for name, of_rest in zip(_COLUMNS, more, strict=True)
    }
    return replace(lives, **columns)


def _with_unsplit(lives: Lives, events: Events, segments: Segments, settings: Settings) -> None:
    """Sets the sizes of blocks above 1 MiB, of which a rest may not have been split off."""
    large = lives.size > _SMALL
    if not large.any():
        return
    free = _free_at_first(lives, large, events, segments)
    size, known = lives.size.tolist(), (lives.block != NEVER).tolist()
    for what, life, begin, length in _steps(lives, large, events):
        if what == _COMPLETES:
            free.add(begin, begin + size[life])
        elif what == _OPENS:
            end = free.take(begin)
            if end is None:
                continue  # events are missing
            if not known[life]:
                size[life] = _taken(size[life], end - begin, settings)
            if begin + size[life] < end:
                free.add(begin + size[life], end)
        elif what == SEGMENT_ALLOC:
            free.borders |= {begin, begin + length}
            free.add(begin, begin + length)
        else:
            free.take(begin)
    lives.size[:] = size


def _taken(size: int, available: int, settings: Settings) -> int:
    """Bytes that are handed out of a free stretch: all of it, if too little is left."""
    if available - size > _SMALL and (settings.unsplit is None or size < settings.unsplit):
        return size
    return max(available, size)


def _steps(lives: Lives, large: NDArray[np.bool_], events: Events) -> Iterable[tuple[int, int, int, int]]:
    """Events of large blocks and of segments in their order: what happens, the life, and the address and bytes."""
    rows = np.flatnonzero(large)
    opened, completed = rows[lives.opened[rows] != NEVER], rows[lives.completed[rows] != NEVER]
    of_segments = np.flatnonzero((events.action == SEGMENT_ALLOC) | (events.action == SEGMENT_FREE))
    number = np.concatenate((lives.completed[completed], lives.opened[opened], of_segments))
    life = np.concatenate((completed, opened, np.full(len(of_segments), NEVER)))
    what = np.concatenate(
        (np.full(len(completed), _COMPLETES), np.full(len(opened), _OPENS), events.action[of_segments])
    )
    address = np.concatenate((lives.address[completed], lives.address[opened], events.address[of_segments]))
    length = np.concatenate((np.zeros(len(completed) + len(opened), np.int64), events.size[of_segments]))
    order = np.argsort(number, kind="stable")  # at one event, an end comes before a beginning
    columns = (column[order].tolist() for column in (what, life, address, length))
    return zip(*columns, strict=True)


def first_segments(events: Events, segments: Segments) -> Segments:
    """The segments when the history began, from those at its end and their events, backwards."""
    rows = np.flatnonzero((events.action == SEGMENT_ALLOC) | (events.action == SEGMENT_FREE))
    if not len(rows):
        return segments
    address, first = np.unique(events.address[rows], return_index=True)
    freed = events.action[rows[first]] == SEGMENT_FREE
    kept = ~np.isin(segments.address, address)
    return Segments(
        np.concatenate((segments.address[kept], address[freed])),
        np.concatenate((segments.size[kept], events.size[rows[first]][freed])),
    )


def _free_at_first(lives: Lives, large: NDArray[np.bool_], events: Events, segments: Segments) -> _Free:
    """What was free in segments of large blocks when the history began; sizes of blocks that nothing states are set."""
    at_first = first_segments(events, segments)
    order = np.argsort(at_first.address)
    begins, ends = at_first.address[order], (at_first.address + at_first.size)[order]
    live = np.flatnonzero((lives.opened == NEVER) & large)
    live = live[np.argsort(lives.address[live], kind="stable")]
    segment = np.searchsorted(begins, lives.address[live], "right") - 1
    inside = (segment >= 0) & (lives.address[live] < ends[np.maximum(segment, 0)]) if len(begins) else segment >= 0
    live, segment = live[inside], segment[inside]
    address = lives.address[live]
    limit = ends[segment] if len(live) else address
    limit[:-1] = np.minimum(limit[:-1], address[1:])
    unstated = lives.block[live] == NEVER
    whole = unstated & (limit - address > lives.size[live]) & (limit - address - lives.size[live] <= _SMALL)
    lives.size[live[whole]] = (limit - address)[whole]
    lives.inferred = int(unstated.sum())
    free = _Free(borders={*begins.tolist(), *ends.tolist()})
    # Between the end of a block, or the begin of a segment, and the next begin of a block, or the end of the segment.
    used = np.flatnonzero(_has_large(begins, ends, lives, large))
    stretch_begins = np.concatenate((begins[used], address + lives.size[live]))
    stretch_begins.sort()
    stretch_ends = np.concatenate((ends[used], address))
    stretch_ends.sort()
    for begin, end in zip(stretch_begins.tolist(), stretch_ends.tolist(), strict=True):
        if begin < end:
            free.add(begin, end)
    return free


def _has_large(begins: Int64, ends: Int64, lives: Lives, large: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which segments ever hold a large block; those of small ones have no stretches here."""
    has = np.zeros(len(begins), np.bool_)
    address = lives.address[large]
    segment = np.searchsorted(begins, address, "right") - 1
    inside = segment >= 0
    inside[inside] = address[inside] < ends[segment[inside]]
    has[segment[inside]] = True
    return has


def failures_of(events: Events, lives: Lives, segments: Segments, settings: Settings) -> list[Failure]:
    """The allocations that failed, the last ones with the largest free stretch of that time.

    Segments that grow are not searched: the allocator gives back what is free at their ends.
    """
    numbers = np.flatnonzero(events.action == OOM).tolist()
    searched = set() if settings.expandable else set(numbers[-_MAX_FAILURES:])
    return [Failure(n, _largest(n, events, lives, segments) if n in searched else None) for n in numbers]


def _largest(number: int, events: Events, lives: Lives, segments: Segments) -> int:
    """Bytes of the largest free stretch of any segment at an event."""
    place = _at(number, events, segments)
    active = (lives.opened < number) & ((lives.completed == NEVER) | (lives.completed > number))
    begins = np.concatenate((place.address, (lives.address + lives.size)[active]))
    ends = np.concatenate((place.address + place.size, lives.address[active]))
    begins.sort()
    ends.sort()
    return int((ends - begins).max(initial=0)) if len(begins) == len(ends) else 0


def _at(number: int, events: Events, segments: Segments) -> Segments:
    """The segments just before an event."""
    first = first_segments(events, segments)
    held = dict(zip(first.address.tolist(), first.size.tolist(), strict=True))
    before = events.action[:number]
    for row in np.flatnonzero((before == SEGMENT_ALLOC) | (before == SEGMENT_FREE)).tolist():
        if before[row] == SEGMENT_ALLOC:
            held[int(events.address[row])] = int(events.size[row])
        else:
            held.pop(int(events.address[row]), None)
    return Segments(np.array([*held], np.int64), np.array([*held.values()], np.int64))
