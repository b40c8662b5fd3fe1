"""Joins labels of captured graphs to the activities of a trace.

Each labels file applies to the ranks of the process that saved it. Node ids decide where the trace has
them, alignment everywhere else. Activities that cannot be joined keep the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import UNDECIDED
from thence.attribution.cuda_graphs.by_node import executed, match
from thence.attribution.cuda_graphs.by_order import Candidate, aligned_group
from thence.attribution.cuda_graphs.captured_stacks import stack_text
from thence.attribution.cuda_graphs.processes import process_mismatch
from thence.attribution.cuda_graphs.replays import Replays
from thence.attribution.cuda_graphs.signatures import Names, Signatures
from thence.attribution.paths import SEPARATOR
from thence.model.attributed import RULE
from thence.model.collective_columns import described_structs
from thence.model.graph_labels import CapturedPlace, Label
from thence.model.places import GRAPH_LABELS
from thence.model.reasons import CODES
from thence.model.tables import GRAPH_PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from thence.attribution.cuda_graphs.by_node import Executed, Match
    from thence.attribution.cuda_graphs.by_order import Outcome
    from thence.attribution.cuda_graphs.replays import Group
    from thence.model.graph_labels import GraphLabels
    from thence.model.tables import Tables

__all__ = ["Joined", "Numbered", "join_labels", "joined_rows", "with_places"]

_PLACES = (*GRAPH_LABELS, "position", "lane", "metadata")
_PLACED = [pl.col(name).is_not_null() for name in (*GRAPH_LABELS, "lane", "metadata", "collective")]
_MOST_LISTED = 3  # launches whose first difference is reported


@dataclass(frozen=True)
class Joined:
    """The result of joining labels.

    Attributes:
        places: rows of `GRAPH_PLACES`: the labelled activities, and others with the reason.
        notes: what was not joined and why, as sentences.
        foreign: labels that were refused because they are of another process or program: the file, and why.
    """

    places: pl.DataFrame = field(default_factory=GRAPH_PLACES.empty)
    notes: tuple[str, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()

    @property
    def labelled(self) -> int:
        """Number of activities that got a label, or another place."""
        return int(self.places.select(pl.any_horizontal(_PLACED)).to_series().sum())


@dataclass
class Numbered:
    """The labels found so far: for each row of gpu, the number of its label and how it was found.

    Attributes:
        replays: of the trace.
        number: for each row, the number of its label, -1 where none was open, `UNDECIDED` where several are
            possible, -3 where nothing is known.
        rule: for each row, position in `CODES` of the rule, or of the reason where there is no label; -1 where
            nothing is known.
        detail: for each row, index in ``details``, -1 for none.
        confidence: for each row, NaN where no alignment was needed.
        details: sentences about graphs that fit none of the labels.
    """

    replays: Replays
    number: NDArray[np.int64]
    rule: NDArray[np.int64]
    detail: NDArray[np.int64]
    confidence: NDArray[np.float64]
    details: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, replays: Replays) -> Numbered:
        """The initial state: no labels."""
        rows = replays.tables.gpu.height
        nothing = np.full(rows, -1)
        return cls(replays, np.full(rows, -3), nothing, nothing.copy(), np.full(rows, np.nan))

    def put(
        self, rows: NDArray[np.int64], number: NDArray[np.int64], rule: NDArray[np.int64] | int
    ) -> None:
        """Stores labels; where there is none, ``rule`` gets the reason."""
        self.number[rows] = number
        self.rule[rows] = rule
        self.rule[rows[number == -1]] = CODES.index("graph_no_label")
        self.rule[rows[number == UNDECIDED]] = CODES.index("graph_ambiguous")
        self.detail[rows] = -1

    def put_outcome(self, rows: NDArray[np.int64], outcome: Outcome, rule: str) -> list[str]:
        """Stores the outcome of an alignment.

        Returns:
            why launches were refused, one text per refused launch.
        """
        refused = np.array([reason is not None for reason in outcome.refused])
        good = rows[~refused]
        self.put(good.reshape(-1), outcome.label[~refused].reshape(-1), CODES.index(rule))
        self.confidence[good] = outcome.confidence[~refused][:, None]
        reasons = []
        for launch in np.flatnonzero(refused).tolist():
            reason = str(outcome.refused[launch])
            reasons.append(reason)
            self.refuse(rows[launch], reason)
        return reasons

    def refuse(self, rows: NDArray[np.int64], reason: str) -> None:
        """Stores the reason why activities got no label."""
        self.number[rows] = UNDECIDED
        self.rule[rows] = CODES.index("graph_not_joined")
        if reason not in self.details:
            self.details.append(reason)
        self.detail[rows] = self.details.index(reason)


def join_labels(tables: Tables, labels: Sequence[GraphLabels]) -> Joined:
    """Joins labels files to the activities of a trace.

    Args:
        tables: of the trace.
        labels: each applies to the ranks of the process that saved it.
    """
    replays = Replays.of(tables)
    if not len(replays.rows) or not labels:
        return Joined()
    assigned = Numbered.of(replays)
    distinct_labels = _DistinctLabels()
    files = [_File.of(file, distinct_labels.numbers(file), replays) for file in labels]
    marks_alone = distinct_labels.without_places()
    rank_of_row = tables.gpu["rank"].to_numpy()[replays.rows]
    reasons: dict[int, tuple[str, str]] = {}
    fitted: set[int] = set()
    notes: list[str] = []
    foreign: list[tuple[str, str]] = []
    for rank in np.unique(rank_of_row).tolist():
        rank_files = []
        for i, file in enumerate(files):
            reason = process_mismatch(file.labels, tables, rank)
            if reason is None:
                rank_files.append(file)
                fitted.add(i)
            else:
                reasons.setdefault(i, (file.labels.source, reason))
        if rank_files:
            rank_notes, refused = _join_rank(
                rank_files, assigned, replays.rows[rank_of_row == rank], marks_alone
            )
            notes += rank_notes
            foreign += refused
    notes += [f"{labels[i].source}: {note}" for i in sorted(fitted) for note in labels[i].notes]
    # A file that does not fit one rank is not reported if it fits another.
    foreign += [reason for i, reason in reasons.items() if i not in fitted]
    return Joined(joined_rows(assigned, distinct_labels.frame()), tuple(notes), tuple(foreign))


@dataclass(frozen=True)
class _File:
    """A labels file prepared for joining to one trace.

    Attributes:
        labels: the file.
        names: numbers of kernel names in it and in the trace.
        label: number of each of its labels among those of all files; index -1 gives -1.
        candidates: its graphs that replays can be aligned to, with their signatures.
    """

    labels: GraphLabels
    names: Names
    label: NDArray[np.int64]
    candidates: list[tuple[Candidate, Signatures]]

    @classmethod
    def of(cls, file: GraphLabels, label: NDArray[np.int64], replays: Replays) -> _File:
        traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
        names = Names(file.kernels, traced)
        candidates = []
        for graph in file.graphs:
            if graph.edges is None or graph.nodes["kernel"].null_count() == graph.nodes.height:
                continue
            of_node = graph.nodes["label"].fill_null(-1).to_numpy()
            kernels = [
                kind if k is None else (file.kernels[k].demangled or file.kernels[k].name)
                for kind, k in graph.nodes.select("type", "kernel").iter_rows()
            ]
            title = f"captured graph {graph.id}"
            candidate = Candidate(graph, names, label[of_node], title, kernels)
            candidates.append((candidate, candidate.signatures(replays)))
        return cls(file, names, label, candidates)


def _join_rank(
    files: Sequence[_File],
    assigned: Numbered,
    rows: NDArray[np.int64],
    marks_alone: NDArray[np.int64],
) -> tuple[list[str], list[tuple[str, str]]]:
    """Joins files of one process to its rows; returns notes on unlabelled launches, and labels of other programs."""
    replays = assigned.replays
    foreign: list[tuple[str, str]] = []
    for file in files:
        rows, refused = _by_ids(file, assigned, rows)
        foreign += refused
    candidates = [candidate for file in files for candidate in file.candidates]
    launches: list[tuple[int, str]] = []
    count = 0
    for group in replays.groups(rows):
        outcome = _aligned(group, replays, candidates, marks_alone)
        reasons = assigned.put_outcome(group.rows, outcome, "graph_alignment")
        starts = group.rows[[i for i, r in enumerate(outcome.refused) if r is not None], 0]
        launches += zip(starts.tolist(), reasons, strict=True)
        count += len(group.rows)
    return _refusal_notes(launches, count, replays), foreign


def _aligned(
    group: Group,
    replays: Replays,
    candidates: Sequence[tuple[Candidate, Signatures]],
    marks_alone: NDArray[np.int64],
) -> Outcome:
    """Aligns launches; where nodes that fit equally well differ only in their places, uses their marks alone."""
    outcome = aligned_group(group, replays, candidates)
    open_ = outcome.label == UNDECIDED
    if not open_.any() or (marks_alone[:-1] == np.arange(len(marks_alone) - 1)).all():
        return outcome
    by_marks = [
        (dataclasses.replace(candidate, label=marks_alone[candidate.label]), signatures)
        for candidate, signatures in candidates
    ]
    label = np.where(open_, aligned_group(group, replays, by_marks).label, outcome.label)
    confidence = (label != UNDECIDED).mean(axis=1)
    return dataclasses.replace(outcome, label=label, confidence=confidence)


def _refusal_notes(refused: Iterable[tuple[int, str]], count: int, replays: Replays) -> list[str]:
    """Notes on the launches that could not be aligned; the first few in full."""
    refused = sorted(refused)
    correlation = replays.tables.gpu["correlation"]
    texts = [
        f"the graph launch with correlation id {correlation[row]} is not labelled: {reason}"
        for row, reason in refused[:_MOST_LISTED]
    ]
    if len(refused) > _MOST_LISTED:
        texts.append(f"{len(refused):,} of {count:,} graph launches are not labelled")
    return texts


def _by_ids(
    file: _File, assigned: Numbered, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], list[tuple[str, str]]]:
    """Joins by node ids; returns the rows left for alignment, and why graphs that ran other kernels were refused."""
    replays = assigned.replays
    foreign = []
    done = np.zeros(replays.tables.gpu.height, np.bool_)
    for graph in executed(dataclasses.replace(replays, rows=rows)):
        matched = match(graph, file.labels, file.names, replays.kinds.frame)
        if matched.refused is not None:
            assigned.refuse(graph.rows, matched.refused)
            if not matched.foreign:
                text = f"executable graph {graph.id} ran other kernels than were captured: {matched.refused}"
                foreign.append((file.labels.source, text))
                assigned.refuse(graph.rows, text)
                done[graph.rows] = True
            continue
        done[graph.rows] = True
        _put_matched(assigned, graph, matched, file.label)
    return rows[~done[rows]], foreign


def _put_matched(
    assigned: Numbered, graph: Executed, matched: Match, label: NDArray[np.int64]
) -> None:
    """Stores the labels of one executable graph's nodes."""
    order = np.argsort(np.array(matched.number, np.int64))
    numbers = np.array(matched.number, np.int64)[order]
    rule = np.array([CODES.index(rule) for rule in matched.rule], np.int64)[order]
    of_node = label[np.array(matched.label, np.int64)][order]
    position = np.minimum(np.searchsorted(numbers, graph.number), len(numbers) - 1)
    matches = numbers[position] == graph.number
    assigned.put(graph.rows[matches], of_node[position[matches]], rule[position[matches]])
    assigned.confidence[graph.rows[matches]] = np.nan
    assigned.refuse(
        graph.rows[~matches],
        "its node cannot be distinguished from other nodes inside child graphs",
    )


