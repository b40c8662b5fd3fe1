"""Decoding of a file that begins before the file is asked for: while the rest of thence is still being imported.

A command line that names one large Kineto file calls `begin` before it imports anything else. The reader, once it is
there, goes on with what has begun (`Begun.of`); `forget` ends what nobody asked for.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence.errors import ThenceError
from thence.readers.kineto.processes import BYTES_BEFORE_PROCESSES, Processes, fitting
from thence.readers.kineto.sniffing import sniff
from thence.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from thence.readers.kineto.envelope import Envelope
    from thence.readers.kineto.events import Columns

__all__ = ["Begun", "begin", "forget"]


@dataclass(frozen=True, slots=True)
class Begun:
    """A file that is being decoded.

    Attributes:
        source: where its bytes come from.
        envelope: its parts, complete once all columns have been taken.
        columns: of each piece, in order.
    """

    source: Source
    envelope: Envelope
    columns: Iterator[Columns]

    @classmethod
    def of(cls, source: Source) -> Begun:
        """What `begin` began of this file, once; otherwise its decoding begins now."""
        return _ahead.taken(source) or cls._now(source)

    @classmethod
    def _now(cls, source: Source, processes: Processes | None = None) -> Begun:
        # Only now: decoding processes that are being started import the same meanwhile.
        from thence.readers.kineto.decoding import decoded
        from thence.readers.kineto.envelope import Envelope

        envelope = Envelope(source)
        columns = decoded(
            envelope.pieces(), source.name, source.expected_bytes, source.cores, processes
        )
        return cls(source, envelope, columns)


class _Ahead:
    """At most one file that has begun and that nobody has asked for yet."""

    def __init__(self) -> None:
        self._begun: tuple[Begun, tuple[int, ...], Processes] | None = None
        self._opened = ExitStack()

    def begin(self, name: str) -> None:
        state = _state(name)
        source = self._opened.enter_context(Source.open(name))
        count = fitting(source.expected_bytes)
        if source.expected_bytes < BYTES_BEFORE_PROCESSES or count < 2 or not sniff(source.head()):
            return
        processes = Processes.start(count)
        try:
            self._begun = Begun._now(source, processes), state, processes  # noqa: SLF001 - of this module
        except BaseException:
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
            processes.kill()
            with suppress(ThenceError):  # whoever asks is told, and sets everything free
                deque(begun.columns, maxlen=0)
        self._opened.close()


def _state(name: str) -> tuple[int, ...]:
    """What differs where a file was replaced or written to."""
    found = os.stat(name)  # noqa: PTH116 - as `thence.readers.source` looks at names
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_ahead = _Ahead()


def begin(name: str) -> None:
    """Begins to decode a file, if it is a Kineto trace that is large enough for decoding processes.

    What is wrong with the file or its name is left for its reader to say.
    """
    with suppress(ThenceError, OSError, ValueError, MemoryError):
        name.encode()  # a name that is no text cannot be told to other processes
        _ahead.begin(name)


def forget() -> None:
    """Ends what was begun and not asked for."""
    _ahead.forget()
