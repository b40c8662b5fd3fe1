"""Columns of slices and counters as Perfetto's packets, down to Protobuf's wire format.

The wire format (https://protobuf.dev/programming-guides/encoding/) is written for single values and for whole
columns. The records of many rows with the same fields are joined from `Part`s. A part has the same number of bytes for
each row, of which a row uses the first few. Every step is a NumPy operation over all rows of a chunk.

Each text is written once and then referred to by number (Perfetto's InternedData). All events belong to one packet
sequence; its first packets clear the incremental state and hold all interned data. Field numbers:
protos/perfetto/trace/trace_packet.proto, track_event/track_event.proto, track_event/debug_annotation.proto and
interned_data/interned_data.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.writers.wire_format import BYTES, FIXED64, VARINT, bytes_field, field_tag, text_field, uint_field

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thence.analysis.timelines.track_packing import Steps
    from thence.model.arrays import Array, Int64, Mask, UInt8

_CHUNK_ROWS = 8192
"""Rows encoded at a time, so few that their data stays in the CPU caches."""
_TRACK_EVENT = 11  # TracePacket.track_event; here and below, numbers of fields in Perfetto's messages
_ANNOTATION, _ARRAY_VALUE = 4, 12  # TrackEvent.debug_annotations, DebugAnnotation.array_values
_UINT_VALUE, _INT_VALUE, _DOUBLE_VALUE, _TEXT_NUMBER = 3, 4, 5, 17  # of DebugAnnotation; string_value_iid is the last
_FIELD_OF_TYPE = {"uint": _UINT_VALUE, "int": _INT_VALUE, "text": _TEXT_NUMBER}


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes at one position in the records of many rows.

    Attributes:
        data: uint8, shape (width, rows), or (width, 1) if all rows have the same bytes.
        length: int64, shape (rows,): number of bytes that each row uses.
        ragged: uint8; if given, ``data`` is empty and ``ragged`` has the bytes of all rows one after the
            other, ``length`` bytes for each row.
    """

    data: UInt8
    length: Int64
    ragged: UInt8 | None = None


def constant(content: bytes, rows: int) -> Part:
    """The same bytes in every row."""
    data = np.frombuffer(content, np.uint8)[:, None]
    return Part(data, np.full(rows, len(content), np.int64))


