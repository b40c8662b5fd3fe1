"""The state in which a source is read: its files, and the labels of CUDA graphs in its folder, read with it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from thence.readers.fingerprints import fingerprint
from thence.readers.label_files import PATTERNS
from thence.readers.remote import is_url
from thence.store.layout import Fingerprint

_ANNOTATIONS = "kernel_annotations_rank*"
"""PyTorch's annotation files, which are in the folder of a trace or in its parent."""


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
            found = {path for pattern in (*PATTERNS, _ANNOTATIONS) for path in folder.glob(pattern)}
            self._labels[folder] = {}
            for path in (*found, *above.glob(_ANNOTATIONS)):
                with suppress(OSError):  # deleted meanwhile, or not accessible
                    about = path.stat()
                    self._labels[folder][path] = about.st_size, about.st_mtime_ns
        return self._labels[folder]
