"""Encodes columns of slices and counters as packets.

Field numbers: protos/perfetto/trace/trace_packet.proto, track_event/track_event.proto and
track_event/debug_annotation.proto. All events belong to one packet sequence. Its first packets
clear the incremental state and hold all interned data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thence.writers.timelines.perfetto.wire import (
    FIXED64,
    VARINT,
    bytes_field,
    constant,
    delimited,
    double_column,
    field_tag,
    fixed64_column,
    joined,
    only_where,
    ragged,
    uint_field,
    varint_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.analysis.timelines.track_packing import Steps
    from thence.model.arrays import Array, Int64, Mask, UInt8
    from thence.writers.timelines.perfetto.wire import Part


_CHUNK_ROWS = 8192
"""Rows encoded at a time, so few that their data stays in the CPU caches."""

_SEQUENCE = uint_field(10, 1)
_NEEDS_STATE = uint_field(13, 2)
_CLEARS_STATE = uint_field(13, 1)
_TIMESTAMP = field_tag(8, VARINT)
_TRACK_EVENT = 11
_TRACK_UUID = field_tag(11, VARINT)
_BEGIN, _END, _COUNTER = uint_field(9, 1), uint_field(9, 2), uint_field(9, 4)
_FLOW_ID, _LAST_FLOW_ID = field_tag(47, FIXED64), field_tag(48, FIXED64)
_ANNOTATION, _ARRAY_VALUE = 4, 12
_UINT_VALUE, _INT_VALUE, _DOUBLE_VALUE, _TEXT_NUMBER = 3, 4, 5, 17
_FIELD_OF_TYPE = {"uint": _UINT_VALUE, "int": _INT_VALUE, "text": _TEXT_NUMBER}


@dataclass(frozen=True, slots=True)
class Argument:
    """A column of arguments, each a typed debug annotation.

    Attributes:
        key: number of the argument's interned name.
        type: uint, int, text (numbers of interned texts) or double.
        values: shape (n,), or (n, k) for arrays of k numbers.
        present: mask of the rows that have the argument, shape (n,).
    """

    key: int
    type: str
    values: Array
    present: Mask

    def parts(self, rows: Int64, begins: Mask) -> list[Part]:
        """The argument's annotation in each row; empty in rows without the argument or without a begin."""
        present = self.present[rows] & begins
        if not present.any():
            return []
        values = self.values[rows]
        name = uint_field(1, self.key)
        if values.ndim == 1:
            content = self._value(name, values)
        else:
            content = [constant(name, len(rows))]
            for column in values.T:
                content += delimited(_ARRAY_VALUE, self._value(b"", column))
        return only_where(delimited(_ANNOTATION, content), present)

    def _value(self, before: bytes, values: Array) -> list[Part]:
        if self.type == "double":
            return [constant(before + field_tag(_DOUBLE_VALUE, FIXED64), len(values)), double_column(values)]
        tag = field_tag(_FIELD_OF_TYPE[self.type], VARINT)
        return [constant(before + tag, len(values)), varint_column(values)]


@dataclass(frozen=True, slots=True)
class Arrows:
    """Flows into and out of slices.

    Attributes:
        incoming: id of the flow into each slice, 0 for none, shape (n,).
        ends: whether the incoming flow ends at the slice. False if the slice begins before the slice that
            the flow comes from (the clocks of host and device differ); then the two slices are connected
            only by the same id.
        outgoing: ids of the flows out of the slices, slice after slice.
        first: index of each slice's first flow in ``outgoing``, shape (n + 1,).
    """

    incoming: Int64
    ends: Mask
    outgoing: Int64
    first: Int64

    def parts(self, rows: Int64, begins: Mask) -> list[Part]:
        """The flow fields of each row; empty in rows without a begin."""
        incoming, ends = self.incoming[rows], self.ends[rows]
        parts: list[Part] = []
        for tag, chosen in ((_FLOW_ID, ~ends), (_LAST_FLOW_ID, ends)):
            there = chosen & (incoming > 0) & begins
            if there.any():
                fields = [constant(tag, len(rows)), fixed64_column(incoming)]
                parts += only_where(fields, there)
        low = self.first[rows]
        count = np.where(begins, self.first[rows + 1] - low, 0)
        if count.any():
            within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
            ids = self.outgoing[np.repeat(low, count) + within]
            content = joined([constant(_FLOW_ID, len(ids)), fixed64_column(ids)])
            parts.append(ragged(content, count * (len(_FLOW_ID) + 8)))
        return parts


