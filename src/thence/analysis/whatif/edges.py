"""Adds the nodes and edges of the graph of `thence.analysis.whatif.graph`, kind by kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.attribution.waiting import event_edges, launches_by_stream
from thence.model.intervals import NO_ROW
from thence.model.thresholds import (
    AWAITED_BEFORE_RETURN_NS,
    BLOCKED_LAUNCH_RATIO,
    DEFAULT_EVENT_NS,
    DEFAULT_GAP_NS,
    DEFAULT_LATENCY_NS,
    EARLY_RETURN_NS,
    LONG_LAUNCH_NS,
    MIN_OUTSTANDING,
    MIN_SAMPLES,
    QUEUED_AHEAD_NS,
    TIMESTAMP_NS,
    WAIT_CALL_NS,
    WAIT_RETURN_NS,
)

if TYPE_CHECKING:
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.graph_nodes import GraphNodes
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.intervals import Intervals


EDGES = ("host", "launch", "stream", "event", "wait", "handover", "ranks", "graph")
"""Kinds of edges; host and stream are also the kinds of the links along the chains of threads and of streams."""
STEP, END, CALL, START = 0, 1, 2, 3
"""Kinds of nodes; nodes of equal time are in this order."""


class Nodes:
    """Collects nodes: time, order among equal times, chain, and the row of host or gpu that each stands for."""

    def __init__(self) -> None:
        self.columns: list[tuple[Int64, ...]] = []
        self.count = 0

    def add(self, time: Int64, tie: int, chain: Int64, row: Int64) -> Int64:
        """Adds nodes; returns their numbers, in the order in which they were added."""
        first, self.count = self.count, self.count + len(time)
        self.columns.append((time, np.full(len(time), tie), chain, row))
        return np.arange(first, self.count)


@dataclass(frozen=True)
class ActivityNodes:
    """The nodes of the rows of gpu.

    Attributes:
        start: node of each start.
        end: node of each end, or `NO_ROW`: only collectives of several ranks have one.
    """

    start: Int64
    end: Int64


class Edges:
    """Collects edges: source, target, weight, kind, activity."""

    def __init__(self) -> None:
        self.columns: list[tuple[Int64, ...]] = []

    def add(self, source: Int64, target: Int64, weight: Int64, kind: str, activity: Int64 | None = None) -> None:
        """Adds edges of one kind."""
        rows = np.full(len(source), NO_ROW) if activity is None else activity
        self.columns.append((source, target, weight, np.full(len(source), EDGES.index(kind)), rows))


def latencies(gpu: Intervals, host: Intervals, launch: Int64, before: Int64, after: Int64) -> tuple[int, Int64, Mask]:
    """Estimates latencies and gaps from the recorded times.

    Args:
        gpu: of activities.
        host: of host rows.
        launch: host row of each activity's launch, or `NO_ROW`.
        before: activities that another follows on their stream.
        after: the activities that follow these.

    Returns:
        The least latency of a launch (ns); the least gap after each activity (ns); and the mask of activities that the
        next activity on the stream overlaps.
    """
    begun = np.where(launch == NO_ROW, 0, host.start[launch]) if len(host.start) else np.zeros(len(launch), np.int64)
    between = gpu.start[after] - gpu.end[before]
    known = launch[after] != NO_ROW
    idle = known & (begun[after] > gpu.end[before] + TIMESTAMP_NS)
    queued = known & (begun[after] < gpu.end[before] - QUEUED_AHEAD_NS) & (between >= 0)
    waited = (gpu.start[after] - begun[after])[idle]
    latency = int(np.percentile(waited, 10)) if len(waited) >= MIN_SAMPLES else DEFAULT_LATENCY_NS
    least = int(np.percentile(between[queued], 10)) if queued.sum() >= MIN_SAMPLES else DEFAULT_GAP_NS
    gap = np.zeros(len(launch), np.int64)
    gap[before] = np.minimum(between, max(least, 0))
    overlapping = np.zeros(len(launch), np.bool_)
    overlapping[before] = between < -TIMESTAMP_NS
    return max(latency, 0), gap, overlapping


def collective_ends(
    gpu: Intervals, nodes: Nodes, edges: Edges, node: Int64, chain: Int64, instances: Instances | None
) -> tuple[Int64, Int64]:
    """Adds nodes and edges of the ends of collectives that several ranks share.

    Returns:
        For each activity, its end node or `NO_ROW`; and the ns in which it moved data, else its duration.
    """
    start, end = gpu.start, gpu.end
    ends = np.full(len(start), NO_ROW)
    moves = gpu.duration
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
    ends[row] = nodes.add(end[row], END, chain[row], row)
    pairs = pl.DataFrame({"instance": instance, "row": row})
    both = pairs.join(pairs, on="instance", suffix="_other").filter(pl.col("row") != pl.col("row_other"))
    mine, other = both["row"].to_numpy(), both["row_other"].to_numpy()
    edges.add(node[other], ends[mine], moves[mine], "ranks", mine)
    return ends, moves


def launch_edges(
    gpu: Intervals,
    host: Intervals,
    launch: Int64,
    latency: int,
    edges: Edges,
    start: Int64,
    call: Int64,
    returned: Int64,
    queued: Mask,
) -> None:
    """Adds edges from launch calls to their activities, except those that began before the call.

    The duration of a long call, such as the first use of a kernel, is included if the activity began after it. Where
    the call waited for the queue, the edge is from its return.

    Args:
        gpu: of activities.
        host: of host rows.
        launch: host row of each activity's launch, or `NO_ROW`.
        latency: the least latency of a launch (ns).
        edges: to which edges are added.
        start: node of each activity's start.
        call: node of each host row that is a launching call.
        returned: as `blocked_calls` returns it.
        queued: as `blocked_calls` returns it.
    """
    launched = np.flatnonzero(launch != NO_ROW)
    launched = launched[gpu.start[launched] >= host.start[launch[launched]]]
    row, late = launch[launched], queued[launched]
    begin, called, ended = gpu.start[launched], host.start[row], host.end[row]
    took = np.where((begin >= ended) & (ended - called > LONG_LAUNCH_NS), ended - called, 0)
    lag = np.minimum(begin - called, latency + took)
    lag = np.where(late, np.clip(begin - ended, 0, latency), lag)
    edges.add(np.where(late, returned[row], call[row]), start[launched], lag, "launch")


def blocked_calls(
    trace: Attributed,
    launch: Int64,
    gpu: Intervals,
    host: Intervals,
    nodes: Nodes,
    edges: Edges,
    thread: Int64,
    call: Int64,
    points: ActivityNodes,
    stream: Int64,
) -> tuple[Int64, Mask]:
    """Adds nodes and edges of the returns of launching calls that blocked, where a recording holds when they returned.

    A copy blocked if it took long and began before the call returned: the host waited for it, as for copies of pageable
    memory. Another launch blocked if the stream's queue was full: it took long, at least `MIN_OUTSTANDING` activities
    of the stream were launched and had not ended when it returned, and one ended during the call, shortly before it
    returned. It waited for that one.

    Args:
        trace: attributed.
        launch: host row of each activity's launch, or `NO_ROW`.
        gpu: of activities.
        host: of host rows.
        nodes: to which nodes are added.
        edges: to which edges are added.
        thread: number of the thread of each host row.
        call: node of each host row that is a launching call.
        points: nodes of the activities.
        stream: number of the stream of each activity.

    Returns:
        For each host row, the node of its return, or `NO_ROW` if it is no such call; and the mask of the activities
        whose launch waited for the queue.
    """
    returned = np.full(len(host.start), NO_ROW)
    queued = np.zeros(len(launch), np.bool_)
    if not any("launches" in (facts.get("calls") or ()) for facts in trace.meta.facts):
        return returned, queued
    activity, awaited, usual = _blocked(trace, launch, gpu, host, stream)
    queued[activity[activity != awaited]] = True
    # A call that launches several activities returns once: it waited for the last of what they waited for.
    last = np.argsort(gpu.end[awaited], kind="stable")[::-1]
    last = last[np.unique(launch[activity[last]], return_index=True)[1]]
    row, awaited = launch[activity[last]], awaited[last]
    returned[row] = nodes.add(host.end[row], END, thread[row], row)
    edges.add(call[row], returned[row], np.minimum(host.end[row] - host.start[row], usual), "host")
    over = gpu.end[awaited] <= host.end[row] + EARLY_RETURN_NS
    source, duration, counted = _after(awaited[over], gpu, points)
    lag = np.minimum(host.end[row[over]] - gpu.end[awaited[over]], WAIT_RETURN_NS)
    edges.add(source, returned[row[over]], duration + lag, "wait", counted)
    row, awaited = row[~over], awaited[~over]
    edges.add(points.start[awaited], returned[row], host.end[row] - gpu.start[awaited], "wait")
    return returned, queued


def _blocked(
    trace: Attributed, launch: Int64, gpu: Intervals, host: Intervals, stream: Int64
) -> tuple[Int64, Int64, int]:
    """The activities whose launch blocked, those that they waited for, and the usual ns of a launch.

    A copy that blocked waited for itself.
    """
    activity = np.flatnonzero(launch != NO_ROW)
    # In order of streams and launches: one launch of an activity each, so places in this order count launches.
    activity = activity[np.lexsort((host.start[launch[activity]], stream[activity]))]
    row, own = launch[activity], stream[activity]
    took = host.end[row] - host.start[row]
    ended = _ended_before(own, gpu.end[activity], host.end[row])
    outstanding = np.arange(len(activity)) - ended
    short = took[outstanding < MIN_OUTSTANDING]
    usual = int(np.median(short)) if len(short) >= MIN_SAMPLES else WAIT_CALL_NS
    long = took > BLOCKED_LAUNCH_RATIO * usual
    # The activity of the same stream that ended last before the call returned.
    last = activity[np.maximum(ended - 1, 0)]
    is_copy = (trace.gpu["kind"] == "memcpy").to_numpy()[activity]
    copied = long & is_copy & (gpu.start[activity] <= host.end[row])
    since = np.maximum(host.start[row], host.end[row] - AWAITED_BEFORE_RETURN_NS)
    full = long & ~copied & (outstanding >= MIN_OUTSTANDING) & (gpu.end[last] >= since)
    full &= (ended > 0) & (stream[last] == own)
    chosen = copied | full
    return activity[chosen], np.where(copied, activity, last)[chosen], usual


def _ended_before(stream: Int64, end: Int64, until: Int64) -> Int64:
    """For activities in order of streams, the number that ended until these times, counting all on streams before."""
    count = len(stream)
    is_call = np.repeat([False, True], count)
    order = np.lexsort((is_call, np.concatenate([end, until]), np.tile(stream, 2)))
    ended = np.cumsum(~is_call[order])
    result = np.empty(2 * count, np.int64)
    result[order] = ended
    return result[count:]


def graph_edges(
    trace: Attributed, found: GraphNodes, launch: Int64, gpu: Intervals, edges: Edges, points: ActivityNodes
) -> None:
    """Adds edges inside launches of CUDA graphs, and from each launch to the next one of the same graph.

    If the edges of a graph are unknown, its activities keep their recorded distances from the first one.
    """
    start = points.start
    first, others = _of_graphs(launch, gpu.start, found.inside & ~found.known)
    edges.add(start[first], start[others], gpu.start[others] - gpu.start[first], "graph")
    fits = gpu.start[found.target] >= gpu.end[found.source] - TIMESTAMP_NS
    before, after = found.source[fits], found.target[fits]
    source, duration, activity = _after(before, gpu, points)
    lag = np.minimum(gpu.start[after] - gpu.end[before], DEFAULT_GAP_NS)
    edges.add(source, start[after], duration + lag, "graph", activity)
    last, following = _launched_again(trace, launch, gpu)
    source, duration, activity = _after(last, gpu, points)
    lag = np.minimum(gpu.start[following] - gpu.end[last], DEFAULT_GAP_NS)
    edges.add(source, start[following], duration + lag, "graph", activity)


def _of_graphs(launch: Int64, start: Int64, chosen: Mask) -> tuple[Int64, Int64]:
    """Pairs of activities: the first chosen activity of each graph launch, with each other chosen activity of it."""
    graphed = np.flatnonzero((launch != NO_ROW) & chosen)
    order = graphed[np.lexsort((start[graphed], launch[graphed]))]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = launch[order][1:] != launch[order][:-1]
    first = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return first[~begins], order[~begins]


def _launched_again(trace: Attributed, launch: Int64, gpu: Intervals) -> tuple[Int64, Int64]:
    """Pairs of the last activity of a launch of a CUDA graph and the first of the graph's next launch.

    Successive launches of one graph do not overlap; pairs that overlap by their times are left out.
    """
    keys = ["rank", "device", "graph"]
    times = {"start": gpu.start, "end": gpu.end, "launch": launch}
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
        .with_columns(following=pl.col("first").shift(-1).over(keys), starts=pl.col("begins").shift(-1).over(keys))
        .filter(pl.col("following").is_not_null(), pl.col("ends") <= pl.col("starts"))
    )
    return tuple(runs[name].to_numpy().astype(np.int64) for name in ("last", "following"))  # type: ignore[return-value]


def _after(activity: Int64, gpu: Intervals, points: ActivityNodes) -> tuple[Int64, Int64, Int64]:
    """For each activity: the node from which its end is computed, the weight to that end, and the activity.

    The node is the end node, with weight 0 and without an activity (`NO_ROW`), or else the start node, with the
    activity's duration as weight.
    """
    own = points.end[activity] == NO_ROW
    duration = np.where(own, gpu.duration[activity], 0)
    return np.where(own, points.start[activity], points.end[activity]), duration, np.where(own, activity, NO_ROW)


def edges_through_events(trace: Attributed, launch: Int64, gpu: Intervals, edges: Edges, points: ActivityNodes) -> None:
    """Adds edges through events, except those that the recorded times contradict."""
    found = event_edges(trace, launch).select("waiting", "awaited").unique(maintain_order=True)
    waiting, awaited = (found[name].to_numpy().astype(np.int64) for name in ("waiting", "awaited"))
    fits = gpu.start[waiting] >= gpu.end[awaited] - TIMESTAMP_NS
    waiting, awaited = waiting[fits], awaited[fits]
    source, duration, activity = _after(awaited, gpu, points)
    lag = np.minimum(gpu.start[waiting] - gpu.end[awaited], DEFAULT_GAP_NS + DEFAULT_EVENT_NS)
    edges.add(source, points.start[waiting], duration + lag, "event", activity)


def wait_edges(
    trace: Attributed,
    launch: Int64,
    gpu: Intervals,
    host: Intervals,
    nodes: Nodes,
    edges: Edges,
    thread: Int64,
    points: ActivityNodes,
) -> Int64:
    """Adds nodes and edges of host calls that wait.

    Returns:
        For each row of ``trace.waits``, the node of the call's end, or `NO_ROW` if it waits for no known activity.
    """
    waits = trace.waits.with_row_index("wait")
    result = np.full(waits.height, NO_ROW)
    targets = _targets(trace, launch, waits)
    wait, activity = (targets["wait"].to_numpy().astype(np.int64), targets["gpu"].to_numpy().astype(np.int64))
    rows = waits["host"].to_numpy().astype(np.int64)
    fits = gpu.end[activity] <= host.end[rows[wait]] + EARLY_RETURN_NS
    fits &= gpu.start[activity] <= host.end[rows[wait]]
    wait, activity = wait[fits], activity[fits]
    chosen = np.unique(wait)
    row = rows[chosen]
    begins = nodes.add(host.start[row], CALL, thread[row], row)
    result[chosen] = nodes.add(host.end[row], END, thread[row], row)
    # The call itself takes little time; the rest of it is the wait, or remains as a delay.
    edges.add(begins, result[chosen], np.minimum(host.end[row] - host.start[row], WAIT_CALL_NS), "host")
    source, duration, counted = _after(activity, gpu, points)
    lag = np.minimum(host.end[rows[wait]] - gpu.end[activity], WAIT_RETURN_NS)
    edges.add(source, result[wait], duration + lag, "wait", counted)
    return result


def _targets(trace: Attributed, launch: Int64, waits: pl.DataFrame) -> pl.DataFrame:
    """The activities that each wait waits for: wait, gpu. For several streams, the last one launched on each."""
    host = trace.host.select("start")
    before = launches_by_stream(trace, launch)
    timed = waits.with_columns(
        time=host["start"].gather(waits["host"].cast(pl.UInt32)), kind=pl.col("kind").cast(pl.String)
    ).sort("time")
    keys = ["rank", "device", "stream"]
    of_stream = timed.filter(pl.col("kind") == "stream", pl.col("stream").is_not_null())
    one = of_stream.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    streams = before.select(keys).unique()
    whole = timed.filter(pl.col("kind").is_in(["device", "free"])).drop("stream", "device")
    every = whole.join(streams, on="rank").sort("time")
    every = every.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    records = trace.events.drop("record").with_row_index("record").select("record", *keys, "host")
    of_event = timed.filter(pl.col("record").is_not_null()).select("wait", record=pl.col("record").cast(pl.UInt32))
    made = of_event.join(records, on="record")
    made = made.with_columns(time=host["start"].gather(made["host"].cast(pl.UInt32))).sort("time")
    event = made.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    own = timed.filter(pl.col("kind") == "copy").select("wait", launch=pl.col("host").cast(pl.Int64))
    copies = pl.DataFrame({"launch": launch}).with_row_index("last").filter(pl.col("launch") != NO_ROW)
    copy = own.join(copies, on="launch").select("wait", "last")
    parts = [
        part.select(pl.col("wait").cast(pl.Int64), gpu=pl.col("last").cast(pl.Int64))
        for part in (one, every, event, copy)
    ]
    return pl.concat(parts).drop_nulls()
