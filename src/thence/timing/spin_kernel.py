"""A spin kernel that keeps a stream busy for a given time, so that the host can run ahead of the GPU.

An event on an idle stream completes immediately, but the host needs about 20 us to launch the operation
after it. The time between two events would then include the launch. With the spin kernel before the first
event, the operation is already queued when the event completes.

The kernel is PTX, which the driver compiles, so no other compiler is needed.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p
from typing import Any

from thence.capture.cuda.cuda_events import call

KERNEL_NAME = "thence_head_start"
_PTX = """
.version {version}
.target {target}
.address_size 64
.visible .entry thence_head_start(.param .u64 nanoseconds)
{{
    .reg .pred %early;
    .reg .u64 %duration, %now, %end;
    ld.param.u64 %duration, [nanoseconds];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %duration;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}}
"""
_TARGETS = (((7, 5), "6.3", "sm_75"), ((0, 0), "6.0", "sm_50"))
"""Oldest compute capability, PTX version and target: drivers translate PTX for any later device."""
_CAPABILITY = (75, 76)
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR"""


class HeadStart:
    """Launches the spin kernel, which is compiled once for each context that it is used in."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._functions: dict[int | None, c_void_p] = {}

    def hold(self, stream: int, nanoseconds: int) -> None:
        """Launches the kernel on a stream.

        Args:
            stream: the CUstream to keep busy; 0: the default stream of the current context.
            nanoseconds: how long the kernel runs; 0: as long as an empty kernel.

        Raises:
            MissingRequirement: a call of the driver failed.
        """
        context = c_void_p()
        call(self._driver, "cuStreamGetCtx", c_void_p(stream), byref(context))
        call(self._driver, "cuCtxPushCurrent_v2", context)
        try:
            if context.value not in self._functions:
                self._functions[context.value] = self._load_function()
            duration = c_uint64(nanoseconds)
            parameters = (c_void_p * 1)(ctypes.addressof(duration))
            ones = (c_uint(1),) * 6  # a grid of one block, a block of one thread
            function, on = self._functions[context.value], c_void_p(stream)
            call(self._driver, "cuLaunchKernel", function, *ones, c_uint(0), on, parameters, None)
        finally:
            call(self._driver, "cuCtxPopCurrent_v2", byref(c_void_p()))

    def _load_function(self) -> c_void_p:
        device, module, function = c_int(), c_void_p(), c_void_p()
        call(self._driver, "cuCtxGetDevice", byref(device))
        code = _ptx(capability(self._driver, device.value))
        call(self._driver, "cuModuleLoadData", byref(module), c_char_p(code))
        name = c_char_p(KERNEL_NAME.encode())
        call(self._driver, "cuModuleGetFunction", byref(function), module, name)
        return function


def capability(driver: Any, device: int) -> tuple[int, int]:
    """Compute capability of a device, such as (9, 0).

    Raises:
        MissingRequirement: a call of the driver failed.
    """
    major, minor = c_int(), c_int()
    for number, attribute in zip((major, minor), _CAPABILITY, strict=True):
        call(driver, "cuDeviceGetAttribute", byref(number), c_int(attribute), c_int(device))
    return major.value, minor.value


def _ptx(device: tuple[int, int]) -> bytes:
    version, target = next((v, target) for oldest, v, target in _TARGETS if device >= oldest)
    return _PTX.format(version=version, target=target).encode()
