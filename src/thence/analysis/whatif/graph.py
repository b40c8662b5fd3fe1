"""The dependency graph of a recorded program: which work on the host and on the devices waited for which.

Nodes are host calls that launch, starts and ends of host calls that wait, starts of steps, starts of device
activities, ends of collectives of several ranks, and the times at which one thread hands work to another. Edges:

    host      from a node of a thread to the thread's next node: the work in between, as recorded
    launch    from a call to its activity: the 10th percentile of the latencies of launches to an idle stream
    stream    from an activity to the next on its stream: its duration, plus the 10th percentile of the gaps between
              queued activities; less the overlap where the next begins before its end (dependent launches)
    event     from the last activity before an event record to the first activity after a wait for it
    wait      from the last activity that a call waited for to the return of the call
    handover  from a thread that stops to a thread that begins to work soon after (autograd's)
    graph     inside a launch of a CUDA graph: along the graph's edges if they are known, else from the first activity
              to the others, which keep their distances from it; and from the last activity to the first of the
              graph's next launch
    ranks     from the start of a collective on all other ranks to its end on each rank

A node may be later than all edges explain. The difference is stored as its delay, so that the simulation of the
recorded program is exact. If these delays are large, predictions are meaningless (`thence.analysis.whatif.prediction`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.cuda_graphs.nodes import graph_nodes
from thence.analysis.idle.host_threads import thread_numbers
from thence.analysis.no_device_work import no_device_work
from thence.analysis.steps import windows
from thence.analysis.whatif.edges import (
    CALL,
    STEP,
    GraphBuilder,
    RecordedWork,
    add_blocked_calls,
    add_collective_ends,
    add_events,
    add_graphs,
    add_handovers,
    add_launches,
    add_waits,
    latencies,
)
from thence.analysis.whatif.simulation import Graph
from thence.errors import MissingData
from thence.model.columns import row_numbers
from thence.model.grouped_intervals import distinct
from thence.model.intervals import NO_ROW, Intervals
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from thence.analysis.collectives.clock_sync import Alignment
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.cuda_graphs.nodes import GraphNodes
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.graph_labels import GraphLabels


@dataclass(frozen=True)
class Program:
    """The graph of a program, and the rows of the trace that its nodes and edges stand for.

    Attributes:
        graph: the exact graph: its simulation gives the recorded times, in ns after origin_ns.
        origin_ns: time 0 of the graph, on the trace's clock.
        node_of_activity: for each row of gpu, the node of its start.
        end_of_activity: for each row of gpu, the node of its end if it is a collective of several ranks, else `NO_ROW`.
        gap: for each row of gpu, the least time from its end to the next activity of its stream, ns.
        overlapping: mask of the rows of gpu for which the next activity on the stream did not wait.
        row: for each node, its row of gpu if it is an activity or its end, else its row of host.
        is_activity: mask of the nodes that are starts of activities.
        edge_kind: kind of each edge of the graph, as an index in `EDGES`.
        edge_activity: for each edge, the row of gpu whose duration is part of its weight, or `NO_ROW`.
        moves: for each row of gpu, the ns that a collective of several ranks took after the last rank began, else its
            duration.
        thread: number of the thread of each node; `NO_ROW` for nodes of devices.
        wait_of: for each node, the row in trace.waits whose end it is, or `NO_ROW`.
        steps: nodes of the starts of steps of the first rank, in order. Where a step begins without a node, it is the
            next node of the rank.
        typical: those from the first typical step to the last one (`thence.analysis.steps.windows`), with the outliers
            in between.
        before: mask of the nodes of the first rank's devices that were launched before the first of these steps: on a
            device, the step begins when they have ended.
        until: for each rank, the time at which its last typical step ended on the host, in ns after origin_ns.
        gpu, host: starts and ends of the rows of gpu and host, in ns after origin_ns, on one clock.
        thread_of_row: number of the thread of each host row.
        inside: which activities are nodes of CUDA graphs, and which of their edges are known.
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
    gpu: Intervals
    host: Intervals
    thread_of_row: Int64
    inside: GraphNodes
    typical: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    before: Mask = field(default_factory=lambda: np.zeros(0, np.bool_))
    until: Mapping[int, int] = field(default_factory=dict)


