"""The format of a store: its folders, files and descriptions.

    STORE/.thence-ingest                 locked by the ingest that writes the store; else empty
    STORE/manifest.json                  what is in the store; a folder with one is a store
    STORE/ranks/rank-00003-1f0c9a7e/     one input: rank (the lowest of several), and a key of where it came from
        part.json                        its source, ranks, times and sizes; written before the folder gets its name
        facts.json                       facts of the trace, and what makes it unsound
        activities.parquet               device activities and where each came from, one row each
        host.parquet ...                 the other tables; host ranges on request
        summary-NAME.parquet             summaries, a few rows each
    STORE/summaries/NAME/0000000.parquet  the summaries of all ranks, some hundred in a file

A folder of a rank appears under its name when it is complete, by one rename, so that whoever writes it may die at
any moment. `manifest.json` and the joined summaries are made from these folders, and can be made again.
Only this module knows the names; all of them are checked when a manifest is read.
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
from thence.store.files import content_of, is_there

if TYPE_CHECKING:
    import os

__all__ = [
    "BAD",
    "FACTS",
    "FORMAT",
    "LOCK",
    "MANIFEST",
    "MOST_RANKS",
    "PART",
    "RANKS",
    "SUMMARIES",
    "VERSION",
    "WHY_LEFT",
    "Entry",
    "Fingerprint",
    "Left",
    "Manifest",
    "Part",
    "Settings",
    "folder_name",
    "is_store",
    "key_of",
    "read_manifest",
    "read_part",
    "summary_file",
    "write_json",
]

FORMAT, VERSION = "thence.store", 1
MANIFEST, PART, FACTS = "manifest.json", "part.json", "facts.json"
RANKS, SUMMARIES = "ranks", "summaries"
LOCK = ".thence-ingest"
WHY_LEFT = ("unreadable", "lost", "duplicate", "other_time", "no_trace")
"""Why an input is not in a store. unreadable: it cannot be read. lost: whoever read it was killed. duplicate: it is
a rank that a newer input is. other_time: it says no rank, and was not recorded when the others were. no_trace: a file
of a directory that is something else."""
BAD = frozenset({"unreadable", "lost"})
"""Those of them by which a rank is missing."""
_FOLDER = re.compile(r"rank-\d{5,10}-[0-9a-f]{12}")
_SUMMARY = re.compile(r"[a-z_]{1,60}")
MOST_RANKS = 1 << 31
"""Tables number ranks by 32 bits."""
_MOST_BYTES = 1 << 30
"""Of a manifest: 100 bytes or so a rank."""

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How inputs are read; what was read in another way is read again.

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
    max_expansion: int
    thence: str


class Fingerprint(msgspec.Struct, frozen=True):
    """What tells whether an input is as it was when it was read.

    Attributes:
        bytes: of all its files, labels of CUDA graphs beside it included.
        changed: when the newest of them changed: ns of Unix time, or what a remote store says instead.
        files: how many there are.
    """

    bytes: int
    changed: str
    files: int = 1


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One input in the store.

    Attributes:
        source: where it was read from.
        fingerprint: of the source, before it was read.
        settings: how it was read.
        ranks: that it holds, as its tables number them.
        stated: whether it says which rank it is, itself or by its name.
        window: first start and last end of what it holds, Unix ns; None where the clock is not known.
        rows: of each table.
        memory_bytes: what its tables take in memory.
        cpu_seconds: that reading and writing took, all threads together.
        peak_bytes: most memory that the process which read it had ever used.
    """

    source: str
    fingerprint: Fingerprint
    settings: Settings
    ranks: tuple[int, ...]
    stated: bool
    window: tuple[int, int] | None
    rows: dict[str, int]
    memory_bytes: int
    cpu_seconds: float = 0.0
    peak_bytes: int = 0


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
    ranks: tuple[int, ...]
    written: tuple[int, ...]
    rows: int
    memory_bytes: int
    cpu_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def renumbered(self) -> dict[int, int]:
        """The number shown of each rank whose tables have another."""
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
        entries: by rank.
        left: inputs that are not in the store.
        summaries: names of the joined summaries.
        notes, warnings: on the inputs together, such as ranks that are missing.
    """

    format: str = FORMAT
    version: int = VERSION
    settings: Settings
    complete: bool = False
    entries: tuple[Entry, ...] = ()
    left: tuple[Left, ...] = ()
    summaries: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a store, or begins as one."""
    try:
        manifest = Path(path) / MANIFEST
        if not is_there(manifest):
            return False
        with manifest.open("rb") as file:
            return f'"{FORMAT}"'.encode() in file.read(200)
    except (DamagedInput, OSError, ValueError):
        return False


def key_of(source: str) -> str:
    """A short name for a source, the same in every run, whatever the password: 48 bits of SHA-256."""
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
        DamagedInput: it cannot be read, or names what is outside of the store.
    """
    manifest = _read(store / MANIFEST, Manifest)
    if manifest.format != FORMAT:
        raise InputError(
            str(store), f"is no store of thence: its manifest says {manifest.format!r}"
        )
    if manifest.version > VERSION:
        raise InputError(str(store), "was written by a later version of thence; update this one")
    _check_ranks(store, manifest)
    names = all(_FOLDER.fullmatch(entry.folder) for entry in manifest.entries)
    if not names or not all(map(_SUMMARY.fullmatch, manifest.summaries)):
        raise DamagedInput(str(store), f"{MANIFEST} names folders that no store has")
    return manifest


def _check_ranks(store: Path, manifest: Manifest) -> None:
    """Makes sure that every part has ranks, as many as its tables, and that no rank is there twice.

    Raises:
        DamagedInput: it is otherwise.
    """
    ranks = [rank for entry in manifest.entries for rank in entry.ranks]
    written = [rank for entry in manifest.entries for rank in entry.written]
    paired = all(
        0 < len(entry.ranks) == len(set(entry.written)) == len(entry.written)
        for entry in manifest.entries
    )
    numbers = all(0 <= rank < MOST_RANKS for rank in (*ranks, *written))
    if not paired or not numbers or len(set(ranks)) < len(ranks):
        raise DamagedInput(str(store), f"{MANIFEST} lists ranks that no job has")


def read_part(folder: Path) -> Part:
    """The description of a part.

    Raises:
        DamagedInput: it cannot be read.
    """
    return _read(folder / PART, Part)


def _read(path: Path, kind: type[_Struct]) -> _Struct:
    content = content_of(path, _MOST_BYTES)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedInput(str(path), f"is not as thence writes it ({error})") from error


def write_json(path: Path, value: object) -> None:
    """Replaces a file with a JSON document, all at once.

    Raises:
        OSError: it cannot be written there.
    """
    atomic_write(path, msgspec.json.format(msgspec.json.encode(value), indent=1))
