"""Layout: assigns the rows of a timeline to tracks, and creates the tracks.

Each device is a group with its streams, counters and lanes; each process of each rank is a group of threads. Devices
come before processes. If the timeline has `thence.model.timeline.JobRows`, their summary rows of all ranks are a group
above all others, and the group of the ranks that are not expanded is below. In-kernel ranges have a group for each
launch, with nested groups for its SMs, their blocks and traces. Times are those of the timeline minus
`Layout.origin_ns`.

Threads of the program come first, threads with nothing but the profiler's own overhead last. Producers of traces put
ids into thread names in different ways (``thread 2639 (pt_autograd_0)``, ``py_xla_execute/-5594605286789560846``).
Here the name is shown without it; the thread's id follows in parentheses if it is an id of the operating system.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.analysis.timelines.timeline import COUNTERS
from thence.analysis.timelines.track_packing import nested_sequence, split_lanes
from thence.model.columns import row_numbers
from thence.model.tables import API_CALLS
from thence.writers.timelines.perfetto.arguments import (
    columns_as_arguments,
    gpu_arguments,
    host_arguments,
    inside_arguments,
)
from thence.writers.timelines.perfetto.packets import Arrows, Counter, Interned, Slices
from thence.writers.timelines.perfetto.tracks import Process, Thread, Tracks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thence.model.arrays import Int64
    from thence.model.timeline import JobRows, Phases

    GroupOf = Callable[[Phases], int]
    from thence.model.timeline import Timeline

_OF_KINETO = re.compile(r"thread -?\d+ \((.+)\)", re.DOTALL)
_WITH_ID = re.compile(r"(.+)/-?\d+", re.DOTALL)
_MAX_ID = 1 << 31
"""Thread ids of the operating system are below this; larger ids are handles and hashes, useless to the reader."""
_PROFILER = "overhead"
_UNIT = "ms"
_ARGUMENTS = {
    "step": "step",
    "step_ns": "step ns",
    "compute_ns": "compute ns",
    "wait_ns": "exposed wait ns",
    "caused_ns": "wait caused ns",
    "detail": "detail",
}
_CATEGORY = "in kernel"
_GROUPS = {
    "label": "labels",
    "module": "modules",
    "collective": "collectives",
    "process-group": "process groups",
    "lane": "lanes",
}


@dataclass(frozen=True, slots=True)
class HostThread:
    """One thread: its id in the table ``host``, and the name that is shown."""

    thread: int
    name: str


@dataclass(frozen=True, slots=True)
class HostProcess:
    """One process of a rank.

    Attributes:
        rank: rank of the process.
        process: id in the table ``host``.
        name: the name that is shown.
        threads: threads, in the order in which they are shown.
        of_profiler: whether the process has nothing but the profiler's own overhead.
    """

    rank: int
    process: int
    name: str
    threads: tuple[HostThread, ...]
    of_profiler: bool


def host_processes(host: pl.DataFrame, names: pl.DataFrame) -> list[HostProcess]:
    """The processes of all ranks, in the order in which they are shown; processes of the profiler come last."""
    category = pl.col("category").cast(pl.String)
    threads = (
        host.group_by("rank", "process", "thread")
        .agg(profiler=(category == _PROFILER).all(), calls=category.is_in(API_CALLS).all())
        .join(names.unique(["rank", "process", "thread"], keep="first"), on=["rank", "process", "thread"], how="left")
        .with_columns(main=pl.col("process") == pl.col("thread"))
        .sort("rank", "process", "profiler", ~pl.col("main"), "calls", "thread")
    )
    processes = [
        HostProcess(rank, process, *_described(process, rows))
        for (rank, process), rows in threads.group_by("rank", "process", maintain_order=True)
    ]
    return sorted(processes, key=lambda each: each.of_profiler)


def _described(process: int, rows: pl.DataFrame) -> tuple[str, tuple[HostThread, ...], bool]:
    """Name of a process, its threads, and whether it has only overhead of the profiler."""
    of_profiler = bool(rows["profiler"].all())
    columns = rows.select("thread", "name", "main", "calls", "profiler").rows()
    titles = _distinct([_title(*column) for column in columns])
    threads = tuple(HostThread(t, title) for t, title in zip(rows["thread"], titles, strict=True))
    return ("profiler" if of_profiler else f"process {process}"), threads, of_profiler


def _title(thread: int, name: str | None, main: bool, calls: bool, profiler: bool) -> str:  # noqa: FBT001 - a row
    """The name under which a thread is shown."""
    if not name:
        known = f"thread {thread}"
        return f"{known}, calls only" if calls else f"{known}, profiler" if profiler else known
    match = _OF_KINETO.fullmatch(name) or _WITH_ID.fullmatch(name)
    plain = match[1] if match else name
    if main and plain != "MainThread":
        return f"{plain}, main thread"
    return f"{plain} ({thread})" if match and 0 < thread < _MAX_ID else plain


def _distinct(titles: Sequence[str]) -> Iterable[str]:
    """The titles; titles of several threads get a number each."""
    several = {title for title, count in collections.Counter(titles).items() if count > 1}
    seen: collections.Counter[str] = collections.Counter()
    for title in titles:
        seen[title] += 1
        yield f"{title} {seen[title]}" if title in several else title


class JobLayout:
    """Adds the rows of a job to a file.

    Args:
        job: the rows.
        tracks, interned: tracks and interned texts of the file.
        origin_ns: ns to subtract from every time.
    """

    def __init__(self, job: JobRows, tracks: Tracks, interned: Interned, origin_ns: int) -> None:
        self._job = job
        self._tracks = tracks
        self._interned = interned
        self._origin_ns = origin_ns

    def above(self) -> tuple[list[Slices], Counter]:
        """The group above: counters of the whole job, late ranks, and a row for each rank that is shown in full."""
        group = self._group(self._job.title)
        counters = self._counters(group)
        late = self._slices(self._job.spans, group, "late rank")
        return [late, self._steps(group, folded=False)], counters

    def below(self) -> Slices:
        """The group below: a row for each of the other ranks."""
        return self._steps(self._group(self._job.folded_title), folded=True)

    def _group(self, title: str) -> int:
        return self._tracks.add(title, of=Process(self._tracks.free_pid(), title))

    def _steps(self, group: int, *, folded: bool) -> Slices:
        rows = self._job.rows.filter(pl.col("folded") == folded)
        return self._slices(rows, group, "step of a rank")

    def _slices(self, rows: pl.DataFrame, group: int, category: str) -> Slices:
        """Slices on one row per track name under a group, in the order in which the names first occur."""
        titles = rows["track"].unique(maintain_order=True)
        number = rows["track"].cast(pl.Enum(titles)).to_physical().cast(pl.Int64).to_numpy()
        start = rows["start"].to_numpy() - self._origin_ns
        end = start + rows["duration"].to_numpy()
        lane = split_lanes(number, start, end)
        most = np.ones(len(titles), np.int64)
        np.maximum.at(most, number, lane + 1)
        uuids = [
            uuid
            for title, count in zip(titles, most.tolist(), strict=True)
            for uuid in self._tracks.lanes(title, group, count)
        ]
        first = np.cumsum(most) - most
        track = np.array(uuids, np.int64)[first[number] + lane]
        return Slices(
            track,
            start,
            end,
            self._interned.names.column(rows["name"]),
            np.full(len(track), self._interned.categories.of(category)),
            nested_sequence(track, start, end),
            columns_as_arguments(rows, _ARGUMENTS, self._interned),
        )

    def _counters(self, group: int) -> Counter:
        rows = self._job.counters
        titles = rows["counter"].unique(maintain_order=True).to_list()
        track = {title: self._tracks.add(title, group, unit=_UNIT) for title in titles}
        track_of_row = np.array([track[title] for title in rows["counter"]], np.int64)
        return Counter(track_of_row, rows["time"].to_numpy() - self._origin_ns, rows["value"].to_numpy())


def device_groups(tracks: Tracks, devices: dict[tuple[int, int], int]) -> GroupOf:
    """A function that returns the track of a launch's device, and adds it if the trace lacks the device."""

    def group(phases: Phases) -> int:
        key = phases.rank, phases.device
        if key not in devices:
            name = f"GPU {phases.device}"
            devices[key] = tracks.add(name, of=Process(tracks.free_pid(), name))
        return devices[key]

    return group


