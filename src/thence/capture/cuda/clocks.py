"""Clock, power and energy of each GPU while it is recorded, sampled through NVML.

Peaks on data sheets hold at one clock. A GPU at its power limit runs tensor cores slower, and one without may run
faster, so a share of the peak means little without the clock. The energy between two samples is a row of the table
``counters``. NVML takes no part in what runs on the device. Everything here is best effort: without NVML there are no
samples, and a GPU that does not tell its energy has no rows.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_uint, c_ulonglong
from typing import TYPE_CHECKING, Any

import numpy as np

from thence.capture.cuda.nvml import SAMPLE_SECONDS, NvmlSamples
from thence.model.counter_names import ENERGY

if TYPE_CHECKING:
    from ctypes import c_void_p

_SM = 1
"""NVML_CLOCK_SM"""


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
