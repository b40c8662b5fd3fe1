"""The processes that decode pieces of a file: how many there are, how they are started, ended and asked.

The first is started with ``python -m`` on `thence.readers.kineto.decoding`: unlike multiprocessing's spawn this
does not import the caller's main module again, and unlike fork it is safe beside the threads of Polars. It has no
threads itself, and forks the others. This module imports neither NumPy nor anything else that takes time, so that
they start before the process that asks them has imported what it needs itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if sys.platform == "linux":
    import fcntl

if TYPE_CHECKING:
    from io import BufferedReader, BufferedWriter

__all__ = ["BYTES_BEFORE_PROCESSES", "PIECE_BYTES", "Processes", "fitting"]

PIECE_BYTES = 4 << 20
"""Bytes of JSON decoded at a time: enough to amortise the cost of a call, and small enough for the caches."""
BYTES_BEFORE_PROCESSES = 48 << 20
"""JSON that is decoded here before other processes are started: below, starting costs more than it gains."""
_MOST_PROCESSES = 16
"""One process joins what all others decode: more would wait for it."""
_PIPE_BYTES = 1 << 20
"""Asked of the system for each pipe of columns: with its 64 KiB, threads take turns for every 64 KiB that arrive."""
# glibc gives freed memory back to the system at once and fetches it again for the next piece, which
# doubles the system time; these make it keep what one piece needs. Other systems ignore them. NumPy
# would start a thread for each core, for algebra that is not done here.
_ENVIRONMENT = {
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "OPENBLAS_NUM_THREADS": "1",
}


def fitting(expected_bytes: int, cores: int | None = None) -> int:
    """How many processes may decode a file.

    Args:
        expected_bytes: how much JSON there will be, 0 where unknown: there are no more processes than pieces.
        cores: how many may be used; None: all that this process may use.
    """
    processes = min(cores or _usable_cores(), _MOST_PROCESSES)
    return min(processes, -(-expected_bytes // PIECE_BYTES)) if expected_bytes else processes


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Processes:
    """Decoding processes, each asked over one pipe and answering on another.

    Attributes:
        first: the process that forks the others, and waits for them.
        pipes: questions and answers of each.
    """

    first: subprocess.Popen[bytes]
    pipes: tuple[tuple[BufferedWriter, BufferedReader], ...]

    @classmethod
    def start(cls, count: int) -> Processes:
        """Starts so many, and does not wait until they are there."""
        pipes = [(os.pipe(), os.pipe()) for _ in range(count)]
        theirs = [end for asked, answered in pipes for end in (asked[0], answered[1])]
        try:
            first = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
                [sys.executable, "-m", "thence.readers.kineto.decoding", *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Out of reach of Ctrl-C, which a terminal sends to all of its group, from the first moment on.
                process_group=0,
                pass_fds=theirs,
                env=os.environ
                | _ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            for end in theirs:
                os.close(end)
            ours = tuple((os.fdopen(a[1], "wb"), os.fdopen(b[0], "rb")) for a, b in pipes)
        for _, answers in ours:
            _widen(answers)
        return cls(first, ours)

    def dismiss(self) -> None:
        """Lets them end by themselves, once they have answered; does not wait for that."""
        for pipe in (pipe for pair in self.pipes for pipe in pair):
            with suppress(OSError):  # what was to be sent last reaches nobody
                pipe.close()

    def kill(self) -> None:
        """Ends them, whatever they are doing."""
        if self.first.poll() is None:  # else its number may be another's by now
            os.killpg(self.first.pid, signal.SIGKILL)
        self.first.wait()


def _widen(answers: BufferedReader) -> None:
    """Makes a pipe hold more; one user's pipes may not be of any size together."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.fcntl(answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
