"""Chooses the reader of each input by its content, imports it, and reads all inputs as one set of tables."""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from thence.errors import DamagedInput, InputError, UnknownFormat, UsageError
from thence.model.joined_tables import concat
from thence.readers import label_files as graph_labels
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.plausible import plausible
from thence.readers.remote import fetched, is_folder, is_url
from thence.readers.runs import Read, in_newest_run, in_run, one_job
from thence.readers.source import STANDARD_INPUT, Source, check_regular, expand
from thence.readers.torch_annotations import is_annotation_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from thence.model.tables import Tables

__all__ = [
    "ArchiveFormat",
    "ArchiveReader",
    "FileFormat",
    "FileReader",
    "files_of",
    "holds_labels",
    "read",
]

_FILES = {
    "thence.readers.kineto.sniffing": "thence.readers.kineto.read",
    "thence.readers.label_files": "thence.readers.label_files",
    "thence.readers.jax.sniffing": "thence.readers.jax.xplane",
    "thence.readers.nsight.sqlite": "thence.readers.nsight.sqlite",
    "thence.readers.nsight.csv": "thence.readers.nsight.csv",
}
"""Of each format that is read from one file as a stream, in the order in which they are tried: the module that tells
its files, which imports little, and the one that reads them, imported for a file that is of it."""

_ARCHIVES = {
    "thence.readers.recording.sniffing": "thence.readers.recording.read",
    "thence.readers.nsys_jax.archive": "thence.readers.nsys_jax.read",
    "thence.readers.nsight.export": "thence.readers.nsight.export",
    "thence.readers.nsight.folder": "thence.readers.nsight.folder",
}
"""The same of those that are read from a path: a folder of several files, a zip file or the folder it was unpacked to,
or a file that another program has to convert first."""


_REPORTS = (".nsys-rep", ".qdrep")
_ON_DISK = (".zip", ".sqlite", ".sqlite.gz", ".xplane.pb")
"""Endings of files whose readers look at more than a stream: at pages, or at files beside them."""


class FileFormat(Protocol):
    """Interface of the modules that tell the files in `_FILES`."""

    NAME: str
    """Of the format, for people."""
    PATTERNS: tuple[str, ...]
    """Globs that its files match within a directory."""

    def sniff(self, head: bytes) -> bool:
        """Whether a file may be of this format, from its first bytes (decompressed)."""


class FileReader(Protocol):
    """Interface of the modules that read the files in `_FILES`."""

    def read(self, source: Source, progress: Callable[[int], None]) -> Tables:
        """The tables of one file."""


class ArchiveFormat(Protocol):
    """Interface of the modules that tell the archives in `_ARCHIVES`."""

    NAME: str
    PATTERNS: tuple[str, ...]

    def sniff_archive(self, path: str) -> bool:
        """Whether a file or directory is such an archive."""


class ArchiveReader(Protocol):
    """Interface of the modules that read the archives in `_ARCHIVES`."""

    def read(self, name: str, progress: Callable[[int], None], expansion: Expansion) -> Tables:
        """The tables of one archive, whose members may be larger than they are stored by ``expansion``."""


def _file_formats() -> Iterable[FileFormat]:
    return (cast("FileFormat", importlib.import_module(name)) for name in _FILES)


def _archive_formats() -> Iterable[ArchiveFormat]:
    return (cast("ArchiveFormat", importlib.import_module(name)) for name in _ARCHIVES)


def _file_reader(head: bytes) -> FileReader | None:
    """What reads a file that begins like this; None where it is of no format."""
    for name, reader in _FILES.items():
        if cast("FileFormat", importlib.import_module(name)).sniff(head):
            return cast("FileReader", importlib.import_module(reader))
    return None


def _archive_reader(path: str) -> ArchiveReader | None:
    """What reads an archive; None where it is of no format."""
    for name, reader in _ARCHIVES.items():
        if cast("ArchiveFormat", importlib.import_module(name)).sniff_archive(path):
            return cast("ArchiveReader", importlib.import_module(reader))
    return None


