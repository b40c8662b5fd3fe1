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
from thence.readers.jax.xspace_events import (
    DETAIL_STATS,
    GPU_STATS,
    HOST_STATS,
    Events,
    Strings,
    named,
    stat_value,
    text,
)
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thence.readers.jax.protos.xplane_pb2 import XPlane

_MAX_SAID, _MAX_SENTENCES = 500, 20
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
    gpu, host = Events({**GPU_STATS, **DETAIL_STATS}, strings), Events(HOST_STATS, strings)
    for name, plane in planes:
        ordinal = _ordinal(name)
        if ordinal is not None:
            gpu.add(plane, ordinal)
        elif name.startswith("/host:"):
            host.add(plane, strings.code(name))
    facts = {name: _plane_stats(plane) for name, plane in planes if name in _FACTS}
    task = facts.get("Task Environment", {})
    about = facts.get("/host:metadata", {})
    return XSpace(
        gpu=_gpu_frame(gpu),
        host=_host_frame(host),
        lines=_lines(planes),
        devices=_devices(planes),
        programs=_programs(planes),
        start_ns=_integer(task.get("profile_start_time")),
        versions={k: str(v) for k, v in about.items() if k.endswith("_version")},
        hostnames=tuple(text(name) for name in space.hostnames),
        errors=_sentences(space.errors),
        warnings=_sentences(space.warnings),
    )


def _sentences(said: Sequence[bytes]) -> tuple[str, ...]:
    """The profiler's messages, each as one short line.

    Some messages are long reports, and in a damaged file a message can be any bytes.
    """
    lines = [" ".join(text(one[:_MAX_SAID]).split()) for one in said[:_MAX_SENTENCES]]
    more = len(said) - len(lines)
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
