"""Events of Python code from `sys.monitoring` (Python 3.12 and newer), for one tool of ours.

Every code object that we care about has a `Handler`; all others answer `DISABLE` once and then cost nothing. A
handler's events are set on its own code object, except for beginnings and resumptions, by which code is found, and
for exceptions that leave a function or are thrown into a generator, which `sys.monitoring` has for all code or none.

Callbacks run with events off, so nothing that they call is seen. What they raise would be raised in the program:
the first error ends the watching, and is told.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

__all__ = ["ALL_LINES", "CALLS", "EVENTS", "Handler", "Monitor", "free_id", "why_not"]

_NAME = "thence"
_IDS = (3, 4)
"""Those that no kind of tool has a claim to: 0 is of debuggers, 1 of coverage, 2 of profilers, 5 of optimizers."""
_monitoring: Any = getattr(sys, "monitoring", None)
EVENTS: Any = getattr(_monitoring, "events", None)
CALLS: int = EVENTS.PY_START | EVENTS.PY_RETURN if EVENTS else 0
"""Events of a function that is no generator."""
ALL_LINES: int = (
    EVENTS.LINE | EVENTS.PY_RETURN | EVENTS.PY_YIELD | EVENTS.PY_RESUME if EVENTS else 0
)
"""Events of a function that is followed line by line; its beginning is found by the events of all code."""


class Handler(Protocol):
    """What is done at the events of one code object.

    The frame of the code is `sys._getframe(2)` in each of these methods.
    """

    def enter(self) -> Any:
        """The function begins; may return `Monitor.disable`, to be called no more."""

    def leave(self) -> None:
        """It returns, yields, or an exception leaves it."""

    def resume(self) -> Any:
        """It goes on after a yield, in the middle of a line; may return the same."""


def why_not() -> str | None:
    """Why Python's events cannot be followed in this process; None if they can."""
    if _monitoring is None:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"Python {version} has no sys.monitoring; 3.12 and newer do"
    if free_id() is None:
        taken = sorted({str(_monitoring.get_tool(number)) for number in _IDS})
        return f"other tools ({', '.join(taken)}) hold the ids of sys.monitoring"
    return None


def free_id() -> int | None:
    """An id that no tool has taken."""
    free = [number for number in _IDS if _monitoring.get_tool(number) is None]
    return free[0] if free else None


class Monitor:
    """Our use of `sys.monitoring`.

    Args:
        unknown: makes the handler of a code object that begins for the first time, and sets its events; None
            for code that is not to be followed.
        lines: makes the callback for lines, when watching begins. It gets code and line, in whose frame
            `sys._getframe(1)` is, and may return `disable`.
        failed: told of an error of ours, after which nothing is watched.
    """

    def __init__(
        self,
        unknown: Callable[[CodeType], Handler | None],
        lines: Callable[[Callable[[BaseException], None]], Callable[[CodeType, int], Any]],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._unknown = unknown
        self._lines = lines
        self._failed = failed
        self._tool: int | None = None
        self._handlers: dict[int, Handler] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that ids stay theirs
        self.disable: Any = getattr(_monitoring, "DISABLE", None)

    def watch(self, code: CodeType, handler: Handler, events: int) -> None:
        """Follow a code object from now on."""
        self._codes[id(code)] = code
        self._handlers[id(code)] = handler
        if self._tool is not None:
            _monitoring.set_local_events(self._tool, code, events)

    def handler(self, code: CodeType) -> Handler | None:
        """The handler of a code object."""
        return self._handlers.get(id(code))

    def rearm(self, code: CodeType, events: int) -> None:
        """Have all locations of a code object told of (again), those that were disabled too."""
        self._codes[id(code)] = code
        if self._tool is not None:
            _monitoring.set_local_events(self._tool, code, 0)
            _monitoring.set_local_events(self._tool, code, events)

    def start(self, *, everywhere: bool) -> None:
        """Begin.

        Args:
            everywhere: see every function begin, for `unknown`; otherwise only those that are watched.
        """
        self._tool = free_id()
        assert self._tool is not None
        _monitoring.use_tool_id(self._tool, _NAME)
        for event, callback in self._callbacks().items():
            _monitoring.register_callback(self._tool, event, callback)
        always, begins = EVENTS.PY_UNWIND | EVENTS.PY_THROW, EVENTS.PY_START | EVENTS.PY_RESUME
        _monitoring.set_events(self._tool, always | (begins if everywhere else 0))

    def stop(self) -> None:
        """No event from now on."""
        tool, self._tool = self._tool, None
        if tool is None or _monitoring.get_tool(tool) != _NAME:
            return
        _monitoring.set_events(tool, 0)
        for code in self._codes.values():
            _monitoring.set_local_events(tool, code, 0)
        for event in self._callbacks():
            _monitoring.register_callback(tool, event, None)
        _monitoring.free_tool_id(tool)
        self._handlers.clear()
        self._codes.clear()

    def _callbacks(self) -> dict[int, Callable[..., Any]]:
        leave, throw = self._ending(), self._throwing()
        return {
            EVENTS.PY_START: self._beginning("enter"),
            EVENTS.PY_RESUME: self._beginning("resume"),
            EVENTS.PY_RETURN: leave,
            EVENTS.PY_YIELD: leave,
            EVENTS.PY_UNWIND: leave,
            EVENTS.PY_THROW: throw,
            EVENTS.LINE: self._lines(self._failed),
        }

    def _beginning(self, method: str) -> Callable[..., Any]:
        handlers, unknown, disable = self._handlers, self._unknown, self.disable
        call = operator.methodcaller(method)

        def begins(code: CodeType, _offset: int) -> Any:
            handler = handlers.get(id(code))
            try:
                if handler is None:
                    handler = unknown(code)
                    if handler is None:
                        return disable
                return call(handler)
            except Exception as error:  # noqa: BLE001 - the program comes first
                self._failed(error)
                return None

        return begins

    def _ending(self) -> Callable[..., None]:
        handlers = self._handlers

        def ends(code: CodeType, _offset: int, _value: object) -> None:
            handler = handlers.get(id(code))
            if handler is not None:
                try:
                    handler.leave()
                except Exception as error:  # noqa: BLE001
                    self._failed(error)

        return ends

    def _throwing(self) -> Callable[..., None]:
        handlers = self._handlers

        def throws(code: CodeType, _offset: int, _error: object) -> None:
            handler = handlers.get(id(code))
            if handler is not None:
                try:
                    handler.resume()
                except Exception as error:  # noqa: BLE001
                    self._failed(error)

        return throws
