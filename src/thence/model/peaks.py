"""What a GPU can do at most: dense FLOP/s by data type, and bytes/s of its memory, each with its source.

The peak of a data type is multiprocessors x FLOP of a multiprocessor in a cycle x clock, without sparsity. NVIDIA's
data sheets state peaks with sparsity, which are twice these, and round. FLOP in a cycle are those of NVIDIA's
architecture white papers (A100, H100, Ada, Blackwell), clocks the boost clocks that the data sheet's figures follow
from: for tensor cores of the H100 that is 1.83 GHz, although the chip can run at 1.98 GHz. A GPU that is not listed has
no peak, because a guess would be believed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8", "int8")
"""Data types that a kernel multiplies in. float32 is computed by CUDA cores, tf32 by tensor cores."""

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8"}
)
"""Short names of data types that users write, and the names in `DTYPES`."""
_CYCLE: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        # float64 by tensor cores; 8.6 and 8.9 have none for it, and two units a multiprocessor
        "8.0": {"float64": 128, "float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048, "int8": 4096},
        "8.6": {"float64": 4, "float32": 256, "tf32": 512, "bfloat16": 1024, "float16": 1024, "int8": 2048},
        "8.9": {
            "float64": 4,
            "float32": 256,
            "tf32": 512,
            "bfloat16": 1024,
            "float16": 1024,
            "float8": 2048,
            "int8": 2048,
        },
        "9.0": {
            "float64": 256,
            "float32": 256,
            "tf32": 2048,
            "bfloat16": 4096,
            "float16": 4096,
            "float8": 8192,
            "int8": 8192,
        },
        "10.0": {
            "float64": 128,
            "float32": 256,
            "tf32": 4096,
            "bfloat16": 8192,
            "float16": 8192,
            "float8": 16384,
            "int8": 16384,
        },
    }
)
"""Dense FLOP of a multiprocessor in a cycle, by compute capability."""

SUB_PARTITIONS = 4
"""Of a multiprocessor; each has a tensor core."""
_COUNTED_TENSORS = ("9.0",)
"""Compute capabilities of which known products were seen to count so many cycles."""
_VECTOR = ("float64", "float32")


@dataclass(frozen=True)
class _Gpu:
    """A GPU: its driver's name for it, multiprocessors, clocks in GHz, and GB/s.

    ``clock`` is that of the tensor cores' peaks, ``vector_clock`` that of float64 and float32. ``cache`` is the L2
    cache in MiB, ``gpu_link`` and ``host_link`` are GB/s in one direction: half of what data sheets state.
    """

    name: str
    sms: int
    capability: str
    clock: float
    gbps: float
    cache: int
    gpu_link: float | None
    host_link: float
    vector_clock: float | None = None


_NVIDIA = (
    _Gpu(r"A100-SXM4-40GB|A100-PCI[Ee]-40GB", 108, "8.0", 1.41, 1555, 40, 300, 32),
    _Gpu(r"A100-SXM4-80GB|A100-SXM-80GB", 108, "8.0", 1.41, 2039, 40, 300, 32),
    _Gpu(r"A100 80GB PCIe", 108, "8.0", 1.41, 1935, 40, 300, 32),
    _Gpu(r"A10\b", 72, "8.6", 1.695, 600, 6, None, 32),
    _Gpu(r"L4\b", 58, "8.9", 2.04, 300, 48, None, 32),
    _Gpu(r"L40S\b", 142, "8.9", 2.52, 864, 96, None, 32),
    _Gpu(r"H100 PCIe", 114, "9.0", 1.62, 2039, 50, 300, 64, 1.755),
    _Gpu(r"H100 NVL", 132, "9.0", 1.545, 3938, 50, 300, 64, 1.785),
    _Gpu(r"H100 80GB HBM3|H100 SXM", 132, "9.0", 1.83, 3352, 50, 450, 64, 1.98),
    _Gpu(r"H200 NVL", 132, "9.0", 1.545, 4814, 50, 450, 64, 1.785),
    _Gpu(r"H200\b", 132, "9.0", 1.83, 4814, 50, 450, 64, 1.98),
    _Gpu(r"B200\b", 148, "10.0", 1.85, 8000, 126, 900, 128, 1.965),
)
"""The first whose name is found in the driver's decides; more specific names stand first."""

