"""Chooses the reader of each input by its content, imports it, and reads all inputs as one set of tables.

Formats that thence recognises without reading them are refused, with what to do instead.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from thence.errors import DamagedInput, InputError, UnknownFormat, UsageError
from thence.memory_limits import check_memory
from thence.model.concat_tables import concat
from thence.model.formats import SUMMARIES_FILE
from thence.readers import flight_recorder, nccl_inspector
from thence.readers import label_files as graph_labels
from thence.readers.expansion import DEFAULT, Expansion
from thence.readers.memory_snapshot.joining import with_snapshots
from thence.readers.plausible import plausible, with_affordable_names
from thence.readers.remote import fetched, is_folder, is_url
from thence.readers.runs import Read, in_newest_run, in_run, older_of_rank, one_job
from thence.readers.source import STANDARD_INPUT, NumberedFiles, Source, check_regular, expand, file_name, unchanged
from thence.readers.torch_annotations import is_annotation_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from thence.model.tables import Tables

_DECOMPRESS = "; decompress it first ({}): thence reads gzip and no other compression"
_CONTENTS = {
    rb"\xfd7zXZ\x00": "is compressed with xz" + _DECOMPRESS.format("xz -dk"),
    rb"\x28\xb5\x2f\xfd": "is compressed with Zstandard" + _DECOMPRESS.format("zstd -d"),
    rb"BZh[1-9]": "is compressed with bzip2" + _DECOMPRESS.format("bunzip2 -k"),
    rb"\x04\x22\x4d\x18": "is compressed with LZ4" + _DECOMPRESS.format("lz4 -d"),
    rb"(?s).{257}ustar": "is a tar archive; unpack it (tar -xf) and name the folder or the traces in it",
    rb"PK\x03\x04": (
        "is a zip archive, but not of nsys-jax; if it holds traces, unpack it and name the folder or the traces in it"
    ),
    rb"version https://git-lfs\.github\.com/": (
        "is a pointer of Git LFS, not the file itself; fetch the file (git lfs pull)"
    ),
    rb"(?i)(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html)\b": (
        "is an HTML page; if it was downloaded, the server may have sent a login page or an error instead of the trace"
    ),
    rb"\xff\xfe|\xfe\xff": (
        "is UTF-16, as PowerShell redirects output; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"
    ),
    # The first bytes that TensorFlow's and XLA's trace_events_to_json.cc write.
    rb'\{"displayTimeUnit": ?"ns", ?"metadata": ?\{"highres-ticks": ?true\}': (
        "is what jax.profiler and TensorFlow write for viewers, without programs and HLO; name the .xplane.pb file"
    ),
    rb'"?Time ?\(%\)"?,"?Total Time ?\([a-z]+\)"?,': (
        "is a summary without times of each kernel; use nsys stats --report cuda_gpu_trace --format csv"
    ),
}
"""Regular expression of how a file begins, and the end of the sentence about it."""
_ENDINGS = {
    SUMMARIES_FILE: (
        "holds summaries of the windows of a recording: thence top DIR --once shows the latest, thence steps FILE "
        "all of them by period; other verbs read the windows that are kept"
    ),
    ".ncu-rep": "is a report of Nsight Compute, which measures single kernels; thence reads reports of Nsight Systems",
    ".qdstrm": (
        "is what Nsight Systems writes before it makes a report; make it with QdstrmImporter, which is part of "
        "Nsight Systems"
    ),
    ".pftrace": (
        "is a timeline for Perfetto, which thence writes and does not read; name the recording or trace that it was "
        "made from"
    ),
}
"""Ending of a file name, for formats without a fixed beginning, and the end of the sentence about it."""
_FILES = {
    "thence.readers.kineto.sniffing": "thence.readers.kineto.read",
    "thence.readers.flight_recorder": "thence.readers.flight_recorder",
    "thence.readers.nccl_inspector": "thence.readers.nccl_inspector",
    "thence.readers.memory_snapshot.sniffing": "thence.readers.memory_snapshot.read",
    "thence.readers.label_files": "thence.readers.label_files",
    "thence.readers.jax.sniffing": "thence.readers.jax.xplane",
    "thence.readers.nsight.sqlite": "thence.readers.nsight.sqlite",
    "thence.readers.nsight.csv": "thence.readers.nsight.csv",
}
"""Formats that are read from one file as a stream, in the order in which they are tried: the module that recognises
files of the format, which imports little, and the module that reads them, which is imported only for such a file."""
_ARCHIVES = {
    "thence.readers.recording.sniffing": "thence.readers.recording.read",
    "thence.readers.nsys_jax.archive": "thence.readers.nsys_jax.read",
    "thence.readers.nsight.export": "thence.readers.nsight.export",
    "thence.readers.nsight.folder": "thence.readers.nsight.folder",
}
"""The same for formats that are read from a path: a folder of several files, a zip file or the folder it was unpacked
to, or a file that another program has to convert first."""
_REPORTS = (".nsys-rep", ".qdrep")
_ON_DISK = (".zip", ".sqlite", ".sqlite.gz", ".xplane.pb")
"""Suffixes of files whose readers need more than a stream: random access to pages, or neighbouring files."""


def described(name: str, head: bytes) -> str | None:
    """What is said about a file that no reader accepts; None if its format is not known either."""
    by_content = (text for beginning, text in _CONTENTS.items() if re.match(beginning, head))
    by_name = (text for ending, text in _ENDINGS.items() if name.endswith(ending))
    return next(by_content, None) or next(by_name, None)


class FileFormat(Protocol):
    """Interface of the modules in `_FILES` that recognise files of a format."""

    NAME: str
    """Name of the format, for messages."""
    PATTERNS: tuple[str, ...]
    """Globs that match files of the format in a directory."""

    def sniff(self, head: bytes) -> bool:
        """Whether a file may be of this format, from its first bytes (decompressed)."""


class FileReader(Protocol):
    """Interface of the modules in `_FILES` that read files of a format."""

    def read(self, source: Source, progress: Callable[[int], None]) -> Tables:
        """The tables of one file."""


class ArchiveFormat(Protocol):
    """Interface of the modules in `_ARCHIVES` that recognise archives of a format."""

    NAME: str
    PATTERNS: tuple[str, ...]

    def sniff_archive(self, path: str) -> bool:
        """Whether a file or directory is an archive of this format."""


class ArchiveReader(Protocol):
    """Interface of the modules in `_ARCHIVES` that read archives of a format."""

    def read(self, name: str, progress: Callable[[int], None], expansion: Expansion) -> Tables:
        """The tables of one archive; ``expansion`` limits how much larger than stored its members may be."""


def _file_formats() -> Iterable[FileFormat]:
    return (cast("FileFormat", importlib.import_module(name)) for name in _FILES)


def _archive_formats() -> Iterable[ArchiveFormat]:
    return (cast("ArchiveFormat", importlib.import_module(name)) for name in _ARCHIVES)


def _file_reader(head: bytes) -> FileReader | None:
    """The module that reads a file that begins like this; None if no format matches."""
    for name, reader in _FILES.items():
        if cast("FileFormat", importlib.import_module(name)).sniff(head):
            return cast("FileReader", importlib.import_module(reader))
    return None


def _archive_reader(path: str) -> ArchiveReader | None:
    """The module that reads the archive at a path; None if no format matches."""
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
        inputs: files, directories, globs, URLs, or ``-`` for standard input; one file of each rank, for instance.
        progress: called with the current file, the bytes of it consumed, and its size (0 if unknown).
        run: name of the run to read from directories; None: the newest of several runs.
        add: take all files, even if several hold the same rank: each becomes a rank of its own.
        expansion: how much larger than its stored size the content of an input may be.
        cores: how many cores may be used to decode a file; None: all cores.

    Raises:
        UsageError: several inputs hold one rank, or a run is named and no input is a directory.
        InputError: an input does not exist or cannot be opened, or holds no such run.
        UnknownFormat: an input is of no format that thence reads.
        DamagedInput: nothing in an input could be read.
    """
    names = [_text_name(str(name)) for name in inputs]
    parts: list[Read] = []
    skipped, damaged = [], []
    files, notes = files_of(names, run, add=add)
    older = {} if add else _older(files, expansion)
    beside = NumberedFiles()
    for name, origin in files.items():
        if name in older:
            continue
        try:
            _text_name(name)
            with _named(name):
                tables = plausible(_read_one(name, progress, expansion, cores), name)
                tables = graph_labels.with_annotations_beside(tables, beside, expansion)
                tables = flight_recorder.with_records_beside(tables, beside, expansion)
                tables = nccl_inspector.with_records_beside(tables, beside, expansion)
            parts.append(Read(name, origin, tables))
        except UnknownFormat:
            if name in names:
                raise
            skipped.append(name)  # a directory or a glob may hold other files too
        except DamagedInput as error:
            if name in names or not holds_labels(name):
                raise
            damaged.append(f"{error}; its labels are not used")  # the traces can be read without labels
    if not parts:
        known = described(skipped[0], b"") if skipped else None
        raise InputError(", ".join(names), known or f"holds no trace; expected one of: {_expected()}")
    parts, more_notes = one_job(with_snapshots(_affordable(parts)), add=add, unread=older)
    tables = concat([part.tables for part in parts])
    meta = dataclasses.replace(tables.meta, left_out=(*notes, *more_notes))
    tables = dataclasses.replace(tables, meta=meta)
    warnings = [*(f"{name}: not a trace, skipped" for name in skipped), *damaged]
    return graph_labels.with_labels_beside(tables.with_warnings(warnings), beside, expansion)


