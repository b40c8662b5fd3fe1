"""Which steps of a program are recorded, and how long each step took, recorded or not.

A recording costs time, so it measures its own cost: unless the program has a schedule of its own, some windows of steps
are not recorded (`thence.capture.session.step_plans`). CUPTI is detached in them and nothing of the program is
followed, so these steps are plain: they take as long as without a recorder.

A step lasts from its border to the next one. Near windows, a CUDA event is recorded at each border on the current
stream, and the time between two of these is the duration: after the device was synchronized, at the beginning of a
window, the host may run ahead of it, so the host's times would be too short. Elsewhere the duration is the host's.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from time import monotonic_ns, time_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from thence.capture.session.step_plans import TIME_SPAN, ScheduledSteps

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from thence.capture.session.step_plans import StepPlan

ANNOUNCED = "announced"
"""The kind of steps that the program announces."""
_OVERDUE = 3
"""A window has not ended in time after this many times the time of as many of the longest steps before it."""
_MIN_OVERDUE_NS = 1_000_000_000
_LATEST = 64
"""The number of steps before a window among which the longest is looked for."""


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
        moment: ns of a clock that is never set: durations are differences of these.
        event: CUDA event; None for none.
    """

    time: int
    moment: int
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
        plan: which steps are recorded.

    Attributes:
        plan: which steps are recorded.
        trouble: why no window was left unrecorded, or not all; None for no reason.
        since: Unix ns: when the steps began that are of the kind of the last ones; those before do not count.
        own_ns: time that was spent here at steps that were not recorded and are compared with nothing.
    """

    def __init__(self, switch: Switch, plan: StepPlan) -> None:
        self._switch = switch
        self.plan = plan
        self._number = -1
        self._kind = ""
        self._border: _Border | None = None
        self._recording = True
        self._plain = False
        self._switched = -1
        self._began_pause = 0
        self._latest: deque[int] = deque(maxlen=_LATEST)
        self._thread = 0
        self._waiting: list[_Row] = []
        self._rows: list[tuple[int, int, int, bool, bool]] = []
        self._busy = False
        self._lock = threading.RLock()
        self.trouble: str | None = None
        self.since = 0
        self.own_ns = 0

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

    def passes(self, number: int | None = None, kind: str = "step") -> bool:
        """Handle that a step begins after one that was not recorded, and neither is compared: most steps of a long run.

        It takes a few microseconds: the device is not asked, and little is called.

        Args:
            number: as `begins` takes it.
            kind: as `begins` takes it.

        Returns:
            whether it was such a step, and is not recorded; else nothing was done, and `begins` handles it.
        """
        before = self._border
        if self._recording or before is None or before.event is not None or kind != self._kind or self._waiting:
            return False
        with self._lock:
            number = self._number + 1 if number is None else number
            moment = monotonic_ns()
            duration = moment - before.moment
            if self._thread != threading.get_ident() or not self.plan.passes(number, duration):
                return False
            self._latest.append(duration)
            self._rows.append((self._number, before.time, duration, False, False))
            self._number, self._border = number, _Border(time_ns(), moment, None)
            self.own_ns += monotonic_ns() - moment
        return True

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
        wanted = self._recording if capturing else self.plan.records(number)
        if wanted != self._recording:
            self._turn(number, frame, on=wanted)
        self._border = border
        return self._recording

    def _begin_kind(self, kind: str, number: int, border: _Border) -> int:
        """Begin to count steps anew; returns the number of the first one."""
        if self._kind or kind == TIME_SPAN:
            self.since = border.time
            plan = self.plan.again(kind)
            if plan is not self.plan:
                self.plan = plan
                number = 0 if kind != ANNOUNCED else number
        self._kind, self._switched = kind, -1
        return number

    @property
    def kind(self) -> str:
        """The kind of the last step; empty as long as there was none."""
        return self._kind

    def silent_ns(self) -> int | None:
        """Time since a step began; None as long as none has, and while one begins."""
        border = self._border
        return None if border is None else monotonic_ns() - border.moment

    def longest_ns(self) -> int:
        """Duration of the longest of the latest steps; 0 if there were none."""
        return max(tuple(self._latest), default=0)

    @property
    def divisible(self) -> bool:
        """Whether a step may begin on this thread between two instructions of it, wherever it is."""
        return not (self._busy or _captures())

    def resume_if_overdue(self) -> None:
        """Let the recording go on if a window has not ended in time; called on the thread that writes.

        The program may have left its loop. Only the thread that launches may attach CUPTI, and it is asked to, if it is
        the main thread.
        """
        if not self.plan.length or self._recording or self._thread != threading.main_thread().ident:
            return
        limit = max(_MIN_OVERDUE_NS, _OVERDUE * self.plan.length * self.longest_ns())
        if monotonic_ns() - self._began_pause > limit:
            self._began_pause = monotonic_ns()  # asks again after this time
            call_on_main_thread(self._resume_now)

    def forget(self) -> None:
        """Handle that this is a forked child, in which nothing is recorded; without the lock, which nobody may hold."""
        self._border = None

    def end(self) -> None:
        """Handle that the recording ends: no step begins any more, and the device is idle."""
        with self._lock:
            self._resolve()
            self._waiting.clear()
            self._border = None

    def take(self) -> dict[str, Any]:
        """Rows of the table ``steps`` since the last call."""
        # Without the lock: whoever holds it may wait for this thread. Rows that come meanwhile are behind these.
        count = len(self._rows)
        rows = self._rows[:count]
        del self._rows[:count]
        columns = zip(*rows, strict=True) if rows else ((),) * 5
        kinds = (np.int64, np.int64, np.int64, np.uint8, np.uint8)
        names = ("number", "start", "duration", "recorded", "counted")
        return {name: np.array(values, kind) for name, values, kind in zip(names, columns, kinds, strict=True)}

    # Which steps.

    def _turn(self, number: int, frame: FrameType | None, *, on: bool) -> None:
        if on:
            self._switch.resume(frame)
            self._recording, self._plain = True, False
        elif not self.plan.only_plain:
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
            self._began_pause = monotonic_ns()
        self._switched = number

    def _stop_windows(self, why: str) -> None:
        if self.plan.on_one_thread:
            self.trouble = why
            if not self._recording:
                self._switch.resume(sys._getframe())  # noqa: SLF001 - no other way to a frame
                self._recording, self._plain = True, False
            self.plan = ScheduledSteps(None)

    def _resume_now(self) -> None:
        if not self.divisible or self._recording or not self.plan.length:
            return
        with self._lock:
            self._turn(self._number, sys._getframe(), on=True)  # noqa: SLF001
            self._border = None

    # How long they take.

    def _border_of(self, number: int, *, capturing: bool) -> _Border:
        wanted = not capturing and (self.plan.compares(number) or self.plan.compares(number - 1))
        return _Border(time_ns(), monotonic_ns(), _event() if wanted else None)

    def _end_step(self, border: _Border) -> None:
        before, self._border = self._border, None
        if before is None:
            return
        self._latest.append(border.moment - before.moment)
        after_switch = self._switched == self._number
        counted = self.plan.compares(self._number) and not after_switch
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
            self.plan.lasted(row.number, duration, recorded=row.recorded, counted=row.counted)
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
    return end.moment - begin.moment


def call_on_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call a function soon, between two instructions of its Python code."""
    _to_call.append(function)
    ctypes.pythonapi.Py_AddPendingCall(_call_next, None)


_to_call: deque[Callable[[], None]] = deque()


def _call(_nothing: int) -> int:
    _to_call.popleft()()
    return 0


_call_next = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_call)