def program_graph(
    trace: Attributed,
    alignment: Alignment | None = None,
    instances: Instances | None = None,
    labels: Sequence[GraphLabels] = (),
) -> Program:
    """The graph of a trace.

    Args:
        alignment: alignment of the ranks' clocks; None for one rank.
        instances: which kernels of several ranks are one collective; None for one rank.
        labels: labels of captured CUDA graphs, which may hold the edges of these.

    Raises:
        MissingData: the trace holds no device activity.
    """
    if trace.gpu.is_empty():
        raise no_device_work(trace)
    gpu, host = _on_one_clock(trace.gpu, alignment), _on_one_clock(trace.host, alignment)
    origin = min([int(times.start.min()) for times in (gpu, host) if len(times.start)], default=0)
    work = _recorded_work(trace, gpu.shifted(-origin), host.shifted(-origin))
    steps = _steps(trace, alignment, origin)
    first_steps = steps.filter(rank=min(trace.ranks, default=0))
    program = _graph(work, instances, labels, first_steps["start"].to_numpy())
    until = dict(steps.filter("typical").group_by("rank").agg(pl.col("end").max()).rows())
    typical = program.steps[first_steps["typical"].to_numpy()[: len(program.steps)]]
    program = replace(program, origin_ns=origin, until=until, typical=typical)
    program = replace(program, before=_before(trace, program))
    graph = replace(program.graph, weight=stream_weights(program, work.gpu.duration, program.moves))
    return replace(program, graph=graph.exact())


def _steps(trace: Attributed, alignment: Alignment | None, origin: int) -> pl.DataFrame:
    """The steps on the host in order: rank, start and end (ns after origin); typical, as in `Program.typical`."""
    schema = {"rank": pl.Int32(), "start": pl.Int64(), "end": pl.Int64(), "typical": pl.Boolean()}
    try:
        rows = windows.steps(trace).typical["row"].unique()
    except MissingData:
        return pl.DataFrame(schema=schema)
    # Executions on several devices of a process are one step.
    every = (
        trace.steps.with_row_index("row")
        .with_columns(chosen=pl.col("row").is_in(rows.implode()))
        .sort("rank", "start", maintain_order=True)
        .group_by("rank", "number", maintain_order=True)
        .agg(pl.col("start", "duration").first(), pl.col("chosen").any())
    )
    steps = _on_one_clock(every, alignment)
    first, last = (
        pl.col("start").filter("chosen").min().over("rank"),
        pl.col("start").filter("chosen").max().over("rank"),
    )
    return every.select(
        "rank",
        start=pl.Series(steps.start - origin),
        end=pl.Series(steps.end - origin),
        # A rank may have no step of the kind that counts.
        typical=((pl.col("start") >= first) & (pl.col("start") <= last)).fill_null(value=False),
    )


def _graph(
    work: RecordedWork, instances: Instances | None, labels: Sequence[GraphLabels], first_starts: Int64
) -> Program:
    """The graph of the recorded work, without what depends on the typical steps.

    Args:
        work: what was recorded, in ns after the origin.
        instances: which kernels of several ranks are one collective.
        first_starts: starts of the steps of the first rank, in order.
    """
    trace, host, launch = work.trace, work.host, work.launch
    builder = GraphBuilder(work)
    calls = distinct(launch[launch != NO_ROW])
    call_node = np.full(trace.host.height, NO_ROW)
    call_node[calls] = builder.add_nodes(host.start[calls], CALL, work.thread[calls], calls)
    moves = add_collective_ends(builder, instances)
    inside = graph_nodes(trace, launch, labels)
    before, after = _following(work)
    latency, gap, overlapping = latencies(work, before, after)
    # Nodes of one graph launch whose edges are known wait along these edges, not along the stream.
    free = inside.known[before] & inside.known[after] & (launch[before] == launch[after])
    overlapping[before[free]] = True
    returned, queued = add_blocked_calls(builder, call_node)
    add_launches(builder, latency, call_node, returned, queued)
    add_graphs(builder, inside)
    add_events(builder)
    waits = add_waits(builder)
    rows = np.flatnonzero((trace.host["category"] == "step").to_numpy())
    step_nodes = builder.add_nodes(host.start[rows], STEP, work.thread[rows], rows)
    steps = _first_nodes(
        work, np.concatenate([step_nodes, call_node[calls]]), np.concatenate([rows, calls]), first_starts
    )
    handed = np.concatenate([add_handovers(builder), returned[returned != NO_ROW]])
    return _program(builder, waits, handed, steps, inside, gap, overlapping, moves)


