"""Packed recordings of tests/data."""

from __future__ import annotations

import io
import lzma
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def pack(files: dict[str, bytes], out: Path) -> None:
    """Writes files by name into a .tar.xz archive, without times or owners."""
    with lzma.open(out, "wb", preset=9) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
