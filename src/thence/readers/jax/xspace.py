"""XSpace files (``*.xplane.pb`` of jax.profiler and TensorFlow) as columns, decoded but not interpreted.

A space has planes, a plane has lines, a line has events, an event has stats; names are stored as numbers
that refer to the plane's metadata. The planes of a JAX trace on a GPU are:

- ``/device:GPU:n``: a line per CUDA stream, with kernels, copies and memsets; its id is that of the stream.
- ``/host:CPU``: a line per host thread, with TraceMe ranges and CUDA API calls.
- ``/host:metadata``: no lines; its event metadata hold the HLO module of each program.
- ``Task Environment``: no lines; its stats are the times at which the profile began and ended.

XLA's profiler (ToXStat in cupti_collector.cc) writes the parameters of a launch or copy as one text of
``key:value`` pairs separated by spaces, which `parsed_details` decodes:

    kernel_details  regs:22 static_shared:0 dynamic_shared:0 grid:256,1,1 block:256,1,1 occ_pct:100
    memcpy_details  kind_src:device kind_dst:device size:2097152 dest:0 async:1
    Memset_details  kind:device num_bytes:4 async:1

The only Python loop over events is the one that serializes them. Their messages are small and of one kind, so one
field at a time is decoded for all messages: each message has a cursor that steps over its fields. This relies on the
order in which protobuf serializes: each known field once, by ascending field number, unknown fields last
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.readers.jax.protobuf import parse
from thence.readers.jax.protos.xplane_pb2 import XSpace as XSpaceProto
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thence.model.arrays import Float64, Int64, UInt8, UInt64
    from thence.readers.jax.protos.xplane_pb2 import XPlane, XStat


# ---- Events and their values


_PADDING = bytes(16)  # a cursor at the end may look ahead
_MAX_VARINT = 10  # bytes of 64 bits at seven a byte
# Tags of the fields of XStat (xplane.proto): number << 3 | wire type.
_STAT_METADATA = 0x08
DOUBLE, UINT64, INT64, STRING, REFERENCE = 0x11, 0x18, 0x20, 0x2A, 0x38
"""Tags of the value fields that are decoded; values of other types, mainly bytes, count as absent."""
_INT, _UINT, _NAME = pl.Int64(), pl.UInt64(), pl.Categorical()
# Tags of the fields of XEvent (xplane.proto): number << 3 | wire type.
_EVENT_METADATA, _OFFSET, _DURATION, _STATS, _OCCURRENCES = 0x08, 0x10, 0x18, 0x22, 0x28
_BATCH = 100_000  # events decoded together, so that memory stays bounded


def decoded_stats(data: bytes, row: Int64, start: Int64, end: Int64) -> StatValues:
    """Decodes the values of serialized stats.

    Args:
        data: the buffer that the positions refer to.
        row: event of each stat.
        start: position of each stat's first byte.
        end: position after each stat's last byte.
    """
    cursors = Cursors(data, start, end)
    stat = cursors.integer(_STAT_METADATA)
    tag = cursors.tag()
    cursors.position += 1
    integer = np.zeros(len(row), np.int64)
    real = np.zeros(len(row), np.float64)
    numbers = np.flatnonzero(np.isin(tag, (UINT64, INT64, STRING, REFERENCE)))
    integer[numbers] = cursors.varint(numbers)
    doubles = np.flatnonzero(tag == DOUBLE)
    real[doubles] = cursors.double(doubles)
    return StatValues(data, row, stat, tag, integer, real, cursors.position)


@dataclass(frozen=True)
class StatValues:
    """The stats of many events, decoded.

    Attributes:
        data: the bytes that strings are in.
        row: event of each stat.
        stat: its metadata_id.
        tag: tag of the value (field number << 3 | wire type); 0 where the stat has no value.
        integer: the value as 64 bits; for a string, its length.
        real: the value where it is a double.
        string_start: offset in data of each string value.
    """

    data: bytes
    row: Int64
    stat: Int64
    tag: UInt8
    integer: Int64
    real: Float64
    string_start: Int64

    def of(self, stat: int) -> StatValues:
        """The values of one stat."""
        chosen = np.flatnonzero(self.stat == stat)
        columns = (self.row, self.stat, self.tag, self.integer, self.real, self.string_start)
        return StatValues(self.data, *(column[chosen] for column in columns))  # type: ignore[arg-type]

    def strings(self) -> list[bytes]:
        """The string value of each stat; empty for values of other types."""
        length = np.where(self.tag == STRING, self.integer, 0)
        ends = (self.string_start + length).tolist()
        return [self.data[start:end] for start, end in zip(self.string_start.tolist(), ends, strict=True)]


@dataclass(frozen=True)
class Messages:
    """Serialized messages in one buffer.

    Attributes:
        data: the bytes of all messages, then some padding.
        start: position of each message in ``data``.
        end: first position after each.
    """

    data: bytes
    start: Int64
    end: Int64

    @classmethod
    def of(cls, parts: Sequence[bytes]) -> Messages:
        """Joins messages that were serialized separately."""
        end = np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)))
        start = np.concatenate([np.zeros(min(1, len(parts)), np.int64), end[:-1]])
        return cls(b"".join((*parts, _PADDING)), start, end)


class Cursors:
    """A read position in each of several messages; reading a field advances those that have it next.

    Attributes:
        position: offset in the data of each cursor.
    """

    def __init__(self, data: bytes, start: Int64, end: Int64) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self.position = start.copy()
        self._end = end

    def tag(self) -> UInt8:
        """The tag byte of the next field (number << 3 | wire type); 0 at the end of a message."""
        return np.where(self.position < self._end, self._bytes[self.position], 0)

    def integer(self, tag: int) -> Int64:
        """The varint field with this tag, as 64 bits; 0 where it is not next."""
        result = np.zeros(len(self.position), np.int64)
        rows = np.flatnonzero(self.tag() == tag)
        self.position[rows] += 1
        result[rows] = self.varint(rows)
        return result

    def varint(self, rows: Int64) -> Int64:
        """Reads one varint in each of these messages, as 64 bits."""
        position = self.position[rows]
        byte = self._bytes[position]
        value = (byte & 127).astype(np.uint64)
        position += 1
        active = np.flatnonzero(byte > 127)
        for number in range(1, _MAX_VARINT):
            if not len(active):
                break
            byte = self._bytes[position[active]]
            value[active] |= (byte & 127).astype(np.uint64) << np.uint64(7 * number)
            position[active] += 1
            active = active[byte > 127]
        self.position[rows] = position
        return value.view(np.int64)

    def double(self, rows: Int64) -> Float64:
        """The eight bytes at these cursors as a number."""
        eight = self._bytes[self.position[rows][:, None] + np.arange(8)]
        return np.ascontiguousarray(eight).view("<f8").reshape(len(rows)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class Stat:
    """A stat that becomes a column.

    Attributes:
        names: how versions of XLA spell it (xplane_schema.cc).
        dtype: Int64, UInt64 (the wire's 64 bits either way), Float64 or Categorical.
    """

    names: tuple[str, ...]
    dtype: pl.DataType


MEMORY_STATS = {
    "allocator": Stat(("allocator_name",), _NAME),
    "allocated": Stat(("bytes_allocated",), _INT),  # after the call
    "bytes": Stat(("allocation_bytes",), _INT),  # handed out or returned
    "requested": Stat(("requested_bytes",), _INT),
    "address": Stat(("addr",), _UINT),
}
"""Stats of the few host events that an allocator writes."""


_COMMON = {
    "correlation": Stat(("correlation_id",), _INT),  # shared by API call and device activity
    "context": Stat(("context_id",), _INT),  # CUDA context, written as $$1
    "graph": Stat(("cuda_graph_id",), _UINT),  # of a CUDA graph launch
    "program": Stat(("program_id",), _INT),
    "hlo_module": Stat(("hlo_module",), _NAME),
    "hlo_op": Stat(("hlo_op",), _NAME),  # HLO instruction, or command_buffer_N
    "scope": Stat(("name",), _NAME),  # op_name of the instruction, or the range's own label
    "tf_op": Stat(("tf_op",), _NAME),
}


GPU_STATS = {
    **_COMMON,
    "node": Stat(("cuda_graph_node_id",), _UINT),  # since XLA of 2026
    "hlo_id": Stat(("unique_hlo_op_id",), _INT),  # instruction id, since XLA of 2026
    "scope_range": Stat(("scope_range_id",), _INT),  # launch annotation, as on the host
    "nvtx_range": Stat(("nvtx_range",), _NAME),
    "occupancy_percent": Stat(("theoretical_occupancy_pct",), pl.Float64()),
}


"""Stats of device events that become columns."""


HOST_STATS = {
    **_COMMON,
    "device": Stat(("device_id", "device"), _INT),  # ordinal
    "scope_range": Stat(("scope_range_id",), _INT),
    "step": Stat(("step_num",), _INT),  # of jax.profiler.StepTraceAnnotation
    "run": Stat(("run_id",), _INT),  # one execution of a program
    "module_name": Stat(("module_name",), _NAME),  # program that GpuExecutable runs
    "producer_type": Stat(("_pt",), _INT),  # for work handed from thread to thread
    "producer": Stat(("_p",), _INT),  # number; equals "consumer" of the event that takes the work
    "consumer_type": Stat(("_ct",), _INT),
    "consumer": Stat(("_c",), _INT),
    "source_file": Stat(("_src",), _NAME),  # C++ file of a TraceMe
}


"""Stats of host events that become columns."""


DETAIL_STATS = {
    "kernel_details": Stat(("kernel_details",), _NAME),
    "memcpy_details": Stat(("memcpy_details",), _NAME),
    "memset_details": Stat(("Memset_details", "memset_details"), _NAME),
}


"""Stats of device events that hold several values as text."""


def text(value: bytes) -> str:
    """The bytes decoded as UTF-8; invalid bytes become the replacement character."""
    return value.decode("utf-8", "replace")


class Strings:
    """The distinct strings of a file; events refer to a string by its position in `values`."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._codes: dict[str, int] = {}

    def code(self, value: str) -> int:
        """The position of a string in `values`; a new string is appended."""
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self.values)
            self.values.append(value)
        return code


