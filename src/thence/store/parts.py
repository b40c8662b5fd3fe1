"""Writes and reads one part of a store, and the joined summaries of many parts.

A part is the attributed tables of one input as Parquet files. Device activities and their places are in one file,
``activities``. Columns of `GPU` keep their names, except ``program``, ``hlo`` and ``iteration``, which are stored as
``program_row``, ``hlo_recorded`` and ``repetition``, because places have columns of these names. ``work`` holds FLOP
and bytes of each activity, because host ranges, which they follow from, are left out by default. Enums are stored as
categoricals, so that a store stays readable when a later version adds codes. The summaries of some hundred ranks are
joined in one file.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl

from thence.analysis.self_check import checked_references
from thence.atomic_files import atomic_folder
from thence.attribution.work.activity_work import WORK, activity_work
from thence.attribution.work.said import MAX_COUNT
from thence.errors import Contradiction, DamagedInput
from thence.model.attributed import RULE, SHARES, Attributed
from thence.model.concat_tables import renumbered
from thence.model.hlo import BUFFERS, COMPUTATIONS, FRAMES, INSTRUCTIONS, LOOPS, HloModule
from thence.model.phases import POSITIONS
from thence.model.places import NOT_RECORDED, PLACES
from thence.model.tables import (
    COLLECTIVES,
    COUNTERS,
    EVENTS,
    GPU,
    GRAPH_PLACES,
    HOST,
    MEMORY,
    MEMORY_FAILURES,
    MEMORY_TOTALS,
    PROGRAMS,
    STALLS,
    STEP_TIMES,
    STEPS,
    THREADS,
    WAITS,
)
from thence.parquet_files import held_tables, write_table
from thence.readers.plausible import plausible, with_affordable_names
from thence.store.facts import decode_facts
from thence.store.files import content_of, is_there, reading, tables_within
from thence.store.layout import FACTS, RANKS, SUMMARIES, summary_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from thence.store.facts import Facts
    from thence.store.layout import Entry, Manifest

ACTIVITIES, WORK_TABLE = "activities", "work"
_RENAMED = {"program": "program_row", "hlo": "hlo_recorded", "iteration": "repetition"}
GPU_COLUMNS = {name: _RENAMED.get(name, name) for name in GPU.schema}
"""Columns of ``gpu``, and their names in ``activities``."""
_PLACE_TYPES = pl.Schema(
    {
        "launch": pl.Int32(),
        "step_row": pl.Int32(),
        **{name: dtype for kind in PLACES for name, dtype in ((kind, pl.Categorical()), (f"{kind}_rule", RULE))},
        "position": pl.Enum(POSITIONS),
        "separate": RULE,
        **dict.fromkeys(("lane", "metadata", "detail"), pl.Categorical()),
    }
)
_MAX_FACTS = 1 << 30
"""Most bytes of a part's facts, which have some kilobytes and the notes."""
_TABLES = {
    table.name: table.schema
    for table in (
        *(HOST, COLLECTIVES, PROGRAMS, THREADS, EVENTS, WAITS, STEPS, STEP_TIMES, GRAPH_PLACES),
        *(MEMORY, MEMORY_TOTALS, MEMORY_FAILURES, COUNTERS, STALLS),
    )
}
_HLO = {
    "instructions": INSTRUCTIONS,
    "computations": COMPUTATIONS,
    "loops": LOOPS,
    "frames": FRAMES,
    "buffers": BUFFERS,
}
_MODULE_FACTS = {
    "name": pl.String(), "id": pl.Int64(), "fingerprint": pl.String(), "entry": pl.Int64(),
    "replicas": pl.Int64(), "partitions": pl.Int64(),
}  # fmt: skip
_OF_HOST = ("host", "events", "waits", "host_collectives", "memory", "memory_totals", "memory_failures")
"""Tables whose rows are host ranges, or mean nothing without them."""
_AT_ONCE = 256
"""Parts whose summaries go to one file; they are in memory together while it is written."""


_TABLES |= {"collective_parts": COLLECTIVES.schema, "host_collectives": COLLECTIVES.schema}