_MI300 = {
    "float64": 163.4,
    "float32": 163.4,
    "tf32": 653.7,
    "bfloat16": 1307.4,
    "float16": 1307.4,
    "float8": 2614.9,
    "int8": 2614.9,
}
_MI355 = {"float64": 78.6, "float32": 157.3, "bfloat16": 2516.6, "float16": 2516.6, "float8": 5033.2, "int8": 5033.2}
_AMD = (("MI300X", _MI300, 5300, 448), ("MI325X", _MI300, 6000, 448), ("MI355X", _MI355, 8000, 538))
"""Name, dense TFLOP/s of the matrix cores, GB/s of memory and of the links to other GPUs in one direction, from AMD's
data sheets (float32 of matrix cores, too)."""
_AMD_CACHE, _AMD_HOST_LINK = 256, 64  # MiB of Infinity Cache; GB/s of PCIe 5 x16 in one direction


@dataclass(frozen=True)
class Peaks:
    """What a device can do at most.

    Attributes:
        device: its name.
        tflops: dense TFLOP/s (10^12) by data type; a type that is missing here has no known peak.
        gbps: GB/s (10^9 bytes) of its memory; None if unknown.
        source: where the numbers come from, a part of a sentence.
        cache_bytes: of its last cache; None if unknown.
        gpu_link: GB/s in one direction of its links to other GPUs of the host; None if unknown.
        host_link: GB/s in one direction of its link to the host; None if unknown.
    """

    device: str
    tflops: Mapping[str, float]
    gbps: float | None
    source: str
    cache_bytes: int | None = None
    gpu_link: float | None = None
    host_link: float | None = None


def peaks_of(device: str) -> Peaks | None:
    """The peaks of a GPU by the name that its driver gives it; None for a GPU that is not known."""
    gpu = _listed(device)
    if gpu is not None:
        return _by_rule(device, gpu)
    for name, tflops, gbps, link in _AMD:
        if name in device:
            rates = MappingProxyType(dict(tflops))
            return Peaks(device, rates, gbps, "AMD's data sheet", _AMD_CACHE << 20, link, _AMD_HOST_LINK)
    return None


def _listed(device: str) -> _Gpu | None:
    return next((gpu for gpu in _NVIDIA if re.search(gpu.name, device)), None)


def tensor_flop_in_cycle(capability: str | None) -> int | None:
    """FLOP of 16-bit types in a cycle that the hardware's counter of tensor cores counts; None where it is not known.

    The counter sums over the four sub-partitions of each multiprocessor. On a compute capability of 9.0 a product of
    1024^3 counts 2 x 1024^3 / 1024 cycles, to the last digit.
    """
    if capability not in _COUNTED_TENSORS:
        return None
    return _CYCLE[capability]["bfloat16"] // SUB_PARTITIONS


def clock_of_peaks(device: str) -> float | None:
    """The clock in MHz at which the peaks of a GPU's tensor cores hold; None where it is not known."""
    gpu = _listed(device)
    return None if gpu is None else 1e3 * gpu.clock


def peaks_at_clock(device: str, mhz: float) -> Peaks | None:
    """The peaks of a GPU while its multiprocessors run at a clock; None if no clock is known for its peaks.

    Args:
        device: the name that its driver gives it.
        mhz: the clock.
    """
    gpu = _listed(device)
    if gpu is None or not 0 < mhz < _MAX_MHZ:
        return None
    peaks = _by_rule(device, replace(gpu, clock=mhz / 1e3, vector_clock=mhz / 1e3))
    return replace(peaks, source=f"at {mhz:,.0f} MHz, the clock that was sampled while it was recorded")


def measured_peaks_of(device: str, measured: Mapping[str, Any]) -> Peaks | None:
    """The peaks that `thence record --with peaks` kept, if they are those of this GPU.

    Args:
        device: the name that its driver gives it.
        measured: ``device``, ``gbps``, and the TFLOP/s of data types.
    """
    numbers = {name: float(n) for name, n in measured.items() if isinstance(n, int | float) and 0 < n < math.inf}
    gbps = numbers.pop("gbps", None)
    tflops = {name: n for name, n in numbers.items() if name in DTYPES}
    if measured.get("device") != device or gbps is None or not tflops:
        return None
    return Peaks(device, MappingProxyType(tflops), gbps, "measured on this machine before it was recorded")


_MAX_MHZ = 10_000


def _by_rule(device: str, gpu: _Gpu) -> Peaks:
    vector = gpu.vector_clock or gpu.clock
    tflops = {
        dtype: gpu.sms * flop * (vector if dtype in _VECTOR else gpu.clock) / 1e3
        for dtype, flop in _CYCLE[gpu.capability].items()
    }
    source = f"{gpu.sms} multiprocessors x dense FLOP in a cycle x {gpu.clock} GHz, as NVIDIA's data sheet"
    links = gpu.gpu_link or gpu.host_link, gpu.host_link
    return Peaks(device, MappingProxyType(tflops), gpu.gbps, source, gpu.cache << 20, *links)
