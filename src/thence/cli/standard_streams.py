"""Standard output and error streams that write everything they are given, or raise an error with the reason.

Python's own streams have three faults that matter here: with ``PYTHONUNBUFFERED``, a write that the system
did only in part counts as complete; a closed stream is None; and a failure while the interpreter ends is
printed as a traceback. `checked_streams` replaces the streams for the duration of a command.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO

from thence.errors import ThenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_STANDARD = (0, 1, 2)
"""Descriptors of standard input, output and error."""


class Unwritable(ThenceError):
    """Standard output or standard error cannot be written."""


class ReaderGone(Exception):
    """Standard output or standard error is a pipe, and its reader has closed it.

    This is not an `OSError`, because libraries catch the `OSError` of a broken pipe and exit in their own ways.
    """


class _Checked(io.RawIOBase):
    """The raw layer of a stream; after a failure it accepts and discards all further output."""

    def __init__(self, raw: io.RawIOBase | None, name: str) -> None:
        self._raw = raw
        self._name = name
        self._failed = False

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._raw is not None and self._raw.isatty()

    def fileno(self) -> int:
        if self._raw is None:
            raise io.UnsupportedOperation("fileno")
        return self._raw.fileno()

    def write(self, data: object) -> int:
        """Writes all of the bytes.

        Raises:
            Unwritable: the stream is closed, or the system refused.
            ReaderGone: the stream is a pipe whose reader has closed it.
        """
        content = memoryview(data)  # type: ignore[arg-type]
        size = content.nbytes
        while content.nbytes and not self._failed:
            try:
                content = content[self._some(content) :]
            except OSError as error:
                self._failed = True
                if error.errno == errno.EPIPE:
                    raise ReaderGone from error
                reason = error.strerror or str(error)
                raise Unwritable(f"{self._name} cannot be written: {reason}") from error
        return size

    def _some(self, content: memoryview) -> int:
        if self._raw is None:
            raise OSError(errno.EBADF, "it is closed")
        written = self._raw.write(content)
        if written is None:  # a non-blocking stream that is full
            select.select([], [self._raw], [])
            return 0
        return written


class _Text(io.TextIOWrapper):
    """The text layer of a stream over `_Checked`."""

    def write(self, text: str) -> int:
        """Writes text.

        Raises:
            Unwritable: the encoding lacks a character of the text; see also `_Checked.write`.
        """
        try:
            return super().write(text)
        except UnicodeEncodeError as error:
            raise Unwritable(
                f"the encoding of the output, {self.encoding}, cannot represent {text[error.start]!a}; "
                "set PYTHONIOENCODING=utf-8, or write to a file with -o"
            ) from error


@contextlib.contextmanager
def checked_streams() -> Iterator[None]:
    """Replaces ``sys.stdout`` and ``sys.stderr`` by checked streams.

    At the end both are flushed; an error in flushing standard output is raised, unless the block raised already.
    Streams that a caller has already replaced, as tests do, are kept.

    Raises:
        Unwritable: the rest of standard output cannot be written.
        ReaderGone: the reader of standard output has closed it.
    """
    before = sys.stdout, sys.stderr
    _open_descriptors()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _checked(sys.__stdout__, "standard output")
    if sys.stderr is None:
        # Standard error was closed, so messages are discarded; the exit code still shows a failure.
        sys.stderr = io.TextIOWrapper(io.BytesIO(), write_through=True)
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _checked(sys.__stderr__, "standard error")
    try:
        yield
        sys.stdout.flush()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # Output that is left after a failure cannot be written anywhere.
            with contextlib.suppress(Unwritable, ReaderGone, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _open_descriptors() -> None:
    """Opens the null device on closed standard descriptors, so that no file that is opened later gets their number.

    Error messages that libraries write to the descriptor would otherwise go into that file.
    """
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)  # the lowest free number is this one


def _checked(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:
        return _Text(io.BufferedWriter(_Checked(None, name)), "utf-8")
    try:
        below: Any = stream.buffer
        raw = getattr(below, "raw", below)  # under PYTHONUNBUFFERED, buffer is the raw layer
        stream.flush()
    except (AttributeError, OSError):
        return stream
    return _Text(
        io.BufferedWriter(_Checked(raw, name)),
        stream.encoding,
        stream.errors,
        newline=None if os.linesep == "\n" else "\r\n",
        line_buffering=raw.isatty() or name == "standard error",
    )
