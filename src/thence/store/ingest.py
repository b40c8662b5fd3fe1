"""Writes a store: a part for every input that is new or has changed, then the joined summaries.

Workers run `thence.store.task`. This module does what concerns all inputs: it takes the lock, so that only one ingest
at a time writes a store, finds the inputs, decides which parts are up to date, and assigns ranks to the parts, with
care for duplicates, gaps, and inputs that do not state their rank. It reads no tables of ranks, so its memory hardly
grows with their number.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from thence.credentials import without_credentials
from thence.errors import DamagedInput, InputError, UsageError
from thence.model.formats import DESCRIPTION
from thence.model.json_fields import Count, NotAsWritten, decoded
from thence.model.rank_numbers import rank_numbers
from thence.readers.recording.sniffing import process_folders
from thence.readers.registry import files_of, holds_labels
from thence.readers.remote import is_folder, is_url, urls_within
from thence.readers.source import STANDARD_INPUT
from thence.store.layout import (
    LOCK,
    MANIFEST,
    RANKS,
    Entry,
    Left,
    Manifest,
    Part,
    Settings,
    is_store,
    key_of,
    read_manifest,
    read_part,
    write_json,
)
from thence.store.parquet_check import check_parquet, remember, remembered
from thence.store.parts import join_summaries, summary_folders
from thence.store.source_state import SourceStates
from thence.store.task import Job, Outcome, ingest_one
from thence.store.workers import LocalWorkers, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MAX_BYTES = 500
_LISTED = 10
"""Most missing ranks that a warning lists."""


if sys.platform != "win32":
    import fcntl


class _Holder(msgspec.Struct):
    process: Count
    host: str


@contextmanager
def locked(store: Path) -> Iterator[str | None]:
    """Holds the lock of a store; the system releases it however the process ends.

    The lock file is emptied but never deleted: if it were, two processes could lock two inodes of the same name.

    Yields:
        A sentence where the store's file system has no locks, else None.

    Raises:
        UsageError: another process holds it, or the folder cannot be written to.
    """
    if sys.platform == "win32":
        yield f"{store}: there is no lock on Windows; make sure that no other ingest writes it at the same time"
        return
    path = store / LOCK
    try:
        # Opened for reading too, so that the error can name the holder.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UsageError(f"{store}: cannot be written to: {error.strerror}") from error
    try:
        unguarded = None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{store}: is being written by another thence ingest ({_holder(handle)}); wait until it has ended, "
                "or name another store"
            ) from None
        except OSError as error:
            unguarded = (
                f"{store}: its file system has no locks ({error.strerror}); make sure that no other ingest writes it "
                "at the same time"
            )
        holder = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, holder.encode(), 0)
        except OSError as error:
            raise UsageError(f"{store}: cannot be written to: {error.strerror}") from error
        try:
            yield unguarded
        finally:
            with suppress(OSError):  # what it names is read only while it is locked
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _holder(handle: int) -> str:
    """The process and host that a lock file names; of the host only letters, digits and ``.-_`` are kept."""
    try:
        holder = decoded(os.pread(handle, _MAX_BYTES, 0), _Holder)
    except (NotAsWritten, OSError):
        return "process unknown"
    host = "".join(sign for sign in holder.host if sign.isalnum() or sign in ".-_")
    return f"process {holder.process} on {host}"


class StoredPart(NamedTuple):
    """A part, and its folder."""

    folder: str
    part: Part


class Numbered(NamedTuple):
    """The parts of the job, sorted by rank; the inputs that are left out, with the reason; and warnings."""

    entries: tuple[Entry, ...]
    left: tuple[Left, ...]
    warnings: tuple[str, ...]


def numbered(parts: Sequence[StoredPart], *, add: bool = False) -> Numbered:
    """Assigns ranks to all parts, as `thence.model.rank_numbers` does for files.

    Of several parts that state the same rank, the newest is kept. A part that does not state its rank is left out if it
    was not recorded at the same time as the others.

    Args:
        parts: all parts, in the order of the inputs.
        add: keep all parts.
    """
    left = [] if add else list(_of_other_jobs(parts))
    names = {left_out.source for left_out in left}
    kept = [stored for stored in parts if stored.part.source not in names]
    numbers = rank_numbers([(stored.part.ranks, stored.part.stated) for stored in kept])
    warnings = [
        f"{stored.part.source}: does not state a rank that is free; shown as rank {', '.join(map(str, ranks))}"
        for stored, ranks in zip(kept, numbers, strict=True)
        if ranks != stored.part.ranks
    ]
    warnings += _gaps(sorted(rank for ranks in numbers for rank in ranks))
    chosen = sorted(zip(kept, numbers, strict=True), key=lambda pair: pair[1])
    return Numbered(tuple(_entry(stored, ranks) for stored, ranks in chosen), tuple(left), tuple(warnings))


def _of_other_jobs(parts: Sequence[StoredPart]) -> Iterator[Left]:
    """The parts that hold a rank of a newer one, or were recorded at another time than the others."""
    kept: list[Part] = []
    holder: dict[int, Part] = {}
    for part in (stored.part for stored in sorted(parts, key=_recency, reverse=True) if stored.part.stated):
        clash = next((rank for rank in part.ranks if rank in holder), None)
        if clash is None:
            holder.update(dict.fromkeys(part.ranks, part))
            kept.append(part)
            continue
        other = holder[clash].source
        text = f"{part.source}: holds rank {clash}, which the newer input {other} holds too"
        yield Left(part.source, text, "duplicate")
    for part in (stored.part for stored in sorted(parts, key=lambda s: s.part.source) if not stored.part.stated):
        away = next((other for other in kept if _separate(part, other)), None)
        if away is None:
            kept.append(part)
            continue
        text = f"{part.source}: does not state its rank, and was not recorded at the same time as {away.source}"
        yield Left(part.source, text, "other_time")


def _recency(stored: StoredPart) -> tuple[int, str]:
    return (stored.part.window[1] if stored.part.window else 0, stored.part.source)


def _separate(first: Part, second: Part) -> bool:
    """Whether two windows are known and do not overlap."""
    if first.window is None or second.window is None:
        return False
    return first.window[1] < second.window[0] or second.window[1] < first.window[0]


def _gaps(ranks: Sequence[int]) -> list[str]:
    """A warning about the ranks below the highest one that no part holds."""
    if not ranks:
        return []
    count = ranks[-1] + 1 - len(ranks)
    if not count:
        return []
    # A file can claim to be rank two billion, so missing ranks are only generated as far as they are listed.
    between = (range(a + 1, b) for a, b in itertools.pairwise((-1, *ranks)))
    missing = itertools.islice(itertools.chain.from_iterable(between), _LISTED)
    listed = ", ".join(map(str, missing)) + (" ..." if count > _LISTED else "")
    return [f"of the ranks 0 to {ranks[-1]:,}, {count:,} {'is' if count == 1 else 'are'} missing: {listed}"]


def _entry(stored: StoredPart, ranks: tuple[int, ...]) -> Entry:
    part = stored.part
    return Entry(
        folder=stored.folder,
        source=part.source,
        ranks=ranks,
        written=part.ranks,
        rows=part.rows.get("gpu", 0),
        memory_bytes=part.memory_bytes,
        cpu_seconds=part.cpu_seconds,
        peak_bytes=part.peak_bytes,
    )


@dataclass(frozen=True)
class Ingested:
    """The result of an ingest.

    Attributes:
        manifest: of the store.
        written: inputs that were read now.
        kept: inputs that were in the store already, unchanged.
    """

    manifest: Manifest
    written: int
    kept: int

    def to_json(self) -> dict[str, Any]:
        """The result as the command line prints it with ``--format json``."""
        manifest = self.manifest
        ranks = [
            {"rank": rank, "source": entry.source, "activities": entry.rows,
             "cpu_s": entry.cpu_seconds, "peak_bytes": entry.peak_bytes}
            for entry in manifest.entries
            for rank in entry.ranks
        ]  # fmt: skip
        left = [{"source": input_.source, "why": input_.why, "text": input_.reason} for input_ in manifest.left]
        return {
            "ranks": ranks,
            "written": self.written,
            "kept": self.kept,
            "left_out": left,
            "notes": list(manifest.notes),
            "warnings": list(manifest.warnings),
        }


@dataclass(frozen=True)
class Sources:
    """The inputs of a store.

    Attributes:
        names: inputs of single processes, by names that are the same on every machine.
        given: what the user named. A name that is not among them was found in a directory.
        notes: on what was left out of directories, such as other runs.
        add: whether several inputs that hold the same rank become ranks of their own.
        warnings: of the store itself, such as that nothing guards it from other processes.
    """

    names: tuple[str, ...]
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    add: bool = False
    warnings: tuple[str, ...] = ()


def ingest(
    sources: Sources,
    store: str | os.PathLike[str],
    settings: Settings,
    *,
    workers: Workers | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Ingested:
    """Writes a store, or brings one up to date.

    Each input is one job of a worker. If an ingest was killed, the same call resumes it: it reads only what is not in
    the store yet. An input that cannot be read is left out, with the reason in the manifest.

    Args:
        sources: from `sources_of`; recordings may still be growing.
        store: folder to write; created. Workers on other machines must see it under the same path.
        settings: how to read; inputs that were read with other settings are read again.
        workers: run the jobs; None: processes of this machine.
        progress: called with the number of inputs that are done, and the number of all inputs.

    Raises:
        InputError: none of the inputs could be read.
        UsageError: the folder holds other files, cannot be written to, or is a store that another process is writing.
    """
    root = Path(os.path.abspath(store))  # noqa: PTH100 - the same name on every machine: no links are followed
    _make(root)
    with locked(root) as unguarded:
        if unguarded is not None:
            sources = replace(sources, warnings=(unguarded,))
        return _ingested(sources, root, settings, workers or LocalWorkers(), progress)


def _ingested(
    sources: Sources, root: Path, settings: Settings, workers: Workers, progress: Callable[[int, int], None]
) -> Ingested:
    """As `ingest`, while the lock of the store is held."""
    _prepare(root, settings)
    known = _parts(root, settings)
    states = SourceStates()
    stale = [source for source in sources.names if not _is_current(known.get(key_of(source)), source, states)]
    kept, count = len(sources.names) - len(stale), len(sources.names)
    progress(kept, count)
    jobs = [Job(source, str(root), settings) for source in stale]
    outcomes: dict[str, Outcome] = {}
    for outcome in workers.run(ingest_one, jobs):
        outcomes[outcome.source] = outcome
        progress(kept + len(outcomes), count)
    manifest = _joined(root, settings, sources, outcomes)
    if not manifest.entries:
        reasons = "; ".join(left.reason for left in manifest.left[:3])
        raise InputError(", ".join(sources.names[:3]), f"nothing could be read: {reasons}")
    written = sum(outcome.folder is not None for outcome in outcomes.values())
    return Ingested(manifest, written, kept)


def sources_of(inputs: Sequence[str], run: str | None = None, *, add: bool = False) -> Sources:
    """The inputs of single processes that files, directories, globs and URLs name.

    Args:
        inputs: as the user names them.
        run: of directories that hold several runs, the one to read; None: the newest.
        add: keep all inputs that hold the same rank, each as a rank of its own.

    Raises:
        InputError: nothing was found for an input, it is standard input, or all inputs are labels of CUDA graphs.
        UsageError: a run is named and no input is a directory.
    """
    if STANDARD_INPUT in inputs:
        raise InputError(
            STANDARD_INPUT, "cannot be ingested: a store is made from files, as ingest may read them again"
        )
    files, notes = files_of(inputs, run, add=add)
    sources = [process for file in files for process in _processes(file)]
    names = dict.fromkeys(map(_everywhere, sources))
    # Labels of CUDA graphs are no inputs: the reader of a trace finds those in its folder.
    kept = [name for name in names if is_url(name) or not Path(name).is_file() or not holds_labels(name)]
    if not kept:
        raise InputError(", ".join(inputs), "holds labels of CUDA graphs, but no trace")
    given = frozenset(map(_everywhere, inputs))
    return Sources(tuple(kept), given, tuple(notes), add)


def _everywhere(name: str) -> str:
    """The absolute path of an input, or its URL: the same name on every machine."""
    return name if is_url(name) else os.path.abspath(name)  # noqa: PTH100 - links are not followed


def _processes(name: str) -> list[str]:
    """The recordings of single processes in a recording of a job; any other input as it is."""
    if is_url(name):
        if not is_folder(name):
            return [name]
        descriptions = urls_within(name, (DESCRIPTION,))
        return [file.rpartition("/")[0] for file in descriptions] or [name]
    if not Path(name).is_dir():
        return [name]
    return [str(folder) for folder in process_folders(Path(name))] or [name]


def _make(root: Path) -> None:
    """Creates the folder of a store if it does not exist; refuses a file, or a folder that holds other files."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root}: is a file; a store is a folder")
    root.mkdir(parents=True, exist_ok=True)
    if not (root / LOCK).exists():  # else another ingest may be about to begin the store
        _check_others(root)


