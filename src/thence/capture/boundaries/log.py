"""The boundaries that a process crosses, as columns.

A row means: from here on, the innermost place of its kind on this thread is ``place``. Its columns:

    counter   uint32   CUPTI's counter of launches at the boundary
    time      int64    Unix nanoseconds
    thread    uint32   gettid
    place     uint32   number of a place (`thence.capture.boundaries.places`)
    flags     uint8    `BEGINS`, `ENDS`, `READ` and `REPEATED`
"""

from __future__ import annotations

from collections import deque
from time import time_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.boundaries.moments import CallingThread, Moments, NativeMoments

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Protocol

    from thence.capture.boundaries.moments import CompiledMoments

    class NativeLog(Protocol):
        """`thence.capture.boundaries._probe.Log`."""

        lost: int
        observer: Callable[[int], None] | None

        def note(self, place: int, flags: int = 0) -> int:
            """As `BoundaryLog.note`."""

        def take(self) -> bytes:
            """Rows of `_RECORD` since the last call."""

    class Stacks(Protocol):
        """`thence.capture.boundaries.chains.Chains`."""

        def take(self, until: int) -> dict[str, np.ndarray[Any, Any]]:
            """Boundaries that were read from stacks, as `BoundaryLog.take`."""

        def observe(self, observer: Callable[[int], None] | None) -> None:
            """As `Chains.observe`."""


BEGINS = 1
"""The thread launched nothing since the boundary before this one: it was idle or waited for another thread."""
ENDS = 2
"""The thread launches nothing until its next boundary: it goes idle or waits for another thread."""
READ = 4
"""The place was read from the thread's stack at a call: the counter is its value before the call, and may equal that of
the thread's previous boundary."""
REPEATED = 8
"""The row is that of an earlier part, which may have been deleted (`thence.capture.session.noted_places`)."""
COLUMNS = {"counter": "u4", "time": "i8", "thread": "u4", "place": "u4", "flags": "u1"}
_RECORD = np.dtype([("time", "<i8"), ("counter", "<u4"), ("thread", "<u4"), ("place", "<u4"), ("flags", "<u4")])
"""``Row`` of _probe.c."""


class BoundaryLog:
    """Notes boundaries, in Python.

    Attributes:
        observer: called with the place of every boundary, on its thread; set only during captures of CUDA graphs.
    """

    lost = 0
    """Rows for which there was no memory."""
    stack_reader: ModuleType | None = None
    """The compiled probe, if it is called at every launch, so that it can read the stack there; else None."""
    chains: Stacks | None = None
    """The reader of stacks, whose rows are taken with those of the log; None if stacks are not read."""

    def __init__(self, counter: Callable[[], int]) -> None:
        self.observer: Callable[[int], None] | None = None
        self._counter = counter
        self._rows: deque[tuple[int, int, int, int, int]] = deque()
        self._local = CallingThread()

    def note(self, place: int, flags: int = 0) -> int:
        """Note that this thread is in a place from here on; returns the counter."""
        counter = self._counter()
        self._rows.append((counter, time_ns(), self._local.number, place, flags))
        if self.observer is not None:
            self.observer(place)
        return counter

    def moments(self) -> Moments | NativeMoments:
        """Returns a log of moments of marks, each of which is noted with a boundary of this log."""
        return Moments(self.note)

    def take(self) -> dict[str, np.ndarray[Any, Any]]:
        """The rows since the last call, in the order in which they were noted."""
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        columns = zip(*rows, strict=True) if rows else ((),) * len(COLUMNS)
        return {name: np.array(values, dtype) for (name, dtype), values in zip(COLUMNS.items(), columns, strict=True)}


class NativeBoundaryLog(BoundaryLog):
    """A `BoundaryLog` of the compiled probe: a boundary costs a tenth of one in Python."""

    def __init__(self, log: NativeLog, make_moments: Callable[[NativeLog], CompiledMoments]) -> None:
        self._log = log
        self._make_moments = make_moments
        self._moments: list[NativeMoments] = []
        self._observer: Callable[[int], None] | None = None
        self.note = log.note  # type: ignore[method-assign]  # no Python call in between

    @property
    def observer(self) -> Callable[[int], None] | None:
        """See `BoundaryLog`."""
        return self._observer

    @observer.setter
    def observer(self, observer: Callable[[int], None] | None) -> None:
        """Pass the observer on to the compiled probe, and to the reader of stacks."""
        self._observer = self._log.observer = observer
        if self.chains is not None:
            self.chains.observe(observer)

    @property
    def lost(self) -> int:  # type: ignore[override]
        """Rows for which there was no memory, moments of marks included."""
        return self._log.lost + sum(moments.lost for moments in self._moments)

    def moments(self) -> Moments | NativeMoments:
        """See `BoundaryLog`."""
        self._moments.append(NativeMoments(self._make_moments(self._log)))
        return self._moments[-1]

    def take(self) -> dict[str, np.ndarray[Any, Any]]:
        """The rows since the last call, in the order of time where stacks are read, else of the calls."""
        now = time_ns()
        rows = np.frombuffer(self._log.take(), _RECORD)
        noted = {name: rows[name].astype(dtype) for name, dtype in COLUMNS.items()}
        if self.chains is None:
            return noted
        read = self.chains.take(now)
        both = {name: np.concatenate([noted[name], read[name]]) for name in COLUMNS}
        order = np.argsort(both["time"], kind="stable")
        return {name: column[order] for name, column in both.items()}