def add_inside(
    tracks: Tracks, interned: Interned, inside: Sequence[Phases], group_of: GroupOf, origin_ns: int
) -> list[Slices]:
    """Adds the tracks of all launches.

    Args:
        inside: in-kernel ranges of each launch.
        group_of: returns the parent track of a launch.
        origin_ns: ns to subtract from every time.

    Returns:
        The slices of each launch.
    """
    return [_launch(tracks, interned, phases, group_of(phases), origin_ns) for phases in inside]


def _launch(tracks: Tracks, interned: Interned, phases: Phases, device: int, origin_ns: int) -> Slices:
    ranges = phases.ranges
    keys = ranges.select("sm", "block", "index")
    distinct = keys.unique().sort("sm", "block", "index", nulls_last=True)
    numbers = keys.join(
        distinct.with_row_index("number"),
        on=["sm", "block", "index"], how="left", nulls_equal=True, maintain_order="left",
    )["number"].cast(pl.Int64).to_numpy()  # fmt: skip
    start = ranges["start_ns"].to_numpy() - origin_ns
    end = start + ranges["duration_ns"].to_numpy()
    lane = split_lanes(numbers, start, end)
    most = np.zeros(distinct.height, np.int64)
    np.maximum.at(most, numbers, lane + 1)
    uuids = _tracks(tracks, phases, device, distinct.rows(), most)
    first = np.cumsum(most) - most
    track = uuids[first[numbers] + lane] if len(numbers) else numbers
    return Slices(
        track,
        start,
        end,
        interned.names.column(ranges["name"]),
        np.full(len(track), interned.categories.of(_CATEGORY)),
        nested_sequence(track, start, end),
        inside_arguments(ranges, interned),
    )


