"""What PyTorch's flight recorder keeps of the last collective calls of a process: a pickle or JSON for each rank.

``torch._C._distributed_c10d._dump_fr_trace()`` (gloo), ``_dump_nccl_trace()`` (NCCL) and their JSON forms return it;
after a timeout, NCCL's watchdog writes it to the file ``TORCH_FR_DUMP_TEMP_FILE`` or
``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` with the rank at its end. The rank is only in the name of the file. The recorder
holds the last ``TORCH_FR_BUFFER_SIZE`` calls (2,000). Pickles are read without executing anything.

Files are found by name in the folder of the trace of their rank, or are inputs of their own. Seen: version 2.10, of
torch 2.13.
"""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.errors import DamagedInput, InputError
from thence.model.collective_columns import described_frame
from thence.model.collectives import NUMBERS, TEXTS
from thence.model.flight_records import CALLS, FlightRecord
from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.model.own_code import OwnCode
from thence.model.tables import Meta, Tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.plain_pickle import MAX_WRITTEN, PickleRefused, load_plain
from thence.readers.source import NumberedFiles, Source, file_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

NAME = "collective calls of PyTorch's flight recorder"
PATTERNS: tuple[str, ...] = ()
"""None: in a directory, the files are found by name, for the trace of their rank."""
_PICKLE = re.compile(rb"\x80[\x02-\x05].{0,16}X\x07\x00\x00\x00version.{0,40}pg_config", re.DOTALL)
_JSON = re.compile(rb'\s*\{\s*"(?:version|comm_lib_version|nccl_version|pg_config|entries)"\s*:')
_NAMES = re.compile(r"(?:nccl|comm_lib|fr)_trace_(?:rank_)?(\d{1,9})(?:\.json|\.pkl|\.pickle)?")
_RANK = re.compile(r"(?<!\d)(\d{1,9})(?:\.json|\.pkl|\.pickle)?(?:\.gz)?$")
_MAX_BYTES = 256 << 20
_MAX_SIZES = 20_000_000
"""Numbers in the sizes of all tensors. 2,000 calls on lists of 1,000 tensors have 2 to 8 million."""
_MAX_CALLS = 200_000
"""Calls of a file, which take up to 700 bytes each in memory, and a few bytes in a hostile file."""
_MAX_CONTAINERS, _BYTES_OF_CONTAINER = 1_500_000, 20
"""Lists and objects of a JSON file, and one more for so many bytes: each takes 100 bytes in memory. 2,000 calls on two
tensors have 16,000."""
_WRITTEN_PER_BYTE = 200
"""Characters of a pickle's value, written out, for each of its bytes: every call repeats the frames of its stack."""
_MAX_ELEMENTS = 1 << 50
_MAX_DIMENSIONS = 64
_MAX_UNFINISHED = 1000
"""Calls whose stack is looked at: those that had begun and not ended, which are few in a program that works."""


class _Group(msgspec.Struct):
    name: str = ""
    desc: str = ""
    ranks: str = ""


class _Call(msgspec.Struct):
    record_id: Count
    process_group: tuple[str, str]
    profiling_name: str
    collective_seq_id: Count | None = None
    time_created_ns: Count | None = None
    input_sizes: list[list[Count]] = []
    output_sizes: list[list[Count]] = []
    input_dtypes: list[str] = []
    output_dtypes: list[str] = []
    state: str = ""
    is_p2p: bool = False


class _File(msgspec.Struct):
    version: str
    entries: list[_Call] = []
    pg_config: dict[str, _Group] = {}


class _Frame(msgspec.Struct):
    filename: str
    line: Count
    name: str


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this may be a flight recorder's."""
    if _PICKLE.match(head) is not None:
        return True
    return _JSON.match(head) is not None and b'"profiling_name"' in head


def is_record(path: str) -> bool:
    """Whether a file has a name that PyTorch gives to such files, and begins like one."""
    if _NAMES.fullmatch(file_name(path)) is None:
        return False
    with Source.open(path) as source:
        return sniff(source.head())


