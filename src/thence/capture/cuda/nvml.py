"""NVML, as far as it is sampled: figures of each GPU that this process uses, from time to time.

NVML takes no part in what runs on the device. Everything here is best effort: without
NVML there are no samples.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_void_p
from typing import Any

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.synchronization import active_devices
from thence.errors import MissingRequirement

SAMPLE_SECONDS = 0.25
"""Time between two samples, until a device has `_MAX_SAMPLES` of them."""
RARE_SECONDS = 5.0
"""The same where steps are sampled. Asking an H200 for its energy takes 3.6 ms of CPU time, 15 at most; four times a
second, that was 1.6 % of a core beside an H100, more than all else between two windows."""
_MAX_SAMPLES = 512
"""Samples of a device that are kept: when there are more, every second one is dropped, and the time doubles."""
_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class NvmlSamples:
    """Samples of the devices that this process uses; called by one thread. A subclass says which figures.

    Args:
        library: NVML; None: it is loaded when the first device is in use.
        seconds: between two samples, at first.

    Attributes:
        due: when the next sample is taken, on the clock of `time.monotonic`.
    """

    def __init__(self, library: Any = None, seconds: float = SAMPLE_SECONDS) -> None:
        self._library = library
        self._works = True
        self.due = 0.0
        self._seconds = seconds
        self._handles: dict[int, c_void_p] = {}
        self._samples: dict[int, list[dict[str, int | None]]] = {}

    def _figures(self, device: int, handle: c_void_p, now_ns: int) -> dict[str, int | None] | None:
        """The figures of a device by their names in `facts`, which have their units; None if there are none."""
        raise NotImplementedError

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
        if max(map(len, self._samples.values()), default=0) > _MAX_SAMPLES:
            self._samples = {device: taken[::2] for device, taken in self._samples.items()}
            self._seconds *= 2

    def facts(self) -> list[dict[str, Any]]:
        """For the description of a recording: of each device, Unix times (ns) and figures of its samples."""
        return [
            {"device": device, **{name: [sample[name] for sample in taken] for name in taken[0]}}
            for device, taken in self._samples.items()
        ]

    def _take(self, driver: Any, device: int) -> None:
        if device not in self._handles:
            handle = self._handle(driver, device)
            if handle is None:
                self._works = False
                return
            self._handles[device] = handle
        now = time.time_ns()
        figures = self._figures(device, self._handles[device], now)
        if figures is not None:
            self._samples.setdefault(device, []).append({"times_ns": now, **figures})

    def _ask(self, function: str, *arguments: Any) -> int:
        """What a function of NVML returned: 0, or the number of an error; 1 where this NVML has no such function."""
        asked = getattr(self._library, function, None)
        return 1 if asked is None else int(asked(*arguments))

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