def _first_nodes(work: RecordedWork, node: Int64, row: Int64, starts: Int64) -> Int64:
    """For each start of a step of the first rank, the first node of the rank's host that does not begin before it.

    Args:
        node: nodes of the host.
        row: the row of host of each.
        starts: ns; a start after the last node has none.
    """
    ours = work.trace.host["rank"].to_numpy()[row] == min(work.trace.ranks, default=0)
    node, times = node[ours], work.host.start[row[ours]]
    order = np.argsort(times, kind="stable")
    following = np.searchsorted(times[order], starts)
    result: Int64 = node[order][following[following < len(order)]]
    return result


def _program(
    builder: GraphBuilder,
    waits: Int64,
    handed: Int64,
    steps: Int64,
    inside: GraphNodes,
    gap: Int64,
    overlapping: Mask,
    moves: Int64,
) -> Program:
    """The program with its nodes in order of time, and the edges that lead forward in it.

    Args:
        builder: all nodes and edges.
        waits: for each row of trace.waits, the node of the call's end, or `NO_ROW`.
        handed: nodes at which threads begin work that was handed to them, and returns of launches that blocked.
        steps: nodes of the starts of steps of the first rank.
        inside: as `Program.inside`.
        gap: as `Program.gap`.
        overlapping: as `Program.overlapping`.
        moves: as `Program.moves`.
    """
    work, end = builder.work, builder.end
    time, tie, chain, row = (np.concatenate(column) for column in zip(*builder.nodes, strict=True))
    order = np.lexsort((np.arange(len(time)), tie, time))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    time, chain = time[order], chain[order]
    waiting = np.flatnonzero(waits != NO_ROW)
    wait_of = np.full(len(order), NO_ROW)
    wait_of[place[waits[waiting]]] = waiting
    # Before all other nodes of threads, the thread worked for the recorded time.
    given = wait_of != NO_ROW
    given[place[handed]] = True
    previous = _previous(chain)
    worked = (chain < work.threads) & ~given & (previous != NO_ROW)
    weight = np.where(worked, time - time[previous], 0)
    source, target, lag, kind, activity = (np.concatenate(column) for column in zip(*builder.edges, strict=True))
    source, target = place[source], place[target]
    # Recorded times may contradict an edge by the resolution of clocks; the simulation needs edges that lead forward.
    forward = source < target
    no_delay = np.zeros(len(order), np.int64)
    return Program(
        graph=Graph(time, previous, chain, weight, no_delay, source[forward], target[forward], lag[forward]),
        origin_ns=0,
        node_of_activity=place[builder.start],
        end_of_activity=np.where(end == NO_ROW, NO_ROW, place[end]),
        gap=gap, overlapping=overlapping, moves=moves, inside=inside, inferred=_inferred(work.trace),
        row=row[order],
        is_activity=order < len(builder.start),
        edge_kind=kind[forward].astype(np.uint8),
        edge_activity=activity[forward],
        thread=np.where(chain < work.threads, chain, NO_ROW),
        wait_of=wait_of,
        steps=np.unique(place[steps]),
        gpu=work.gpu, host=work.host, thread_of_row=work.thread,
    )  # fmt: skip


