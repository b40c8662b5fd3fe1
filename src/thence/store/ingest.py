"""Writes a store: a part for every input that is new or has changed, then the joined summaries.

Workers run `thence.store.task`. This module does what concerns all inputs: it finds them, decides which parts are up
to date, and resolves ranks that two inputs hold. It reads no tables of ranks, so its memory hardly grows with their
number.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence.credentials import without_credentials
from thence.errors import DamagedInput, InputError, UsageError
from thence.model.formats import DESCRIPTION
from thence.readers.recording.sniffing import process_folders
from thence.readers.registry import files_of, holds_labels
from thence.readers.remote import is_folder, is_url, urls_within
from thence.readers.source import STANDARD_INPUT
from thence.store.joining import join_summaries, summary_folders
from thence.store.layout import (
    LOCK,
    MANIFEST,
    RANKS,
    Left,
    Manifest,
    Part,
    Settings,
    is_store,
    key_of,
    read_part,
    write_json,
)
from thence.store.lock import locked
from thence.store.parquet_check import check_parquet, remember
from thence.store.ranks import Found, numbered
from thence.store.source_state import SourceStates
from thence.store.task import Job, Outcome, ingest_one
from thence.store.workers import LocalWorkers, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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
        left = [{"source": one.source, "why": one.why, "text": one.reason} for one in manifest.left]
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
    """

    names: tuple[str, ...]
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    add: bool = False


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
            sources = replace(sources, notes=(*sources.notes, unguarded))
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
        found = urls_within(name, (DESCRIPTION,))
        return [file.rpartition("/")[0] for file in found] or [name]
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
    found = [
        Found(*parts[key]) for source in sources.names if (key := key_of(source)) in parts and source not in refused
    ]
    ranks = numbered(found, add=sources.add)
    remember(root / RANKS / o.folder for o in outcomes.values() if o.folder is not None)
    check_parquet(root / RANKS / entry.folder for entry in ranks.entries)
    summaries = join_summaries(root, ranks.entries)
    remember(summary_folders(root, summaries))
    manifest = Manifest(
        settings=settings,
        complete=True,
        entries=ranks.entries,
        left=(*sorted(left, key=lambda one: one.source), *ranks.left),
        summaries=summaries,
        notes=sources.notes,
        warnings=ranks.warnings,
    )
    write_json(root / MANIFEST, manifest)
    return manifest


def _utf8(text: str) -> str:
    """The text with escapes for what JSON cannot hold: names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