class _Cells:
    """The sparse content of one column: rows and values in the order of arrival."""

    def __init__(self) -> None:
        self.rows: list[Int64] = []
        self.values: list[Int64] = []
        self.reals: list[Float64] = []


class Events:
    """Events of several planes, collected line by line.

    Args:
        stats: what becomes a column of `frame`.
        strings: table of names, shared by several `Events`.
        rare: stats that few events have, for `events_with`.
    """

    def __init__(self, stats: Mapping[str, Stat], strings: Strings, rare: Mapping[str, Stat] | None = None) -> None:
        self.strings = strings
        self._dense = stats
        self._stats = {**stats, **(rare or {})}
        self._cells = {name: _Cells() for name in self._stats}
        self._names: list[Int64] = []
        self._offsets: list[Int64] = []
        self._durations: list[Int64] = []
        self._count = 0
        self._lines: list[tuple[int, int, int, int, int]] = []  # plane, id, name, timestamp, events

    def add(self, plane: XPlane, label: int) -> None:
        """Appends the events of a plane, whose rows carry ``label``."""
        columns = self._columns(plane)
        names = {key: self.strings.code(text(m.name)) for key, m in plane.event_metadata.items()}
        constant = {
            key: [s.SerializeToString(deterministic=True) for s in m.stats]
            for key, m in plane.event_metadata.items()
            if m.stats
        }
        for line in plane.lines:
            before = self._count
            for begin in range(0, len(line.events), _BATCH):
                events = [event.SerializeToString() for event in line.events[begin : begin + _BATCH]]
                values = self._decoded(events, names, constant)
                for column, stat in columns:
                    self._take(column, values.of(stat), plane)
            name = self.strings.code(text(line.display_name or line.name))
            self._lines.append((label, line.id, name, line.timestamp_ns, self._count - before))

    def _columns(self, plane: XPlane) -> list[tuple[str, int]]:
        """Column name and stat id of each stat of the plane that becomes a column."""
        ids: dict[str, list[int]] = {}
        for key, metadata in plane.stat_metadata.items():
            ids.setdefault(text(metadata.name), []).append(key)
        return [
            (column, key) for column, stat in self._stats.items() for name in stat.names for key in ids.get(name, ())
        ]

    def _decoded(
        self, events: Sequence[bytes], names: Mapping[int, int], constant: Mapping[int, Sequence[bytes]]
    ) -> StatValues:
        """Appends names and times of serialized events, and returns their stats."""
        shared = [stat for stats in constant.values() for stat in stats]
        messages = Messages.of([*events, *shared])
        count = len(events)
        cursors = Cursors(messages.data, messages.start[:count], messages.end[:count])
        key, offset, duration = (cursors.integer(t) for t in (_EVENT_METADATA, _OFFSET, _DURATION))
        rows, starts, ends = self._constants(key, constant, messages, count)
        active = np.flatnonzero(cursors.tag() == _STATS)
        while len(active):
            cursors.position[active] += 1
            size = cursors.varint(active)
            rows.append(active)
            starts.append(cursors.position[active])
            cursors.position[active] += size
            ends.append(cursors.position[active])
            active = active[cursors.tag()[active] == _STATS]
        single = cursors.integer(_OCCURRENCES) == 0  # other events are aggregated and have no time
        distinct_keys, position = np.unique(key, return_inverse=True)
        codes = np.asarray([names.get(k, -1) for k in distinct_keys.tolist()], np.int64)
        self._names.append(codes[position][single])
        self._offsets.append(offset[single])
        self._durations.append(duration[single])
        number = np.where(single, self._count + np.cumsum(single) - 1, -1)
        self._count += int(single.sum())
        row = number[np.concatenate(rows)] if rows else np.zeros(0, np.int64)
        kept = row >= 0
        start, end = (np.concatenate([*x, np.zeros(0, np.int64)])[kept] for x in (starts, ends))
        return decoded_stats(messages.data, row[kept], start, end)

    def _constants(
        self, key: Int64, constant: Mapping[int, Sequence[bytes]], messages: Messages, count: int
    ) -> tuple[list[Int64], list[Int64], list[Int64]]:
        """Event, start and end of the stats in event metadata.

        They precede the stats of the events themselves, which therefore override them.
        """
        rows: list[Int64] = []
        starts: list[Int64] = []
        ends: list[Int64] = []
        next_position = count
        for number, stats in constant.items():
            chosen = np.flatnonzero(key == number)
            for position in range(next_position, next_position + len(stats)):
                rows.append(chosen)
                starts.append(np.full(len(chosen), messages.start[position]))
                ends.append(np.full(len(chosen), messages.end[position]))
            next_position += len(stats)
        return rows, starts, ends

    def _take(self, column: str, values: StatValues, plane: XPlane) -> None:
        """Appends the values of one stat to its column."""
        if not len(values.row):
            return
        cells, dtype = self._cells[column], self._stats[column].dtype
        is_integer = np.isin(values.tag, (INT64, UINT64))
        cells.rows.append(values.row)
        if dtype == pl.Float64():
            number = np.where(values.tag == UINT64, values.integer.view(np.uint64), values.integer)
            given = np.where(is_integer, number.astype(np.float64), 0.0)
            cells.reals.append(np.where(values.tag == DOUBLE, values.real, given))
        elif dtype == pl.Categorical():
            cells.values.append(self._codes_of(values, plane))
        else:
            integers = np.where(is_integer, values.integer, 0)
            if (values.tag == STRING).any():
                texts = values.strings()
                numbers = {written: _integer_of(written) for written in set(texts)}
                integers += np.asarray([numbers[written] for written in texts], np.int64)
            cells.values.append(integers)

    def _codes_of(self, values: StatValues, plane: XPlane) -> Int64:
        """Positions in `strings`; the empty string for values that are neither text nor a known reference."""
        references, position = np.unique(np.where(values.tag == REFERENCE, values.integer, 0), return_inverse=True)
        metadata = [plane.stat_metadata.get(i) if i > 0 else None for i in references.tolist()]
        codes = [self.strings.code(text(stat.name) if stat else "") for stat in metadata]
        result = np.asarray(codes, np.int64)[position]
        written = np.flatnonzero(values.tag == STRING)
        if len(written):
            texts = values.strings()
            result[written] = [self.strings.code(text(texts[i])) for i in written.tolist()]
        return result

    def __len__(self) -> int:
        return self._count

    def codes(self, column: str) -> Int64:
        """Positions in `strings` for a column of names; -1 where an event has no value."""
        cells = self._cells[column]
        result = np.full(len(self), -1, np.int64)
        if cells.rows:
            result[np.concatenate(cells.rows)] = np.concatenate(cells.values)
        return result

    def categories(self) -> pl.Series:
        """`strings` as one categorical series, to gather columns from."""
        return pl.Series("strings", self.strings.values, pl.String).cast(pl.Categorical)

    def frame(self) -> pl.DataFrame:
        """Columns label, line_id, line, name, the times, and one per stat that is not rare."""
        counts = [line[4] for line in self._lines]
        labels, ids, names, stamps = (
            np.repeat(np.asarray([line[i] for line in self._lines], np.int64), counts) for i in range(4)
        )
        empty = np.zeros(0, np.int64)
        offsets, durations, codes = (
            np.concatenate([empty, *parts]) for parts in (self._offsets, self._durations, self._names)
        )
        rest = offsets % 1000
        strings = self.categories()
        columns = {
            "label": pl.Series(labels),
            "line_id": pl.Series(ids),
            "line": named(strings, names),
            "name": named(strings, codes),
            # Both ends are rounded down, which keeps the order and nesting of events, and which events touch.
            "start": pl.Series(stamps + offsets // 1000),
            "duration": pl.Series((rest + durations) // 1000),
            "start_rest_ps": pl.Series(rest.astype(np.int16)),
            "duration_ps": pl.Series(durations),
        }
        for column, stat in self._dense.items():
            columns[column] = self._column(column, stat.dtype, strings)
        return pl.DataFrame(columns)

    def events_with(self, columns: Sequence[str]) -> pl.DataFrame:
        """The events that have all of these stats: ``row`` (in `frame`), and the stats, which are rare ones."""
        strings = self.categories()
        joined: pl.DataFrame | None = None
        for column in columns:
            cells = self._cells[column]
            empty = np.zeros(0, np.int64)
            values = np.concatenate([empty, *cells.values])
            dtype = self._stats[column].dtype
            numbers = pl.Series(values.view(np.uint64) if dtype == pl.UInt64() else values)
            series = named(strings, values) if dtype == pl.Categorical() else numbers
            part = pl.DataFrame({"row": np.concatenate([empty, *cells.rows]), column: series})
            part = part.unique("row", keep="last", maintain_order=True)
            joined = part if joined is None else joined.join(part, on="row", maintain_order="left")
        assert joined is not None
        return joined

    def _column(self, column: str, dtype: pl.DataType, strings: pl.Series) -> pl.Series:
        if dtype == pl.Categorical():
            return named(strings, self.codes(column))
        cells = self._cells[column]
        rows = np.concatenate([np.zeros(0, np.int64), *cells.rows])
        present = np.zeros(len(self), np.bool_)
        present[rows] = True
        values: Float64 | Int64 | UInt64
        if dtype == pl.Float64():
            values = np.zeros(len(self), np.float64)
            values[rows] = np.concatenate([np.zeros(0), *cells.reals])
        else:
            integers = np.zeros(len(self), np.int64)
            integers[rows] = np.concatenate([np.zeros(0, np.int64), *cells.values])
            values = integers.view(np.uint64) if dtype == pl.UInt64() else integers
        return pl.select(pl.when(pl.Series(present)).then(pl.Series(values))).to_series()


def named(strings: pl.Series, codes: Int64) -> pl.Series:
    """The strings at positions of a table of strings; null for -1."""
    positions = pl.lit(pl.Series(codes))
    return pl.select(pl.lit(strings).gather(pl.when(positions >= 0).then(positions))).to_series()


def _integer_of(value: bytes) -> int:
    """An id written as text, such as $$1; 0 for text that is not a number."""
    digits = value.lstrip(b"$")
    return int(digits) if digits.isdigit() and len(digits) < 19 else 0


def stat_value(stat: XStat, plane: XPlane) -> int | float | str | bytes | None:
    """The value of a single stat of any type; for the few stats of a plane itself."""
    kind = stat.WhichOneof("value")
    if kind is None:
        return None
    if kind == "ref_value":
        metadata = plane.stat_metadata.get(stat.ref_value)
        return text(metadata.name) if metadata is not None else None
    value: int | float | bytes = getattr(stat, kind)
    return text(value) if kind == "str_value" and isinstance(value, bytes) else value


# ---- Planes


_MAX_MESSAGE, _MAX_SENTENCES = 500, 20
"""Most bytes of one message of the profiler, and most messages, that are passed on."""
DETAILS: dict[str, pl.DataType] = {
    "registers": pl.Int32(),  # per thread
    "static_shared": pl.Int64(),  # bytes per block
    "dynamic_shared": pl.Int64(),  # bytes per block
    "shared_memory": pl.Int64(),  # bytes per block, both
    "grid": pl.Array(pl.UInt32, 3),  # blocks
    "block": pl.Array(pl.UInt32, 3),  # threads
    "bytes": pl.Int64(),  # copied or set
    "source_kind": pl.String(),  # device, host, pinned, ...
    "destination_kind": pl.String(),  # for a memset: kind of the memory that is set
    "destination_device": pl.Int64(),
    "is_async": pl.Boolean(),
}
"""Schema of parsed details; null where a text lacks the key."""
_NUMBER = re.compile(r"\d{1,18}")
_UINT32 = 1 << 32
_TIMES: dict[str, pl.DataType] = {
    "start": pl.Int64(),  # ns, rounded down; on the file's clock, see XSpace.start_ns
    "duration": pl.Int64(),  # ns, such that start + duration is the end rounded down
    "start_rest_ps": pl.Int16(),  # remainder from rounding the start down, 0 to 999
    "duration_ps": pl.Int64(),  # exact
}
_KIND = pl.Enum(["kernel", "memcpy", "memset", "other"])
GPU_EVENTS: dict[str, pl.DataType] = {
    "device": pl.Int32(),  # ordinal, from the plane's name
    "stream": pl.Int64(),  # id of the line
    "line": pl.Categorical(),  # name of the line, such as Stream #14(Compute,Memset)
    "kind": _KIND,  # other: an event without details, such as the profiler's own overhead
    "name": pl.Categorical(),  # demangled if the profiler did that
    **_TIMES,
    **{name: kind.dtype for name, kind in GPU_STATS.items()},
    **DETAILS,
}
"""Schema of the GPU events; the columns from correlation on are null where the event lacks the stat."""
HOST_EVENTS: dict[str, pl.DataType] = {
    "plane": pl.Categorical(),
    "thread": pl.Int64(),  # id of the line: a hash of the thread, or the thread id
    "line": pl.Categorical(),  # name of the line: of the thread, or Host Threads/<thread id>
    "name": pl.Categorical(),
    **_TIMES,
    **{name: kind.dtype for name, kind in HOST_STATS.items()},
}
"""Schema of the host events; the columns of stats are null where the event lacks the stat."""
LINES: dict[str, pl.DataType] = {
    "plane": pl.String(),
    "line": pl.Int64(),  # id
    "name": pl.String(),
    "start": pl.Int64(),  # ns, XLine.timestamp_ns
    "events": pl.Int64(),
}
"""Schema of the lines: every line of every plane, also of planes that are not decoded further."""
DEVICES: dict[str, pl.DataType] = {
    "device": pl.Int32(),
    "vendor": pl.String(),
    "name": pl.String(),
    "clock_khz": pl.Int64(),
    "multiprocessors": pl.Int64(),
    "memory_bytes": pl.Int64(),
    "memory_bytes_per_s": pl.Int64(),
    "compute_capability": pl.String(),  # such as 9.0
    "process": pl.Int64(),
}
"""Schema of the GPUs; null where the plane lacks the stat."""
PROGRAMS: dict[str, pl.DataType] = {
    "program": pl.Int64(),  # program_id of the events; 0 is a valid number
    "name": pl.String(),  # such as jit_train_step
    "proto": pl.Binary(),  # serialized HloProto
}
"""Schema of the programs whose HLO the file holds."""
_GPU_PLANE = re.compile(r"/device:GPU:(\d{1,9})")
_FACTS = ("/host:metadata", "Task Environment")
_SUFFIX = re.compile(r"(.*)\((\d{1,18})\)")


@dataclass(frozen=True)
class XSpace:
    """One decoded file.

    Attributes:
        gpu: columns of `GPU_EVENTS`, in file order.
        host: columns of `HOST_EVENTS`, in file order.
        memory: the host events of allocators: name, thread, start, start_rest_ps and the columns of `MEMORY_STATS`.
        lines: columns of `LINES`.
        devices: columns of `DEVICES`.
        programs: columns of `PROGRAMS`.
        start_ns: Unix time in ns at which the profile began; all other times of a saved file count
            from it. None where the file does not state it; its times may then be Unix times.
        versions: jax_version, cuda_driver_version and the like.
        hostnames: machines it was recorded on.
        errors: errors that the profiler reports.
        warnings: warnings that the profiler reports, mainly of dropped events.
    """

    gpu: pl.DataFrame
    host: pl.DataFrame
    memory: pl.DataFrame
    lines: pl.DataFrame
    devices: pl.DataFrame
    programs: pl.DataFrame
    start_ns: int | None
    versions: Mapping[str, str]
    hostnames: tuple[str, ...]
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def decode_xspace(data: bytes, path: str) -> XSpace:
    """Decodes one file.

    Raises:
        DamagedInput: the bytes are no XSpace, end too early, or hold no plane.
    """
    space = parse(XSpaceProto, data, path)
    if not space.planes:
        raise DamagedInput(path, "is cut or damaged: it holds no planes")
    planes = [(text(plane.name), plane) for plane in space.planes]
    strings = Strings()
    gpu, host = Events({**GPU_STATS, **DETAIL_STATS}, strings), Events(HOST_STATS, strings, MEMORY_STATS)
    for name, plane in planes:
        ordinal = _ordinal(name)
        if ordinal is not None:
            gpu.add(plane, ordinal)
        elif name.startswith("/host:"):
            host.add(plane, strings.code(name))
    facts = {name: _plane_stats(plane) for name, plane in planes if name in _FACTS}
    task = facts.get("Task Environment", {})
    about = facts.get("/host:metadata", {})
    host_events = _host_frame(host)
    return XSpace(
        gpu=_gpu_frame(gpu),
        host=host_events,
        memory=_of_allocators(host, host_events),
        lines=_lines(planes),
        devices=_devices(planes),
        programs=_programs(planes),
        start_ns=_integer(task.get("profile_start_time")),
        versions={k: str(v) for k, v in about.items() if k.endswith("_version")},
        hostnames=tuple(text(name) for name in space.hostnames),
        errors=_sentences(space.errors),
        warnings=_sentences(space.warnings),
    )


def _sentences(messages: Sequence[bytes]) -> tuple[str, ...]:
    """The profiler's messages, each as one short line.

    Some messages are long reports, and in a damaged file a message can be any bytes.
    """
    lines = [" ".join(text(message[:_MAX_MESSAGE]).split()) for message in messages[:_MAX_SENTENCES]]
    more = len(messages) - len(lines)
    return (*lines, f"and {several(more, 'more message')}, not shown") if more else tuple(lines)


def _ordinal(name: str) -> int | None:
    match = _GPU_PLANE.fullmatch(name)
    return int(match[1]) if match else None


def _plane_stats(plane: XPlane) -> dict[str, int | float | str | bytes | None]:
    names = {key: text(metadata.name) for key, metadata in plane.stat_metadata.items()}
    return {names.get(stat.metadata_id, ""): stat_value(stat, plane) for stat in plane.stats}


def _gpu_frame(events: Events) -> pl.DataFrame:
    """The common columns and the details of the events; each distinct text of details is parsed once."""
    kinds = ("kernel", "memcpy", "memset")
    codes = np.stack([events.codes(f"{kind}_details") for kind in kinds])
    used = np.unique(codes[codes >= 0])
    details = parsed_details([events.strings.values[code] for code in used])
    code = codes.max(axis=0, initial=-1)
    rows = np.where(code >= 0, np.searchsorted(used, code), len(used))  # the last row is all null
    padded = pl.concat([details, details.clear(1)])
    which = np.where(code >= 0, codes.argmax(axis=0), len(kinds))
    return (
        events.frame()
        .rename({"label": "device", "line_id": "stream"})
        .with_columns(kind=pl.Series([*kinds, "other"], dtype=_KIND).gather(which))
        .hstack(padded[rows])
        .select(*GPU_EVENTS)
        .cast(pl.Schema(GPU_EVENTS))
    )


def _host_frame(events: Events) -> pl.DataFrame:
    frame = events.frame()
    plane = named(events.categories(), frame["label"].to_numpy())
    return frame.with_columns(plane=plane).rename({"line_id": "thread"}).select(*HOST_EVENTS)


def _of_allocators(events: Events, host: pl.DataFrame) -> pl.DataFrame:
    calls = events.events_with(tuple(MEMORY_STATS))
    return host.select("name", "thread", "start", "start_rest_ps")[calls["row"]].hstack(calls.drop("row"))


def _lines(planes: Iterable[tuple[str, XPlane]]) -> pl.DataFrame:
    rows = [
        (name, line.id, text(line.display_name or line.name), line.timestamp_ns, len(line.events))
        for name, plane in planes
        for line in plane.lines
    ]
    return pl.DataFrame(rows, schema=LINES, orient="row")


def _devices(planes: Iterable[tuple[str, XPlane]]) -> pl.DataFrame:
    rows = []
    for name, plane in planes:
        ordinal = _ordinal(name)
        if ordinal is None:
            continue
        stats = _plane_stats(plane)
        major, minor = stats.get("compute_cap_major"), stats.get("compute_cap_minor")
        rows.append(
            (
                ordinal,
                _string(stats.get("device_vendor")),
                _string(stats.get("gpu_device_name", stats.get("device_type_string"))),
                _integer(stats.get("clock_rate")),
                _integer(stats.get("core_count")),
                _integer(stats.get("memory_size")),
                _integer(stats.get("memory_bandwidth")),
                f"{major}.{minor}" if isinstance(major, int) and isinstance(minor, int) else None,
                _integer(stats.get("process_id")),
            )
        )
    return pl.DataFrame(rows, schema=DEVICES, orient="row")


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and abs(value) < 1 << 63 else None


def _programs(planes: Iterable[tuple[str, XPlane]]) -> pl.DataFrame:
    """The HLO protos in the event metadata of /host:metadata, with the program number that events use.

    The number is a stat in newer files, and the "(N)" after the name in all known files. In the
    oldest files some programs have neither; there, the key of the metadata is the number.
    """
    rows = []
    for plane in (plane for name, plane in planes if name == "/host:metadata"):
        stats = {text(metadata.name): key for key, metadata in plane.stat_metadata.items()}
        proto_stat, program_stat = stats.get("Hlo Proto"), stats.get("program_id")
        for key, metadata in plane.event_metadata.items():
            values = {stat.metadata_id: stat for stat in metadata.stats}
            if proto_stat not in values:
                continue
            match = _SUFFIX.fullmatch(text(metadata.name))
            program = _integer(stat_value(values[program_stat], plane)) if program_stat in values else None
            if program is None:
                program = int(match[2]) if match else key
            name = match[1] if match else text(metadata.name)
            rows.append((program, name, values[proto_stat].bytes_value))
    return pl.DataFrame(rows, schema=PROGRAMS, orient="row")


def parsed_details(texts: Sequence[str]) -> pl.DataFrame:
    """One row of `DETAILS` for each text; callers pass each distinct text once, and there are few."""
    rows = [_row(dict(_pairs(text))) for text in texts]
    return pl.DataFrame(rows, schema=DETAILS, orient="row")


def _row(values: dict[str, str]) -> tuple[object, ...]:
    static, dynamic = _number(values.get("static_shared")), _number(values.get("dynamic_shared"))
    registers = _number(values.get("regs"))
    flag = values.get("async")
    return (
        registers if registers is not None and registers < 1 << 31 else None,
        static,
        dynamic,
        None if static is None and dynamic is None else (static or 0) + (dynamic or 0),
        _triple(values.get("grid")),
        _triple(values.get("block")),
        _number(values.get("size", values.get("num_bytes"))),
        values.get("kind_src"),
        values.get("kind_dst", values.get("kind")),
        _number(values.get("dest")),
        None if flag is None else flag == "1",
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def _triple(text: str | None) -> list[int] | None:
    numbers = [_number(part) for part in (text or "").split(",")]
    valid = [n for n in numbers if n is not None and n < _UINT32]
    return valid if len(valid) == len(numbers) == 3 else None


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition(":") for word in text.split())]
