"""Layout: assigns the rows of a timeline to tracks, and creates the tracks.

Each device is a group with its streams, counters and lanes; each process of each rank is a group of threads. Devices
come before processes. If the timeline has `thence.model.timeline.JobRows`, these rows are above and below all others.
Times are those of the timeline minus `Layout.origin_ns`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.timelines.timeline import COUNTERS
from thence.analysis.timelines.track_packing import nested_sequence, split_lanes
from thence.writers.timelines.perfetto.arguments import gpu_arguments, host_arguments
from thence.writers.timelines.perfetto.inside import add_inside, device_groups
from thence.writers.timelines.perfetto.interning import Interned
from thence.writers.timelines.perfetto.job import JobLayout
from thence.writers.timelines.perfetto.packets import Arrows, Counter, Slices
from thence.writers.timelines.perfetto.threads import host_processes
from thence.writers.timelines.perfetto.tracks import Process, Thread, Tracks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from thence.model.arrays import Int64
    from thence.model.timeline import Timeline


_GROUPS = {
    "label": "labels",
    "module": "modules",
    "collective": "collectives",
    "process-group": "process groups",
    "lane": "lanes",
}


@dataclass
class Layout:
    """The content of a file before encoding.

    Attributes:
        origin_ns: ns that were subtracted from every time so that none is negative; 0 if none was.
        tracks, interned: tracks and interned texts of the file.
        slices: slices of host ranges, device activities, programs, extra lanes, spans, in-kernel ranges and the job.
        counters: counters of all devices and of the job.
        pids: process id, as written, of the first process of each rank that has any.
        devices: uuid of the track of each rank and device.
    """

    origin_ns: int
    tracks: Tracks = field(default_factory=Tracks)
    interned: Interned = field(default_factory=Interned)
    slices: list[Slices] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    pids: dict[int, int] = field(default_factory=dict)
    devices: dict[tuple[int, int], int] = field(default_factory=dict)


def layout(timeline: Timeline) -> Layout:
    """Assigns all rows of a timeline to tracks."""
    trace = timeline.trace
    of_tables = (trace.gpu["start"], trace.host["start"], trace.programs["start"])
    of_job = () if timeline.job is None else (timeline.job.rows["start"],)
    times = (*of_tables, *of_job, *(phases.ranges["start_ns"] for phases in timeline.inside))
    first = [start for column in times if isinstance(start := column.min(), int)]
    made = Layout(min([0, *first]))
    job = None
    if timeline.job is not None:
        job = JobLayout(timeline.job, made.tracks, made.interned, made.origin_ns)
        slices, counter = job.above()
        made.slices += slices
        made.counters.append(counter)
    flows = _Flows.of(timeline)
    devices = made.devices
    host_track = np.zeros(trace.host.height, np.int64)
    gpu_track = np.zeros(trace.gpu.height, np.int64)
    for rank in trace.ranks:
        _add_devices(made, timeline, rank, gpu_track, devices)
    _add_processes(made, timeline, host_track)
    made.slices.append(_host_slices(made, timeline, host_track, flows))
    gpu = _gpu_slices(made, timeline, gpu_track, flows)
    made.slices.append(gpu)
    _add_programs(made, timeline, devices)
    for kind, names in timeline.lanes.items():
        _add_lanes(made, timeline, gpu, (kind, names), devices)
    _add_spans(made, timeline, devices)
    _add_counters(made, timeline, devices)
    group_of = device_groups(made.tracks, devices)
    made.slices += add_inside(made.tracks, made.interned, timeline.inside, group_of, made.origin_ns)
    if job is not None:
        made.slices.append(job.below())
    return made


def _numbered(frame: pl.DataFrame, columns: Sequence[str]) -> tuple[Int64, list[tuple[Any, ...]]]:
    """Number of each row's combination of values, and the combinations in ascending order."""
    distinct = frame.select(columns).unique().sort(columns)
    numbers = frame.select(columns).join(
        distinct.with_row_index("number"),
        on=columns, how="left", nulls_equal=True, maintain_order="left",
    )  # fmt: skip
    return numbers["number"].cast(pl.Int64).to_numpy(), distinct.rows()


def _ends(frame: pl.DataFrame) -> Int64:
    return (frame["start"] + frame["duration"]).to_numpy()


def _prefix(timeline: Timeline, rank: int) -> str:
    return f"rank {rank}: " if len(timeline.trace.ranks) > 1 else ""


def _clock(timeline: Timeline, rank: int) -> tuple[str, ...]:
    """A note with the correction of a rank's clock; empty if there was none."""
    moved = timeline.corrections.get(rank)
    return () if moved is None else (f"clock moved by {-moved:+,} ns",)


