"""The state in which a source is read: its files, and the labels of CUDA graphs in its folder, read with it.

A fingerprint shows whether a file has changed: its size and its last modification time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from thence.errors import InputError
from thence.readers.label_files import PATTERNS
from thence.readers.remote import is_url, state_of
from thence.store.layout import Fingerprint

if TYPE_CHECKING:
    from thence.units import Bytes

_ANNOTATIONS = "kernel_annotations_rank*"
"""PyTorch's annotation files, which are in the folder of a trace or in its parent."""


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


class SourceStates:
    """Fingerprints of sources at one time; folders are listed once for all the sources in them."""

    def __init__(self) -> None:
        self._labels: dict[Path, dict[Path, tuple[int, int]]] = {}

    def of(self, source: str) -> Fingerprint:
        """The fingerprint of a source, including the labels that its reader would find.

        Only reading a label file shows which trace it belongs to, so all label files of a folder count for
        every trace in it.

        Raises:
            InputError: the source does not exist, or cannot be accessed.
        """
        count, changed, files = fingerprint(source)
        if is_url(source) or not Path(source).is_file():
            return Fingerprint(count, changed, files)
        labels = dict(self._beside(Path(source).parent))
        labels.pop(Path(source), None)
        newest = max([int(changed), *(when for _, when in labels.values())])
        return Fingerprint(count + sum(size for size, _ in labels.values()), str(newest), files + len(labels))

    def _beside(self, folder: Path) -> dict[Path, tuple[int, int]]:
        """Size in bytes and last change (Unix time in ns) of files that may be labels of the traces in a folder."""
        if folder not in self._labels:
            above = folder.resolve().parent
            labels = {path for pattern in (*PATTERNS, _ANNOTATIONS) for path in folder.glob(pattern)}
            self._labels[folder] = {}
            for path in (*labels, *above.glob(_ANNOTATIONS)):
                with suppress(OSError):  # deleted meanwhile, or not accessible
                    about = path.stat()
                    self._labels[folder][path] = about.st_size, about.st_mtime_ns
        return self._labels[folder]