@dataclass
class _DistinctLabels:
    """Distinct labels of all files, numbered."""

    labels: list[Label] = field(default_factory=list)
    by_text: dict[str, int] = field(default_factory=dict)

    def numbers(self, file: GraphLabels) -> NDArray[np.int64]:
        """The number of each label of a file; index -1 gives -1."""
        result = np.full(len(file.labels) + 1, -1)
        for i, label in enumerate(file.labels):
            result[i] = self._number(label)
        return result

    def without_places(self) -> NDArray[np.int64]:
        """For each label, the number of a label with its marks but no place, -1 without marks; index -1 gives -1."""
        result = []
        for label in tuple(self.labels):
            marks = dataclasses.replace(label, place=None)
            result.append(-1 if marks == Label(()) else self._number(marks))
        return np.array([*result, -1])

    def _number(self, label: Label) -> int:
        text = repr(label)
        if text not in self.by_text:
            self.by_text[text] = len(self.labels)
            self.labels.append(label)
        return self.by_text[text]

    def frame(self) -> pl.DataFrame:
        """The place columns of each label."""
        rows = [_place(label) for label in self.labels]
        columns = {name: [row.get(name) for row in rows] for name in _PLACES}
        collectives = described_structs([label.collective for label in self.labels])
        return pl.DataFrame(columns, schema=dict.fromkeys(_PLACES, pl.String)).with_columns(
            collective=collectives
        )


