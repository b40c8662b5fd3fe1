"""Reads a Perfetto trace with Perfetto's own protos, packet by packet, as its trace processor does."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from thence.writers.timelines.perfetto.write import write_perfetto

if TYPE_CHECKING:
    from thence.model.timeline import Timeline

EVENT = protos.TrackEvent


@dataclass
class Slice:
    name: str
    category: str
    track: int
    start: int
    arguments: dict[str, Any]
    types: dict[str, str]
    outgoing: list[int]
    incoming: list[int]
    end: int = -1
    depth: int = 0


@dataclass
class Decoded:
    trace: Any
    tracks: dict[int, Any] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    counters: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    interned: dict[str, dict[int, str]] = field(default_factory=dict)

    def title(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return track.process.process_name or track.thread.thread_name or track.name

    def path(self, uuid: int) -> str:
        """Titles from the outermost track in."""
        parent = self.tracks[uuid].parent_uuid
        return f"{self.path(parent)} > {self.title(uuid)}" if parent else self.title(uuid)

    def on(self, path: str) -> list[Slice]:
        """Slices on all tracks with this path, by start."""
        chosen = [s for s in self.slices if self.path(s.track) == path]
        return sorted(chosen, key=lambda s: (s.start, -s.end))


def written_bytes(timeline: Timeline) -> bytes:
    stream = io.BytesIO()
    write_perfetto(timeline, stream)
    return stream.getvalue()


def value_of(annotation: Any) -> tuple[str, Any]:
    if annotation.array_values:
        return "array", [value_of(item)[1] for item in annotation.array_values]
    kind = annotation.WhichOneof("value")
    return kind, getattr(annotation, kind)


def decoded(content: bytes) -> Decoded:
    """Everything in a trace; asserts what must hold of every packet."""
    result = Decoded(protos.Trace.FromString(content))
    texts: dict[str, dict[int, str]] = {k: {} for k in ("categories", "names", "keys", "texts")}
    stacks: dict[int, list[Slice]] = {}
    last: dict[int, int] = {}
    for number, packet in enumerate(result.trace.packet):
        assert packet.trusted_packet_sequence_id == 1
        assert (packet.sequence_flags == 1) == (number == 0)
        interned = packet.interned_data
        for kind, entries in zip(
            texts, (interned.event_categories, interned.event_names, interned.debug_annotation_names), strict=False
        ):
            texts[kind] |= {entry.iid: entry.name for entry in entries}
        for entry in interned.debug_annotation_string_values:
            texts["texts"][entry.iid] = entry.str.decode()
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            assert track.uuid not in result.tracks
            assert not track.parent_uuid or track.parent_uuid in result.tracks
            result.tracks[track.uuid] = track
        if not packet.HasField("track_event"):
            continue
        event, time = packet.track_event, packet.timestamp
        assert time >= last.get(event.track_uuid, 0), "time runs backwards on a track"
        last[event.track_uuid] = time
        if event.type == EVENT.TYPE_COUNTER:
            value = event.counter_value if event.HasField("counter_value") else event.double_counter_value
            result.counters.setdefault(event.track_uuid, []).append((time, value))
        elif event.type == EVENT.TYPE_SLICE_END:
            stacks[event.track_uuid].pop().end = time
        else:
            assert event.type == EVENT.TYPE_SLICE_BEGIN
            assert packet.sequence_flags == 2
            stack = stacks.setdefault(event.track_uuid, [])
            pairs = {texts["keys"][a.name_iid]: value_of(a) for a in event.debug_annotations}
            values = {k: texts["texts"][v] if t == "string_value_iid" else v for k, (t, v) in pairs.items()}
            slice_ = Slice(
                texts["names"][event.name_iid], texts["categories"][event.category_iids[0]],
                event.track_uuid, time, values, {k: t for k, (t, _) in pairs.items()},
                list(event.flow_ids), list(event.terminating_flow_ids), depth=len(stack),
            )  # fmt: skip
            stack.append(slice_)
            result.slices.append(slice_)
    assert not any(stacks.values()), "a slice that never ends"
    result.interned = texts
    return result
