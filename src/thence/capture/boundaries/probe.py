"""Reads CUPTI's counter of launches: by the compiled probe (``_calls.c``), else in Python.

CUPTI passes the number of a call to its callback. The callback is enabled for one function that does nearly nothing, so
calling this function reads the counter. If the callback is enabled for other functions, their calls are noted with
number, thread, begin and end. With the compiled probe these can be the functions that launch work: that adds some
0.1 us to each launch, and nothing has to be inferred later. The probe in Python would slow every launch down: it is
only enabled for the few functions that wait or build graphs, and launches are matched by their number
(`thence.readers.recording.counted_launches`).

The probe in Python is used where the compiled one was not built, in free-threaded Pythons, and with the environment
variable THENCE_PROBE=python. Both note the same boundaries, but a boundary costs some 1 us in Python instead of 0.1 us.
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

from thence.capture.boundaries.log import BoundaryLog, NativeBoundaryLog

if TYPE_CHECKING:
    from types import ModuleType

Calls = dict[str, np.ndarray[Any, Any]]
_CALL = np.dtype(
    [("begin", "<i8"), ("end", "<i8")] + [(name, "<u4") for name in ("domain", "function", "thread", "number")]
)
"""``Call`` of _calls.c."""
_MAX_CALLS = 1 << 20
"""Limit on the calls that wait to be taken."""

VARIABLE = "THENCE_PROBE"
"""Environment variable: ``python`` selects the probe in Python."""
_ENTER = 0
"""CUPTI_API_ENTER"""
_CORRELATION = 64
"""Offset of correlationId in CUpti_CallbackData (cupti_callbacks.h of CUDA 11.7 to 13.5)."""
_Callback = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)
_Function = PYFUNCTYPE(c_int, c_void_p)  # keeps the GIL: no other thread notes meanwhile


class Followed(IntEnum):
    """What is noted of the calls for which CUPTI calls back. A probe begins with `NOTHING`."""

    NOTHING = 0
    STACKS = 1
    """Only the stack of the thread, by the compiled probe: CUPTI's activity records hold the calls themselves."""
    CALLS = 2
    """The calls and their stacks."""


class Probe(Protocol):
    """A way to read the counter.

    Attributes:
        name: ``c`` or ``python``.
        callback: address of the callback for CUPTI, a CUpti_CallbackFunc.
        notes_launches: whether the callback is fast enough to be enabled for every launch.
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
        """A log that reads the counter by calling the CUDA function at an address, which takes an int pointer."""

    def follow(self, what: Followed) -> None:
        """Set what is noted of calls from now on. Which callbacks are enabled does not change."""

    def take_calls(self) -> Calls:
        """The other calls for which CUPTI called back, since the last `take_calls`, without calls inside of others.

        Returns:
            begin and end (Unix ns), domain, function (callback id), thread and number of each.
        """


def choose_probe() -> Probe:
    """The compiled probe if there is one and `VARIABLE` does not select the other, else the probe in Python."""
    native = None if os.environ.get(VARIABLE) == "python" else _compiled()
    return PythonProbe() if native is None else NativeProbe(native)


def _compiled() -> ModuleType | None:
    try:
        # Optional: it may not have been built.
        from thence.capture.boundaries import _probe  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    # A module that was built for an older thence, as after an update of a checkout, lacks functions.
    return _probe if hasattr(_probe, "follow") else None


class NativeProbe:
    """`Probe` by the compiled module."""

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
    """`Probe` in Python, through ctypes."""

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
                if len(calls) < _MAX_CALLS:
                    calls.append((local.began, time_ns(), domain, function, local.thread, number))
                else:
                    self.lost_calls += 1
                local.began = 0

        self._followed = Followed.NOTHING
        self._local = local
        self._calls = calls
        self._kept = _Callback(on_call)  # CUPTI may call it as long as the process lives
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
    """The state of one thread: whether it reads the counter, the number that it read, when its other call began."""

    def __init__(self) -> None:
        self.reading = False
        self.number = 0
        self.began = 0
        self.outermost = (0, 0)
        self.thread = threading.get_native_id()
        self._version = c_int()
        self.version = byref(self._version)


_KEPT: list[object] = []
"""Keeps callbacks alive: CUPTI may call one after its recording has ended, on another thread."""
