"""What asks a sampled recording for a window out of turn: a file that is touched, and SIGUSR2."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

from thence.model.formats import REQUEST_FILE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Triggers:
    """Calls a function with the reason when somebody asks.

    The handler of SIGUSR2 is set only where the program has none, on the main thread; a handler that the program sets
    later replaces it.

    Args:
        directory: of the recording.
        request: what is called.
    """

    def __init__(self, directory: Path, request: Callable[[str], None]) -> None:
        self._file = directory / REQUEST_FILE
        self._request = request
        self._touched = self._changed()
        self._handler: Any = None

    def begin(self) -> None:
        """Handle SIGUSR2, if nobody does."""
        if threading.current_thread() is threading.main_thread() and _handler() is signal.SIG_DFL:
            self._handler = lambda _number, _frame: self._request("SIGUSR2")
            signal.signal(signal.SIGUSR2, self._handler)

    def look(self) -> None:
        """Look whether the file was touched; costs one system call."""
        changed = self._changed()
        if changed != self._touched:
            self._touched = changed
            if changed is not None:
                self._request(f"{REQUEST_FILE} was touched")

    def end(self) -> None:
        """Handle SIGUSR2 no longer, unless the program has set a handler meanwhile."""
        ours = self._handler is not None and _handler() is self._handler
        if ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        self._handler = None

    def _changed(self) -> int | None:
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            return None


def _handler() -> Any:
    return signal.getsignal(signal.SIGUSR2)
