"""Finishes a recording when its process ends, in whatever way it ends.

What finishes the recording, by the way in which the process ends:

    the program ends           atexit
    a multiprocessing child    leaves by ``os._exit``; `multiprocessing.util.Finalize` runs before that
    os._exit, os.exec*         are replaced, during the recording, by functions that first write what there is
    SIGTERM                    while the signal has its default action in Python: a handler in C (``_signals.c``) notes
                               it; the recorder's thread, which looks for it a few times a second, writes what there is
                               and then does what the signal would have done. `signal.signal` is replaced, too: servers
                               handle the signal, restore the default action and raise it again.
                               Without the compiled probe: a handler in Python, in multiprocessing children only,
                               because it runs when the main thread does, which may be never
    SIGKILL, a crash           cannot be noticed. What was written until then stays

In the second half of the table, nothing waits for the device: kernels that have not ended by then are missing.

A note in the recording's directory shows that the process began to record and did not finish
(`thence.capture.session.notes`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from thence.capture.boundaries.probe import choose_probe
from thence.capture.session.notes import OpenNote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

_SIGNAL_SECONDS = 5.0
"""Time after which SIGTERM ends the process although the recording is not finished. Pool and torchrun wait longer
before they send SIGKILL (30 s in torchrun)."""
_REPLACED = ("_exit", "execv", "execve")
"""Functions of `os` that end the program without a trace; all other ``os.exec*`` call one of these."""


class Endings:
    """Calls a function when this process ends.

    Args:
        directory: of the recording; the note is written there.
        stop: finishes the recording. It may be called more than once.
        complete: writes what was recorded so far, within seconds, as the process is about to end. It may be called
            on any thread, more than once, and after `stop`.
    """

    def __init__(self, directory: Path, stop: Callable[[], None], complete: Callable[[], None]) -> None:
        self._stop = stop
        self._complete = complete
        self._note = OpenNote(directory)
        self._pid = 0
        self._finalizer: Any = None
        self._handles_sigterm = False
        self._watcher: ModuleType | None = None
        self._finishing = threading.RLock()
        self._busy = False
        self._waiting_signal: int | None = None
        self._originals: dict[str, Callable[..., Any]] = {}
        self._set_handler: Callable[..., Any] | None = None

    def expect(self) -> None:
        """Registers the functions to be called when the process ends, and writes the note."""
        self._pid = os.getpid()
        self._note.write()
        atexit.register(self._stop)
        self._replace()
        self._follow_handlers()
        process = sys.modules.get("multiprocessing.process")
        is_child = process is not None and process.parent_process() is not None
        if is_child:
            # No import is needed: a multiprocessing child has imported multiprocessing.util to run at all.
            finalize = sys.modules["multiprocessing.util"].Finalize
            self._finalizer = finalize(None, self._stop, exitpriority=0)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or self._watch():
            return
        if is_child and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminated)
            self._handles_sigterm = True

    @contextlib.contextmanager
    def finishing(self) -> Iterator[None]:
        """Delays SIGTERM while the recording is being finished: a Pool sends it to workers that are exiting."""
        with self._finishing:
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                if self._waiting_signal is not None:
                    os.kill(os.getpid(), self._waiting_signal)
                if self._watcher is not None and self._watcher.signal_came():
                    self._watcher.end_by_signal()

    def forget(self, trouble: str | None = None) -> None:
        """Unregisters the functions and deletes the note, because the recording is finished.

        Args:
            trouble: why a part of the recording could not be written; the note then stays, and holds it.
        """
        if os.getpid() != self._pid:
            return  # a forked child: the note and the recording belong to its parent
        self._note.close(trouble)
        atexit.unregister(self._stop)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if self._watcher is not None:
            self._watcher.unwatch_signal()
        if self._handles_sigterm and signal.getsignal(signal.SIGTERM) == self._terminated:
            with contextlib.suppress(ValueError):  # not the main thread: the handler stays, and only ends the process
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for name, original in self._originals.items():
            if getattr(getattr(os, name), "__wrapped__", None) is original:
                setattr(os, name, original)
        if getattr(signal.signal, "__wrapped__", None) is self._set_handler is not None:
            setattr(signal, "signal", self._set_handler)  # noqa: B010
        self._set_handler = None

    def completed(self, trouble: str | None = None) -> None:
        """Deletes the note, because everything so far is written; `trouble` as in `forget`."""
        if os.getpid() == self._pid:
            self._note.close(trouble)

    def _replace(self) -> None:
        for name in _REPLACED:
            original = self._originals[name] = getattr(os, name)

            def ends(*arguments: Any, _original: Callable[..., Any] = original, **named: Any) -> Any:
                if os.getpid() == self._pid:
                    self._complete()
                return _original(*arguments, **named)

            ends.__name__, ends.__doc__ = name, original.__doc__
            ends.__wrapped__ = original  # type: ignore[attr-defined]
            setattr(os, name, ends)

    def _follow_handlers(self) -> None:
        """Watches SIGTERM again where the program restores its default action."""
        original = self._set_handler = signal.signal

        def set_handler(number: Any, handler: Any) -> Any:
            replaced = original(number, handler)
            follows = self._set_handler is not None and os.getpid() == self._pid
            if follows and number == signal.SIGTERM and handler == signal.SIG_DFL:
                self._watch()
            return replaced

        set_handler.__name__, set_handler.__doc__ = "signal", original.__doc__
        set_handler.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(signal, "signal", set_handler)  # noqa: B010 - types of its arguments are those of the original

    def _watch(self) -> bool:
        probe = choose_probe().compiled
        if probe is None or not hasattr(probe, "watch_signal"):
            return False
        if not probe.watch_signal(signal.SIGTERM, _SIGNAL_SECONDS):
            return False
        self._watcher = probe
        return True

    def end_if_signalled(self) -> None:
        """Completes the recording and ends the process if SIGTERM came; called on the recorder's thread.

        If the recording is just being finished, `finishing` ends the process afterwards.
        """
        if self._watcher is not None and not self._busy and self._watcher.signal_came():
            self._complete()
            self._watcher.end_by_signal()

    def _terminated(self, number: int, _frame: object) -> None:
        if self._busy:
            self._waiting_signal = number
            return
        self._stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
