"""Changes to kernels inside of CUDA graphs: refused without the edges of the graph, replayed along them with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from helpers import event, kernel, opened
from thence.analysis.cuda_graphs.nodes import graph_nodes
from thence.analysis.whatif.answer import what_if
from thence.analysis.whatif.changes import parse_change
from thence.analysis.whatif.graph import program_graph
from thence.model.graph_labels import NODES, CapturedGraph, GraphLabels
from thence.model.intervals import NO_ROW

if TYPE_CHECKING:
    from pathlib import Path

    import thence

EXECUTABLE, CAPTURED = 9, 4
# Node 3 is empty: it leaves nothing in a trace, and leads from both branches to the last kernel.
EDGES = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]
SPANS = {0: ("root", 20, 10, 7), 1: ("long", 30, 40, 8), 2: ("short", 30, 10, 7), 4: ("last", 70, 10, 7)}  # fmt: skip
"""Of each node: name, start (us), duration and stream."""


def call(name: str, start: int, duration: int, correlation: int) -> dict[str, Any]:
    return event("cuda_runtime", name, start, duration, args={"correlation": correlation})


def replays(folder: Path, *, ids: bool) -> thence.Trace:
    """Two launches of a graph, each of which the host waits for."""
    events = []
    for number, begin in enumerate((0, 100)):
        launched = number + 1
        events += [
            call("cudaGraphLaunch", begin + 10, 5, launched),
            call("cudaStreamSynchronize", begin + 16, 66, launched + 10),
        ]
        for node, (name, start, took, stream) in SPANS.items():
            about: dict[str, Any] = {"stream": stream}
            if ids:
                about |= {"graph id": EXECUTABLE, "graph node id": (EXECUTABLE << 32) + node}
            events.append(kernel(launched, begin + start, took, name=name, args=about))
    return opened(folder, events)


def labels_with(edges: list[tuple[int, int]] | None) -> list[GraphLabels]:
    """Labels of the graph."""
    nodes = pl.DataFrame({"number": range(5), "type": ["kernel", "kernel", "kernel", "empty", "kernel"]})
    nodes = nodes.with_columns(
        pl.lit(None, dtype).alias(name) for name, dtype in NODES.items() if name not in nodes
    ).select(pl.col(name).cast(dtype) for name, dtype in NODES.items())
    given = None if edges is None else np.array(edges, np.int64)
    graph = CapturedGraph(CAPTURED, (EXECUTABLE,), 0, nodes, given)
    return [GraphLabels("labels.json", graphs=(graph,))]


def gained(trace: thence.Trace, edges: list[tuple[int, int]] | None, text: str) -> tuple[str, float | None]:
    """The verdict, and the microseconds that the program gains."""
    row = what_if(
        trace.whole, program_graph(trace.whole, labels=labels_with(edges)), [parse_change("free", text)]
    ).rows.row(0, named=True)
    return row["verdict"], None if row["gain_ns"] is None else row["gain_ns"] / 1000


def test_along_edges_what_is_beside_the_longest_path_gains_nothing(tmp_path: Path) -> None:
    trace = replays(tmp_path, ids=True)
    # Without the long kernel the last one follows the short one, 30 us earlier but for the us that a node takes to
    # begin behind another, in both launches.
    assert gained(trace, EDGES, "kernel:^long$") == ("gain", 2 * (30 - 1))
    assert gained(trace, EDGES, "kernel:^short$") == ("noise", 0)
    assert gained(trace, EDGES, "kernel:^last$") == ("gain", 20)


def test_without_edges_it_is_refused(tmp_path: Path) -> None:
    for ids, edges in ((True, None), (False, EDGES)):
        folder = tmp_path / str(ids)
        folder.mkdir()
        assert gained(replays(folder, ids=ids), edges, "kernel:^long$") == ("refused", None)


def test_edges_lead_through_nodes_that_leave_no_activity(tmp_path: Path) -> None:
    trace = replays(tmp_path, ids=True).whole
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    found = graph_nodes(trace, launch, labels_with(EDGES))
    name, start = trace.gpu["name"].cast(pl.String).to_list(), trace.gpu["start"].to_list()
    pairs = {(name[a], name[b]) for a, b in zip(found.source, found.target, strict=True)}
    assert pairs == {("root", "long"), ("root", "short"), ("long", "last"), ("short", "last")}
    assert len(found.source) == 2 * len(pairs)
    assert all(0 < start[b] - start[a] < 60_000 for a, b in zip(found.source, found.target, strict=True))  # fmt: skip
    assert found.known.all()
    assert found.inside.all()


def test_a_node_that_runs_twice_in_a_launch_is_in_a_body_that_edges_do_not_tell_of(tmp_path: Path) -> None:
    events = [call("cudaGraphLaunch", 10, 5, 1)]
    about = {"graph id": EXECUTABLE, "graph node id": EXECUTABLE << 32}
    events += [kernel(1, at, 5, name="body", args=about) for at in (20, 40)]
    assert gained(opened(tmp_path, events), EDGES, "kernel:body") == ("refused", None)
