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

from thence.analysis.idle_timeline import thread_numbers
from thence.analysis.whatif_replay import Graph
from thence.attribution.waiting import event_edges, launches_by_stream
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS

if TYPE_CHECKING:
    import numpy.typing as npt

    from thence.analysis.clock_sync import Alignment
    from thence.analysis.collective_instances import Instances
    from thence.model.attributed import Attributed

    Int64 = npt.NDArray[np.int64]
    Mask = npt.NDArray[np.bool_]

__all__ = ["EDGES", "Program", "program_graph", "stream_weights"]

EDGES = ("host", "launch", "stream", "event", "wait", "handover", "ranks", "graph")
"""Kinds of edges; the first of the chains of threads, stream of those of streams."""
_STEP, _END, _CALL, _START = 0, 1, 2, 3  # of nodes at one time: which come first
_QUEUED_NS = 20_000  # launched that long before the activity before ended: queued
_RETURN_NS = 5_000  # of a call that waited, after the activity ended
_OWN_NS = 4_000  # of a call that waits, where there is nothing to wait for
_REST_NS = 15_000  # without work, after which a thread may have been given some
_HANDED_NS = 400_000
_CLOCKS_NS = 2_000
_FEW = 8  # samples below which a latency is assumed
_LATENCY_NS, _GAP_NS, _EVENT_NS = 5_000, 1_000, 500


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


class _Nodes:
    """Collects nodes: time, order among equal times, chain, what they stand for."""

    def __init__(self) -> None:
        self.columns: list[tuple[Int64, ...]] = []
        self.count = 0

    def add(self, time: Int64, tie: int, chain: Int64, row: Int64) -> Int64:
        """Adds nodes; returns their numbers, in the order in which they were added."""
        first, self.count = self.count, self.count + len(time)
        self.columns.append((time, np.full(len(time), tie), chain, row))
        return np.arange(first, self.count)


class _Edges:
    """Collects edges: source, target, weight, kind, activity."""

    def __init__(self) -> None:
        self.columns: list[tuple[Int64, ...]] = []

    def add(
        self, ends: tuple[Int64, Int64], weight: Int64, kind: str, activity: Int64 | None = None
    ) -> None:
        """Adds edges of one kind."""
        source, target = ends
        rows = np.full(len(source), NO_ROW) if activity is None else activity
        self.columns.append((source, target, weight, np.full(len(source), EDGES.index(kind)), rows))


