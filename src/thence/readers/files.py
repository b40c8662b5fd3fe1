"""Getting bytes out of paths: plain or gzipped files, standard input, directories and globs."""

from __future__ import annotations

import glob
import io
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from isal import igzip, isal_zlib

from thence.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HEAD_BYTES", "STANDARD_INPUT", "Source", "expand"]

STANDARD_INPUT = "-"
HEAD_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
# isal's stub declares its error as an instance of Exception.
_ISAL_ERROR = cast("type[Exception]", isal_zlib.error)
_DAMAGE = (EOFError, igzip.BadGzipFile, _ISAL_ERROR, zlib.error)


@dataclass
class Source:
    """One input as a stream of decompressed bytes.

    Attributes:
        name: the path as the user named it; ``-`` is standard input.
        stored_bytes: size on disk, 0 where unknown; `consumed` counts in the same unit.
        plain: the bytes on disk are the bytes of the stream, so that offsets can be handed on.
        damage: why the stream ended early, filled in while reading; None when it did not.
    """

    name: str
    stream: BinaryIO
    stored_bytes: int
    plain: bool
    damage: str | None = None
    _raw: BinaryIO | None = None
    _ahead: bytes = b""

    @classmethod
    @contextmanager
    def open(cls, name: str) -> Iterator[Source]:
        """The input, gunzipped where its first bytes say so.

        Raises:
            InputError: it does not exist, is a directory, or may not be read.
        """
        if name == STANDARD_INPUT:
            raw: io.BufferedReader = io.BufferedReader(sys.stdin.buffer, HEAD_BYTES)  # type: ignore[arg-type]
            size = 0
        else:
            try:
                raw = Path(name).open("rb")  # noqa: SIM115 - closed below
                size = Path(name).stat().st_size
            except OSError as error:
                reason = error.strerror or str(error)
                raise InputError(name, f"cannot be opened ({reason})") from error
            except ValueError as error:
                raise InputError(name, f"is no path ({error})") from error
        try:
            if raw.peek(2)[:2] == _GZIP_MAGIC:
                unzipped = igzip.IGzipFile(fileobj=raw)  # type: ignore[no-untyped-call]
                yield cls(name, unzipped, size, plain=False, _raw=raw)  # type: ignore[arg-type]
            else:
                yield cls(name, raw, size, plain=name != STANDARD_INPUT, _raw=raw)
        except IsADirectoryError as error:
            raise InputError(name, "is a directory") from error
        finally:
            if name != STANDARD_INPUT:
                raw.close()

    def head(self) -> bytes:
        """The first decompressed bytes, up to `HEAD_BYTES`; reading starts with them all the same."""
        while len(self._ahead) < HEAD_BYTES and (more := self._take(HEAD_BYTES - len(self._ahead))):
            self._ahead += more
        return self._ahead

    @property
    def consumed(self) -> int:
        """How many of `stored_bytes` have been read."""
        if self._raw is None or not self.stored_bytes:
            return 0
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """Up to ``size`` decompressed bytes; less only at the end, or where the compression breaks."""
        parts = [self._ahead[:size]]
        self._ahead = self._ahead[size:]
        size -= len(parts[0])
        while size > 0 and (part := self._take(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def seek(self, offset: int) -> None:
        """Makes reading go on at an offset; only where the stream is `plain`."""
        self._ahead = b""
        self.stream.seek(offset)

    def _take(self, size: int) -> bytes:
        if self.damage is not None:
            return b""
        try:
            return self.stream.read(size)
        except _DAMAGE as error:
            self.damage = f"the gzip data is cut or damaged ({error})"
        except OSError as error:
            self.damage = f"reading failed ({error.strerror or error})"
        return b""


def expand(inputs: list[str], patterns: tuple[str, ...]) -> list[str]:
    """Files behind the inputs: themselves, what a glob matches, what a directory holds.

    Args:
        inputs: paths, globs, directories, or ``-``.
        patterns: globs that say which files of a directory count, searched in all its folders.

    Raises:
        InputError: nothing was found for one of the inputs.
    """
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if name == STANDARD_INPUT or path.is_file():
            files.append(name)
        elif path.is_dir():
            found = sorted(
                {str(p) for pattern in patterns for p in path.rglob(pattern) if p.is_file()}
            )
            if not found:
                raise InputError(
                    name, f"no trace in this directory (looked for {', '.join(patterns)})"
                )
            files.extend(found)
        elif glob.has_magic(name):
            matches = glob.glob(name, recursive=True)  # noqa: PTH207 - pathlib takes no absolute pattern
            found = sorted(p for p in matches if Path(p).is_file())
            if not found:
                raise InputError(name, "no file matches this pattern")
            files.extend(found)
        else:
            files.append(name)  # opening it will say what is wrong with it
    return list(dict.fromkeys(files))
