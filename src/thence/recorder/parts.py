"""A recording on disk: parts that are each complete, and ``recording.json`` beside them.

A part is written beside its place and renamed, so whoever reads sees whole files only, and a program
that is killed loses what was not yet in one. Names go to parts of their own, written before the rows
that refer to them. The folder appears with the first rows: a process that did nothing on the GPU leaves
none.
"""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from thence.atomic_files import atomic_write
from thence.model.formats import ACTIVITIES, DESCRIPTION, part_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Parts"]

_MOST_WAITING_ROWS = 400_000
"""Rows of other tables that wait for the first activity."""
_LOG = logging.getLogger("thence.recorder")


class Parts:
    """Writes one process's recording.

    Attributes:
        directory: that the user named.
        folder: of this process; None before there was anything to write.
        counts: rows on disk, by table.
        lost: rows that could not be written, by table.
        bytes: on disk.
        trouble: the last reason why something could not be written.
        pending_rows, pending_bytes: what waits for the next part.
    """

    def __init__(self, directory: Path, name: Callable[[], str]) -> None:
        self.folder: Path | None = None
        self.counts: dict[str, int] = {}
        self.lost: dict[str, int] = {}
        self.bytes = 0
        self.trouble: str | None = None
        self.directory = directory
        self._name = name
        self._numbers: dict[str, int] = {}
        self._pending: dict[str, list[pl.DataFrame]] = {}
        self.pending_rows = self.pending_bytes = 0

    def add(self, table: str, columns: Mapping[str, Any]) -> None:
        """Rows to write with the next part."""
        frame = _frame(columns)
        if frame.height:
            self._pending.setdefault(table, []).append(frame)
            self.pending_rows += frame.height
            self.pending_bytes += int(frame.estimated_size())

    def save(
        self, description: Callable[[], Mapping[str, Any]], names: Mapping[str, Sequence[Any]]
    ) -> None:
        """Write everything that is pending; what cannot be written is counted as lost.

        Args:
            description: gives the content of ``recording.json``, which is written with the first part.
            names: the new names, which go first.
        """
        self.add("names", names)
        if self.folder is None and self._pending.keys().isdisjoint(ACTIVITIES):
            if self.pending_rows > _MOST_WAITING_ROWS:
                self._lose_all(self._taken())
            return
        pending = self._taken()
        if self.folder is None and not self._begin(description):
            self._lose_all(pending)
            return
        for table in sorted(pending, key=lambda table: table != "names"):
            self._write(table, pl.concat(pending[table]))

    def _taken(self) -> dict[str, list[pl.DataFrame]]:
        pending, self._pending = self._pending, {}
        self.pending_rows = self.pending_bytes = 0
        return pending

    def describe(self, description: Mapping[str, Any]) -> None:
        """Write ``recording.json`` anew, if there is a recording at all."""
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

    def _write(self, table: str, frame: pl.DataFrame) -> None:
        number = self._numbers[table] = self._numbers.get(table, 0) + 1
        content = io.BytesIO()
        frame.write_ipc(content, compression="lz4")
        if self._replace(part_name(table, number), content.getbuffer()):
            self.counts[table] = self.counts.get(table, 0) + frame.height
        else:
            self._lose(table, frame.height)

    def _replace(self, name: str, content: bytes | memoryview) -> bool:
        """Write a file whole or not at all."""
        assert self.folder is not None
        try:
            atomic_write(self.folder / name, content)
        except OSError as error:
            self._complain(error)
            return False
        self.bytes += len(content)
        return True

    def _lose_all(self, pending: Mapping[str, Sequence[pl.DataFrame]]) -> None:
        for table, pieces in pending.items():
            self._lose(table, sum(piece.height for piece in pieces))

    def _lose(self, table: str, rows: int) -> None:
        self.lost[table] = self.lost.get(table, 0) + rows

    def _complain(self, error: OSError) -> None:
        if self.trouble is None:
            _LOG.error(
                "thence cannot write to %s: %s; the program runs on, what cannot be written is lost",
                self.directory,
                error.strerror or error,
            )
        self.trouble = str(error.strerror or error)


def _frame(columns: Mapping[str, Any]) -> pl.DataFrame:
    return pl.DataFrame(
        {
            name: values
            if isinstance(values, np.ndarray)
            else pl.Series(name, values, dtype=pl.String())
            for name, values in columns.items()
        }
    )
