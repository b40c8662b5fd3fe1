"""Pairs the calls of two participants of a group where no sequence number identifies them.

A profile may begin later on one rank, end earlier, or have lost calls in between, so counting from the
start would pair the wrong calls. Each call is a token (a number for what it moves); the candidates are runs of equal
tokens at a common offset. Where steps repeat, several offsets fit, and times decide: for calls that end together,
only the right offset makes the difference of their ends constant (the difference of the clocks).

    deviation of a pair = end on the second - end on the first
    shift of a run      = median of its deviations
    residual of a run   = median of |deviation - shift|; of |deviation| if both have the same clock

The longest runs are compared, and the run with the least residual is chosen if no other run fits about as
well. The calls around it are paired in further blocks with the same shift; the remaining calls have no partner.

The ends of calls that need not end together, such as broadcasts and small sends, carry little information, since a
sender can be several calls ahead (ends of buffered sends look just like those of earlier receives). For such calls
the offset at which every call of both has a partner is chosen, else the only candidate if there is just one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.model.thresholds import CALLS_ALIGNED_NS, TIMESTAMP_NS

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from thence.model.arrays import Int64, Mask


_ABOUT_AS_WELL = 3.0
"""A run fits about as well as the best if its residual is at most this many times the least, plus `TIMESTAMP_NS`."""
_FARTHER = 10
"""... if the calls of the other offsets end at least this many times farther apart."""
_FAR_OFF = 20
"""A pair is removed from a run if its deviation is farther from the shift than this many times the residual, ..."""
_FAR_OFF_NS = 50_000
"""... than this, ..."""
_OF_SPACING = 0.25
"""... and than this share of the distance to the end of the nearest other call."""
_ALL_OFFSETS = 1024
"""With up to this many calls, all offsets are tried; with more, only offsets at which windows of calls are equal."""
_WINDOW, _PROBES, _MAX_OFFSETS = 16, 256, 1024
_CHECKED = 64
"""Number of sampled calls that are compared before all calls are."""
_MAX_BLOCKS = 10_000
_SAMPLE = 400
"""Approximate number of pairs of a run from which its shift and residual are computed."""


@dataclass(frozen=True)
class Calls:
    """The calls of one participant, in the order of their launch.

    Attributes:
        token: equal numbers for calls that may be the same call, int64 of shape (n,).
        end: ns, int64 of shape (n,).
        joint: whether the call ends at the same time on all participants, bool of shape (n,).
    """

    token: Int64
    end: Int64
    joint: Mask

    def part(self, first: int, last: int) -> Calls:
        """The calls from ``first`` up to ``last``."""
        return Calls(self.token[first:last], self.end[first:last], self.joint[first:last])


@dataclass(frozen=True)
class Pairs:
    """Calls of two participants that belong together.

    Attributes:
        first, second: positions of the calls of each pair, ascending, int64 of shape (pairs,).
        ambiguous: how many offsets fit about equally well, if that is why there are no pairs; else 0.
    """

    first: Int64
    second: Int64
    ambiguous: int = 0


@dataclass(frozen=True)
class _Run:
    """A run of calls with equal tokens: ``first + i`` and ``second + i``, for i below ``length``."""

    first: int
    second: int
    length: int
    shift: float = 0.0
    residual: float = 0.0
    apart: float = 0.0


_NO_ROWS = np.empty(0, np.int64)


def pair_calls(a: Calls, b: Calls, *, one_clock: bool) -> Pairs:
    """Pairs the calls of two participants.

    Args:
        a: calls of the first.
        b: calls of the second.
        one_clock: whether the times of both are from the same clock.
    """
    runs = _longest_runs(a.token, b.token)
    rated = [_rated(a, b, run, one_clock=one_clock) for run in runs]
    if not rated:
        return Pairs(_NO_ROWS, _NO_ROWS)
    if a.joint.any() and b.joint.any():
        chosen, fitting = _chosen(rated, one_clock=one_clock)
    else:
        whole = len(a.token), len(b.token)
        chosen, fitting = _by_order(rated, whole)
    if chosen is None:
        return Pairs(_NO_ROWS, _NO_ROWS, fitting)
    allowed = max(_FAR_OFF * chosen.residual, _FAR_OFF_NS)
    blocks = sorted(_blocks(a, b, chosen, allowed), key=lambda run: run.first)
    steps = [np.arange(run.length) for run in blocks]
    first = [run.first + step for run, step in zip(blocks, steps, strict=True)]
    second = [run.second + step for run, step in zip(blocks, steps, strict=True)]
    return Pairs(np.concatenate(first), np.concatenate(second))


def _chosen(rated: list[_Run], *, one_clock: bool) -> tuple[_Run | None, int]:
    """The run that fits best, None if runs with another shift fit about as well; and the number that fit."""
    best = min(rated, key=lambda run: (run.residual, -run.length))
    limit = _ABOUT_AS_WELL * best.residual + TIMESTAMP_NS
    fitting = [run for run in rated if run.residual <= limit]
    others = [run for run in fitting if abs(run.shift - best.shift) > limit]
    if not others:  # runs with the same shift are blocks of one pairing, with lost calls between
        return best, 1
    if not one_clock:
        near = min(fitting, key=lambda run: run.apart)
        others = [run for run in fitting if abs(run.shift - near.shift) > limit]
        far = min((run.apart for run in others), default=math.inf)
        if near.apart <= CALLS_ALIGNED_NS and far >= _FARTHER * max(near.apart, 1.0):
            return near, 1
    return None, len(others) + 1


def _by_order(rated: list[_Run], whole: tuple[int, int]) -> tuple[_Run | None, int]:
    """As `_chosen`, for calls that need not end together.

    Args:
        rated: the longest runs.
        whole: the number of calls of each participant.
    """
    for run in rated:
        if (run.length, run.length) == whole:
            return run, 1
    return (rated[0], 1) if len(rated) == 1 else (None, len(rated))


def _blocks(a: Calls, b: Calls, run: _Run, allowed: float) -> Iterator[_Run]:
    """Yields the run without pairs whose deviation is far from the shift, and further runs around it with its shift."""
    shift = run.shift
    waiting = [(0, len(a.token), 0, len(b.token))]
    for _ in range(_MAX_BLOCKS):
        if not waiting:
            return
        a_low, a_high, b_low, b_high = waiting.pop()
        inside = a.part(a_low, a_high), b.part(b_low, b_high)
        if run.length:  # the first region contains the chosen run
            blocks, run = run, _Run(0, 0, 0)
        else:
            blocks = _with_shift(*inside, shift, allowed)
        if not blocks.length:
            continue
        low, high = _kept(*inside, blocks, shift, allowed)
        block = _Run(blocks.first + low + a_low, blocks.second + low + b_low, high - low)
        yield block
        waiting.append((a_low, block.first, b_low, block.second))
        waiting.append((block.first + block.length, a_high, block.second + block.length, b_high))


def _with_shift(a: Calls, b: Calls, shift: float, allowed: float) -> _Run:
    """The longest run whose ends differ by about the shift; among equally long runs, the one nearest to the shift."""
    offsets = _offsets_at(a.end, b.end, shift, allowed)
    rated = (_rated(a, b, run, one_clock=False) for run in _runs(a.token, b.token, offsets))
    fitting = [run for run in rated if abs(run.shift - shift) <= allowed]
    return max(fitting, key=lambda run: (run.length, -abs(run.shift - shift)), default=_Run(0, 0, 0))


def _kept(a: Calls, b: Calls, run: _Run, shift: float, allowed: float) -> tuple[int, int]:
    """Begin and end (exclusive) of the longest part of a run without a pair whose deviation is far from the shift."""
    deviation, joint = _deviations(a, b, run)
    far = np.abs(deviation - shift)
    spacing = np.minimum(
        _spacing(a)[run.first : run.first + run.length], _spacing(b)[run.second : run.second + run.length]
    )
    return _longest(~(joint & (far > allowed) & (far > _OF_SPACING * spacing)))


def _spacing(calls: Calls) -> Int64:
    """The time between the end of each call and the end of the call before or after it, whichever is nearer."""
    apart = np.abs(np.diff(calls.end))
    far = np.full(1, np.iinfo(np.int64).max)
    nearer: Int64 = np.minimum(np.concatenate([far, apart]), np.concatenate([apart, far]))
    return nearer


def _deviations(a: Calls, b: Calls, run: _Run) -> tuple[npt.NDArray[np.float64], Mask]:
    """The deviation of each pair, and which pairs are of calls that end together."""
    ours, theirs = (slice(run.first, run.first + run.length), slice(run.second, run.second + run.length))
    joint = a.joint[ours] & b.joint[theirs]
    return (b.end[theirs] - a.end[ours]).astype(np.float64), joint


def _rated(a: Calls, b: Calls, run: _Run, *, one_clock: bool) -> _Run:
    """The run with its shift, its residual, and the median distance of the ends by the recorded clocks."""
    deviation, joint = _deviations(a, b, run)
    if joint.any():
        deviation = deviation[joint]
    deviation = deviation[:: max(1, len(deviation) // _SAMPLE)]
    shift = _median(deviation)
    from_shift = deviation if one_clock else deviation - shift
    residual, apart = _median(np.abs(from_shift)), _median(np.abs(deviation))
    return _Run(run.first, run.second, run.length, shift, residual, apart)


def _median(values: npt.NDArray[np.float64]) -> float:
    """As `np.median`, but faster for a few hundred numbers: it is called a hundred thousand times."""
    ordered = np.sort(values)
    half = len(ordered) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _offsets_at(a: Int64, b: Int64, shift: float, allowed: float) -> tuple[int, int]:
    """The least and the largest offset at which the median deviation of a run can be within ``allowed`` of the shift.

    In such a run, some deviation is at most ``shift + allowed``, and some is at least ``shift - allowed``. So one
    of its calls of b is paired with a call of a that ends late enough, and one with a call that ends early enough.
    """
    if not len(a) or not len(b):
        return 0, -1
    number = np.arange(len(b))
    latest_before = np.maximum.accumulate(a)
    earliest_after = np.minimum.accumulate(a[::-1])[::-1]
    least = np.searchsorted(latest_before, b - shift - allowed, side="left") - number
    most = np.searchsorted(earliest_after, b - shift + allowed, side="right") - 1 - number
    return int(least.min()), int(most.max())


def _runs(a: Int64, b: Int64, between: tuple[float, float] = (-math.inf, math.inf)) -> Iterator[_Run]:
    """Yields the longest run of equal tokens at each offset within the bounds at which tokens are equal."""
    least, most = between
    for offset in _offsets(a, b):
        if least <= offset <= most and (run := _run_at(a, b, offset)).length:
            yield run


def _run_at(a: Int64, b: Int64, offset: int) -> _Run:
    """The longest run of equal tokens at an offset; of length 0 if there is none."""
    low, high = max(0, -offset), min(len(b), len(a) - offset)
    begin, end = _longest(a[low + offset : high + offset] == b[low:high])
    return _Run(low + begin + offset, low + begin, end - begin)


def _longest_runs(a: Int64, b: Int64) -> list[_Run]:
    """The runs of `_runs` that are longer than half of the longest run, in the order of `_runs`.

    Up to `_ALL_OFFSETS` calls, all offsets are tried at once. With more calls, offsets at which more of a sample of
    calls agree are tried first, so that most others can be skipped.
    """
    if max(len(a), len(b)) <= _ALL_OFFSETS:
        return _longest_of_all(a, b)
    runs, longest = [], 0
    for offset in sorted(_offsets(a, b), key=lambda offset: -_agreeing(a, b, offset)):
        if not _may_be_long(a, b, offset, longest):
            continue
        run = _run_at(a, b, offset)
        longest = max(longest, run.length)
        runs.append(run)
    kept = [run for run in runs if 2 * run.length > longest]
    return sorted(kept, key=lambda run: run.first - run.second)


def _longest_of_all(a: Int64, b: Int64) -> list[_Run]:
    """As `_longest_runs`, for every offset, from one boolean table of equal tokens with a row for each offset."""
    if not len(a) or not len(b):
        return []
    # int16 is compared faster; numbers from 0 leave -1 for positions outside of a.
    token = np.unique(np.concatenate([a, b]), return_inverse=True)[1].astype(np.int16)
    outside = np.full(len(b) - 1, -1, np.int16)
    around = np.lib.stride_tricks.sliding_window_view(np.concatenate([outside, token[: len(a)], outside]), len(b))
    offset = np.arange(1 - len(b), len(a))
    position = np.arange(len(b), dtype=np.int16)
    equal = around == token[len(a) :]
    last_other = np.maximum.accumulate(np.where(equal, np.int16(-1), position), axis=1)
    length = position - last_other
    end = length.argmax(axis=1)
    longest = length[np.arange(len(offset)), end].astype(np.int64)
    begin = end - longest + 1
    kept = np.flatnonzero(2 * longest > longest.max())
    return [_Run(int(begin[row] + offset[row]), int(begin[row]), int(longest[row])) for row in kept]


def _agreeing(a: Int64, b: Int64, offset: int) -> int:
    """The number of calls in a sample whose tokens are equal at an offset."""
    low, high = max(0, -offset), min(len(b), len(a) - offset)
    sampled = slice(low, high, max(1, len(b) // _CHECKED))
    return int(np.count_nonzero(a[low + offset : high + offset : sampled.step] == b[sampled]))


def _may_be_long(a: Int64, b: Int64, offset: int, longest: int) -> bool:
    """Whether a run at an offset can be longer than half of the longest known run.

    Such a run covers at least one of the consecutive blocks of a quarter of the longest length, so all sampled calls
    of that block have equal tokens.
    """
    block = longest // 4
    if block < 4 * _CHECKED:
        return True
    low, high = max(0, -offset), min(len(b), len(a) - offset)
    begins = np.arange(low, high - block + 1, block)
    sampled = begins[:, None] + np.arange(0, block, block // _CHECKED)
    return bool((a[sampled + offset] == b[sampled]).all(axis=1).any())


def _longest(equal: Mask) -> tuple[int, int]:
    """Begin and end (exclusive) of the longest stretch of True; (0, 0) if there is none."""
    bounds = np.concatenate([[-1], np.flatnonzero(~equal), [len(equal)]])
    gaps = np.diff(bounds)
    longest = int(np.argmax(gaps))
    begin = int(bounds[longest]) + 1
    length = int(gaps[longest]) - 1
    return (begin, begin + length) if length else (0, 0)


def _offsets(a: Int64, b: Int64) -> list[int]:
    """Offsets (position in a minus position in b) at which calls may be equal."""
    if not len(a) or not len(b):
        return []
    if max(len(a), len(b)) <= _ALL_OFFSETS:
        return list(range(1 - len(b), len(a)))
    width = min(_WINDOW, len(a), len(b))
    ours, theirs = _windows(a, width), _windows(b, width)
    probes = np.unique(np.linspace(0, len(theirs) - 1, _PROBES).astype(np.int64))
    order = np.argsort(ours, kind="stable")
    low = np.searchsorted(ours[order], theirs[probes], side="left")
    high = np.searchsorted(ours[order], theirs[probes], side="right")
    differences = [
        order[i:j][:: max(1, (j - i) // _MAX_OFFSETS)] - probe for i, j, probe in zip(low, high, probes, strict=True)
    ]
    offsets, counts = np.unique(np.concatenate(differences), return_counts=True)
    most = np.argsort(-counts, kind="stable")[:_MAX_OFFSETS]
    return [int(offset) for offset in np.sort(offsets[most])]


def _windows(token: Int64, width: int) -> Int64:
    """A hash of every window of calls; equal windows have equal hashes."""
    windows = np.lib.stride_tricks.sliding_window_view(token, width)
    mixed = np.zeros(len(windows), np.uint64)
    for column in range(width):
        # 2^64 / golden ratio: odd, with its bits well mixed.
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + windows[:, column].astype(np.uint64)
    return mixed.view(np.int64)