def read(
    inputs: Iterable[str | os.PathLike[str]],
    progress: Callable[[str, int, int], None] = lambda _name, _done, _size: None,
    *,
    run: str | None = None,
    add: bool = False,
    expansion: Expansion = DEFAULT,
    cores: int | None = None,
) -> Tables:
    """All inputs as one set of tables, with the labels of CUDA graphs found in the same folders.

    Args:
        inputs: files, directories, globs, URLs, or ``-`` for standard input; one of each rank, for instance.
        progress: called with the file at hand, the bytes of it consumed, and its size (0 if unknown).
        run: of directories, the files of the run with this name; None: the newest where there are several.
        add: take all files, also where several hold one rank: each becomes a rank of its own.
        expansion: how much larger than its stored size the content of an input may be.
        cores: how many may be used to decode a file; None: all that there are.

    Raises:
        UsageError: several inputs hold one rank, or a run is named and no input is a directory.
        InputError: an input does not exist or cannot be opened, or holds no such run.
        UnknownFormat: its content is nothing that thence reads.
        DamagedInput: nothing of its content could be read.
    """
    names = [_text_name(str(name)) for name in inputs]
    parts: list[Read] = []
    skipped, damaged = [], []
    files, notes = files_of(names, run, add=add)
    for name, origin in files.items():
        try:
            _text_name(name)
            tables = plausible(_read_one(name, progress, expansion, cores), name)
            tables = graph_labels.with_annotations_beside(tables, expansion)
            parts.append(Read(name, origin, tables))
        except UnknownFormat:
            if name in names:
                raise
            skipped.append(name)  # a directory or a glob may hold other files too
        except DamagedInput as error:
            if name in names or not holds_labels(name):
                raise
            damaged.append(f"{error}; not joined")  # labels are an extra, the traces are there
    if not parts:
        raise InputError(", ".join(names), f"holds no trace; expected one of: {_expected()}")
    parts, more_notes = one_job(parts, add=add)
    tables = concat([part.tables for part in parts])
    meta = tables.meta
    tables = dataclasses.replace(
        tables, meta=dataclasses.replace(meta, notes=(*meta.notes, *notes, *more_notes))
    )
    warnings = [*(f"{name}: not a trace, skipped" for name in skipped), *damaged]
    return graph_labels.with_labels_beside(tables.with_warnings(warnings), expansion)