def _place(label: Label) -> dict[str, Any]:
    """The place columns of a label, from its marks and its place in the program.

    If both have a module, that of the marks is used; if both have a phase, that of the place.
    """
    place = label.place or CapturedPlace()
    metadata = dict(label.metadata)
    if place.parts:
        metadata["estimated_parts"] = [
            dict(zip(("module", "line", "op", "phase", "share"), part, strict=True))
            for part in place.parts
        ]
    return {
        "label": SEPARATOR.join(label.path) or None,
        "module": label.module or place.module or None,
        "op": place.op,
        "stack": stack_text(place.stack),
        "phase": place.phase or label.phase,
        "lane": label.lane,
        "metadata": msgspec.json.encode(metadata).decode() if metadata else None,
    }


def joined_rows(assigned: Numbered, places: pl.DataFrame) -> pl.DataFrame:
    """Rows of `GRAPH_PLACES` for all activities with a label or a reason.

    Args:
        assigned: label numbers of the activities.
        places: columns of places, one row for each number.
    """
    rows = np.flatnonzero(assigned.rule >= 0)
    number = pl.Series(assigned.number[rows])
    number = number.set(number < 0, None).cast(pl.UInt32)
    confidence = pl.Series(assigned.confidence[rows]).fill_nan(None)
    detail = pl.Series(assigned.detail[rows])
    detail = detail.set(detail < 0, None).cast(pl.UInt32)
    details = pl.Series(assigned.details, dtype=pl.String).cast(pl.Categorical())
    columns: dict[str, Any] = {
        name: places[name].cast(pl.Categorical()).gather(number) for name in _PLACES
    }
    columns["collective"] = places["collective"].gather(number)
    columns |= {
        "gpu": rows,
        "rule": pl.Series(CODES, dtype=RULE).gather(assigned.rule[rows]),
        "confidence": confidence,
        "detail": details.gather(detail),
    }
    return GRAPH_PLACES.frame(columns)


def with_places(tables: Tables, joined: Joined) -> Tables:
    """The tables with the joined places; activities that already had places keep them where none were found now."""
    new = joined.places
    old = tables.graph_places
    placed = pl.any_horizontal(_PLACED)
    kept = old.filter(~pl.col("gpu").is_in(new.filter(placed)["gpu"].implode()))
    fresh = new.filter(placed | ~pl.col("gpu").is_in(kept["gpu"].implode()))
    return dataclasses.replace(tables, graph_places=pl.concat([kept, fresh]).sort("gpu"))