def _affordable(parts: Sequence[Read]) -> list[Read]:
    """The inputs, as `with_affordable_names` returns their tables."""
    tables = with_affordable_names({part.file: part.tables for part in parts})
    return [dataclasses.replace(part, tables=tables[part.file]) for part in parts]


def _text_name(name: str) -> str:
    """The name of a file, unchanged, after checking that tables and documents can hold it as text.

    Raises:
        InputError: the name is not valid UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            os.fsencode(name).decode("utf-8", "backslashreplace"),
            "its name is not valid UTF-8; rename it, or pipe its content to standard input (-)",
        ) from error
    return name


def holds_labels(name: str) -> bool:
    """Whether a file begins as labels of CUDA graphs do."""
    with Source.open(name) as source:
        return graph_labels.sniff(source.head())


def files_of(names: Sequence[str], run: str | None = None, *, add: bool = False) -> tuple[dict[str, str], list[str]]:
    """The files and archives to read, each with the input that it came from, and notes on the files left out.

    Args:
        names: files, directories, globs, URLs, or ``-``.
        run: name of the run to read from directories; None: the newest of several runs.
        add: take the files of all runs.

    Raises:
        UsageError: a run is named and no input is a directory.
        InputError: nothing was found for an input.
    """
    directories = [name for name in names if _is_directory(name)]
    archives = {n for n in directories if any(a.sniff_archive(n) for a in _archive_formats())}
    if run is not None and not directories:
        raise UsageError(f"--run {run} selects a run in a directory, but no input is a directory")
    files: dict[str, str] = {}
    notes: list[str] = []
    for name in names:
        if name not in directories:
            files |= {file: file for file in expand([name], ()) if file not in files}
            continue
        files_of_name = [name] if name in archives else expand([name], _patterns())
        if name not in archives:
            twice = _recorded_twice(files_of_name)
            # PyTorch's annotation files and flight recorders are added to the trace of their rank.
            left_out = twice | {
                file for file in files_of_name if is_annotation_name(file) or flight_recorder.is_record(file)
            }
            files_of_name = [file for file in files_of_name if file not in left_out or file in names]
            if run is not None:
                files_of_name = in_run(name, files_of_name, run)
            elif not add:
                files_of_name, more = in_newest_run(files_of_name)
                notes += more
        files |= {file: name for file in files_of_name if file not in files}
    return files, notes


def _older(files: dict[str, str], expansion: Expansion) -> dict[str, str]:
    """As `older_of_rank`: of the files that may be Kineto's, which begin with what is needed to tell."""
    json = {file: origin for file, origin in files.items() if file.endswith((".json", ".json.gz"))}
    if len(json) < 2:
        return {}
    from thence.readers.kineto.first_look import rank_and_begin

    return older_of_rank(json, lambda name: rank_and_begin(name, expansion))


