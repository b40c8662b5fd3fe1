"""Access to the members of an nsys-jax archive: a zip file, or the directory into which it was unpacked.

Members are read into memory and never extracted to disk. Their names are checked nevertheless, because
they are shown and compared. The size of each member and the total size that is read are limited, so that a
small malicious file cannot fill the memory.

`parquet_frame`, `csv_frame`, `renamed` and `as_int64` turn members into frames; they raise every failure as
`DamagedInput`.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import polars as pl
from polars.exceptions import PanicException, PolarsError

from thence.errors import DamagedInput, InputError
from thence.model.formats import NSYS_JAX_ARCHIVE
from thence.readers.expansion import DEFAULT, Expansion, decoded_bytes
from thence.readers.parquet_probe import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thence.units import Bytes

NAME = NSYS_JAX_ARCHIVE
PATTERNS = ("*.zip",)
"""Globs of the files of a directory that may be archives; an unpacked archive is a directory itself."""

_DAMAGED_PARQUET = (PolarsError, PanicException, OSError, ValueError, UnicodeError, MemoryError)
TRACE = "nvtx_gpu_proj_trace/trace.parquet"
"""The member by which an nsys-jax archive is recognised; in a combined archive, a folder with a file for each rank."""
_MAX_MEMBER: Bytes = 2 << 30
"""Maximum unpacked size of a member; a trace.parquet of 10 million rows has some 400 MB."""
_MAX_TOTAL: Bytes = 8 << 30
"""Maximum unpacked bytes that are read from one archive."""
_MAX_MEMBERS = 1_000_000
"""Maximum number of members that an archive may list."""
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others unpack without a size limit
_ENCRYPTED = 1
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, RuntimeError,
           IndexError, struct.error, OverflowError)  # fmt: skip


def sniff_archive(path: str) -> bool:
    """Whether a path is an nsys-jax archive: a zip, or a directory, that holds `TRACE`."""
    try:
        if Path(path).is_dir():
            return (Path(path) / TRACE).exists()
        with Path(path).open("rb") as stream:
            if stream.read(4) not in _ZIP_MAGIC:
                return False
        with zipfile.ZipFile(path) as archive:
            return any(name == TRACE or name.startswith(f"{TRACE}/") for name in archive.namelist())
    except (OSError, *_DAMAGE):
        return False


@dataclass
class Archive:
    """The members of one archive.

    Attributes:
        name: the path as the user named it.
        sizes: unpacked size in bytes of every member, by its name with forward slashes.
        max_member: maximum unpacked bytes of a member.
        max_total: maximum unpacked bytes that are read in total; a member that is read twice counts twice.
        expansion: how much larger than the zip file its members may be in total.
        stored_bytes: size of the zip file; None for a directory, because it is not compressed.
        skipped: members that were left out of `sizes`, such as links, with the reason.
        read_bytes: unpacked bytes read so far.
    """

    name: str
    sizes: dict[str, Bytes]
    max_member: Bytes = _MAX_MEMBER
    max_total: Bytes = _MAX_TOTAL
    skipped: tuple[str, ...] = ()
    expansion: Expansion = DEFAULT
    stored_bytes: Bytes | None = None
    read_bytes: Bytes = field(default=0, init=False)

    @classmethod
    def open(
        cls, name: str, max_member: Bytes = _MAX_MEMBER, max_total: Bytes = _MAX_TOTAL, expansion: Expansion = DEFAULT
    ) -> Archive:
        """The members of a zip file or a directory.

        Raises:
            InputError: the path cannot be opened.
            DamagedInput: the file is not a zip file, or lists members that are encrypted or outside its folder.
        """
        if Path(name).is_dir():
            sizes, skipped = _directory_members(name)
            return cls(name, sizes, max_member, max_total, tuple(skipped), expansion)
        sizes = _zip_members(name)
        stored = Path(name).stat().st_size
        return cls(name, sizes, max_member, max_total, (), expansion, stored)

    def read(self, member: str) -> bytes:
        """The content of one member.

        Raises:
            KeyError: there is no such member.
            DamagedInput: the member is damaged, cannot be read, or exceeds one of the size limits.
        """
        size = self.sizes[member]
        if self.stored_bytes is not None:
            self.expansion.check(self.name, self.stored_bytes, self.read_bytes + size, member)
        if size > self.max_member:
            raise DamagedInput(self.name, f"{member} holds {size:,} bytes; at most {self.max_member:,} are accepted")
        if self.read_bytes + size > self.max_total:
            raise DamagedInput(self.name, f"holds more than {self.max_total:,} bytes, the most that is accepted")
        try:
            data = self._content(member, size)
        except OSError as error:
            reason = error.strerror or error
            raise DamagedInput(self.name, f"{member} cannot be read ({reason})") from error
        except _DAMAGE as error:
            raise DamagedInput(self.name, f"{member} is damaged ({error})") from error
        if len(data) != size:
            raise DamagedInput(self.name, f"{member} is damaged: its size differs from the listed size")
        self.read_bytes += size
        return data

    def _content(self, member: str, size: Bytes) -> bytes:
        if Path(self.name).is_dir():
            with (Path(self.name) / member).open("rb") as stream:
                return stream.read(size)
        with zipfile.ZipFile(self.name) as archive, archive.open(member) as packed:
            return packed.read(size + 1)  # one byte more: the CRC is checked at the end

    def variants(self, member: str) -> dict[str, str]:
        """The copies of a member in a combined archive: stem of the rank's input -> name of the copy."""
        prefix = f"{member}/"
        return {
            name.removeprefix(prefix): name
            for name in self.sizes
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        }

    def of(self, member: str, stem: str | None) -> str | None:
        """The name of one rank's copy of a member; None if the archive lacks it.

        Args:
            member: name of the member in the archive of a single rank.
            stem: stem of the rank's input in a combined archive; None in the archive of a single rank.
        """
        variant = f"{member}/{stem}"
        if stem is not None and variant in self.sizes:
            return variant
        return member if member in self.sizes else None


