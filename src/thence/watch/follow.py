"""Follows a recording while it is made: appends a summary of each window to the file of its process.

It runs in a process of its own (`sidecar`), because what computes summaries must not be imported into the recorded
program: Polars alone starts a thread for each core. It reads what the recorder has written, at the lowest priority, and
rests 20 times as long as it worked, so it takes at most a twentieth of one core. Windows that were deleted before they
were read have no summary.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thence import child_python
from thence.capture.recorder.process_facts import folder_name
from thence.errors import ThenceError
from thence.model.formats import DESCRIPTION
from thence.readers.recording.sniffing import process_folders
from thence.watch.summary_file import append, last_end_unix_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOK_SECONDS = 2.0
_REST = 20
"""Time between two looks, in times of what the look before took."""
_LOCK = "summaries.lock"
_PATIENCE_SECONDS = 60.0
"""How long the end of a program waits for the summaries of its last windows."""


class Follower:
    """Summarizes the windows of the processes of a recording, each once.

    One follower at a time summarizes a process: others leave it alone.

    Args:
        directory: of the recording, which other processes may still write.
        host: follow processes of this host alone; empty for all.

    Attributes:
        troubles: by folder, why the last look at it failed.
    """

    def __init__(self, directory: Path, host: str = "") -> None:
        self._directory = directory
        self._host = host
        self._locks: dict[Path, int] = {}
        self._unguarded: set[Path] = set()
        self._seen: dict[Path, int] = {}
        self._ends: dict[Path, int] = {}
        self.troubles: dict[Path, str] = {}

    def look(self) -> None:
        """Summarize what has been written since the last look. Raises nothing."""
        for folder in process_folders(self._directory):
            try:
                changed = (folder / DESCRIPTION).stat().st_mtime_ns
                if changed != self._seen.get(folder) and self._claims(folder):
                    self._summarize(folder)
                    self._seen[folder] = changed
                    self.troubles.pop(folder, None)
            except (OSError, ThenceError, ValueError) as error:
                self.troubles[folder] = str(error)

    def end(self) -> None:
        """Leave the processes to other followers."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _summarize(self, folder: Path) -> None:
        from thence.watch.windows import summarized  # Polars and the readers, once there is a window

        if folder in self._unguarded:  # another follower may have summarized the last ones
            self._ends[folder] = last_end_unix_ns(folder)
        windows = summarized(folder, self._ends[folder])
        if windows:
            append(folder, windows)
            self._ends[folder] = windows[-1].end_unix_ns

    def _claims(self, folder: Path) -> bool:
        """Whether this follower summarizes the process; others do not from then on."""
        if folder in self._locks:
            return True
        if self._host and not folder.name.startswith(f"{self._host}-"):
            return False
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        except OSError:  # the file system has no locks
            self._unguarded.add(folder)
        self._locks[folder] = lock
        self._ends[folder] = last_end_unix_ns(folder)
        return True


@contextmanager
def sidecar(directory: Path) -> Iterator[None]:
    """Follows a recording during the block, in a process of its own, and until its last windows have summaries."""
    try:
        process = subprocess.Popen(  # noqa: S603 - our own module
            child_python.command("-m", "thence.watch.follow", str(directory)),
            env=child_python.environment() | {"POLARS_MAX_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the program
        )
    except OSError:  # no memory or no process left: the recording does not depend on it
        yield
        return
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_PATIENCE_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def follow(directory: Path) -> None:
    """Follows the processes of this host until standard input is closed, also because its writer was killed."""
    with suppress(OSError):
        os.nice(19)  # the program that is recorded goes first
    follower = Follower(directory, folder_name(None).partition("-rank")[0])
    ended = False
    while not ended:
        began = time.monotonic()
        follower.look()
        rest = max(LOOK_SECONDS, _REST * (time.monotonic() - began))
        ended = bool(select.select([sys.stdin], [], [], rest)[0])
    follower.look()
    follower.end()


if __name__ == "__main__":
    follow(Path(sys.argv[1]))
