"""Frames of open marks: around the code that runs, and around the autograd nodes that it made.

A frame is a plain tuple, because a frame is made for every mark that opens:

    (frame around it or None, number, mark or Backward, ranges opened in other tools or None)

`thread.state.top` is the innermost frame of the thread, and `task.top` that of an asyncio task, since tasks
take turns on one thread; `top` selects the one that applies. The thread's ``log`` holds the innermost frame
by autograd sequence number, so that the number of an autograd node gives the marks around its forward.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from contextvars import ContextVar
from typing import Any, NamedTuple

from thence.capture.marks.graph_labels import Label, metadata_text
from thence.capture.marks.watching import Frame, watch

LOG_LIMIT = 1 << 16
"""The least number of entries of a thread's log that is kept: enough for the marks of many forward passes."""

numbers = itertools.count(1)

_UNSET: Frame = (None, 0, None, None)
_in_task: ContextVar[Frame | None] = ContextVar("thence.capture.marks.in_task", default=_UNSET)


class Log:
    """The innermost frames of a thread, by autograd sequence number.

    Attributes:
        starts: distinct sequence numbers, ascending.
        frames: the innermost frame from each of these numbers on.
    """

    __slots__ = ("frames", "starts")

    def __init__(self) -> None:
        self.starts = [-1]
        self.frames: list[Frame | None] = [None]

    def note(self, start: int, frame: Frame | None) -> None:
        """Note that a frame is the innermost one from a sequence number on; `mark` inlines the first branch."""
        if self.starts[-1] == start:  # no node was made in between: the frame before is not needed
            self.frames[-1] = frame
            return
        self.starts.append(start)
        self.frames.append(frame)
        if len(self.starts) > 2 * LOG_LIMIT:
            del self.starts[:LOG_LIMIT], self.frames[:LOG_LIMIT]

    def innermost(self, sequence: int) -> Frame | None:
        """The innermost frame when the node of a number was made; None if there was none, or it was dropped."""
        index = bisect_right(self.starts, sequence) - 1
        return self.frames[index] if index >= 0 else None

    def paths(self) -> set[tuple[str, ...]]:
        """Paths of the frames that are not inside of a backward pass."""
        frames = {frame[1]: frame for frame in self.frames if frame is not None}
        return {_path(f, set()) for f in frames.values() if not _inside(f)[1]}


class _State:
    """The state of a thread: its innermost frame and its log."""

    __slots__ = ("log", "top")

    def __init__(self) -> None:
        self.top: Frame | None = None
        self.log = Log()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.state = _State()


class _Task:
    """The state of an asyncio task; the tasks of a thread share its log."""

    __slots__ = ()

    @property
    def top(self) -> Frame | None:
        frame = _in_task.get()
        return thread.state.top if frame is _UNSET else frame

    @top.setter
    def top(self, frame: Frame | None) -> None:
        _in_task.set(frame)

    @property
    def log(self) -> Log:
        return thread.state.log


class _Top:
    """The innermost frame of the running asyncio task, or else of the thread."""

    __slots__ = ()

    def get(self) -> Frame | None:
        """The innermost frame; None outside of all marks."""
        return self._state().top

    def set(self, frame: Frame | None) -> None:
        """Make a frame the innermost one."""
        self._state().top = frame

    def _state(self) -> _State | _Task:
        return thread.state if watch.loop is None or watch.loop() is None else task


thread = _Thread()
task = _Task()
top = _Top()


WORK_OF = "work_of"
"""Key of metadata of nodes: number of the open mark that states their FLOP or bytes."""
_STATED = frozenset({"flop", "bytes"})


class Backward(NamedTuple):
    """Takes the place of the mark in the frame of an autograd node, whose forward was inside the frame `forward`."""

    forward: Frame | None


def label_of(frame: Frame | None, known: set[tuple[str, ...]]) -> Label | None:
    """The label of work that is launched while a frame is the innermost one.

    Args:
        frame: the innermost frame.
        known: paths of marks in forward passes, for `_joined`.
    """
    if frame is None:
        return None
    marks, backward = _inside(frame)
    lane = next((m.lane for m in marks if m.lane is not None), None)
    metadata: dict[str, object] = {}
    for m in reversed(marks):  # inner marks win
        metadata |= m.metadata
    stating = _stating(frame)
    if stating is not None:  # a statement holds as a whole: what an outer mark states is not about this work alone
        own = stating[2].metadata
        metadata = {key: value for key, value in metadata.items() if key not in _STATED}
        metadata |= {key: own[key] for key in _STATED if key in own} | {WORK_OF: stating[1]}
    path = _path(frame, known)
    phase = "backward" if backward else "forward"
    return Label(path, phase, lane, metadata_text(metadata))


def _stating(frame: Frame | None) -> Frame | None:
    """The innermost frame whose mark states FLOP or bytes; None for work of the backward pass."""
    while frame is not None and not isinstance(frame[2], Backward):
        if not _STATED.isdisjoint(frame[2].metadata):
            return frame
        frame = frame[0]
    return None


def reopened(frame: Frame) -> bool:
    """Whether the innermost mark was opened in a backward pass, as in a checkpointed forward that runs again."""
    if isinstance(frame[2], Backward):
        return False
    return _inside(frame)[1]


def _inside(frame: Frame | None) -> tuple[list[Any], bool]:
    """The marks of a frame and of those around it, innermost first, and whether it is in a backward pass."""
    marks, backward = [], False
    while frame is not None:
        mark = frame[2]
        if isinstance(mark, Backward):
            backward = True
            frame = mark.forward or frame[0]
        else:
            marks.append(mark)
            frame = frame[0]
    return marks, backward


def _path(frame: Frame | None, known: set[tuple[str, ...]]) -> tuple[str, ...]:
    """Names of the marks, outermost first."""
    names: list[str] = []
    library: list[str] = []
    around: tuple[str, ...] = ()
    while frame is not None:
        mark = frame[2]
        if isinstance(mark, Backward):
            around = _path(mark.forward or frame[0], known)
            break
        (library if mark.from_library else names).append(mark.name)
        frame = frame[0]
    # The names of library marks are only used if there are no other names.
    return _joined(around, tuple(reversed(names)), known) or tuple(reversed(library))


def _joined(around: tuple[str, ...], inside: tuple[str, ...], known: set[tuple[str, ...]]) -> tuple[str, ...]:
    """The path of marks that were opened in a backward pass.

    Activation checkpointing runs part of the forward again, inside the node that needs it first. So a mark
    goes to the innermost level of that node's path (`around`) at which the forward had a mark of the same
    name. A mark with any other name is new, and goes below the whole path.
    """
    if not inside:
        return around
    for length in range(len(around), -1, -1):
        if (*around[:length], inside[0]) in known:
            return around[:length] + inside
    return around + inside
