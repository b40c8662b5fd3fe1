"""The format of a store: its folders, files and descriptions.

    STORE/.thence-ingest                  locked by the ingest that writes the store; else empty
    STORE/manifest.json                   what is in the store; a folder with one is a store
    STORE/ranks/rank-00003-1f0c9a7e52b4/  one input: rank (the lowest of several), and a key of its source
        part.json                         its source, ranks, times and sizes; written before the folder gets its name
        facts.json                        facts of the trace, and its soundness
        activities.parquet                device activities and their places, one row for each activity
        host.parquet ...                  the other tables; host ranges on request
        summary-NAME.parquet              summaries, a few rows each
    STORE/summaries/NAME/0000000.parquet  the summaries of all ranks, some hundred ranks in a file

The folder of an input gets its name by one rename when it is complete, so the process that writes it can be killed at
any time. `manifest.json` and the joined summaries are made from these folders, and can be made again.
Only this module defines the names; all of them are checked when a manifest is read.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from thence.atomic_files import atomic_write
from thence.credentials import without_credentials
from thence.errors import DamagedInput, InputError
from thence.model.json_fields import Count, JsonInt64, NotAsWritten, Rank, decoded
from thence.store.files import content_of, is_there

if TYPE_CHECKING:
    import os


FORMAT, VERSION = "thence.store", 1
MANIFEST, PART, FACTS = "manifest.json", "part.json", "facts.json"
RANKS, SUMMARIES = "ranks", "summaries"
LOCK = ".thence-ingest"
WHY_LEFT = ("unreadable", "lost", "duplicate", "other_time", "no_trace")
"""Why an input is not in a store. unreadable: it cannot be read. lost: the process that read it was killed. duplicate:
it holds a rank that a newer input holds too. other_time: it does not state its rank, and was not recorded at the same
time as the others. no_trace: it was found in a directory, and is not a trace."""
BAD = frozenset({"unreadable", "lost"})
"""The reasons that mean that a rank is missing from the store."""
_FOLDER = re.compile(r"rank-\d{5,10}-[0-9a-f]{12}")
_SUMMARY = re.compile(r"[a-z_]{1,60}")
_MAX_BYTES = 1 << 30
"""Most bytes of a description; a manifest has some 100 bytes for each rank."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How inputs are read; inputs that were read with other settings are read again.

    Attributes:
        own: what else counts as the user's own code, as in `thence.open`.
        hlo: HLO dumps, as in `thence.open`.
        host: whether host ranges are kept.
        max_expansion: most decompressed bytes for each stored byte of a compressed input.
        thence: version of thence.
    """

    own: tuple[str, ...] = ()
    hlo: tuple[str, ...] = ()
    host: bool = False
    max_expansion: Count
    thence: str


class Fingerprint(msgspec.Struct, frozen=True):
    """The state of an input, which shows whether it has changed since it was read.

    Attributes:
        bytes: size of all its files, including the labels of CUDA graphs in its folder.
        changed: time at which the newest of them changed: Unix time in ns, or what a remote store reports instead.
        files: number of these files.
    """

    bytes: Count
    changed: str
    files: Count = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One input in the store.

    Attributes:
        source: where it was read from.
        fingerprint: of the source, before it was read.
        settings: how it was read.
        ranks: the ranks that it holds, as its tables number them.
        stated: whether it states its rank, in its content or by its name.
        window: first start and last end of its device work, else of its host ranges, Unix ns; None if unknown.
        rows: number of rows by table.
        memory_bytes: memory that its tables take.
        cpu_seconds: CPU time of reading and writing it, all threads together.
        peak_bytes: peak memory of the process that read it, which may have read others before.
    """

    source: str
    fingerprint: Fingerprint
    settings: Settings
    ranks: tuple[Rank, ...]
    stated: bool
    window: tuple[JsonInt64, JsonInt64] | None
    rows: dict[str, Count]
    memory_bytes: Count
    cpu_seconds: float = 0.0
    peak_bytes: Count = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A part as the manifest lists it.

    Attributes:
        folder: in `RANKS`.
        source: as in `Part`.
        ranks: as they are shown.
        written: the same ranks as the tables number them.
        rows: device activities.
        memory_bytes: as in `Part`.
        cpu_seconds: as in `Part`.
        peak_bytes: as in `Part`.
    """

    folder: str
    source: str
    ranks: tuple[Rank, ...]
    written: tuple[Rank, ...]
    rows: Count
    memory_bytes: Count
    cpu_seconds: float = 0.0
    peak_bytes: Count = 0

    @property
    def renumbered(self) -> dict[int, int]:
        """For ranks that are shown under other numbers: number in the tables to number shown."""
        pairs = zip(self.written, self.ranks, strict=True)
        return {written: shown for written, shown in pairs if written != shown}


class Left(msgspec.Struct, frozen=True):
    """An input that is not in the store.

    Attributes:
        source: where it is.
        reason: a sentence.
        why: of `WHY_LEFT`.
    """

    source: str
    reason: str
    why: str = "unreadable"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a store.

    Attributes:
        format, version: `FORMAT`, `VERSION`.
        settings: how inputs were read.
        complete: whether every input had been tried when this was written.
        entries: sorted by rank.
        left: inputs that are not in the store.
        summaries: names of the joined summaries.
        notes: on what was left out of directories.
        warnings: on the inputs together, such as ranks that are missing.
    """

    format: str = FORMAT
    version: Count = VERSION
    settings: Settings
    complete: bool = False
    entries: tuple[Entry, ...] = ()
    left: tuple[Left, ...] = ()
    summaries: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder whose manifest begins like that of a store."""
    try:
        manifest = Path(path) / MANIFEST
        if not is_there(manifest):
            return False
        with manifest.open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(200)
    except (DamagedInput, OSError, ValueError):
        return False


def key_of(source: str) -> str:
    """A short name for a source, 48 bits of SHA-256: the same in every run, and independent of passwords."""
    name = without_credentials(source)
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def folder_name(rank: int, source: str) -> str:
    """The folder of a part."""
    return f"rank-{rank:05}-{key_of(source)}"


def summary_file(name: str) -> str:
    """The file of a summary within a part."""
    return f"summary-{name}.parquet"


def read_manifest(store: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        InputError: there is none, or it was written by a later version.
        DamagedInput: it cannot be read, or lists folders or ranks that no store has.
    """
    manifest = _read(store / MANIFEST, Manifest)
    if manifest.format != FORMAT:
        raise InputError(str(store), f"is not a thence store: its manifest has the format {manifest.format!r}")
    if manifest.version > VERSION:
        raise InputError(str(store), "was written by a later version of thence; update this one")
    _check_ranks(store, manifest)
    names = all(_FOLDER.fullmatch(entry.folder) for entry in manifest.entries)
    if not names or not all(map(_SUMMARY.fullmatch, manifest.summaries)):
        raise DamagedInput(str(store), f"{MANIFEST} names folders that cannot be in a store")
    return manifest


def _check_ranks(store: Path, manifest: Manifest) -> None:
    """Checks that every part has ranks, as many as its tables have, and that no rank is listed twice.

    Raises:
        DamagedInput: one of these does not hold.
    """
    ranks = [rank for entry in manifest.entries for rank in entry.ranks]
    paired = all(0 < len(entry.ranks) == len(set(entry.written)) == len(entry.written) for entry in manifest.entries)
    if not paired or len(set(ranks)) < len(ranks):
        raise DamagedInput(str(store), f"{MANIFEST} lists ranks that are listed twice or without a part")


def read_part(folder: Path) -> Part:
    """The description of a part.

    Raises:
        DamagedInput: it cannot be read.
    """
    return _read(folder / PART, Part)


def _read(path: Path, kind: type[_Struct]) -> _Struct:
    content = content_of(path, _MAX_BYTES)
    try:
        return decoded(content, kind)
    except NotAsWritten as error:
        raise DamagedInput(str(path), f"does not have the structure that thence writes ({error})") from error


def write_json(path: Path, value: object) -> None:
    """Replaces a file with a JSON document by an atomic write.

    Raises:
        OSError: it cannot be written there.
    """
    atomic_write(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
