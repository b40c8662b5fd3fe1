"""Finds the loop of a program that nothing else divides into steps; its rounds then are the steps.

Such programs call functions of PyTorch, CuPy or Triton, but no model and no optimizer. The loop is looked for on the
main thread, where the program is. At a moment in which work is being launched, the functions of the user's own code
that are running are noted, each with the instruction that it is at. For some seconds it is counted how often these
functions begin, and how often they jump back over these instructions (`sys.monitoring`, Python 3.12 and newer). A jump
back is the end of a round of a loop; a function that begins again is called in the loop of a library. The outermost
of them that comes often enough is the loop that goes on. From then on only it is followed, at 0.3 us for each time, in
unrecorded windows as well. Short rounds are put together to steps of `_MIN_STEP_NS`, so that the borders of steps cost
nothing that matters.

Lines would not do: the program may be at a line of a branch (`if n % 100 == 0: print(loss)`), which comes more seldom
than the round.

A loop that ends is given up, and the next one is looked for.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

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
"""A loop comes so often: a function may be called a few times by chance."""
_COUNT_NS = 1_000_000_000
"""Rounds are counted for so long, at least; the loops of programs that compile at first are found later."""
_GIVE_UP_NS = 30_000_000_000
"""Rounds are counted for so long, at most; then those of other functions are, ..."""
_PAUSE_NS, _MAX_PAUSE_NS = 250_000_000, 60_000_000_000
"""... after the first of these times, and then after twice the time before, up to the second."""
_OVER_ROUNDS = 20
"""A loop has ended if no round came for so many times the longest one, ..."""
_OVER_NS = 5_000_000_000
"""... and for so long."""
_MIN_STEP_NS = 5_000_000  # of the rounds that are put together
_MAX_FUNCTIONS = 50


class _Loop(NamedTuple):
    """What comes once in each round: one of some instructions of a function, which jump back or are its first."""

    code: CodeType
    offsets: tuple[int, ...]


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
        self._counts: list[int] = []
        self._loops: list[_Loop] = []
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
        if not self._loops:
            if now > self._due:
                self._due = now + self._pause
                self._pause = min(2 * self._pause, _MAX_PAUSE_NS)
                self._ask(self._count)
        elif self._counts:
            took = now - self._since
            if took > _GIVE_UP_NS or (took > _COUNT_NS and max(self._counts) >= _MIN_ROUNDS):
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
            for loop in self._loops:
                _monitoring.set_local_events(_ID, loop.code, 0)
            for event in (EVENTS.PY_START, EVENTS.JUMP):
                _monitoring.register_callback(_ID, event, None)
            _monitoring.free_tool_id(_ID)
        self._loops, self._counts = [], []

    def _follow(self, loops: list[_Loop], callback: Callable[..., Any]) -> bool:
        """Call a function for the beginnings and jumps of some functions; False if another tool has the tool id.

        The callback gets the function and the offset of the instruction, and for a jump also where it goes.
        """
        self._forget()
        if _monitoring.get_tool(_ID) is not None:
            return False
        _monitoring.use_tool_id(_ID, _NAME)
        for event in (EVENTS.PY_START, EVENTS.JUMP):
            _monitoring.register_callback(_ID, event, callback)
        self._follows, self._loops = True, loops
        for loop in loops:
            _monitoring.set_local_events(_ID, loop.code, EVENTS.PY_START | EVENTS.JUMP)
        return True

    def _count(self) -> None:
        frames = [frame for frame in outer_frames(sys._getframe()) if self._is_own(frame.f_code.co_filename)]  # noqa: SLF001
        instructions: dict[CodeType, int] = {}
        for frame in frames:
            instructions.setdefault(frame.f_code, frame.f_lasti)
        functions = list(instructions.items())[:_MAX_FUNCTIONS]
        loops = [loop for code, offset in functions for loop in _loops_around(code, offset)]
        numbers = {(id(loop.code), offset): number for number, loop in enumerate(loops) for offset in loop.offsets}
        counts = [0] * len(loops)
        main = threading.main_thread().ident

        def came(code: CodeType, offset: int, _target: int = 0) -> Any:
            number = numbers.get((id(code), offset))  # the hash of code is that of all its instructions
            if number is None:
                return _monitoring.DISABLE
            if threading.get_ident() == main:
                counts[number] += 1
            return None

        if loops and self._follow(loops, came):
            self._counts, self._since = counts, monotonic_ns()

    def _choose(self) -> None:
        took = monotonic_ns() - self._since
        often = [number for number, count in enumerate(self._counts) if count >= _MIN_ROUNDS]
        if not often:
            self._forget()
            return
        each = took / self._counts[often[0]]
        together = max(round(_MIN_STEP_NS / each), 1)
        loop, rounds = self._loops[often[0]], 0
        offsets, main = loop.offsets, threading.main_thread().ident
        self._found += 1
        self._pause = _PAUSE_NS
        self._last, self._longest = monotonic_ns(), round(each)

        def came(_code: CodeType, offset: int, _target: int = 0) -> Any:
            nonlocal rounds
            if offset not in offsets:
                return _monitoring.DISABLE
            if threading.get_ident() == main:
                rounds += 1
                if rounds % together == 0:
                    self._came(sys._getframe(1))  # noqa: SLF001 - no other way to a frame
            return None

        self._follow([loop], came)

    def _came(self, frame: FrameType) -> None:
        now = monotonic_ns()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self._round_began(frame, self._found)


def _loops_around(code: CodeType, instruction: int) -> list[_Loop]:
    """What may come once a round where an instruction of a function runs, outermost first."""
    import dis  # PyTorch imports it

    jumps: list[tuple[int, int]] = []
    starts: list[int] = []
    for step in dis.get_instructions(code):
        if step.opname == "JUMP_BACKWARD":
            jumps.append((step.argval, step.offset))
        elif step.opname == "RESUME" and not starts:
            starts.append(step.offset)
    loops: list[tuple[int, list[int]]] = []  # the first instruction, and the jumps back to there, ascending
    for first, jump in sorted(jumps):
        # Loops are inside each other or apart, so jumps over a part in common are of one loop: `continue` is one.
        same = next((others for begin, others in loops if begin <= first <= others[-1] < jump), None)
        if same is None:
            loops.append((first, [jump]))
        else:
            same.append(jump)
    around = [_Loop(code, tuple(jumps)) for first, jumps in loops if first <= instruction <= jumps[-1]]
    return [_Loop(code, tuple(starts)), *around]
