"""What this process holds of each GPU's memory, as the driver counts it, sampled through NVML.

It is more than what the allocator of a framework holds: CUDA's context, code of kernels, NCCL's buffers and what
libraries allocate themselves are in it. Where NVML does not show this process, as in containers whose processes have
other numbers outside, there are no samples.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_uint, c_ulonglong
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.nvml import NvmlSamples

if TYPE_CHECKING:
    from ctypes import c_void_p

_MOST_PROCESSES = 256
"""More processes than one GPU has."""
_UNKNOWN = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE"""


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, since version 2 of the functions."""

    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


def process_memory_samples(library: Any = None) -> NvmlSamples:
    """Samples of the bytes that this process holds; `library` is NVML, as `NvmlSamples` takes it."""
    return NvmlSamples("bytes", _used, library)


def _used(library: Any, handle: c_void_p) -> int | None:
    processes, count = (_Process * _MOST_PROCESSES)(), c_uint(_MOST_PROCESSES)
    function = getattr(library, "nvmlDeviceGetComputeRunningProcesses_v3", None)  # of drivers since 510
    if function is None or function(handle, byref(count), processes):
        return None
    own = os.getpid()
    found = [int(row.used) for row in processes[: count.value] if row.pid == own and row.used != _UNKNOWN]
    return max(found, default=None)
