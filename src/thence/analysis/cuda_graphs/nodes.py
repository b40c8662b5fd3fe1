"""Activities that were launched as nodes of CUDA graphs, and the dependencies between them.

An API call that launched several activities launched a graph, whatever else the producer records of it. The edges of
a graph are known if labels of its capture have them: those of `thence.save_labels`, of recordings, and what PyTorch's
``export_graph_data`` writes. The node of each activity is known by the ids of executable graph and node, or, in traces
without ids, by aligning the replay with the graph; kernel names are compared in both cases.

Nodes without an activity, such as empty nodes, host functions and events, are bypassed: their predecessors are
connected with their successors. Bodies of loops and conditions may run a node several times in a launch, which the
edges do not describe, so the edges of such launches count as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.cuda_graphs.alignment import edges_of
from thence.attribution.cuda_graphs.by_alignment import Candidate, aligned_group
from thence.attribution.cuda_graphs.by_node import executed, match
from thence.attribution.cuda_graphs.join_labels import process_mismatch
from thence.attribution.cuda_graphs.replays import Replays
from thence.attribution.cuda_graphs.signatures import KernelNames
from thence.model.columns import not_null, row_numbers
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import CapturedGraph, GraphLabels


@dataclass(frozen=True)
class GraphRuns:
    """The launches of one captured graph on one rank, in which each activity is that of a known node.

    Attributes:
        captured: the graph; it has edges.
        file: the labels that it is from.
        executable: id of the executable graph that ran; None if the trace has no ids.
        rows: rows of gpu.
        launch: host row of the launch of each.
        node: row among ``captured.nodes`` of each; a node runs once in a launch.
    """

    captured: CapturedGraph
    file: GraphLabels
    executable: int | None
    rows: Int64
    launch: Int64
    node: Int64

    def edges(self) -> Int64:
        """Pairs of rows of ``captured.nodes``: a node with activities, and one that waits for it; shape (n, 2).

        Nodes that left no activity in any launch are bypassed.
        """
        count, edges = edges_of(self.captured)
        shown = np.zeros(count, np.bool_)
        shown[self.node] = True
        return _without_silent(edges, shown)


@dataclass(frozen=True)
class GraphNodes:
    """The activities of launches of CUDA graphs, and the edges between them.

    Attributes:
        inside: mask of the activities that a launch of a graph launched.
        known: mask of those in launches whose edges are known.
        source, target: rows of gpu, a pair for each known edge: the target waits for the end of the source.
    """

    inside: Mask
    known: Mask
    source: Int64
    target: Int64


def called_rows(trace: Attributed) -> Int64:
    """Host row of the API call that launched each activity; `NO_ROW` if unknown."""
    launch = row_numbers(trace.places["launch"])
    if not trace.host.height:
        return np.full(len(launch), NO_ROW)
    is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
    return np.where((launch != NO_ROW) & is_call[launch], launch, NO_ROW)


def graph_nodes(trace: Attributed, launch: Int64, labels: Sequence[GraphLabels] = ()) -> GraphNodes:
    """The activities inside launches of CUDA graphs, and the edges between them.

    Args:
        launch: host row of the call that launched each activity; `NO_ROW` if unknown.
    """
    inside = not_null(trace.gpu["graph"]) | not_null(trace.gpu["node"])
    called = np.flatnonzero(launch != NO_ROW)
    if trace.host.height:
        is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
        called = called[is_call[launch[called]]]
        inside[called] |= np.bincount(launch[called], minlength=1)[launch[called]] > 1
    known = np.zeros(len(launch), np.bool_)
    sources, targets = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for runs in graph_runs(trace, launch, labels):
        known[runs.rows] = True
        source, target = _edges_of_launches(runs)
        sources.append(source)
        targets.append(target)
    return GraphNodes(inside, known, np.concatenate(sources), np.concatenate(targets))


def graph_runs(trace: Attributed, launch: Int64, labels: Sequence[GraphLabels]) -> Iterator[GraphRuns]:
    """The launches of the captured graphs whose edges are known; no activity is in two of them.

    Args:
        launch: host row of the call that launched each activity; `NO_ROW` if unknown.
    """
    with_edges = _distinct(labels)
    if not with_edges or trace.gpu.is_empty():
        return
    replays = Replays.of(trace)
    traced = replays.kinds.frame["name"].drop_nulls().unique(maintain_order=True)
    names = [KernelNames(file.kernels, traced) for file in with_edges]
    files = list(zip(with_edges, names, strict=True))
    fitting = {
        rank: [(file, names) for file, names in files if not process_mismatch(file, trace, rank)]
        for rank in trace.gpu["rank"].unique().to_list()
    }
    left = np.zeros(trace.gpu.height, np.bool_)
    left[replays.rows] = launch[replays.rows] != NO_ROW
    for graph in executed(replays):
        left[graph.rows] = False
        for file, of_file in fitting[graph.rank]:
            candidate = match(graph, file, of_file, replays.kinds.frame)
            if candidate.refused is not None or candidate.graph is None:
                continue
            number, row = np.array(candidate.number, np.int64), np.array(candidate.row, np.int64)
            order = np.argsort(number)
            position = np.searchsorted(number, graph.number, sorter=order).clip(0, len(order) - 1)
            matched = order[position]
            node = np.where(number[matched] == graph.number, row[matched], NO_ROW)
            runs = GraphRuns(candidate.graph, file, graph.id, graph.rows, launch[graph.rows], node)
            if len((once := _known_once(runs)).rows):
                yield once
                break
    for rank, of_rank in fitting.items():
        rows = np.flatnonzero(left & (trace.gpu["rank"].to_numpy() == rank))
        yield from _aligned(replays, rows, launch, of_rank)


def _distinct(labels: Sequence[GraphLabels]) -> list[GraphLabels]:
    """The label files with their graphs that have edges, each graph once: a file may be given and found as well."""
    seen = set()
    result = []
    for file in labels:
        graphs = [graph for graph in file.graphs if graph.edges is not None and (file.process, graph.id) not in seen]
        seen |= {(file.process, graph.id) for graph in graphs}
        if graphs:
            result.append(replace(file, graphs=tuple(graphs)))
    return result


def _known_once(runs: GraphRuns) -> GraphRuns:
    """The launches whose nodes are all known and ran once."""
    frame = pl.DataFrame({"launch": runs.launch, "node": runs.node})
    once = pl.struct("launch", "node").is_unique().all().over("launch")
    known = (pl.col("node").min().over("launch") >= 0) & (pl.col("launch") != NO_ROW)
    kept = frame.select(once & known).to_series().to_numpy()
    return replace(runs, rows=runs.rows[kept], launch=runs.launch[kept], node=runs.node[kept])


def _aligned(
    replays: Replays, rows: Int64, launch: Int64, files: Sequence[tuple[GraphLabels, KernelNames]]
) -> Iterator[GraphRuns]:
    """The launches without ids that are aligned with a captured graph without any ambiguity."""
    candidates = []
    for file, names in files:
        for graph in file.graphs:
            if graph.nodes["kernel"].null_count() < graph.nodes.height:
                every = np.arange(graph.nodes.height)
                candidate = Candidate(graph, names, every, f"captured graph {graph.id}", [""] * len(every))
                candidates.append((file, candidate, candidate.signatures(replays)))
    if not candidates or not len(rows):
        return
    for group in replays.groups(rows):
        outcomes = [
            (file, one.graph, aligned_group(group, replays, [(one, signatures)]))
            for file, one, signatures in candidates
        ]
        fitting = [(file, graph, outcome) for file, graph, outcome in outcomes if None in outcome.refused]
        if len(fitting) != 1:
            continue
        ((file, graph, outcome),) = fitting
        flat = group.rows.reshape(-1)
        runs = GraphRuns(graph, file, None, flat, launch[flat], outcome.label.reshape(-1))
        if len((once := _known_once(runs)).rows):
            yield once


def _edges_of_launches(runs: GraphRuns) -> tuple[Int64, Int64]:
    """Rows of gpu at both ends of the edges of a graph, in each of its launches."""
    run = pl.DataFrame({"row": runs.rows, "launch": runs.launch, "node": runs.node})
    edges = pl.DataFrame(runs.edges(), schema={"node": pl.Int64, "next": pl.Int64})
    both = run.join(edges, on="node").join(run, left_on=["launch", "next"], right_on=["launch", "node"], suffix="_next")
    return both["row"].to_numpy(), both["row_next"].to_numpy()


def _without_silent(edges: Int64, shown: Mask) -> Int64:
    """Edges between shown nodes; predecessors of other nodes are connected with their successors."""
    if shown.all():
        return np.unique(edges.reshape(-1, 2), axis=0)
    behind: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for source, target in edges.tolist():
        behind.setdefault(source, set()).add(target)
        before.setdefault(target, set()).add(source)
    for silent in [node for node in {*behind, *before} if not shown[node]]:
        sources, targets = before.pop(silent, set()), behind.pop(silent, set())
        for source in sources:
            behind[source] = (behind[source] - {silent}) | targets
        for target in targets:
            before[target] = (before[target] - {silent}) | sources
    pairs = sorted((source, target) for source, targets in behind.items() for target in targets)
    return np.array(pairs, np.int64).reshape(-1, 2)
