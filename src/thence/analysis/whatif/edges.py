"""Adds the nodes and edges of the graph of `thence.analysis.whatif.graph`, kind by kind.

**Work that one thread hands to another.** Profiler traces hold operators, so the periods in which threads work are
known: a thread was handed its work by the thread that stopped last before. Recordings hold no operators, but the calls
of autograd's engine, as rows of the phase backward on the thread that called it: that thread waits while other threads
of its process run the nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.analysis.idle.host_threads import thread_numbers
from thence.attribution.waiting import event_edges, launches_by_stream
from thence.model.grouped_intervals import distinct, rows_by_number
from thence.model.intervals import NO_ROW
from thence.model.tables import API_CALLS
from thence.model.thresholds import (
    AWAITED_BEFORE_RETURN_NS,
    BLOCKED_LAUNCH_RATIO,
    DEFAULT_EVENT_NS,
    DEFAULT_GAP_NS,
    DEFAULT_LATENCY_NS,
    EARLY_RETURN_NS,
    HANDED_OVER_NS,
    LONG_LAUNCH_NS,
    MIN_OUTSTANDING,
    MIN_SAMPLES,
    QUEUED_AHEAD_NS,
    THREAD_RESTED_NS,
    TIMESTAMP_NS,
    WAIT_CALL_NS,
    WAIT_RETURN_NS,
)

if TYPE_CHECKING:
    from thence.analysis.collectives.instances import Instances
    from thence.analysis.cuda_graphs.nodes import GraphNodes
    from thence.model.arrays import Int64, Mask
    from thence.model.attributed import Attributed
    from thence.model.intervals import Intervals


EDGES = ("host", "launch", "stream", "event", "wait", "handover", "ranks", "graph", "opaque_graph")
"""Kinds of edges; host and stream are also the kinds of the links along the chains of threads and of streams."""
STEP, END, CALL, START = 0, 1, 2, 3
"""Kinds of nodes; nodes of equal time are in this order."""


@dataclass(frozen=True)
class RecordedWork:
    """What was recorded on the host and on the devices, on one clock.

    Attributes:
        trace: attributed.
        gpu, host: the rows of gpu and host, ns.
        launch: host row of the API call that launched each activity, or `NO_ROW`.
        thread: number of the thread of each host row, ascending.
        stream: number of the stream of each activity.
    """

    trace: Attributed
    gpu: Intervals
    host: Intervals
    launch: Int64
    thread: Int64
    stream: Int64

    @property
    def threads(self) -> int:
        """How many threads there are."""
        return int(self.thread[-1]) + 1 if len(self.thread) else 0


class GraphBuilder:
    """Collects nodes and edges.

    Args:
        work: what they stand for.

    Attributes:
        work: as given.
        nodes: for each `add_nodes`: time, order among equal times, chain, and the row of host or gpu.
        edges: for each `add_edges`: source, target, weight, kind, activity.
        start: for each row of gpu, the node of its start.
        end: for each row of gpu, the node of its end, or `NO_ROW`: only collectives of several ranks have one.
    """

    def __init__(self, work: RecordedWork) -> None:
        self.work = work
        self.nodes: list[tuple[Int64, ...]] = []
        self.edges: list[tuple[Int64, ...]] = []
        self._count = 0
        count = len(work.launch)
        # The starts of activities are the first nodes, so a node below their number is one.
        self.start = self.add_nodes(work.gpu.start, START, work.threads + work.stream, np.arange(count))
        self.end = np.full(count, NO_ROW)

    def add_nodes(self, time: Int64, tie: int, chain: Int64, row: Int64) -> Int64:
        """Adds nodes; returns their numbers, in the order in which they were added."""
        first, self._count = self._count, self._count + len(time)
        self.nodes.append((time, np.full(len(time), tie), chain, row))
        return np.arange(first, self._count)

    def add_edges(self, source: Int64, target: Int64, weight: Int64, kind: str, activity: Int64 | None = None) -> None:
        """Adds edges of one kind; weights are ns."""
        rows = np.full(len(source), NO_ROW) if activity is None else activity
        self.edges.append((source, target, weight, np.full(len(source), EDGES.index(kind)), rows))

    def add_edges_from_ends(self, before: Int64, target: Int64, lag: Int64, kind: str) -> None:
        """Adds edges that begin when activities end.

        They lead from the activity's end node, or else from its start node, with the activity's duration in addition.

        Args:
            before: rows of gpu.
            target: node for each of these.
            lag: ns from the end of the activity to the target.
            kind: of the edges.
        """
        own = self.end[before] == NO_ROW
        duration = np.where(own, self.work.gpu.duration[before], 0)
        source = np.where(own, self.start[before], self.end[before])
        self.add_edges(source, target, duration + lag, kind, np.where(own, before, NO_ROW))


def latencies(work: RecordedWork, before: Int64, after: Int64) -> tuple[int, Int64, Mask]:
    """Estimates latencies and gaps from the recorded times.

    Args:
        before: activities that another follows on their stream.
        after: the activities that follow these.

    Returns:
        The least latency of a launch (ns); the least gap after each activity (ns), negative if the next one begins
        before its end; and the mask of activities for which the next one on the stream does not wait. A stream runs its
        work in order, so a kernel that begins before the end of another and ends after it was launched to begin when
        the other allows it (programmatic dependent launch): it waits for all but that last part. Only what one launch
        of a CUDA graph runs, and what began and ended meanwhile, ran beside the other.
    """
    gpu, host, launch = work.gpu, work.host, work.launch
    begun = np.where(launch == NO_ROW, 0, host.start[launch]) if len(host.start) else np.zeros(len(launch), np.int64)
    between = gpu.start[after] - gpu.end[before]
    known = launch[after] != NO_ROW
    idle = known & (begun[after] > gpu.end[before] + TIMESTAMP_NS)
    queued = known & (begun[after] < gpu.end[before] - QUEUED_AHEAD_NS) & (between >= 0)
    waited = (gpu.start[after] - begun[after])[idle]
    latency = int(np.percentile(waited, 10)) if len(waited) >= MIN_SAMPLES else DEFAULT_LATENCY_NS
    shortest = int(np.percentile(between[queued], 10)) if queued.sum() >= MIN_SAMPLES else DEFAULT_GAP_NS
    gap = np.zeros(len(launch), np.int64)
    gap[before] = np.minimum(between, max(shortest, 0))
    overlapping = np.zeros(len(launch), np.bool_)
    beside = (known & (launch[before] == launch[after])) | (gpu.end[after] <= gpu.end[before])
    overlapping[before] = (between < -TIMESTAMP_NS) & beside
    return max(latency, 0), gap, overlapping


def add_collective_ends(builder: GraphBuilder, instances: Instances | None) -> Int64:
    """Adds nodes and edges of the ends of collectives that several ranks share.

    Returns:
        For each activity, the ns in which it moved data if it is such a collective, else its duration.
    """
    gpu = builder.work.gpu
    moves = gpu.duration
    if instances is None:
        return moves
    members = (
        instances.rows.select("instance", row="gpu")
        .drop_nulls()
        .filter(pl.len().over("instance") > 1)
        .sort("instance", "row")
    )
    if members.is_empty():
        return moves
    row = members["row"].to_numpy().astype(np.int64)
    instance = members["instance"].rank("dense").cast(pl.Int64).to_numpy() - 1
    arrival = np.full(int(instance.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(arrival, instance, gpu.start[row])
    arrived = np.minimum(arrival[instance], gpu.end[row])
    moves[row] = gpu.end[row] - arrived
    # If it ended before the last rank arrived, it did not wait for it, whatever the match says.
    lasting = moves[row] > 0
    row, instance = row[lasting], instance[lasting]
    builder.end[row] = builder.add_nodes(gpu.end[row], END, builder.work.threads + builder.work.stream[row], row)
    pairs = pl.DataFrame({"instance": instance, "row": row})
    both = pairs.join(pairs, on="instance", suffix="_other").filter(pl.col("row") != pl.col("row_other"))
    mine, other = both["row"].to_numpy(), both["row_other"].to_numpy()
    builder.add_edges(builder.start[other], builder.end[mine], moves[mine], "ranks", mine)
    return moves


def add_launches(builder: GraphBuilder, latency: int, call: Int64, returned: Int64, queued: Mask) -> None:
    """Adds edges from launch calls to their activities, except those that began before the call.

    The duration of a long call, such as the first use of a kernel, is included if the activity began after it. If the
    call found an idle stream, and its first activity began before it returned, as for CUDA graphs, the call took the
    time until then. Where the call waited for the queue, the edge is from its return.

    Args:
        builder: to which edges are added.
        latency: the least latency of a launch (ns).
        call: node of each host row that is a launching call.
        returned: as `add_blocked_calls` returns it.
        queued: as `add_blocked_calls` returns it.
    """
    gpu, host, launch = builder.work.gpu, builder.work.host, builder.work.launch
    launched = np.flatnonzero(launch != NO_ROW)
    launched = launched[gpu.start[launched] >= host.start[launch[launched]]]
    row, late = launch[launched], queued[launched]
    begin, called, ended = gpu.start[launched], host.start[row], host.end[row]
    took = np.where((begin >= ended) & (ended - called > LONG_LAUNCH_NS), ended - called, 0)
    took = np.where(_began_inside(builder.work)[launched] & (ended - called > LONG_LAUNCH_NS), begin - called, took)
    lag = np.minimum(begin - called, latency + took)
    lag = np.where(late, np.clip(begin - ended, 0, latency), lag)
    builder.add_edges(np.where(late, returned[row], call[row]), builder.start[launched], lag, "launch")


def _began_inside(work: RecordedWork) -> Mask:
    """Mask of the first activities of launches to idle streams that began before the call returned."""
    gpu, host, launch = work.gpu, work.host, work.launch
    order = np.lexsort((gpu.start, work.stream))
    ended = np.full(len(launch), np.iinfo(np.int64).min)  # of the activity before on the stream
    same = work.stream[order][1:] == work.stream[order][:-1]
    ended[order[1:][same]] = gpu.end[order[:-1][same]]
    result = np.zeros(len(launch), np.bool_)
    launched = np.flatnonzero(launch != NO_ROW)
    launched = launched[np.lexsort((gpu.start[launched], launch[launched]))]
    first = launched[np.unique(launch[launched], return_index=True)[1]]
    row = launch[first]
    result[first] = (gpu.start[first] < host.end[row]) & (ended[first] <= host.start[row])
    return result


def add_blocked_calls(builder: GraphBuilder, call: Int64) -> tuple[Int64, Mask]:
    """Adds nodes and edges of the returns of launching calls that blocked, where a recording holds when they returned.

    A copy blocked if it took long and began before the call returned: the host waited for it, as for copies of pageable
    memory. Another launch blocked if the stream's queue was full: it took long, at least `MIN_OUTSTANDING` activities
    of the stream were launched and had not ended when it returned, and one ended during the call, shortly before it
    returned. It waited for that one.

    Args:
        builder: to which nodes and edges are added.
        call: node of each host row that is a launching call.

    Returns:
        For each host row, the node of its return, or `NO_ROW` if it is no such call; and the mask of the activities
        whose launch waited for the queue.
    """
    work = builder.work
    gpu, host, launch = work.gpu, work.host, work.launch
    returned = np.full(len(host.start), NO_ROW)
    queued = np.zeros(len(launch), np.bool_)
    if not any("launches" in (facts.get("calls") or ()) for facts in work.trace.meta.facts):
        return returned, queued
    activity, awaited, usual = _blocked(work)
    queued[activity[activity != awaited]] = True
    # A call that launches several activities returns once: it waited for the last of what they waited for.
    last = np.argsort(gpu.end[awaited], kind="stable")[::-1]
    last = last[np.unique(launch[activity[last]], return_index=True)[1]]
    row, awaited = launch[activity[last]], awaited[last]
    returned[row] = builder.add_nodes(host.end[row], END, work.thread[row], row)
    builder.add_edges(call[row], returned[row], np.minimum(host.end[row] - host.start[row], usual), "host")
    over = gpu.end[awaited] <= host.end[row] + EARLY_RETURN_NS
    lag = np.minimum(host.end[row[over]] - gpu.end[awaited[over]], WAIT_RETURN_NS)
    builder.add_edges_from_ends(awaited[over], returned[row[over]], lag, "wait")
    # The call returned before the copy ended, as for pageable memory when its data is staged.
    row, awaited = row[~over], awaited[~over]
    builder.add_edges(builder.start[awaited], returned[row], host.end[row] - gpu.start[awaited], "wait")
    return returned, queued


def _blocked(work: RecordedWork) -> tuple[Int64, Int64, int]:
    """The activities whose launch blocked, those that they waited for, and the usual ns of a launch.

    A copy that blocked waited for itself.
    """
    gpu, host, launch, stream = work.gpu, work.host, work.launch, work.stream
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
    is_copy = (work.trace.gpu["kind"] == "memcpy").to_numpy()[activity]
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


def add_graphs(builder: GraphBuilder, nodes: GraphNodes) -> None:
    """Adds edges inside launches of CUDA graphs, and from each launch to the next one of the same graph.

    If the edges of a graph are unknown, its activities keep their recorded distances from the first one.
    """
    gpu, start = builder.work.gpu, builder.start
    first, others = _first_of_launches(builder.work, nodes.inside & ~nodes.known)
    builder.add_edges(start[first], start[others], gpu.start[others] - gpu.start[first], "opaque_graph")
    fits = gpu.start[nodes.target] >= gpu.end[nodes.source] - TIMESTAMP_NS
    for before, after in ((nodes.source[fits], nodes.target[fits]), _launched_again(builder.work)):
        lag = np.minimum(gpu.start[after] - gpu.end[before], DEFAULT_GAP_NS)
        builder.add_edges_from_ends(before, start[after], lag, "graph")


def _first_of_launches(work: RecordedWork, chosen: Mask) -> tuple[Int64, Int64]:
    """Pairs of activities: the first chosen activity of each graph launch, with each other chosen activity of it."""
    launch = work.launch
    graphed = np.flatnonzero((launch != NO_ROW) & chosen)
    order = graphed[np.lexsort((work.gpu.start[graphed], launch[graphed]))]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = launch[order][1:] != launch[order][:-1]
    first = order[np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))]
    return first[~begins], order[~begins]


def _launched_again(work: RecordedWork) -> tuple[Int64, Int64]:
    """Pairs of the last activity of a launch of a CUDA graph and the first of the graph's next launch.

    Successive launches of one graph do not overlap; pairs that overlap by their times are left out.
    """
    keys = ["rank", "device", "graph"]
    times = {"start": work.gpu.start, "end": work.gpu.end, "launch": work.launch}
    if work.trace.gpu["graph"].null_count() == work.trace.gpu.height:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = work.trace.gpu.select(keys).with_row_index("gpu").with_columns(**times)
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


def add_events(builder: GraphBuilder) -> None:
    """Adds edges through events, except those that the recorded times contradict."""
    gpu = builder.work.gpu
    pairs = event_edges(builder.work.trace, builder.work.launch).select("waiting", "awaited")
    pairs = pairs.unique(maintain_order=True)
    waiting, awaited = (pairs[name].to_numpy().astype(np.int64) for name in pairs.columns)
    fits = gpu.start[waiting] >= gpu.end[awaited] - TIMESTAMP_NS
    waiting, awaited = waiting[fits], awaited[fits]
    lag = np.minimum(gpu.start[waiting] - gpu.end[awaited], DEFAULT_GAP_NS + DEFAULT_EVENT_NS)
    builder.add_edges_from_ends(awaited, builder.start[waiting], lag, "event")


def add_waits(builder: GraphBuilder) -> Int64:
    """Adds nodes and edges of host calls that wait.

    Returns:
        For each row of ``trace.waits``, the node of the call's end, or `NO_ROW` if it waits for no known activity.
    """
    work = builder.work
    gpu, host = work.gpu, work.host
    waits = work.trace.waits.with_row_index("wait")
    result = np.full(waits.height, NO_ROW)
    if waits.is_empty():
        return result
    targets = _awaited(work.trace, work.launch, waits)
    wait, activity = (targets["wait"].to_numpy().astype(np.int64), targets["gpu"].to_numpy().astype(np.int64))
    rows = waits["host"].to_numpy().astype(np.int64)
    fits = gpu.end[activity] <= host.end[rows[wait]] + EARLY_RETURN_NS
    fits &= gpu.start[activity] <= host.end[rows[wait]]
    wait, activity = wait[fits], activity[fits]
    chosen = distinct(wait)
    row = rows[chosen]
    begins = builder.add_nodes(host.start[row], CALL, work.thread[row], row)
    result[chosen] = builder.add_nodes(host.end[row], END, work.thread[row], row)
    # The call itself takes little time; the rest of it is the wait, or remains as a delay.
    builder.add_edges(begins, result[chosen], np.minimum(host.end[row] - host.start[row], WAIT_CALL_NS), "host")
    lag = np.minimum(host.end[rows[wait]] - gpu.end[activity], WAIT_RETURN_NS)
    builder.add_edges_from_ends(activity, result[wait], lag, "wait")
    return result


def _awaited(trace: Attributed, launch: Int64, waits: pl.DataFrame) -> pl.DataFrame:
    """The activities that each wait waits for: wait, gpu. For several streams, the last one launched on each."""
    host = trace.host.select("start")
    before = launches_by_stream(trace, launch)
    timed = waits.with_columns(
        time=host["start"].gather(waits["host"].cast(pl.UInt32)), kind=pl.col("kind").cast(pl.String)
    ).sort("time")
    keys = ["rank", "device", "stream"]
    for_stream = timed.filter(pl.col("kind") == "stream", pl.col("stream").is_not_null())
    for_stream = for_stream.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    streams = before.select(keys).unique()
    for_device = timed.filter(pl.col("kind").is_in(["device", "free"])).drop("stream", "device")
    for_device = for_device.join(streams, on="rank").sort("time")
    for_device = for_device.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    records = trace.events.drop("record").with_row_index("record").select("record", *keys, "host")
    for_event = timed.filter(pl.col("record").is_not_null()).select("wait", record=pl.col("record").cast(pl.UInt32))
    for_event = for_event.join(records, on="record")
    for_event = for_event.with_columns(time=host["start"].gather(for_event["host"].cast(pl.UInt32))).sort("time")
    for_event = for_event.join_asof(before, on="time", by=keys, check_sortedness=False).select("wait", "last")
    for_copy = timed.filter(pl.col("kind") == "copy").select("wait", launch=pl.col("host").cast(pl.Int64))
    copies = pl.DataFrame({"launch": launch}).with_row_index("last").filter(pl.col("launch") != NO_ROW)
    for_copy = for_copy.join(copies, on="launch").select("wait", "last")
    parts = [
        part.select(pl.col("wait").cast(pl.Int64), gpu=pl.col("last").cast(pl.Int64))
        for part in (for_stream, for_device, for_event, for_copy)
    ]
    return pl.concat(parts).drop_nulls()


def add_handovers(builder: GraphBuilder) -> Int64:
    """Adds nodes and edges where a thread begins to work soon after another thread of its rank has stopped.

    Returns:
        The nodes at which threads begin such work.
    """
    trace, host, thread = builder.work.trace, builder.work.host, builder.work.thread
    by_engine = _engine_handovers(trace, host, thread)
    source = builder.add_nodes(by_engine.stopped, END, by_engine.by, by_engine.row)
    engine_target = builder.add_nodes(by_engine.start, STEP, by_engine.thread, by_engine.row)
    builder.add_edges(source, engine_target, by_engine.start - by_engine.stopped, "handover")
    busy = _busy_periods(trace, host, thread)
    by = np.full(len(busy.start), NO_ROW)
    for _, ours in rows_by_number(trace.host["rank"].to_numpy()[busy.row]):
        latest = _latest_stops(busy.start[ours], busy.stop[ours], busy.thread[ours])
        by[ours] = np.where(latest == NO_ROW, NO_ROW, ours[latest])
    stopped = np.where(by == NO_ROW, -1, busy.stop[by])
    # The first work of a thread was handed to it, however late it began.
    near = busy.is_first | (busy.start - stopped < HANDED_OVER_NS)
    # A thread that was the last to stop rested for as long as all others: nothing was handed to it.
    handed = np.flatnonzero((by != NO_ROW) & near & (stopped > busy.rested))
    source = builder.add_nodes(stopped[handed], END, busy.thread[by[handed]], busy.row[handed])
    target = builder.add_nodes(busy.start[handed], STEP, busy.thread[handed], busy.row[handed])
    builder.add_edges(source, target, busy.start[handed] - stopped[handed], "handover")
    return np.concatenate([engine_target, target])


@dataclass(frozen=True)
class _Handovers:
    """Work handed from one thread to another.

    Attributes:
        by: number of the thread that hands it over.
        stopped: when that thread stopped (ns).
        thread: number of the thread that gets it.
        start: when that thread began it (ns).
        row: a host row of the work.
    """

    by: Int64
    stopped: Int64
    thread: Int64
    start: Int64
    row: Int64


def _engine_handovers(trace: Attributed, host: Intervals, thread: Int64) -> _Handovers:
    """The hand-overs from and to threads that called autograd's engine, of the ranks without rows of operators.

    An outermost row of the phase backward is such a call if another thread of the process with rows of this phase makes
    API calls inside it, and its own thread makes none from the first to the last of these. The work is handed over
    between the API calls of the two threads, or at the ends of the row.
    """
    made, row = _calls_in_backward(trace, host, thread)
    if not len(made):
        return _Handovers(*np.empty((5, 0), np.int64))
    others = thread[made] != thread[row]
    each = pl.DataFrame({"row": row, "thread": thread[made], "others": others}).with_columns(
        start=host.start[made], end=np.minimum(host.end[made], host.end[row])
    )
    worked = (
        each.filter("others")
        .group_by("row", "thread")
        .agg(first=pl.col("start").min(), last=pl.col("end").max())
        .sort("row", "thread")
    )
    all_threads = worked.group_by("row").agg(begun=pl.col("first").min(), done=pl.col("last").max())
    own = each.filter(~pl.col("others")).join(all_threads, on="row")
    earlier, later = pl.col("start") < pl.col("begun"), pl.col("start") >= pl.col("done")
    own = own.group_by("row").agg(
        stopped=pl.col("end").filter(earlier).max(),
        resumed=pl.col("start").filter(later).min(),
        amid=(~earlier & ~later).any(),
    )
    worked = worked.join(own, on="row", how="left", maintain_order="left").filter(
        ~pl.col("amid").fill_null(value=False)
    )
    row = worked["row"].to_numpy()
    ends = {"begin": host.start[row], "end": host.end[row]}
    worked = worked.with_columns(**ends, caller=thread[row]).with_columns(
        stopped=pl.min_horizontal("first", pl.coalesce("stopped", "begin")), resumed=pl.coalesce("resumed", "end")
    )
    forth, back = (
        [worked[name].to_numpy() for name in names]
        for names in (("caller", "stopped", "thread", "first", "row"), ("thread", "last", "caller", "resumed", "row"))
    )
    return _Handovers(*(np.concatenate(both) for both in zip(forth, back, strict=True)))


def _calls_in_backward(trace: Attributed, host: Intervals, thread: Int64) -> tuple[Int64, Int64]:
    """API calls inside outermost rows of the phase backward, and these rows; of ranks without rows of operators.

    The calls are those of threads of the row's process that have such rows.
    """
    none = np.empty(0, np.int64)
    ranks, category = trace.host["rank"], trace.host["category"]
    rows = np.flatnonzero((category == "phase").to_numpy())
    if not len(rows):
        return none, none
    rows = rows[(trace.host["name"].gather(rows) == "backward").to_numpy()]
    with_operators = ranks.filter(category == "op").unique().implode()
    without = ~ranks.is_in(with_operators).to_numpy()
    rows = rows[without[rows]]
    calls = np.flatnonzero(category.is_in(API_CALLS).to_numpy() & without)
    calls = calls[np.isin(thread[calls], thread[rows])]
    process = thread_numbers(trace.host.select("rank", "process", thread=pl.lit(0)))
    pairs = [(none, none)]
    for number, ours in rows_by_number(process[rows]):
        outer = _outermost(rows[ours], host)
        made = calls[process[calls] == number]
        last = np.searchsorted(host.start[outer], host.start[made], side="right") - 1
        inside = (last >= 0) & (host.start[made] < host.end[outer[last]])
        pairs.append((made[inside], outer[last[inside]]))
    made, row = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return made, row


def _outermost(rows: Int64, host: Intervals) -> Int64:
    """The rows that begin inside no other one, in order of time."""
    rows = rows[np.lexsort((-host.end[rows], host.start[rows]))]
    reached = np.maximum.accumulate(host.end[rows])
    outer = np.ones(len(rows), np.bool_)
    outer[1:] = host.start[rows[1:]] >= reached[:-1]
    return rows[outer]


@dataclass(frozen=True)
class _BusyPeriods:
    """Periods in which threads work, thread by thread, in order of time.

    Attributes:
        thread: number of the thread.
        start: start of the period (ns).
        stop: end of the period (ns).
        row: the first host row of the period.
        is_first: whether it is the first period of its thread.
        rested: end of the thread's previous period (ns); -1 for the first.
    """

    thread: Int64
    start: Int64
    stop: Int64
    row: Int64
    is_first: Mask
    rested: Int64


def _busy_periods(trace: Attributed, host: Intervals, thread: Int64) -> _BusyPeriods:
    """The periods of all threads that run operators; operators and API calls are work."""
    category = trace.host["category"]
    with_operators = np.zeros(int(thread[-1]) + 1 if len(thread) else 0, np.bool_)
    with_operators[thread[(category == "op").to_numpy()]] = True
    works = category.is_in(["op", *API_CALLS]).to_numpy()
    rows = np.flatnonzero(works & with_operators[thread])
    own, start = thread[rows], host.start[rows]
    reached = (
        pl.DataFrame({"thread": own, "end": host.end[rows]})
        .select(pl.col("end").cum_max().over("thread"))
        .to_series()
        .to_numpy()
    )
    is_other = np.ones(len(rows), np.bool_)
    is_other[1:] = own[1:] != own[:-1]
    begins = is_other.copy()
    begins[1:] |= start[1:] > reached[:-1] + THREAD_RESTED_NS
    first = np.flatnonzero(begins)
    stop = reached[np.append(first[1:], len(rows))[: len(first)] - 1]
    is_first = is_other[first]
    return _BusyPeriods(own[first], start[first], stop, rows[first], is_first, np.where(is_first, -1, np.roll(stop, 1)))


def _latest_stops(start: Int64, stop: Int64, thread: Int64) -> Int64:
    """For each period of a rank, the one that ends last before it starts; `NO_ROW` if there is none.

    Of several that end at the same time, the one of the thread with the lowest number. A period of no length is not
    its own answer; the previous period of the same thread may be.
    """
    order = np.lexsort((-thread, stop))
    last = np.searchsorted(stop[order], start, side="right") - 1
    last -= (last >= 0) & (order[last] == np.arange(len(order)))
    return np.where(last >= 0, order[last], NO_ROW)