def program_graph(
    trace: Attributed, alignment: Alignment | None = None, instances: Instances | None = None
) -> Program:
    """The graph of a trace.

    Args:
        trace: attributed, whole.
        alignment: of the ranks' clocks; None for one rank.
        instances: which kernels of several ranks are one collective; None for one rank.
    """
    gpu, host = _arrays(trace.gpu, alignment), _arrays(trace.host, alignment)
    launch = trace.places["launch"].cast(pl.Int64).fill_null(NO_ROW).to_numpy()
    is_call = trace.host["category"].is_in(API_CALLS).to_numpy()
    launch = np.where(
        (launch != NO_ROW) & is_call[launch] if len(is_call) else False, launch, NO_ROW
    )
    origin = min([int(x.min()) for x in (gpu[0], host[0]) if len(x)], default=0)
    gpu, host = (gpu[0] - origin, gpu[1] - origin), (host[0] - origin, host[1] - origin)
    thread = thread_numbers(trace.host)
    threads = int(thread[-1]) + 1 if len(thread) else 0
    stream, along = _streams(trace, gpu)
    nodes, edges = _Nodes(), _Edges()
    start = nodes.add(gpu[0], _START, threads + stream, np.arange(len(stream)))
    calls = np.unique(launch[launch != NO_ROW])
    call_node = np.full(trace.host.height, NO_ROW)
    call_node[calls] = nodes.add(host[0][calls], _CALL, thread[calls], calls)
    ends, moves = _collectives(gpu, nodes, edges, (start, threads + stream), instances)
    latency, gap, overlapping = _device_edges(gpu, host, launch, along)
    launched, lag = _launch_lags(gpu, host, launch, latency)
    edges.add((call_node[launch[launched]], start[launched]), lag, "launch")
    _graph_edges(trace, launch, gpu, edges, (start, ends))
    _event_edges(trace, launch, gpu, edges, (start, ends))
    waits = _waits(trace, launch, (gpu, host), nodes, edges, (thread, start, ends))
    steps = np.flatnonzero((trace.host["category"] == "step").to_numpy())
    step_nodes = nodes.add(host[0][steps], _STEP, thread[steps], steps)
    handed = _handovers(trace, host, thread, nodes, edges)
    time, tie, chain, row = (np.concatenate(column) for column in zip(*nodes.columns, strict=True))
    order = np.lexsort((np.arange(len(time)), tie, time))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    time, chain = time[order], chain[order]
    is_activity = order < len(start)
    wait_of = np.full(len(order), NO_ROW)
    found = np.flatnonzero(waits != NO_ROW)
    wait_of[place[waits[found]]] = found
    ended = np.full(len(order), NO_ROW)
    ended[place[ends[ends != NO_ROW]]] = np.flatnonzero(ends != NO_ROW)
    previous = _previous(chain)
    fixed = np.ones(
        len(order), np.bool_
    )  # nodes before which their thread did the work that was recorded
    fixed[place[handed]] = fixed[wait_of != NO_ROW] = False
    weight = np.where((chain < threads) & fixed, time - time[previous], 0)
    weight[previous == NO_ROW] = 0
    source, target, lag, kind, activity = (
        np.concatenate(column) for column in zip(*edges.columns, strict=True)
    )
    source, target = place[source], place[target]
    forward = source < target
    program = Program(
        Graph(
            time, previous, chain, weight, np.zeros(len(order), np.int64), source[forward], target[forward],
            lag[forward],
        ),
        origin, place[start], np.where(ends == NO_ROW, NO_ROW, place[ends]), gap, overlapping,
        row[order], is_activity, kind[forward].astype(np.uint8), activity[forward], moves,
        np.where(chain < threads, chain, NO_ROW), wait_of,
        np.sort(place[step_nodes[trace.host["rank"].to_numpy()[steps] == _first_rank(trace)]]),
        _inferred(trace), gpu, host, thread,
    )  # fmt: skip
    graph = replace(program.graph, weight=stream_weights(program, gpu[1] - gpu[0], moves))
    return replace(program, graph=graph.exact())


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


def _previous(chain: Int64) -> Int64:
    """The node before each one in its chain."""
    order = np.argsort(chain, kind="stable")
    result = np.full(len(chain), NO_ROW)
    same = chain[order][1:] == chain[order][:-1]
    result[order[1:][same]] = order[:-1][same]
    return result


def _first_rank(trace: Attributed) -> int:
    return min(trace.ranks, default=0)


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


def _device_edges(
    gpu: tuple[Int64, Int64], host: tuple[Int64, Int64], launch: Int64, along: tuple[Int64, Int64]
) -> tuple[int, Int64, Mask]:
    """The least latency of a launch, the gap kept behind each activity, and those that the next overlaps."""
    (start, end), (before, after) = gpu, along
    begun = (
        np.where(launch == NO_ROW, 0, host[0][launch])
        if len(host[0])
        else np.zeros(len(launch), np.int64)
    )
    between = start[after] - end[before]
    known = launch[after] != NO_ROW
    idle = known & (begun[after] > end[before] + _GAP_NS)
    queued = known & (begun[after] < end[before] - _QUEUED_NS) & (between >= 0)
    waited = (start[after] - begun[after])[idle]
    latency = int(np.percentile(waited, 10)) if len(waited) >= _FEW else _LATENCY_NS
    least = int(np.percentile(between[queued], 10)) if queued.sum() >= _FEW else _GAP_NS
    gap = np.zeros(len(start), np.int64)
    gap[before] = np.minimum(between, max(least, 0))
    overlapping = np.zeros(len(start), np.bool_)
    overlapping[before] = between < -_GAP_NS
    return max(latency, 0), gap, overlapping


