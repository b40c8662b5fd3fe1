"""As what a source was read: its files, and the labels of CUDA graphs that lie beside it and are read with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from thence.readers.fingerprints import fingerprint
from thence.readers.label_files import PATTERNS
from thence.readers.remote import is_url
from thence.store.layout import Fingerprint

__all__ = ["SourceStates"]

_ANNOTATIONS = "kernel_annotations_rank*"
"""PyTorch's annotation files, which lie in the folder of a trace or in the one above."""


class SourceStates:
    """Fingerprints of sources at one time; folders are listed once for all the sources in them."""

    def __init__(self) -> None:
        self._labels: dict[Path, dict[Path, tuple[int, int]]] = {}

    def of(self, source: str) -> Fingerprint:
        """The fingerprint of a source, with the labels that its reader would find beside it.

        Which of them are the source's own only reading tells, so all of a folder count for every trace in it.

        Raises:
            InputError: the source is not there, or may not be looked at.
        """
        count, changed, files = fingerprint(source)
        if is_url(source) or not Path(source).is_file():
            return Fingerprint(count, changed, files)
        labels = dict(self._beside(Path(source).parent))
        labels.pop(Path(source), None)
        newest = max([int(changed), *(when for _, when in labels.values())])
        return Fingerprint(
            count + sum(size for size, _ in labels.values()), str(newest), files + len(labels)
        )

    def _beside(self, folder: Path) -> dict[Path, tuple[int, int]]:
        """Bytes and last change (ns of Unix time) of the files that may be labels of the traces in a folder."""
        if folder not in self._labels:
            above = folder.resolve().parent
            found = {path for pattern in (*PATTERNS, _ANNOTATIONS) for path in folder.glob(pattern)}
            self._labels[folder] = {}
            for path in (*found, *above.glob(_ANNOTATIONS)):
                with suppress(OSError):  # gone meanwhile, or no one's to look at
                    about = path.stat()
                    self._labels[folder][path] = about.st_size, about.st_mtime_ns
        return self._labels[folder]
