"""Labels graph replays from eager runs of the same code, and from traces of the captures (`captures`).

Where the order of a replay's activities is known, it is matched with the order of the launches (`by_sequence`): of the
profiler steps and outermost ranges of an eager run, or of the run as a whole. A range may hold the replay several
times, and the replay the range.

Where it is not known (several streams, no node numbers), the eager run serves as the captured graph: its launches are
the nodes, and consecutive launches of one stream are joined by edges, as in stream capture. So the alignment to
captured graphs applies (`by_alignment`).

If the order proves nothing, a kernel gets the places that all launches of its name have in common (`ByKernelName`).
That is weaker than alignment: a name proves nothing about order, and kernels of one name may come from
elsewhere in the graph. So it is tried last, and has a rule of its own. A kernel gets the places that all launches of
its name have in common. It is used only if at least half of a launch's kernels occur in the run, because different
programs share a few common kernels, too. A name is used only if the ratio between its counts in the launch and in the
run is the most frequent ratio among all names: a name with another ratio has launches that the run does not show.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import FOREIGN
from thence.attribution.cuda_graphs.assigned_labels import AssignedLabels, JoinedLabels, PlaceRows, joined_rows
from thence.attribution.cuda_graphs.by_alignment import MIN_SHARE, aligned_group
from thence.attribution.cuda_graphs.by_sequence import FITS, UNKNOWN_ORDER, BySequence, LaunchSequence, repetition
from thence.attribution.cuda_graphs.captures import Captures, matched_captures, names_of_kinds
from thence.attribution.cuda_graphs.eager_run import EagerRun
from thence.attribution.cuda_graphs.replays import Group, Replays
from thence.attribution.cuda_graphs.signatures import KernelNames, Signatures
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import CODES
from thence.units import format_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import Kernel
    from thence.model.tables import Tables


_MAX_WINDOWS = 32  # equal iterations that are compared: further ones show the same
_TITLE = "the eager run"


def join_eager(tables: Tables, eager: Sequence[Attributed]) -> JoinedLabels:
    """Transfers the places of runs without graphs, and of captures, to graph replays.

    Args:
        eager: runs of the same code without graphs, or traces of the captures.
    """
    replays = Replays.of(tables)
    if not len(replays.rows):
        return JoinedLabels()
    notes: list[str] = []
    frames = []
    for rank in tables.gpu["rank"][replays.rows].unique().sort().to_list():
        of_rank = _of_rank(eager, rank)
        if not of_rank:
            notes.append(f"rank {rank}: the eager trace does not contain this rank")
            continue
        sources = _Sources.of(of_rank, replays, rank)
        notes += sources.notes
        rows = replays.rows[(tables.gpu["rank"] == rank).to_numpy()[replays.rows]]
        labels = AssignedLabels.of(replays)
        notes += _join_rank(sources, labels, rows)
        notes += _order_notes(sources, labels, rows)
        if sources.place_rows.frames:
            frames.append(joined_rows(labels, sources.place_rows.frame))
    return JoinedLabels(pl.concat(frames) if frames else JoinedLabels().places, tuple(dict.fromkeys(notes)))


def _of_rank(eager: Sequence[Attributed], rank: int) -> list[tuple[Attributed, int]]:
    """The traces that a rank of the replays is compared to, and the rank to use in each."""
    ranks = [(trace, trace.ranks) for trace in eager]
    holding = [(trace, rank) for trace, held in ranks if rank in held]
    return holding or [(trace, held[0]) for trace, held in ranks if len(held) == 1]


@dataclass(frozen=True)
class _Run:
    """One run without graphs, prepared for the replays.

    Attributes:
        run: the run; its places are numbered as in the place_rows.
        names: numbers of kernel names in it and in the replays.
        signatures: of its launches and of the replays.
        by_sequence: its launches as sequences.
        parts: its distinct steps and outermost ranges, and all launches.
    """

    run: EagerRun
    names: KernelNames
    signatures: Signatures
    by_sequence: BySequence
    parts: list[slice]

    @classmethod
    def of(cls, run: EagerRun, replays: Replays, place_rows: PlaceRows) -> _Run:
        traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
        names = KernelNames(run.kernels, traced)
        numbered = dataclasses.replace(run, label=run.label + place_rows.add(run.places))
        signatures = Signatures.of(run.graph, names, replays.kinds)
        weight = FITS * (np.arange(signatures.nodes.max(initial=0) + 1)[:, None] == signatures.variants)
        kinds, places = signatures.nodes, numbered.label
        distinct = {(kinds[part].tobytes(), places[part].tobytes()): part for part in run.iterations()}
        parts = list(distinct.values())
        sequences = [LaunchSequence(_TITLE, kinds[part], places[part]) for part in parts]
        doubted = np.zeros(len(weight), np.bool_)
        by_sequence = BySequence(
            replays=replays,
            place_rows=place_rows,
            sequences=sequences,
            weight=weight.astype(np.int8),
            rule="eager_alignment",
            repeated="eager_repetition",
            doubted=doubted,
            one_stream=run.one_stream,
        )
        return cls(numbered, names, signatures, by_sequence, parts)

    def aligned(self, labels: AssignedLabels, rows: Int64) -> tuple[Mask, list[str], list[str]]:
        """Labels launches whose order is unknown, as replays of a graph; returns what `BySequence.put` does."""
        variant = labels.replays.variant[rows[0]]
        windows, times = self._iterations(variant)
        candidates = []
        for window in windows:
            candidate = self.run.window(np.tile(window, times), self.names, _TITLE)
            candidates.append((candidate, candidate.signatures(labels.replays)))
        if not candidates:
            return np.zeros(len(rows), np.bool_), [self.by_sequence.difference(variant)], []
        outcome = aligned_group(Group(rows), labels.replays, candidates)
        rule = "eager_alignment" if times == 1 else "eager_repetition"
        reasons = labels.put_outcome(rows, outcome, rule)
        done = np.array([reason is None for reason in outcome.refused], np.bool_)
        notes = [outcome.note] if outcome.note else []
        if times > 1 and done.any():
            notes.append(repetition(_TITLE, times))
        return done, reasons[:1], notes

    def _iterations(self, variant: Int64) -> tuple[list[Int64], int]:
        """Iterations that can be the replay, by their kernels, and how often the replay repeats an iteration."""
        wanted = self.signatures.variants[variant]
        counts = np.bincount(wanted[wanted >= 0], minlength=int(self.signatures.nodes.max(initial=0)) + 1)
        windows: list[Int64] = []
        most, repeated = MIN_SHARE, 1
        for part in self.parts:
            launches = np.arange(part.start, part.stop)
            launches = launches[counts[self.signatures.nodes[part]] > 0]
            if not len(launches):
                continue
            times = max(1, round(len(variant) / len(launches)))
            turns = max(1, round(len(launches) / len(variant)))
            if len(launches) % turns:
                continue
            for window in np.split(launches, turns)[:_MAX_WINDOWS]:
                held = times * np.bincount(self.signatures.nodes[window], minlength=len(counts))
                share = float(np.minimum(held, counts).sum() / max(held.sum(), len(variant)))
                if share > most or (share == most and times != repeated):
                    windows, most, repeated = [], share, times
                if share == most and len(windows) < _MAX_WINDOWS:
                    windows.append(window)
        return windows, repeated


@dataclass(frozen=True)
class _Sources:
    """The sources from which the replays of a rank can be labelled.

    Attributes:
        runs: runs without graphs, with device work.
        captures: captures that name their kernels, and others; None where there are none.
        place_rows: the places by number.
        by_name: the kernel names of each run, then of the captures of each trace that names all their kernels.
        notes: what the traces do not say about the rank.
    """

    runs: list[_Run]
    captures: tuple[BySequence, BySequence] | None
    place_rows: PlaceRows
    by_name: list[ByKernelName]
    notes: list[str]

    @classmethod
    def of(cls, traces: Sequence[tuple[Attributed, int]], replays: Replays, rank: int) -> _Sources:
        place_rows = PlaceRows()
        runs, by_name, notes = [], [], []
        described = [replays.tables.meta, *(trace.meta for trace, _ in traces)]
        groups = [group for meta in described for group in meta.process_groups]

        def as_rank(run: EagerRun, recorded: int) -> EagerRun:
            if recorded == rank:
                return run
            of_rank, unknown = run.of_rank(rank, groups)
            if unknown:
                notes.append(
                    f"rank {rank} is labelled from rank {recorded}: the process groups of {unknown} of its kinds of "
                    "collectives are unknown; give the trace of this rank, or one whose process groups are described"
                )
            return of_rank

        all_captures = [
            dataclasses.replace(captures, run=as_rank(captures.run, recorded))
            for trace, recorded in traces
            if (captures := Captures.of(trace, recorded)) is not None
        ]
        for trace, recorded in traces:
            eager = EagerRun.of(trace, recorded)
            if len(eager.rows):
                eager = as_rank(eager, recorded)
                runs.append(_Run.of(eager, replays, place_rows))
                by_name.append(_named(eager, runs[-1].run.label, replays, place_rows))
        by_order = None
        if all_captures:
            by_order = matched_captures(all_captures, [trace for trace, _ in traces], replays, place_rows)
            for capture in all_captures:
                if capture.named.all():
                    places = capture.run.label + place_rows.add(capture.run.places)
                    by_name.append(_named(capture.run, places, replays, place_rows))
        return cls(runs, by_order, place_rows, by_name, notes)


def _named(run: EagerRun, place: Int64, replays: Replays, place_rows: PlaceRows) -> ByKernelName:
    """The kernel names of a run; adds the places that all launches of a name have in common to the place_rows."""
    by_name = ByKernelName.of(run.kernels, run.graph.nodes, place, place_rows.frame, replays)
    place_rows.add(by_name.places[place_rows.height :])
    return by_name


def _join_rank(sources: _Sources, labels: AssignedLabels, rows: Int64) -> list[str]:
    notes = []
    for group in labels.replays.groups(rows):
        reasons, group_notes = _join_group(sources, labels, group.rows)
        named = [by_name.put(labels, group.rows) for by_name in sources.by_name]
        where = labels.replays.named(group.rows)
        notes += [f"{where}: not labelled from {'; nor from '.join(reasons)}"] if reasons else []
        notes += [f"{where}: {text}" for text in (*group_notes, *named) if text]
    return notes


def _join_group(sources: _Sources, labels: AssignedLabels, left: Int64) -> tuple[list[str], list[str]]:
    """Labels a group of launches from the strongest source first.

    The sources are, in this order: captures with kernel names, eager runs, the order of captures.

    Returns:
        why launches got no label, one sentence for each eager run and one for the captures; and notes.
    """
    named, unnamed = sources.captures or (None, None)
    attempts: list[tuple[str, BySequence | None, _Run | None]] = [("the captures", named, None)]
    attempts += [(_TITLE, run.by_sequence, run) for run in sources.runs]
    attempts += [("the captures", unnamed, None)]
    why: dict[str, str] = {}
    all_notes: list[str] = []
    for title, by_sequence, run in attempts:
        if by_sequence is None or not len(left):
            continue
        done, reasons, notes = by_sequence.put(labels, left)
        left = left[~done]
        all_notes += notes
        if run is not None and len(left):
            done, unfit, notes = run.aligned(labels, left)
            left = left[~done]
            all_notes += notes
            reasons = [*(reason for reason in reasons if reason != UNKNOWN_ORDER), *unfit]
        if reasons and len(left):
            why[title] = reasons[0]
    if not len(left):
        return [], all_notes
    for launch in left:
        labels.refuse(launch, "; ".join(why.values()))
    return [f"{title}: {reason}" for title, reason in why.items()], all_notes


def _order_notes(sources: _Sources, labels: AssignedLabels, rows: Int64) -> list[str]:
    """A note on the activities labelled by order alone, with their share of the time in graphs."""
    if sources.captures is None or not sources.captures[1].ordered:
        return []
    parts, kernels, confirmed = zip(*sources.captures[1].ordered, strict=True)
    alone = np.concatenate(parts)
    duration = labels.replays.tables.gpu["duration"].to_numpy()
    share = duration[alone].sum() / max(int(duration[rows].sum()), 1)
    text = (
        f"{len(alone):,} activities, {format_share(float(share), 1)} of the time in CUDA graphs, are labelled by "
        f"their order alone: the trace of the capture does not name the kernels. Of {sum(kernels):,} kernels "
        f"among them, {sum(confirmed):,} have a name that fits the operator, and none contradicts it"
    )
    return [text]


# ---- By the names of kernels


_NAME_RULE = "eager_kernel_name"
_MIN_KNOWN = 0.5  # of the kernels of a launch: with fewer in the run, it may be another program


@dataclass(frozen=True)
class ByKernelName:
    """The kernel names of a run, with the places that all launches of a name have in common.

    Attributes:
        of_variant: number of the name of each variant of the replays, -1 for those that do not occur in the run.
            All memcpys count as one name, and all memsets.
        count: how often each name occurs in the run.
        place: row in ``places`` of each name, -1 for names whose launches have nothing in common.
        places: the places of the run, followed by those of the names.
    """

    of_variant: Int64
    count: Int64
    place: Int64
    places: pl.DataFrame

    @classmethod
    def of(
        cls, kernels: Sequence[Kernel], nodes: pl.DataFrame, place: Int64, places: pl.DataFrame, replays: Replays
    ) -> ByKernelName:
        """The names of a run.

        Args:
            nodes: its launches: type and kernel.
            place: number of the places of each launch.
            places: the places by number.
        """
        frame = names_of_kinds(replays.kinds.frame)
        names = KernelNames(kernels, frame["name"].drop_nulls().unique(maintain_order=True))
        of_kind = {"memcpy": len(kernels), "memset": len(kernels) + 1}
        of_variant = [
            of_kind.get(kind, -1) if kind != "kernel" else names.of_trace(name)
            for kind, name in frame.select("kind", "name").iter_rows()
        ]
        name = np.array(
            [
                of_kind[kind] if kind in of_kind else names.of_kernel(kernel)
                for kind, kernel in nodes.select("type", "kernel").iter_rows()
            ],
            np.int64,
        )
        shared = _places_in_common(name, places.drop("collective")[place])
        number = np.full(len(kernels) + len(of_kind), -1, np.int64)
        number[shared["kernel"].to_numpy()] = places.height + np.arange(shared.height)
        nothing = pl.lit(None, places.schema["collective"]).alias("collective")
        return cls(
            np.array(of_variant, np.int64),
            np.bincount(name, minlength=len(number)),
            number,
            pl.concat([places, shared.with_columns(nothing).select(places.columns)]),
        )

    def put(self, assigned: AssignedLabels, rows: Int64) -> str | None:
        """Labels the activities that alignment left without a place.

        Args:
            assigned: what alignment found; changed in place.
            rows: of gpu, (launches, activities): launches with equal kernels.

        Returns:
            a note on how many were labelled, None if none were.
        """
        name = self.of_variant[assigned.replays.variant[rows]]
        left = (assigned.number[rows] < -1) & (assigned.number[rows] != FOREIGN)
        if not left.any() or (name[0] >= 0).sum() < _MIN_KNOWN * len(name[0]):
            return None
        launched = np.bincount(name[0][name[0] >= 0], minlength=len(self.count))
        present = np.flatnonzero(launched * self.count)
        if not len(present):  # copies alone, of which the run has none
            return None
        times = launched[present] / self.count[present]
        ratio, names_of_ratio = np.unique(times, return_counts=True)
        fitting = np.append(np.zeros(len(self.count), np.bool_), [False])  # the last one is for -1
        fitting[present] = times == ratio[names_of_ratio.argmax()]
        fitting[:-1] &= self.place >= 0
        chosen = left & fitting[name]
        if not chosen.any():
            return None
        assigned.put(rows[chosen], self.place[name[chosen]], CODES.index(_NAME_RULE))
        assigned.confidence[rows[chosen]] = np.nan
        return (
            f"{int(chosen.sum()):,} of {int(left.sum()):,} activities that alignment could not label got the places "
            "that all launches of their kernel have in common"
        )


def _places_in_common(name: Int64, places: pl.DataFrame) -> pl.DataFrame:
    """The places that all launches of a name have in common; one row for each name that has any."""
    alike = [
        pl.when(pl.col(column).n_unique() == 1).then(pl.col(column).first()).alias(column) for column in places.columns
    ]
    grouped = places.with_columns(kernel=pl.Series(name)).group_by("kernel", maintain_order=True)
    return grouped.agg(alike).filter(pl.any_horizontal(pl.col(GRAPH_LABELS).is_not_null()))
