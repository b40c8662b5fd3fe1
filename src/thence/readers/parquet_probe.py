"""Reads Parquet and Arrow data in a child process first, because damaged data can abort the process that reads it.

Polars' reader trusts lengths inside pages: with some damage it requests more memory than there is, which ends
the process without an exception. The child process reads everything first; this process reads the data only
after the child has survived. With Polars 2.1, of 10,000 copies of small Parquet files with one to four bytes changed,
one ends the process (SIGABRT, also without a memory limit), three panic and 2,048 raise an exception. The child runs
concurrently with other work, so it costs little time. The stored size of each table determines the child's memory
limit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

from thence import child_python
from thence.errors import DamagedInput, MissingRequirement, ThenceError
from thence.readers.expansion import DEFAULT, Expansion

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from thence.units import Bytes

MAX_ROWS = 50_000_000
"""Maximum rows of one table: a few bytes of Parquet can claim billions of equal rows."""

ARROW_ENDING = ".arrow"
"""Suffix of paths that are read as Arrow, as a file or a stream; all other paths are Parquet."""
# Exit codes of the child. 6: a table is larger than the cap. 0: all tables were read. 4: reading raised an exception,
# which reading in this process raises too.
_LARGE = 6
_EXPECTED = (0, 4)
_PATIENCE_S = 300  # a child that takes longer is ended, and its file refused
_SPARE: Bytes = 1 << 30
"""Address space that the child may use in addition to the tables: thread stacks, and memory that allocators keep."""
_MAX_FAILURES = 20
"""Damaged tables after which `unreadable` counts all others as damaged."""
_CHILD = f"""
import os, sys
os.environ.setdefault("POLARS_MAX_THREADS", "4")
import io, polars
polars.DataFrame({{"a": [1]}}).sort("a")  # starts the threads, whose stacks count
try:
    import resource
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    allowed, hard = resource.getrlimit(resource.RLIMIT_AS)
    def limit(most):
        soft = in_use + 5 * most + {_SPARE}
        if allowed != resource.RLIM_INFINITY:
            soft = min(soft, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
except (ImportError, OSError):
    def limit(most):
        pass
def width(schema):
    return sum(16 if dtype in (polars.String, polars.Binary) else 8 for dtype in schema.values())
def number():
    return int.from_bytes(sys.stdin.buffer.read(8), "little")
def tell(event):
    sys.stdout.write(event)
    sys.stdout.flush()
tell("r")  # ready
while kind := sys.stdin.buffer.read(1):
    most, size = number(), number()
    data = sys.stdin.buffer.read(size)
    try:
        limit(most)
        if kind == b"A":
            path = os.fsdecode(data)
            is_file = open(path, "rb").read(6) == b"ARROW1"
            read = polars.read_ipc(open(path, "rb")) if is_file else polars.read_ipc_stream(path)
            if read.height * width(read.schema) > most:
                sys.exit({_LARGE})
        else:
            if kind == b"P":
                data = open(os.fsdecode(data), "rb").read()
            scanned = polars.scan_parquet(io.BytesIO(data))
            rows = scanned.select(polars.len()).collect().item()
            if rows > {MAX_ROWS}:
                sys.exit(4)
            if rows * width(scanned.collect_schema()) > most:
                sys.exit({_LARGE})
            polars.read_parquet(io.BytesIO(data))
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        sys.exit(5 if type(error).__name__ == "PanicException" else 4)
    tell(".")
"""


@contextlib.contextmanager
def probing(tables: Iterable[bytes | Path], path: str, expansion: Expansion = DEFAULT) -> Iterator[_Probe]:
    """Starts a child process that reads Parquet and Arrow tables as a test; ends it with the block.

    Call `passed` on the result before reading any of the tables in this process.

    Args:
        tables: content or path of each table.
        path: the input, for messages.
        expansion: how much larger than its stored size a table may be.

    Raises:
        MissingRequirement: no process can be started.
    """
    with tempfile.TemporaryFile() as stream, tempfile.TemporaryFile() as progress:
        for data in tables:
            content = os.fsencode(data.absolute()) if isinstance(data, Path) else data
            stored = data.stat().st_size if isinstance(data, Path) else len(data)
            stream.write(_kind(data))
            stream.write(expansion.most(stored).to_bytes(8, "little"))
            stream.write(len(content).to_bytes(8, "little"))
            stream.write(content)
        stream.seek(0)
        child = _started(stream, progress)
        try:
            yield _Probe(child, path, expansion, progress)
        finally:
            child.kill()  # does nothing if it has ended
            child.wait()


def unreadable(files: Sequence[Path], expansion: Expansion = DEFAULT) -> set[Path]:
    """The Parquet and Arrow files that cannot be read.

    Args:
        files: any number of files.
        expansion: how much larger than its stored size a table may be.

    Raises:
        MissingRequirement: no child process can test them.
    """
    bad: set[Path] = set()
    left = list(files)
    while left:
        if len(bad) > _MAX_FAILURES:
            return bad.union(left)
        with probing(left, "", expansion) as probe:
            with contextlib.suppress(DamagedInput):
                probe.passed()
            done = probe.count()
        if done >= len(left):
            return bad
        bad.add(left[done])
        left = left[done + 1 :]
    return bad


def first_unreadable(files: Sequence[Path]) -> tuple[Path, bool] | None:
    """The first Parquet or Arrow file that cannot be read; None if all can.

    Returns:
        The file, and whether it is safe to read it in this process: Polars then raises an exception that says
        what is wrong.

    Raises:
        MissingRequirement: no child process can test them.
    """
    with probing(files, "", DEFAULT) as probe:
        try:
            probe.passed()
            harmless = True
        except MissingRequirement:
            raise
        except ThenceError:
            harmless = False
        done = probe.count()
    return None if done >= len(files) else (files[done], harmless)


def _kind(data: bytes | Path) -> bytes:
    """The request code for the child: A for the path of an Arrow file, P of a Parquet file, D for Parquet data."""
    if isinstance(data, Path):
        return b"A" if data.suffix == ARROW_ENDING else b"P"
    return b"D"


def _started(stream: IO[bytes], progress: IO[bytes]) -> subprocess.Popen[bytes]:
    """The started child. It reads requests from ``stream``, writes to ``progress``: r when ready, a dot for a table.

    Raises:
        MissingRequirement: no process can be started.
    """
    try:
        return subprocess.Popen(  # noqa: S603 - no part of the command comes from outside
            child_python.command("-c", _CHILD),
            env=child_python.environment(),
            stdin=stream,
            stdout=progress,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        program = f"{error.filename}: " if error.filename else ""
        raise _untested(f"{program}{error.strerror or error}") from error


def _untested(reason: str) -> MissingRequirement:
    """The error where no child can test the tables. Without the test, a damaged table could end this process."""
    return MissingRequirement(
        "Parquet and Arrow tables are read in a process of their own first, because a damaged table can end the "
        f"process that reads it, and that process cannot run: {reason}"
    )


class _Probe:
    """A child process that reads tables as a test."""

    def __init__(self, child: subprocess.Popen[bytes], path: str, expansion: Expansion, progress: IO[bytes]) -> None:
        self._child = child
        self._path = path
        self._expansion = expansion
        self._progress = progress

    def count(self) -> int:
        """How many of the tables, in their order, the child has read so far."""
        return max(os.fstat(self._progress.fileno()).st_size - len("r"), 0)

    def passed(self) -> None:
        """Waits for the child.

        Raises:
            DamagedInput: reading aborted the child, took longer than five minutes, or a table exceeds the cap.
            MissingRequirement: the child ended before it read anything.
        """
        try:
            code = self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise DamagedInput(self._path, f"has tables that cannot be read within {_PATIENCE_S:g} s") from error
        if os.fstat(self._progress.fileno()).st_size == 0:
            raise _untested(
                f"it ended with code {code} while it imported Polars (are its memory, threads or modules limited?)"
            )
        if code == _LARGE:
            self._expansion.check(self._path, 0, 1 << 62, "a table")
        if code not in _EXPECTED:
            raise DamagedInput(self._path, "has a damaged table that crashes the process that reads it")
