"""Writes a recording to disk: parts, each of them complete, and ``recording.json`` in the same folder.

Each part is written to a temporary file that is then renamed, so a reader sees complete files only, and a
program that is killed loses only what was not yet written. Names are written in parts of their own, before the
rows that refer to them. After every round of parts, ``recording.json`` states how many parts and rows of each
table there are, so that a reader notices a part that was lost. The folder is created with the first rows: a
process that did nothing on the GPU has none.

Where steps are sampled, the parts of old windows are deleted (`thence.capture.recorder.ring`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.atomic_files import atomic_write
from thence.capture.recorder.ring import Part
from thence.model.column_file import MAX_ROWS, encode
from thence.model.formats import ACTIVITIES, DESCRIPTION, part_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from thence.capture.recorder.ring import Ring

    Column = np.ndarray[Any, Any] | Sequence[str | None]
    Columns = dict[str, Column]
    Taken = Mapping[str, list[Columns]]

_MAX_WAITING_ROWS = 400_000
"""Limit on rows of other tables that wait for the first activity; if there are more, they count as lost."""
_HINTS = {
    errno.EFBIG: " (the limit of file sizes, ulimit -f)",
    errno.EACCES: " (to the user as whom the process runs now)",
}
"""What an error of the system means here."""
_LOG = logging.getLogger("thence.capture.recorder")


class Parts:
    """Writes one process's recording.

    Args:
        directory: as the user named it.
        name: returns the name of the folder of this process.
        ring: which parts stay on disk; None: all.

    Attributes:
        directory: as the user named it.
        ring: see above.
        folder: of this process; None before there was anything to write.
        counts: rows on disk, by table.
        numbers: number of parts, by table, including parts that could not be written.
        lost: rows that could not be written, by table.
        bytes: written to disk so far.
        trouble: the last reason why something could not be written.
        pending_rows, pending_bytes: rows that wait for the next part, and their size.
    """

    def __init__(self, directory: Path, name: Callable[[], str], ring: Ring | None = None) -> None:
        self.folder: Path | None = None
        self.counts: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.bytes = 0
        self.trouble: str | None = None
        self.directory = directory
        self._name = name
        self.numbers: dict[str, int] = {}
        self._pending: dict[str, list[Columns]] = {}
        self.pending_rows = self.pending_bytes = 0
        self.ring = ring

    def add(self, table: str, columns: Mapping[str, Column]) -> None:
        """Adds rows to write with the next part."""
        rows = _rows(columns)
        if rows:
            self._pending.setdefault(table, []).append(dict(columns))
            self.pending_rows += rows
            self.pending_bytes += sum(map(_bytes, columns.values()))

    @property
    def holds_activities(self) -> bool:
        """Whether device activities wait for the next part."""
        return not self._pending.keys().isdisjoint(ACTIVITIES)

    def take(self, names: Mapping[str, Sequence[Any]]) -> Taken:
        """All pending rows, for `write`; rows that are added from here on are in the parts after these.

        Args:
            names: the new names, which are written first.
        """
        self.add("names", names)
        if self.folder is not None or self.holds_activities:
            return self._taken()
        if self.pending_rows > _MAX_WAITING_ROWS:
            self._lose_all(self._taken())
        return {}

    def write(self, pending: Taken, description: Callable[[], Mapping[str, Any]]) -> None:
        """Writes rows; rows that cannot be written are counted as lost.

        Args:
            pending: as `take` returned them.
            description: returns the content of ``recording.json``, which is written before the first part and
                after the last one.
        """
        if self.folder is None and (not pending or not self._begin(description)):
            self._lose_all(pending)
            return
        folder = self.folder
        assert folder is not None
        for table in sorted(pending, key=lambda table: table != "names"):
            self._write(table, pending[table])
        old = [] if self.ring is None else self.ring.end_round()
        for part in old:
            self.counts[part.table] -= part.rows
        if pending or old:
            self.describe(description())
        # After the description, which states them: a program that is killed in between has lost nothing.
        for part in old:
            with contextlib.suppress(OSError):
                folder.joinpath(part_name(part.table, part.number)).unlink()

    def _taken(self) -> dict[str, list[Columns]]:
        pending, self._pending = self._pending, {}
        self.pending_rows = self.pending_bytes = 0
        return pending

    def describe(self, description: Mapping[str, Any]) -> None:
        """Replaces ``recording.json``, if the folder exists."""
        if self.folder is not None:
            text = json.dumps(description, indent=1, sort_keys=True)
            self._replace(DESCRIPTION, text.encode())

    def _begin(self, description: Callable[[], Mapping[str, Any]]) -> bool:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            name, number = self._name(), 1
            folder = self.directory / name
            while True:
                try:
                    folder.mkdir()
                    break
                except FileExistsError:  # an earlier recording of this process, or of this pid
                    number += 1
                    folder = self.directory / f"{name}-{number}"
        except OSError as error:
            self._complain(error)
            return False
        self.folder = folder
        self.describe(description())
        return True

    def _write(self, table: str, pieces: Sequence[Columns]) -> None:
        by_columns: dict[tuple[str, ...], list[Columns]] = {}
        for piece in pieces:  # counters differ in their columns
            by_columns.setdefault(tuple(piece), []).append(piece)
        for alike in by_columns.values():
            self._write_alike(table, alike)

    def _write_alike(self, table: str, pieces: Sequence[Columns]) -> None:
        # A column at a time, whose pieces are then given back: all rows are not in memory twice.
        whole = {name: _concatenated([piece.pop(name) for piece in pieces]) for name in tuple(pieces[0])}
        for first in range(0, _rows(whole), MAX_ROWS):
            part = {name: values[first : first + MAX_ROWS] for name, values in whole.items()}
            number = self.numbers[table] = self.numbers.get(table, 0) + 1
            content = encode(part)
            if self._replace(part_name(table, number), content):
                self.counts[table] = self.counts.get(table, 0) + _rows(part)
                if self.ring is not None:
                    self.ring.wrote(Part(table, number, _rows(part), len(content)))
            else:
                self._lose(table, _rows(part))

    def _replace(self, name: str, content: bytes | memoryview) -> bool:
        """Writes a file atomically; False if that failed."""
        assert self.folder is not None
        try:
            atomic_write(self.folder / name, content)
        except OSError as error:
            self._complain(error)
            return False
        self.bytes += len(content)
        return True

    def _lose_all(self, pending: Mapping[str, Sequence[Columns]]) -> None:
        for table, pieces in pending.items():
            self._lose(table, sum(map(_rows, pieces)))

    def _lose(self, table: str, rows: int) -> None:
        self.lost[table] = self.lost.get(table, 0) + rows

    def _complain(self, error: OSError) -> None:
        known = self.trouble is not None
        hint = _HINTS.get(error.errno or 0, "")
        self.trouble = f"{self.directory} cannot be written to: {error.strerror or error}{hint}"
        if not known:
            _LOG.error("thence: %s; the program continues, but records that cannot be written are lost", self.trouble)


def _rows(columns: Mapping[str, Column]) -> int:
    return max(map(len, columns.values()), default=0)


def _bytes(values: Column) -> int:
    if isinstance(values, np.ndarray):
        return int(values.nbytes)
    return sum(len(text) for text in values if text)


def _concatenated(values: Sequence[Column]) -> Column:
    arrays = [array for array in values if isinstance(array, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    return [text for texts in values for text in texts]