def _is_directory(name: str) -> bool:
    if is_url(name):
        return not glob.has_magic(name) and is_folder(name)
    return Path(name).is_dir()


def _patterns() -> tuple[str, ...]:
    """Globs of the files of a directory that may be traces."""
    formats: tuple[FileFormat | ArchiveFormat, ...] = (*_file_formats(), *_archive_formats())
    return tuple(dict.fromkeys(pattern for trace_format in formats for pattern in trace_format.PATTERNS))


def _recorded_twice(files: list[str]) -> set[str]:
    """Files that hold, with less detail, the same recording as another file of the directory."""
    # A report of nsys and the SQLite file exported from it are the same recording.
    stems = {str(Path(file).with_suffix("")) for file in files if file.endswith(".sqlite")}
    reports = {f for f in files if f.endswith(".nsys-rep") and f.removesuffix(".nsys-rep") in stems}
    # jax.profiler writes a JSON for viewers next to each xplane file.
    xplanes = {Path(file).parent for file in files if ".xplane.pb" in file_name(file)}
    viewers = {f for f in files if f.endswith(".trace.json.gz") and Path(f).parent in xplanes}
    return reports | viewers


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Gives errors of the system that name no file, as in the middle of a read, the name of the input.

    Raises:
        DamagedInput: the system could not read on.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise DamagedInput(name, f"reading failed ({error.strerror or error})") from error


