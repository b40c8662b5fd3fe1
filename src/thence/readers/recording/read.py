"""Reads a recording into the tables of a trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import polars as pl

from thence.errors import DamagedInput, InputError
from thence.model.formats import ACTIVITIES, LABELS_FILE
from thence.model.joined_tables import concat
from thence.model.losses import says_lost
from thence.model.tables import STEP_TIMES, THREADS, Device, Meta, Tables
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.label_files import read_labels
from thence.readers.recording.activities import activities
from thence.readers.recording.host import described_collectives, host_ranges
from thence.readers.recording.parts import Description, Folder
from thence.readers.recording.sniffing import NAME, process_folders
from thence.readers.recording.xla import with_xla
from thence.units import several

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.graph_labels import GraphLabels


def read(name: str, progress: Callable[[int], None], expansion: Expansion = DEFAULT) -> Tables:
    """The tables of a recording: of one process, or of every process of a job.

    Args:
        name: path of the folder.
        progress: called with the bytes read so far.
        expansion: how much larger than their stored size its tables may be.

    Raises:
        DamagedInput: nothing of it can be read.
    """
    parts = []
    done = 0
    for path in process_folders(Path(name)):
        folder = Folder(path, expansion)
        parts.append(_tables(folder))
        done += folder.bytes
        progress(done)
    useful = [part for part in parts if part.gpu.height or part.host.height]
    if not useful:
        reasons = "; ".join(dict.fromkeys(w for part in parts for w in part.meta.warnings))
        raise DamagedInput(name, f"nothing of the recording can be read: {reasons or 'it is empty'}")
    useful.sort(key=lambda part: part.ranks[0])
    return concat(useful).with_warnings(_disjoint_runs_warning(name, useful))


def _tables(folder: Folder) -> Tables:
    about = folder.description
    rank = about.rank or 0
    table = folder.table("names").drop_nulls("number").unique("number", keep="first")
    names = table.select("number", text=pl.coalesce("demangled", "name").cast(pl.Categorical()))
    zero = about.began_ns or 0
    gpu, queued = activities(folder, names, zero, rank)
    host = host_ranges(folder, names, gpu, queued, zero, rank)
    tracks = host.table.select("rank", "process", "thread").unique(maintain_order=True)
    _recorder_losses(folder, gpu)
    tables = Tables(
        gpu=gpu,
        host=host.table,
        collectives=described_collectives(host, folder.table("collectives"), names),
        threads=THREADS.frame(
            tracks.with_columns(
                name=pl.col("thread").cast(pl.String).replace_strict(about.threads, default=None)
            ).to_dict()
        ),
        graph_labels=_labels(folder),
        step_times=_step_times(folder, zero, rank),
    )
    meta = Meta(
        inputs=(str(folder.path),),
        formats=(NAME,),
        epoch_ns=zero,
        facts=(_facts(folder),),
        devices=tuple(Device(rank=rank, **msgspec.structs.asdict(device)) for device in about.devices),
        warnings=tuple(f"{folder.path.name}: {text}" for text in (*folder.warnings, *_recorder_warnings(folder))),
        losses=tuple(folder.losses),
        ranks_stated=about.rank is not None,
    )
    tables, warnings = with_xla(dataclasses.replace(tables, meta=meta), host.domain, folder.path)
    return tables.with_warnings(f"{folder.path.name}: {text}" for text in warnings)


def _step_times(folder: Folder, zero_ns: int, rank: int) -> pl.DataFrame:
    steps = folder.table("steps").sort("start").drop_nulls()
    since = int(folder.description.plain_steps.get("since_ns") or 0)
    times = steps.with_columns(
        pl.col("start") - zero_ns,
        pl.col("duration").clip(0),
        pl.col("recorded").cast(pl.Boolean),
        counted=pl.col("counted").cast(pl.Boolean) & (pl.col("start") >= since),
        rank=pl.lit(rank),
    )
    return STEP_TIMES.frame(times.to_dict())


def _labels(folder: Folder) -> tuple[GraphLabels, ...]:
    path = folder.path / LABELS_FILE
    if not path.is_file():
        return ()
    try:
        return (read_labels(path, folder.expansion),)
    except InputError as error:
        folder.warnings.append(f"the labels of its CUDA graphs cannot be read: {error}")
        return ()


def _facts(folder: Folder) -> dict[str, Any]:
    about = folder.description
    return {
        "producer": "thence record",
        "thence": about.thence,
        "host": about.host,
        "pid": about.pid,
        "program": about.program,
        "python": about.python,
        "driver_cuda": about.driver_cuda,
        "versions": about.versions,
        "xla_flags": about.xla_flags,
        "finished": about.finished,
        "calls": about.calls,
        "plain_steps": about.plain_steps,
    }


def _recorder_losses(folder: Folder, gpu: pl.DataFrame) -> None:
    """Notes the losses that the recorder stated in the description of the recording."""
    about = folder.description
    for text in filter(says_lost, about.warnings):
        folder.lose("dropped", 1, f"while recording: {text}")
    if not about.finished:
        folder.lose("cut", 1, _cut(about, gpu))
    if about.dropped:
        folder.lose(
            "dropped",
            about.dropped,
            f"the recorder dropped {several(about.dropped, 'record')}: they came faster than it could write them",
        )
    for table, rows in about.lost.items():
        folder.lose("dropped", rows, f"{several(rows, 'row')} of the table {table} could not be written")


def _recorder_warnings(folder: Folder) -> list[str]:
    """The recorder's warnings in the description that are not about losses."""
    about = folder.description
    warnings = [f"while recording: {text}" for text in about.warnings if not says_lost(text)]
    warnings += [
        f"skipped {several(count, 'record')} of CUPTI's kind {kind}, which thence does not know"
        for kind, count in about.unknown_kinds.items()
    ]
    return warnings


def _cut(about: Description, gpu: pl.DataFrame) -> str:
    """The text for a recording that its process did not finish; times in `gpu` count from ``began_ns``."""
    text = "the recording was cut: the process ended before it could finish the recording; the last records are missing"
    if about.written_ns is None or about.began_ns is None:
        return text
    if about.version > 2 and not any(about.counts.values()):
        return "the recording was cut: the process ended before anything was written: all records are missing"
    if about.flush_seconds is None:
        return f"{text}: while XLA launches graphs, only full buffers are written, and the last buffers were not full"
    seconds = (about.written_ns - about.began_ns) / 1e9
    lost = f"{text}: work later than {seconds:.1f} s after the recording began was not written"
    if not 0 < about.flush_seconds < 1e6:
        return lost
    lost += f", normally at most {about.flush_seconds:.1g} s of it"
    rate = sum(about.counts.get(table, 0) for table in ACTIVITIES) / max(seconds, 1e-3)
    lately = gpu.filter(pl.col("start") / 1e9 > seconds - about.flush_seconds).height
    count = max(round(rate * about.flush_seconds), lately)
    return f"{lost}, about {several(count, 'activity')} at the rate until then"


def _disjoint_runs_warning(name: str, parts: list[Tables]) -> list[str]:
    """A warning if the device work of some processes ended before that of the others began."""
    spans = sorted(
        (int(zero + table["start"].min()), int(zero + (table["start"] + table["duration"]).max()))  # type: ignore[operator]
        for part in parts
        for zero, table in [(part.meta.epoch_ns or 0, part.gpu)]
        if table.height
    )
    until = spans[0][1] if spans else 0
    for start, end in spans:
        if start > until:
            return [f"{name}: holds recordings of different times, perhaps of several runs of a program"]
        until = max(until, end)
    return []
