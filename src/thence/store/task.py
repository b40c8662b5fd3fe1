"""The task of every worker: reads one input and writes it as one part of a store.

A task is independent of other tasks. It writes one folder, which gets its final name when it is complete. So a task
can be killed at any time and run again, even while another run of the same task is going on.
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
from thence.atomic_files import atomic_write, rename, temporary_path
from thence.attribution.attribute import attribute
from thence.credentials import without_credentials
from thence.errors import ThenceError, UnknownFormat
from thence.parquet_files import write_table
from thence.readers.expansion import Expansion
from thence.readers.registry import read
from thence.store.facts import Facts, encode_facts
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
    """The result of a job.

    Attributes:
        source: of the job.
        folder: of the part that was written; None if the input could not be read.
        reason: a sentence on why the input could not be read; None if it could.
        why: the reason as one of `thence.store.layout.WHY_LEFT`.
    """

    source: str
    folder: str | None = None
    reason: str | None = None
    why: str = "unreadable"


def ingest_one(job: Job) -> Outcome:
    """Reads, attributes and summarises one input, and writes its part.

    An error in the input is not raised but becomes the outcome, so that one bad rank does not stop the others.

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
    except (Exception, pl.exceptions.PanicException) as error:  # noqa: BLE001 - Polars' panics are no Exception
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Outcome(job.source, reason=f"{job.source}: an error that should not happen ({what})")
    if not trace.gpu.height and not trace.host.height:
        return Outcome(job.source, reason=f"{job.source}: holds neither device work nor host ranges")
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
    """Writes a part and returns the name of its folder."""
    soundness = check(trace)
    ranks = tuple(trace.ranks)
    parts = Path(job.store) / RANKS
    target = parts / folder_name(ranks[0], job.source)
    unfinished = temporary_path(target)
    unfinished.mkdir()
    try:
        write_tables(trace, unfinished, host=job.settings.host)
        facts = encode_facts(Facts(trace.meta, soundness, trace.own, trace.installed))
        atomic_write(unfinished / FACTS, facts)
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
        if other != target:  # an earlier part of this source, from when it held another rank
            shutil.rmtree(other, ignore_errors=True)
    return target.name


def _give_name(unfinished: Path, target: Path) -> None:
    """Renames a complete folder to its final name; an existing folder of this name is removed first."""
    if target.exists():
        old = temporary_path(target)
        with suppress(OSError):  # another run of the same task may have been faster
            rename(target, old)
        shutil.rmtree(old, ignore_errors=True)
    try:
        rename(unfinished, target)
    except OSError:
        if not (target / PART).exists():
            raise


def _window(trace: Attributed) -> tuple[int, int] | None:
    """First start and last end of the device work, else of host ranges, in Unix ns; None if the epoch is unknown."""
    zero = trace.meta.epoch_ns
    table = trace.gpu if trace.gpu.height else trace.host
    if zero is None:
        return None
    start, end = table.select(pl.col("start").min(), end=(pl.col("start") + pl.col("duration")).max()).row(0)
    return zero + start, zero + end


def _peak_bytes() -> int:
    """Peak memory of this process in bytes; 0 where the system does not report it."""
    with suppress(OSError):  # not getrusage, whose peak starts at the memory of the parent process
        status = Path("/proc/self/status").read_text("ascii", "replace")
        peak = re.search(r"VmHWM:\s*(\d+) kB", status)  # the high-water mark of resident memory
        return int(peak[1]) * 1024 if peak else 0
    return 0
