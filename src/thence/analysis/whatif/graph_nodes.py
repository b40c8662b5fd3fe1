"""Activities that were launched as nodes of CUDA graphs, and the dependencies between them.

An API call that launched several activities launched a graph, whatever else the producer records of it. The edges of
a graph are known if labels of its capture hold them (`thence.save_labels` and recordings write such labels) and the
trace identifies the nodes by the ids of executable graph and node. Nodes without an activity, such as empty nodes, host
functions and events, are bypassed: their predecessors are connected with their successors. Bodies of loops and
conditions may run a node several times in a launch, which the edges do not describe, so the edges of such launches
count as unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from thence.model.attributed import Attributed
    from thence.model.graph_labels import CapturedGraph, GraphLabels

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["GraphNodes", "graph_nodes"]

_LOW = np.uint64((1 << 32) - 1)
_SHIFT = np.uint64(32)


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


def graph_nodes(trace: Attributed, launch: Int64, labels: Sequence[GraphLabels] = ()) -> GraphNodes:
    """The activities inside launches of CUDA graphs, and the edges between them.

    Args:
        trace: the attributed trace.
        launch: host row of the call that launched each activity; `NO_ROW` if unknown.
        labels: labels of its captured graphs.
    """
    inside = (
        trace.gpu["graph"].is_not_null().to_numpy() | trace.gpu["node"].is_not_null().to_numpy()
    )
    called = np.flatnonzero(launch != NO_ROW)
    if trace.host.height:
        is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
        called = called[is_call[launch[called]]]
        inside[called] |= np.bincount(launch[called], minlength=1)[launch[called]] > 1
    known = np.zeros(len(launch), np.bool_)
    parts = list(_of_labels(trace, launch, labels))
    for rows, _, _ in parts:
        known[rows] = True
    nothing = np.empty(0, np.int64)
    source, target = (np.concatenate([nothing, *(part[side] for part in parts)]) for side in (1, 2))
    return GraphNodes(inside, known, source, target)


def _of_labels(
    trace: Attributed, launch: Int64, labels: Sequence[GraphLabels]
) -> Iterator[tuple[Int64, Int64, Int64]]:
    """For each captured graph with edges: the rows of gpu whose edges are known, and the edges' sources and targets."""
    node = trace.gpu["node"].fill_null(0).to_numpy()
    named = (launch != NO_ROW) & trace.gpu["node"].is_not_null().to_numpy()
    graph = trace.gpu["graph"].fill_null(0).to_numpy() & _LOW
    executable = np.where(node > _LOW, node >> _SHIFT, graph).astype(np.int64)
    number = (node & _LOW).astype(np.int64)
    ranks = trace.gpu["rank"].to_numpy()
    for file in labels:
        ours = named if file.process.rank is None else named & (ranks == file.process.rank)
        for captured in file.graphs:
            rows = np.flatnonzero(ours & np.isin(executable, [captured.id, *captured.executables]))
            if captured.edges is None or not len(rows):
                continue
            numbers = captured.nodes["number"].to_numpy()
            if not np.isin(number[rows], numbers).all():
                continue  # rows of another graph, or of a child graph whose edges are not among these
            run = pl.DataFrame({"row": rows, "launch": launch[rows], "number": number[rows]})
            once = run.filter(pl.struct("launch", "number").is_unique().all().over("launch"))
            yield (once["row"].to_numpy(), *_joined(once, captured))


def _joined(run: pl.DataFrame, captured: CapturedGraph) -> tuple[Int64, Int64]:
    """Sources and targets of the edges of a graph in each of its launches."""
    pairs = _without_silent(captured, set(run["number"].unique().to_list()))
    edges = pl.DataFrame(pairs, schema={"number": pl.Int64, "next": pl.Int64}, orient="row")
    both = run.join(edges, on="number").join(
        run, left_on=["launch", "next"], right_on=["launch", "number"], suffix="_next"
    )
    return both["row"].to_numpy(), both["row_next"].to_numpy()


def _without_silent(captured: CapturedGraph, shown: set[int]) -> list[tuple[int, int]]:
    """Edges between nodes with activities; predecessors of other nodes are connected with their successors."""
    assert captured.edges is not None
    behind: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for source, target in np.asarray(captured.edges, np.int64).tolist():
        behind.setdefault(source, set()).add(target)
        before.setdefault(target, set()).add(source)
    for silent in [number for number in {*behind, *before} if number not in shown]:
        sources, targets = before.pop(silent, set()), behind.pop(silent, set())
        for source in sources:
            behind[source] = (behind[source] - {silent}) | targets
        for target in targets:
            before[target] = (before[target] - {silent}) | sources
    return [(source, target) for source, targets in behind.items() for target in targets]
