"""Fingerprints that show whether an input has changed: its size and its last modification time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import InputError
from thence.readers.remote import is_url, state_of

if TYPE_CHECKING:
    from thence.units import Bytes


def fingerprint(name: str) -> tuple[Bytes, str, int]:
    """Size in bytes, modification time of the newest file, and number of files.

    The modification time is Unix time in ns, or what the protocol reports for a URL, as text.

    Args:
        name: a file, a folder (all files in it and its subfolders count) or a URL.

    Raises:
        InputError: the input does not exist, or may not be read.
    """
    if is_url(name):
        return state_of(name)
    try:
        if not Path(name).is_dir():
            about = Path(name).stat()
            return about.st_size, str(about.st_mtime_ns), 1
        abouts = [(Path(folder) / file).stat() for folder, _, files in os.walk(name) for file in files]
    except OSError as error:
        raise InputError(name, f"cannot be read ({error.strerror or error})") from error
    newest = max((about.st_mtime_ns for about in abouts), default=0)
    return sum(about.st_size for about in abouts), str(newest), len(abouts)