def _tracks(tracks: Tracks, phases: Phases, device: int, keys: Sequence[tuple[Any, ...]], lanes: Int64) -> Int64:
    """Adds the tracks of the traces under the tracks of their SMs and blocks; returns the uuids of all lanes."""
    root = tracks.add(f"inside {phases.title}", device)
    uuids: list[int] = []
    last_sm: object = tracks  # a value that no key has; None would be an unknown SM
    last_block: object = tracks
    of_sm = of_block = root
    for (sm, block, index), count in zip(keys, lanes.tolist(), strict=True):
        if sm != last_sm:
            of_sm = tracks.add("SM unknown" if sm is None else f"SM {sm}", root)
            last_sm, last_block = sm, tracks
        if block != last_block:
            of_block = tracks.add(f"block {block}", of_sm)
            last_block = block
        uuids += tracks.lanes(f"{phases.scope} {index}", of_block, count)
    return np.array(uuids, np.int64)


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
            written = Thread(pid, made.tracks.thread_id(thread.thread), thread.name)
            first = made.tracks.add(thread.name, group, of=written)
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
    counted = timeline.counters.filter(pl.col("rank") == rank)["device"].unique().sort()
    for device in [*(device for device, _ in streams), *counted]:  # memory has counters where nothing else is known
        if (rank, device) not in devices:
            model = f" ({models[device]})" if device in models else ""
            name = f"{_prefix(timeline, rank)}GPU {device}{model}"
            process = Process(made.tracks.free_pid(), name, _clock(timeline, rank))
            devices[rank, device] = made.tracks.add(name, of=process)
    for (device, stream), count in zip(streams, lanes, strict=True):
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
        launch = row_numbers(timeline.trace.places["launch"])
        forward = row_numbers(host["forward"])
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
