"""Joins labels of captured graphs to the activities of a trace.

Each labels file applies to the ranks of the process that saved it. Node ids decide where the trace has
them, alignment everywhere else. Activities that cannot be joined keep the reason.

Labels and trace must be of one process, because node ids alone match any process (`process_mismatch`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import CONTRADICTED, UNDECIDED
from thence.attribution.cuda_graphs.assigned_labels import (
    CALL_COLUMNS,
    PLACE_COLUMNS,
    AssignedLabels,
    JoinedLabels,
    joined_rows,
)
from thence.attribution.cuda_graphs.by_alignment import Candidate, aligned_group
from thence.attribution.cuda_graphs.by_node import executed, match
from thence.attribution.cuda_graphs.replays import Replays
from thence.attribution.cuda_graphs.signatures import KernelNames, Signatures
from thence.attribution.paths import SEPARATOR
from thence.model.collective_columns import described_structs
from thence.model.columns import values_or
from thence.model.graph_labels import CapturedPlace, Label, Process
from thence.model.reasons import CODES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.attribution.cuda_graphs.by_alignment import Outcome
    from thence.attribution.cuda_graphs.by_node import Executed, Match
    from thence.attribution.cuda_graphs.replays import Group
    from thence.model.arrays import Int64
    from thence.model.graph_labels import CapturedCall, GraphLabels
    from thence.model.tables import Tables


_MAX_LISTED = 3  # launches whose first difference is reported


def join_labels(tables: Tables, labels: Sequence[GraphLabels]) -> JoinedLabels:
    """Joins labels files to the activities of a trace.

    Args:
        labels: each applies to the ranks of the process that saved it.
    """
    replays = Replays.of(tables)
    if not len(replays.rows) or not labels:
        return JoinedLabels()
    assigned = AssignedLabels.of(replays)
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
    return JoinedLabels(places, tuple(notes), tuple(foreign), dict(labelled))


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
    names: KernelNames
    label: Int64
    candidates: list[tuple[Candidate, Signatures]]

    @classmethod
    def of(cls, file: GraphLabels, label: Int64, replays: Replays) -> _File:
        traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
        names = KernelNames(file.kernels, traced)
        candidates = []
        for graph in file.graphs:
            if graph.edges is None or graph.nodes["kernel"].null_count() == graph.nodes.height:
                continue
            of_node = values_or(graph.nodes["label"], -1)
            kernels = [
                kind if k is None else (file.kernels[k].demangled or file.kernels[k].name)
                for kind, k in graph.nodes.select("type", "kernel").iter_rows()
            ]
            title = f"captured graph {graph.id}"
            candidate = Candidate(graph, names, label[of_node], title, kernels)
            candidates.append((candidate, candidate.signatures(replays)))
        return cls(file, names, label, candidates)


def _by_alignment(
    files: Sequence[_File], assigned: AssignedLabels, rows: Int64, fewer: Sequence[Int64], labelled: Counter[str]
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
    group: Group, replays: Replays, candidates: Sequence[tuple[Candidate, Signatures]], fewer: Sequence[Int64]
) -> Outcome:
    """Aligns launches; where nodes that fit equally well differ in what their labels say, uses what they say alike.

    Args:
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
        for row, reason in refused[:_MAX_LISTED]
    ]
    if len(refused) > _MAX_LISTED:
        texts.append(f"{len(refused):,} of {count:,} graph launches are not labelled")
    return texts


def _by_ids(
    files: Sequence[_File],
    assigned: AssignedLabels,
    rows: Int64,
    distinct_labels: _DistinctLabels,
    labelled: Counter[str],
) -> tuple[Int64, list[str], list[tuple[str, str]]]:
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
        fitting = [(file, matched) for file, matched in matches if matched.refused is None]
        fitting = [(file, matched) for file, matched in fitting if matched.by_id] or fitting
        for file, matched in matches:
            if matched.refused is None or matched.foreign:
                continue
            text = f"executable graph {graph.id} ran other kernels than were captured: {matched.refused}"
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
    assigned: AssignedLabels,
    graph: Executed,
    matches: Sequence[tuple[_File, Match]],
    distinct_labels: _DistinctLabels,
    labelled: Counter[str],
) -> list[str]:
    """Stores the labels of one executable graph's nodes; returns notes on contradictions."""
    labels_of_node: dict[int, dict[int, str]] = {}  # for each node number, label numbers and their files
    rules: dict[int, str] = {}
    ran, counts = np.unique(graph.number, return_counts=True)
    activities = dict(zip(ran.tolist(), counts.tolist(), strict=True))
    for file, matched in matches:
        for number, label, rule in zip(matched.number, matched.label, matched.rule, strict=True):
            of_file, of_node = int(file.label[label]), labels_of_node.setdefault(number, {})
            rules.setdefault(number, rule)
            if of_file >= 0:
                of_node.setdefault(of_file, file.labels.source)
                labelled[file.labels.source] += activities[number]
    differing: dict[tuple[str, str], list[int]] = {}
    of_number: dict[int, int] = {}
    for number, labels in labels_of_node.items():
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
        + distinct_labels.difference(labels_of_node[nodes[0]], f"node {nodes[0]}")
        + "; these nodes get no label: give only the file that the traced process saved"
        for (first, second), nodes in differing.items()
    ]


