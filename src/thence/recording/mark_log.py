"""What marks, and steps, tell a recording: moments, put together by whoever reads it.

Codes of ``what`` in the table ``marks``: see `OPENED` and the following. ``serial`` ties the end of a
range to its beginning; ``forward`` is the serial of the mark that was open around the forward op.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from thence.recorder.names import Names

__all__ = ["BACKWARD_OPENED", "CLOSED", "OPENED", "STEP", "MarkLog"]

OPENED, CLOSED, BACKWARD_OPENED, STEP = 0, 1, 2, 3
_NONE = -1
_FIRST_BACKWARD = 1 << 62
"""Serials of backward nodes count from here: marks have numbers of their own."""

_Event = tuple[int, int, int, int, int, str, str | None, "Mapping[str, object] | None"]


class MarkLog:
    """A `thence.marks.Listener` that notes when, and on which thread, marks open and close."""

    def __init__(self) -> None:
        self._events: deque[_Event] = deque()
        self._serials = itertools.count(_FIRST_BACKWARD)
        self._local = threading.local()

    def opened(
        self, number: int, name: str, lane: str | None, metadata: Mapping[str, object]
    ) -> None:
        """A mark opens on this thread."""
        self._note(OPENED, number, _NONE, name, lane, metadata)

    def closed(self, number: int) -> None:
        """A mark closes on this thread."""
        self._note(CLOSED, number)

    def backward_opened(self, number: int | None, name: str) -> None:
        """A node of autograd begins on this thread; `number` is the mark around its forward op."""
        serial = next(self._serials)
        self._open_backward().append(serial)
        self._note(BACKWARD_OPENED, serial, _NONE if number is None else number, name)

    def backward_closed(self) -> None:
        """The innermost node of autograd on this thread is done."""
        stack = self._open_backward()
        if stack:
            self._note(CLOSED, stack.pop())

    def step(self, number: int, *, recorded: bool) -> None:
        """A step of the program begins."""
        self._note(STEP, number, int(recorded), f"step {number}")

    def take(self, names: Names) -> dict[str, dict[str, Any]]:
        """The moments since the last question, as rows of the table ``marks``."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        if not events:
            return {}
        what, serial, forward, moment, thread, name, lane, metadata = zip(*events, strict=True)
        texts = (_json(m) if m else None for m in metadata)
        return {
            "marks": {
                "what": np.array(what, np.uint8),
                "serial": np.array(serial, np.int64),
                "forward": np.array(forward, np.int64),
                "time": np.array(moment, np.int64),
                "thread": np.array(thread, np.int64),
                "name": np.array([names.of_text(n) if n else 0 for n in name], np.uint32),
                "lane": np.array([names.of_text(n) if n else 0 for n in lane], np.uint32),
                "metadata": np.array([names.of_text(n) if n else 0 for n in texts], np.uint32),
            }
        }

    def _note(
        self,
        what: int,
        serial: int,
        forward: int = _NONE,
        name: str = "",
        lane: str | None = None,
        metadata: Mapping[str, object] | None = None,
    ) -> None:
        self._events.append(
            (what, serial, forward, time.time_ns(), threading.get_native_id(), name, lane, metadata)
        )

    def _open_backward(self) -> list[int]:
        stack: list[int] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack


def _json(metadata: Mapping[str, object]) -> str:
    return json.dumps(dict(metadata), default=str)
