"""Which steps of a program are recorded, and how long each step took, recorded or not.

A recording costs time, so it measures its own cost: unless the program has a schedule of its own, some windows of steps
are not recorded (`plain_windows`). CUPTI is detached in them and nothing of the program is followed, so these steps are
plain: they take as long as without a recorder. The windows are given by numbers of steps, so that they are the same on
all ranks of a job: a step of one rank is only plain if those of the others are.

A step lasts from its border to the next one. Near windows, a CUDA event is recorded at each border on the current
stream, and the time between two of these is the duration: after the device was synchronized, at the beginning of a
window, the host may run ahead of it, so the host's times would be too short. Elsewhere the duration is the host's.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from time import time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from thence.capture.recorder.options import Schedule

ANNOUNCED = "announced"
"""The kind of steps that the program announces."""
PLAIN_STEPS = 6
"""Plain steps of a window that count, at least: the fewest whose extremes contain the median with 95 % probability."""
MAX_PLAIN_STEPS = 20
"""The same, at most: what happens in a window is not in the recording."""
_ONE_IN = 10
"""At most every tenth step is not recorded."""
_SHARE = 50
"""The plain steps of a window are this part of the steps before it, within those limits."""
_GROWTH = 1.5
"""A window begins after at least so many times the steps before the previous one: long runs have few windows."""
_OVERDUE = 3
"""A window has not ended in time after this many times the time of as many of the longest steps before it."""
_MIN_OVERDUE_NS = 1_000_000_000
_LATEST = 64
"""The number of steps before a window among which the longest is looked for."""


def plain_windows() -> Iterator[tuple[int, int]]:
    """First step and number of steps of each window that is not recorded; of each, the first step does not count.

    At no time was more than a tenth of the steps not recorded. So the first window begins with step 63, counted from 0:
    none of the first twenty steps, in which programs compile and warm up, is in it.
    """
    before = start = 0
    while True:
        length = 1 + min(MAX_PLAIN_STEPS, max(PLAIN_STEPS, start // _SHARE))
        start = max(_ONE_IN * (before + length) - length, int(start * _GROWTH))
        yield start, length
        before += length


class Switch(Protocol):
    """Pauses the recording and lets it go on."""

    def why_attached(self) -> str | None:
        """Why steps that are not recorded would not be plain; None if they are."""

    def pause(self) -> bool:
        """Record and follow nothing until `resume`; returns whether steps are plain from now on."""

    def resume(self, frame: FrameType | None) -> None:
        """Record and follow again.

        Args:
            frame: where the calling thread is.
        """


class _Border(NamedTuple):
    """The end of a step and the beginning of the next one.

    Attributes:
        time: Unix ns.
        event: CUDA event; None for none.
    """

    time: int
    event: Any


class _Row(NamedTuple):
    """A step: columns of the table ``steps`` (`thence.model.formats`), and the events at its borders."""

    number: int
    begin: _Border
    end: _Border
    recorded: bool
    counted: bool


class StepTimes:
    """Decides at each step whether it is recorded, and notes how long each took.

    Args:
        schedule: of the program; None for none.
        baseline: whether windows are left unrecorded if there is no schedule.

    Attributes:
        trouble: why no window was left unrecorded, or not all; None for no reason.
        since: Unix ns: when the steps began that are of the kind of the last ones; those before do not count.
    """

    def __init__(self, switch: Switch, schedule: Schedule | None, *, baseline: bool) -> None:
        self._switch = switch
        self._schedule = schedule
        self._baseline = schedule is None and baseline
        self._begin_windows()
        self._number = -1
        self._kind = ""
        self._border: _Border | None = None
        self._recording = True
        self._plain = False
        self._switched = -1
        self._began_pause = 0
        self._latest: list[int] = []
        self._thread = 0
        self._waiting: list[_Row] = []
        self._rows: list[tuple[int, int, int, bool, bool]] = []
        self._busy = False
        self._lock = threading.RLock()
        # Of the rows alone: whoever holds the other lock may wait for the thread that takes them.
        self._rows_lock = threading.Lock()
        self.trouble: str | None = None
        self.since = 0

    def _begin_windows(self) -> None:
        self._windows = plain_windows() if self._baseline else None
        self._window = (0, 0) if self._windows is None else next(self._windows)
        self._previous = (0, 0)

    def begins(self, frame: FrameType | None, number: int | None = None, kind: str = "step") -> bool:
        """Handle that a step begins on the calling thread, and the one before it ends.

        Args:
            frame: where the calling thread is.
            number: of the step; None for the one after the step before.
            kind: of what the steps are. If it changes, as from the passes of a model to steps of an optimizer, steps
                are counted anew, because the durations of both cannot be compared.

        Returns:
            whether it is recorded.
        """
        with self._lock:
            self._busy = True
            try:
                return self._begins(frame, number, kind)
            finally:
                self._busy = False

    def _begins(self, frame: FrameType | None, number: int | None, kind: str) -> bool:
        thread = threading.get_ident()
        if self._thread not in {0, thread}:
            self._stop_windows("steps begin on several threads")
        self._thread = thread
        number = self._number + 1 if number is None else number
        capturing = _captures()
        border = self._border_of(number, capturing=capturing)
        self._end_step(border)
        if not capturing:
            self._resolve()
        if kind != self._kind:
            number = self._begin_kind(kind, number, border)
        self._number = number
        wanted = self._recording if capturing else self._wanted(number)
        if wanted != self._recording:
            self._turn(number, frame, on=wanted)
        self._border = border
        return self._recording

    def _begin_kind(self, kind: str, number: int, border: _Border) -> int:
        """Begin to count steps anew; returns the number of the first one."""
        if self._kind:
            self.since = border.time
            if self._windows is not None:
                self._begin_windows()
                number = 0 if kind != ANNOUNCED else number
        self._kind, self._switched = kind, -1
        return number

    def resume_if_overdue(self) -> None:
        """Let the recording go on if a window has not ended in time; called on the thread that writes.

        The program may have left its loop. Only the thread that launches may attach CUPTI, and it is asked to, if it is
        the main thread.
        """
        if self._windows is None or self._recording or self._thread != threading.main_thread().ident:
            return
        longest = max(self._latest, default=0)
        limit = max(_MIN_OVERDUE_NS, _OVERDUE * self._window[1] * longest)
        if time_ns() - self._began_pause > limit:
            self._began_pause = time_ns()  # asks again after this time
            call_on_main_thread(self._resume_now)

    def end(self) -> None:
        """Handle that the recording ends: no step begins any more, and the device is idle."""
        with self._lock:
            self._resolve()
            self._waiting.clear()
            self._border = None

    def take(self) -> dict[str, Any]:
        """Rows of the table ``steps`` since the last call."""
        with self._rows_lock:
            rows, self._rows = self._rows, []
        columns = zip(*rows, strict=True) if rows else ((),) * 5
        kinds = (np.int64, np.int64, np.int64, np.uint8, np.uint8)
        names = ("number", "start", "duration", "recorded", "counted")
        return {name: np.array(values, kind) for name, values, kind in zip(names, columns, kinds, strict=True)}

    # Which steps.

    def _wanted(self, number: int) -> bool:
        if self._schedule is not None:
            return self._schedule.records(number)
        if self._windows is None:
            return True
        while number >= sum(self._window):
            self._previous, self._window = self._window, next(self._windows)
        return number < self._window[0]

    def _turn(self, number: int, frame: FrameType | None, *, on: bool) -> None:
        if on:
            self._switch.resume(frame)
            self._recording, self._plain = True, False
        elif self._schedule is not None:
            self._plain = self._switch.pause()
            self._recording = False
        else:
            self.trouble = self._switch.why_attached()
            if self.trouble is not None:
                return
            self._plain = self._switch.pause()
            if not self._plain:
                self.trouble = self._switch.why_attached() or "a backward pass was running"
                self._switch.resume(frame)
                return
            self._recording = False
            self._began_pause = time_ns()
        self._switched = number

    def _stop_windows(self, why: str) -> None:
        if self._windows is not None:
            self.trouble = why
            if not self._recording:
                self._switch.resume(sys._getframe())  # noqa: SLF001 - no other way to a frame
                self._recording, self._plain = True, False
            self._windows = None

    def _resume_now(self) -> None:
        if self._busy or self._recording or self._windows is None or _captures():
            return
        with self._lock:
            self._turn(self._number, sys._getframe(), on=True)  # noqa: SLF001
            self._border = None

    # How long they take.

    def _near(self, number: int) -> bool:
        """Whether the duration of a step is compared with others."""
        if self._windows is None:
            return self._schedule is not None
        (start, length), (earlier, count) = self._window, self._previous
        return start - length <= number < start + length or earlier <= number < earlier + 2 * count

    def _border_of(self, number: int, *, capturing: bool) -> _Border:
        wanted = not capturing and (self._near(number) or self._near(number - 1))
        return _Border(time_ns(), _event() if wanted else None)

    def _end_step(self, border: _Border) -> None:
        before, self._border = self._border, None
        if before is None:
            return
        self._latest = [*self._latest[1 - _LATEST :], border.time - before.time]
        after_switch = self._switched == self._number
        counted = self._near(self._number) and not after_switch
        if not self._recording:
            counted = counted and self._plain
        row = _Row(self._number, before, border, self._recording, counted)
        self._waiting.append(row)

    def _resolve(self) -> None:
        """Move steps whose end the device has reached to the rows."""
        while self._waiting:
            row = self._waiting[0]
            if len(self._waiting) < _MAX_WAITING and not _reached(row.end.event):
                return
            del self._waiting[0]
            duration = _between(row.begin, row.end)
            with self._rows_lock:
                self._rows.append((row.number, row.begin.time, duration, row.recorded, row.counted))


_MAX_WAITING = 1000
"""Steps whose events are kept while the device has not reached them."""


def _cuda() -> Any:
    """``torch.cuda`` if the program uses it; None if not."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _captures() -> bool:
    """Whether the current stream captures a CUDA graph: then the device must not be waited for."""
    cuda = _cuda()
    return cuda is not None and bool(cuda.is_current_stream_capturing())


def _event() -> Any:
    """A CUDA event that is recorded on the current stream; None where there is none."""
    cuda = _cuda()
    if cuda is None:
        return None
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def _reached(event: Any) -> bool:
    return event is None or bool(event.query())


def _between(begin: _Border, end: _Border) -> int:
    """Ns from one border to another: on the device where both have an event."""
    if begin.event is not None and end.event is not None and _reached(end.event):
        try:
            milliseconds: float = begin.event.elapsed_time(end.event)
            return round(milliseconds * 1e6)
        except RuntimeError:  # of two devices
            pass
    return end.time - begin.time


def call_on_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call a function soon, between two instructions of its Python code."""

    def call(_nothing: int) -> int:
        function()
        return 0

    # Kept: the main thread may call it at any later time.
    _KEPT.append(ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call))
    ctypes.pythonapi.Py_AddPendingCall(_KEPT[-1], None)


_KEPT: list[Any] = []