def varint_column(values: Array) -> Part:
    """A varint per row.

    Args:
        values: any integers; negative integers are encoded in 64-bit two's complement.
    """
    unsigned = values.astype(np.uint64)
    largest = int(unsigned.max(initial=0))
    if largest < 1 << 32:
        unsigned = unsigned.astype(np.uint32)
    width = max(1, -(-largest.bit_length() // 7))
    data = np.empty((width, len(values)), np.uint8)
    length = np.ones(len(values), np.int64)
    for place in range(width):
        data[place] = unsigned & 0x7F
        if place + 1 < width:
            unsigned >>= 7
            more = unsigned > 0
            data[place] |= more.view(np.uint8) << 7
            length += more
    return Part(data, length)


def fixed64_column(values: Array) -> Part:
    """A little-endian 64-bit integer per row."""
    data = values.astype("<u8").view(np.uint8).reshape(len(values), 8).T
    return Part(data, np.full(len(values), 8, np.int64))


def double_column(values: Array) -> Part:
    """A little-endian double per row."""
    data = values.astype("<f8").view(np.uint8).reshape(len(values), 8).T
    return Part(data, np.full(len(values), 8, np.int64))


def ragged(content: UInt8, length: Int64) -> Part:
    """Any number of bytes per row.

    Args:
        content: the bytes of all rows, one after the other.
        length: number of bytes of each row.
    """
    return Part(np.empty((0, 1), np.uint8), length, content)


def only_where(parts: Iterable[Part], present: Mask) -> list[Part]:
    """The parts, with no bytes in the rows that are not present; no part may be ragged."""
    return [Part(part.data, np.where(present, part.length, 0)) for part in parts]


def sizes(parts: Iterable[Part]) -> Int64:
    """Number of bytes of each row, summed over the parts."""
    total: Int64 = np.sum([part.length for part in parts], axis=0, dtype=np.int64)
    return total


def delimited(number: int, parts: Sequence[Part]) -> list[Part]:
    """The parts as a message in a field: with the tag and the length in front."""
    length = sizes(parts)
    return [constant(field_tag(number, BYTES), len(length)), varint_column(length), *parts]


def joined(parts: Sequence[Part]) -> UInt8:
    """The bytes of all rows, row after row; the bytes of a row are in the order of the parts."""
    rows = len(parts[0].length)
    width = sum(part.data.shape[0] for part in parts)
    data = np.empty((width, rows), np.uint8)
    used = np.empty((width, rows), np.bool_)
    offset = 0
    for part in parts:
        below = offset + part.data.shape[0]
        data[offset:below] = part.data
        np.less(np.arange(below - offset)[:, None], part.length, out=used[offset:below])
        offset = below
    # Each byte position is filled as a contiguous row, then all are transposed once: faster than strided writes.
    regular = np.ascontiguousarray(data.T)[np.ascontiguousarray(used.T)]
    return _with_ragged(regular, parts)


def _with_ragged(regular: UInt8, parts: Sequence[Part]) -> UInt8:
    """Inserts the bytes of the ragged part, if there is one, into the bytes of the other parts."""
    place = next((i for i, part in enumerate(parts) if part.ragged is not None), None)
    if place is None:
        return regular
    content, extra = parts[place].ragged, parts[place].length
    assert content is not None
    assert all(part.ragged is None for part in parts[place + 1 :]), "one ragged part at most"
    if not len(content):
        return regular
    row = sizes(parts)
    begin = np.cumsum(row) - row + (sizes(parts[:place]) if place else 0)
    edges = np.zeros(len(regular) + len(content) + 1, np.int8)
    filled = extra > 0
    edges[begin[filled]] += 1
    edges[(begin + extra)[filled]] -= 1
    inserted = np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)
    result = np.empty(len(inserted), np.uint8)
    result[inserted] = content
    result[~inserted] = regular
    return result


_SEQUENCE = uint_field(10, 1)  # trusted_packet_sequence_id: a file is one sequence
_NEEDS_STATE = uint_field(13, 2)  # sequence_flags: SEQ_NEEDS_INCREMENTAL_STATE
_CLEARS_STATE = uint_field(13, 1)  # sequence_flags: SEQ_INCREMENTAL_STATE_CLEARED
_TIMESTAMP = field_tag(8, VARINT)  # TracePacket.timestamp
_TRACK_UUID = field_tag(11, VARINT)  # TrackEvent.track_uuid
_BEGIN, _END, _COUNTER = uint_field(9, 1), uint_field(9, 2), uint_field(9, 4)  # TrackEvent.type
_FLOW_ID, _LAST_FLOW_ID = field_tag(47, FIXED64), field_tag(48, FIXED64)  # flow_ids, terminating_flow_ids


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
            has_arrow = chosen & (incoming > 0) & begins
            if has_arrow.any():
                fields = [constant(tag, len(rows)), fixed64_column(incoming)]
                parts += only_where(fields, has_arrow)
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
            constant(field_tag(30, VARINT), count),  # TrackEvent.counter_value
            varint_column(np.where(whole[rows], value[rows], 0).astype(np.int64)),
        ]
        double = [constant(field_tag(44, FIXED64), count), double_column(value[rows])]  # double_counter_value
        parts += [*only_where(number, whole[rows]), *only_where(double, ~whole[rows])]
        yield joined(_timed(time[rows], parts))


@dataclass
class Texts:
    """Distinct texts of one kind, numbered from 1; 0 stands for none.

    Attributes:
        number: field of InternedData that holds the texts. Each of its messages has the text's number as
            field 1 and the text as field 2.
        numbers: the number of each text.
    """

    number: int
    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> int:
        """The number of a text; a new text gets the next number."""
        return self.numbers.setdefault(text, len(self.numbers) + 1)

    def column(self, values: pl.Series) -> Int64:
        """The number of each value in a column of categories or texts; 0 for null."""
        if not isinstance(values.dtype, pl.Categorical | pl.Enum):
            values = values.cast(pl.String).cast(pl.Categorical)
        distinct = values.drop_nulls().unique(maintain_order=True)
        codes = distinct.to_physical().to_numpy()
        table = np.zeros(int(codes.max(initial=0)) + 1, np.int64)
        table[codes] = [self.of(text) for text in distinct.cast(pl.String).to_list()]
        numbers: Int64 = table[values.to_physical().fill_null(0).to_numpy()]
        numbers[values.is_null().to_numpy()] = 0
        return numbers


@dataclass
class Interned:
    """All interned texts of one file."""

    categories: Texts = field(default_factory=lambda: Texts(1))
    names: Texts = field(default_factory=lambda: Texts(2))
    keys: Texts = field(default_factory=lambda: Texts(3))
    texts: Texts = field(default_factory=lambda: Texts(29))

    def messages(self) -> Iterator[bytes]:
        """Yields InternedData messages with all texts, 4,096 texts in each."""
        entries = [
            bytes_field(kind.number, uint_field(1, number) + text_field(2, text))
            for kind in (self.categories, self.names, self.keys, self.texts)
            for text, number in kind.numbers.items()
        ]
        for first in range(0, len(entries), 4096):
            yield b"".join(entries[first : first + 4096])
