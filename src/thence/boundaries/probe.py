"""Reading CUPTI's counter of launches: by the compiled probe (``_probe.c``), else in Python.

CUPTI tells the number of a call when it calls back for it. Enabled for one function alone, one that does
nearly nothing, calling this function tells the number. Nothing else is slowed down, and launches need not be
recorded.

The compiled probe is there where it was built; free-threaded Pythons go without it. The environment variable
THENCE_PROBE=python does, too. Both behave alike, but that in Python costs some 1 us a boundary, not 0.1.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import CFUNCTYPE, PYFUNCTYPE, byref, c_int, c_uint32, c_void_p
from typing import TYPE_CHECKING, Protocol

from thence.boundaries.log import BoundaryLog, NativeBoundaryLog

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Probe", "choose_probe"]

VARIABLE = "THENCE_PROBE"
"""Environment variable: ``python`` goes without the compiled probe."""
_ENTER = 0
"""CUPTI_API_ENTER"""
_CORRELATION = 64
"""Offset of correlationId in CUpti_CallbackData (cupti_callbacks.h of CUDA 11.7 to 13.5)."""
_Callback = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)
_Function = PYFUNCTYPE(c_int, c_void_p)  # holds the GIL: no other thread notes in between


class Probe(Protocol):
    """A way to read the counter.

    Attributes:
        name: ``c`` or ``python``.
        callback: address of the function that CUPTI calls back, a CUpti_CallbackFunc.
    """

    name: str
    callback: int

    def log(self, function: int) -> BoundaryLog:
        """A log that reads the counter by calling a CUDA function: its address; it takes an int pointer."""


def choose_probe() -> Probe:
    """The compiled probe, or that in Python."""
    native = None if os.environ.get(VARIABLE) == "python" else _compiled()
    return PythonProbe() if native is None else NativeProbe(native)


def _compiled() -> ModuleType | None:
    try:
        from thence.boundaries import _probe  # type: ignore[attr-defined, unused-ignore]
    except ImportError:
        return None
    return _probe  # type: ignore[no-any-return, unused-ignore]


class NativeProbe:
    """By the compiled probe."""

    name = "c"

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self.callback: int = module.CALLBACK

    def log(self, function: int) -> BoundaryLog:
        """See `Probe`."""
        return NativeBoundaryLog(self._module.Log(function))


class PythonProbe:
    """In Python, through ctypes."""

    name = "python"

    def __init__(self) -> None:
        local = threading.local()

        def on_call(_user: int, _domain: int, _callback_id: int, data: int) -> None:
            if c_int.from_address(data).value == _ENTER:
                local.number = c_uint32.from_address(data + _CORRELATION).value

        self._local = local
        self._kept = _Callback(on_call)  # CUPTI may call it as long as it lives
        _KEPT.append(self._kept)
        self.callback = ctypes.cast(self._kept, c_void_p).value or 0

    def log(self, function: int) -> BoundaryLog:
        """See `Probe`."""
        call, local, result = _Function(function), self._local, threading.local()

        def counter() -> int:
            local.number = 0
            call(_version_of(result))
            return local.number  # type: ignore[no-any-return]

        return BoundaryLog(counter)


_KEPT: list[object] = []
"""Callbacks: CUPTI may call one after its recording has ended, in another thread."""


def _version_of(local: threading.local) -> object:
    """Where a thread's calls write what they give back."""
    try:
        return local.reference
    except AttributeError:
        local.version = c_int()
        local.reference = byref(local.version)
        return local.reference
