"""Tests whether the compiled probe can read the stack of this Python.

A thread that launches is inside of C code, where its Python frames do not change: the probe reads them in some 0.1 us,
at the launch itself, instead of following every line of the program. No API of Python gives access to frames without
the GIL, so this module holds the offsets of a few fields for the known versions, and each process compares what they
yield with `sys._getframe` before it relies on them. A wrong offset makes this test fail, without a segmentation fault.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType, ModuleType

VARIABLE = "THENCE_LINES"
"""Environment variable: ``events`` follows every line by an event, as if stacks could not be read."""

_DEEP = 40


class Layout(NamedTuple):
    """Offsets in bytes, from ``Include/internal/pycore_frame.h`` and ``Include/cpython/pystate.h``.

    From 3.14 on the frame is in ``Include/internal/pycore_interpframe_structs.h``. The first word of
    _PyInterpreterFrame is a pointer to its code, with tags from 3.14 on.

    Attributes:
        through: of the pointer to _PyCFrame in PyThreadState; -1 for versions without it.
        top: of the pointer to the innermost frame, in _PyCFrame, or else in PyThreadState.
        previous: of the pointer to the calling frame, in _PyInterpreterFrame.
        instruction: of the pointer to the instruction that runs, in _PyInterpreterFrame.
        code: of the first instruction, in PyCodeObject.
        locals: of the first local, in _PyInterpreterFrame.
    """

    through: int
    top: int
    previous: int
    instruction: int
    code: int
    locals: int


LAYOUTS = {
    (3, 12): Layout(through=56, top=0, previous=8, instruction=56, code=192, locals=72),
    (3, 13): Layout(through=-1, top=72, previous=8, instruction=56, code=200, locals=72),
    (3, 14): Layout(through=-1, top=72, previous=8, instruction=56, code=208, locals=80),
    (3, 15): Layout(through=-1, top=72, previous=8, instruction=56, code=208, locals=80),
}
"""By version of CPython, for builds with a GIL on 64-bit machines."""


def why_unreadable(native: ModuleType | None, *, by_events: bool = False) -> str | None:
    """Why stacks cannot be read here; None if they can, and the probe has been given the offsets.

    Args:
        by_events: whether to disregard `VARIABLE`, which selects events for lines only.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    layout = LAYOUTS.get(sys.version_info[:2])
    if os.environ.get(VARIABLE) == "events" and not by_events:
        return f"the environment variable {VARIABLE} selects events"
    if native is None:
        return "the compiled probe is not in use"
    if sys.implementation.name != "cpython" or layout is None or sys.maxsize < 1 << 32:
        return f"the frame layout of Python {version} is not known"
    if sys.abiflags:
        return f"this is a special build of Python {version} (abiflags {sys.abiflags})"
    native.use_layout(*layout)
    if not all(_agrees(native, call) for call in _calls()):
        return f"the frame layout of this Python differs from the known layout of Python {version}"
    return None


class _Instance:
    """Takes the role of a module that is called: its first local is ``self``."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the first argument."""
        return args[0](**kwargs)


def _calls() -> list[Callable[[Callable[[], Any]], Any]]:
    """Ways to call a function: from every kind of frame that there is."""

    def deep(function: Callable[[], Any], left: int = _DEEP) -> Any:
        return deep(function, left - 1) if left else function()

    def generator(function: Callable[[], Any]) -> Any:
        yield None
        yield function()

    def resumed(function: Callable[[], Any]) -> Any:
        frames = generator(function)
        next(frames)
        return next(frames)

    async def coroutine(function: Callable[[], Any]) -> Any:
        return function()

    def awaited(function: Callable[[], Any]) -> Any:
        try:
            coroutine(function).send(None)
        except StopIteration as end:
            return end.value

    def closure(function: Callable[[], Any]) -> Any:
        held = [function]

        def inner(last: int) -> Any:
            return held[0]() if last else None

        return max(map(inner, (0, 1)), key=bool)

    return [
        lambda function: function(),
        deep,
        resumed,
        awaited,
        closure,
        lambda function: [function() for _ in range(2)][1],
        lambda function: next(function() for _ in range(1)),
        lambda function: _Instance().call(function),
    ]


def _agrees(native: ModuleType, call: Callable[[Callable[[], Any]], Any]) -> bool:
    """Whether the probe and Python see the same frames, positions and first arguments."""

    def compare() -> bool:
        rows = native.try_frames()
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - no other way to a frame
        if rows is None or frame is None:
            return False
        # The position in this frame has moved on since try_frames; the frames around it have not.
        expected = []
        frame = frame.f_back
        while frame is not None:
            expected.append((id(frame.f_code), frame.f_lasti, _first(frame, frame.f_code)))
            frame = frame.f_back
        known = {code for code, _, _ in expected}
        seen = [row for row in rows if row[0] in known]
        return len(seen) == len(expected) and all(
            read[:2] == true[:2] and true[2] in (None, read[2]) for read, true in zip(seen, expected, strict=True)
        )

    return bool(call(compare))


def _first(frame: FrameType, code: CodeType) -> int | None:
    """Address of the first argument, for `_Instance.call` only; None for other frames."""
    if code is not _Instance.call.__code__:
        return None
    return id(frame.f_locals["self"])
