"""XLA in a recording: programs, HLO instructions and compile phases, from XLA's NVTX ranges and HLO modules.

The ranges are those that nsys records, and `thence.readers.nsight.xla` reads them. Activities of a CUDA
graph that XLA created get their program but no instruction here: `thence.attribution.xla.command_buffers`
derives that from the order of the graph's nodes and the HLO modules in the recording's folder.

Each HLO module is matched to one of the recording's programs. JAX renumbers modules when it hands them
out, so a module's own number cannot be used. XLA names program and number in the NVTX ranges of its
compiler passes: a module is the result of the last compilation of its name on a thread before the time at
which JAX reported, on the same thread, that it had compiled the module. Modules from a compilation cache have
no such ranges. If as many programs as modules of one name remain unmatched, they are matched in order of
number and of compile time, because XLA numbers programs in the order of their compilation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import polars as pl

from thence.errors import DamagedInput
from thence.model.formats import COMPILED_INDEX, HLO_ENDING, HLO_FOLDER
from thence.model.intervals import NO_ROW
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, decoded
from thence.model.launches import IDENTIFIED, matched_rows
from thence.readers.jax.hlo import decode_hlo
from thence.readers.jax.hlo_dump import attach_hlo
from thence.readers.nsight.ranges import XLA
from thence.readers.nsight.xla import with_compilation, with_programs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from thence.model.hlo import HloModule
    from thence.model.tables import Tables

_COMPILING = r"[#,]module=([^#,]+),program_id=(\d{1,18})#?$"
_NUMBERED = r"^(.+)\.(\d{1,18})$"
_UNKNOWN = (
    "several compilations of {} cannot be distinguished, so their HLO is not known: they were loaded from a "
    "compilation cache, or compiled before the recording began"
)
_NO_RANGES = (
    "it ran XLA programs, but holds no NVTX ranges of XLA, so the program of each kernel is not known: record with "
    "thence record -- COMMAND, or start the recording before JAX is imported, and leave NVTX on"
)


def with_xla(tables: Tables, domain: pl.Series, folder: Path) -> tuple[Tables, list[str]]:
    """The tables of one process with XLA's programs, their HLO and their collectives; and warnings.

    Args:
        tables: gpu, host and meta of one process.
        domain: NVTX domain of each host row.
    """
    has_ranges = bool((domain == XLA).any())
    compiled, warnings = _compiled_modules(folder)
    if not has_ranges:
        return tables, [*warnings, *([_NO_RANGES] if compiled else [])]
    nowhere = np.full(tables.gpu.height, NO_ROW, np.int64)
    launches = matched_rows(tables.gpu, tables.host, "correlation", IDENTIFIED)
    tables, more = with_programs(tables, domain, launches, nowhere)
    warnings += more
    if not compiled:
        return tables, warnings
    modules, more = _numbered_modules(compiled, tables, domain)
    attached = attach_hlo(tables, modules)
    added = attached.meta.warnings[len(tables.meta.warnings) :]
    return dataclasses.replace(attached, meta=tables.meta), [*warnings, *more, *added]


def compile_phases(ranges: pl.DataFrame, name: str) -> pl.Series:
    """The category of each NVTX range: ``compile`` for XLA's compilation, else the given one.

    Args:
        ranges: thread, name, domain, category (String), start and end (ns), in any order.
        name: of the recording, for messages.
    """
    shaped = ranges.select(
        pl.lit(0, pl.Int64).alias("process"),
        "thread",
        "start",
        (pl.max_horizontal("start", "end") - pl.col("start")).alias("duration"),
        pl.col("name").cast(pl.Categorical()),
        "domain",
        "category",
    )
    return with_compilation(shaped, name)["category"]


@dataclass(frozen=True)
class _ModuleFile:
    """A module on disk.

    Attributes:
        path: of the file.
        name: of the program, such as ``jit_train_step``.
        thread: id of the thread that compiled it; None if that is unknown.
        ended_ns: Unix time at which its compilation ended; None if that is unknown.
    """

    path: Path
    name: str
    thread: int | None = None
    ended_ns: int | None = None


def _compiled_modules(folder: Path) -> tuple[list[_ModuleFile], list[str]]:
    """The HLO module files of a recording, not yet read, by name, which is the order of compilation; and warnings."""
    place = folder / HLO_FOLDER
    if not place.is_dir():
        return [], []
    # The index is written after the files: a program that was killed can leave a file without an entry.
    files = {file.name: file for file in sorted(place.glob(f"*{HLO_ENDING}")) if file.is_file()}
    try:
        index = decoded((place / COMPILED_INDEX).read_bytes(), _Index)
    except (OSError, NotAsWritten) as error:
        if not files:
            return [], []
        listed, warnings = {}, [f"{HLO_FOLDER}/{COMPILED_INDEX} cannot be read ({error})"]
    else:
        listed, warnings = {m.file: m for m in index.modules}, []
    modules = []
    for name, path in files.items():
        entry = listed.get(name) or _Listed(name, name.removesuffix(HLO_ENDING).partition(".")[2])
        modules.append(_ModuleFile(path, entry.name, entry.thread, entry.ended_ns))
    return modules, warnings


class _Index(msgspec.Struct):
    format: str
    modules: list[_Listed]


class _Listed(msgspec.Struct):
    file: str
    name: str
    thread: JsonInt64 | None = None
    ended_ns: Count | None = None


def _numbered_modules(
    compiled: Sequence[_ModuleFile], tables: Tables, domain: pl.Series
) -> tuple[list[HloModule], list[str]]:
    """The modules of programs that the tables hold, with XLA's number of each as ``id``; and warnings.

    Args:
        compiled: modules on disk.
        tables: host, programs and meta.
        domain: NVTX domain of each host row.
    """
    wanted = dict.fromkeys(_identities(tables))
    numbers = _numbers_by_compilation(compiled, _compiler_passes(tables, domain))
    doubtful = _number_by_order(compiled, wanted, numbers)
    modules, warnings = [], [_UNKNOWN.format(name) for name in doubtful]
    for place, number in numbers.items():
        module_file = compiled[place]
        if (module_file.name, number) not in wanted:
            continue
        try:
            module = decode_hlo(module_file.path.read_bytes(), str(module_file.path))
        except (OSError, DamagedInput, ValueError, OverflowError) as error:
            warnings.append(f"the HLO of {module_file.name} cannot be read: {error}")
            continue
        modules.append(dataclasses.replace(module, name=module_file.name, id=number))
    return modules, warnings


def _identities(tables: Tables) -> Iterator[tuple[str, int]]:
    """Name and number of each program, sorted by number; programs that the autotuner times have no number."""
    identities = (
        tables.programs.select(pl.col("program").cast(pl.String).str.extract_groups(_NUMBERED))
        .unnest("program")
        .drop_nulls()
        .select("1", pl.col("2").cast(pl.Int64))
        .unique()
        .sort("2")
    )
    yield from identities.iter_rows()


def _numbers_by_compilation(compiled: Sequence[_ModuleFile], passes: pl.DataFrame) -> dict[int, int]:
    """XLA's number of each module whose compilation was recorded, by the position of the module."""
    passes_of: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for thread, name, number, end in passes.select("thread", "name", "number", "end").iter_rows():
        passes_of.setdefault((thread, name), []).append((end, number))
    numbers = {}
    last: dict[tuple[int, str], int] = {}
    timed = [
        (module_file.ended_ns, place) for place, module_file in enumerate(compiled) if module_file.ended_ns is not None
    ]
    for ended, place in sorted(timed):
        module_file = compiled[place]
        assert module_file.thread is not None or ended is not None
        key = (module_file.thread if module_file.thread is not None else -1, module_file.name)
        since = last.get(key, 0)
        last[key] = ended
        before = [number for end, number in passes_of.get(key, ()) if since < end <= ended]
        if before:
            numbers[place] = before[-1]
    return numbers