@dataclass
class _DistinctLabels:
    """Distinct labels of all files, numbered."""

    labels: list[Label] = field(default_factory=list)
    by_text: dict[str, int] = field(default_factory=dict)
    of_merged: dict[tuple[int, ...], int | None] = field(default_factory=dict)

    def numbers(self, file: GraphLabels) -> Int64:
        """The number of each label of a file; index -1 gives -1."""
        result = np.full(len(file.labels) + 1, -1)
        for i, label in enumerate(file.labels):
            result[i] = self._number(label)
        return result

    def fewer(self) -> tuple[Int64, Int64]:
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

    def _reduced(self, labels: Sequence[Label]) -> Int64:
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
        first, second, *_ = (self.labels[number] for number in numbers)
        if _longer(first.path, second.path) is None:
            paths = "/".join(first.path), "/".join(second.path)
            return f"{node} is `{paths[0]}` in one and `{paths[1]}` in the other"
        names = [f.name for f in dataclasses.fields(Label) if f.name != "path"]
        name = next(n for n in names if _same(getattr(first, n), getattr(second, n)) is None)
        return f"{node} has another {name} in one than in the other"

    def frame(self) -> pl.DataFrame:
        """The place columns of each label."""
        rows = [_place(label) for label in self.labels]
        schema = {**dict.fromkeys(PLACE_COLUMNS, pl.String), **dict.fromkeys(CALL_COLUMNS, pl.Int32)}
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


# ---- Whether labels and trace are of one process


_CLOCKS_NS = 2_000_000_000  # by how much clocks of one machine may disagree about when a process began


def process_mismatch(labels: GraphLabels, tables: Tables, rank: int) -> str | None:
    """The reason why labels are not of a rank's process, as the end of a sentence; None if they may be.

    Compares process id, rank, boot of the machine, and the time of the trace with the time at which the
    labelled process began; a fact that either side lacks is not compared.
    """
    process = labels.process
    reason = _other_process(process, tables, rank)
    if reason is not None:
        return reason
    boots = {f["boot"] for f in tables.meta.facts if isinstance(f.get("boot"), str)}
    if process.boot and boots and process.boot not in boots:
        return "the machine was restarted between capture and trace"
    began = tables.gpu.filter(pl.col("rank") == rank)["start"].min()
    if process.started_ns is None or tables.meta.epoch_ns is None or not isinstance(began, int):
        return None
    if began + tables.meta.epoch_ns + _CLOCKS_NS < process.started_ns:
        return (
            f"the process that captured these graphs began at {_moment(process.started_ns)}, "
            f"but the trace at {_moment(began + tables.meta.epoch_ns)}"
        )
    return None


def _other_process(process: Process, tables: Tables, rank: int) -> str | None:
    """The reason as in `process_mismatch`, by process ids and ranks alone."""
    # Profilers write their own overhead under a process id that does not exist.
    of_rank = tables.host.filter((pl.col("rank") == rank) & (pl.col("process") > 0))
    pids = of_rank["process"].unique().to_list()
    if process.pid is not None and pids and process.pid not in pids:
        traced = ", ".join(str(pid) for pid in sorted(pids)[:3])
        return f"process {process.pid} captured these graphs, but the trace is of process {traced}"
    several = len(tables.ranks) > 1
    if several and process == Process(started_ns=process.started_ns):
        return (
            "the file does not say which rank captured these graphs, and the trace holds "
            f"{len(tables.ranks)} ranks: rename it to kernel_annotations_rank0_... (with its rank), "
            "or label each rank alone"
        )
    # A trace of one process may lack its rank. Process ids alone prove nothing: they are equal in equal containers.
    ranked = not pids or several or process.pid is None or tables.meta.ranks_stated
    if ranked and process.rank is not None and process.rank != rank:
        return f"rank {process.rank} captured these graphs, but the trace is of rank {rank}"
    return None


def _moment(ns: int) -> str:
    try:
        moment = datetime.fromtimestamp(ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"
    return moment.isoformat(sep=" ", timespec="seconds")
