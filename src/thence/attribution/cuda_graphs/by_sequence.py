"""Labels graph replays by matching the order of their activities with the order of launches.

The launches are those of a capture, or of an iteration of an eager run. A replay belongs to a sequence of launches if
at least `MIN_SHARE` of both can be matched; if some sequences match as a whole, only these count. An activity that can
be only one launch gets its places. One that can be several launches gets the places that these have in common, and one
that can also be none of them gets nothing. So a kernel that only one side has costs the others nothing.

An alignment pairs launches with activities in increasing order, each at most once, and only pairs that fit: `match`
gets a weight for each pair of kinds, 0 for those that cannot belong together. Of all alignments, those with the
largest sum of weights are considered. An activity is matched for certain only if all of them pair it with one and the
same launch. So a kernel that one side lacks leaves its neighbours matched, and a sequence in which it could be any of
several equal kernels stays open, with the launches that remain possible for each activity.

Long sequences are first divided at pairs of which each side fits nothing else: unique kernels that are in the same
order on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thence.attribution.cuda_graphs.alignment import FOREIGN, UNDECIDED
from thence.attribution.cuda_graphs.by_alignment import MIN_SHARE
from thence.attribution.cuda_graphs.signatures import short_name
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.assigned_labels import AssignedLabels, PlaceRows
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.model.arrays import Int64, Mask


_MARGIN = 4
"""By how many kernels more than the most similar capture another may differ from a replay that fits none as a whole:
what differs (a kernel too many, one lost) may hide which of the two it was."""
_ROUNDS = 3  # of removing doubtful pairs
UNKNOWN_ORDER = "it ran on several streams and its nodes have no numbers: the order of its capture is unknown"
"""Why a replay is not matched in order."""


@dataclass(frozen=True)
class LaunchSequence:
    """Consecutive launches: a capture, or an iteration of an eager run.

    Attributes:
        title: its name in messages.
        kind: number of the kind of each launch, row of `BySequence.weight`.
        place: number in the place_rows of the places of each launch.
    """

    title: str
    kind: Int64
    place: Int64


@dataclass(frozen=True)
class _Fit:
    """A sequence of launches matched to one order of activities.

    Attributes:
        sequence: of which launches that the replay has nowhere are removed, if it is a part of an eager run.
        times: how often the replay repeats the sequence.
        turns: how often the sequence repeats the replay.
        matched: positions in the repeated sequence and the repeated replay.
    """

    sequence: LaunchSequence
    times: int
    turns: int
    matched: Matched

    @cached_property
    def share(self) -> float:
        """The share of launches and activities that can be matched."""
        longest = max(self.times * len(self.sequence.kind), len(self.matched.open))
        return self.matched.pairs / longest

    @cached_property
    def unmatched(self) -> int:
        """How many launches and activities cannot be matched."""
        count = self.times * len(self.sequence.kind) + len(self.matched.open)
        return count - 2 * self.matched.pairs

    def pairs(self, count: int) -> tuple[Int64, Int64, Mask]:
        """Place and activity of each possible pair, and which of ``count`` activities can also have none.

        If the sequence repeats the replay, an activity needs a launch in one of the repetitions only.
        """
        matched = self.matched
        opened = matched.open.copy()
        opened[np.bincount(matched.activity, minlength=len(opened)) == 0] = True
        always = np.ones(count, np.bool_)
        always[np.flatnonzero(~opened) % count] = False
        kept = ~opened[matched.activity] | always[matched.activity % count]
        place = self.sequence.place[matched.launch[kept] % len(self.sequence.place)]
        return place, matched.activity[kept] % count, always


@dataclass
class BySequence:
    """The sequences of launches to which the replays of one rank can belong.

    Attributes:
        replays: the replays to be labelled.
        place_rows: the places by number; labelling adds to it.
        sequences: the launches.
        weight: for each kind of launch and each variant of the replays, whether they fit (`match`).
        rule: code of the rule for activities that can be only one launch.
        repeated: code of the rule if the replay repeats the sequence; None if sequences are whole captures, of which
            a replay holds each launch once.
        doubted: for each kind of launch, whether pairs with it are doubted if they occur nowhere else.
        one_stream: whether activities of a replay that ran on one stream are in the order of the launches.
        ordered: rows of gpu that were labelled, with the number of kernels among them, and of kernels that fit.
    """

    replays: Replays
    place_rows: PlaceRows
    sequences: Sequence[LaunchSequence]
    weight: NDArray[np.int8]
    rule: str
    repeated: str | None
    doubted: Mask
    one_stream: bool
    ordered: list[tuple[Int64, int, int]] = field(default_factory=list)
    _known: dict[tuple[bytes, bytes], Matched] = field(default_factory=dict)

    def put(self, labels: AssignedLabels, rows: Int64) -> tuple[Mask, list[str], list[str]]:
        """Labels launches.

        Args:
            labels: what is known so far; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            which launches belong to a sequence, why others do not, and notes on what differs.
        """
        done = np.zeros(len(rows), np.bool_)
        reasons, notes = [], []
        for alike in self.replays.sequences(rows):
            if not self.sequences or not (alike.numbered or (alike.one_stream and self.one_stream)):
                reasons += [UNKNOWN_ORDER] if self.sequences else []
                continue
            variant = self.replays.variant[alike.rows[0]]
            fits, reason = self._fits(variant)
            if not fits:
                reasons.append(reason)
                continue
            done[alike.launch] = True
            notes += self._put(labels, alike.rows, variant, fits)
        return done, reasons, notes

    def difference(self, variant: Int64) -> str:
        """A sentence on what a replay and the most similar sequence have in common, by their kernels alone."""
        parts = [self._fitted(sequence, variant) for sequence in self.sequences]
        shares = [self._common(variant, *part) for part in parts]
        return self._difference(variant, *parts[int(np.argmax(shares))], max(shares))

    def _common(self, variant: Int64, part: LaunchSequence, times: int, turns: int) -> float:
        """The share of a sequence and a replay that can be matched at most."""
        launches, activities = np.tile(part.kind, times), np.tile(variant, turns)
        if not len(launches):
            return 0.0
        longest = max(len(launches), len(activities))
        return max_pairs(self.weight, launches, activities) / longest

    def _fits(self, variant: Int64) -> tuple[list[_Fit], str]:
        """The sequences to which a replay can belong; why there are none."""
        fits, most, why = [], -1.0, ""
        for sequence in self.sequences:
            part, times, turns = self._fitted(sequence, variant)
            share = self._common(variant, part, times, turns)
            reason = None
            if share >= MIN_SHARE:
                matched = self._matched(np.tile(part.kind, times), np.tile(variant, turns))
                fit = _Fit(part, times, turns, matched)
                share = fit.share
                if share >= MIN_SHARE and self.doubted.any() and not self._confirmed(fit, variant):
                    reason = f"no kernel has a name that confirms the order of {part.title}, and counts prove nothing"
                elif share >= MIN_SHARE:
                    fits.append(fit)
            if share > most:
                most, why = share, reason or self._difference(variant, part, times, turns, share)
        complete = [fit for fit in fits if fit.share == 1 and not fit.matched.open.any()]
        margin = _MARGIN if self.repeated is None else 0
        least = min((fit.unmatched for fit in fits), default=0)
        return complete or [fit for fit in fits if fit.unmatched <= least + margin], why

    def _fitted(self, sequence: LaunchSequence, variant: Int64) -> tuple[LaunchSequence, int, int]:
        """A sequence, and how often the replay repeats it, or it the replay."""
        if self.repeated is None:
            return sequence, 1, 1
        used = np.isin(sequence.kind, np.nonzero(self.weight[:, np.unique(variant)])[0])
        part = LaunchSequence(sequence.title, sequence.kind[used], sequence.place[used])
        ratio = len(variant) / max(len(part.kind), 1)
        return part, max(1, round(ratio)), max(1, round(1 / ratio)) if ratio else 1

    def _matched(self, launches: Int64, activities: Int64) -> Matched:
        """The match of two sequences, without pairs that other pairs make doubtful."""
        key = launches.tobytes(), activities.tobytes()
        if key not in self._known:
            weight, matched = self.weight, match(self.weight, launches, activities)
            for _ in range(_ROUNDS if self.doubted.any() else 0):
                activity = np.flatnonzero(matched.only() >= 0)
                kind, variant = launches[matched.only()[activity]], activities[activity]
                odd = _doubtful_pairs(kind, variant, self.doubted[kind])
                if not odd.any():
                    break
                weight = weight.copy()
                weight[kind[odd], variant[odd]] = 0
                matched = match(weight, launches, activities)
            self._known[key] = matched
        return self._known[key]

    def _difference(self, variant: Int64, part: LaunchSequence, times: int, turns: int, share: float) -> str:
        """A sentence on what a replay and a sequence have in common."""
        names = self.replays.kinds.frame["name"]
        launches, activities = times * len(part.kind), turns * len(variant)
        paired = round(share * max(launches, activities) / turns)
        unlike = ~np.isin(variant, np.nonzero(self.weight[np.unique(part.kind)])[1])
        text = (
            f"at most {paired:,} of its {len(variant):,} activities can be matched in order with the "
            f"{len(part.kind):,} launches of {part.title}"
        )
        if unlike.any():
            position = int(unlike.argmax())
            name = short_name(names[int(variant[position])] or "")
            text += f", which has no kernel like activity {position}, `{name}`"
        return text

    def _put(self, labels: AssignedLabels, rows: Int64, variant: Int64, fits: Sequence[_Fit]) -> list[str]:
        """Stores the places of launches, whose rows are in order; returns notes."""
        count = len(variant)
        of_fits = [fit.pairs(count) for fit in fits]
        opened = np.any([without for _, _, without in of_fits], axis=0)
        pairs = [np.stack([activity, place]) for place, activity, _ in of_fits]
        activity, place = np.unique(np.concatenate(pairs, axis=1), axis=1)
        possible = np.bincount(activity, minlength=count)
        number = np.where(opened & (possible > 0), UNDECIDED, FOREIGN)
        certain = ~opened & (possible == 1)
        number[certain] = place[certain[activity]]
        several = ~opened & (possible > 1)
        if several.any():
            chosen = several[activity]
            common = self.place_rows.shared(activity[chosen], place[chosen])
            number[several] = np.where(common < 0, UNDECIDED, common)
        repeats = self.repeated is not None and any(fit.times > 1 for fit in fits)
        own = str(self.repeated) if repeats else self.rule
        codes = np.where(certain, CODES.index(own), CODES.index("capture_shared"))
        numbers, rules = (np.broadcast_to(x, rows.shape).reshape(-1) for x in (number, codes))
        labels.put(rows.reshape(-1), numbers, rules)
        labels.confidence[rows] = (number > UNDECIDED).mean()
        kernels = int((self._is_kernel[variant] & (number >= 0)).sum())
        confirmed = self._confirmed(fits[0], variant)
        labelled = rows[:, number >= 0].reshape(-1)
        self.ordered.append((labelled, kernels * len(rows), confirmed * len(rows)))
        return self._notes(number, variant, fits)

    def _confirmed(self, fit: _Fit, variant: Int64) -> int:
        """How many kernels fit the only launch that they can be."""
        launch = fit.matched.only()[: len(variant)]
        kernels = (launch >= 0) & self._is_kernel[variant]
        kinds = fit.sequence.kind[launch[kernels] % len(fit.sequence.kind)]
        return int((self.weight[kinds, variant[kernels]] == FITS).sum())

    @cached_property
    def _is_kernel(self) -> Mask:
        """Which variants of the replays are kernels."""
        return np.asarray((self.replays.kinds.frame["kind"] == "kernel").to_numpy(), np.bool_)

    def _notes(self, number: Int64, variant: Int64, fits: Sequence[_Fit]) -> list[str]:
        """Sentences on repetitions, and on what was not matched."""
        notes, fit = [], fits[0]
        if self.repeated is not None and fit.times > 1:
            notes.append(repetition(fit.sequence.title, fit.times))
        left = np.flatnonzero(number <= -2)
        spare = fit.times * len(fit.sequence.kind) - len(np.unique(fit.matched.launch))
        if len(left) or spare:
            text = f"{len(left):,} of its {len(number):,} activities"
            if len(left):
                name = self.replays.kinds.frame["name"][int(variant[left[0]])]
                text += f" (the first is activity {left[0]}, `{short_name(name or '')}`)"
            notes.append(
                f"{text} and {spare:,} of the {fit.times * len(fit.sequence.kind):,} launches of {fit.sequence.title} "
                "have no certain counterpart; all others are in the same order"
            )
        return notes


def _doubtful_pairs(kind: Int64, variant: Int64, doubted: Mask) -> Mask:
    """Pairs of launch and kernel that other pairs make doubtful.

    A launch in another position shifts the pairs after it. This shows where two neighbouring pairs occur only once,
    although launch and kernel of each occur several times in another pair, as in equal layers. A single such pair
    proves nothing.

    Args:
        kind: kind of the launch of each pair, in order.
        variant: kernel of each pair.
        doubted: which pairs may be doubted.
    """
    pair = variant * (int(kind.max(initial=0)) + 1) + kind
    _, of_pair, count = np.unique(pair, return_inverse=True, return_counts=True)
    most_of_variant = np.zeros(int(variant.max(initial=0)) + 1, np.int64)
    most_of_kind = np.zeros(int(kind.max(initial=0)) + 1, np.int64)
    np.maximum.at(most_of_variant, variant, count[of_pair])
    np.maximum.at(most_of_kind, kind, count[of_pair])
    odd: Mask = doubted & (count[of_pair] == 1) & (most_of_variant[variant] > 1) & (most_of_kind[kind] > 1)
    neighbours = np.zeros(len(odd), np.bool_)
    neighbours[1:] |= odd[:-1]
    neighbours[:-1] |= odd[1:]
    return odd & neighbours


def repetition(title: str, times: int) -> str:
    """A note that replays hold some launches several times."""
    return f"it repeats the kernels of {title} {times} times; every repetition gets the same labels"


# ---- Matching two sequences by their order


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

    launch: Int64
    activity: Int64
    open: Mask
    pairs: int

    def only(self) -> Int64:
        """For each activity, the position of the only launch that it can be, -1 where there is none or several."""
        count = np.bincount(self.activity, minlength=len(self.open))
        only = np.full(len(self.open), -1)
        only[self.activity] = self.launch
        only[(count != 1) | self.open] = -1
        return only


def match(weight: NDArray[np.int8], launches: Int64, activities: Int64) -> Matched:
    """Matches activities to launches.

    Args:
        weight: 0 to 2 for each kind of launch (row) and kind of activity (column).
        launches: kind of each launch, in order.
        activities: kind of each activity, in order.
    """
    pairs: list[tuple[Int64, Int64]] = []
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


def max_pairs(weight: NDArray[np.int8], launches: Int64, activities: Int64) -> int:
    """The most pairs that an alignment can have, by counting the launches and activities that fit anything."""
    fitting = weight[np.ix_(np.unique(launches), np.unique(activities))] > 0
    by_launch = np.bincount(launches)[np.unique(launches)][fitting.any(axis=1)].sum()
    by_activity = np.bincount(activities)[np.unique(activities)][fitting.any(axis=0)].sum()
    return int(min(by_launch, by_activity))


def _unique(weight: NDArray[np.int8], launches: Int64, activities: Int64) -> tuple[Int64, Int64]:
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


def _possible(weight: NDArray[np.int8], launches: Int64, activities: Int64) -> tuple[Int64, Int64, Mask, int]:
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
    pair_positions = []
    for i in range(len(launches) - 1, -1, -1):
        with_pair = rest[1:] + columns[launches[i]]
        fits = columns[launches[i]] > 0
        paired = fits & (best[i, :-1] + with_pair == most)
        pair_positions.append(np.flatnonzero(paired))
        np.maximum(rest[:-1], np.where(fits, with_pair, 0), out=rest[:-1])
        rest = np.maximum.accumulate(rest[::-1])[::-1]
        unmatched |= best[i, :-1] + rest[1:] == most
    counts = [len(positions) for positions in pair_positions]
    launch = np.repeat(np.arange(len(launches) - 1, -1, -1), counts)
    activity = np.concatenate(pair_positions).astype(np.int64)
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