def with_records_beside(tables: Tables, files: NumberedFiles, expansion: Expansion = DEFAULT) -> Tables:
    """The tables of one input, with the calls of its ranks from the flight recorders in its folder.

    The files are found by name. A file that cannot be read becomes a warning.
    """
    records, groups, warnings = [], list(tables.meta.process_groups), []
    for path in files.beside(tables.meta.inputs, _NAMES, lambda: tables.ranks):
        try:
            with Source.open(str(path), expansion) as source:
                if not sniff(source.head()):
                    continue
                record, of_record = read_record(source)
        except InputError as error:
            warnings.append(f"{error}; its calls are not used")
        else:
            records.append(record)
            groups += of_record
    if not records and not warnings:
        return tables
    meta = dataclasses.replace(tables.meta, process_groups=tuple(groups))
    return dataclasses.replace(tables, flight_records=(*tables.flight_records, *records), meta=meta).with_warnings(
        warnings
    )


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """Tables that hold only the calls of one file, which was given as an input of a trace.

    Raises:
        DamagedInput: the file is cut or wrong.
    """
    record, groups = read_record(source)
    progress(source.consumed)
    meta = Meta(inputs=(source.name,), formats=(NAME,), process_groups=groups)
    return Tables(flight_records=(record,), meta=meta)


def read_record(source: Source) -> tuple[FlightRecord, tuple[dict[str, Any], ...]]:
    """The calls in a file, and the process groups that it lists, as in `Meta.process_groups`.

    Raises:
        DamagedInput: the file is cut, wrong, or a pickle of anything but plain values.
    """
    content = source.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DamagedInput(source.name, "is larger than 256 MB, the limit for flight recorders")
    if source.damage:
        raise DamagedInput(source.name, source.damage)
    file, frames = _parsed(content, source.name)
    order = [call.record_id for call in file.entries]
    if any(after <= before for before, after in pairwise(order)):
        raise DamagedInput(source.name, "its calls are not numbered in ascending order")
    members = {
        (group.name, group.desc): listed
        for group in file.pg_config.values()
        if (listed := _members(group.ranks)) is not None
    }
    match = _RANK.search(Path(source.name).name)
    rank = int(match[1]) if match else None
    wrong = [name for (name, _), listed in members.items() if rank is not None and rank not in listed]
    if wrong:
        raise DamagedInput(
            source.name, f"is of another rank than its name says: rank {rank} is not in its process group {wrong[0]!r}"
        )
    groups = tuple(
        {"name": name, "description": text, "size": len(listed), "ranks": listed}
        for (name, text), listed in members.items()
        if name
    )
    return FlightRecord(source.name, rank, _calls(file.entries, members, frames)), groups


def _parsed(content: bytes, name: str) -> tuple[_File, list[Any]]:
    """The file, and for each call the frames of its stack, which the JSON does not hold."""
    try:
        if content[:1] != b"\x80":
            most = _MAX_CONTAINERS + len(content) // _BYTES_OF_CONTAINER
            if content.count(b"[") + content.count(b"{") > most:
                raise DamagedInput(name, f"holds more than {most:,} lists and objects")
            file = decoded(content, _File)
            _check_count(file.entries, name)
            return file, []
        value = load_plain(content, MAX_WRITTEN + _WRITTEN_PER_BYTE * len(content))
        entries = value.get("entries") if isinstance(value, dict) else None
        if not isinstance(entries, list) or not all(isinstance(call, dict) for call in entries):
            raise DamagedInput(name, "has no list of calls (entries)")
        _check_count(entries, name)
        _check_sizes(entries, name)
        return msgspec.convert(value, _File), [call.get("frames") for call in entries]
    except (PickleRefused, NotAsWritten, msgspec.ValidationError) as error:
        raise DamagedInput(
            name, f"does not hold collective calls as PyTorch's flight recorder writes them: {error}"
        ) from error


