"""One input into one part of a store: the task of every worker, wherever it runs.

A task knows of no other, writes one folder, and gives it its name when it is complete. So it can be lost at any
moment, and run again, also while another run of it goes on.
"""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import polars as pl

from thence.analysis.soundness.check import check
from thence.atomic_files import temporary_path
from thence.attribution.attribute import attribute
from thence.credentials import without_credentials
from thence.errors import ThenceError, UnknownFormat
from thence.readers.expansion import Expansion
from thence.readers.registry import read
from thence.store.facts import Facts, encode_facts
from thence.store.files import write_table
from thence.store.layout import (
    FACTS,
    PART,
    RANKS,
    Fingerprint,
    Part,
    Settings,
    folder_name,
    key_of,
    summary_file,
    write_json,
)
from thence.store.parts import memory_of, write_tables
from thence.store.source_state import SourceStates
from thence.store.summaries import summaries_of

if TYPE_CHECKING:
    from thence.model.attributed import Attributed
    from thence.model.tables import Tables

__all__ = ["Job", "Outcome", "ingest_one"]


class Job(msgspec.Struct, frozen=True):
    """An input to be read.

    Attributes:
        source: its path or URL, the same on every machine.
        store: path of the store, the same on every machine.
        settings: how to read it.
    """

    source: str
    store: str
    settings: Settings


class Outcome(msgspec.Struct, frozen=True):
    """What became of a job.

    Attributes:
        source: of the job.
        folder: of the part that was written; None where the input could not be read.
        reason: why it could not; None where it could.
        why: the same as one of `thence.store.layout.WHY_LEFT`.
    """

    source: str
    folder: str | None = None
    reason: str | None = None
    why: str = "unreadable"


def ingest_one(job: Job) -> Outcome:
    """Reads, attributes and summarises one input, and writes its part.

    Never raises an error for what is wrong with the input: one bad rank stops no other.

    Raises:
        OSError: the store cannot be written.
    """
    began = time.process_time()
    try:
        was = SourceStates().of(job.source)
        tables = _read(job)
        trace = attribute(tables, job.settings.own)
    except UnknownFormat as error:
        return Outcome(job.source, reason=str(error), why="no_trace")
    except ThenceError as error:
        return Outcome(job.source, reason=str(error))
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - told; Polars' panics are no Exception
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Outcome(job.source, reason=f"{job.source}: an error that should not happen ({what})")
    if not trace.gpu.height and not trace.host.height:
        return Outcome(
            job.source, reason=f"{job.source}: holds neither device work nor host ranges"
        )
    return Outcome(job.source, folder=_written(job, trace, was, began))


def _read(job: Job) -> Tables:
    settings = job.settings
    expansion = Expansion(settings.max_expansion)
    tables = read([job.source], expansion=expansion, cores=1)
    if settings.hlo:
        from thence.readers.jax.hlo_dump import attach_hlo, hlo_dump_modules

        modules = [module for path in settings.hlo for module in hlo_dump_modules(path, expansion)]
        tables = attach_hlo(tables, modules)
    if tables.graph_labels:
        from thence.attribution.cuda_graphs.labelling import with_labels

        tables = with_labels(tables)
    return tables


def _written(job: Job, trace: Attributed, was: Fingerprint, began: float) -> str:
    """Writes a part; its folder."""
    soundness = check(trace)
    ranks = tuple(trace.ranks)
    parts = Path(job.store) / RANKS
    target = parts / folder_name(ranks[0], job.source)
    unfinished = temporary_path(target)
    unfinished.mkdir()
    try:
        write_tables(trace, unfinished, host=job.settings.host)
        facts = encode_facts(Facts(trace.meta, soundness, trace.own, trace.installed))
        (unfinished / FACTS).write_bytes(facts)
        for name, frame in summaries_of(trace, soundness).items():
            write_table(frame, unfinished / summary_file(name))
        part = Part(
            source=without_credentials(job.source),
            fingerprint=was,
            settings=job.settings,
            ranks=ranks,
            stated=trace.meta.ranks_stated,
            window=_window(trace),
            rows={name: getattr(trace, name).height for name in ("gpu", "host", "collectives")},
            memory_bytes=memory_of(trace, host=job.settings.host),
            cpu_seconds=time.process_time() - began,
            peak_bytes=_peak_bytes(),
        )
        write_json(unfinished / PART, part)
        _give_name(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for other in parts.glob(f"rank-*-{key_of(job.source)}"):
        if other != target:  # what was read from this source before, when it held another rank
            shutil.rmtree(other, ignore_errors=True)
    return target.name


def _give_name(unfinished: Path, target: Path) -> None:
    """Renames a complete folder; one that is there already gives way."""
    if target.exists():
        old = temporary_path(target)
        with suppress(OSError):  # another run of the same task may have been faster
            target.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        unfinished.rename(target)
    except OSError:
        if not (target / PART).exists():
            raise


def _window(trace: Attributed) -> tuple[int, int] | None:
    """First start and last end of the device work, else of host ranges, in Unix ns; None where that is not known."""
    zero = trace.meta.epoch_ns
    table = trace.gpu if trace.gpu.height else trace.host
    if zero is None:
        return None
    start, end = table.select(
        pl.col("start").min(), end=(pl.col("start") + pl.col("duration")).max()
    ).row(0)
    return zero + start, zero + end


def _peak_bytes() -> int:
    """Most memory that this process has used; 0 where the system does not say."""
    with suppress(
        OSError
    ):  # not getrusage: that begins with what the process which started this one used
        status = Path("/proc/self/status").read_text("ascii", "replace")
        found = re.search(r"VmHWM:\s*(\d+) kB", status)
        return int(found[1]) * 1024 if found else 0
    return 0
