"""Answers an SQL query in a child process, with limits on time and memory, and without access to files.

A query such as a join without a condition can need more memory than there is, which ends the process. The child
process reads the tables from Arrow files, opens the file for its result, gives up the right to open further files,
and then answers the query.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from thence import child_python
from thence.analysis.sql import answer
from thence.errors import MissingRequirement, ThenceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.units import Bytes

_QUERY, _RESULT, _ENDING, _PLAN = "query", "result", ".arrow", ".plan"
_REFUSED = 3  # exit code: the file for the result holds a message instead
_TOO_LARGE = 4


def bounded_answer(
    frames: Mapping[str, pl.DataFrame | pl.LazyFrame], query: str, most_seconds: float, most_bytes: Bytes
) -> pl.DataFrame:
    """The answer of a query, as `thence.analysis.sql.answer` gives it.

    Args:
        frames: tables by name. The child process collects lazy frames, and may open files if there are any.
        most_seconds: time limit.
        most_bytes: memory that the query may take in addition to the tables.

    Raises:
        UsageError: the query is wrong, or exceeds a limit.
        MissingRequirement: the child process cannot be started, or does not work.
    """
    with tempfile.TemporaryDirectory(prefix="thence-") as name:
        folder = Path(name)
        (folder / _QUERY).write_text(query, "utf-8", errors="replace")
        for table, frame in frames.items():
            if isinstance(frame, pl.LazyFrame):
                (folder / f"{table}{_PLAN}").write_bytes(frame.serialize())
            else:
                frame.write_ipc(folder / f"{table}{_ENDING}", compression="uncompressed")
        code = _ended(folder, most_seconds, most_bytes)
        result = folder / _RESULT
        if code == 0:
            return pl.read_ipc(result)
        if code == _REFUSED:
            raise UsageError(result.read_text("utf-8"))
        if code > 0 and code != _TOO_LARGE:
            raise MissingRequirement(f"the process that runs queries failed (exit code {code})")
        raise UsageError(
            f"the query needs more than {most_bytes / 1e9:g} GB of memory; --memory-limit allows more, a condition or "
            "LIMIT needs less"
        )


def _ended(folder: Path, most_seconds: float, most_bytes: Bytes) -> int:
    """Runs `_answer` in a child process and returns its exit code."""
    try:
        return subprocess.run(  # noqa: S603 - our own module in our own interpreter
            child_python.command("-m", __name__, str(folder), str(most_bytes)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_python.environment(),
            timeout=most_seconds,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"the query takes longer than {most_seconds:g} s; --time-limit allows more") from error
    except OSError as error:
        raise MissingRequirement(
            f"no process can be started to answer the query ({error.strerror or error})"
        ) from error


def _answer(folder: Path, most_bytes: Bytes) -> int:
    """Answers the query in the child process; returns the exit code."""
    query = (folder / _QUERY).read_text("utf-8")
    frames: dict[str, pl.DataFrame | pl.LazyFrame] = {
        file.stem: pl.read_ipc(file) for file in sorted(folder.glob(f"*{_ENDING}"))
    }
    plans = {
        file.stem: pl.LazyFrame.deserialize(io.BytesIO(file.read_bytes())) for file in sorted(folder.glob(f"*{_PLAN}"))
    }
    with (folder / _RESULT).open("wb") as result:
        try:
            _confine(most_bytes, opening=bool(plans))
            answer(frames | plans, query).write_ipc(result)
        except ThenceError as error:
            result.write(str(error).encode("utf-8", "replace"))
            return _REFUSED
        except MemoryError:
            return _TOO_LARGE
    return 0


def _confine(most_bytes: Bytes, *, opening: bool) -> None:
    """Limits the memory of this process, and unless ``opening`` forbids it to open further files."""
    try:
        import resource
    except ImportError:  # Windows
        return
    # Threads and file writers that Polars starts on first use need memory and descriptors: start them now.
    pl.DataFrame({"a": [1, 2]}).lazy().sort("a").collect().write_ipc(io.BytesIO())
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        limit = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except OSError:  # no /proc: macOS, which does not enforce the limit either
        pass
    if not opening:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


if __name__ == "__main__":
    sys.exit(_answer(Path(sys.argv[1]), int(sys.argv[2])))
