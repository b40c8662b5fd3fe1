"""What this process holds of each GPU's memory, as the driver counts it, sampled through NVML.

It is more than what the allocator of a framework holds: CUDA's context, code of kernels, NCCL's buffers and what
libraries allocate themselves are in it. Where NVML does not show this process, as in containers whose processes have
other numbers outside, there are no samples.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_uint, c_ulonglong
from typing import TYPE_CHECKING

from thence.capture.cuda.nvml import NvmlSamples

if TYPE_CHECKING:
    from ctypes import c_void_p

_MAX_PROCESSES = 256
"""More processes than one GPU has."""
_UNKNOWN = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE"""


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
