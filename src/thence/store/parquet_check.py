"""Checks in a child process that Parquet files of a store can be read, and remembers them until they change.

Some damage to a page crashes the process that reads it, or makes Polars print its stack. Files that a child process
has read, or that an ingest of this user has written, are remembered in the user's cache. They are not remembered in
the store itself, because a store may come from an untrusted source.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from thence.atomic_files import atomic_write
from thence.errors import DamagedInput, MissingRequirement
from thence.readers.nsight.export import cache_folder
from thence.readers.parquet_probe import first_unreadable
from thence.store.files import reading, state_of, tables_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from thence.units import Bytes

_FILE = "tried-tables"
"""File in the user's cache: one line for each folder and state of its files."""
_MAX_CACHE_BYTES: Bytes = 1 << 22
"""Most bytes of that file: about 120,000 lines."""
_AT_ONCE: Bytes = 1 << 28
"""Bytes of files that one child process reads; it has five minutes for them."""


class _Files(NamedTuple):
    """The Parquet files of a folder, in a fixed order, with their states before they are read.

    Attributes:
        size: of all of them.
        name: a digest of the paths, inodes, sizes and times of change of the files, and of Polars' version.
    """

    paths: tuple[Path, ...]
    size: Bytes
    name: str

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Those of a folder.

        Raises:
            DamagedInput: one of them is a special file.
        """
        digest = hashlib.sha256(pl.__version__.encode())
        paths, size = [], 0
        for path in sorted(folder.glob("*.parquet")):
            if (state := state_of(path)) is not None:
                written = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
                digest.update(repr((os.fspath(path.absolute()), written)).encode("utf-8", "backslashreplace"))
                paths.append(path)
                size += state.st_size
        return cls(tuple(paths), size, digest.hexdigest()[:32])


def check_parquet(folders: Iterable[Path]) -> None:
    """Has a child process read the Parquet files of each folder in which a file is new or changed since the last check.

    Raises:
        DamagedInput: one of the files cannot be read.
    """
    known = _remembered()
    new = [files for folder in folders if (files := _Files.of(folder)).name not in known]
    for some in _divided(new):
        if bad := first_unreadable([path for files in some for path in files.paths]):
            path, harmless = bad
            if harmless:
                with reading(path):
                    tables_within([path], path).collect()
            raise DamagedInput(str(path), "has a damaged table that crashes the process that reads it")
        _remember([files.name for files in some])  # files that have changed since are checked again


def remembered(folders: Iterable[Path]) -> bool:
    """Whether all folders have Parquet files, which are as they were when they were last read or written."""
    known = _remembered()
    states = (_Files.of(folder) for folder in folders)
    return all(files.paths and files.name in known for files in states)


def remember(folders: Iterable[Path]) -> None:
    """Remembers the Parquet files of folders that this process has just written, without reading them."""
    _remember([_Files.of(folder).name for folder in folders])


def _divided(groups: Sequence[_Files]) -> Iterator[list[_Files]]:
    """The files in batches of about `_AT_ONCE` bytes, one for each child process."""
    some: list[_Files] = []
    size = 0
    for files in groups:
        some.append(files)
        size += files.size
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if any(files.paths for files in some):
        yield some


def _remembered() -> frozenset[str]:
    """The names of `_Files` in the cache; none if there is no cache."""
    with suppress(OSError, MissingRequirement):
        return frozenset((cache_folder() / _FILE).read_text("ascii", "replace").split())
    return frozenset()


def _remember(names: Sequence[str]) -> None:
    """Adds names to the cache; if it cannot be written, a child process reads the files again the next time."""
    lines = "".join(f"{name}\n" for name in names).encode()
    with suppress(OSError, MissingRequirement):
        file = cache_folder() / _FILE
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size + len(lines) > _MAX_CACHE_BYTES:
            atomic_write(file, file.read_bytes()[-_MAX_CACHE_BYTES // 2 :])
        with file.open("ab", buffering=0) as stream:
            stream.write(lines)
