"""Reads an nsys-jax archive into the tables of a trace."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.errors import DamagedInput
from thence.model.concat_tables import concat
from thence.model.tables import HOST, THREADS, Device, Meta, Tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.protobuf import unpacked
from thence.readers.nsys_jax.archive import NAME, TRACE, Archive, as_int64, csv_frame, parquet_frame, renamed
from thence.readers.nsys_jax.programs import Launchers, compile_ranges, device_tables, launchers, projection
from thence.readers.parquet_probe import probing
from thence.readers.source import changes_in, unchanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.hlo import HloModule

_PUSHPOP = ("report_nvtx_pushpop_trace.parquet", "report_nvtx_pushpop_trace.csv.xz")
_THREADS = "thread-metadata.parquet"
_DEVICES = "device-metadata.parquet"
_DUMP = re.compile(
    r"^(?P<path>dump/module_(?P<id>\d{1,18})\.(?P<name>.+?)"
    r"(?:\.[^/]*gpu)?_?after_optimizations\.hlo\.pb(?:\.xz)?)(?:/(?P<stem>[^/]+))?$"
)
_OWN_CLOCKS = "each rank has its own clock: align the ranks before you compare their times"
_NO_HLO = "has no optimized HLO (dump/*after_optimizations.hlo.pb.xz): no collectives, sources or op names"
_NO_STREAM = (
    "nsys-jax archives do not state the CUDA stream of a thunk, so the stream is always 0; "
    "one row is one thunk, not one kernel"
)


def read(name: str, progress: Callable[[int], None], expansion: Expansion = DEFAULT) -> Tables:
    """The tables of one archive: of one rank, or of several combined by nsys-jax-combine.

    GPU rows are leaf thunks. Only the projected ranges (trace.parquet) are required. Each other member that is
    missing causes a warning, and its data is absent from the tables.

    Args:
        name: path of a zip file or a directory.
        progress: called with the number of unpacked bytes read so far.
        expansion: how much larger than its stored size the content may be.

    Raises:
        InputError: the path cannot be opened.
        DamagedInput: the path is not an archive, lacks trace.parquet, or a member cannot be read.
    """
    with unchanged(name, changes_in(name)):
        return _read(name, progress, expansion)


def _read(name: str, progress: Callable[[int], None], expansion: Expansion) -> Tables:
    archive = Archive.open(name, expansion=expansion)
    stems: list[str | None] = [*sorted(archive.variants(TRACE))]
    if not stems:
        if TRACE not in archive.sizes:
            raise DamagedInput(name, f"has no member {TRACE}; expected an nsys-jax archive")
        stems = [None]
    parts = []
    tables_inside = (archive.read(member) for member in _parquet_members(archive))
    with probing(tables_inside, name, expansion) as probe:
        modules = _hlo(archive, stems)
        progress(archive.read_bytes)
        probe.passed()
    for stem in stems:
        parts.append(_rank(archive, stem, modules[stem]))
        progress(archive.read_bytes)
    tables = concat(parts)
    clocks = (_OWN_CLOCKS,) if len(stems) > 1 else ()
    meta = dataclasses.replace(
        tables.meta,
        inputs=(name,),
        formats=(NAME,),
        warnings=(
            *dict.fromkeys(tables.meta.warnings),
            *(f"{name}: {text}" for text in (_NO_STREAM, *clocks, *archive.skipped)),
        ),
    )
    return dataclasses.replace(tables, meta=meta)


def _rank(archive: Archive, stem: str | None, modules: dict[int, HloModule]) -> Tables:
    """The tables of one rank, from its members of the archive."""
    label = archive.name if stem is None else f"{archive.name} ({stem})"
    member = archive.of(TRACE, stem)
    if member is None:  # pragma: no cover - stems come from this very member
        raise DamagedInput(label, f"has no member {TRACE}")
    projected = projection(parquet_frame(archive.read(member), f"{archive.name}:{member}", archive.expansion), label)
    warnings: list[str] = []
    threads = _optional(archive, stem, _THREADS, warnings)
    device_metadata = _optional(archive, stem, _DEVICES, warnings)
    launching = launchers(threads, device_metadata)
    warnings += launching.warnings
    host = _host(archive, stem, launching, warnings)
    if not modules:
        warnings.append(_NO_HLO)
    tables, more = device_tables(projected, launching, modules)
    meta = Meta(
        inputs=(label,),
        formats=(NAME,),
        facts=({"producer": "nsys-jax", "archive": label, "stream": None},),
        devices=_devices(tables.gpu, launching),
        warnings=tuple(f"{label}: {text}" for text in (*warnings, *more)),
        ranks_stated=launching.rank_stated,
    )
    return dataclasses.replace(
        tables,
        host=host,
        threads=_threads(threads, host, launching.rank, label),
        hlo=tuple(modules.values()),
        meta=meta,
    )


def _optional(archive: Archive, stem: str | None, wanted: str, warnings: list[str]) -> pl.DataFrame | None:
    member = archive.of(wanted, stem)
    if member is None:
        warnings.append(f"has no member {wanted}")
        return None
    return parquet_frame(archive.read(member), f"{archive.name}:{member}", archive.expansion)


def _parquet_members(archive: Archive) -> list[str]:
    """Names of the Parquet members, of all ranks, that `read` reads."""
    wanted = (TRACE, _PUSHPOP[0], _THREADS, _DEVICES)
    return [m for m in archive.sizes if m in wanted or m.rpartition("/")[0] in wanted]


def _hlo(archive: Archive, stems: list[str | None]) -> dict[str | None, dict[int, HloModule]]:
    """The HLO modules of every rank by XLA's module number; equal bytes are decoded once."""
    decoded: dict[bytes, HloModule] = {}
    modules: dict[str | None, dict[int, HloModule]] = {stem: {} for stem in stems}
    for member in sorted(archive.sizes):
        match = _DUMP.match(member)
        if match is None:
            continue
        data = archive.read(member)
        digest = hashlib.sha256(data).digest()
        if digest not in decoded:
            decoded[digest] = decode_hlo(data, f"{archive.name}:{member}", archive.expansion)
        for stem in stems:
            if archive.of(match["path"], stem) == member:
                modules[stem][int(match["id"])] = decoded[digest]
    return modules


