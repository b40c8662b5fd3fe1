"""Starts to decode a file before its reader is called, while the rest of thence is still being imported.

The command line calls `begin` before it imports anything else if it names one large Kineto file. The reader, once it
is imported, takes over the decoding that was started (`Begun.of`); `forget` stops it if no reader took it over.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.errors import ThenceError
from thence.readers.compiled import SCANNER
from thence.readers.kineto.processes import BYTES_BEFORE_PROCESSES, Processes, fitting
from thence.readers.kineto.sniffing import sniff
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Generator

    from thence.readers.kineto.envelope import Envelope
    from thence.readers.kineto.events import Columns


@dataclass(frozen=True, slots=True)
class Begun:
    """A file that is being decoded.

    Attributes:
        source: the opened file.
        envelope: the parts of the file; complete once all of ``columns`` has been consumed.
        columns: the columns of each piece, in order.
    """

    source: Source
    envelope: Envelope
    columns: Generator[Columns]

    @classmethod
    def of(cls, source: Source) -> Begun:
        """The decoding that `begin` started for this file, if it is not taken yet; else a decoding started now."""
        return _ahead.taken(source) or cls._now(source)

    @classmethod
    def _now(cls, source: Source, processes: Processes | None = None) -> Begun:
        # Imported late: the decoding processes are already running, and import the same modules meanwhile.
        from thence.readers.kineto.decoding import decoded
        from thence.readers.kineto.envelope import Envelope

        envelope = Envelope(source)
        columns = decoded(envelope.pieces(), source.path, source.expected_bytes, source.cores, processes)
        return cls(source, envelope, columns)


class _Ahead:
    """Holds at most one file whose decoding was started and that no reader has taken yet."""

    def __init__(self) -> None:
        self._begun: tuple[Begun, tuple[int, ...], Processes | None] | None = None
        self._opened = ExitStack()

    def begin(self, name: str) -> None:
        state = _state(name)
        source = self._opened.enter_context(Source.open(name))
        count = fitting(source.expected_bytes)
        if source.expected_bytes < BYTES_BEFORE_PROCESSES or count < 2 or not sniff(source.head()):
            return
        processes = None if SCANNER.load() else Processes.start(count)
        try:
            self._begun = Begun._now(source, processes), state, processes  # noqa: SLF001 - of this module
        except BaseException:
            if processes is not None:
                processes.kill()
            raise

    def taken(self, source: Source) -> Begun | None:
        if self._begun is None:
            return None
        begun, state, _ = self._begun
        same = (source.name, source.expansion, source.cores) == (
            begun.source.name, begun.source.expansion, begun.source.cores
        )  # fmt: skip
        if not same or state != _state(source.name):
            return None
        self._begun = None
        return begun

    def forget(self) -> None:
        if self._begun is not None:
            begun, _, processes = self._begun
            self._begun = None
            if processes is not None:
                processes.kill()
            with suppress(ThenceError):  # of killed processes
                next(begun.columns, None)  # a generator that has not begun would not notice that it is closed
            begun.columns.close()
        self._opened.close()


def _state(name: str) -> tuple[int, ...]:
    """Values that change if a file is replaced or written to."""
    status = os.stat(name)  # noqa: PTH116 - as `thence.readers.source` looks at names
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_ahead = _Ahead()


def begin(name: str) -> None:
    """Starts to decode a file, if it is a Kineto trace that is large enough for decoding processes.

    Raises no error for a bad file or name; its reader reports it.
    """
    with suppress(ThenceError, OSError, ValueError, MemoryError):
        name.encode()  # a name that is not valid UTF-8 cannot be sent to other processes
        _ahead.begin(name)


def forget() -> None:
    """Stops a decoding that was started and that no reader has taken."""
    _ahead.forget()