def _collectives(
    gpu: tuple[Int64, Int64],
    nodes: _Nodes,
    edges: _Edges,
    on: tuple[Int64, Int64],
    instances: Instances | None,
) -> tuple[Int64, Int64]:
    """Nodes of the ends of collectives that several ranks share, and how long each moved data."""
    (start, end), (node, chain) = gpu, on
    ends = np.full(len(start), NO_ROW)
    moves = end - start
    if instances is None:
        return ends, moves
    members = (
        instances.rows.select("instance", row="gpu")
        .drop_nulls()
        .filter(pl.len().over("instance") > 1)
        .sort("instance", "row")
    )
    if members.is_empty():
        return ends, moves
    row = members["row"].to_numpy().astype(np.int64)
    instance = members["instance"].rank("dense").cast(pl.Int64).to_numpy() - 1
    arrival = np.full(int(instance.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(arrival, instance, start[row])
    arrived = np.minimum(arrival[instance], end[row])
    moves[row] = end[row] - arrived
    lasting = moves[row] > 0
    row, instance = row[lasting], instance[lasting]
    ends[row] = nodes.add(end[row], _END, chain[row], row)
    pairs = pl.DataFrame({"instance": instance, "row": row})
    both = pairs.join(pairs, on="instance", suffix="_other").filter(
        pl.col("row") != pl.col("row_other")
    )
    mine, other = both["row"].to_numpy(), both["row_other"].to_numpy()
    edges.add((node[other], ends[mine]), moves[mine], "ranks", mine)
    return ends, moves


def _launch_lags(
    gpu: tuple[Int64, Int64], host: tuple[Int64, Int64], launch: Int64, latency: int
) -> tuple[Int64, Int64]:
    """Activities that began after the call that launched them, and the least time from its beginning.

    A call that took long, such as that of a first use, counts where the activity began after it.
    """
    launched = np.flatnonzero(launch != NO_ROW)
    launched = launched[gpu[0][launched] >= host[0][launch[launched]]]
    begin, call, returned = gpu[0][launched], host[0][launch[launched]], host[1][launch[launched]]
    took = np.where((begin >= returned) & (returned - call > _QUEUED_NS), returned - call, 0)
    return launched, np.minimum(begin - call, latency + took)


def _graph_edges(
    trace: Attributed,
    launch: Int64,
    gpu: tuple[Int64, Int64],
    edges: _Edges,
    nodes: tuple[Int64, Int64],
) -> None:
    """Edges inside launches of CUDA graphs, and from each to the next of the same graph."""
    start = nodes[0]
    first, others = _of_graphs(trace, launch, gpu[0])
    edges.add((start[first], start[others]), gpu[0][others] - gpu[0][first], "graph")
    last, following = _launched_again(trace, launch, gpu)
    source, duration, activity = _after(last, gpu, nodes)
    lag = np.minimum(gpu[0][following] - gpu[1][last], _GAP_NS)
    edges.add((source, start[following]), duration + lag, "graph", activity)


def _of_graphs(trace: Attributed, launch: Int64, start: Int64) -> tuple[Int64, Int64]:
    """The first activity of each launch of a CUDA graph, and each of the others."""
    graphed = np.flatnonzero((launch != NO_ROW) & trace.gpu["graph"].is_not_null().to_numpy())
    order = graphed[np.lexsort((start[graphed], launch[graphed]))]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = launch[order][1:] != launch[order][:-1]
    first = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return first[~begins], order[~begins]


def _launched_again(
    trace: Attributed, launch: Int64, gpu: tuple[Int64, Int64]
) -> tuple[Int64, Int64]:
    """The last activity of each launch of a CUDA graph and the first of its next: launches of one do not overlap."""
    keys = ["rank", "device", "graph"]
    times = {"start": gpu[0], "end": gpu[1], "launch": launch}
    rows = trace.gpu.select(keys).with_row_index("gpu").with_columns(**times)
    runs = (
        rows.filter(pl.col("graph").is_not_null(), pl.col("launch") != NO_ROW)
        .group_by(*keys, "launch")
        .agg(
            first=pl.col("gpu").sort_by("start").first(),
            begins=pl.col("start").min(),
            last=pl.col("gpu").sort_by("end").last(),
            ends=pl.col("end").max(),
        )
        .sort(*keys, "begins")
        .with_columns(
            following=pl.col("first").shift(-1).over(keys),
            starts=pl.col("begins").shift(-1).over(keys),
        )
        .filter(pl.col("following").is_not_null(), pl.col("ends") <= pl.col("starts"))
    )
    return tuple(runs[name].to_numpy().astype(np.int64) for name in ("last", "following"))  # type: ignore[return-value]


def _after(
    activity: Int64, gpu: tuple[Int64, Int64], nodes: tuple[Int64, Int64]
) -> tuple[Int64, Int64, Int64]:
    """The node from which the end of activities follows, the weight to it, and the activity in that weight."""
    start, ends = nodes
    own = ends[activity] == NO_ROW
    duration = np.where(own, gpu[1][activity] - gpu[0][activity], 0)
    return np.where(own, start[activity], ends[activity]), duration, np.where(own, activity, NO_ROW)


def _event_edges(
    trace: Attributed,
    launch: Int64,
    gpu: tuple[Int64, Int64],
    edges: _Edges,
    nodes: tuple[Int64, Int64],
) -> None:
    """Edges through events that times do not contradict."""
    found = event_edges(trace, launch).select("waiting", "awaited").unique(maintain_order=True)
    waiting, awaited = (found[name].to_numpy().astype(np.int64) for name in ("waiting", "awaited"))
    fits = gpu[0][waiting] >= gpu[1][awaited] - _GAP_NS
    waiting, awaited = waiting[fits], awaited[fits]
    source, duration, activity = _after(awaited, gpu, nodes)
    lag = np.minimum(gpu[0][waiting] - gpu[1][awaited], _GAP_NS + _EVENT_NS)
    edges.add((source, nodes[0][waiting]), duration + lag, "event", activity)


def _waits(
    trace: Attributed,
    launch: Int64,
    times: tuple[tuple[Int64, Int64], tuple[Int64, Int64]],
    nodes: _Nodes,
    edges: _Edges,
    of: tuple[Int64, Int64, Int64],
) -> Int64:
    """Nodes and edges of host calls that wait; returns the end nodes of the rows of waits that wait for something."""
    (gpu, host), (thread, start, ends) = times, of
    waits = trace.waits.with_row_index("wait")
    result = np.full(waits.height, NO_ROW)
    targets = _targets(trace, launch, waits)
    wait, activity = (
        targets["wait"].to_numpy().astype(np.int64),
        targets["gpu"].to_numpy().astype(np.int64),
    )
    rows = waits["host"].to_numpy().astype(np.int64)
    fits = gpu[1][activity] <= host[1][rows[wait]] + _CLOCKS_NS
    fits &= gpu[0][activity] <= host[1][rows[wait]]
    wait, activity = wait[fits], activity[fits]
    chosen = np.unique(wait)
    row = rows[chosen]
    begins = nodes.add(host[0][row], _CALL, thread[row], row)
    result[chosen] = nodes.add(host[1][row], _END, thread[row], row)
    # The call itself takes little; what it takes longer is the wait, or stays as a delay.
    edges.add((begins, result[chosen]), np.minimum(host[1][row] - host[0][row], _OWN_NS), "host")
    source, duration, counted = _after(activity, gpu, (start, ends))
    lag = np.minimum(host[1][rows[wait]] - gpu[1][activity], _RETURN_NS)
    edges.add((source, result[wait]), duration + lag, "wait", counted)
    return result


def _targets(trace: Attributed, launch: Int64, waits: pl.DataFrame) -> pl.DataFrame:
    """What each wait waits for: wait, gpu; of several streams the last launched on each."""
    host = trace.host.select("start")
    before = launches_by_stream(trace, launch)
    timed = waits.with_columns(
        time=host["start"].gather(waits["host"].cast(pl.UInt32)),
        kind=pl.col("kind").cast(pl.String),
    ).sort("time")
    keys = ["rank", "device", "stream"]
    of_stream = timed.filter(pl.col("kind") == "stream", pl.col("stream").is_not_null())
    one = of_stream.join_asof(before, on="time", by=keys, check_sortedness=False).select(
        "wait", "last"
    )
    streams = before.select(keys).unique()
    whole = timed.filter(pl.col("kind").is_in(["device", "free"])).drop("stream", "device")
    every = whole.join(streams, on="rank").sort("time")
    every = every.join_asof(before, on="time", by=keys, check_sortedness=False).select(
        "wait", "last"
    )
    records = trace.events.drop("record").with_row_index("record").select("record", *keys, "host")
    of_event = timed.filter(pl.col("record").is_not_null()).select(
        "wait", record=pl.col("record").cast(pl.UInt32)
    )
    made = of_event.join(records, on="record")
    made = made.with_columns(time=host["start"].gather(made["host"].cast(pl.UInt32))).sort("time")
    event = made.join_asof(before, on="time", by=keys, check_sortedness=False).select(
        "wait", "last"
    )
    own = timed.filter(pl.col("kind") == "copy").select(
        "wait", launch=pl.col("host").cast(pl.Int64)
    )
    copies = (
        pl.DataFrame({"launch": launch}).with_row_index("last").filter(pl.col("launch") != NO_ROW)
    )
    copy = own.join(copies, on="launch").select("wait", "last")
    parts = [
        part.select(pl.col("wait").cast(pl.Int64), gpu=pl.col("last").cast(pl.Int64))
        for part in (one, every, event, copy)
    ]
    return pl.concat(parts).drop_nulls()


def _handovers(
    trace: Attributed, host: tuple[Int64, Int64], thread: Int64, nodes: _Nodes, edges: _Edges
) -> Int64:
    """Nodes where a thread begins to work soon after another of its rank has stopped."""
    works = trace.host["category"].is_in(["op", *API_CALLS]).to_numpy()
    ranks = trace.host["rank"].to_numpy()
    busy, result = {}, [np.empty(0, np.int64)]
    for number in np.unique(thread[works & (trace.host["category"] == "op").to_numpy()]):
        rows = np.flatnonzero(works & (thread == number))
        start, reached = host[0][rows], np.maximum.accumulate(host[1][rows])
        first = np.flatnonzero(np.append(True, start[1:] > reached[:-1] + _REST_NS))
        busy[int(number)] = (
            start[first],
            np.append(reached[first[1:] - 1], reached[-1]),
            rows[first],
        )
    for number, (start, end, row) in busy.items():
        rested = np.append(-1, end[:-1])
        best, by = np.full(len(start), -1), np.full(len(start), NO_ROW)
        for other, (_, stops, other_row) in busy.items():
            if other == number or ranks[other_row[0]] != ranks[row[0]]:
                continue
            last = np.searchsorted(stops, start, side="right") - 1
            when = np.where(last >= 0, stops[last], -1)
            better = (when > rested) & (start - when < _HANDED_NS) & (when > best)
            best, by = np.where(better, when, best), np.where(better, other, by)
        handed = np.flatnonzero(by != NO_ROW)
        source = nodes.add(best[handed], _END, by[handed], row[handed])
        target = nodes.add(start[handed], _STEP, np.full(len(handed), number), row[handed])
        edges.add((source, target), start[handed] - best[handed], "handover")
        result.append(target)
    return np.concatenate(result)