def _check_others(root: Path) -> None:
    if not is_store(root) and any(path.name != LOCK for path in root.iterdir()):
        raise UsageError(f"{root}: holds other files; choose another folder for the store")


def _prepare(root: Path, settings: Settings) -> None:
    """Creates the folders of a store and, if it is new, a manifest that is not complete; removes unfinished parts."""
    _check_others(root)
    if not is_store(root):
        write_json(root / MANIFEST, Manifest(settings=settings))
    (root / RANKS).mkdir(exist_ok=True)
    for unfinished in (root / RANKS).glob(".*"):  # of a run that was killed
        shutil.rmtree(unfinished, ignore_errors=True)


def _parts(root: Path, settings: Settings) -> dict[str, tuple[str, Part]]:
    """Folder and description of every part that was read with these settings, by its key."""
    parts = {}
    for folder in sorted((root / RANKS).iterdir()):
        try:
            part = read_part(folder)
        except DamagedInput:
            continue  # it is read again
        if part.settings == settings:
            parts[key_of(part.source)] = (folder.name, part)
    return parts


def _is_current(part: tuple[str, Part] | None, source: str, states: SourceStates) -> bool:
    if part is None:
        return False
    try:
        return part[1].fingerprint == states.of(source)
    except InputError:
        return False  # the job that reads it reports what is wrong


