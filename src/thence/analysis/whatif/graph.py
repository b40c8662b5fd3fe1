"""The graph of a recorded program: what on the host and on the devices waited for what.

Nodes: host calls that launch, the beginnings and ends of host calls that wait, the beginnings of steps, and of
device activities; ends of collectives of several ranks. Edges:

    host      from one of these to the next on its thread: the work in between, as recorded
    launch    call to activity: the latency that one in ten launches to an idle stream stays below
    stream    activity to the next on its stream: its duration, and the gap that one in ten queued pairs stays below
    event     the last activity before a record to the first behind a wait for it
    wait      the last activity waited for to the return of the call
    handover  where a thread begins to work soon after another has stopped (autograd's), from that one to it
    graph     the first activity of a launched CUDA graph to the others, which keep their times after it, and the
              last to the first of the graph's next launch
    ranks     all ranks' beginnings of a collective to each rank's end

What a node is later than all of these explain stays with it as a delay, so that the replay of what was recorded is
exact; how much that is says whether predictions mean anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_threads import thread_numbers
from thence.analysis.whatif.edges import (
    CALL,
    START,
    STEP,
    Edges,
    Nodes,
    collective_ends,
    edges_through_events,
    graph_edges,
    handovers,
    latencies,
    launch_lags,
    wait_edges,
)
from thence.analysis.whatif.graph_nodes import graph_nodes
from thence.analysis.whatif.replay import Graph
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.whatif.graph_nodes import GraphNodes
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["Program", "longer_host_work", "program_graph", "stream_weights"]


@dataclass(frozen=True)
class Program:
    """The graph, and what its nodes and edges stand for.

    Attributes:
        graph: exact: its replay gives the recorded times. Times are ns after origin_ns.
        origin_ns: on the trace's clock.
        node_of_activity: node of the beginning of each row of gpu.
        end_of_activity: node of its end, for collectives of several ranks; else `NO_ROW`.
        gap: ns that are kept from each activity's end to the next of its stream, by row of gpu.
        overlapping: activities that the next on their stream did not wait for.
        row: of each node: row of host, or of gpu for activities.
        is_activity: which nodes are activities.
        edge_kind: of each edge of the graph, number in `EDGES`.
        edge_activity: row of gpu whose duration is part of the edge's weight, `NO_ROW` for none.
        moves: by row of gpu, ns that a collective of several ranks took after the last rank began, else its duration.
        thread: number of the thread of each node, `NO_ROW` for devices.
        wait_of: row in trace.waits that each node is the end of, `NO_ROW` for none.
        steps: nodes of the beginnings of steps, in order, of the first rank.
        gpu, host: starts and ends of their rows, in ns after origin_ns, on one clock.
        thread_of_row: number of the thread of each host row.
        inside: which activities are nodes of CUDA graphs, and whose edges are known.
        inferred: share of the waits for events whose record was inferred or is unknown.
    """

    graph: Graph
    origin_ns: int
    node_of_activity: Int64
    end_of_activity: Int64
    gap: Int64
    overlapping: Mask
    row: Int64
    is_activity: Mask
    edge_kind: npt.NDArray[np.uint8]
    edge_activity: Int64
    moves: Int64
    thread: Int64
    wait_of: Int64
    steps: Int64
    inferred: float
    gpu: tuple[Int64, Int64]
    host: tuple[Int64, Int64]
    thread_of_row: Int64
    inside: GraphNodes


def program_graph(
    trace: Attributed,
    alignment: Alignment | None = None,
    instances: Instances | None = None,
    labels: Sequence[GraphLabels] = (),
) -> Program:
    """The graph of a trace.

    Args:
        trace: attributed, whole.
        alignment: of the ranks' clocks; None for one rank.
        instances: which kernels of several ranks are one collective; None for one rank.
        labels: of captured CUDA graphs, which may hold their edges.
    """
    gpu, host = _arrays(trace.gpu, alignment), _arrays(trace.host, alignment)
    origin = min([int(x.min()) for x in (gpu[0], host[0]) if len(x)], default=0)
    gpu, host = (gpu[0] - origin, gpu[1] - origin), (host[0] - origin, host[1] - origin)
    found = _found(trace, gpu, host, instances, labels)
    program = replace(_program(trace, found), origin_ns=origin)
    graph = replace(program.graph, weight=stream_weights(program, gpu[1] - gpu[0], found.moves))
    return replace(program, graph=graph.exact())


@dataclass(frozen=True)
class _Found:
    """Nodes, in the order in which they were added, and edges, with what `Program` says of them."""

    nodes: Nodes
    edges: Edges
    gpu: tuple[Int64, Int64]
    host: tuple[Int64, Int64]
    thread: Int64
    threads: int
    start: Int64
    ends: Int64
    moves: Int64
    gap: Int64
    overlapping: Mask
    waits: Int64
    steps: Int64
    handed: Int64
    inside: GraphNodes


def _found(
    trace: Attributed,
    gpu: tuple[Int64, Int64],
    host: tuple[Int64, Int64],
    instances: Instances | None,
    labels: Sequence[GraphLabels],
) -> _Found:
    """Nodes and edges of all kinds."""
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
    known = (
        (launch != NO_ROW) & is_call[launch] if len(is_call) else np.zeros(len(launch), np.bool_)
    )
    launch = np.where(known, launch, NO_ROW)
    thread = thread_numbers(trace.host)
    threads = int(thread[-1]) + 1 if len(thread) else 0
    stream, along = _streams(trace, gpu)
    nodes, edges = Nodes(), Edges()
    start = nodes.add(gpu[0], START, threads + stream, np.arange(len(stream)))
    calls = np.unique(launch[launch != NO_ROW])
    call_node = np.full(trace.host.height, NO_ROW)
    call_node[calls] = nodes.add(host[0][calls], CALL, thread[calls], calls)
    ends, moves = collective_ends(gpu, nodes, edges, (start, threads + stream), instances)
    inside = graph_nodes(trace, launch, labels)
    latency, gap, overlapping = latencies(gpu, host, launch, along)
    before, after = along
    # Of nodes of one launch whose edges are known those edges decide, not the stream.
    free = inside.known[before] & inside.known[after] & (launch[before] == launch[after])
    overlapping[before[free]] = True
    launched, lag = launch_lags(gpu, host, launch, latency)
    edges.add((call_node[launch[launched]], start[launched]), lag, "launch")
    graph_edges(trace, inside, launch, (gpu, (start, ends)), edges)
    edges_through_events(trace, launch, gpu, edges, (start, ends))
    waits = wait_edges(trace, launch, (gpu, host), nodes, edges, (thread, start, ends))
    rows = np.flatnonzero((trace.host["category"] == "step").to_numpy())
    steps = nodes.add(host[0][rows], STEP, thread[rows], rows)
    first = trace.host["rank"].to_numpy()[rows] == min(trace.ranks, default=0)
    handed = handovers(trace, host, thread, nodes, edges)
    return _Found(
        nodes,
        edges,
        gpu,
        host,
        thread,
        threads,
        start,
        ends,
        moves,
        gap,
        overlapping,
        waits,
        steps[first],
        handed,
        inside,
    )


def _program(trace: Attributed, found: _Found) -> Program:
    """The nodes in order, and the edges that lead forward."""
    time, tie, chain, row = (
        np.concatenate(column) for column in zip(*found.nodes.columns, strict=True)
    )
    order = np.lexsort((np.arange(len(time)), tie, time))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    time, chain = time[order], chain[order]
    waiting = np.flatnonzero(found.waits != NO_ROW)
    wait_of = np.full(len(order), NO_ROW)
    wait_of[place[found.waits[waiting]]] = waiting
    # Before all others their thread did the work that was recorded.
    given = wait_of != NO_ROW
    given[place[found.handed]] = True
    previous = _previous(chain)
    worked = (chain < found.threads) & ~given & (previous != NO_ROW)
    weight = np.where(worked, time - time[previous], 0)
    source, target, lag, kind, activity = (
        np.concatenate(column) for column in zip(*found.edges.columns, strict=True)
    )
    source, target = place[source], place[target]
    forward = source < target
    none = np.zeros(len(order), np.int64)
    return Program(
        Graph(time, previous, chain, weight, none, source[forward], target[forward], lag[forward]),
        0, place[found.start], np.where(found.ends == NO_ROW, NO_ROW, place[found.ends]), found.gap,
        found.overlapping, row[order], order < len(found.start), kind[forward].astype(np.uint8),
        activity[forward], found.moves, np.where(chain < found.threads, chain, NO_ROW), wait_of,
        np.sort(place[found.steps]), _inferred(trace), found.gpu, found.host, found.thread,
        found.inside,
    )  # fmt: skip


def stream_weights(program: Program, duration: Int64, moves: Int64) -> Int64:
    """The weights of the graph with other durations of the activities.

    Args:
        program: whose threads' weights stay.
        duration: ns of each row of gpu.
        moves: ns of each collective of several ranks after the last rank began.
    """
    graph = program.graph
    weight = graph.weight.copy()
    on_device = np.flatnonzero((program.thread == NO_ROW) & (graph.previous != NO_ROW))
    before = graph.previous[on_device]
    row = program.row[before]
    is_end = ~program.is_activity[on_device]
    after_start = program.is_activity[before] & (program.end_of_activity[row] == NO_ROW)
    weight[on_device] = np.where(
        is_end, moves[row], np.where(after_start, duration[row], 0) + program.gap[row]
    )
    overlapped = program.overlapping[row] & ~is_end
    weight[on_device[overlapped]] = 0
    return weight


def longer_host_work(program: Program, weight: Int64, share: float) -> Int64:
    """Those weights with the work of all threads longer by that share of it."""
    return weight + np.where(program.thread == NO_ROW, 0, np.rint(weight * share).astype(np.int64))


def _previous(chain: Int64) -> Int64:
    """The node before each one in its chain."""
    order = np.argsort(chain, kind="stable")
    result = np.full(len(chain), NO_ROW)
    same = chain[order][1:] == chain[order][:-1]
    result[order[1:][same]] = order[:-1][same]
    return result


def _inferred(trace: Attributed) -> float:
    """Share of the waits for events whose record is inferred or unknown."""
    waits = trace.events.filter(pl.col("kind") == "wait")
    unsure = waits.filter(pl.col("known").is_in(["inferred", "unknown"])).height
    return unsure / waits.height if waits.height else 0.0


def _arrays(frame: pl.DataFrame, alignment: Alignment | None) -> tuple[Int64, Int64]:
    """Starts and ends on one clock."""
    if alignment is not None:
        frame = frame.with_columns(start=pl.col("start") - alignment.shift())
    start = frame["start"].to_numpy().astype(np.int64)
    return start, start + frame["duration"].to_numpy()


def _streams(trace: Attributed, gpu: tuple[Int64, Int64]) -> tuple[Int64, tuple[Int64, Int64]]:
    """The number of each activity's stream, and pairs of activities that follow each other on one."""
    keys = trace.gpu.select("rank", "device", "stream")
    number = (
        keys.select(pl.struct(pl.all()).rank("dense")).to_series().cast(pl.Int64).to_numpy() - 1
    )
    order = np.lexsort((np.arange(len(number)), gpu[0], number))
    same = number[order][1:] == number[order][:-1]
    return number, (order[:-1][same], order[1:][same])