def _host(archive: Archive, stem: str | None, launching: Launchers, warnings: list[str]) -> pl.DataFrame:
    """Compile ranges as rows of HOST."""
    for wanted in _PUSHPOP:
        member = archive.of(wanted, stem)
        if member is None:
            continue
        where, data = f"{archive.name}:{member}", archive.read(member)
        is_parquet = wanted.endswith(".parquet")
        most = archive.expansion
        frame = parquet_frame(data, where, most) if is_parquet else csv_frame(unpacked(data, where, most), where)
        ranges = compile_ranges(frame, where)
        process = ranges["process"].fill_null(launching.process)
        columns: dict[str, Any] = {
            "rank": pl.repeat(launching.rank, ranges.height, dtype=pl.Int32, eager=True),
            "process": process,
            "category": pl.repeat("compile", ranges.height, dtype=pl.String, eager=True),
            **{c: ranges[c] for c in ("thread", "name", "start", "duration", "parent")},
        }
        return HOST.frame(columns)
    warnings.append(f"has no member {_PUSHPOP[0]}: nothing is known about compilation")
    return HOST.empty()


def _devices(gpu: pl.DataFrame, launching: Launchers) -> tuple[Device, ...]:
    used = gpu.select("rank", "device").unique().sort("rank", "device").rows()
    return tuple(launching.properties.get(device, Device(rank, device)) for rank, device in used)


def _threads(threads: pl.DataFrame | None, host: pl.DataFrame, rank: int, path: str) -> pl.DataFrame:
    """Names of the threads that have compile ranges, and of the launching threads."""
    if threads is None or not {"Name", "PID", "TID"} <= set(threads.columns):
        return THREADS.empty()
    named = renamed(threads, {"process": ("PID",), "thread": ("TID",), "name": ("Name",)}, path)
    if named.schema["name"] != pl.String:
        return THREADS.empty()
    names = as_int64(named, ("process", "thread"), path).unique(
        ["process", "thread"], keep="first", maintain_order=True
    )
    compiles = pl.col("thread").is_in(host["thread"].unique().implode())
    kept = names.filter(compiles | pl.col("name").str.starts_with("XlaLauncher"))
    return THREADS.frame({"rank": pl.repeat(rank, kept.height, dtype=pl.Int32, eager=True), **kept.to_dict()})
