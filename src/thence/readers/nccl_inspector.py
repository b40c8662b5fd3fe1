"""What NCCL's Inspector plugin writes of the collectives of a process: JSON lines, ``<host>-pid<number>.log``.

``NCCL_PROFILER_PLUGIN`` names the plugin, which comes with NCCL's sources and not with its packages. A thread of it
writes at intervals, for each communicator, the last collective (NCCL 2.28) or those of a ring (later versions), so some
are missing. Times are only written with ``NCCL_INSPECTOR_DUMP_VERBOSE=1``.

Files are found by name in the folder of the trace of their process, or are inputs of their own. Seen: format v4.0, of
the plugin of NCCL 2.28. Lines without ``coll_perf``, as later versions write for sends and statistics, are skipped.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from thence.errors import DamagedInput, InputError
from thence.model.inspector_records import RECORDS, InspectorRecord
from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.model.tables import Meta, Tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.source import NumberedFiles, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NAME = "collectives of NCCL's Inspector plugin"
PATTERNS: tuple[str, ...] = ()
"""None: in a directory, the files are found by name, for the trace of their process."""
_BEGIN = re.compile(rb'\s*\{\s*"header"\s*:\s*\{\s*"id"\s*:\s*"0x[0-9a-f]{1,16}"\s*,\s*"rank"\s*:')
_PROCESS = re.compile(r".*-pid(\d{1,10})\.log(?:\.gz)?")
_MAX_BYTES = 256 << 20
_MAX_LINES = 500_000
_GPU_CLOCK = "kernel_gpu"
_MAX_CHANNELS = 1024
"""NCCL has 64."""
_LATEST_US = 1 << 52
"""Of Unix times, which are in the year 2112 then; later ones do not fit into ns."""
_LONGEST_US = 1 << 43  # 102 days, about as long as `thence.units.LONGEST_NS`


class _Kernel(msgspec.Struct):
    kernel_start_ts: Count


class _Times(msgspec.Struct):
    coll_start_ts: Count
    kernel_events: list[_Kernel]


class _Collective(msgspec.Struct):
    coll: str
    coll_msg_size_bytes: Count
    coll_exec_time_us: Count
    coll_timing_source: str = ""
    event_trace_ts: _Times | None = None


class _Header(msgspec.Struct):
    n_ranks: Count


class _Metadata(msgspec.Struct):
    pid: Count


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be written by the plugin."""
    return _BEGIN.match(head) is not None


def with_records_beside(tables: Tables, files: NumberedFiles, expansion: Expansion = DEFAULT) -> Tables:
    """The tables of one input, with what the plugin wrote of its processes in the same folder.

    The files are found by name. A file that cannot be read becomes a warning.
    """
    records, warnings = [], []
    for path in files.beside(tables.meta.inputs, _PROCESS, lambda: _processes(tables)):
        if str(path) in tables.meta.inputs:
            continue
        try:
            with Source.open(str(path), expansion) as source:
                if sniff(source.head()):
                    record, said = read_record(source)
                    records.append(record)
                    warnings += said
        except InputError as error:
            warnings.append(f"{error}; its collectives are not used")
    if not records and not warnings:
        return tables
    every = (*tables.inspector_records, *records)
    return dataclasses.replace(tables, inspector_records=every).with_warnings(warnings)


def _processes(tables: Tables) -> list[int]:
    process = tables.host["process"].to_numpy()
    begins = np.diff(process, prepend=process[:1] - 1) != 0  # rows of a process follow each other
    processes: list[int] = np.unique(process[begins]).tolist()
    return processes


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """Tables that hold only the records of one file, which was given as an input of a trace.

    Raises:
        DamagedInput: the file is wrong.
    """
    record, warnings = read_record(source)
    progress(source.consumed)
    meta = Meta(inputs=(source.name,), formats=(NAME,))
    return Tables(inspector_records=(record,), meta=meta).with_warnings(warnings)


def read_record(source: Source) -> tuple[InspectorRecord, list[str]]:
    """The collectives in a file, and a warning if its last line is cut.

    Raises:
        DamagedInput: a line before the last one is wrong, or lines are of several processes.
    """
    content = source.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DamagedInput(source.name, "is larger than 256 MB, the limit for files of NCCL's Inspector")
    written, _, rest = content.rpartition(b"\n")
    warnings = [source.damage] if source.damage else []
    if rest.strip():
        warnings.append("its last line is cut")
    lines = list(_lines(written, source.name))
    processes = {line.metadata.pid for line in lines}
    if len(processes) != 1:
        raise DamagedInput(source.name, "is of no process" if not processes else "is of several processes")
    collectives = [(line.header.n_ranks, line.coll_perf) for line in lines if line.coll_perf is not None]
    rows = [row for ranks, each in collectives if (row := _row(ranks, each)) is not None]
    frame = pl.DataFrame(rows, schema=RECORDS, orient="row")
    record = InspectorRecord(source.name, processes.pop(), frame, len(collectives) - len(rows))
    return record, [f"{source.name}: {warning}" for warning in warnings]


def _lines(content: bytes, name: str) -> Iterator[_Line]:
    if content.count(b"\n") >= _MAX_LINES:
        raise DamagedInput(name, f"holds more than {_MAX_LINES:,} lines")
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield decoded(line, _Line)
        except NotAsWritten as error:
            raise DamagedInput(name, f"line {number:,} is not as NCCL's Inspector writes it: {error}") from error


def _row(ranks: int, each: _Collective) -> Sequence[object] | None:
    """The values of `RECORDS`; None without the times of a kernel."""
    times = each.event_trace_ts
    if times is None or not 0 < len(times.kernel_events) <= _MAX_CHANNELS:
        return None
    # Times of channels that the kernel does not use are 0.
    seen = min((kernel.kernel_start_ts for kernel in times.kernel_events if kernel.kernel_start_ts), default=0)
    if not 0 < times.coll_start_ts <= seen < _LATEST_US or ranks >= 1 << 31:
        return None
    by_gpu = each.coll_timing_source == _GPU_CLOCK and each.coll_exec_time_us < _LONGEST_US
    executed = each.coll_exec_time_us * 1000 if by_gpu else None
    size = min(each.coll_msg_size_bytes, (1 << 62))  # sums over the calls of a trace stay within int64
    return each.coll, size, ranks, len(times.kernel_events), times.coll_start_ts * 1000, seen * 1000, executed
