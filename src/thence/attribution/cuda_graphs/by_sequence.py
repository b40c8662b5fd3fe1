"""Labels graph replays by matching the order of their activities with the order of launches (`sequences`).

The launches are those of a capture, or of an iteration of an eager run. A replay belongs to a stretch of launches if
at least `MIN_SHARE` of both can be matched; if some stretches match as a whole, only these count. An activity that can
be only one launch gets its places. One that can be several launches gets the places that these have in common, and one
that can also be none of them gets nothing. So a kernel that only one side has costs the others nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from thence.attribution.cuda_graphs.alignment import FOREIGN, UNDECIDED
from thence.attribution.cuda_graphs.by_order import MIN_SHARE
from thence.attribution.cuda_graphs.sequences import FITS, match, most_in_common
from thence.attribution.cuda_graphs.signatures import short_name
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.join_labels import Numbered
    from thence.attribution.cuda_graphs.place_book import PlaceBook
    from thence.attribution.cuda_graphs.replays import Replays
    from thence.attribution.cuda_graphs.sequences import Matched

_MARGIN = 4
"""By how many kernels more than the most similar capture another may differ from a replay that fits none as a whole:
what differs (a kernel too many, one lost) may hide which of the two it was."""
_ROUNDS = 3  # of removing doubtful pairs
UNKNOWN_ORDER = "it ran on several streams and its nodes have no numbers: the order of its capture is unknown"
"""Why a replay is not matched in order."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive launches: a capture, or an iteration of an eager run.

    Attributes:
        title: its name in messages.
        kind: number of the kind of each launch, row of `BySequence.weight`.
        place: number in the book of the places of each launch.
    """

    title: str
    kind: NDArray[np.int64]
    place: NDArray[np.int64]


@dataclass(frozen=True)
class _Fit:
    """A stretch of launches matched to one order of activities.

    Attributes:
        stretch: of which launches that the replay has nowhere are removed, if it is a part of an eager run.
        times: how often the replay repeats the stretch.
        turns: how often the stretch repeats the replay.
        matched: positions in the repeated stretch and the repeated replay.
    """

    stretch: Stretch
    times: int
    turns: int
    matched: Matched

    @cached_property
    def share(self) -> float:
        """The share of launches and activities that can be matched."""
        longest = max(self.times * len(self.stretch.kind), len(self.matched.open))
        return self.matched.pairs / longest

    @cached_property
    def unlike(self) -> int:
        """How many launches and activities cannot be matched."""
        every = self.times * len(self.stretch.kind) + len(self.matched.open)
        return every - 2 * self.matched.pairs

    def pairs(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Place and activity of each possible pair, and which of ``count`` activities can also have none.

        If the stretch repeats the replay, an activity needs a launch in one of the repetitions only.
        """
        found = self.matched
        opened = found.open.copy()
        opened[np.bincount(found.activity, minlength=len(opened)) == 0] = True
        always = np.ones(count, np.bool_)
        always[np.flatnonzero(~opened) % count] = False
        kept = ~opened[found.activity] | always[found.activity % count]
        place = self.stretch.place[found.launch[kept] % len(self.stretch.place)]
        return place, found.activity[kept] % count, always


