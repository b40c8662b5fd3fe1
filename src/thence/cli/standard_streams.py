"""Standard output and error that write everything they are given, or say in one sentence why not.

Python's own have three faults that matter here: with ``PYTHONUNBUFFERED`` a write that the system did
only in part is taken for done, a closed stream is None, and what fails while the interpreter ends
is printed as a traceback. `checked_streams` puts others in their place for the length of a command.
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

__all__ = ["ReaderGone", "Unwritable", "checked_streams"]

_STANDARD = (0, 1, 2)
"""Descriptors of standard input, output and error."""


class Unwritable(ThenceError):
    """Standard output or standard error does not take what is written to it."""


class ReaderGone(Exception):
    """Nobody reads the pipe that standard output or standard error is.

    No `OSError`, because libraries catch those of broken pipes and exit in their own ways.
    """


class _Checked(io.RawIOBase):
    """The raw layer of a stream; after a failure it takes whatever comes, and drops it."""

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
            ReaderGone: the stream is a pipe that nobody reads.
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
        if written is None:  # a stream that does not block, and is full
            select.select([], [self._raw], [])
            return 0
        return written


class _Text(io.TextIOWrapper):
    """Text over `_Checked`."""

    def write(self, text: str) -> int:
        """Writes text.

        Raises:
            Unwritable: the encoding lacks one of its characters; see also `_Checked.write`.
        """
        try:
            return super().write(text)
        except UnicodeEncodeError as error:
            raise Unwritable(
                f"the encoding of the output, {self.encoding}, lacks {text[error.start]!a}; "
                "PYTHONIOENCODING=utf-8 writes it, and so does -o with a file"
            ) from error


@contextlib.contextmanager
def checked_streams() -> Iterator[None]:
    """Puts checked streams in the place of ``sys.stdout`` and ``sys.stderr``.

    On the way out standard output is flushed, unless the block raised. Streams that a caller has put in their
    place already, as tests do, stay.

    Raises:
        Unwritable: what was written last does not reach standard output.
        ReaderGone: nobody reads it any more.
    """
    before = sys.stdout, sys.stderr
    _open_descriptors()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _checked(sys.__stdout__, "standard output")
    if sys.stderr is None:
        # Whoever closes standard error wants no messages; the exit code still tells.
        sys.stderr = io.TextIOWrapper(io.BytesIO(), write_through=True)
    elif sys.stderr is sys.__stderr__:
        sys.stderr = _checked(sys.__stderr__, "standard error")
    try:
        yield
        sys.stdout.flush()
    finally:
        for stream in (sys.stdout, sys.stderr):
            # What is left after a failure has nowhere to go.
            with contextlib.suppress(Unwritable, ReaderGone, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = before


def _open_descriptors() -> None:
    """Occupies closed standard descriptors, so that no file that is opened later gets their number.

    Whatever libraries write as an error would then go into that file.
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
        raw = getattr(below, "raw", below)  # without buffer under PYTHONUNBUFFERED
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
