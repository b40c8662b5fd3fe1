"""Reader of the ``cuda_gpu_trace`` report of ``nsys stats`` as CSV, called ``gputrace`` before 2022.

Column names and units differ between versions: ``Start (ns)``, ``Start(nsec)``, ``Start (sec)``,
``Bytes (MB)``; the options of ``nsys stats`` determine the units. A CSV holds no host ranges and no
processes: one file is one rank, and the launches of its activities are unknown.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import polars as pl

from thence.errors import DamagedInput, UnknownFormat
from thence.model.formats import NSIGHT_CSV
from thence.model.losses import Loss
from thence.model.names import UNNAMED
from thence.model.tables import GPU, Device, Meta, Tables
from thence.readers.kineto.metadata import rank_of
from thence.readers.nsight.activities import copy_name, set_name
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.readers.source import Source

NAME = NSIGHT_CSV
PATTERNS: tuple[str, ...] = ()
"""Empty: the export that a CSV was made from is usually in the same directory, and is read instead."""

_HEADER = re.compile(rb'^"?Start ?\([a-z]+\)"?,"?Duration ?\([a-z]+\)"?,"?CorrId"?,.*Name"?\r?$', re.MULTILINE)
_SYNONYMS = {"Stream": "Strm"}  # heading in other reports of nsys and in edited files
_UNIT = re.compile(r"^(?P<name>.*?) ?\((?P<unit>[A-Za-z/]+)\)$")
_NS = {
    "ns": 1, "nsec": 1, "us": 10**3, "usec": 10**3, "ms": 10**6, "msec": 10**6, "s": 10**9, "sec": 10**9,
}  # fmt: skip
_BYTES = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_MAX_BYTES = 8 << 30
_MIN_ROWS_TO_REFUSE = 100_000
_EMPTY_LINE = re.compile(rb"\r?\n[ \t]*\r?\n")
_COPY = r"^\[CUDA (?:Unified Memory )?memcpy ?(.*)\]$"
_SET = r"^\[CUDA (?:Unified Memory )?memset\]$"
_DIRECTION_LABELS = {
    "HtoD": "Host-to-Device",
    "DtoH": "Device-to-Host",
    "DtoD": "Device-to-Device",
    "PtoP": "Peer-to-Peer",
}


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this is a cuda_gpu_trace report."""
    return _HEADER.search(head) is not None


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The activities of one report.

    Args:
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: the report cannot be read.
        UnknownFormat: the table lacks columns of cuda_gpu_trace.
    """
    frame, units = _table(source)
    progress(source.consumed)
    name = source.name
    times = {column: _scaled(frame, column, units, _NS, name) for column in ("Start", "Duration")}
    has_times = times["Start"].is_not_null() & (times["Duration"].fill_null(-1) >= 0)
    rank = rank_of({}, name) or 0
    device = _number(frame, "Device", r"\((\d{1,9})\)\s*$").fill_null(0)
    sizes, rounded = _sizes(frame, units, name)
    gpu = GPU.frame(
        {
            "rank": pl.repeat(rank, frame.height, dtype=pl.Int32, eager=True),
            "device": device,
            "stream": _number(frame, "Strm").fill_null(0),
            **_names(frame),
            "start": times["Start"],
            "duration": times["Duration"],
            "correlation": _number(frame, "CorrId"),
            "grid": _triple(frame, "Grd"),
            "block": _triple(frame, "Blk"),
            "registers": _number(frame, "Reg/Trd"),
            **sizes,
        }
    )
    if not has_times.any():
        raise DamagedInput(name, "holds no activity that could be read")
    warnings = ["a cuda_gpu_trace CSV does not record which API call launched an activity; the SQLite export does"]
    losses: tuple[Loss, ...] = ()
    if lost := int((~has_times).sum()):
        warnings.append(f"left out: {several(lost, 'row')} without readable times")
        losses = (Loss("no_times", name, lost, f"{name}: {warnings[-1]}"),)
    if rounded:
        warnings.append(f"sizes are rounded to 0.001 {rounded}, so they are shown as unknown")
    return Tables(
        gpu=gpu.filter(has_times).sort("rank", "device", "start", "stream", maintain_order=True),
        meta=Meta(
            inputs=(name,),
            formats=(NAME,),
            facts=({"producer": "nsys stats"},),
            devices=_devices(frame, device, rank),
            warnings=tuple(f"{name}: {text}" for text in warnings),
            losses=losses,
        ),
    )


def _table(source: Source) -> tuple[pl.DataFrame, dict[str, str]]:
    """All cells as text, with the units removed from the column names; and the unit of each column."""
    parts = []
    size = 0
    while part := source.read(1 << 22):
        parts.append(part)
        size += len(part)
        if size > _MAX_BYTES:
            raise DamagedInput(source.name, f"is larger than {_MAX_BYTES:,} bytes; export to SQLite instead")
    data = b"".join(parts)
    parts.clear()
    header = _HEADER.search(data)
    if source.damage or header is None:
        raise DamagedInput(source.name, f"cannot be read: {source.damage or 'it has no header'}")
    try:
        # nsys stats prints other lines around a report: text after an empty line is not part of it.
        empty = _EMPTY_LINE.search(data, header.end())
        body = memoryview(data)[header.start() : empty.start() if empty else len(data)]
        _check_rows(data, header[0].count(b","), source.name)
        frame = pl.read_csv(io.BytesIO(body), infer_schema=False, truncate_ragged_lines=True, encoding="utf8-lossy")
    except (pl.exceptions.PolarsError, OverflowError) as error:
        reason = (str(error).splitlines() or ["it is empty"])[0]
        raise DamagedInput(source.name, f"cannot be read as a CSV table ({reason})") from error
    split = {column: _UNIT.match(column) for column in frame.columns}
    plain = {column: match["name"] if match else column for column, match in split.items()}
    plain = {column: _SYNONYMS.get(name, name) for column, name in plain.items()}
    if len(set(plain.values())) < len(plain):
        raise DamagedInput(source.name, f"has duplicate columns: {', '.join(frame.columns)}")
    units = {match["name"]: match["unit"] for match in split.values() if match}
    missing = {"Strm", "Name", "Device"} - set(plain.values())
    if missing:
        raise UnknownFormat(source.name, f"lacks the columns {', '.join(sorted(missing))} of cuda_gpu_trace")
    return frame.rename(plain), units


def _check_rows(data: bytes, commas: int, name: str) -> None:
    """Refuses a large table in which most rows lack most cells: an absent cell takes memory like any other.

    Raises:
        DamagedInput: more than half of the cells are absent.
    """
    rows = data.count(b"\n")
    if rows > _MIN_ROWS_TO_REFUSE and data.count(b",") < rows * commas // 2:
        raise DamagedInput(name, f"has {rows:,} rows, most of which lack most of the columns")


def _scaled(frame: pl.DataFrame, column: str, units: dict[str, str], factors: dict[str, int], path: str) -> pl.Series:
    """Numbers with a unit as integers of the smallest unit (ns, bytes); null if a cell is not a number."""
    factor = factors.get(units.get(column, ""))
    if factor is None:
        raise DamagedInput(
            path, f"has the column {column!r} in the unit {units.get(column)!r}; expected one of: {', '.join(factors)}"
        )
    text = frame[column].str.strip_chars()
    if factor == 1:
        integers = text.cast(pl.Int64, strict=False)
        if integers.null_count() == text.null_count():
            return integers
    # Decimal places are parsed as digits: a double cannot hold the nanoseconds of a long recording.
    places = len(str(factor)) - 1
    number = text.str.extract(r"^(\d{1,18})(?:\.\d*)?$").cast(pl.Int64, strict=False)
    digits = text.str.extract(r"^\d+\.(\d+)$").fill_null("")
    fraction = digits.str.pad_end(places, "0").str.slice(0, places).replace("", "0").cast(pl.Int64, strict=False)
    integers = number * factor + fraction * (factor // 10**places)
    result: pl.Series = integers.set(number > (1 << 62) // factor, None)  # a product beyond int64 has wrapped around
    return result


def _sizes(frame: pl.DataFrame, units: dict[str, str], path: str) -> tuple[dict[str, pl.Series], str | None]:
    """Columns of sizes in bytes, and None; no columns and the unit if that is not bytes, as sizes are then rounded."""
    columns = {"bytes": ("Bytes",), "shared_memory": ("StcSMem", "DymSMem")}
    used = [c for names in columns.values() for c in names if c in frame.columns]
    coarse = next((units[c] for c in used if units.get(c) in _BYTES and units[c] != "B"), None)
    if coarse is not None or len(used) < 3:
        return {}, coarse
    scaled = {c: _scaled(frame, c, units, _BYTES, path) for c in used}
    return {"bytes": scaled["Bytes"], "shared_memory": scaled["StcSMem"] + scaled["DymSMem"]}, None


def _number(frame: pl.DataFrame, column: str, pattern: str = r"^\s*(\d{1,18})\s*$") -> pl.Series:
    if column not in frame.columns:
        return pl.repeat(None, frame.height, dtype=pl.Int64, eager=True)
    numbers = frame[column].str.extract(pattern).cast(pl.Int64, strict=False)
    # Columns of devices, streams and sizes are 32 bits wide.
    return numbers.set(numbers >= 1 << 31, None) if column != "CorrId" else numbers


def _triple(frame: pl.DataFrame, prefix: str) -> pl.Series:
    parts = [_number(frame, f"{prefix}{axis}") for axis in "XYZ"]
    columns = [part.alias(axis) for part, axis in zip(parts, "xyz", strict=True)]
    complete = pl.all_horizontal(pl.col("x", "y", "z").is_not_null())
    values = pl.concat_list(pl.col("x", "y", "z").fill_null(0)).cast(pl.List(pl.UInt32)).list.to_array(3)
    return pl.DataFrame(columns).select(pl.when(complete).then(values)).to_series()


def _names(frame: pl.DataFrame) -> dict[str, pl.Series]:
    """Columns kind and name; copies and memsets are named as for the SQLite export."""
    kinds = [c if c in frame.columns else None for c in ("SrcMemKd", "DstMemKd")]
    cells = frame.select("Name", *(pl.col(c) if c else pl.lit(None, pl.String).alias(f"no {i}")
                                   for i, c in enumerate(kinds)))  # fmt: skip
    cells = cells.rename(dict(zip(cells.columns, ("name", "source", "destination"), strict=True)))
    distinct = cells.unique()
    shown = [_kind_and_name(*row) for row in distinct.rows()]
    named = distinct.with_columns(
        kind=pl.Series([kind for kind, _ in shown], dtype=pl.String),
        shown=pl.Series([name for _, name in shown], dtype=pl.String),
    )
    joined = cells.join(named, on=cells.columns, how="left", nulls_equal=True, maintain_order="left")
    return {"kind": joined["kind"], "name": joined["shown"]}


def _kind_and_name(name: str | None, source: str | None, destination: str | None) -> tuple[str, str]:
    name = name or UNNAMED
    if copy := re.match(_COPY, name):
        return "memcpy", copy_name(_DIRECTION_LABELS.get(copy[1], copy[1]), source, destination)
    if re.match(_SET, name):
        return "memset", set_name(source or destination)
    return "kernel", name


def _devices(frame: pl.DataFrame, device: pl.Series, rank: int) -> tuple[Device, ...]:
    """The devices: a cell ``NVIDIA H200 (0)`` holds the name and number of device 0."""
    named = frame.select(name=pl.col("Device").str.extract(r"^(.*?) ?\(\d+\)\s*$"))
    named = named.with_columns(device=device).unique("device", keep="first").sort("device")
    return tuple(Device(rank, number, name) for name, number in named.rows())
