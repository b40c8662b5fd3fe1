"""NVML, as far as it is sampled: figures of each GPU that this process uses, from time to time.

NVML takes no part in what runs on the device. Everything here is best effort: without NVML there are no samples.

Clock, power and energy: peaks on data sheets hold at one clock. A GPU at its power limit runs tensor cores slower, and
one without may run faster, so a share of the peak means little without the clock. The energy between two samples is a
row of the table ``counters``; a GPU that does not tell its energy has no rows.

Memory of this process, as the driver counts it: it is more than what the allocator of a framework holds. CUDA's
context, code of kernels, NCCL's buffers and what libraries allocate themselves are in it. Where NVML does not show this
process, as in containers whose processes have other numbers outside, there are no samples.
"""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import byref, c_int, c_uint, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from thence.capture.cuda.cuda_events import load_driver
from thence.capture.cuda.synchronization import active_devices
from thence.errors import MissingRequirement
from thence.model.counter_names import ENERGY

SAMPLE_SECONDS = 0.25
"""Time between two samples, until a device has `_MAX_SAMPLES` of them."""
RARE_SECONDS = 5.0
"""The same where steps are sampled. Asking an H200 for its energy takes 3.6 ms of CPU time, 15 at most; four times a
second, that was 1.6 % of a core beside an H100, more than all else between two windows."""
_MAX_SAMPLES = 512
"""Samples of a device that are kept: when there are more, every second one is dropped, and the time doubles."""
_NAMES = ("libnvidia-ml.so.1", "libnvidia-ml.so")
_SM = 1
"""NVML_CLOCK_SM"""
_MAX_PROCESSES = 256
"""More processes than one GPU has."""
_UNKNOWN = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE"""


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


class ClockSamples(NvmlSamples):
    """Samples of clock (``mhz``) and power (``milliwatts``; None: the device does not tell), and energy in between."""

    def __init__(self, library: Any = None, seconds: float = SAMPLE_SECONDS) -> None:
        super().__init__(library, seconds)
        self._energy: dict[int, tuple[int, int]] = {}  # of each device, Unix ns and millijoules of its last sample
        self._rows: list[tuple[int, int, int, float]] = []  # device, start and end (Unix ns), joules

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

    def _figures(self, device: int, handle: c_void_p, now_ns: int) -> dict[str, int | None] | None:
        clock, power, energy = c_uint(), c_uint(), c_ulonglong()
        if not self._ask("nvmlDeviceGetTotalEnergyConsumption", handle, byref(energy)):
            before = self._energy.get(device)
            self._energy[device] = now_ns, energy.value
            if before is not None and energy.value >= before[1]:  # it counts from 0 when the driver is loaded
                self._rows.append((device, before[0], now_ns, (energy.value - before[1]) / 1000))
        if self._ask("nvmlDeviceGetClockInfo", handle, c_int(_SM), byref(clock)):
            return None
        known = not self._ask("nvmlDeviceGetPowerUsage", handle, byref(power))
        return {"mhz": clock.value, "milliwatts": power.value if known else None}


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, since version 2 of the functions."""

    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class ProcessMemorySamples(NvmlSamples):
    """Samples of the bytes that this process holds (``bytes``)."""

    def _figures(self, device: int, handle: c_void_p, now_ns: int) -> dict[str, int | None] | None:  # noqa: ARG002
        processes, count = (_Process * _MAX_PROCESSES)(), c_uint(_MAX_PROCESSES)
        # of drivers since 510
        if self._ask("nvmlDeviceGetComputeRunningProcesses_v3", handle, byref(count), processes):
            return None
        own = os.getpid()
        used = [int(row.used) for row in processes[: count.value] if row.pid == own and row.used != _UNKNOWN]
        return {"bytes": max(used)} if used else None
