"""The clock of each GPU's multiprocessors while it is recorded, sampled through NVML.

Peaks on data sheets hold at one clock. A GPU at its power limit runs tensor cores slower, and one without may run
faster, so a share of the peak means little without the clock. NVML answers in some microseconds and takes no part in
what runs on the device. Everything here is best effort: without NVML there are no samples.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_uint, c_void_p
from typing import Any

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.synchronization import active_devices
from thence.errors import MissingRequirement

SAMPLE_SECONDS = 0.25
"""Time between two samples, until a device has `_MOST` of them."""
_MOST = 512
"""Samples of a device that are kept: when there are more, every second one is dropped, and the time doubles."""
_SM = 1
"""NVML_CLOCK_SM"""
_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class ClockSamples:
    """Samples of the devices that this process uses; called by one thread.

    Args:
        library: NVML; None: it is loaded when the first device is in use.

    Attributes:
        due: when the next sample is taken, on the clock of `time.monotonic`.
    """

    def __init__(self, library: Any = None) -> None:
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
        """For the description of a recording: of each device, Unix times (ns) and clocks (MHz) of its samples."""
        return [
            {"device": device, "times_ns": [at for at, _ in taken], "mhz": [mhz for _, mhz in taken]}
            for device, taken in self._samples.items()
        ]

    def _take(self, driver: Any, device: int) -> None:
        clock = c_uint()
        if device not in self._handles:
            handle = self._handle(driver, device)
            if handle is None:
                self._works = False
                return
            self._handles[device] = handle
        if not self._library.nvmlDeviceGetClockInfo(self._handles[device], c_int(_SM), byref(clock)):
            self._samples.setdefault(device, []).append((time.time_ns(), clock.value))

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
