"""Reads Parquet and Arrow data in a child process first, because damaged data can abort the process that reads it.

Polars' reader trusts lengths inside pages: some damage makes it ask for more memory than there is,
which ends the process without an exception. The child below reads everything first; only when it
has survived is the data read here. It runs beside other work, so it costs little time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from thence.errors import DamagedInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["ARROW_ENDING", "MAX_ROWS", "probing"]

MAX_ROWS = 50_000_000
"""Most rows of one table: a few bytes of Parquet can claim billions of equal rows."""

ARROW_ENDING = ".arrow"
"""Of paths that are read as Arrow, as a file or a stream; all others are Parquet."""
_EXPECTED = (0, 3, 4)  # all read; polars cannot be imported there; an error that will show here too
_PATIENCE_S = 300
_CHILD = f"""
import sys
try:
    import io, os, polars
except ImportError:
    sys.exit(3)
while kind := sys.stdin.buffer.read(1):
    data = sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little"))
    try:
        if kind == b"A":
            path = os.fsdecode(data)
            is_file = open(path, "rb").read(6) == b"ARROW1"
            polars.read_ipc(path) if is_file else polars.read_ipc_stream(path)
            continue
        if kind == b"P":
            data = open(os.fsdecode(data), "rb").read()
        if polars.scan_parquet(io.BytesIO(data)).select(polars.len()).collect().item() > {MAX_ROWS}:
            sys.exit(4)
        polars.read_parquet(io.BytesIO(data))
    except BaseException as error:
        sys.exit(5 if type(error).__name__ == "PanicException" else 4)
"""


@contextlib.contextmanager
def probing(tables: Iterable[bytes | Path], path: str) -> Iterator[_Probe]:
    """Begins to try Parquet and Arrow files; call `passed` on the result before reading any of them.

    Args:
        tables: content of the files, or where they are.
        path: for messages.
    """
    with tempfile.TemporaryFile() as stream:
        for data in tables:
            content = os.fsencode(data.absolute()) if isinstance(data, Path) else data
            stream.write(_kind(data))
            stream.write(len(content).to_bytes(8, "little"))
            stream.write(content)
        stream.seek(0)
        child = _started(stream)
        try:
            yield _Probe(child, path)
        finally:
            if child is not None:
                child.kill()  # does nothing where it has ended
                child.wait()


def _kind(data: bytes | Path) -> bytes:
    """How the child is to read: an Arrow file, a Parquet file, or Parquet data."""
    if isinstance(data, Path):
        return b"A" if data.suffix == ARROW_ENDING else b"P"
    return b"D"


def _started(stream: IO[bytes]) -> subprocess.Popen[bytes] | None:
    """The child, reading from a file; None where no process can be started: then nothing protects."""
    # Our own interpreter and code, isolated from the environment.
    try:
        return subprocess.Popen(  # noqa: S603 - no part of the command comes from outside
            [sys.executable, "-I", "-c", _CHILD],
            stdin=stream,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None


class _Probe:
    """A child that tries to read."""

    def __init__(self, child: subprocess.Popen[bytes] | None, path: str) -> None:
        self._child = child
        self._path = path

    def passed(self) -> None:
        """Waits for the child.

        Raises:
            DamagedInput: reading ended the child, or took longer than five minutes.
        """
        if self._child is None:
            return
        try:
            code = self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise DamagedInput(self._path, "has tables that cannot be read in time") from error
        if code not in _EXPECTED:
            raise DamagedInput(self._path, "has a damaged table, one that ends its reader")
