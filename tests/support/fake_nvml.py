"""A driver and an NVML that are made of Python, of which tests add what they sample."""

from __future__ import annotations

from typing import Any


class FakeDriver:
    """Two devices, of which the program uses the second: CUDA's number 1, at bus ``0000:0A``."""

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def cuDevicePrimaryCtxGetState(self, device: Any, _flags: Any, active: Any) -> int:  # noqa: N802
        active._obj.value = device.value == 1
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, _size: Any, device: Any) -> int:  # noqa: N802
        text.value = b"0000:0A" if device.value == 1 else b"0000:0B"
        return 0


class FakeNvml:
    """Devices by bus."""

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 7 if bus.value == b"0000:0A" else 0
        return 0 if handle._obj.value else 6
