"""Notes that processes leave in a recording's directory, so that ``thence record`` can state what is missing and why.

    .begun-PID           the process began to record and has not finished; its content is a reason, if there is one
    .begun-PID.refused   the process could not be recorded; its content is the reason
    .begun-PID.unseen    the process started a Python that does not record itself; its content is the reason

The first is an open file of `_BYTES` from the beginning on, so that the reason why nothing can be written has a place
in it even if the disk is full, or the process has changed its user.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple

BEGUN, REFUSED, UNSEEN = "", ".refused", ".unseen"
"""Kinds of notes: endings of their names."""
_NAME = ".begun-"
_BYTES = 500


class OpenNote:
    """A note of this process."""

    def __init__(self, directory: str | os.PathLike[str], kind: str = BEGUN) -> None:
        self._directory = directory
        self._kind = kind
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None

    def write(self) -> None:
        """Create the note, with space for a reason."""
        with suppress(OSError):  # a full disk is reported with the first part
            self._file = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._identity = _identity(self._file)
            os.write(self._file, b" " * _BYTES)

    def close(self, reason: str | None) -> None:
        """Write a reason into the note, which then stays, or delete it if there is none."""
        file, self._file = self._file, None
        with suppress(OSError):
            if file is None or _identity(file) != self._identity:
                return  # there is none, or the program has closed all files
            if reason is None:
                os.unlink(self._path())  # noqa: PTH108 - pathlib would delay processes that use no GPU
            else:
                os.pwrite(file, reason.encode(errors="replace")[:_BYTES].ljust(_BYTES), 0)
        with suppress(OSError):
            os.close(file or -1)

    def _path(self) -> str:
        return os.path.join(self._directory, f"{_NAME}{os.getpid()}{self._kind}")  # noqa: PTH118


class Note(NamedTuple):
    """What a note says.

    Attributes:
        pid: of the process that left it.
        kind: `BEGUN`, `REFUSED` or `UNSEEN`.
        reason: None if it holds none.
    """

    pid: int
    kind: str
    reason: str | None


def leave_note(directory: str | os.PathLike[str], kind: str, reason: str) -> None:
    """Leave a note of this process for `notes`; a note of the same kind is replaced."""
    note = OpenNote(directory, kind)
    note.write()
    note.close(reason)


def notes(directory: str | os.PathLike[str]) -> list[Note]:
    """The notes in a directory. Those of processes that have ended are deleted."""
    left: list[Note] = []
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208
    except OSError:  # the program removed it
        return left
    for name in names:
        number, point, kind = name.removeprefix(_NAME).partition(".")
        if not name.startswith(_NAME) or not number.isdigit():
            continue
        path = os.path.join(directory, name)  # noqa: PTH118
        left.append(Note(int(number), point + kind, _reason(path)))
        if not _runs(int(number)):
            with suppress(OSError):
                os.unlink(path)  # noqa: PTH108
    return left


def _reason(path: str) -> str | None:
    try:
        with open(path, errors="replace") as file:  # noqa: PTH123
            content = file.read()
    except OSError:
        return None
    # A note is empty if not even its space could be written.
    return content.strip() or None if content else f"{os.path.dirname(path)} cannot be written to"  # noqa: PTH120


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