def launched_at(trace: Attributed, program: Program) -> Int64:
    """When each node began on the host: a node of a device when it was launched, as far as that is known."""
    launch = row_numbers(trace.places["launch"])
    known = launch != NO_ROW
    launched = program.gpu.start.copy()
    launched[known] = program.host.start[launch[known]]
    on_device = program.thread == NO_ROW
    result = program.graph.time.copy()
    result[on_device] = launched[program.row[on_device]]
    return result


def _before(trace: Attributed, program: Program) -> Mask:
    """`Program.before`."""
    on_device = program.thread == NO_ROW
    if not len(program.typical):
        return np.zeros(len(on_device), np.bool_)
    ranks = trace.gpu["rank"].to_numpy()
    first = np.zeros(len(on_device), np.bool_)
    first[on_device] = ranks[program.row[on_device]] == min(trace.ranks, default=0)
    begin = program.graph.time[program.typical[0]]
    result: Mask = first & (launched_at(trace, program) < begin)
    return result


def stream_weights(program: Program, duration: Int64, moves: Int64) -> Int64:
    """The weights of the graph with other durations of the activities.

    Args:
        program: the program; the weights of its threads do not change.
        duration: duration of each row of gpu, ns.
        moves: for each row of gpu, as `Program.moves`, ns.
    """
    graph = program.graph
    weight = graph.weight.copy()
    on_device = np.flatnonzero((program.thread == NO_ROW) & (graph.previous != NO_ROW))
    before = graph.previous[on_device]
    row = program.row[before]
    is_end = ~program.is_activity[on_device]
    after_start = program.is_activity[before] & (program.end_of_activity[row] == NO_ROW)
    weight[on_device] = np.where(is_end, moves[row], np.where(after_start, duration[row], 0) + program.gap[row])
    overlapped = program.overlapping[row] & ~is_end
    weight[on_device[overlapped]] = 0
    weight[on_device] = np.maximum(weight[on_device], 0)
    return weight


def longer_host_work(program: Program, weight: Int64, share: float) -> Int64:
    """The weights with the work of all threads longer by ``share`` of it."""
    return weight + np.where(program.thread == NO_ROW, 0, np.rint(weight * share).astype(np.int64))


def _previous(chain: Int64) -> Int64:
    """For each node, the node before it in its chain, or `NO_ROW`."""
    order = np.argsort(chain, kind="stable")
    result = np.full(len(chain), NO_ROW)
    same = chain[order][1:] == chain[order][:-1]
    result[order[1:][same]] = order[:-1][same]
    return result


def _inferred(trace: Attributed) -> float:
    """Share of the waits for events whose record is inferred or unknown."""
    if trace.events.is_empty():
        return 0.0
    waits = trace.events.filter(pl.col("kind") == "wait")
    unsure = waits.filter(pl.col("known").is_in(["inferred", "unknown"])).height
    return unsure / waits.height if waits.height else 0.0


def _on_one_clock(frame: pl.DataFrame, alignment: Alignment | None) -> Intervals:
    """Starts and ends on one clock."""
    if alignment is not None:
        frame = frame.with_columns(start=pl.col("start") - alignment.shift())
    start = frame["start"].to_numpy().astype(np.int64)
    return Intervals(start, start + frame["duration"].to_numpy())


def _recorded_work(trace: Attributed, gpu: Intervals, host: Intervals) -> RecordedWork:
    """The rows of a trace with their launches by API calls, threads and streams."""
    launch = row_numbers(trace.places["launch"])
    is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
    known = (launch != NO_ROW) & is_call[launch] if len(is_call) else np.zeros(len(launch), np.bool_)
    streams = trace.gpu.select(pl.struct("rank", "device", "stream").rank("dense")).to_series()
    stream = streams.cast(pl.Int64).to_numpy() - 1
    return RecordedWork(trace, gpu, host, np.where(known, launch, NO_ROW), thread_numbers(trace.host), stream)


def _following(work: RecordedWork) -> tuple[Int64, Int64]:
    """Activities that another follows on their stream, and those that follow them."""
    order = np.lexsort((np.arange(len(work.stream)), work.gpu.start, work.stream))
    same = work.stream[order][1:] == work.stream[order][:-1]
    return order[:-1][same], order[1:][same]