@dataclass(frozen=True)
class Slices:
    """Slices of one kind with their arguments; all arrays have shape (n,).

    Attributes:
        track: uuid of each slice's track.
        start: ns, not negative.
        end: ns.
        name: number of the interned name.
        category: number of the interned category.
        steps: order of the begins and ends of the slices.
        arguments: columns of arguments.
        arrows: flows, if there are any.
    """

    track: Int64
    start: Int64
    end: Int64
    name: Int64
    category: Int64
    steps: Steps
    arguments: tuple[Argument, ...] = ()
    arrows: Arrows | None = None


@dataclass(frozen=True, slots=True)
class Counter:
    """Samples of counters: track, time (ns) and value of each sample."""

    track: Int64
    time: Int64
    value: Array


def packet(content: bytes, *, clears_state: bool = False) -> bytes:
    """A packet of the sequence, as a field of the message Trace."""
    flags = _CLEARS_STATE if clears_state else _NEEDS_STATE
    return bytes_field(1, _SEQUENCE + flags + content)


def slice_packets(slices: Slices) -> Iterator[UInt8]:
    """Yields the begin and end packets of the slices, in the order of their steps."""
    begins, ends = slices.steps.begins, slices.steps.ends
    for low in range(0, len(begins), _CHUNK_ROWS):
        begin, end = begins[low : low + _CHUNK_ROWS], ends[low : low + _CHUNK_ROWS]
        yield joined([*_begin(slices, begin), *_end(slices, end)])


def _begin(slices: Slices, rows: Int64) -> list[Part]:
    begins = rows >= 0
    rows = np.where(begins, rows, 0)
    count = len(rows)
    event = [
        constant(_BEGIN + _TRACK_UUID, count),
        varint_column(slices.track[rows]),
        constant(field_tag(10, VARINT), count),
        varint_column(slices.name[rows]),
        constant(field_tag(3, VARINT), count),
        varint_column(slices.category[rows]),
    ]
    for argument in slices.arguments:
        event += argument.parts(rows, begins)
    if slices.arrows is not None:
        event += slices.arrows.parts(rows, begins)
    return _where(_timed(slices.start[rows], event, _NEEDS_STATE), begins)


def _end(slices: Slices, rows: Int64) -> list[Part]:
    ends = rows >= 0
    rows = np.where(ends, rows, 0)
    event = [constant(_END + _TRACK_UUID, len(rows)), varint_column(slices.track[rows])]
    return _where(_timed(slices.end[rows], event), ends)


def _timed(time: Int64, event: list[Part], flags: bytes = b"") -> list[Part]:
    """Packets of timed events; ``flags`` are needed only if the event refers to interned data."""
    content = [
        constant(_SEQUENCE + flags + _TIMESTAMP, len(time)),
        varint_column(time),
        *delimited(_TRACK_EVENT, event),
    ]
    return delimited(1, content)


def _where(parts: list[Part], present: Mask) -> list[Part]:
    """Like `only_where`, but allows ragged parts, which are already empty in the rows that are not present."""
    if present.all():
        return parts
    return [part if part.ragged is not None else only_where([part], present)[0] for part in parts]


def counter_packets(track: Int64, time: Int64, value: Array) -> Iterator[UInt8]:
    """Yields packets of counter values.

    Args:
        track: uuid of the track of each value.
        time: ns, not negative.
        value: values; whole numbers are written as integers, others as doubles.
    """
    whole = value == np.floor(value)
    for low in range(0, len(track), _CHUNK_ROWS):
        rows = slice(low, low + _CHUNK_ROWS)
        count = len(track[rows])
        parts = [constant(_COUNTER + _TRACK_UUID, count), varint_column(track[rows])]
        number = [
            constant(field_tag(30, VARINT), count),
            varint_column(np.where(whole[rows], value[rows], 0).astype(np.int64)),
        ]
        double = [constant(field_tag(44, FIXED64), count), double_column(value[rows])]
        parts += [*only_where(number, whole[rows]), *only_where(double, ~whole[rows])]
        yield joined(_timed(time[rows], parts))