def _directory_members(name: str) -> tuple[dict[str, Bytes], list[str]]:
    """Size of each file below a directory, and a reason for each link that is left out."""
    sizes: dict[str, Bytes] = {}
    skipped: list[str] = []
    for member, entry in _files(name):
        if entry.is_symlink():
            skipped.append(f"{member} is a link and was not followed")
        elif entry.is_file():
            sizes[member] = entry.stat().st_size
        if len(sizes) > _MAX_MEMBERS:
            raise DamagedInput(name, "holds too many files; expected an unpacked nsys-jax archive")
    return sizes, skipped


def _files(root: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Everything below a directory except directories; links are included and not followed."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(Path(root) / folder) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise InputError(root, f"cannot be listed ({error.strerror or error})") from error
        for entry in listed:
            member = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                waiting.append(f"{member}/")
            else:
                yield member, entry


def _zip_members(name: str) -> dict[str, Bytes]:
    """Unpacked size of each member as listed; raises `DamagedInput` for unsafe names, encryption and rare methods."""
    try:
        with zipfile.ZipFile(name) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
    except OSError as error:
        raise InputError(name, f"cannot be opened ({error.strerror or error})") from error
    except _DAMAGE as error:
        raise DamagedInput(name, f"is not a complete zip file ({error})") from error
    if len(infos) > _MAX_MEMBERS:
        raise DamagedInput(name, f"lists {len(infos):,} members; expected an nsys-jax archive")
    for info in infos:
        _check_name(name, info.filename)
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
            raise DamagedInput(name, f"{info.filename} is encrypted or uses an unsupported compression method")
    return {info.filename: info.file_size for info in infos}


def _check_name(archive: str, member: str) -> None:
    """Refuses names that would lead out of the archive's folder."""
    path = PurePosixPath(member.replace("\\", "/"))
    drive = len(member) > 1 and member[1] == ":"
    if path.is_absolute() or drive or ".." in path.parts:
        raise DamagedInput(archive, f"names a member outside its folder: {member!r}")


def parquet_frame(data: bytes, path: str, expansion: Expansion = DEFAULT) -> pl.DataFrame:
    """The frame in a Parquet file.

    Raises:
        DamagedInput: the data is not Parquet, is damaged, or claims more rows than `MAX_ROWS` or than the cap allows.
    """
    try:
        scanned = pl.scan_parquet(io.BytesIO(data))
        rows = scanned.select(pl.len()).collect().item()
        if rows > MAX_ROWS:
            raise DamagedInput(path, f"claims {rows:,} rows; at most {MAX_ROWS:,} are accepted")
        expansion.check(path, len(data), decoded_bytes(rows, scanned.collect_schema()))
        return pl.read_parquet(io.BytesIO(data))
    except _DAMAGED_PARQUET as error:
        raise DamagedInput(path, f"cannot be read as a Parquet file ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def csv_frame(data: bytes, path: str) -> pl.DataFrame:
    """The frame in a CSV file with a header.

    Raises:
        DamagedInput: the data is not a CSV table.
    """
    try:
        return pl.read_csv(data, infer_schema_length=10_000, truncate_ragged_lines=False)
    except _DAMAGED_PARQUET as error:
        raise DamagedInput(path, f"cannot be read as a CSV table ({_first_line(error)})") from error


def renamed(frame: pl.DataFrame, names: Mapping[str, Sequence[str]], path: str) -> pl.DataFrame:
    """The wanted columns of a frame, renamed; the first spelling that exists is taken.

    Args:
        frame: as the profiler wrote it.
        names: new name -> possible names in the frame; an empty name makes the column optional (null if absent).
        path: for messages.

    Raises:
        DamagedInput: a required column is missing.
    """
    chosen = []
    for name, spellings in names.items():
        spelling = next((s for s in spellings if s in frame.columns), None)
        if spelling is None and "" not in spellings:
            raise DamagedInput(path, f"has no column {spellings[0]!r}; its columns: {frame.columns}")
        chosen.append(pl.lit(None).alias(name) if spelling is None else pl.col(spelling).alias(name))
    return frame.select(chosen)


def as_int64(frame: pl.DataFrame, columns: Sequence[str], path: str) -> pl.DataFrame:
    """The frame with the columns as Int64, whatever number type pandas gave them; NaN becomes null.

    Raises:
        DamagedInput: a column cannot be converted.
    """
    try:
        floats = [c for c in columns if frame.schema[c].is_float()]
        return frame.with_columns(pl.col(floats).fill_nan(None)).with_columns(pl.col(*columns).cast(pl.Int64))
    except PolarsError as error:
        raise DamagedInput(path, f"has columns that do not hold whole numbers ({_first_line(error)})") from error
