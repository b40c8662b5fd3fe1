"""A captured CUDA graph with the times of its replays: nodes, edges, and its critical path.

The critical path is the path along the edges with the largest sum of mean durations. On a path, no node runs before
the one that it waits for has ended, so that sum is at most the time of a replay; in the rest of that time no node of
the path runs. Edges that start a kernel before the end of the previous one (programmatic dependent launch) can make
the sum larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.cuda_graphs.nodes import called_rows, graph_runs
from thence.attribution.cuda_graphs.replays import in_cuda_graph
from thence.errors import DamagedInput, MissingData, UsageError
from thence.model.answer import Answer, TableView
from thence.units import format_ns, format_share, several

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.analysis.cuda_graphs.nodes import GraphRuns
    from thence.model.arrays import Float64, Int64
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import CapturedGraph, GraphLabels


_MAX_LISTED = 8  # graphs that a sentence names


@dataclass(frozen=True)
class ReplayedGraph(Answer):
    """A captured graph with the mean times of its replays.

    Attributes:
        rank, id: of the graph; the id is that of its capture, or of the executable graph if only that is known.
        executables: ids of the executable graphs that ran; empty if the trace has no ids.
        source: the file with its edges.
        nodes: the nodes that left activities, each after the nodes that it waits for: number; kind (kernel, memcpy or
            memset); name; label, module and phase (null if unknown); start_ns (mean, from the start of the replay);
            duration_ns (mean); total_ns (of all replays); critical (whether it is on the critical path).
        edges: rows of nodes, shape (n, 2): a node, and one that waits for it.
        replays: complete replays, which all times are of.
        incomplete: replays that lack activities of some nodes.
        replay_ns: mean time of a replay, from the start of its first activity to the end of its last.
        busy_ns: mean time of a replay in which at least one of its nodes ran.
        path_ns: sum of the mean durations on the critical path.
        silent: nodes of the captured graph that left no activity; edges lead past them.
        others: further graphs with known edges, most GPU time first: rank, graph (id), replays and total_ns.
        unknown_ns: GPU time of activities in CUDA graphs whose edges are unknown.
    """

    rank: int
    id: int
    executables: tuple[int, ...]
    source: str
    nodes: pl.DataFrame
    edges: Int64
    replays: int
    incomplete: int
    replay_ns: float
    busy_ns: float
    path_ns: float
    silent: int
    others: pl.DataFrame
    unknown_ns: int

    @property
    def title(self) -> str:
        """Which graph it is; with the rank if the trace has graphs of several ranks."""
        return f"graph {self.id}{self._of_rank(self.rank)}"

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the graph is, its critical path, and what else the trace holds, as sentences."""
        nodes = self.nodes
        on_path = int(nodes["critical"].sum())
        taken = f"critical path: {format_ns(self.path_ns)} in {on_path:,} of {several(nodes.height, 'node')}, "
        rest = self.replay_ns - self.path_ns
        if rest >= 0:
            taken += (
                f"{format_share(self.path_ns, self.replay_ns)} of a replay; in the remaining {format_ns(rest)} no node "
                "of the path runs: gaps between dependent nodes, or nodes that wait for a free GPU"
            )
        else:
            taken += (
                f"more than a replay takes ({format_ns(self.replay_ns)}): some nodes begin before the node that they "
                "wait for has ended (programmatic dependent launch)"
            )
        size = f"{self.title}: {several(nodes.height, 'node')} with activities, {several(len(self.edges), 'edge')}, "
        replays = f"{several(self.replays, 'replay')} of {format_ns(self.replay_ns)}"
        lines = [f"{size}{replays} (mean, first start to last end)", taken]
        if self.silent:
            lines.append(
                f"{several(self.silent, 'node')} without activities (empty nodes, events, host functions) "
                "are left out; edges lead past them"
            )
        if self.incomplete:
            lines.append(f"{several(self.incomplete, 'replay')} without activities of some nodes: left out")
        if self.others.height:
            listed = ", ".join(
                f"{row['graph']}{self._of_rank(row['rank'])} ({format_ns(row['total_ns'])})"
                for row in self.others.head(_MAX_LISTED).iter_rows(named=True)
            )
            more = " ..." if self.others.height > _MAX_LISTED else ""
            elsewhere = "; for graphs of one rank give its trace alone" if self._of_rank(0) else ""
            lines.append(f"other graphs, for --graph-id: {listed}{more}{elsewhere}")
        if self.unknown_ns:
            lines.append(f"{format_ns(self.unknown_ns)} of GPU time is in CUDA graphs whose edges are unknown")
        return tuple(lines)

    def about(self) -> tuple[str, ...]:
        """See `Answer`."""
        return f"CUDA {self.title}", self.sentences[0]

    def views(self) -> tuple[TableView, ...]:
        """The nodes in order."""
        places = {"name": "kernel", "label": "label", "module": "module"}
        times = {"duration_ns": "mean", "critical": "critical path"}
        return (TableView(self.nodes, places | times, bar="duration_ns"),)

    def remarks(self) -> tuple[str, ...]:
        """See `Answer`."""
        return self.sentences[1:]

    def _of_rank(self, rank: int) -> str:
        return "" if set(self.others["rank"]) <= {self.rank} else f" of rank {rank}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; nodes of edges and of the path are their numbers in the captured graph."""
        number = self.nodes["number"].to_numpy()
        return {
            "rank": self.rank,
            "graph": self.id,
            "executables": list(self.executables),
            "replays": self.replays,
            "replay_ns": self.replay_ns,
            "busy_ns": self.busy_ns,
            "path_ns": self.path_ns,
            "path": self.nodes.filter("critical")["number"].to_list(),
            "nodes": self.nodes.to_dicts(),
            "edges": number[self.edges].tolist() if len(self.edges) else [],
            "silent_nodes": self.silent,
            "others": self.others.to_dicts(),
            "unknown_ns": self.unknown_ns,
        }