def _add_processes(made: Layout, timeline: Timeline, track: Int64) -> None:
    """Adds tracks for the host threads of all ranks; writes the track of each range to ``track``."""
    trace = timeline.trace
    columns = ["rank", "process", "thread"]
    host = trace.host.select(*columns, "start", "duration")
    number, keys = _numbered(host, columns)
    lane = split_lanes(number, host["start"].to_numpy(), _ends(host))
    lanes = _lanes_of(number, lane, len(keys))
    count = dict(zip(keys, lanes, strict=True))
    uuids: dict[tuple[Any, ...], list[int]] = {}
    for process in host_processes(trace.host, trace.threads):
        rank = process.rank
        pid = made.tracks.free_pid(process.process)
        made.pids.setdefault(rank, pid)
        name = f"{_prefix(timeline, rank)}{process.name}"
        group = made.tracks.add(name, of=Process(pid, name, _clock(timeline, rank)))
        for thread in process.threads:
            of = Thread(pid, made.tracks.thread_id(thread.thread), thread.name)
            first = made.tracks.add(thread.name, group, of=of)
            key = (rank, process.process, thread.thread)
            # A thread has only one track; slices that overlap its slices without nesting are in a row below.
            below = made.tracks.lanes(f"{thread.name}, overlapping", first, count[key] - 1)
            uuids[key] = [first, *below]
    track[:] = _flat(uuids[key] for key in keys)[_first(lanes)[number] + lane]


def _lanes_of(number: Int64, lane: Int64, count: int) -> list[int]:
    """Number of lanes of each of the numbered tracks."""
    most = np.zeros(count, np.int64)
    np.maximum.at(most, number, lane + 1)
    return [int(n) for n in most]


def _first(lanes: Iterable[int]) -> Int64:
    """Index of each track's first lane in a list of all lanes."""
    counts = np.array([*lanes], np.int64)
    return np.cumsum(counts) - counts


def _flat(uuids: Iterable[Iterable[int]]) -> Int64:
    return np.array([uuid for row in uuids for uuid in row], np.int64)


def _add_devices(
    made: Layout, timeline: Timeline, rank: int, track: Int64, devices: dict[tuple[int, int], int]
) -> None:
    """Adds groups and streams for the devices of a rank; writes the track of each activity to ``track``."""
    rows = np.flatnonzero((timeline.trace.gpu["rank"] == rank).to_numpy())
    gpu = timeline.trace.gpu[rows].select("device", "stream", "start", "duration")
    number, streams = _numbered(gpu, ["device", "stream"])
    lane = split_lanes(number, gpu["start"].to_numpy(), _ends(gpu))
    models = {d.device: d.name for d in timeline.trace.meta.devices if d.rank == rank and d.name}
    uuids = []
    lanes = _lanes_of(number, lane, len(streams))
    for (device, stream), count in zip(streams, lanes, strict=True):
        if (rank, device) not in devices:
            model = f" ({models[device]})" if device in models else ""
            name = f"{_prefix(timeline, rank)}GPU {device}{model}"
            of = Process(made.tracks.free_pid(), name, _clock(timeline, rank))
            devices[rank, device] = made.tracks.add(name, of=of)
        name = "no stream" if stream is None else f"stream {stream}"
        uuids.append(made.tracks.lanes(name, devices[rank, device], count))
    track[rows] = _flat(uuids)[_first(lanes)[number] + lane]


@dataclass(frozen=True, slots=True)
class _Flows:
    """Arrows into and out of host ranges, and into device activities."""

    host: Arrows
    gpu: Arrows

    @classmethod
    def of(cls, timeline: Timeline) -> _Flows:
        """The flows from launch to activity and from forward to backward op.

        Each id connects two slices. Ids of activities count from 1; ids of backward ops continue after these.
        """
        host, gpu = timeline.trace.host, timeline.trace.gpu
        launch = timeline.trace.places["launch"].cast(pl.Int64).fill_null(-1).to_numpy()
        forward = host["forward"].cast(pl.Int64).fill_null(-1).to_numpy()
        to_gpu = np.where(launch >= 0, np.arange(1, gpu.height + 1), 0)
        to_host = np.where(forward >= 0, np.arange(gpu.height + 1, gpu.height + host.height + 1), 0)
        sources = np.concatenate([launch[launch >= 0], forward[forward >= 0]])
        ids = np.concatenate([to_gpu[launch >= 0], to_host[forward >= 0]])
        order = np.argsort(sources, kind="stable")
        first = np.searchsorted(sources[order], np.arange(host.height + 1))
        start = host["start"].to_numpy()
        begun = np.append(start, 0)  # the last element is for the index -1
        backward = Arrows(to_host, begun[forward] < start, ids[order], first)
        none = np.zeros(gpu.height + 1, np.int64)
        # At equal times the host range comes first, because it is written first.
        launched = begun[launch] <= gpu["start"].to_numpy()
        return cls(backward, Arrows(to_gpu, launched, ids[:0], none))


