"""Reading CUPTI's counter of launches: by the compiled probe (``_calls.c``), else in Python.

CUPTI tells the number of a call when it calls back for it. Enabled for one function that does nearly nothing,
calling this function tells the number. Other functions may be called back for: their calls are noted with number,
thread, begin and end. For the compiled probe these can be those that launch work, which adds some 0.1 us to each
launch and leaves nothing to find out. The probe in Python would hold up every launch: it is for the few functions
that wait or build graphs, and launches are found by their number (`thence.readers.recording.counted`).

The compiled probe is there where it was built; free-threaded Pythons go without it. The environment variable
THENCE_PROBE=python does, too. Both note boundaries alike, but that in Python costs some 1 us a boundary, not 0.1.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from ctypes import CFUNCTYPE, PYFUNCTYPE, byref, c_int, c_uint32, c_void_p
from enum import IntEnum
from time import time_ns
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from thence.boundaries.log import BoundaryLog, NativeBoundaryLog

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Calls", "Followed", "NativeProbe", "Probe", "PythonProbe", "choose_probe"]

Calls = dict[str, np.ndarray[Any, Any]]
_CALL = np.dtype(
    [("begin", "<i8"), ("end", "<i8")]
    + [(name, "<u4") for name in ("domain", "function", "thread", "number")]
)
"""``Call`` of _calls.c."""
_MOST_CALLS = 1 << 20

VARIABLE = "THENCE_PROBE"
"""Environment variable: ``python`` goes without the compiled probe."""
_ENTER = 0
"""CUPTI_API_ENTER"""
_CORRELATION = 64
"""Offset of correlationId in CUpti_CallbackData (cupti_callbacks.h of CUDA 11.7 to 13.5)."""
_Callback = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)
_Function = PYFUNCTYPE(c_int, c_void_p)  # holds the GIL: no other thread notes in between


class Followed(IntEnum):
    """What is noted of the calls that CUPTI calls back for. Nothing until a probe is told otherwise."""

    NOTHING = 0
    STACKS = 1
    """The stack of the thread, by the compiled probe: the calls themselves are recorded elsewhere."""
    CALLS = 2
    """The calls and their stacks."""


class Probe(Protocol):
    """A way to read the counter.

    Attributes:
        name: ``c`` or ``python``.
        callback: address of the function that CUPTI calls back, a CUpti_CallbackFunc.
        notes_launches: whether it is quick enough to be called back for every launch.
    """

    name: str
    callback: int
    notes_launches: bool

    @property
    def compiled(self) -> ModuleType | None:
        """The compiled module; None for the probe in Python."""
        ...

    @property
    def lost_calls(self) -> int:
        """Calls that could not be kept, since the process began."""
        ...

    def log(self, function: int) -> BoundaryLog:
        """A log that reads the counter by calling a CUDA function: its address; it takes an int pointer."""

    def follow(self, what: Followed) -> None:
        """What is noted of calls from now on. The callbacks themselves stay as they are."""

    def take_calls(self) -> Calls:
        """Calls that CUPTI called back for otherwise, since this was last asked, but none inside another.

        Returns:
            begin and end (Unix ns), domain, function (callback id), thread and number of each.
        """


def choose_probe() -> Probe:
    """The compiled probe, or that in Python."""
    native = None if os.environ.get(VARIABLE) == "python" else _compiled()
    return PythonProbe() if native is None else NativeProbe(native)


def _compiled() -> ModuleType | None:
    try:
        from thence.boundaries import _probe  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    # One that was built for an older thence, as in a checkout that has moved on, lacks functions.
    return _probe if hasattr(_probe, "follow") else None


class NativeProbe:
    """By the compiled probe."""

    name = "c"
    notes_launches = True

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.callback: int = module.CALLBACK

    def log(self, function: int) -> BoundaryLog:
        """See `Probe`."""
        return NativeBoundaryLog(self._module.Log(function), self._module.Moments)

    @property
    def compiled(self) -> ModuleType | None:
        """See `Probe`."""
        return self._module

    @property
    def lost_calls(self) -> int:
        """See `Probe`."""
        return self._module.lost_calls()  # type: ignore[no-any-return]

    def follow(self, what: Followed) -> None:
        """See `Probe`."""
        self._module.follow(what)

    def take_calls(self) -> Calls:
        """See `Probe`."""
        rows = np.frombuffer(self._module.take_calls(), _CALL)
        return {name: rows[name].copy() for name in _CALL.names or ()}


class PythonProbe:
    """In Python, through ctypes."""

    name = "python"
    notes_launches = False
    compiled = None
    lost_calls = 0

    def __init__(self) -> None:
        local = _Local()
        calls: deque[tuple[int, ...]] = deque()

        def on_call(_user: int, domain: int, function: int, data: int) -> None:
            enters = c_int.from_address(data).value == _ENTER
            if local.reading and enters:
                local.number = c_uint32.from_address(data + _CORRELATION).value
            elif not local.reading and enters:
                if not local.began and self._followed is Followed.CALLS:
                    local.began, local.outermost = time_ns(), (domain, function)
            elif local.began and local.outermost == (domain, function):
                number = c_uint32.from_address(data + _CORRELATION).value
                if len(calls) < _MOST_CALLS:
                    calls.append((local.began, time_ns(), domain, function, local.thread, number))
                else:
                    self.lost_calls += 1
                local.began = 0

        self._followed = Followed.NOTHING
        self._local = local
        self._calls = calls
        self._kept = _Callback(on_call)  # CUPTI may call it as long as it lives
        _KEPT.append(self._kept)
        self.callback = ctypes.cast(self._kept, c_void_p).value or 0

    def log(self, function: int) -> BoundaryLog:
        """See `Probe`."""
        call, local = _Function(function), self._local

        def counter() -> int:
            local.number = 0
            local.reading = True
            call(local.version)
            local.reading = False
            return local.number

        return BoundaryLog(counter)

    def follow(self, what: Followed) -> None:
        """See `Probe`."""
        self._followed = what

    def take_calls(self) -> Calls:
        """See `Probe`."""
        rows = [self._calls.popleft() for _ in range(len(self._calls))]
        table = np.array(rows, _CALL)
        return {name: table[name].copy() for name in _CALL.names or ()}


class _Local(threading.local):
    """What one thread is at: whether it reads the counter, and what it read; when its call of another kind began."""

    def __init__(self) -> None:
        self.reading = False
        self.number = 0
        self.began = 0
        self.outermost = (0, 0)
        self.thread = threading.get_native_id()
        self._version = c_int()
        self.version = byref(self._version)


_KEPT: list[object] = []
"""Callbacks: CUPTI may call one after its recording has ended, in another thread."""
