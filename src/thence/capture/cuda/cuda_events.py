"""CUDA events on streams that other code has made, by ctypes calls of the driver.

Functions and codes are those of ``cuda.h``; all of them exist since CUDA 9.2.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_char_p, c_float, c_int, c_uint, c_void_p
from typing import Any

from thence.errors import MissingRequirement, UsageError

_DRIVER = "libcuda.so.1"
_WITH_TIME = 0
"""CU_EVENT_DEFAULT"""


@functools.cache
def load_driver() -> Any:
    """The CUDA driver of this machine.

    Raises:
        MissingRequirement: it cannot be loaded.
    """
    try:
        return ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise MissingRequirement(f"there is no NVIDIA driver here: {error}") from error


def served_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the driver supports, major and minor; None without a driver."""
    version = c_int()
    try:
        if load_driver().cuDriverGetVersion(byref(version)):
            return None
    except (MissingRequirement, AttributeError):  # no driver, or not a driver
        return None
    return version.value // 1000, version.value % 1000 // 10


class Event:
    """A CUDA event: the moment at which the GPU has finished the earlier work of a stream.

    The event is created in the context of the first stream on which it is recorded, and kept: recording it again
    costs less than a microsecond.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._context: int | None = None
        self.handle: int | None = None

    def record(self, stream: int) -> None:
        """Record the event on a stream (a CUstream; 0: the default stream).

        Raises:
            MissingRequirement: a call of the driver fails.
        """
        context = c_void_p()
        call(self._driver, "cuStreamGetCtx", c_void_p(stream), byref(context))
        if self.handle is None or context.value != self._context:
            self.destroy()
            self.handle = self._create(context)
            self._context = context.value
        call(self._driver, "cuEventRecord", c_void_p(self.handle), c_void_p(stream))

    def destroy(self) -> None:
        """Destroy the CUDA event."""
        if self.handle is not None:
            self._driver.cuEventDestroy_v2(c_void_p(self.handle))
        self.handle = None

    def _create(self, context: c_void_p) -> int | None:
        event = c_void_p()
        call(self._driver, "cuCtxPushCurrent_v2", context)
        try:
            call(self._driver, "cuEventCreate", byref(event), c_uint(_WITH_TIME))
        finally:
            call(self._driver, "cuCtxPopCurrent_v2", byref(c_void_p()))
        return event.value


def elapsed_ms(driver: Any, start: Event, end: Event) -> float:
    """Milliseconds of GPU time between two events, with a resolution of 0.5 us; waits for the later event.

    Raises:
        UsageError: one of them was never recorded.
        MissingRequirement: a call of the driver fails, as for events of different devices.
    """
    if start.handle is None or end.handle is None:
        raise UsageError("an event was never recorded: the program did not reach that point")
    call(driver, "cuEventSynchronize", c_void_p(end.handle))
    time = c_float()
    call(driver, "cuEventElapsedTime", byref(time), c_void_p(start.handle), c_void_p(end.handle))
    return float(time.value)


def call(driver: Any, name: str, *arguments: Any) -> None:
    """Calls a function of the driver.

    Raises:
        MissingRequirement: it returned an error, or is missing.
    """
    code = getattr(driver, name)(*arguments) if hasattr(driver, name) else None
    if code == 0:
        return
    if code is None:
        raise MissingRequirement(f"the NVIDIA driver has no {name}: it is too old")
    text = c_char_p()
    driver.cuGetErrorString(code, byref(text))
    meaning = text.value.decode(errors="replace") if text.value else "not a known error"
    raise MissingRequirement(f"{name} failed with CUDA error {code}: {meaning}")
