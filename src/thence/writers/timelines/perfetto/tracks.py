"""Track descriptors: the rows of the viewer with their names and order.

Field numbers: protos/perfetto/trace/track_event/track_descriptor.proto, process_descriptor.proto,
thread_descriptor.proto and counter_descriptor.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thence.writers.wire_format import bytes_field, text_field, uint_field

_EXPLICIT_CHILDREN = 3  # ChildTracksOrdering.EXPLICIT: by sibling_order_rank
_MERGE_BY_KEY = 3  # SIBLING_MERGE_BEHAVIOR_BY_SIBLING_MERGE_KEY
_EXPLICIT = 1  # of process_ordering and thread_ordering
_MAX_PID = (1 << 31) - 1  # ProcessDescriptor.pid is an int32, ...
_MAX_TID = (1 << 63) - 1  # ... and ThreadDescriptor.tid an int64
_FIRST_FREE_PID = 1_000_000_000  # above what Linux gives to processes: 2^22 at most


@dataclass(frozen=True, slots=True)
class Process:
    """A process track: id (unique in the file), name, and labels that the viewer shows as notes."""

    pid: int
    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread track."""

    pid: int
    tid: int
    name: str


@dataclass(frozen=True, slots=True)
class Track:
    """One track.

    Attributes:
        uuid: id, unique in the file, from 1.
        name: the name that is shown.
        parent: uuid of the parent track, 0 for none.
        rank: sort key among the track's siblings.
        of: process or thread that the track represents.
        merge_key: tracks with the same parent and key are drawn as one row.
        unit: unit of the values of a counter; None for other tracks.
    """

    uuid: int
    name: str
    parent: int = 0
    rank: int = 0
    of: Process | Thread | None = None
    merge_key: str | None = None
    unit: str | None = None

    def descriptor(self) -> bytes:
        """The track as a TrackDescriptor message."""
        # Fields of TrackDescriptor: 1 uuid, 2 name, 3 process, 4 thread, 5 parent_uuid, 8 counter, 11 child_ordering,
        # 12 sibling_order_rank, 15 and 16 sibling_merge_behavior and _key, 19 and 20 process_ and thread_ordering.
        parts = [uint_field(1, self.uuid)]
        if self.parent:
            parts.append(uint_field(5, self.parent))
        if isinstance(self.of, Process):
            process = uint_field(1, self.of.pid) + text_field(6, self.of.name)
            # Like Kineto, for viewers that do not know process_ordering: they sort by this field.
            process += uint_field(3, self.rank)
            process += b"".join(text_field(8, label) for label in self.of.labels)
            parts += [bytes_field(3, process), uint_field(19, _EXPLICIT), uint_field(20, _EXPLICIT)]
        elif isinstance(self.of, Thread):
            thread = uint_field(1, self.of.pid) + uint_field(2, self.of.tid)
            parts.append(bytes_field(4, thread + text_field(5, self.of.name)))
        else:
            parts.append(text_field(2, self.name))
        if self.unit is not None:
            parts.append(bytes_field(8, text_field(6, self.unit)))
        else:
            parts.append(uint_field(11, _EXPLICIT_CHILDREN))
        parts.append(uint_field(12, self.rank))
        if self.merge_key is not None:
            parts += [uint_field(15, _MERGE_BY_KEY), text_field(16, self.merge_key)]
        return b"".join(parts)


@dataclass
class Tracks:
    """The tracks of one file, in the order in which they were added."""

    all: list[Track] = field(default_factory=list)
    _pids: set[int] = field(default_factory=set)

    def add(self, name: str, parent: int = 0, *, of: Process | Thread | None = None, unit: str | None = None) -> int:
        """Adds a track after its siblings and returns its uuid."""
        place = len(self.all)
        self.all.append(Track(place + 1, name, parent, place, of, unit=unit))
        return place + 1

    def lanes(self, name: str, parent: int, count: int) -> list[int]:
        """Adds ``count`` tracks that are drawn as one row, and returns their uuids. Several share a merge key."""
        place = len(self.all)
        key = f"{parent}/{place}" if count > 1 else None
        uuids = [place + 1 + lane for lane in range(count)]
        self.all += [Track(uuid, name, parent, place, merge_key=key) for uuid in uuids]
        return uuids

    def free_pid(self, wanted: int = -1) -> int:
        """A process id that no other process of the file has; the wanted id if it is free and valid.

        Processes on different hosts may have the same id, devices have no id, and 0 is the idle process.
        """
        pid = wanted if 0 < wanted < _MAX_PID else _FIRST_FREE_PID
        while pid in self._pids:
            pid = max(pid + 1, _FIRST_FREE_PID)
        self._pids.add(pid)
        return pid

    @staticmethod
    def thread_id(thread: int) -> int:
        """The id itself if it is valid; else a number that no operating system gives to a thread."""
        return thread if 0 < thread <= _MAX_TID else (1 << 40) + (-thread & 0xFFFF_FFFF)
