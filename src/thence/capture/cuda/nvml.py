"""NVML, as far as it is sampled: a figure of each GPU that this process uses, from time to time.

NVML answers in some microseconds and takes no part in what runs on the device. Everything here is best effort: without
NVML there are no samples.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_void_p
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.synchronization import active_devices
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLE_SECONDS = 0.25
"""Time between two samples, until a device has `_MOST` of them."""
_MOST = 512
"""Samples of a device that are kept: when there are more, every second one is dropped, and the time doubles."""
_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class NvmlSamples:
    """Samples of the devices that this process uses; called by one thread.

    Args:
        what: name of the figure in `facts`, with its unit.
        ask: takes NVML and its handle of a device, and returns the figure; None where there is none.
        library: NVML; None: it is loaded when the first device is in use.

    Attributes:
        due: when the next sample is taken, on the clock of `time.monotonic`.
    """

    def __init__(self, what: str, ask: Callable[[Any, c_void_p], int | None], library: Any = None) -> None:
        self._what = what
        self._ask = ask
        self._library = library
        self._works = True
        self.due = 0.0
        self._seconds = SAMPLE_SECONDS
        self._handles: dict[int, c_void_p] = {}
        self._samples: dict[int, list[tuple[int, int]]] = {}

    def look(self) -> None:
        """Takes a sample of each device, if it is time for one."""
        now = time.monotonic()
        if not self._works or now < self.due:
            return
        self.due = now + self._seconds
        try:
            driver = load_driver()
        except MissingRequirement:
            self._works = False
            return
        for device in active_devices(driver):
            self._take(driver, device)
        if max(map(len, self._samples.values()), default=0) > _MOST:
            self._samples = {device: taken[::2] for device, taken in self._samples.items()}
            self._seconds *= 2

    def facts(self) -> list[dict[str, Any]]:
        """For the description of a recording: of each device, Unix times (ns) and figures of its samples."""
        return [
            {"device": device, "times_ns": [at for at, _ in taken], self._what: [figure for _, figure in taken]}
            for device, taken in self._samples.items()
        ]

    def _take(self, driver: Any, device: int) -> None:
        if device not in self._handles:
            handle = self._handle(driver, device)
            if handle is None:
                self._works = False
                return
            self._handles[device] = handle
        figure = self._ask(self._library, self._handles[device])
        if figure is not None:
            self._samples.setdefault(device, []).append((time.time_ns(), figure))

    def _handle(self, driver: Any, device: int) -> c_void_p | None:
        """NVML's handle of a device of CUDA, which numbers devices in another way; None if there is none."""
        bus, handle = ctypes.create_string_buffer(32), c_void_p()
        if not self._loaded() or driver.cuDeviceGetPCIBusId(bus, c_int(len(bus)), c_int(device)):
            return None
        return None if self._library.nvmlDeviceGetHandleByPciBusId_v2(bus, byref(handle)) else handle

    def _loaded(self) -> bool:
        for name in _NAMES if self._library is None else ():
            try:
                library = ctypes.CDLL(name)
            except OSError:
                continue
            if library.nvmlInit_v2():
                return False
            self._library = library
            break
        return self._library is not None
