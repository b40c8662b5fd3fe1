"""Atomic writes: a temporary file in the target's folder, renamed to the target when it is complete.

What replaces a file or a folder gets its permissions, and only its user can read it until then: contents that others
may not read never become readable for them. What is new has the permissions that the umask leaves.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import stat
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def not_written(target: Path, error: Exception) -> str:
    """The sentence about an output that could not be written: the path, the reason, and what is there now.

    Args:
        target: the file or folder, which is written as `atomic_open` and `atomic_folder` do.
        error: of the system, or of a library that has the number of such an error in its message.
    """
    cause = os_error(error, target)
    known = isinstance(error, OSError) or _OS_ERROR.search(str(error))
    reason = (known and cause.strerror) or str(error)
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            free = shutil.disk_usage(target.parent).free
            reason += f" ({free / 1e6:,.1f} MB are free in {target.parent})"
    left = "what was there is unchanged" if os.path.lexists(target) else "nothing is left there"
    return f"{target}: cannot be written: {reason}; {left}"


def os_error(error: Exception, path: Path) -> OSError:
    """The error of the system that an exception is, or that it has in its message, as those of Polars do."""
    if isinstance(error, OSError):
        return error
    told = _OS_ERROR.search(str(error))
    number = int(told[1]) if told else errno.EIO
    return OSError(number, os.strerror(number), str(path))


def temporary_path(target: Path) -> Path:
    """A hidden name in the target's folder that nobody can guess; what is made there fails if it exists."""
    return target.parent / f".{target.name}.{os.urandom(4).hex()}"


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder; one at the target is replaced.

    A file system of a network may say that a rename failed which it has done: the target is asked before that counts.

    Raises:
        OSError: it could not be renamed.
    """
    state = source.lstat()
    try:
        source.replace(target)
    except OSError:
        with suppress(OSError):
            if os.path.samestat(state, target.lstat()):
                return
        raise


def _permissions(target: Path) -> int | None:
    """The permissions of a file or folder that is to be replaced; None if there is none."""
    try:
        return stat.S_IMODE(target.stat().st_mode) & 0o777  # without set-user-id, set-group-id and the sticky bit
    except OSError:
        return None


def _permit(path: Path, permissions: int | None) -> None:
    if permissions is not None:
        with suppress(OSError):  # of a file system without permissions
            path.chmod(permissions)


@contextmanager
def atomic_open(target: Path) -> Iterator[IO[bytes]]:
    """A binary file that replaces the target when the block ends without an exception.

    After an exception the target is as it was before, and the temporary file is deleted.

    Raises:
        OSError: the target cannot be written.
    """
    temporary = temporary_path(target)
    permissions = _permissions(target)
    # A file that replaces a private one is private from its first byte on; the permissions follow at the end.
    made_with = 0o666 if permissions is None else 0o600
    file = open(  # noqa: SIM115 - closed below, before it is renamed
        temporary, "xb", opener=lambda name, flags: os.open(name, flags, made_with)
    )
    try:
        with file:
            yield file
        _permit(temporary, permissions)
        rename(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


@contextmanager
def atomic_open_text(target: Path) -> Iterator[TextIO]:
    """As `atomic_open`, for UTF-8 text with line feeds.

    Raises:
        UsageError: the target cannot be written.
    """
    try:
        with atomic_open(target) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            yield text
            text.flush()
            text.detach()
    except OSError as error:
        raise UsageError(not_written(target, error)) from error


def atomic_write(target: Path, content: bytes | memoryview) -> None:
    """Replaces the target with the content.

    Raises:
        OSError: the target cannot be written.
    """
    with atomic_open(target) as file:
        file.write(content)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """An empty folder that replaces the target when the block ends without an exception.

    After an exception the target is as it was before, and the temporary folder is deleted. The previous content of
    the target is deleted only after the new folder has its name.

    Raises:
        OSError: the folder cannot be written there.
    """
    place = target.resolve()  # a symbolic link stays, and what it points to is replaced
    unfinished, replaced = temporary_path(place), temporary_path(place)
    permissions = _permissions(place)
    unfinished.mkdir(0o777 if permissions is None else 0o700)
    try:
        yield unfinished
        _permit(unfinished, permissions)
        with suppress(FileNotFoundError):
            rename(place, replaced)
        try:
            rename(unfinished, place)
        except BaseException:
            with suppress(FileNotFoundError):
                rename(replaced, place)
            raise
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