def _text_name(name: str) -> str:
    """The name of a file, which tables and documents hold as text.

    Raises:
        InputError: it is no text.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            os.fsencode(name).decode("utf-8", "backslashreplace"),
            "its name is not UTF-8; rename it, or give it as standard input (-)",
        ) from error
    return name


def holds_labels(name: str) -> bool:
    """Whether a file begins as labels of CUDA graphs do."""
    with Source.open(name) as source:
        return graph_labels.sniff(source.head())


def files_of(
    names: Sequence[str], run: str | None = None, *, add: bool = False
) -> tuple[dict[str, str], list[str]]:
    """The files and archives to read, each with the input that it is of, and notes on what directories hold besides.

    Args:
        names: files, directories, globs, URLs, or ``-``.
        run: of directories, the files of the run with this name; None: the newest where there are several.
        add: take the files of all runs.

    Raises:
        UsageError: a run is named and no input is a directory.
        InputError: nothing was found for an input.
    """
    directories = [name for name in names if _is_directory(name)]
    archives = {n for n in directories if any(a.sniff_archive(n) for a in _archive_formats())}
    if run is not None and not directories:
        raise UsageError(
            f"--run {run} chooses among the runs of a directory; no input is a directory"
        )
    files: dict[str, str] = {}
    notes: list[str] = []
    for name in names:
        if name not in directories:
            files |= {file: file for file in expand([name], ()) if file not in files}
            continue
        found = [name] if name in archives else expand([name], _patterns())
        if name not in archives:
            twice = _recorded_twice(found)
            # Annotation files of PyTorch belong to the traces of their rank beside them, which find them.
            left_out = twice | {file for file in found if is_annotation_name(file)}
            found = [file for file in found if file not in left_out or file in names]
            if run is not None:
                found = in_run(name, found, run)
            elif not add:
                found, more = in_newest_run(found)
                notes += more
        files |= {file: name for file in found if file not in files}
    return files, notes


def _is_directory(name: str) -> bool:
    if is_url(name):
        return not glob.has_magic(name) and is_folder(name)
    return Path(name).is_dir()


def _patterns() -> tuple[str, ...]:
    """Globs of what may be a trace in a directory."""
    formats: tuple[FileFormat | ArchiveFormat, ...] = (*_file_formats(), *_archive_formats())
    return tuple(dict.fromkeys(pattern for each in formats for pattern in each.PATTERNS))


def _recorded_twice(files: list[str]) -> set[str]:
    """Files that hold, with less detail, the same recording as another file of the directory."""
    # A report of nsys and what was exported from it are the same recording.
    stems = {str(Path(file).with_suffix("")) for file in files if file.endswith(".sqlite")}
    reports = {f for f in files if f.endswith(".nsys-rep") and f.removesuffix(".nsys-rep") in stems}
    # jax.profiler writes a JSON for viewers beside each xplane file.
    xplanes = {Path(file).parent for file in files if ".xplane.pb" in Path(file).name}
    viewers = {f for f in files if f.endswith(".trace.json.gz") and Path(f).parent in xplanes}
    return reports | viewers


def _read_one(
    name: str,
    progress: Callable[[str, int, int], None],
    expansion: Expansion,
    cores: int | None = None,
) -> Tables:
    if is_url(name):
        return _read_url(name, progress, expansion, cores)
    if Path(name).exists():
        check_regular(name)
    is_report = name.endswith(_REPORTS) and Path(name).is_file()
    if Path(name).is_dir() or is_report:
        return _read_archive(name, progress, expansion)
    return _read_file(name, progress, expansion, cores)


def _read_url(
    name: str, progress: Callable[[str, int, int], None], expansion: Expansion, cores: int | None
) -> Tables:
    """As `_read_one`: a file as it comes, anything else from a copy on disk, under its own name."""
    copied = name.endswith((*_REPORTS, *_ON_DISK)) or is_folder(name)
    if not copied:
        return _read_file(name, progress, expansion, cores)
    with fetched(name) as copy:
        tables = _read_one(str(copy), progress, expansion, cores)
    meta = dataclasses.replace(tables.meta, inputs=(name,))
    return dataclasses.replace(tables, meta=meta)


def _read_file(
    name: str, progress: Callable[[str, int, int], None], expansion: Expansion, cores: int | None
) -> Tables:
    with Source.open(name, expansion, cores) as source:
        head = source.head()
        reader = _file_reader(head)
        if reader is not None:
            return reader.read(source, lambda done: progress(name, done, source.stored_bytes))
    if head.startswith(b"PK") and name != STANDARD_INPUT:
        return _read_archive(name, progress, expansion)
    if not head:
        raise UnknownFormat(name, source.damage or "is empty")
    raise UnknownFormat(name, f"is no trace that thence reads; expected one of: {_expected()}")


def _read_archive(
    name: str, progress: Callable[[str, int, int], None], expansion: Expansion
) -> Tables:
    reader = _archive_reader(name)
    if reader is not None:
        return reader.read(name, lambda done: progress(name, done, 0), expansion)
    raise UnknownFormat(name, f"is no archive that thence reads; expected one of: {_expected()}")


def _expected() -> str:
    names = [each.NAME for each in _file_formats()]
    return ", ".join([*names, *(each.NAME for each in _archive_formats())])
