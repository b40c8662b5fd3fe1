"""When marks and steps begin and end, as columns. Each moment is also a boundary, at which CUPTI's counter is read.

The columns of a row:

    what      uint8    a code of `thence.model.formats`: `OPENED`, `CLOSED`, `BACKWARD_OPENED` or `STEP`
    serial    int64    number of the mark, or of the step
    forward   int64    number of the mark around the forward operation of a backward node; -1 for none
    time      int64    Unix nanoseconds
    counter   uint32   CUPTI's counter of launches at this moment
    thread    uint32   gettid; 0 for `CLOSED`, whose serial identifies the mark that ends
    texts     uint32   number of the name, lane and metadata, which count from 1; 0 for `CLOSED`
"""

from __future__ import annotations

import threading
from collections import deque
from time import time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.model.formats import CLOSED, OPENED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Protocol

    class CompiledMoments(Protocol):
        """`thence.capture.boundaries._probe.Moments`."""

        lost: int

        def opened(self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]) -> None:
            """As `Moments.opened`."""

        def closed(self, number: int) -> None:
            """As `Moments.closed`."""

        def began(self, what: int, serial: int, forward: int, name: str) -> None:
            """As `Moments.began`."""

        def take(self) -> tuple[bytes, list[Texts]]:
            """Rows of ``_MOMENT`` and texts since the last call."""


NOTHING = -1
"""Value of ``forward`` for no mark."""
Texts = tuple[str, "str | None", "Mapping[str, object] | None"]
"""Name, lane and metadata of what begins; None for no lane or no metadata."""
COLUMNS = {"what": "u1", "serial": "i8", "forward": "i8", "time": "i8", "counter": "u4", "thread": "u4", "texts": "u4"}
_MOMENT = np.dtype(
    [(name, "<i8") for name in ("time", "serial", "forward")]
    + [(name, "<u4") for name in ("counter", "thread", "texts", "what")]
)
"""``Moment`` of _moments.c."""
_Columns = dict[str, np.ndarray[Any, Any]]


class CallingThread(threading.local):
    """The calling thread's id, kept thread-locally because reading it is a system call.

    A forked child needs an object of its own: this object keeps the ids of the parent's threads.
    """

    def __init__(self) -> None:
        self.number = threading.get_native_id()


class Moments:
    """Notes moments, in Python.

    A forked child needs an object of its own: this object keeps the ids of the parent's threads.

    Args:
        note: notes a boundary at a place, 0 here, and returns CUPTI's counter.
    """

    lost = 0
    """Rows for which there was no memory."""

    def __init__(self, note: Callable[[int], int]) -> None:
        self._note = note
        self._rows: deque[tuple[int, int, int, int, int, int, Texts | None]] = deque()
        self._local = CallingThread()

    def opened(self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]) -> None:
        """Note that a mark opens on this thread."""
        self._begin(OPENED, number, NOTHING, (name, lane, metadata or None))

    def closed(self, number: int) -> None:
        """Note that a mark closes."""
        self._rows.append((CLOSED, number, NOTHING, time_ns(), self._note(0), 0, None))

    def began(self, what: int, serial: int, forward: int, name: str) -> None:
        """Note that a step or the mark of a backward node begins on this thread: `what` is its code."""
        self._begin(what, serial, forward, (name, None, None))

    def take(self) -> tuple[_Columns, list[Texts]]:
        """The rows since the last call, in the order in which they were noted, and the texts that they number."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        *values, texts = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
        distinct = [text for text in texts if text is not None]
        has_text = [text is not None for text in texts]
        numbers = np.cumsum(has_text) * has_text
        columns = {
            name: np.array(column, dtype)
            for (name, dtype), column in zip(COLUMNS.items(), [*values, numbers], strict=True)
        }
        return columns, distinct

    def _begin(self, what: int, serial: int, forward: int, texts: Texts) -> None:
        thread = self._local.number
        self._rows.append((what, serial, forward, time_ns(), self._note(0), thread, texts))


class NativeMoments:
    """Notes moments by the compiled probe: a moment costs a tenth, and repeated names are mostly kept once."""

    def __init__(self, moments: CompiledMoments) -> None:
        self._moments = moments
        self.opened, self.closed, self.began = moments.opened, moments.closed, moments.began

    @property
    def lost(self) -> int:
        """Rows for which there was no memory."""
        return self._moments.lost

    def take(self) -> tuple[_Columns, list[Texts]]:
        """See `Moments`."""
        content, texts = self._moments.take()
        rows = np.frombuffer(content, _MOMENT)
        return {name: rows[name].astype(dtype) for name, dtype in COLUMNS.items()}, texts