def _check_count(entries: Sequence[object], name: str) -> None:
    if len(entries) > _MAX_CALLS:
        raise DamagedInput(name, f"holds more than {_MAX_CALLS:,} calls")


def _check_sizes(entries: Sequence[dict[str, Any]], name: str) -> None:
    """Refuses a pickle whose calls refer to the same lists of sizes so often that they take too long to look at."""
    left = _MAX_SIZES
    for call in entries:
        for key in ("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"):
            value = call.get(key)
            if isinstance(value, list):
                left -= sum(1 + (len(x) if isinstance(x, list) else 0) for x in value)
        if left < 0:
            raise DamagedInput(name, "lists more sizes of tensors than thence reads from one file")


def _calls(calls: Sequence[_Call], members: dict[tuple[str, str], list[int]], frames: Sequence[Any]) -> pl.DataFrame:
    """The calls as columns."""
    groups = [members.get(call.process_group) for call in calls]
    names = [call.profiling_name.partition(":") for call in calls]
    raw: dict[str, Any] = {
        **{name: [None] * len(calls) for name in (*TEXTS, *NUMBERS)},
        "collective": [name if colon else backend for backend, colon, name in names],
        "element_type": [_only((*call.input_dtypes, *call.output_dtypes)) for call in calls],
        "group_name": [call.process_group[0] for call in calls],
        "group_description": [call.process_group[1] for call in calls],
        "group_ranks": [None if group is None else str(group) for group in groups],
        "group_size": pl.Series([None if group is None else len(group) for group in groups], dtype=pl.Int64),
        "in_elements": [_elements(call.input_sizes) for call in calls],
        "out_elements": [_elements(call.output_sizes) for call in calls],
        "sequence": [call.collective_seq_id for call in calls],
    }  # fmt: skip
    unfinished = [call.state == "started" for call in calls]
    left = _MAX_UNFINISHED
    lines: list[str | None] = []
    for place, is_open in enumerate(unfinished):
        left -= is_open
        lines.append(_line(frames[place]) if is_open and frames and left >= 0 else None)
    columns: dict[str, list[Any]] = {
        "record": [call.record_id for call in calls],
        "backend": [backend if colon else None for backend, colon, _ in names],
        "created": [call.time_created_ns for call in calls],
        "peers": [call.is_p2p or name == "coalesced" for call, (_, _, name) in zip(calls, names, strict=True)],
        "unfinished": unfinished,
        "line": lines,
    }  # fmt: skip
    facts = {name: pl.Series(name, values, CALLS[name]) for name, values in columns.items()}
    numbers = {name: pl.Series(raw[name], dtype=pl.Int64) for name in NUMBERS}
    frame = described_frame(raw | numbers).hstack(pl.DataFrame(facts))
    return frame.select(pl.col(name).cast(dtype) for name, dtype in CALLS.items())


def _elements(sizes: list[list[int]]) -> int:
    """How many elements tensors of these sizes have."""
    return min(sum(math.prod(size[:_MAX_DIMENSIONS]) for size in sizes), _MAX_ELEMENTS)


def _only(names: Iterable[str]) -> str | None:
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else None


def _members(text: str) -> list[int] | None:
    """The ranks in a text such as ``[0, 1]``; None if it lists none."""
    try:
        listed = decoded(text, list[Count])
    except NotAsWritten:
        return None
    return listed or None


def _line(frames: object) -> str | None:
    """The innermost frame of the user's own code, else the innermost one, as ``file.py:12 function``."""
    try:
        stack = msgspec.convert(frames, list[_Frame])
    except msgspec.ValidationError:
        return None
    own = OwnCode()
    chosen = next((frame for frame in stack if own(frame.filename)), stack[0] if stack else None)
    return None if chosen is None else f"{chosen.filename}:{chosen.line} {chosen.name}"
