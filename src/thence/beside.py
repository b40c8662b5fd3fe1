"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TextIO, cast

from thence.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bytes_beside", "text_beside", "umask", "write_beside"]


@contextmanager
def bytes_beside(target: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the target's place when all went well, and else leaves no trace."""
    with tempfile.NamedTemporaryFile(
        dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as file:
        unfinished = Path(file.name)
        try:
            yield cast("IO[bytes]", file)
            file.close()
            unfinished.chmod(0o666 & ~umask())
            unfinished.replace(target)
        except BaseException:
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
    """Writes a file whole or not at all, for use inside the program of a user.

    It leaves the umask alone, which `umask` has to change for a moment for every thread.

    Raises:
        OSError: it cannot be written there.
    """
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def umask() -> int:
    """Permissions that new files must not have; there is no way to ask without setting."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
