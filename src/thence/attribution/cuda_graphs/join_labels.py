"""Joins labels of captured graphs to the activities of a trace.

Each labels file applies to the ranks of the process that saved it. Node ids decide where the trace has
them, alignment everywhere else. Activities that cannot be joined keep the reason.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import CONTRADICTED, FOREIGN, UNDECIDED
from thence.attribution.cuda_graphs.by_node import executed, match
from thence.attribution.cuda_graphs.by_order import Candidate, aligned_group
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
    from thence.model.graph_labels import CapturedCall, GraphLabels
    from thence.model.tables import Tables

_PLACES = (*GRAPH_LABELS, "position", "lane", "metadata", "operator", "inputs")
_OF_CALL = ("node", "nodes")
_PLACED = [pl.col(name).is_not_null() for name in (*GRAPH_LABELS, "lane", "metadata", "collective")]
_MOST_LISTED = 3  # launches whose first difference is reported


@dataclass(frozen=True)
class Joined:
    """The result of joining labels.

    Attributes:
        places: rows of `GRAPH_PLACES`: the labelled activities, and others with the reason.
        notes: what was not joined and why, as sentences.
        foreign: labels that were refused because they are of another process or program: the file, and why.
        files: the files that labelled any activities, and how many.
    """

    places: pl.DataFrame = field(default_factory=GRAPH_PLACES.empty)
    notes: tuple[str, ...] = ()
    foreign: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, int] = field(default_factory=dict)

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
            possible, `FOREIGN` where nothing corresponds to the activity, `CONTRADICTED` where label files differ, -3
            where nothing is known.
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

    def put(self, rows: NDArray[np.int64], number: NDArray[np.int64], rule: NDArray[np.int64] | int) -> None:
        """Stores labels; where there is none, ``rule`` gets the reason."""
        self.number[rows] = number
        self.rule[rows] = rule
        self.rule[rows[number == -1]] = CODES.index("graph_no_label")
        self.rule[rows[number == UNDECIDED]] = CODES.index("graph_ambiguous")
        self.rule[rows[number == FOREIGN]] = CODES.index("graph_foreign")
        self.rule[rows[number == CONTRADICTED]] = CODES.index("graph_labels_differ")
        self.detail[rows] = -1

    def put_outcome(self, rows: NDArray[np.int64], outcome: Outcome, rule: str) -> list[str]:
        """Stores the outcome of an alignment.

        Returns:
            why launches were refused, one text per refused launch.
        """
        refused = np.array([reason is not None for reason in outcome.refused])
        good, number = rows[~refused], outcome.label[~refused]
        self.put(good.reshape(-1), number.reshape(-1), CODES.index(rule))
        self.confidence[good] = (number > UNDECIDED).mean(axis=1)[:, None]
        reasons = [reason for reason in outcome.refused if reason is not None]
        for launch, reason in zip(np.flatnonzero(refused).tolist(), reasons, strict=True):
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
    fewer = distinct_labels.fewer()
    labelled: Counter[str] = Counter()
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
            rows = replays.rows[rank_of_row == rank]
            left, rank_notes, refused = _by_ids(rank_files, assigned, rows, distinct_labels, labelled)
            rank_notes += _by_alignment(rank_files, assigned, left, fewer, labelled)
            notes += rank_notes
            foreign += refused
    notes += [f"{labels[i].source}: {note}" for i in sorted(fitted) for note in labels[i].notes]
    # A file that does not fit one rank is not reported if it fits another.
    foreign += [reason for i, reason in reasons.items() if i not in fitted]
    places = joined_rows(assigned, distinct_labels.frame())
    return Joined(places, tuple(notes), tuple(foreign), dict(labelled))


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


def _by_alignment(
    files: Sequence[_File],
    assigned: Numbered,
    rows: NDArray[np.int64],
    fewer: Sequence[NDArray[np.int64]],
    labelled: Counter[str],
) -> list[str]:
    """Joins files of one process to rows without known ids; returns notes on launches that differ."""
    replays = assigned.replays
    candidates = [candidate for file in files for candidate in file.candidates]
    launches: list[tuple[int, str]] = []
    count = 0
    notes = []
    for group in replays.groups(rows):
        outcome = _aligned(group, replays, candidates, fewer)
        reasons = assigned.put_outcome(group.rows, outcome, "graph_alignment")
        if outcome.note is not None:
            notes.append(f"{replays.named(group.rows)}: {outcome.note}")
        starts = group.rows[[i for i, r in enumerate(outcome.refused) if r is not None], 0]
        launches += zip(starts.tolist(), reasons, strict=True)
        count += len(group.rows)
        for file in files:
            of_file = np.concatenate([file.label[:-1], *(numbers[file.label[:-1]] for numbers in fewer)])
            by_file = np.isin(outcome.label, of_file)
            labelled[file.labels.source] += int((by_file & (outcome.label >= 0)).sum())
    return notes + _refusal_notes(launches, count, replays)


def _aligned(
    group: Group,
    replays: Replays,
    candidates: Sequence[tuple[Candidate, Signatures]],
    fewer: Sequence[NDArray[np.int64]],
) -> Outcome:
    """Aligns launches; where nodes that fit equally well differ in what their labels say, uses what they say alike.

    Args:
        group: the launches.
        replays: of the trace.
        candidates: captured graphs.
        fewer: numbers of labels that say less, as `_DistinctLabels.fewer` returns them.
    """
    outcome = aligned_group(group, replays, candidates)
    for numbers in fewer:
        open_ = outcome.label == UNDECIDED
        if not open_.any() or (numbers[:-1] == np.arange(len(numbers) - 1)).all():
            continue
        by_less = [
            (dataclasses.replace(candidate, label=numbers[candidate.label]), signatures)
            for candidate, signatures in candidates
        ]
        label = np.where(open_, aligned_group(group, replays, by_less).label, outcome.label)
        outcome = dataclasses.replace(outcome, label=label)
    return outcome


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
    files: Sequence[_File],
    assigned: Numbered,
    rows: NDArray[np.int64],
    distinct_labels: _DistinctLabels,
    labelled: Counter[str],
) -> tuple[NDArray[np.int64], list[str], list[tuple[str, str]]]:
    """Joins files of one process by node ids.

    If several files know a graph, each node gets what they say together.

    Returns:
        the rows left for alignment, notes, and why graphs that ran other kernels were refused.
    """
    replays = assigned.replays
    files = _with_executables(files)
    notes: list[str] = []
    foreign = []
    done = np.zeros(replays.tables.gpu.height, np.bool_)
    for graph in executed(dataclasses.replace(replays, rows=rows)):
        matches = [(file, match(graph, file.labels, file.names, replays.kinds.frame)) for file in files]
        fitting = [(file, found) for file, found in matches if found.refused is None]
        fitting = [(file, found) for file, found in fitting if found.by_id] or fitting
        for file, found in matches:
            if found.refused is None or found.foreign:
                continue
            text = f"executable graph {graph.id} ran other kernels than were captured: {found.refused}"
            foreign.append((file.labels.source, text))
            done[graph.rows] = True
            assigned.refuse(graph.rows, text)
        if fitting:
            done[graph.rows] = True
            notes += _put_matched(assigned, graph, fitting, distinct_labels, labelled)
        elif not done[graph.rows].any():
            reason = str(matches[-1][1].refused)
            assigned.refuse(graph.rows, reason)
            if not any(file.candidates for file in files):  # alignment could not say more
                done[graph.rows] = True
                notes.append(f"executable graph {graph.id} is not labelled: {reason}")
    return rows[~done[rows]], notes, foreign


def _with_executables(files: Sequence[_File]) -> list[_File]:
    """The files of one process; graphs under the id of their capture get the executable graphs that others name."""
    executables = {
        graph.id: graph.executables
        for file in files
        for graph in file.labels.graphs
        if graph.executables != (graph.id,)
    }
    result = []
    for file in files:
        graphs = tuple(
            dataclasses.replace(graph, executables=executables.get(graph.id, graph.executables))
            for graph in file.labels.graphs
        )
        labels = dataclasses.replace(file.labels, graphs=graphs)
        result.append(dataclasses.replace(file, labels=labels))
    return result


def _put_matched(
    assigned: Numbered,
    graph: Executed,
    matches: Sequence[tuple[_File, Match]],
    distinct_labels: _DistinctLabels,
    labelled: Counter[str],
) -> list[str]:
    """Stores the labels of one executable graph's nodes; returns notes on contradictions."""
    said: dict[int, dict[int, str]] = {}  # for each node number, label numbers and their files
    rules: dict[int, str] = {}
    ran, counts = np.unique(graph.number, return_counts=True)
    activities = dict(zip(ran.tolist(), counts.tolist(), strict=True))
    for file, found in matches:
        for number, label, rule in zip(found.number, found.label, found.rule, strict=True):
            of_file, of_node = int(file.label[label]), said.setdefault(number, {})
            rules.setdefault(number, rule)
            if of_file >= 0:
                of_node.setdefault(of_file, file.labels.source)
                labelled[file.labels.source] += activities[number]
    differing: dict[tuple[str, str], list[int]] = {}
    of_number: dict[int, int] = {}
    for number, labels in said.items():
        merged = distinct_labels.merged(tuple(labels)) if labels else -1
        if merged is None:
            first, second, *_ = labels.values()
            differing.setdefault((first, second), []).append(number)
        of_number[number] = CONTRADICTED if merged is None else merged
    numbers = np.array(sorted(of_number), np.int64)
    label_of = np.array([of_number[n] for n in numbers.tolist()], np.int64)
    code = np.array([CODES.index(rules[n]) for n in numbers.tolist()], np.int64)
    position = np.minimum(np.searchsorted(numbers, graph.number), len(numbers) - 1)
    matching = numbers[position] == graph.number
    assigned.put(graph.rows[matching], label_of[position[matching]], code[position[matching]])
    assigned.confidence[graph.rows[matching]] = np.nan
    assigned.refuse(graph.rows[~matching], "its node cannot be distinguished from other nodes inside child graphs")
    return [
        f"{first} and {second} contradict each other about {len(nodes):,} nodes of executable graph {graph.id}: "
        + distinct_labels.difference(said[nodes[0]], f"node {nodes[0]}")
        + "; these nodes get no label: give only the file that the traced process saved"
        for (first, second), nodes in differing.items()
    ]