def write_tables(trace: Attributed, folder: Path, *, host: bool) -> None:
    """Writes all tables of a whole trace; empty ones are left out.

    Args:
        trace: with nothing selected.
        folder: exists already.
        host: whether host ranges and the tables about them are written; if not, references to them become null.
    """
    work = activity_work(trace)
    if not host:
        trace = _without_host(trace)
    places = trace.places.select(pl.all().cast(pl.Categorical()) if trace.places.is_empty() else pl.all())
    tables = {
        ACTIVITIES: pl.concat([trace.gpu.rename(_RENAMED), places], how="horizontal"),
        **{name: getattr(trace, name) for name in _TABLES},
        WORK_TABLE: work,
    }
    if trace.shares is not None:
        tables["shares"] = trace.shares
    for name, frame in (tables | _modules(trace)).items():
        if frame.height:
            stored = frame.with_columns(pl.col(pl.Enum).cast(pl.Categorical()))
            write_table(stored, folder / f"{name}.parquet")


def _without_host(trace: Attributed) -> Attributed:
    from dataclasses import replace

    nowhere = pl.lit(None, pl.Int32())
    return replace(
        trace,
        places=trace.places.with_columns(launch=nowhere) if trace.places.width else trace.places,
        collectives=trace.collectives.with_columns(host=nowhere),
        collective_parts=trace.collective_parts.with_columns(host=nowhere),
        **{name: getattr(trace, name).clear() for name in _OF_HOST},
    )


def _modules(trace: Attributed) -> dict[str, pl.DataFrame]:
    """HLO modules as tables, ``module`` being the index of each."""
    if not trace.hlo:
        return {}
    facts = [{name: getattr(module, name) for name in _MODULE_FACTS} for module in trace.hlo]
    tables = {"modules": pl.DataFrame(facts, _MODULE_FACTS)}
    for name in _HLO:
        numbered = [
            getattr(module, name).with_columns(module=pl.lit(number, pl.Int32()))
            for number, module in enumerate(trace.hlo)
        ]
        tables[name] = pl.concat(numbered)
    return tables


def read_facts(folder: Path) -> Facts:
    """The facts of a part.

    Raises:
        DamagedInput: they cannot be read.
    """
    path = folder / FACTS
    return decode_facts(content_of(path, _MAX_FACTS), str(path))


def read_table(folder: Path, name: str) -> pl.DataFrame | None:
    """A table of a part as it was written; None where it had no rows.

    Raises:
        DamagedInput: it cannot be read.
    """
    path = folder / f"{name}.parquet"
    if not is_there(path):
        return None
    with reading(path):
        return tables_within([path], path).collect()


def rows_of(folder: Path, new: Mapping[int, int]) -> Attributed:
    """The attributed tables of a part as they were written, with its ranks renumbered.

    Args:
        new: for ranks that are shown under other numbers: number in the tables to number shown.

    Raises:
        DamagedInput: it cannot be read, or its tables refer to rows that are not there.
    """
    facts = read_facts(folder)
    activities = read_table(folder, ACTIVITIES)
    with reading(folder):
        gpu = GPU.empty()
        places = pl.DataFrame(schema=_PLACE_TYPES)
        if activities is not None:
            gpu = activities.select(pl.col(old).alias(name) for name, old in GPU_COLUMNS.items())
            own = set(GPU_COLUMNS.values())
            places = _typed_places(activities.drop(own))
        tables: dict[str, Any] = {name: _table(folder, name) for name in _TABLES}
        if tables["collectives"]["gpu"].null_count():
            raise ValueError("collectives without an activity")
        shares = read_table(folder, "shares")
        work = read_table(folder, WORK_TABLE)  # of a store of an earlier version None
        trace = Attributed(
            gpu=typed(gpu, GPU.schema),
            places=places,
            **tables,
            shares=None if shares is None else typed(shares, dict(SHARES)),
            hlo=_modules_of(folder),
            meta=facts.meta,
            own=facts.own,
            installed=facts.installed,
            work=None if work is None else _possible_work(work, gpu.height),
        )
        sound = with_affordable_names({str(folder): plausible(trace, str(folder))})[str(folder)]
        try:
            checked_references(sound)
        except Contradiction as error:
            message = "has tables that refer to rows that do not exist: create the store again with thence ingest"
            raise DamagedInput(str(folder), message) from error
    return renumbered(sound, new) if new else sound


def _table(folder: Path, name: str) -> pl.DataFrame:
    written = read_table(folder, name)
    return _nothing(name) if written is None else typed(written, _TABLES[name])


@cache
def _nothing(name: str) -> pl.DataFrame:
    """A table without rows, made once: most parts lack most tables."""
    return pl.DataFrame(schema=dict(_TABLES[name]))


def _typed_places(places: pl.DataFrame) -> pl.DataFrame:
    """Places in their types; a kind of place that is newer than the store is not recorded."""
    newer = [kind for kind in PLACES if not {kind, f"{kind}_rule"} & set(places.columns)]
    values = {kind: pl.lit(None) for kind in newer} | {f"{kind}_rule": pl.lit(NOT_RECORDED) for kind in newer}
    return places.with_columns(**values).select(pl.col(name).cast(dtype) for name, dtype in _PLACE_TYPES.items())


