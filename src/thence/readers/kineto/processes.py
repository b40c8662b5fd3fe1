"""The processes that decode pieces of a file: their number, start and end, and the pipes to them.

The first process is started with ``python -m`` on `thence.readers.kineto.decoding`: unlike multiprocessing's spawn
this does not import the caller's main module again, and unlike fork it is safe in a process in which Polars has
started threads. The first process has no threads itself, and forks the others. This module imports neither NumPy nor
anything else that takes time, so that the processes can start before the calling process has imported its modules.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thence import child_python

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from io import BufferedReader, BufferedWriter

PIECE_BYTES = 16 << 20
"""Bytes of JSON decoded at a time. Names and inputs of operators repeat in every piece, and are decoded once for
each: larger pieces take less time, but more memory."""
BYTES_BEFORE_PROCESSES = 48 << 20
"""Bytes of JSON decoded in this process before others are started: for less, starting them costs more than it saves."""
_MAX_PROCESSES = 16
"""Maximum number of processes: one process joins the columns of all, so further processes would wait for it."""
_PIPE_BYTES = 1 << 20
"""Capacity requested for each pipe of columns: with the default of 64 KiB, threads switch for every 64 KiB."""
# glibc returns freed memory to the system at once and allocates it again for the next piece, which
# doubles the system time; the MALLOC_ variables make it keep the memory that one piece needs. Other C libraries
# ignore them. Without OPENBLAS_NUM_THREADS, NumPy would start a thread for each core, for linear algebra that is
# not used here.
_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


def fitting(expected_bytes: int, cores: int | None = None) -> int:
    """How many processes may decode a file.

    Args:
        expected_bytes: estimated size of the JSON, 0 if unknown: there are no more processes than pieces.
        cores: how many cores may be used; None: all that this process may use.
    """
    processes = min(cores or _usable_cores(), _MAX_PROCESSES)
    return min(processes, -(-expected_bytes // PIECE_BYTES)) if expected_bytes else processes


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Processes:
    """Decoding processes, each with a pipe for requests and a pipe for answers.

    Attributes:
        first: the process that forks the others, and waits for them.
        pipes: pipes to and from each process: requests, answers.
    """

    first: subprocess.Popen[bytes]
    pipes: tuple[tuple[BufferedWriter, BufferedReader], ...]

    @classmethod
    def start(cls, count: int) -> Processes:
        """Starts ``count`` processes, without waiting until they are ready."""
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        theirs = [end for asked, answered in pipes for end in (asked[0], answered[1])]
        try:
            first = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
                child_python.command("-m", "thence.readers.kineto.decoding", *map(str, theirs)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A process group of its own from the start: a terminal sends Ctrl-C to all of its own group.
                process_group=0,
                pass_fds=theirs,
                env=child_python.environment() | _ENVIRONMENT,
            )
        finally:
            for end in theirs:
                os.close(end)
            ours = tuple((os.fdopen(a[1], "wb"), os.fdopen(b[0], "rb")) for a, b in pipes)
        for _, answers in ours:
            _widen(answers)
        return cls(first, ours)

    def dismiss(self) -> None:
        """Closes the pipes, so that the processes exit after their current piece; does not wait for their exit."""
        for pipe in (pipe for pair in self.pipes for pipe in pair):
            with suppress(OSError):  # buffered data for a process that has exited
                pipe.close()

    def kill(self) -> None:
        """Kills the processes."""
        if self.first.poll() is None:  # otherwise another process may have the same id by now
            os.killpg(self.first.pid, signal.SIGKILL)
        self.first.wait()


def _widen(answers: BufferedReader) -> None:
    """Enlarges the buffer of a pipe, unless that exceeds the system's limit for one user's pipes."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