@dataclass
class _DistinctLabels:
    """Distinct labels of all files, numbered."""

    labels: list[Label] = field(default_factory=list)
    by_text: dict[str, int] = field(default_factory=dict)
    of_merged: dict[tuple[int, ...], int | None] = field(default_factory=dict)

    def numbers(self, file: GraphLabels) -> NDArray[np.int64]:
        """The number of each label of a file; index -1 gives -1."""
        result = np.full(len(file.labels) + 1, -1)
        for i, label in enumerate(file.labels):
            result[i] = self._number(label)
        return result

    def fewer(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each label, the numbers of labels that say less: without the call of the operator, and the marks alone.

        The number is -1 where nothing is left, and for index -1.
        """
        labels = tuple(self.labels)
        without_call = [
            label
            if label.place is None
            else dataclasses.replace(label, place=dataclasses.replace(label.place, call=None))
            for label in labels
        ]
        marks = [dataclasses.replace(label, place=None) for label in labels]
        return self._reduced(without_call), self._reduced(marks)

    def _reduced(self, labels: Sequence[Label]) -> NDArray[np.int64]:
        numbers = [-1 if label == Label(()) else self._number(label) for label in labels]
        return np.array([*numbers, -1])

    def _number(self, label: Label) -> int:
        text = repr(label)
        if text not in self.by_text:
            self.by_text[text] = len(self.labels)
            self.labels.append(label)
        return self.by_text[text]

    def merged(self, numbers: tuple[int, ...]) -> int | None:
        """The number of the label that says what several labels say; None if they contradict each other."""
        if numbers not in self.of_merged:
            label: Label | None = self.labels[numbers[0]]
            for number in numbers[1:]:
                label = None if label is None else _merged(label, self.labels[number])
            self.of_merged[numbers] = None if label is None else self._number(label)
        return self.of_merged[numbers]

    def difference(self, numbers: Iterable[int], node: str) -> str:
        """A sentence on what the first two of some labels say differently about a node."""
        one, other, *_ = (self.labels[number] for number in numbers)
        if _longer(one.path, other.path) is None:
            said = "/".join(one.path), "/".join(other.path)
            return f"{node} is `{said[0]}` in one and `{said[1]}` in the other"
        names = [f.name for f in dataclasses.fields(Label) if f.name != "path"]
        name = next(n for n in names if _same(getattr(one, n), getattr(other, n)) is None)
        return f"{node} has another {name} in one than in the other"

    def frame(self) -> pl.DataFrame:
        """The place columns of each label."""
        rows = [_place(label) for label in self.labels]
        schema = {**dict.fromkeys(_PLACES, pl.String), **dict.fromkeys(_OF_CALL, pl.Int32)}
        columns = {name: [row.get(name) for row in rows] for name in schema}
        collectives = described_structs([label.collective for label in self.labels])
        return pl.DataFrame(columns, schema=schema).with_columns(collective=collectives)


def _merged(first: Label, second: Label) -> Label | None:
    """What two labels of one node say together; None if they contradict each other."""
    path = _longer(first.path, second.path)
    rest: dict[str, Any] = {}
    for name in ("phase", "lane", "metadata", "collective", "place"):
        same = _same(getattr(first, name), getattr(second, name))
        if path is None or same is None:
            return None
        (rest[name],) = same
    return None if path is None else Label(path, **rest)


def _longer(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...] | None:
    """The longer of two paths if it ends with the other; PyTorch's annotations keep only the innermost name."""
    longer, shorter = sorted((first, second), key=len, reverse=True)
    return longer if longer[len(longer) - len(shorter) :] == shorter else None


def _same(first: Any, second: Any) -> tuple[Any] | None:
    """The value that two labels have together, as a tuple; None if they contradict each other."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        agree = all(second.get(key, value) == value for key, value in first.items())
        return ({**first, **second},) if agree else None
    if first is None or second is None or first == second:
        return (second if first is None else first,)
    return None


def _place(label: Label) -> dict[str, Any]:
    """The place columns of a label, from its marks and its place in the program.

    If both have a module, that of the marks is used; if both have a phase, that of the place.
    """
    place = label.place or CapturedPlace()
    metadata = dict(label.metadata)
    if place.parts:
        metadata["estimated_parts"] = [
            dict(zip(("module", "line", "op", "phase", "share"), part, strict=True)) for part in place.parts
        ]
    return {
        "label": SEPARATOR.join(label.path) or None,
        "module": label.module or place.module or None,
        "op": place.op or (place.call and place.call.name),
        "stack": place.stack_text,
        "phase": place.phase or label.phase,
        "lane": label.lane,
        "metadata": msgspec.json.encode(metadata).decode() if metadata else None,
        **({} if place.call is None else _of_call(place.call)),
    }


def _of_call(call: CapturedCall) -> dict[str, Any]:
    return {"operator": call.name, "inputs": call.inputs, "node": call.node, "nodes": call.nodes}


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
    columns: dict[str, Any] = {name: places[name].cast(pl.Categorical()).gather(number) for name in _PLACES}
    columns |= {name: places[name].gather(number) for name in ("collective", *_OF_CALL)}
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