def _possible_work(work: pl.DataFrame, rows: int) -> pl.DataFrame:
    """The table of work in its types.

    Raises:
        ValueError: it is not that of the activities, or has impossible numbers.
    """
    typed = work.select(pl.col(name).cast(dtype) for name, dtype in WORK.items())
    possible = pl.col("flop", "bytes").is_between(0, MAX_COUNT).fill_null(value=True).all()
    if typed.height != rows or typed["called"].null_count() or not all(typed.select(possible).row(0)):
        raise ValueError("work of other activities")
    return typed


def with_numbers(frame: pl.LazyFrame, new: Mapping[int, int]) -> pl.LazyFrame:
    """A table with its ranks renumbered; ranks that `new` lacks keep their numbers."""
    if not new:
        return frame
    return frame.with_columns(pl.col("rank").replace(new))


def typed(frame: pl.DataFrame | None, schema: Mapping[str, Any]) -> pl.DataFrame:
    """A table that was written with the columns of a schema, in their types; columns that it lacks are null.

    Raises:
        polars.exceptions.PolarsError: a column has values that its type does not hold.
    """
    if frame is None:
        return pl.DataFrame(schema=dict(schema))
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None).alias(name)).cast(dtype)
        for name, dtype in schema.items()  # a store of an earlier version lacks newer columns
    )


def _modules_of(folder: Path) -> tuple[HloModule, ...]:
    modules = read_table(folder, "modules")
    if modules is None:
        return ()
    parts: dict[str, Any] = {
        name: typed(read_table(folder, name), {**schema, "module": pl.Int32()}) for name, schema in _HLO.items()
    }
    return tuple(
        HloModule(**facts, **{name: f.filter(module=number).drop("module") for name, f in parts.items()})
        for number, facts in enumerate(modules.iter_rows(named=True))
    )


def memory_of(trace: Attributed, *, host: bool) -> int:
    """Approximate bytes that the tables of a part take in memory once they are read."""
    names = [*_TABLES, "gpu", "places"]
    kept = [name for name in names if host or name not in _OF_HOST]
    return sum(int(getattr(trace, name).estimated_size()) for name in kept)


def join_summaries(root: Path, entries: Sequence[Entry]) -> tuple[str, ...]:
    """Writes every summary of all ranks, in the order of the ranks, as a folder of files.

    Returns:
        names of the summaries.
    """
    target = root / SUMMARIES
    with atomic_folder(target) as folder:
        for first in range(0, len(entries), _AT_ONCE):
            _join(root, entries[first : first + _AT_ONCE], folder, f"{first:07}.parquet")
    return tuple(sorted(path.name for path in target.iterdir()))


def _join(root: Path, entries: Sequence[Entry], target: Path, name: str) -> None:
    """Writes one file of each summary that at least one of these parts has."""
    before, after = summary_file("*").split("*")
    files: dict[str, list[tuple[Path, Entry]]] = {}
    for entry in entries:
        for path in (root / RANKS / entry.folder).glob(summary_file("*")):
            summary = path.name.removeprefix(before).removesuffix(after)
            files.setdefault(summary, []).append((path, entry))
    for summary, files_of_summary in files.items():
        (target / summary).mkdir(exist_ok=True)
        plan = tables_within([path for path, _ in files_of_summary], root / RANKS)
        with reading(root / RANKS):
            if any(entry.renumbered for _, entry in files_of_summary):
                plans = (with_numbers(held_tables([path]), e.renumbered) for path, e in files_of_summary)
                joined = pl.concat(plans).collect()
            else:  # much faster
                joined = plan.collect()
        write_table(joined, target / summary / name)


def summary_folders(root: Path, names: Sequence[str]) -> list[Path]:
    """The folders of the joined summaries."""
    return [root / SUMMARIES / name for name in names]


def read_summary(root: Path, manifest: Manifest, name: str) -> pl.LazyFrame | None:
    """A summary of all ranks as a lazy frame; None if no rank has it.

    Raises:
        DamagedInput: the manifest names it, but it is missing or is not a table.
    """
    if name not in manifest.summaries:
        return None
    files = sorted((root / SUMMARIES / name).glob("*.parquet"))
    if not files:
        path = root / SUMMARIES / name
        raise DamagedInput(str(path), "is missing; run the same thence ingest again to write it")
    return tables_within(files, root)
