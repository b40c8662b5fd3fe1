"""Parquet files of a store that a child process has read without harm, remembered until they change.

Some damage to a page ends the process that reads it, or makes Polars print its stack. What a child process has read,
and what an ingest of this user has written, is remembered in the user's cache: a store cannot vouch for itself, as
it may come from elsewhere.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence.atomic_files import atomic_write
from thence.errors import DamagedInput, MissingRequirement
from thence.readers.nsight.export import cache_folder
from thence.readers.parquet_probe import first_unreadable
from thence.store.files import is_there, reading, tables_within

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thence.units import Bytes

__all__ = ["check_tried", "parquet_files", "remember"]

_FILE = "tried-tables"
"""In the user's cache: a line for each folder as it was."""
_MOST: Bytes = 1 << 22
"""Of that file: 120,000 lines."""
_AT_ONCE: Bytes = 1 << 28
"""What a child is given: it has five minutes."""


def parquet_files(folder: Path) -> tuple[Path, ...]:
    """The Parquet files of a folder, in a fixed order.

    Raises:
        DamagedInput: one of them is a special file.
    """
    return tuple(path for path in sorted(folder.glob("*.parquet")) if is_there(path))


def check_tried(folders: Iterable[Path]) -> None:
    """Has a child process read the Parquet files of folders in which some have changed since it did, or are new.

    Raises:
        DamagedInput: one of the files cannot be read.
    """
    known = _remembered()
    new = [files for folder in folders if _name(files := parquet_files(folder)) not in known]
    for groups in _divided(new):
        tables = [path for files in groups for path in files]
        names = [
            _name(files) for files in groups
        ]  # before they are read: what changes meanwhile is not known
        if bad := first_unreadable(tables):
            path, harmless = bad
            if harmless:
                with reading(path):
                    tables_within([path], path).collect()
            raise DamagedInput(str(path), "has a damaged table, one that ends its reader")
        _remember(names)


def remember(folders: Iterable[Path]) -> None:
    """Remembers the Parquet files of folders that were written just now."""
    _remember([_name(parquet_files(folder)) for folder in folders])


def _divided(groups: Sequence[tuple[Path, ...]]) -> Iterator[list[tuple[Path, ...]]]:
    """The groups, so many together as a child is given."""
    some: list[tuple[Path, ...]] = []
    size = 0
    for files in groups:
        some.append(files)
        with reading(files[0].parent if files else Path()):
            size += sum(path.stat().st_size for path in files)
        if size >= _AT_ONCE:
            yield some
            some, size = [], 0
    if any(some):
        yield some


def _name(files: Sequence[Path]) -> str:
    """What is one and the same as long as none of the files has changed: their places, sizes and times of change."""
    digest = hashlib.sha256(pl.__version__.encode())
    for path in files:
        with reading(path):
            state = path.stat()
        told = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        digest.update(repr((os.fspath(path.absolute()), told)).encode("utf-8", "backslashreplace"))
    return digest.hexdigest()[:32]


def _remembered() -> frozenset[str]:
    """The names in the cache; none where there is no cache."""
    with suppress(OSError, MissingRequirement):
        return frozenset((cache_folder() / _FILE).read_text("ascii", "replace").split())
    return frozenset()


def _remember(names: Sequence[str]) -> None:
    """Adds names; where the cache cannot be written, a child reads the files again the next time."""
    lines = "".join(f"{name}\n" for name in names).encode()
    with suppress(OSError, MissingRequirement):
        file = cache_folder() / _FILE
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size + len(lines) > _MOST:
            atomic_write(file, file.read_bytes()[-_MOST // 2 :])
        with file.open("ab", buffering=0) as stream:
            stream.write(lines)