def replayed_graph(trace: Attributed, labels: Sequence[GraphLabels], graph_id: int | None = None) -> ReplayedGraph:
    """A captured graph with the times of its replays.

    Args:
        graph_id: id of the captured or of the executable graph; None: the graph with the most GPU time.

    Raises:
        MissingData: no graph in the trace has known edges.
        UsageError: none of them has this id.
        DamagedInput: the edges contain a cycle.
    """
    launch = called_rows(trace)
    graphs: dict[tuple[int, str, int], list[GraphRuns]] = {}
    ranks = trace.gpu["rank"].to_numpy()
    for runs in graph_runs(trace, launch, labels):
        key = (int(ranks[runs.rows[0]]), runs.file.source, runs.captured.id)
        graphs.setdefault(key, []).append(runs)
    if not graphs:
        raise MissingData(f"{trace.meta.named}: {_why_none(trace, labels)}")
    duration = trace.gpu["duration"].to_numpy()
    totals = {key: int(sum(duration[runs.rows].sum() for runs in parts)) for key, parts in graphs.items()}
    order = sorted(graphs, key=lambda key: (-totals[key], key))
    wanted = [key for key in order if graph_id is None or graph_id in _ids(graphs[key])]
    if not wanted:
        listed = ", ".join(str(key[2]) for key in order[:_MAX_LISTED])
        raise UsageError(
            f"{trace.meta.named}: no graph with known edges has the id {graph_id}; there are: {listed}"
            + (" ..." if len(order) > _MAX_LISTED else "")
        )
    chosen = wanted[0]
    others = pl.DataFrame(
        [
            (key[0], key[2], sum(len(np.unique(runs.launch)) for runs in graphs[key]), totals[key])
            for key in order
            if key != chosen
        ],
        schema={"rank": pl.Int64, "graph": pl.Int64, "replays": pl.Int64, "total_ns": pl.Int64},
        orient="row",
    )
    inside = int(duration[in_cuda_graph(trace)].sum())
    return _timed(trace, graphs[chosen], others, inside - sum(totals.values()))