def _read_one(
    name: str, progress: Callable[[str, int, int], None], expansion: Expansion, cores: int | None = None
) -> Tables:
    if is_url(name):
        return _read_url(name, progress, expansion, cores)
    try:
        mode = check_regular(name).st_mode
    except (OSError, ValueError):  # opening it will say what is wrong with it
        mode = 0
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and name.endswith(_REPORTS)):
        archive = _archive_reader(name)
        if archive is None:
            raise UnknownFormat(name, f"is not an archive that thence reads; expected one of: {_expected()}")
        return archive.read(name, lambda done: progress(name, done, 0), expansion)
    return _read_file(name, progress, expansion, cores)


def _read_url(name: str, progress: Callable[[str, int, int], None], expansion: Expansion, cores: int | None) -> Tables:
    """As `_read_one`, for a URL: a file is read as a stream or, if its reader needs a path, from a temporary copy."""
    copied = name.endswith((*_REPORTS, *_ON_DISK)) or is_folder(name)
    if not copied:
        return _read_file(name, progress, expansion, cores)
    with fetched(name) as copy:
        tables = _read_one(str(copy), progress, expansion, cores)
    meta = dataclasses.replace(tables.meta, inputs=(name,))
    return dataclasses.replace(tables, meta=meta)


def _read_file(name: str, progress: Callable[[str, int, int], None], expansion: Expansion, cores: int | None) -> Tables:
    with Source.open(name, expansion, cores) as source:
        check_memory(name, source.expected_bytes if source.plain else source.stored_bytes)
        head = source.head()
        if source.failed:  # it may hold a trace, so a folder that it is in is not read without it
            raise DamagedInput(name, source.damage or "")
        reader = _file_reader(head)
        if reader is not None:
            with unchanged(name, lambda: source.changed):
                return reader.read(source, lambda done: progress(name, done, source.stored_bytes))
    is_zip = head.startswith(b"PK")
    if is_zip and name == STANDARD_INPUT:
        raise UnknownFormat(name, "is a zip archive, which can be read from a file only: name it")
    archive = _archive_reader(name) if is_zip else None
    if archive is not None:
        return archive.read(name, lambda done: progress(name, done, 0), expansion)
    if not head:
        raise UnknownFormat(name, source.damage or "is empty")
    known = described(name, head)
    raise UnknownFormat(name, known or f"has no format that thence reads; expected one of: {_expected()}")


def _expected() -> str:
    names = [trace_format.NAME for trace_format in _file_formats()]
    return ", ".join([*names, *(trace_format.NAME for trace_format in _archive_formats())])
