"""Events of Python code from `sys.monitoring` (Python 3.12 and newer), for one tool id of thence.

Every code object that is followed has a `Handler`; for all others the first event returns `DISABLE`, and later ones
cost nothing. A handler's events are set on its own code object, with two exceptions: the beginning and the resumption
of functions, by which code is found, and exceptions that leave a function or are thrown into a generator, which
`sys.monitoring` only has for all code or none.

Callbacks run with events off, so the code that they call causes no events. An exception in a callback would be raised
in the program, so it is caught: the first one ends the watching, and is reported.
"""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

_NAME = "thence"
_IDS = (3, 4)
"""Tool ids that are not reserved: 0 is for debuggers, 1 for coverage, 2 for profilers, 5 for optimizers."""
_monitoring: Any = getattr(sys, "monitoring", None)
EVENTS: Any = getattr(_monitoring, "events", None)
CALLS: int = EVENTS.PY_START | EVENTS.PY_RETURN if EVENTS else 0
"""Events of a function that is no generator."""
ALL_LINES: int = EVENTS.LINE | EVENTS.PY_RETURN | EVENTS.PY_YIELD | EVENTS.PY_RESUME if EVENTS else 0
"""Events of a function that is followed line by line; its beginning is found by the events of all code."""


class Handler(Protocol):
    """Handles the events of one code object.

    The frame of the code is `sys._getframe(2)` in each of these methods.
    """

    def enter(self) -> Any:
        """Handle the beginning of the function; may return `Monitor.disable`, to be called no more."""

    def leave(self) -> None:
        """Handle that the function returns, yields, or is left by an exception."""

    def resume(self) -> Any:
        """Handle that it continues after a yield, in the middle of a line; may return `Monitor.disable`."""


def why_not() -> str | None:
    """Why Python's events cannot be followed in this process; None if they can."""
    if _monitoring is None:
        version = ".".join(map(str, sys.version_info[:2]))
        return f"Python {version} has no sys.monitoring; 3.12 and newer do"
    if free_id() is None:
        taken = sorted({str(_monitoring.get_tool(number)) for number in _IDS})
        return f"other tools ({', '.join(taken)}) use all ids of sys.monitoring"
    return None


def free_id() -> int | None:
    """A tool id that no tool uses; None if there is none."""
    free = [number for number in _IDS if _monitoring.get_tool(number) is None]
    return free[0] if free else None


class Monitor:
    """Follows code objects by `sys.monitoring`.

    Args:
        unknown: makes the handler of a code object that begins for the first time, and sets its events; returns
            None for code that is not to be followed.
        lines: makes the callback for lines, when watching begins. The callback gets code and line, may return
            `disable`, and finds the frame of the code by `sys._getframe(1)`.
        failed: called with an internal error, after which nothing is watched.
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
        self._everywhere = False
        self._paused = False
        self._events: dict[int, int] = {}
        self._handlers: dict[int, Handler] = {}
        self._kept: tuple[CodeType, ...] = ()
        self._codes: dict[int, CodeType] = {}  # keeps them alive, so that ids stay valid
        self.disable: Any = getattr(_monitoring, "DISABLE", None)

    def watch(self, code: CodeType, handler: Handler, events: int) -> None:
        """Follow a code object from now on."""
        self._codes[id(code)] = code
        self._handlers[id(code)] = handler
        self._set_events(code, events)

    def handler(self, code: CodeType) -> Handler | None:
        """The handler of a code object."""
        return self._handlers.get(id(code))

    def rearm(self, code: CodeType, events: int) -> None:
        """Set the events of a code object anew, which enables them also at locations where they were disabled."""
        self._codes[id(code)] = code
        self._set_events(code, 0)
        self._set_events(code, events)

    def _set_events(self, code: CodeType, events: int) -> None:
        self._events[id(code)] = events
        if self._tool is not None and not self._paused:
            _monitoring.set_local_events(self._tool, code, events)

    def pause(self, kept: Mapping[CodeType, Handler]) -> None:
        """Receive no events until `resume`, except the calls of a few functions, by handlers of their own."""
        if self._tool is None or self._paused:
            return
        self._paused = True
        handlers = {id(code): handler for code, handler in kept.items()}
        _monitoring.set_events(self._tool, 0)
        for code in self._codes.values():
            if id(code) not in handlers:
                _monitoring.set_local_events(self._tool, code, 0)
        callbacks = {EVENTS.PY_START: self._beginning("enter", handlers), EVENTS.PY_RETURN: self._ending(handlers)}
        for event, callback in callbacks.items():
            _monitoring.register_callback(self._tool, event, callback)
        self._kept = tuple(kept)
        for code in kept:
            # An event that was disabled while all code had it stays so until no tool wants it.
            for events in (CALLS, 0, CALLS):
                _monitoring.set_local_events(self._tool, code, events)

    def resume(self) -> None:
        """Receive events again after `pause`."""
        if self._tool is None or not self._paused:
            return
        self._paused = False
        for event, callback in self._callbacks().items():
            _monitoring.register_callback(self._tool, event, callback)
        for code in self._kept:
            _monitoring.set_local_events(self._tool, code, self._events.get(id(code), 0))
        self._kept = ()
        for code in self._codes.values():
            _monitoring.set_local_events(self._tool, code, self._events.get(id(code), 0))
        self._listen(self._tool)

    def _listen(self, tool: int) -> None:
        """Set the events that all code has."""
        always, begins = EVENTS.PY_UNWIND | EVENTS.PY_THROW, EVENTS.PY_START | EVENTS.PY_RESUME
        _monitoring.set_events(tool, always | (begins if self._everywhere else 0))

    def start(self, *, everywhere: bool) -> None:
        """Begin.

        Args:
            everywhere: receive the beginning of every function, for `unknown`; else only of those that are watched.
        """
        self._tool = free_id()
        assert self._tool is not None
        _monitoring.use_tool_id(self._tool, _NAME)
        for event, callback in self._callbacks().items():
            _monitoring.register_callback(self._tool, event, callback)
        self._everywhere = everywhere
        self._listen(self._tool)

    def stop(self) -> None:
        """Receive no events from now on, and free the tool id."""
        tool, self._tool = self._tool, None
        if tool is None or _monitoring.get_tool(tool) != _NAME:
            return
        _monitoring.set_events(tool, 0)
        for code in (*self._codes.values(), *self._kept):
            _monitoring.set_local_events(tool, code, 0)
        for event in self._callbacks():
            _monitoring.register_callback(tool, event, None)
        _monitoring.free_tool_id(tool)
        self._paused, self._kept = False, ()
        self._events.clear()
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

    def _beginning(self, method: str, kept: Mapping[int, Handler] | None = None) -> Callable[..., Any]:
        handlers, disable = self._handlers if kept is None else kept, self.disable
        unknown = self._unknown if kept is None else _no_handler
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

    def _ending(self, kept: Mapping[int, Handler] | None = None) -> Callable[..., None]:
        handlers = self._handlers if kept is None else kept

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


def _no_handler(_code: CodeType) -> None:
    return None


def running_codes() -> Iterator[CodeType]:
    """The code of every function that is running, on all threads: it began before its events were set."""
    for frame in sys._current_frames().values():  # noqa: SLF001 - no other name
        yield from (outer.f_code for outer in outer_frames(frame))


def outer_frames(frame: FrameType | None) -> list[FrameType]:
    """A frame and its callers, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]