def _ids(parts: Sequence[GraphRuns]) -> set[int | None]:
    return {parts[0].captured.id, *(runs.executable for runs in parts)}


def _why_none(trace: Attributed, labels: Sequence[GraphLabels]) -> str:
    """Why no graph has known edges, with the way out."""
    inside = in_cuda_graph(trace)
    if not inside.any():
        return "nothing in it ran in a CUDA graph"
    if not trace.gpu["program"].is_null().to_numpy()[inside].any():
        return (
            "its CUDA graphs are command buffers of XLA, whose edges no input has; thence report --by hlo has the time "
            "of their instructions"
        )
    if not any(graph.edges is not None for file in labels for graph in file.graphs):
        without = " the labels have none (PyTorch's annotation files never do);" if labels else ""
        return f"the edges of its CUDA graphs are unknown:{without} {WAY_OUT}"
    return (
        "the graphs with edges in the labels are not those that ran, or the trace does not tell which activity is "
        "which node: it needs the ids of graph nodes (thence record, torch 2.12), or kernels that differ from each "
        "other in what they wait for"
    )


def _timed(trace: Attributed, parts: Sequence[GraphRuns], others: pl.DataFrame, unknown_ns: int) -> ReplayedGraph:
    """The graph with the means of its complete replays."""
    first = parts[0]
    runs, launches = _runs(trace, parts)
    replays = runs.group_by("launch").agg(took=pl.col("end").max() - pl.col("start").min(), busy=_union())
    means = (
        runs.group_by("node")
        .agg(
            row=pl.col("row").min(),
            start_ns=pl.col("offset").mean(),
            duration_ns=pl.col("duration").mean(),
            total_ns=pl.col("duration").sum(),
        )
        .sort("node")
    )
    node = means["node"].to_numpy()
    edges = np.searchsorted(node, first.edges()).reshape(-1, 2)
    order = _order(edges, means["start_ns"].to_numpy(), first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    edges = place[edges]
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    means = means[order]
    critical, path_ns = _longest_path(edges, means["duration_ns"].to_numpy())
    row = means["row"].cast(pl.UInt32)
    nodes = pl.DataFrame(
        {
            "number": first.captured.nodes["number"].gather(means["node"].cast(pl.UInt32)),
            "kind": trace.gpu["kind"].gather(row).cast(pl.String),
            "name": trace.gpu["name"].gather(row).cast(pl.String),
            **{kind: trace.places[kind].gather(row).cast(pl.String) for kind in ("label", "module", "phase")},
            "start_ns": means["start_ns"],
            "duration_ns": means["duration_ns"],
            "total_ns": means["total_ns"],
            "critical": critical,
        }
    )
    executables = sorted({part.executable for part in parts if part.executable is not None})
    return ReplayedGraph(
        int(trace.gpu["rank"][int(first.rows[0])]), first.captured.id, tuple(executables), first.file.source,
        nodes, edges, replays.height, launches - replays.height, float(replays["took"].mean() or 0.0),  # type: ignore[arg-type]
        float(replays["busy"].mean() or 0.0),  # type: ignore[arg-type]
        path_ns, first.captured.nodes.height - nodes.height, others, unknown_ns,
    )  # fmt: skip


def _runs(trace: Attributed, parts: Sequence[GraphRuns]) -> tuple[pl.DataFrame, int]:
    """The activities of the complete replays (all replays, if none is), and the number of all replays.

    Returns:
        row (of gpu), launch, node, start, duration, end and offset (ns from the start of the replay).
    """
    runs = pl.concat([pl.DataFrame({"row": part.rows, "launch": part.launch, "node": part.node}) for part in parts])
    gpu = trace.gpu.select("start", "duration", end=pl.col("start") + pl.col("duration"))
    runs = runs.with_columns(gpu[runs["row"].cast(pl.UInt32)])
    whole = runs.filter(pl.len().over("launch") == runs["node"].n_unique())
    launches = runs["launch"].n_unique()
    runs = whole if whole.height else runs
    return runs.with_columns(offset=pl.col("start") - pl.col("start").min().over("launch")), launches


def _union() -> pl.Expr:
    """Time in which at least one of the activities of a group runs."""
    start, end = pl.col("start").sort_by("start"), pl.col("end").sort_by("start")
    reached = end.cum_max().shift(1)
    begins = pl.max_horizontal(start, reached.fill_null(start.min()))
    return (end - begins).clip(0).sum()


def _order(edges: Int64, start: Float64, runs: GraphRuns) -> Int64:
    """The nodes by mean start, each after the nodes that it waits for."""
    after: list[list[int]] = [[] for _ in start]
    for source, target in edges.tolist():
        after[source].append(target)
    waits = np.bincount(edges[:, 1], minlength=len(start)).tolist()
    times = start.tolist()
    ready = [(times[node], node) for node, count in enumerate(waits) if not count]
    heapify(ready)
    order = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                heappush(ready, (times[later], later))
    if len(order) < len(times):
        raise DamagedInput(runs.file.source, f"the edges of graph {runs.captured.id} contain a cycle")
    return np.array(order, np.int64)


def _longest_path(edges: Int64, duration: Float64) -> tuple[npt.NDArray[np.bool_], float]:
    """Which nodes are on the path with the largest sum of durations, and that sum; edges lead to later nodes."""
    before: list[list[int]] = [[] for _ in duration]
    for source, target in edges.tolist():
        before[target].append(source)
    ends, previous = duration.tolist(), [-1] * len(duration)
    for node, sources in enumerate(before):
        if sources:
            previous[node] = max(sources, key=ends.__getitem__)
            ends[node] += ends[previous[node]]
    critical = np.zeros(len(duration), np.bool_)
    last = node = int(np.argmax(ends))
    while node >= 0:
        critical[node] = True
        node = previous[node]
    return critical, float(ends[last])


WAY_OUT = (
    "edges are in recordings of thence record (PyTorch), in labels of thence.save_labels(), and in files of "
    "torch.cuda.export_graph_data (torch 2.15), which --labels takes"
)
"""Where edges of captured graphs come from, for messages of analyses that lack them."""


def graph_edges(labels: Sequence[GraphLabels]) -> pl.DataFrame:
    """One row for each edge: a node, and a node that waits for it.

    Returns:
        rank (null where the file does not state it), graph (id), node (number), kernel (name; the type of the node
        if it is no kernel), label, next_node, next_kernel, next_label. For each graph, rows are in order of node
        and next_node.

    Raises:
        MissingData: none of the labels hold edges.
    """
    frames = [_edges(graph, file) for file in labels for graph in file.graphs if graph.edges is not None]
    if not frames:
        raise MissingData(
            f"the labels have no edges of CUDA graphs, and PyTorch's annotation files never do: {WAY_OUT}"
        )
    return pl.concat(frames)


def _edges(graph: CapturedGraph, file: GraphLabels) -> pl.DataFrame:
    assert graph.edges is not None
    kernels = pl.Series([k.demangled or k.name for k in file.kernels], dtype=pl.String)
    paths = pl.Series(["/".join(label.path) or None for label in file.labels], dtype=pl.String)
    nodes = graph.nodes.select(
        "number",
        kernel=pl.coalesce(kernels.gather(graph.nodes["kernel"].cast(pl.UInt32)), pl.col("type")),
        label=paths.gather(graph.nodes["label"].cast(pl.UInt32)),
    )
    edges = pl.DataFrame(np.asarray(graph.edges, np.int64), schema=["node", "next_node"])
    following = nodes.rename({name: f"next_{name}" for name in ("kernel", "label")})
    return (
        edges.join(nodes, left_on="node", right_on="number", how="left")
        .join(following, left_on="next_node", right_on="number", how="left")
        .select(
            pl.lit(file.process.rank, pl.Int64).alias("rank"),
            pl.lit(graph.id, pl.Int64).alias("graph"),
            *("node", "kernel", "label", "next_node", "next_kernel", "next_label"),
        )
        .sort("node", "next_node")
    )