def _host_slices(made: Layout, timeline: Timeline, track: Int64, flows: _Flows) -> Slices:
    host = timeline.trace.host
    start, end = host["start"].to_numpy() - made.origin_ns, _ends(host) - made.origin_ns
    return Slices(
        track,
        start,
        end,
        made.interned.names.column(host["name"]),
        made.interned.categories.column(host["category"]),
        nested_sequence(track, start, end),
        host_arguments(timeline, made.interned),
        flows.host,
    )


def _gpu_slices(made: Layout, timeline: Timeline, track: Int64, flows: _Flows) -> Slices:
    gpu = timeline.trace.gpu
    start, end = gpu["start"].to_numpy() - made.origin_ns, _ends(gpu) - made.origin_ns
    return Slices(
        track,
        start,
        end,
        made.interned.names.column(gpu["name"]),
        made.interned.categories.column(gpu["kind"]),
        nested_sequence(track, start, end),
        gpu_arguments(timeline, made.interned),
        flows.gpu,
    )


def _add_programs(made: Layout, timeline: Timeline, devices: dict[tuple[int, int], int]) -> None:
    """Adds a row with the executions of XLA programs for each device that has any."""
    programs = timeline.trace.programs
    if programs.is_empty():
        return
    number, keys = _numbered(programs, ["rank", "device"])
    lane = split_lanes(number, programs["start"].to_numpy(), _ends(programs))
    lanes = _lanes_of(number, lane, len(keys))
    uuids = [
        made.tracks.lanes("XLA programs", devices.get(key, 0), count) for key, count in zip(keys, lanes, strict=True)
    ]
    track = _flat(uuids)[_first(lanes)[number] + lane]
    start, end = programs["start"].to_numpy() - made.origin_ns, _ends(programs) - made.origin_ns
    names = made.interned.names.column(programs["name"])
    category = np.full(len(track), made.interned.categories.of("program"))
    steps = nested_sequence(track, start, end)
    made.slices.append(Slices(track, start, end, names, category, steps))


def _add_lanes(
    made: Layout, timeline: Timeline, gpu: Slices, by: tuple[str, pl.Series], devices: dict[tuple[int, int], int]
) -> None:
    """Adds a group to each device with a row for each lane, and the activities a second time on these rows."""
    kind, names = by
    rows = np.flatnonzero(names.is_not_null().to_numpy())
    shown = timeline.trace.gpu.select("rank", "device", name=names.cast(pl.String))[rows]
    number, keys = _numbered(shown, ["rank", "device", "name"])
    if not len(rows):
        return
    lane = split_lanes(number, gpu.start[rows], gpu.end[rows])
    lanes = _lanes_of(number, lane, len(keys))
    groups: dict[tuple[int, int], int] = {}
    uuids = []
    for (rank, device, name), count in zip(keys, lanes, strict=True):
        if (rank, device) not in groups:
            groups[rank, device] = made.tracks.add(_GROUPS[kind], devices[rank, device])
        uuids.append(made.tracks.lanes(name, groups[rank, device], count))
    on = np.zeros(len(gpu.track), np.int64)
    on[rows] = _flat(uuids)[_first(lanes)[number] + lane]
    steps = nested_sequence(on[rows], gpu.start[rows], gpu.end[rows])
    again = type(steps)(*(np.where(s >= 0, rows[s], -1) for s in (steps.begins, steps.ends)))
    made.slices.append(Slices(on, gpu.start, gpu.end, gpu.name, gpu.category, again, gpu.arguments))


def _add_spans(made: Layout, timeline: Timeline, devices: dict[tuple[int, int], int]) -> None:
    """Adds a row to each device for each track of spans, such as the causes of its idle time."""
    frame = timeline.spans
    if frame is None or frame.is_empty():
        return
    number, keys = _numbered(frame, ["rank", "device", "track"])
    uuids = [made.tracks.lanes(name, devices.get((rank, device), 0), 1)[0] for rank, device, name in keys]
    track = np.array(uuids, np.int64)[number]
    start, end = frame["start"].to_numpy() - made.origin_ns, _ends(frame) - made.origin_ns
    names = made.interned.names.column(frame["name"].cast(pl.Categorical()))
    category = np.full(len(track), made.interned.categories.of("span"))
    made.slices.append(Slices(track, start, end, names, category, nested_sequence(track, start, end)))


def _add_counters(made: Layout, timeline: Timeline, devices: dict[tuple[int, int], int]) -> None:
    frame = timeline.counters
    if frame.is_empty():
        return
    # The frame is sorted by these columns, and can be longer than the trace: no join is needed.
    key = ("rank", "device", "counter")
    number = frame.select(pl.struct(key).rle_id().cast(pl.Int64)).to_series().to_numpy()
    keys = frame[np.flatnonzero(np.diff(number, prepend=-1))].select(key).rows()
    uuids = np.array(
        [made.tracks.add(counter, devices[rank, device], unit=COUNTERS[counter]) for rank, device, counter in keys],
        np.int64,
    )
    time = frame["time"].to_numpy() - made.origin_ns
    made.counters.append(Counter(uuids[number], time, frame["value"].to_numpy()))
