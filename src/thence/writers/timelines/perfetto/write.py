"""Writes a timeline as a Perfetto trace: native protobuf that ui.perfetto.dev opens directly.

Clocks: all timestamps are the trace's own nanoseconds, declared as BOOTTIME, Perfetto's default
clock. A clock snapshot relates it to wall time if the trace has that. No time is rounded.
Field numbers: protos/perfetto/trace/clock_snapshot.proto, trace_packet_defaults.proto and
trace_attributes.proto.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from thence.writers.timelines.perfetto.gpu_views import gpu_views
from thence.writers.timelines.perfetto.layout import layout
from thence.writers.timelines.perfetto.packets import counter_packets, packet, slice_packets
from thence.writers.wire_format import bytes_field, text_field, uint_field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from thence.model.timeline import Timeline
    from thence.writers.timelines.perfetto.gpu_views import GpuViews
    from thence.writers.timelines.perfetto.layout import Layout

_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock


def write_perfetto(
    timeline: Timeline, stream: IO[bytes], progress: Callable[[int, int], None] = lambda _done, _all: None
) -> None:
    """Writes a timeline as a Perfetto trace.

    Args:
        stream: binary stream; not closed.
        progress: called with the number of slices written so far, and the number of all slices.
    """
    made = layout(timeline)
    views = gpu_views(timeline, made) if timeline.gpu_views else None
    for content in _head(timeline, made, views):
        stream.write(content)
    total = sum(len(slices.start) for slices in made.slices)
    done = 0
    for slices in made.slices:
        for chunk in slice_packets(slices):
            stream.write(chunk.data)
        done += len(slices.start)
        progress(done, total)
    for counter in made.counters:
        for chunk in counter_packets(counter.track, counter.time, counter.value):
            stream.write(chunk.data)
    for chunk in () if views is None else views.packets():
        stream.write(chunk.data)


def _head(timeline: Timeline, made: Layout, views: GpuViews | None) -> Iterator[bytes]:
    """Yields the packets before the slices: clock, facts, interned data and track descriptors."""
    # Fields of TracePacket: 6 clock_snapshot, 12 interned_data, 59 trace_packet_defaults with 58 timestamp_clock_id,
    # 60 track_descriptor, 87 first_packet_on_sequence, 126 trace_attributes.
    defaults = bytes_field(59, uint_field(58, _BOOTTIME))
    first = uint_field(87, 1)
    yield packet(bytes_field(6, _clocks(timeline, made)) + defaults + first, clears_state=True)
    yield packet(bytes_field(126, _facts(timeline, made)))
    for message in made.interned.messages():
        yield packet(bytes_field(12, message))
    if views is not None:
        yield packet(views.info)
        for message in views.interned:
            yield packet(bytes_field(12, message))
    for track in made.tracks.all:
        yield packet(bytes_field(60, track.descriptor()))


def _clocks(timeline: Timeline, made: Layout) -> bytes:
    """A clock snapshot: readings of the trace's clock and, if known, of the wall clock at the same time."""
    times = [slices.start.min() for slices in made.slices if len(slices.start)]
    now = int(min(times, default=0))
    readings = {_BOOTTIME: now}
    epoch = timeline.trace.meta.epoch_ns
    if epoch is not None and epoch + now + made.origin_ns >= 0:
        readings[_REALTIME] = epoch + now + made.origin_ns
    clocks = (uint_field(1, clock) + uint_field(2, time) for clock, time in readings.items())
    return b"".join(bytes_field(1, clock) for clock in clocks) + uint_field(2, _BOOTTIME)


def _facts(timeline: Timeline, made: Layout) -> bytes:
    """Facts about the trace as trace attributes; the corrections of clocks come first."""
    meta = timeline.trace.meta
    texts = {
        **{f"thence.input.{number}": name for number, name in enumerate(meta.inputs)},
        **{f"thence.format.{number}": name for number, name in enumerate(meta.formats)},
        **{f"thence.clocks.{number}": note for number, note in enumerate(timeline.notes)},
        **{f"thence.warning.{number}": text for number, text in enumerate(meta.warnings)},
    }
    numbers = {f"thence.clock_correction_ns.rank.{rank}": ns for rank, ns in timeline.corrections.items()}
    if made.origin_ns:
        numbers["thence.origin_ns"] = made.origin_ns
    if meta.epoch_ns is not None:
        numbers["thence.epoch_ns"] = meta.epoch_ns + made.origin_ns
    for number, facts in enumerate(meta.facts):
        texts |= {f"thence.fact.{number}.{key}": str(value) for key, value in facts.items()}
    entries = [text_field(1, key) + uint_field(2, value) for key, value in numbers.items()]
    entries += [text_field(1, key) + text_field(3, text) for key, text in texts.items()]
    return b"".join(bytes_field(1, entry) for entry in entries)