def _compiler_passes(tables: Tables, domain: pl.Series) -> pl.DataFrame:
    """Of each compilation: thread, name, number and end of the last compiler pass (Unix time)."""
    host = tables.host.select(
        "thread",
        pl.col("name").cast(pl.String).str.extract_groups(_COMPILING).alias("compiled"),
        (pl.col("start") + pl.col("duration") + (tables.meta.epoch_ns or 0)).alias("end"),
    )
    return (
        host.filter((domain == XLA).fill_null(value=False))
        .unnest("compiled")
        .drop_nulls()
        .rename({"1": "name", "2": "number"})
        .group_by("thread", "name", pl.col("number").cast(pl.Int64))
        .agg(pl.col("end").max())
        .sort("end")
    )


def _number_by_order(
    compiled: Sequence[_ModuleFile], wanted: Mapping[tuple[str, int], None], numbers: dict[int, int]
) -> list[str]:
    """Adds numbers of modules whose compilation was not recorded; returns the names for which that fails."""
    taken = {(compiled[place].name, number) for place, number in numbers.items()}
    missing: dict[str, list[int]] = {}
    for name, number in wanted:
        if (name, number) not in taken:
            missing.setdefault(name, []).append(number)
    doubtful = []
    for name, programs in missing.items():
        places = [p for p, module_file in enumerate(compiled) if module_file.name == name and p not in numbers]
        timed = [p for p in places if compiled[p].ended_ns is not None]
        if len(places) == len(programs) == 1:
            numbers[places[0]] = programs[0]
        elif len(places) == len(programs) == len(timed):
            timed.sort(key=lambda p: compiled[p].ended_ns or 0)
            numbers.update(zip(timed, sorted(programs), strict=True))
        elif places:
            doubtful.append(name)
    return doubtful
