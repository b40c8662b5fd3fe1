"""Finds the loop of a program that nothing else divides into steps; its rounds then are the steps.

Such programs call functions of PyTorch, CuPy or Triton, but no model and no optimizer. The loop is looked for on the
main thread, where the program is. At a moment in which work is being launched, the functions of the user's own code
that are running are noted, each with the line that it is at, and for some seconds it is counted how often they come to
these lines (`sys.monitoring`, Python 3.12 and newer). The outermost line that comes back is in the outermost loop that
goes on. From then on only this line is followed, at 0.3 us for each time, in unrecorded windows as well. Short rounds
are put together to steps of `_MIN_STEP_NS`, so that the borders of steps cost nothing that matters.

A loop that ends is given up, and the next one is looked for.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from thence.capture.torch.monitoring import EVENTS, outer_frames

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_NAME = "thence loops"
_ID = 5
"""The tool id that is meant for optimizers, of which none uses it; the other events of thence take those without a
meaning (`thence.capture.torch.monitoring`, `thence.capture.marks.generated_lines`)."""
_monitoring: Any = getattr(sys, "monitoring", None)
_MIN_ROUNDS = 4
"""A line that came so often is in a loop: a function that is called a few times may be at it by chance."""
_COUNT_NS = 1_000_000_000
"""Lines are counted for so long, at least; the loops of programs that compile at first are found later."""
_GIVE_UP_NS = 30_000_000_000
"""Lines are counted for so long, at most; then other lines are, ..."""
_PAUSE_NS, _MAX_PAUSE_NS = 250_000_000, 60_000_000_000
"""... after the first of these times, and then after twice the time before, up to the second."""
_OVER_ROUNDS = 20
"""A loop has ended if no round came for so many times the longest one, ..."""
_OVER_NS = 5_000_000_000
"""... and for so long."""
_MIN_STEP_NS = 5_000_000
_MAX_FUNCTIONS = 50

_Line = tuple["CodeType", int]


class Loops:
    """Follows the loop of the main thread.

    Args:
        is_own: whether a file is the user's own.
        on_main_thread: has the main thread call a function soon, between two instructions of its Python code.
        round_began: called on the main thread as a step begins, with the frame that runs the loop, and the number of
            loops that were found before.
    """

    def __init__(
        self,
        is_own: Callable[[str], bool],
        on_main_thread: Callable[[Callable[[], None]], None],
        round_began: Callable[[FrameType, int], None],
    ) -> None:
        self._is_own = is_own
        self._on_main_thread = on_main_thread
        self._round_began = round_began
        self._follows = False
        self._stopped = _monitoring is None
        self._asked = False
        self._counts: dict[_Line, int] = {}
        self._lines: list[_Line] = []
        self._since = self._due = 0
        self._pause = _PAUSE_NS
        self._found = -1
        self._last = 0
        self._longest = 0

    def look(self) -> None:
        """Look for the loop, or whether it has ended; called every now and then, on any thread."""
        if self._stopped or self._asked:
            return
        now = monotonic_ns()
        if not self._lines:
            if now > self._due:
                self._due = now + self._pause
                self._pause = min(2 * self._pause, _MAX_PAUSE_NS)
                self._ask(self._count)
        elif self._counts:
            took = now - self._since
            if took > _GIVE_UP_NS or (took > _COUNT_NS and max(self._counts.values()) >= _MIN_ROUNDS):
                self._ask(self._choose)
        elif now - self._last > max(_OVER_NS, _OVER_ROUNDS * self._longest):
            self._ask(self._forget)

    def stop(self) -> None:
        """Follow nothing from now on."""
        self._stopped = True
        self._forget()

    def _ask(self, function: Callable[[], None]) -> None:
        def answer() -> None:
            self._asked = False
            if not self._stopped:
                function()

        self._asked = True
        self._on_main_thread(answer)

    def _forget(self) -> None:
        follows, self._follows = self._follows, False
        if follows and _monitoring.get_tool(_ID) == _NAME:
            for code, _ in self._lines:
                _monitoring.set_local_events(_ID, code, 0)
            _monitoring.register_callback(_ID, EVENTS.LINE, None)
            _monitoring.free_tool_id(_ID)
        self._lines, self._counts = [], {}

    def _follow(self, lines: list[_Line], callback: Callable[[CodeType, int], Any]) -> bool:
        """Call a function for each line of some functions; False if another tool has the tool id."""
        self._forget()
        if _monitoring.get_tool(_ID) is not None:
            return False
        _monitoring.use_tool_id(_ID, _NAME)
        _monitoring.register_callback(_ID, EVENTS.LINE, callback)
        self._follows, self._lines = True, lines
        for code, _ in lines:
            _monitoring.set_local_events(_ID, code, EVENTS.LINE)
        return True

    def _count(self) -> None:
        frames = [frame for frame in outer_frames(sys._getframe()) if self._is_own(frame.f_code.co_filename)]  # noqa: SLF001
        lines = [(frame.f_code, frame.f_lineno) for frame in frames if frame.f_lineno is not None]
        lines = list(dict.fromkeys(lines))[:_MAX_FUNCTIONS]
        main = threading.main_thread().ident
        counts = dict.fromkeys(lines, 0)

        def came(code: CodeType, line: int) -> Any:
            key = (code, line)
            if key not in counts:
                return _monitoring.DISABLE
            if threading.get_ident() == main:
                counts[key] += 1
            return None

        if lines and self._follow(lines, came):
            self._counts, self._since = counts, monotonic_ns()

    def _choose(self) -> None:
        took = monotonic_ns() - self._since
        line = next((line for line in self._lines if self._counts[line] >= _MIN_ROUNDS), None)
        if line is None:
            self._forget()
            return
        each = took / self._counts[line]
        together = max(round(_MIN_STEP_NS / each), 1)
        main = threading.main_thread().ident
        code, number = line
        rounds = 0
        self._found += 1
        self._pause = _PAUSE_NS
        self._last, self._longest = monotonic_ns(), round(each)

        def came(_code: CodeType, line: int) -> Any:
            nonlocal rounds
            if line != number:
                return _monitoring.DISABLE
            if threading.get_ident() == main:
                rounds += 1
                if rounds % together == 0:
                    self._came(sys._getframe(1))  # noqa: SLF001 - no other way to a frame
            return None

        self._follow([(code, number)], came)

    def _came(self, frame: FrameType) -> None:
        now = monotonic_ns()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self._round_began(frame, self._found)
