"""Waits for the devices before a recording ends, without creating contexts and without hanging."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

from thence.capture.cuda.cuda_events import load_driver, served_cuda
from thence.errors import MissingRequirement

if TYPE_CHECKING:
    from collections.abc import Iterator

_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MAJOR, _MINOR = 75, 76
"""CUdevice_attribute"""


def synchronize(patience_seconds: float) -> bool:
    """Wait until every device that this process uses is idle; returns False if that takes too long.

    Only primary contexts that exist are synchronised: PyTorch, JAX and the CUDA runtime use these.
    A separate thread waits, because a device that hangs would otherwise keep the program from ending.
    """
    try:
        driver = load_driver()
    except MissingRequirement:
        return True
    thread = threading.Thread(target=_wait, args=(driver,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no threads
        return True
    thread.join(patience_seconds)
    return not thread.is_alive()


def _wait(driver: Any) -> None:
    for context in primary_contexts(driver):
        if not driver.cuCtxPushCurrent_v2(c_void_p(context)):
            driver.cuCtxSynchronize()
            driver.cuCtxPopCurrent_v2(byref(c_void_p()))


def primary_contexts(driver: Any) -> Iterator[int]:
    """The primary contexts that exist; each is retained until the next one is asked for."""
    for device in active_devices(driver):
        context = c_void_p()
        if driver.cuDevicePrimaryCtxRetain(byref(context), c_int(device)) or not context.value:
            continue
        try:
            yield context.value
        finally:
            driver.cuDevicePrimaryCtxRelease_v2(c_int(device))


def driver_version() -> str | None:
    """The newest CUDA version that the driver supports, such as ``13.0``; None without a driver."""
    served = served_cuda()
    return None if served is None else f"{served[0]}.{served[1]}"


def devices() -> list[dict[str, Any]]:
    """Every device that this process uses: index, name, memory in bytes, multiprocessors, compute capability."""
    try:
        driver = load_driver()
    except MissingRequirement:
        return []
    return [_device(driver, device) for device in active_devices(driver)]


def active_devices(driver: Any) -> list[int]:
    """Devices whose primary context exists; none before the program has initialised CUDA."""
    count = c_int()
    if driver.cuDeviceGetCount(byref(count)):
        return []
    devices = []
    for device in range(count.value):
        flags, active = c_uint(), c_int()
        if not driver.cuDevicePrimaryCtxGetState(c_int(device), byref(flags), byref(active)):
            devices += [device] if active.value else []
    return devices


def _device(driver: Any, device: int) -> dict[str, Any]:
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    driver.cuDeviceGetName(name, c_int(len(name)), c_int(device))
    driver.cuDeviceTotalMem_v2(byref(memory), c_int(device))
    numbers = []
    for attribute in (_MULTIPROCESSORS, _MAJOR, _MINOR):
        value = c_int()
        driver.cuDeviceGetAttribute(byref(value), c_int(attribute), c_int(device))
        numbers.append(value.value)
    return {
        "device": device,
        "name": name.value.decode(errors="replace"),
        "memory_bytes": memory.value,
        "multiprocessors": numbers[0],
        "compute_capability": f"{numbers[1]}.{numbers[2]}",
    }