@dataclass
class BySequence:
    """The stretches of launches to which the replays of one rank can belong.

    Attributes:
        replays: the replays to be labelled.
        book: the places by number; labelling adds to it.
        stretches: the launches.
        weight: for each kind of launch and each variant of the replays, whether they fit (`sequences.match`).
        rule: code of the rule for activities that can be only one launch.
        repeated: code of the rule if the replay repeats the stretch; None if stretches are whole captures, of which
            a replay holds each launch once.
        doubted: for each kind of launch, whether pairs with it are doubted if they occur nowhere else (`_odd`).
        one_stream: whether activities of a replay that ran on one stream are in the order of the launches.
        ordered: rows of gpu that were labelled, with the number of kernels among them, and of kernels that fit.
    """

    replays: Replays
    book: PlaceBook
    stretches: Sequence[Stretch]
    weight: NDArray[np.int8]
    rule: str
    repeated: str | None
    doubted: NDArray[np.bool_]
    one_stream: bool
    ordered: list[tuple[NDArray[np.int64], int, int]] = field(default_factory=list)
    _known: dict[tuple[bytes, bytes], Matched] = field(default_factory=dict)

    def put(self, labels: Numbered, rows: NDArray[np.int64]) -> tuple[NDArray[np.bool_], list[str], list[str]]:
        """Labels launches.

        Args:
            labels: what is known so far; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            which launches belong to a stretch, why others do not, and notes on what differs.
        """
        done = np.zeros(len(rows), np.bool_)
        reasons, notes = [], []
        for launches, ordered, numbered, one_stream in self.replays.sequences(rows):
            if not self.stretches or not (numbered or (one_stream and self.one_stream)):
                reasons += [UNKNOWN_ORDER] if self.stretches else []
                continue
            variant = self.replays.variant[ordered[0]]
            fits, reason = self._fits(variant)
            if not fits:
                reasons.append(reason)
                continue
            done[launches] = True
            notes += self._put(labels, ordered, variant, fits)
        return done, reasons, notes

    def difference(self, variant: NDArray[np.int64]) -> str:
        """A sentence on what a replay and the most similar stretch have in common, by their kernels alone."""
        parts = [self._fitted(stretch, variant) for stretch in self.stretches]
        shares = [self._common(variant, *part) for part in parts]
        return self._difference(variant, *parts[int(np.argmax(shares))], max(shares))

    def _common(self, variant: NDArray[np.int64], part: Stretch, times: int, turns: int) -> float:
        """The share of a stretch and a replay that can be matched at most."""
        launches, activities = np.tile(part.kind, times), np.tile(variant, turns)
        if not len(launches):
            return 0.0
        longest = max(len(launches), len(activities))
        return most_in_common(self.weight, launches, activities) / longest

    def _fits(self, variant: NDArray[np.int64]) -> tuple[list[_Fit], str]:
        """The stretches to which a replay can belong; why there are none."""
        fits, most, why = [], -1.0, ""
        for stretch in self.stretches:
            part, times, turns = self._fitted(stretch, variant)
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
        whole = [fit for fit in fits if fit.share == 1 and not fit.matched.open.any()]
        margin = _MARGIN if self.repeated is None else 0
        least = min((fit.unlike for fit in fits), default=0)
        return whole or [fit for fit in fits if fit.unlike <= least + margin], why

    def _fitted(self, stretch: Stretch, variant: NDArray[np.int64]) -> tuple[Stretch, int, int]:
        """A stretch, and how often the replay repeats it, or it the replay."""
        if self.repeated is None:
            return stretch, 1, 1
        used = np.isin(stretch.kind, np.nonzero(self.weight[:, np.unique(variant)])[0])
        part = Stretch(stretch.title, stretch.kind[used], stretch.place[used])
        ratio = len(variant) / max(len(part.kind), 1)
        return part, max(1, round(ratio)), max(1, round(1 / ratio)) if ratio else 1

    def _matched(self, launches: NDArray[np.int64], activities: NDArray[np.int64]) -> Matched:
        """The match of two sequences, without pairs that other pairs make doubtful."""
        key = launches.tobytes(), activities.tobytes()
        if key not in self._known:
            weight, matched = self.weight, match(self.weight, launches, activities)
            for _ in range(_ROUNDS if self.doubted.any() else 0):
                activity = np.flatnonzero(matched.only() >= 0)
                kind, variant = launches[matched.only()[activity]], activities[activity]
                odd = _odd(kind, variant, self.doubted[kind])
                if not odd.any():
                    break
                weight = weight.copy()
                weight[kind[odd], variant[odd]] = 0
                matched = match(weight, launches, activities)
            self._known[key] = matched
        return self._known[key]

    def _difference(self, variant: NDArray[np.int64], part: Stretch, times: int, turns: int, share: float) -> str:
        """A sentence on what a replay and a stretch have in common."""
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

    def _put(
        self, labels: Numbered, rows: NDArray[np.int64], variant: NDArray[np.int64], fits: Sequence[_Fit]
    ) -> list[str]:
        """Stores the places of launches, whose rows are in order; returns notes."""
        count = len(variant)
        found = [fit.pairs(count) for fit in fits]
        opened = np.any([without for _, _, without in found], axis=0)
        pairs = [np.stack([activity, place]) for place, activity, _ in found]
        activity, place = np.unique(np.concatenate(pairs, axis=1), axis=1)
        possible = np.bincount(activity, minlength=count)
        number = np.where(opened & (possible > 0), UNDECIDED, FOREIGN)
        certain = ~opened & (possible == 1)
        number[certain] = place[certain[activity]]
        several = ~opened & (possible > 1)
        if several.any():
            chosen = several[activity]
            common = self.book.shared(activity[chosen], place[chosen])
            number[several] = np.where(common < 0, UNDECIDED, common)
        repeats = self.repeated is not None and any(fit.times > 1 for fit in fits)
        own = str(self.repeated) if repeats else self.rule
        codes = np.where(certain, CODES.index(own), CODES.index("capture_shared"))
        every, rules = (np.broadcast_to(x, rows.shape).reshape(-1) for x in (number, codes))
        labels.put(rows.reshape(-1), every, rules)
        labels.confidence[rows] = (number > UNDECIDED).mean()
        kernels = int((self._is_kernel[variant] & (number >= 0)).sum())
        confirmed = self._confirmed(fits[0], variant)
        labelled = rows[:, number >= 0].reshape(-1)
        self.ordered.append((labelled, kernels * len(rows), confirmed * len(rows)))
        return self._notes(number, variant, fits)

    def _confirmed(self, fit: _Fit, variant: NDArray[np.int64]) -> int:
        """How many kernels fit the only launch that they can be."""
        launch = fit.matched.only()[: len(variant)]
        kernels = (launch >= 0) & self._is_kernel[variant]
        kinds = fit.stretch.kind[launch[kernels] % len(fit.stretch.kind)]
        return int((self.weight[kinds, variant[kernels]] == FITS).sum())

    @cached_property
    def _is_kernel(self) -> NDArray[np.bool_]:
        """Which variants of the replays are kernels."""
        return np.asarray((self.replays.kinds.frame["kind"] == "kernel").to_numpy(), np.bool_)

    def _notes(self, number: NDArray[np.int64], variant: NDArray[np.int64], fits: Sequence[_Fit]) -> list[str]:
        """Sentences on repetitions, and on what was not matched."""
        notes, fit = [], fits[0]
        if self.repeated is not None and fit.times > 1:
            notes.append(repetition(fit.stretch.title, fit.times))
        left = np.flatnonzero(number <= -2)
        spare = fit.times * len(fit.stretch.kind) - len(np.unique(fit.matched.launch))
        if len(left) or spare:
            text = f"{len(left):,} of its {len(number):,} activities"
            if len(left):
                name = self.replays.kinds.frame["name"][int(variant[left[0]])]
                text += f" (the first is activity {left[0]}, `{short_name(name or '')}`)"
            notes.append(
                f"{text} and {spare:,} of the {fit.times * len(fit.stretch.kind):,} launches of {fit.stretch.title} "
                "have no certain counterpart; all others are in the same order"
            )
        return notes


def _odd(kind: NDArray[np.int64], variant: NDArray[np.int64], doubted: NDArray[np.bool_]) -> NDArray[np.bool_]:
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
    odd: NDArray[np.bool_] = doubted & (count[of_pair] == 1) & (most_of_variant[variant] > 1) & (most_of_kind[kind] > 1)
    neighbours = np.zeros(len(odd), np.bool_)
    neighbours[1:] |= odd[:-1]
    neighbours[:-1] |= odd[1:]
    return odd & neighbours


def repetition(title: str, times: int) -> str:
    """A note that replays hold some launches several times."""
    return f"it repeats the kernels of {title} {times} times; every repetition gets the same labels"
