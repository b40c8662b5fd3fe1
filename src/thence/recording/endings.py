"""Finishes a recording when its process ends, in whatever way it ends.

What finishes the recording, by the way in which the process ends:

    the program ends           atexit
    a multiprocessing child    leaves by ``os._exit``, which skips atexit; `multiprocessing.util.Finalize` runs
    a worker of a Pool         is ended by SIGTERM; a handler finishes the recording and then lets the signal end
                               the process. It is set in multiprocessing children only, and only if the signal
                               has its default action
    os._exit, exec, a crash    cannot be noticed. What was written until then stays. A note in the recording's
                               directory shows that the process began to record and did not finish
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Endings", "begun_processes"]

_NOTE = ".begun-"


class Endings:
    """Calls a function when this process ends.

    Args:
        directory: of the recording; the note is written there.
        stop: finishes the recording. It may be called in any of these ways, and more than once.
    """

    def __init__(self, directory: Path, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._directory = directory
        self._pid = 0
        self._finalizer: Any = None
        self._handles_sigterm = False
        self._finishing = False
        self._waiting_signal: int | None = None

    def expect(self) -> None:
        """Registers the function to be called when the process ends, and writes the note."""
        self._pid = os.getpid()
        with contextlib.suppress(OSError):  # a full disk is reported with the first part
            self._note().touch()
        atexit.register(self._stop)
        process = sys.modules.get("multiprocessing.process")
        if process is None or process.parent_process() is None:
            return
        # No import is needed: a multiprocessing child has imported multiprocessing.util to run at all.
        finalize = sys.modules["multiprocessing.util"].Finalize
        self._finalizer = finalize(None, self._stop, exitpriority=0)
        on_main_thread = threading.current_thread() is threading.main_thread()
        if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)
            self._handles_sigterm = True

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Delays SIGTERM while the recording is being finished: a Pool sends it to workers that are exiting."""
        self._finishing = True
        try:
            yield
        finally:
            self._finishing = False
            if self._waiting_signal is not None:
                os.kill(os.getpid(), self._waiting_signal)

    def forget(self) -> None:
        """Unregisters the function and deletes the note, because the recording is finished."""
        if os.getpid() != self._pid:
            return  # a forked child: the note and the recording belong to its parent
        with contextlib.suppress(OSError):
            self._note().unlink(missing_ok=True)
        atexit.unregister(self._stop)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._terminated:
            with contextlib.suppress(
                ValueError
            ):  # not the main thread: the handler stays, and only ends the process
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self) -> Path:
        return self._directory / f"{_NOTE}{self._pid}"

    def _terminated(self, number: int, _frame: object) -> None:
        if self._finishing:
            self._waiting_signal = number
            return
        self._stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def begun_processes(directory: Path) -> list[int]:
    """Ids of the processes that began to record in a directory and have not finished.

    Notes of processes that have ended are removed.
    """
    begun = []
    for note in sorted(directory.glob(f"{_NOTE}*")):
        number = note.name.removeprefix(_NOTE)
        if not number.isdigit():
            continue
        begun.append(int(number))
        if not _runs(int(number)):
            with contextlib.suppress(OSError):
                note.unlink()
    return begun


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