def _joined(root: Path, settings: Settings, sources: Sources, outcomes: dict[str, Outcome]) -> Manifest:
    """Writes the joined summaries and the manifest."""
    parts = _parts(root, settings)
    left = [
        Left(
            _utf8(without_credentials(o.source)),
            _utf8(without_credentials(o.reason)),
            "unreadable" if o.source in sources.given and o.why == "no_trace" else o.why,
        )
        for o in outcomes.values()
        if o.reason is not None
    ]
    refused = {o.source for o in outcomes.values() if o.reason is not None}
    stored = [
        StoredPart(*parts[key])
        for source in sources.names
        if (key := key_of(source)) in parts and source not in refused
    ]
    ranks = numbered(stored, add=sources.add)
    manifest = Manifest(
        settings=settings,
        complete=True,
        entries=ranks.entries,
        left=(*sorted(left, key=lambda left_out: left_out.source), *ranks.left),
        notes=sources.notes,
        warnings=(*sources.warnings, *ranks.warnings),
    )
    if (as_before := _unchanged(root, manifest, outcomes)) is not None:
        return as_before
    remember(root / RANKS / o.folder for o in outcomes.values() if o.folder is not None)
    check_parquet(root / RANKS / entry.folder for entry in ranks.entries)
    summaries = join_summaries(root, ranks.entries)
    remember(summary_folders(root, summaries))
    manifest = msgspec.structs.replace(manifest, summaries=summaries)
    write_json(root / MANIFEST, manifest)
    return manifest


def _unchanged(root: Path, manifest: Manifest, outcomes: dict[str, Outcome]) -> Manifest | None:
    """The manifest of the store if it says the same as a new one and the joined summaries are as they were written.

    Args:
        manifest: the new one, without summaries.
        outcomes: of the inputs that were read now.
    """
    if any(outcome.folder is not None for outcome in outcomes.values()):
        return None
    try:
        before = read_manifest(root)
    except (DamagedInput, InputError):
        return None
    same = msgspec.structs.replace(manifest, summaries=before.summaries) == before
    return before if same and remembered(summary_folders(root, before.summaries)) else None


def _utf8(text: str) -> str:
    """The text with escapes for what JSON cannot hold: names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
