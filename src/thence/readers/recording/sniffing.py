"""Recognizes recordings of ``thence record`` by the description in their folders."""

from __future__ import annotations

from pathlib import Path

from thence.model.formats import DESCRIPTION, THENCE_RECORDING
from thence.readers.remote import is_url, urls_within

NAME = THENCE_RECORDING
PATTERNS: tuple[str, ...] = ()
"""Empty: a recording is a folder, not a file in one."""


def sniff_archive(path: str) -> bool:
    """Whether a directory is a recording of one process, or holds those of several."""
    if is_url(path):
        return bool(urls_within(path, (DESCRIPTION,)))
    return Path(path).is_dir() and bool(process_folders(Path(path)))


def process_folders(path: Path) -> list[Path]:
    """The folders of a recording, one for each process."""
    if (path / DESCRIPTION).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{DESCRIPTION}"))
