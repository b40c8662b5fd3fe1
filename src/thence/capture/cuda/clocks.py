"""Clock, power and energy of each GPU while it is recorded, sampled through NVML.

Peaks on data sheets hold at one clock. A GPU at its power limit runs tensor cores slower, and one without may run
faster, so a share of the peak means little without the clock. The energy between two samples is a row of the table
``counters``. NVML answers in some microseconds and takes no part in what runs on the device. Everything here is best
effort: without NVML there are no samples, and a GPU that does not tell its energy has no rows.
"""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any, NamedTuple

import numpy as np

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.synchronization import active_devices
from thence.errors import MissingRequirement
from thence.model.counter_names import ENERGY

SAMPLE_SECONDS = 0.25
"""Time between two samples, until a device has `_MOST` of them."""
_MOST = 512
"""Samples of a device that are kept: when there are more, every second one is dropped, and the time doubles."""
_SM = 1
"""NVML_CLOCK_SM"""
_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")


class _Sample(NamedTuple):
    """Unix time (ns), clock (MHz), and power (milliwatts; None: the device does not tell)."""

    time: int
    mhz: int
    milliwatts: int | None


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
        self._samples: dict[int, list[_Sample]] = {}
        self._energy: dict[int, tuple[int, int]] = {}  # of each device, Unix ns and millijoules of its last sample
        self._rows: list[tuple[int, int, int, float]] = []  # device, start and end (Unix ns), joules

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
        """For the description of a recording: of each device, Unix times (ns), clocks (MHz) and power of its samples.

        Power is in milliwatts, and None where the device does not tell it.
        """
        return [
            {
                "device": device,
                "times_ns": [sample.time for sample in taken],
                "mhz": [sample.mhz for sample in taken],
                "milliwatts": [sample.milliwatts for sample in taken],
            }
            for device, taken in self._samples.items()
        ]

    def take_energy(self) -> dict[str, Any]:
        """Rows of the table ``counters`` since the last call: the energy that a device used between two samples.

        Their times are Unix ns, which CUPTI's clock shows too.
        """
        rows, self._rows = self._rows, []
        device, start, end, joules = zip(*rows, strict=True) if rows else ((), (), (), ())
        return {
            "device": np.array(device, dtype=np.int32),
            "start": np.array(start, dtype=np.int64),
            "end": np.array(end, dtype=np.int64),
            ENERGY: np.array(joules, dtype=np.float64),
        }

    def _take(self, driver: Any, device: int) -> None:
        clock, power, energy = c_uint(), c_uint(), c_ulonglong()
        if device not in self._handles:
            handle = self._handle(driver, device)
            if handle is None:
                self._works = False
                return
            self._handles[device] = handle
        handle, now = self._handles[device], time.time_ns()
        if not self._ask("nvmlDeviceGetClockInfo", handle, c_int(_SM), byref(clock)):
            known = not self._ask("nvmlDeviceGetPowerUsage", handle, byref(power))
            sample = _Sample(now, clock.value, power.value if known else None)
            self._samples.setdefault(device, []).append(sample)
        if not self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, byref(energy)):
            before = self._energy.get(device)
            self._energy[device] = now, energy.value
            if before is not None and energy.value >= before[1]:  # it counts from 0 when the driver is loaded
                self._rows.append((device, before[0], now, (energy.value - before[1]) / 1000))

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
