"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import io
import secrets
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, TextIO

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["bytes_beside", "place_beside", "text_beside", "write_beside"]


def place_beside(target: Path) -> Path:
    """A hidden name in the target's folder that nothing has yet."""
    return target.parent / f".{target.name}.{secrets.token_hex(4)}"


@contextmanager
def bytes_beside(target: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the target's place when all went well, and else leaves no trace."""
    unfinished = place_beside(target)
    file = unfinished.open("xb")
    try:
        with file:
            yield file
        unfinished.replace(target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


@contextmanager
def text_beside(target: Path) -> Iterator[TextIO]:
    """The same for UTF-8 text with line feeds.

    Raises:
        UsageError: the file cannot be written there.
    """
    try:
        with bytes_beside(target) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8", newline="\n")
            yield text
            text.flush()
            text.detach()
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def write_beside(target: Path, content: bytes | memoryview) -> None:
    """The same for content that is at hand.

    Raises:
        OSError: it cannot be written there.
    """
    with bytes_beside(target) as file:
        file.write(content)
