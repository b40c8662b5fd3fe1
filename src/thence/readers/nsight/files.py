"""SQLite exports as files: plain ones are read in place, gzipped ones through a temporary file."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import DamagedInput
from thence.readers.nsight import sqlite
from thence.readers.nsight.read import NAME as EXPORT
from thence.readers.nsight.read import tables_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from thence.model.tables import Tables
    from thence.readers.files import Source

__all__ = ["MAX_UNPACKED", "NAME", "PATTERNS", "read", "sniff"]

NAME = f"{EXPORT} (SQLite)"
PATTERNS = ("*.sqlite", "*.sqlite.gz", "*.nsys-db")
"""Files of a directory that may be exports."""

MAX_UNPACKED = 64 << 30
"""Most bytes that a gzipped export may have, unpacked."""
_CHUNK = 1 << 22


def sniff(head: bytes) -> bool:
    """Whether a file that begins like this is an SQLite database."""
    return head.startswith(sqlite.MAGIC)


def read(source: Source, progress: Callable[[int], None]) -> Tables:
    """The tables of one export.

    Args:
        source: the opened file.
        progress: called with the number of stored bytes consumed so far.

    Raises:
        DamagedInput: it cannot be read, or its unpacked content finds no room.
        UnknownFormat: it is another program's database.
    """
    if source.plain:
        tables = _read(source.name, source.name)
    else:
        with tempfile.TemporaryDirectory(prefix="thence-") as folder:
            path = Path(folder) / "unpacked.sqlite"
            _unpack(source, path, progress)
            tables = _read(str(path), source.name)
    progress(source.stored_bytes)
    return tables


def _read(path: str, name: str) -> Tables:
    with sqlite.opened(path, name) as database:
        tables = tables_of(database)
    journal = Path(f"{name}-wal")
    if journal.is_file() and journal.stat().st_size:
        return tables.with_warnings(
            [f"{name}: another program is still writing it; what is in {journal.name} is not shown"]
        )
    return tables


def _unpack(source: Source, path: Path, progress: Callable[[int], None]) -> None:
    room = min(MAX_UNPACKED, shutil.disk_usage(path.parent).free)
    size = 0
    with path.open("wb") as unpacked:
        while part := source.read(_CHUNK):
            size += len(part)
            if size > room:
                raise DamagedInput(
                    source.name,
                    f"has more than {room:,} bytes unpacked, more than there is room for",
                )
            unpacked.write(part)
            progress(source.consumed)
    if source.damage:
        raise DamagedInput(source.name, f"cannot be read whole: {source.damage}")
