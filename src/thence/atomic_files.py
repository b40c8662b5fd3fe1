"""Atomic writes: a temporary file in the target's folder, renamed to the target when it is complete."""

from __future__ import annotations

import io
import secrets
import shutil
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["atomic_folder", "atomic_open", "atomic_open_text", "atomic_write", "temporary_path"]


def temporary_path(target: Path) -> Path:
    """A hidden, random name in the target's folder."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}"


@contextmanager
def atomic_open(target: Path) -> Iterator[IO[bytes]]:
    """A binary file that replaces the target when the block ends without an exception.

    After an exception the target is as it was before, and the temporary file is deleted.

    Raises:
        OSError: the target cannot be written.
    """
    temporary = temporary_path(target)
    file = temporary.open("xb")
    try:
        with file:
            yield file
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
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
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


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
    unfinished.mkdir()
    try:
        yield unfinished
        with suppress(FileNotFoundError):
            place.rename(replaced)
        try:
            unfinished.rename(place)
        except BaseException:
            with suppress(FileNotFoundError):
                replaced.rename(place)
            raise
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)
